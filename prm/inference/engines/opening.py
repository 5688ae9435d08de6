"""Which engine runs: one place that turns `--engine` into engines of either kind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from prm.backbones import resolve
from prm.errors import UserError
from prm.inference.engines.base import FeatureEngine, GenerateEngine
from prm.inference.user_reward import EngineKey

ENGINES = ("vllm", "transformers")
# Enough for a few abstracts as examples; more context costs cache memory.
_DEFAULT_CONTEXT = 4096


class Engines(Protocol):
    """Opens engines; each is closed when its block ends."""

    def generate(
        self, model: str, revision: str | None, dtype: str, max_model_len: int
    ) -> AbstractContextManager[GenerateEngine]: ...

    def features(
        self, key: EngineKey, max_model_len: int, adapters: Mapping[str, Path]
    ) -> AbstractContextManager[FeatureEngine]: ...


class VllmEngines:
    """vLLM engines, which write their logs to `logs`."""

    def __init__(self, logs: Path, gpu_memory_utilization: float = 0.85) -> None:
        self.logs, self.gpu_memory_utilization = logs, gpu_memory_utilization

    def generate(
        self, model: str, revision: str | None, dtype: str, max_model_len: int
    ) -> AbstractContextManager[GenerateEngine]:
        from prm.inference.engines.vllm import VllmGenerate

        return VllmGenerate(
            model,
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            log=self.logs / "vllm-generate.log",
        )

    def features(
        self, key: EngineKey, max_model_len: int, adapters: Mapping[str, Path]
    ) -> AbstractContextManager[FeatureEngine]:
        from prm.inference.engines.vllm import VllmFeatures

        return VllmFeatures(
            key.name,
            revision=key.revision,
            dtype=key.dtype,
            pooling=key.pooling,
            max_model_len=max_model_len,
            adapters=adapters,
            gpu_memory_utilization=self.gpu_memory_utilization,
            log=self.logs / "vllm-features.log",
        )


class TransformersEngines:
    """Engines on plain transformers, in this process."""

    def generate(
        self, model: str, revision: str | None, dtype: str, max_model_len: int
    ) -> AbstractContextManager[GenerateEngine]:
        from prm.inference.engines.transformers import TransformersGenerate

        return TransformersGenerate(model, revision=revision, dtype=dtype, max_model_len=max_model_len)

    def features(
        self, key: EngineKey, max_model_len: int, adapters: Mapping[str, Path]
    ) -> AbstractContextManager[FeatureEngine]:
        from prm.inference.engines.transformers import TransformersAdapterFeatures

        return TransformersAdapterFeatures(
            key.name, revision=key.revision, dtype=key.dtype, pooling=key.pooling, adapters=adapters
        )


def engines(name: str, logs: Path) -> Engines:
    """The engines that `--engine NAME` asks for."""
    if name == "vllm":
        return VllmEngines(logs)
    if name == "transformers":
        return TransformersEngines()
    raise UserError(f"--engine {name} is not known: use one of {', '.join(ENGINES)}")


def context_length(model: str, revision: str | None, wanted: int | None) -> int:
    """The context to open a generating model with: what is wanted, else the model's own up to 4096 tokens.

    Raises:
        UserError: the model cannot be opened, or was made for less.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve(model), revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot open the model {model}: {str(error).strip().splitlines()[0][:300]}") from error
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return min(own or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    if own is not None and wanted > own:
        raise UserError(f"--max-model-len {wanted} is more than the {own} tokens {model} was made for: lower it")
    return wanted
