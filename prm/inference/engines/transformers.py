"""Engines on plain transformers: the reference that vLLM is compared with, and a way to evaluate without vLLM.

One request at a time, so a result never depends on its batch; slow with a large model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from prm.backbones import open_backbone
from prm.errors import UserError
from prm.features import TransformersFeatures
from prm.inference.engines.base import Generation, GenerationRequest, refuse_too_long


def best_device() -> torch.device:
    """The CUDA device of this process when there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TransformersGenerate:
    """Continues prompts by `model.generate`.

    Args:
        model: "pip:PACKAGE", a directory or a hub id of a causal language model.
        revision: of a hub id.
        dtype: "float32", "bfloat16" or "auto".
        max_model_len: longest prompt and continuation together; None takes the model's own limit.
    """

    def __init__(
        self, model: str, *, revision: str | None = None, dtype: str = "auto", max_model_len: int | None = None
    ) -> None:
        backbone = open_backbone(model, revision=revision, dtype=dtype)
        if backbone.encoder:
            raise UserError(f"{model} is an encoder: it cannot generate; choose a causal language model with --lm")
        self.tokenizer, self.model = backbone.tokenizer, backbone.model.to(best_device())
        limit = int(getattr(self.model.config, "max_position_embeddings", 1 << 30))
        if max_model_len is not None and max_model_len > limit:
            raise UserError(
                f"--max-model-len {max_model_len} is more than the {limit} tokens that {model} was made for"
            )
        self.max_model_len = max_model_len or limit

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """n continuations of every request, in order.

        Raises:
            UserError: a request does not fit max_model_len.
        """
        refuse_too_long(requests, self.max_model_len)
        return [self._generate(request) for request in requests]

    @torch.inference_mode()
    def _generate(self, request: GenerationRequest) -> list[Generation]:
        eos = self._ending_tokens() | set(request.stop_token_ids)
        options: dict[str, Any] = {"do_sample": False}
        if request.temperature > 0:
            # top_k = 0: the whole vocabulary, whatever the model's own generation config says.
            options = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
        device = next(self.model.parameters()).device
        ids = torch.tensor([request.token_ids], device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if request.seed is not None:
                torch.manual_seed(request.seed)
            rows = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_tokens,
                num_return_sequences=request.n,
                eos_token_id=sorted(eos),
                pad_token_id=min(eos),
                **options,
            )
        return [self._generation(row[ids.shape[1] :].tolist(), eos) for row in rows]

    def _ending_tokens(self) -> set[int]:
        configured = self.model.generation_config.eos_token_id
        several = configured if isinstance(configured, (list, tuple)) else [configured]
        return {int(e) for e in (*several, self.tokenizer.eos_token_id) if e is not None}

    def _generation(self, tokens: list[int], eos: set[int]) -> Generation:
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        kept = tokens if end is None else tokens[: end + 1]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Generation(text, tuple(kept), "length" if end is None else "stop")

    def close(self) -> None:
        """Nothing to end: the model lives in this process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TransformersAdapterFeatures:
    """Features of one backbone under several LoRA adapters, chosen call by call.

    Args:
        model, revision, dtype: as for TransformersGenerate; encoders are allowed.
        pooling: "last", "mean" or "first".
        adapters: label -> directory of a PEFT adapter.
        batch_size: sequences per forward.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        pooling: str = "last",
        adapters: Mapping[str, str | Path] | None = None,
        batch_size: int = 16,
    ) -> None:
        self._backbone = open_backbone(model, revision=revision, dtype=dtype, pooling=pooling)
        self._adapted: Any = None
        self.adapters = tuple(adapters or ())
        for label, path in (adapters or {}).items():
            self._add(label, Path(path))
        self._backbone.to(best_device())
        self._features = TransformersFeatures(self._backbone, batch_size)

    def _add(self, label: str, path: Path) -> None:
        from peft import PeftModel

        try:
            if self._adapted is None:
                # PEFT puts its layers into the model itself, so the backbone's own forward runs through them.
                self._adapted = PeftModel.from_pretrained(self._backbone.model, path, adapter_name=label)
            else:
                self._adapted.load_adapter(path, adapter_name=label)
        except (ValueError, OSError, RuntimeError) as error:
            raise UserError(f"the adapter {path} does not open: {str(error).splitlines()[0][:200]}") from error

    def features(self, sequences: Sequence[Sequence[int]], adapter: str | None = None) -> np.ndarray:
        """float32 features [N, d] of N token sequences under `adapter` (None: the bare model)."""
        if adapter is not None and adapter not in self.adapters:
            raise ValueError(f"unknown adapter {adapter!r}, the engine has {self.adapters}")
        if not sequences:
            raise ValueError("no sequences")
        if self._adapted is None:
            return self._features.features(sequences)
        if adapter is None:
            with self._adapted.disable_adapter():
                return self._features.features(sequences)
        self._adapted.set_adapter(adapter)
        self._adapted.eval()
        return self._features.features(sequences)

    def close(self) -> None:
        """Nothing to end: the model lives in this process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
