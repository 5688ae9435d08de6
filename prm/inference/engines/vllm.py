"""vLLM engines, each in a process of its own.

The process starts clean of torchrun's variables, writes to a log file, and ends with its parent. vLLM chooses the
device: the same code runs on the CPU and on CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import prm
from prm.backbones import resolve
from prm.errors import UserError
from prm.extras import require
from prm.inference.engines.base import EngineError, Generation, GenerationRequest, refuse_too_long

# What torchrun sets for its ranks; vLLM would join their group.
_RANK_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|OMP_NUM_THREADS"
)
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_POOLERS = {"last": "LAST", "mean": "MEAN", "first": "CLS"}
# Sequences of one features call: the answer comes soon enough to show progress and Ctrl-C stays prompt.
_FEATURE_BATCH = 128


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine's process, from the one of this process."""
    kept = {k: v for k, v in environment.items() if not _RANK_VARIABLE.fullmatch(k)}
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        # vLLM binds its worker to one core of each pair unless it is told otherwise.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(c) for c in sorted(os.sched_getaffinity(0))),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # The engine core in the worker itself: one process to end, and scheduling that does not depend on timing.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_COLOR": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    source = str(Path(prm.__file__).resolve().parent.parent)
    path = os.pathsep.join([source, *filter(None, [kept.get("PYTHONPATH")])])
    return {**defaults, **kept, "PYTHONPATH": path}


def _end_session(process: subprocess.Popen[bytes], *ends: Connection | socket.socket) -> None:
    """Close the connections, give the worker a moment to leave, and kill what is left of its session."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.close()
    if process.returncode is None:
        until = time.monotonic() + 3
        # WNOWAIT keeps the process id taken until its group is killed.
        look = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, process.pid, look) is None and time.monotonic() < until:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class VllmEngine:
    """An engine's process and the calls to it. Use as a context manager, or call `close`.

    Args:
        engine: arguments of vllm.LLM.
        pooler: vLLM's pooling type, or None for an engine that generates.
        adapters: label -> directory of a PEFT adapter.
        log: where vLLM's output goes; by default a temporary file, kept only when the engine dies.
        start_timeout: seconds that the start may take (a large model loads for minutes).

    Raises:
        ExtraMissing: vLLM is not installed.
        EngineError: the engine could not start.
    """

    def __init__(
        self,
        engine: dict[str, Any],
        *,
        pooler: str | None,
        adapters: Mapping[str, str | Path] | None = None,
        log: str | Path | None = None,
        start_timeout: float = 1800.0,
    ) -> None:
        require("eval", wanted_by="the vLLM engine")
        self._temporary_log = log is None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="prm-vllm-", suffix=".log")
            os.close(handle)
            log = name
        self.log = Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        calls, calls_end = socket.socketpair()
        lifeline, lifeline_end = socket.socketpair()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "prm.inference.engines.vllm_worker",
                    *map(str, (calls_end.fileno(), lifeline_end.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(calls_end.fileno(), lifeline_end.fileno()),
                env=engine_environment(os.environ),
                start_new_session=True,
            )
        calls_end.close()
        lifeline_end.close()
        self._calls = Connection(calls.detach())
        self._end = weakref.finalize(self, _end_session, self.process, self._calls, lifeline)
        options = {"engine": engine, "pooler": pooler, "adapters": {k: str(v) for k, v in (adapters or {}).items()}}
        try:
            self.max_model_len = int(self._call(options, timeout=start_timeout)["max_model_len"])
        except BaseException:
            self._end()
            raise

    def _call(self, message: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        if not self._end.alive:
            raise EngineError("the vLLM engine is closed")
        try:
            self._calls.send_bytes(json.dumps(message).encode())
            if not self._calls.poll(timeout):
                raise self._died(f"no answer after {timeout:.0f} s")
            answer: dict[str, Any] = json.loads(self._calls.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        if "error" in answer:
            raise self._died(answer["error"])
        return answer

    def _died(self, cause: str | None = None) -> EngineError:
        self._end()
        self._temporary_log = False
        status = self.process.returncode
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        cause = cause or f"{how}; {_last_line(self.log)}"
        return EngineError(f"the vLLM engine stopped: {cause} (log: {self.log})")

    def close(self) -> None:
        """End the process and everything it started."""
        self._end()
        if self._temporary_log:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class VllmGenerate(VllmEngine):
    """A vLLM engine that continues prompts.

    Args:
        model: "pip:PACKAGE", a directory or a hub id.
        revision: of a hub id.
        dtype: "float32", "bfloat16", "float16" or "auto" (the model's own, as vLLM reads it).
        max_model_len: longest prompt and continuation together; None takes the model's own limit.
        gpu_memory_utilization: share of a GPU's memory for weights and cache; without effect on the CPU.
        log, start_timeout: see VllmEngine.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.85,
        log: str | Path | None = None,
        start_timeout: float = 1800.0,
    ) -> None:
        engine = _engine_arguments(model, revision, dtype, max_model_len, gpu_memory_utilization)
        super().__init__(engine, pooler=None, log=log, start_timeout=start_timeout)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """n continuations of every request, in order.

        Raises:
            UserError: a request does not fit max_model_len.
            EngineError: the engine died.
        """
        if not requests:
            return []
        refuse_too_long(requests, self.max_model_len)
        rows = self._call({"call": "generate", "requests": [r.as_dict() for r in requests]})["result"]
        return [[Generation(c["text"], tuple(c["token_ids"]), c["finish_reason"]) for c in row] for row in rows]


class VllmFeatures(VllmEngine):
    """A vLLM engine that returns one hidden state per sequence, under LoRA adapters chosen call by call.

    Equal to Backbone's features within rounding: feature rewards need no head inside vLLM.

    Args:
        model, revision, dtype, max_model_len, gpu_memory_utilization: as for VllmGenerate.
        pooling: "last", "mean" or "first".
        adapters: label -> directory of a PEFT adapter.
        log, start_timeout: see VllmEngine.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        pooling: str = "last",
        adapters: Mapping[str, str | Path] | None = None,
        gpu_memory_utilization: float = 0.85,
        log: str | Path | None = None,
        start_timeout: float = 1800.0,
    ) -> None:
        engine = _engine_arguments(model, revision, dtype, max_model_len, gpu_memory_utilization)
        self.adapters = tuple(adapters or ())
        if adapters:
            engine |= {
                "enable_lora": True,
                "max_lora_rank": max(_lora_rank(Path(path)) for path in adapters.values()),
                "max_loras": min(len(adapters), 8),
            }
        super().__init__(engine, pooler=_POOLERS[pooling], adapters=adapters, log=log, start_timeout=start_timeout)

    def features(self, sequences: Sequence[Sequence[int]], adapter: str | None = None) -> np.ndarray:
        """float32 features [N, d] of N token sequences under `adapter` (None: the bare model).

        Raises:
            UserError: no sequences, or one is longer than max_model_len.
            EngineError: the engine died.
        """
        if adapter is not None and adapter not in self.adapters:
            raise ValueError(f"unknown adapter {adapter!r}, the engine has {self.adapters}")
        if not sequences:
            raise ValueError("no sequences")
        if (longest := max(map(len, sequences))) > self.max_model_len:
            raise UserError(f"a sequence has {longest} tokens, the engine's context is {self.max_model_len}")
        parts = []
        for start in range(0, len(sequences), _FEATURE_BATCH):
            rows = [list(map(int, s)) for s in sequences[start : start + _FEATURE_BATCH]]
            shape = self._call({"call": "features", "sequences": rows, "adapter": adapter})["shape"]
            try:
                parts.append(np.frombuffer(self._calls.recv_bytes(), np.float32).reshape(shape))
            except (EOFError, OSError) as error:
                raise self._died() from error
        return np.concatenate(parts)


def _engine_arguments(
    model: str, revision: str | None, dtype: str, max_model_len: int | None, gpu_memory_utilization: float
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(resolve(model, revision=revision)),
        "revision": revision,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        "disable_log_stats": True,
        "trust_remote_code": False,
    }
    return {k: v for k, v in arguments.items() if v is not None}


def _lora_rank(adapter: Path) -> int:
    """The smallest rank vLLM reserves room for that holds this adapter.

    Raises:
        UserError: no adapter there, or its rank is above what vLLM takes.
    """
    file = adapter / "adapter_config.json"
    if not file.is_file():
        raise UserError(f"{adapter} holds no adapter_config.json: it is not a PEFT adapter")
    rank = int(json.loads(file.read_text(encoding="utf-8"))["r"])
    for allowed in _LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise UserError(
        f"the adapter {adapter} has rank {rank}, vLLM takes up to {_LORA_RANKS[-1]}: use --engine transformers"
    )


def _last_line(log: Path) -> str:
    """The last line of a log that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
    named = [line for line in lines if re.search(r"\b\w*(Error|Exception|Killed)\b:?", line)]
    return (named or lines or ["nothing in its log"])[-1][-300:]
