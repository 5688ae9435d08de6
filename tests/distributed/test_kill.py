"""Real runs ended by SIGKILL, then `--resume auto`: the weights at the end are those of an undisturbed run."""

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
ONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_llama_path):
    """A directory with a dataset of five users (an odd table to partition) and a config of two epochs of ten steps."""
    root = tmp_path_factory.mktemp("kill")
    pairs, users = [], []
    for number in range(5):
        user = f"user-{number}"
        users.append(User(user, "train"))
        for i in range(20):
            titles = (f"On matter {i}", f"Matter {i}: why does it matter?")
            chosen, rejected = titles[:: 1 if number % 2 else -1]
            split = "train" if i >= 4 else "validation"
            prompt = user_prompt(f"Title of abstract {i}" + " and more" * (i % 5))
            pairs.append(PreferencePair(f"{user}/{i}", user, split, prompt, chosen, rejected))
    write_dataset(
        root / "data", name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0
    )
    config = {
        "model": {
            "backbone": str(tiny_llama_path),
            "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
            "reward_model": {"class_path": "prm.reward_models.lore.LoRE", "init_args": {"num_bases": 3}},
            "head_lr": 1e-2,
            "user_lr": 1e-1,
            "schedule": "linear",
        },
        "data": {"data": str(root / "data"), "batch_size": 4, "max_length": 64},
        "trainer": {
            "accelerator": "cpu", "max_epochs": 2, "logger": False,
            # Far below the norms that come up, so that every step is clipped and none hides behind Adam.
            "gradient_clip_val": 0.02, "log_every_n_steps": 5,
        },
        "resume_every": 3,
    }  # fmt: skip
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


def run(place: Path, command: list[str], *options: str, kill: str | None = None, **arguments: int):
    """The recipe; `kill` names a callback of kills.py."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "DS_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    kills = [f"--trainer.callbacks+=kills.{kill}"] if kill else []
    kills += [f"--trainer.callbacks.{name}={value}" for name, value in arguments.items()]
    recipe = [str(ROOT / "recipes/reward_model.py"), "fit", "--config", str(place / "config.yaml")]
    done = subprocess.run(
        [*command, *recipe, *options, *kills],
        capture_output=True, text=True, timeout=400, env=environment, cwd=place,
    )  # fmt: skip
    if kill:
        # torchrun ends with 1 when a rank was killed.
        assert done.returncode == (1 if command is TWO else -9), done.stderr[-3000:]
    else:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def trained(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint, none of them empty."""
    last = directory / "checkpoints/last"
    files = ("head.safetensors", "adapter/adapter_model.safetensors", "users/part-0.safetensors")
    found = {f"{file}:{k}": v for file in files for k, v in load_file(last / file).items()}
    assert all(value.numel() for value in found.values())
    return found


def worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def states(directory: Path) -> list[str]:
    return sorted((p.name for p in (directory / "resume").iterdir() if not p.name.startswith(".")), key=int)


@pytest.fixture(scope="module")
def undisturbed(place):
    """One rank with dropout."""
    run(place, ONE, "--run_dir", "undisturbed", "--trainer.accumulate_grad_batches", "2")
    return trained(place / "undisturbed")


@pytest.mark.parametrize(
    ("name", "kill", "arguments", "left"),
    [
        ("mid-step", "KillInStep", {"step": 7}, ["3", "6"]),
        ("writing a state, half of its files", "KillInWriting", {"step": 9, "files": 2}, ["3", "6"]),
        ("writing a state, all but its name", "KillInWriting", {"step": 9, "files": 4}, ["3", "6"]),
        ("between epochs", "KillBetweenEpochs", {"epoch": 0}, ["6", "9"]),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) and " " in value else None,
)
def test_one_rank_ends_bit_for_bit_as_undisturbed(place, undisturbed, name, kill, arguments, left):
    options = ("--run_dir", f"{kill}-{'-'.join(map(str, arguments.values()))}", "--trainer.accumulate_grad_batches=2")
    run(place, ONE, *options, kill=kill, **arguments)
    directory = place / options[1]
    assert states(directory) == left
    assert not (directory / "checkpoints/last").exists()
    done = run(place, ONE, *options, "--resume", "auto")
    assert f"going on from step {left[-1]} of" in done.stderr
    ours = trained(directory)
    assert all(torch.equal(ours[key], value) for key, value in undisturbed.items())
    # What the kill left behind in writing is gone or hidden, and the run is complete.
    assert states(directory) == ["18", "20"]
    if kill == "KillInStep":
        again = run(place, ONE, *options, "--resume", "auto")
        assert "nothing was left to do" in again.stderr


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_may_change_on_the_way(place, stage):
    """Two ranks under ZeRO, killed; one rank (under ZeRO for stage 2), killed; two ranks under ZeRO to the end."""
    plain = ("--model.lora.dropout", "0")
    zero = (*plain, "--trainer.strategy", f"deepspeed_stage_{stage}")
    run(place, TWO, *zero, "--run_dir", f"whole-{stage}")
    here = ("--run_dir", f"parts-{stage}")
    run(place, TWO, *zero, *here, kill="KillInStep", step=8)
    assert states(place / here[1]) == ["3", "6"]
    one = (*(zero if stage == 2 else plain), *here, "--trainer.accumulate_grad_batches", "2", "--resume", "auto")
    run(place, ONE, *one, kill="KillInStep", step=14)
    assert states(place / here[1]) == ["9", "12"]
    done = run(place, TWO, *zero, *here, "--resume", "auto")
    assert "going on from step 12" in done.stderr
    assert worst(trained(place / here[1]), trained(place / f"whole-{stage}")) < 1e-6
    for name in ("best", "last"):
        assert open_checkpoint(place / here[1] / "checkpoints" / name).users.ids == [f"user-{i}" for i in range(5)]


def test_a_partitioned_load_trains_the_same(place):
    """Each rank reads its part of the weights, in bfloat16, whose rotary frequencies must stay float32."""
    zero = ("--trainer.strategy", "deepspeed_stage_3", "--model.dtype", "bfloat16", "--trainer.max_steps", "6")
    plain = ("--model.lora.dropout", "0", "--trainer.limit_val_batches", "0")
    run(place, TWO, *zero, *plain, "--run_dir", "loaded-whole")
    run(place, TWO, *zero, *plain, "--run_dir", "loaded-in-parts", "--model.load_partitioned", "true")
    assert worst(trained(place / "loaded-in-parts"), trained(place / "loaded-whole")) == 0.0
    assert open_checkpoint(place / "loaded-in-parts/checkpoints/last").info["verified"] == "tensors"
