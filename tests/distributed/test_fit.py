"""The recipe under torchrun with two ranks, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from prm.checkpoints import open_checkpoint
from prm.dataset_dir import write_dataset
from prm.records import PreferencePair, User, user_prompt

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = [str(ROOT / "recipes/reward_model.py"), "fit"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_llama_path):
    """A directory with a dataset of mirrored users and a config of eight pairs a step."""
    root = tmp_path_factory.mktemp("fit")
    pairs, users = [], []
    for number in range(4):
        user = f"user-{number}"
        users.append(User(user, "train"))
        for i in range(20 + number):
            titles = (f"On matter {i}", f"Matter {i}: why does it matter?")
            chosen, rejected = titles[:: 1 if number % 2 else -1]
            split = "train" if i >= 4 else "validation"
            prompt = user_prompt(f"Title of abstract {i}")
            pairs.append(PreferencePair(f"{user}/{i}", user, split, prompt, chosen, rejected))
    write_dataset(
        root / "data", name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0
    )
    config = {
        "model": {
            "backbone": str(tiny_llama_path),
            "lora": {"r": 4, "alpha": 8},
            "reward_model": {"class_path": "prm.reward_models.lore.LoRE", "init_args": {"num_bases": 3}},
            "head_lr": 1e-2,
            "user_lr": 1e-1,
        },
        "data": {"data": str(root / "data"), "batch_size": 4, "max_length": 64},
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 2, "logger": False},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


def run(place: Path, command: list[str], *options: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "DS_"))}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db"}
    config = ["--config", str(place / "config.yaml")]
    return subprocess.run(
        [*command, *RECIPE, *config, *options], capture_output=True, text=True, timeout=500, env=environment, cwd=place
    )


def trained(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint."""
    last = directory / "checkpoints/last"
    files = ("head.safetensors", "adapter/adapter_model.safetensors", "users/part-0.safetensors")
    return {f"{file}:{k}": v for file in files for k, v in load_file(last / file).items()}


@pytest.fixture(scope="module")
def one_rank(place):
    """What one rank gets that accumulates two batches a step."""
    done = run(place, [sys.executable], "--run_dir", "one", "--trainer.accumulate_grad_batches", "2")
    assert done.returncode == 0, done.stderr
    return trained(place / "one")


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_2"])
def test_two_ranks_train_what_one_rank_trains(place, one_rank, strategy):
    done = run(place, TORCHRUN, "--run_dir", strategy, "--trainer.strategy", strategy, "--trainer.logger", "true")
    assert done.returncode == 0, done.stderr
    two = trained(place / strategy)
    assert two.keys() == one_rank.keys()
    assert all(value.numel() for value in two.values())
    worst = max((two[name] - one_rank[name]).abs().max().item() for name in two)
    assert worst < 2e-5
    assert "validation accuracy" in done.stderr
    assert ("DeepSpeed ZeRO stage 2 on CPU" in done.stderr) == (strategy != "ddp")

    for name in ("best", "last"):
        checkpoint = open_checkpoint(place / strategy / "checkpoints" / name)
        assert checkpoint.users.ids == [f"user-{i}" for i in range(4)]
    record = json.loads((place / strategy / "mlflow.json").read_text())
    assert checkpoint.info["mlflow_run_id"] == record["run_id"]
    assert checkpoint.info["run_uuid"] == record["run_uuid"]
    metrics = [json.loads(line) for line in (place / strategy / "metrics.jsonl").read_text().splitlines()]
    logged = {row["name"] for row in metrics}
    assert {"train/loss", "validation/loss", "preferences/rm_accuracy", "lr/users", "data/train_pairs"} <= logged
    config = yaml.safe_load((place / strategy / "config.yaml").read_text())
    assert config["trainer"]["devices"] == 2


def test_a_wrong_key_is_one_line_and_leaves_nothing(place):
    done = run(place, TORCHRUN, "--run_dir", "wrong", "--model.adaptor_lr", "1e-3")
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("prm: error:")]
    assert len(ours) == 1
    assert "model.adaptor_lr" in ours[0]
    assert 'reward_model.py", line' not in done.stderr
    # torchrun's own block comes last, and names the cause too.
    assert ours[0] in done.stderr.splitlines()[-2]
    assert not (place / "wrong").exists()
