"""The process in which vLLM runs: `python -m prm.inference.engines.vllm_worker CALLS_FD LIFELINE_FD`.

It answers calls over an inherited socket: JSON messages, and arrays as raw bytes after a JSON header (never pickle).
It ends when the parent goes: the lifeline socket reaches its end, whatever the engine is busy with.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from prm.inference.engines import vllm_cpu_lora


def end_with_parent(lifeline: socket.socket) -> None:
    """Kill this session (this process and what vLLM started in it) once the other end of `lifeline` is closed."""

    def watch() -> None:
        lifeline.recv(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Worker:
    """A vLLM engine and the calls it answers.

    Args:
        options: `engine` (arguments of vllm.LLM), `pooler` (pooling type, or None to generate),
            `adapters` (label -> directory of a PEFT adapter).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform

        engine = dict(options["engine"])
        if current_platform.is_cpu():
            engine["enforce_eager"] = True
            engine.pop("gpu_memory_utilization", None)
            if not options["pooler"]:
                # Per-request seeds fail under chunked prefill on the CPU (its generators have no offset).
                engine["enable_chunked_prefill"] = False
            if engine.get("enable_lora"):
                vllm_cpu_lora.install()
        if options["pooler"]:
            from vllm.config import PoolerConfig

            pooler = PoolerConfig(pooling_type=options["pooler"], use_activation=False)
            engine |= {"runner": "pooling", "convert": "embed", "pooler_config": pooler}
        self.llm = LLM(**engine)
        self.adapters = {
            label: LoRARequest(label, number, path)
            for number, (label, path) in enumerate(options["adapters"].items(), 1)
        }

    def generate(self, requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Continuations of requests (fields of GenerationRequest)."""
        from vllm import SamplingParams

        # What the cache holds decides which kernels run, and rounding with them: start every call the same.
        self.llm.reset_prefix_cache()
        sampling = [
            SamplingParams(
                n=r["n"],
                max_tokens=r["max_tokens"],
                temperature=r["temperature"],
                top_p=r["top_p"],
                seed=r["seed"] if r["temperature"] > 0 else None,
                stop_token_ids=r["stop_token_ids"],
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r["token_ids"]} for r in requests]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [
            [
                {"text": c.text, "token_ids": list(c.token_ids), "finish_reason": str(c.finish_reason)}
                for c in sorted(output.outputs, key=lambda c: c.index)
            ]
            for output in outputs
        ]

    def features(self, sequences: list[list[int]], adapter: str | None) -> np.ndarray:
        """Features [N, d], float32."""
        self.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": s} for s in sequences]
        request = self.adapters[adapter] if adapter is not None else None
        outputs = self.llm.encode(prompts, pooling_task="embed", lora_request=request, use_tqdm=False)
        return np.stack([output.outputs.data.float().cpu().numpy() for output in outputs])


def serve(calls: Connection) -> None:
    """Start the engine that the first message describes, then answer calls until the connection ends."""
    try:
        worker = Worker(json.loads(calls.recv_bytes()))
        calls.send_bytes(json.dumps({"max_model_len": worker.llm.model_config.max_model_len}).encode())
        while True:
            message = json.loads(calls.recv_bytes())
            if message["call"] == "generate":
                calls.send_bytes(json.dumps({"result": worker.generate(message["requests"])}).encode())
            else:
                array = np.ascontiguousarray(worker.features(message["sequences"], message["adapter"]), np.float32)
                calls.send_bytes(json.dumps({"shape": array.shape}).encode())
                calls.send_bytes(array.tobytes())
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        calls.send_bytes(json.dumps({"error": f"{type(error).__name__}: {lines[0]}"[:300]}).encode())


def main() -> None:
    calls_fd, lifeline_fd = (int(a) for a in sys.argv[1:3])
    end_with_parent(socket.socket(fileno=lifeline_fd))
    serve(Connection(calls_fd))
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's exit handlers wait for threads that no longer matter.
    os._exit(0)


if __name__ == "__main__":
    main()
