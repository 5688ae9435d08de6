"""Every reward model scores alike on features of vLLM and of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import prm.reward_models
from prm.backbones import open_tokenizer
from prm.formatting import Formatter
from prm.inference.engines.transformers import TransformersAdapterFeatures
from prm.inference.engines.vllm import VllmFeatures
from prm.records import user_prompt
from prm.reward_models import FeatureReward

pytestmark = [pytest.mark.engine, pytest.mark.slow]
METHODS = [n for n in prm.reward_models.__all__ if n != "FeatureReward"]


@pytest.fixture(scope="module")
def both(
    smollm2_path: Path, adapters: dict[str, Path], feature_engine: VllmFeatures
) -> tuple[torch.Tensor, torch.Tensor]:
    """[h(x, y); h(x)], [N, 2 d], of both engines under an adapter."""
    formatter = Formatter(open_tokenizer(str(smollm2_path)), 128)
    prompts = [user_prompt(f"Write a title for a note on {topic}.") for topic in ("tides", "bread", "the moon")]
    rows = [(p, response) for p in prompts for response in ("On it", "What is it, and why does it matter so much?")]
    encoded = formatter.encode_all(rows)
    texts, before = [e.ids for e in encoded], [e.ids[: e.prompt_length] for e in encoded]
    plain = TransformersAdapterFeatures(str(smollm2_path), dtype="float32", adapters={"small": adapters["small"]})
    return (
        torch.cat([torch.from_numpy(plain.features(ids, "small")) for ids in (texts, before)], -1),
        torch.cat([torch.from_numpy(feature_engine.features(ids, "small")) for ids in (texts, before)], -1),
    )


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_alike(both: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    torch.manual_seed(0)
    head: FeatureReward = getattr(prm.reward_models, name)(both[0].shape[1] // 2)
    users = head.initial_users(4, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain, fast = (head.scores_for_all(inputs[:, : head.input_dim], users).numpy() for inputs in both)
    assert np.abs(plain[:, 0] - plain[:, 1]).max() > 1e-2 * np.abs(plain).max()
    assert np.abs(plain - fast).max() < 1e-3 * np.abs(plain).max()
