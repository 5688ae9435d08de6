"""What surrounds an engine: its environment, its end with the parent, the reference engines on a tiny model."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from prm.backbones import LoraSpec, open_backbone
from prm.errors import UserError
from prm.features import TransformersFeatures
from prm.inference.engines import vllm_cpu_lora
from prm.inference.engines.base import GenerationRequest
from prm.inference.engines.transformers import TransformersAdapterFeatures, TransformersGenerate
from prm.inference.engines.vllm import engine_environment


def test_the_engines_environment_knows_nothing_of_torchrun() -> None:
    torchrun = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "1",
    }
    environment = engine_environment({**torchrun, "HOME": "/home/ada", "VLLM_CPU_KVCACHE_SPACE": "7"})
    assert not torchrun.keys() & environment.keys()
    assert environment["HOME"] == "/home/ada"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"  # the user's own setting wins
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize("closed", ["lifeline", "calls"])
def test_the_worker_ends_with_its_parent(closed: str) -> None:
    calls, calls_end = socket.socketpair()
    lifeline, lifeline_end = socket.socketpair()
    fds = (calls_end.fileno(), lifeline_end.fileno())
    worker = subprocess.Popen(
        [sys.executable, "-m", "prm.inference.engines.vllm_worker", *map(str, fds)],
        pass_fds=fds,
        env=engine_environment({}),
        start_new_session=True,
    )
    calls_end.close()
    lifeline_end.close()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(1)
    (lifeline if closed == "lifeline" else calls).close()
    assert worker.wait(30) == (-signal.SIGKILL if closed == "lifeline" else 0)


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="greedy"):
        GenerationRequest((1,), n=2)
    with pytest.raises(ValueError, match="at least one token"):
        GenerationRequest(())
    with pytest.raises(ValueError, match="top_p"):
        GenerationRequest((1,), top_p=0.0)


def test_transformers_sampling_depends_on_the_request_alone(tiny_llama_path: Path) -> None:
    engine = TransformersGenerate(str(tiny_llama_path), dtype="float32", max_model_len=64)
    batch = [GenerationRequest((1, 5 + i), n=2, max_tokens=8, temperature=1.0, seed=i) for i in range(3)]
    together = engine.generate(batch)
    assert together == [engine.generate([r])[0] for r in batch]
    assert len({g.token_ids for row in together for g in row}) == 6
    with pytest.raises(UserError, match="context is 64"):
        engine.generate([GenerationRequest((1,) * 60, max_tokens=5)])


def test_transformers_stops_at_stop_tokens(tiny_llama_path: Path) -> None:
    engine = TransformersGenerate(str(tiny_llama_path), dtype="float32", max_model_len=64)
    request = GenerationRequest((1, 5), max_tokens=8, temperature=1.0, seed=3)
    tokens = engine.generate([request])[0][0].token_ids
    stopping = GenerationRequest((1, 5), max_tokens=8, temperature=1.0, seed=3, stop_token_ids=(tokens[2],))
    stopped = engine.generate([stopping])[0][0]
    assert stopped.token_ids == tokens[: tokens.index(tokens[2]) + 1] and stopped.finish_reason == "stop"


def test_several_adapters_on_one_backbone(tiny_llama_path: Path, tmp_path: Path) -> None:
    sequences = [(1, 5, 6), (1, 7), (1, 5, 6, 8, 9)]
    expected, adapters = {}, {}
    for seed, label in enumerate(("one", "two")):
        torch.manual_seed(seed)
        backbone = open_backbone(str(tiny_llama_path), dtype="float32", lora=LoraSpec(r=4 + seed))
        for name, parameter in backbone.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        backbone.save_adapter(tmp_path / label)
        adapters[label] = tmp_path / label
        expected[label] = TransformersFeatures(backbone).features(sequences)
    expected[None] = TransformersFeatures(open_backbone(str(tiny_llama_path), dtype="float32")).features(sequences)
    engine = TransformersAdapterFeatures(str(tiny_llama_path), dtype="float32", adapters=adapters)
    for label in ("one", None, "two", "one"):
        assert np.abs(engine.features(sequences, label) - expected[label]).max() < 1e-5
    assert np.abs(expected["one"] - expected["two"]).max() > 1e-2
    with pytest.raises(ValueError, match="unknown adapter"):
        engine.features(sequences, "three")


@pytest.mark.parametrize("adapters", [[0, 0, 0, 0], [2, 0, 1, 2], [1, -1, 1, -1], [-1, -1, -1, -1]])
def test_lora_products_go_row_by_row_to_their_adapter(adapters: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weights = torch.randn(4, 6, generator=generator), torch.randn(3, 5, 6, generator=generator)
    expected = torch.stack(
        [weights[a] @ x if a >= 0 else torch.zeros(5) for a, x in zip(adapters, inputs, strict=True)]
    )
    for given in (weights, weights[:, None]):
        found = vllm_cpu_lora.adapter_products(inputs, given, torch.tensor(adapters))
        assert torch.allclose(found, expected, atol=1e-6)
