"""Weights of a native ZeRO directory: what `trainer.save_checkpoint` writes under DeepSpeed.

    NAME/latest                       the name of the folder below
    NAME/checkpoint/*_states.pt       weights and optimizer partitions, one or two files a rank

Its files are pickles, and a pickle runs code when it is opened.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch
from torch import Tensor

from prm.errors import UserError
from prm.extras import installed_version

_STATES = "*_states.pt"
# What wrappers around the module put before its names.
_PREFIXES = re.compile(r"^(?:(?:module|_forward_module|_orig_mod)\.)+")


def is_zero_directory(path: str | Path) -> bool:
    """True for a directory with DeepSpeed's files in it, or in a folder of it."""
    path = Path(path)
    return any(path.glob(_STATES)) or any(path.glob(f"*/{_STATES}"))


def _folder(path: Path) -> Path:
    """The folder that holds the files."""
    if any(path.glob(_STATES)):
        return path
    latest = path / "latest"
    if latest.is_file():
        name = latest.read_text(encoding="utf-8").strip()
        if not any((path / name).glob(_STATES)):
            raise UserError(f"{latest} names {name!r}, which holds no {_STATES}: the ZeRO directory is not whole")
        return path / name
    folders = sorted({file.parent for file in path.glob(f"*/{_STATES}")})
    if len(folders) > 1:
        raise UserError(f"{path} holds {len(folders)} checkpoints ({folders[0].name}, ...) and no `latest`: name one")
    return folders[0]


def zero_weights(path: str | Path, *, trust_pickle: bool) -> dict[str, Tensor]:
    """Trainable weights by name, whole, float32, on the CPU, gathered by DeepSpeed's own conversion.

    The script zero_to_fp32.py inside the directory is never run.

    Raises:
        UserError: without `trust_pickle`; DeepSpeed is not installed; a file is missing or damaged.
    """
    path = Path(path)
    if not trust_pickle:
        raise UserError(
            f"{path} is a native ZeRO directory, whose files are pickles and run code when they are opened: pass "
            "--trust-pickle if you trust where it comes from"
        )
    if installed_version("deepspeed") is None:
        raise UserError("deepspeed is not installed: pip install 'prm-toolkit[train]'")
    folder = _folder(path).resolve()
    try:
        # DeepSpeed reports on stdout, its progress on stderr.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            found = get_fp32_state_dict_from_zero_checkpoint(
                str(folder.parent), tag=folder.name, exclude_frozen_parameters=True
            )
    except Exception as error:  # whatever pickle, torch and DeepSpeed raise on missing or damaged files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be gathered, a file is missing or damaged: {reason[:300]}") from error
    weights: dict[str, Tensor] = {}
    for name, value in found.items():
        bare = _PREFIXES.sub("", name)
        if bare in weights:
            raise UserError(f"{path} holds two weights named {bare}: it is not of this kind of model")
        weights[bare] = torch.as_tensor(value).detach().float().cpu().clone()
    return weights
