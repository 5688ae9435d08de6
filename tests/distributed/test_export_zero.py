"""prm export of native ZeRO directories, as two ranks write them."""

import json
import os
import shutil
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
TENSORS = ("head.safetensors", "adapter/adapter_model.safetensors", "users/part-0.safetensors")
SAVER = """
from lightning.pytorch.callbacks import Callback


class SaveNative(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_llama_path):
    """A dataset, a configuration, and a callback that saves as Lightning does under DeepSpeed."""
    root = tmp_path_factory.mktemp("zero")
    pairs = []
    for number in range(3):
        for i in range(8):
            titles = (f"On matter {i}", f"Matter {i}: why does it matter?")
            chosen, rejected = titles[:: 1 if number % 2 else -1]
            prompt = user_prompt(f"Title of abstract {i}")
            pairs.append(PreferencePair(f"{number}/{i}", f"user-{number}", "train", prompt, chosen, rejected))
    users = [User(f"user-{number}", "train") for number in range(3)]
    write_dataset(
        root / "data", name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0
    )
    config = {
        "model": {
            "backbone": str(tiny_llama_path),
            # Sizes that two ranks do not divide.
            "lora": {"r": 3, "alpha": 6},
            "reward_model": {"class_path": "prm.reward_models.LoRE", "init_args": {"num_bases": 5}},
            "adapter_lr": 1e-2,
            "user_lr": 1e-1,
        },
        "data": {"data": str(root / "data"), "batch_size": 2, "max_length": 64},
        "trainer": {"accelerator": "cpu", "max_steps": 3, "logger": False},
        "resume_every": 0,
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    (root / "savenative.py").write_text(SAVER)
    return root


@pytest.mark.parametrize("stage", [2, 3])
def test_a_zero_directory_gives_the_checkpoint_that_training_wrote(place, capsys, stage):
    run = place / f"stage-{stage}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "DS_"))}
    options = ["--config", place / "config.yaml", "--run_dir", run, "--trainer.strategy", f"deepspeed_stage_{stage}"]
    options += ["--trainer.callbacks", "savenative.SaveNative", "--trainer.callbacks.path", run / "native"]
    done = subprocess.run(
        [*TORCHRUN, str(ROOT / "recipes/reward_model.py"), "fit", *map(str, options)],
        capture_output=True, text=True, timeout=300, env=environment | {"PYTHONPATH": str(place)}, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((run / "native/checkpoint").glob("*_optim_states.pt"))) == 2
    # What lies in the directory is never run.
    (run / "native/zero_to_fp32.py").write_text("raise SystemExit('was run')\n")

    native, out = str(run / "native"), place / f"out-{stage}"
    assert main(["export", native, "--out", str(out)]) == 2
    assert "--trust-pickle" in capsys.readouterr().err and not out.exists()
    assert main(["export", native, "--out", str(out), "--trust-pickle", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["source"] == "zero"

    last = run / "checkpoints/last"
    for file in TENSORS:
        ours, theirs = load_file(out / file), load_file(last / file)
        assert ours.keys() == theirs.keys() and ours
        for name, value in ours.items():
            assert value.numel() and torch.equal(value, theirs[name]), f"{file}: {name}"
    assert any(value.abs().max() > 1e-3 for name, value in load_file(out / TENSORS[1]).items() if "lora_B" in name)
    exported, written = open_checkpoint(out), open_checkpoint(last)
    rows = [(user_prompt("Title of abstract 3"), "On matter 3")] * 3
    assert exported.users.ids == ["user-0", "user-1", "user-2"]
    assert (exported.rewards(exported.users.ids, rows) == written.rewards(exported.users.ids, rows)).all()
    assert exported.info["data"] == written.info["data"]

    # One rank's file is missing, then damaged.
    shutil.rmtree(out)
    part = next((run / "native/checkpoint").glob("*rank_1_*optim_states.pt"))
    whole = part.read_bytes()
    for damaged in (whole[:100], None):
        part.unlink()
        if damaged is not None:
            part.write_bytes(damaged)
        assert main(["export", native, "--out", str(out), "--trust-pickle"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be gathered" in line and not out.exists()
