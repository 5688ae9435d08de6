"""Two vLLM engines for the whole session: a start takes half a minute, a forward hardly anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prm.extras import missing


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there() -> None:
    if absent := missing("eval"):
        pytest.skip(f"the extra 'eval' is not installed: {', '.join(absent)}")


@pytest.fixture(scope="session")
def adapters(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters with random weights that change the features, one written by prm and one by plain PEFT.

    Their ranks are none that vLLM reserves, so it has to be given room for more.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from prm.backbones import LoraSpec, open_backbone

    def randomise(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero in a fresh adapter
                torch.nn.init.normal_(parameter, std=0.02)

    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    backbone = open_backbone(str(smollm2_path), dtype="float32", lora=LoraSpec(r=4))
    randomise(backbone)
    backbone.save_adapter(root / "small")
    base = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=12, target_modules="all-linear"))
    randomise(model)
    model.save_pretrained(root / "large")
    return {"small": root / "small", "large": root / "large"}


@pytest.fixture(scope="session")
def small_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that starts fast; its heads are as wide as vLLM's CPU kernels need."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("models") / "small"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


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
