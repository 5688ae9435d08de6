"""Reading resume states: which are whole, and what they hold. `resume` writes them and starts from them.

Nothing here needs a trainer, so a state can be read where there is none.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from prm import store
from prm.errors import UserError

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
FILES = ("weights.safetensors", "moments.safetensors", "rng.json")


@dataclass
class ResumeState:
    """A state on disk, whole."""

    path: Path
    info: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps of the optimizer that were done."""
        return int(self.info["step"])

    def weights(self) -> dict[str, Tensor]:
        """Trainable parameters by name, float32."""
        return load_file(self.path / "weights.safetensors")

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments by `exp_avg/NAME` and `exp_avg_sq/NAME`, float32."""
        return load_file(self.path / "moments.safetensors")


def read_state(path: Path) -> ResumeState:
    """A state, after its files were compared with their hashes.

    Raises:
        UserError: not a state, damaged, or of another schema.
    """
    try:
        info = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for name in FILES:
            if store.fingerprint_file(path / name) != info["files"][name]:
                raise ValueError(f"{name} has changed since it was written")
        version = info["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a whole resume state: {error}") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema version {version}, this prm reads {SCHEMA_VERSION}")
    return ResumeState(path, info)


def newest_state(run_dir: Path) -> ResumeState | None:
    """The newest whole state of a run directory; damaged ones are passed over with a warning."""
    folder = run_dir / "resume"
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    for step in sorted(steps, reverse=True):
        try:
            return read_state(folder / str(step))
        except UserError as error:
            log.warning("%s: passed over", error)
    return None
