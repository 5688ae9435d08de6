"""Two vLLM engines for the whole session: a start takes half a minute, a forward hardly anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prm.extras import missing

ADAPTERS = ("small", "large")


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there() -> None:
    if absent := missing("eval"):
        pytest.skip(f"the extra 'eval' is not installed: {', '.join(absent)}")


@pytest.fixture(scope="session")
def adapters(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real PEFT adapters, of ranks that vLLM has to round up, with random weights that change the features."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root, paths = tmp_path_factory.mktemp("adapters"), {}
    for label, rank, targets in zip(ADAPTERS, (4, 12), (["q_proj", "v_proj"], "all-linear"), strict=True):
        torch.manual_seed(rank)
        base = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        paths[label] = root / label
        model.save_pretrained(paths[label])
    return paths


@pytest.fixture(scope="session")
def generate_engine(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from prm.inference.engines.vllm import VllmGenerate

    log = tmp_path_factory.mktemp("logs") / "generate.log"
    with VllmGenerate(
        str(smollm2_path), dtype="float32", max_model_len=512, gpu_memory_utilization=0.3, log=log
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def feature_engine(
    smollm2_path: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object]:
    from prm.inference.engines.vllm import VllmFeatures

    log = tmp_path_factory.mktemp("logs") / "features.log"
    with VllmFeatures(
        str(smollm2_path),
        dtype="float32",
        max_model_len=128,
        adapters=adapters,
        gpu_memory_utilization=0.3,
        log=log,
    ) as engine:
        yield engine
