"""Where the weights to export are: a prm checkpoint, a resume state, or a native ZeRO directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prm.errors import UserError
from prm.export.zero import is_zero_directory
from prm.training.states import newest_state

WHICH = ("best", "last", "resume")


@dataclass(frozen=True)
class Source:
    """Weights on disk.

    Attributes:
        kind: "checkpoint", "resume" (a resume state) or "zero" (a native ZeRO directory).
        path: its directory.
        run: the run directory it belongs to; None for a checkpoint that stands alone.
    """

    kind: str
    path: Path
    run: Path | None = None


def find_source(path: str | Path, *, which: str | None = None, run: str | Path | None = None) -> Source:
    """What is at `path`.

    Args:
        path: a run directory, a prm checkpoint, a resume state or a native ZeRO directory.
        which: of a run directory, "best" (the default), "last" or "resume" (the newest whole resume state).
        run: of a ZeRO directory, the run directory whose config.yaml describes it; None takes the nearest above it.

    Raises:
        UserError: nothing of the kind is there, or an option that belongs to another kind was given.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}: give a run directory, a prm checkpoint or a native ZeRO directory")
    if (path / "config.yaml").is_file() and ((path / "checkpoints").is_dir() or (path / "resume").is_dir()):
        _refuse(run=run)
        return _in_run(path, which or "best")
    _refuse(which=which)
    if is_zero_directory(path):
        return Source("zero", path, _run_of(path, run))
    _refuse(run=run)
    if (path / "prm.json").is_file():
        return Source("checkpoint", path)
    if (path / "state.json").is_file():
        return Source("resume", path, path.resolve().parents[1])
    raise UserError(
        f"{path} is neither a run directory (config.yaml with checkpoints or resume states), nor a prm checkpoint, "
        "nor a native ZeRO directory"
    )


def _refuse(which: str | None = None, run: str | Path | None = None) -> None:
    if which is not None:
        raise UserError(f"--which {which} chooses within a run directory: leave it out, or give the run directory")
    if run is not None:
        raise UserError("--run belongs to a native ZeRO directory: leave it out")


def _in_run(run: Path, which: str) -> Source:
    if which == "resume":
        state = newest_state(run)
        if state is None:
            raise UserError(f"{run} holds no whole resume state: export another one with --which best or last")
        return Source("resume", state.path, run)
    checkpoint = run / "checkpoints" / which
    if checkpoint.is_dir():
        return Source("checkpoint", checkpoint, run)
    folder = run / "resume"
    steps = [p.name for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    others = [name for name in WHICH[:2] if (run / "checkpoints" / name).is_dir()]
    if steps:
        others.append(f"resume (step {max(map(int, steps))})")
    hint = f"pass --which {' or '.join(others)}" if others else "it was stopped before it had saved anything"
    raise UserError(f"{run} holds no checkpoints/{which}: {hint}")


def _run_of(path: Path, run: str | Path | None) -> Path:
    """The run directory of a ZeRO directory."""
    if run is not None:
        if not (Path(run) / "config.yaml").is_file():
            raise UserError(f"--run {run}: it holds no config.yaml, so it is not a run directory")
        return Path(run)
    for parent in path.resolve().parents:
        if (parent / "config.yaml").is_file():
            return parent
    raise UserError(f"no directory above {path} holds a config.yaml: name its run directory with --run")


def refuse_overlap(out: str | Path, *kept: str | Path) -> None:
    """Raise UserError when `out` is, holds, or lies in one of the directories that are read."""
    target = Path(out).resolve()
    for path in kept:
        own = Path(path).resolve()
        if target == own or target in own.parents or own in target.parents:
            raise UserError(f"--out {out} overlaps {path}, which is read: choose another directory")
