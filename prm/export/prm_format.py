"""A prm checkpoint: a verified copy of one that training wrote, or a new one of a model that was rebuilt."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from prm import store
from prm.checkpoints import RewardCheckpoint, compare_probes, open_checkpoint, probe_scores, read_info, save_checkpoint
from prm.errors import UserError


def copy_checkpoint(
    path: str | Path, out: str | Path, *, allow_code: Sequence[str] = (), overwrite: bool = False
) -> RewardCheckpoint:
    """Copy a checkpoint, reopen the copy, compare its scores with those it was written with, and only then keep it.

    Raises:
        UserError: damaged, another backbone, `out` is taken or overlaps the checkpoint.
    """
    path, out = Path(path), Path(out)
    read_info(path)
    with store.atomic_directory(out, overwrite=overwrite) as directory:
        shutil.copytree(path, directory, dirs_exist_ok=True)
        opened = open_checkpoint(directory, allow_code=allow_code)
        check_scores(opened, path)
    return RewardCheckpoint(out, opened.info, opened.backbone, opened.head, opened.users, opened.formatter)


def check_scores(opened: RewardCheckpoint, path: Path) -> None:
    """Raise UserError unless an opened checkpoint scores the probe texts as when it was written."""
    info = opened.info
    # A build for CUDA may have scored on a GPU, whose kernels round otherwise.
    cuda = not str(info.get("versions", {}).get("torch", "")).endswith("+cpu")
    try:
        compare_probes(info["probe"], probe_scores(opened), info["dtype"], path, cuda=cuda)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} does not give the scores it was written with: it is damaged, or libraries have changed"
        ) from error


def write_checkpoint(live: RewardCheckpoint, out: str | Path, *, overwrite: bool = False) -> RewardCheckpoint:
    """A checkpoint of a rebuilt model; it was reloaded and gave the same scores."""
    save_checkpoint(
        out,
        backbone=live.backbone,
        head=live.head,
        users=live.users,
        formatter=live.formatter,
        info=live.info,
        overwrite=overwrite,
    )
    return RewardCheckpoint(Path(out), read_info(out), live.backbone, live.head, live.users, live.formatter)
