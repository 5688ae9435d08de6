"""Features that vLLM computes for the cache are those of transformers, and lie under a key of their own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from prm.backbones import open_tokenizer
from prm.dataset_dir import DatasetDir
from prm.formatting import Formatter
from prm.frozen_features import backbone_features
from prm.inference.engines.vllm import VllmFeatures

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_vllm_features_in_the_cache_equal_transformers(
    feature_engine: VllmFeatures,
    smollm2_path: Path,
    synthetic_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRM_CACHE", str(tmp_path))
    data = DatasetDir.open(synthetic_dir)
    formatter = Formatter(open_tokenizer(str(smollm2_path)), 128)
    rows = [(pair.prompt, text) for pair in data.pairs(["validation"]) for text in (pair.chosen, pair.rejected)]
    sequences = {"validation": list(dict.fromkeys(e.ids for e in formatter.encode_all(rows)))}
    calls: list[int] = []

    class Counted:
        def features(self, sequences: list[tuple[int, ...]]) -> np.ndarray:
            calls.append(len(sequences))
            return feature_engine.features(sequences)

    def features(engine: str) -> np.ndarray:
        return backbone_features(
            str(smollm2_path),
            data=data,
            sequences=sequences,
            formatter=formatter,
            dtype="float32",
            engine=engine,
            open_engine=(lambda frozen: nullcontext(Counted())) if engine == "vllm" else None,
        )["validation"]

    plain = features("transformers")
    assert not calls
    found = features("vllm")
    assert calls == [len(plain)]
    np.testing.assert_array_equal(features("vllm"), found)
    assert calls == [len(plain)]
    assert found.filename != plain.filename
    gap = np.abs(found - plain).max() / np.abs(plain).max()
    assert gap < 3e-4, gap
    # The worst text, by its own size.
    own = np.linalg.norm(found - plain, axis=1) / np.linalg.norm(plain, axis=1)
    assert own.max() < 3e-4, own.max()
