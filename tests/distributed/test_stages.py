"""ZeRO stages 1, 2 and 3 with LoRA on a real model, in float32 and bfloat16, through the recipe on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from prm.checkpoints import open_checkpoint
from prm.cli import main
from prm.dataset_dir import write_dataset
from prm.records import PreferencePair, User, user_prompt

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
USERS = [f"user-{number}" for number in range(3)]


@pytest.fixture(scope="module")
def place(tmp_path_factory, smollm2_path):
    """A dataset of three users, which two ranks do not divide, and a config of three steps of four pairs."""
    root = tmp_path_factory.mktemp("stages")
    pairs = [
        PreferencePair(f"{user}/{i}", user, "train", user_prompt(f"Title of abstract {i}"), *titles[:: 1 - 2 * (n % 2)])
        for n, user in enumerate(USERS)
        for i, titles in enumerate((f"On matter {i}", f"Why does matter {i} matter?") for i in range(6))
    ]
    users = [User(user, "train") for user in USERS]
    write_dataset(
        root / "data", name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0
    )
    config = {
        "model": {
            "backbone": str(smollm2_path),
            "lora": {"r": 8, "alpha": 16},
            "reward_model": {"class_path": "prm.reward_models.LoRE", "init_args": {"num_bases": 3}},
            "adapter_lr": 1e-3,
        },
        "data": {"data": str(root / "data"), "batch_size": 2, "max_length": 64},
        "trainer": {"accelerator": "cpu", "max_steps": 3, "limit_val_batches": 0, "logger": False},
        "resume_every": 0,
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def trained(place):
    """By stage and dtype: the run's last checkpoint, and its tensors by name."""
    known: dict[tuple[int, str], tuple[Path, dict[str, torch.Tensor]]] = {}

    def train(stage: int, dtype: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if (stage, dtype) not in known:
            directory = place / f"{stage}-{dtype}"
            options = ["--run_dir", directory.name, "--model.dtype", dtype]
            options += ["--trainer.strategy", f"deepspeed_stage_{stage}"]
            environment = {k: v for k, v in os.environ.items() if not k.startswith("DS_")}
            recipe = [str(ROOT / "recipes/reward_model.py"), "fit", "--config", str(place / "config.yaml")]
            done = subprocess.run(
                [*TORCHRUN, *recipe, *options], capture_output=True, text=True, timeout=500, env=environment, cwd=place
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert f"DeepSpeed ZeRO stage {stage} on CPU" in done.stderr
            last = directory / "checkpoints/last"
            files = ("head.safetensors", "adapter/adapter_model.safetensors", "users/part-0.safetensors")
            known[stage, dtype] = last, {f"{file}:{k}": v for file in files for k, v in load_file(last / file).items()}
        return known[stage, dtype]

    return train


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_are_saved_whole_and_the_stages_agree(trained, stage, dtype):
    last, tensors = trained(stage, dtype)
    adapter = {name: value for name, value in tensors.items() if "lora_" in name}
    # 30 layers, two adapted projections or more, A and B of each; B starts at zero and has moved.
    assert len(adapter) >= 120
    assert all(value.numel() and value.dtype == torch.float32 for value in tensors.values())
    assert all(value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name)
    _, first = trained(1, dtype)
    assert tensors.keys() == first.keys()
    gaps = {name: (tensors[name] - first[name]).abs().max().item() for name in first}
    if stage < 3:
        assert max(gaps.values()) < 1e-5, max(gaps, key=gaps.get)
    # Stage 3 gathers weights elsewhere in memory and rounds otherwise, which Adam's first steps turn into another
    # direction where a gradient is next to nothing. So the movement as a whole is compared: B has started at zero.
    moved, other = (torch.cat([t[n].flatten() for n in sorted(adapter) if "lora_B" in n]) for t in (first, tensors))
    assert (moved - other).norm() < {"float32": 1e-3, "bfloat16": 0.05}[dtype] * moved.norm()
    assert open_checkpoint(last).users.ids == USERS


def test_what_stage_3_trained_scores_the_same_after_export(trained, tmp_path, capsys):
    from transformers import AutoModel, AutoTokenizer

    last, _ = trained(3, "float32")
    rows = [(user_prompt("Title of abstract 1"), title) for title in ("On matter 1", "Why does matter 1 matter?")]
    own = open_checkpoint(last).rewards(["user-1"] * 2, rows)

    assert main(["export", str(last.parents[1]), "--which", "last", "--out", str(tmp_path / "prm")]) == 0
    assert open_checkpoint(tmp_path / "prm").rewards(["user-1"] * 2, rows) == pytest.approx(own, abs=1e-5)

    assert main(["export", str(last), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    model, tokenizer = AutoModel.from_pretrained(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    bases = load_file(tmp_path / "hf/reward/head.safetensors")["bases"]
    states = load_file(tmp_path / "hf/reward/users/part-0.safetensors")["states"]
    formatter = open_checkpoint(last).formatter
    for (prompt, title), expected in zip(rows, own, strict=True):
        ids = formatter.encode(prompt, title).ids
        assert tokenizer.decode(ids).count(title) == 1
        with torch.inference_mode():
            feature = model(torch.tensor([ids])).last_hidden_state[0, -1]
        reward = states[USERS.index("user-1")].softmax(-1) @ (feature @ bases)
        assert reward.item() == pytest.approx(expected, abs=1e-3)
