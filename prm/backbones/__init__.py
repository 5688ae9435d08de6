"""Backbones: causal LMs and encoders, opened from a hub id, a directory or a pinned Python package."""

from prm.backbones.backbone import (
    Backbone,
    LoraSpec,
    content_hash,
    is_encoder,
    lora_as_dict,
    lora_from_adapter,
    open_backbone,
    open_tokenizer,
    pool,
    resolve,
    torch_dtype,
)
from prm.backbones.pip_models import PIP_MODELS

__all__ = [
    "PIP_MODELS",
    "Backbone",
    "LoraSpec",
    "content_hash",
    "is_encoder",
    "lora_as_dict",
    "lora_from_adapter",
    "open_backbone",
    "open_tokenizer",
    "pool",
    "resolve",
    "torch_dtype",
]
