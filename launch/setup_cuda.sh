#!/usr/bin/env bash
# The CUDA environment in .venv. vllm pins torch to the version of the CPU environment, so both share one set.
#
#   launch/setup_cuda.sh       python3.11 (or $PYTHON) with venv, g++, and a CUDA driver
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
fail() { echo "setup: $*" >&2; exit 2; }
command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed: apt-get install python3.11 python3.11-venv, or set PYTHON"
command -v nvidia-smi >/dev/null || fail "no NVIDIA driver here: use launch/setup.sh for a CPU machine"
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
.venv/bin/python -m pip install -q "pip==25.3"
# vllm brings torch 2.13.0 built for CUDA; the tools that decide results are held at the tested versions.
grep -E '^(transformers|lightning|deepspeed|peft|datasets|torchmetrics|mlflow|accelerate|gguf|jsonargparse)==' \
  launch/requirements/lock-cpu.txt > .venv/constraints-cuda.txt
.venv/bin/python -m pip install -q -c .venv/constraints-cuda.txt -e '.[train,eval,track,report,dev]'
.venv/bin/prm doctor
