"""vLLM in a process of its own gives what transformers gives, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prm.backbones import open_tokenizer
from prm.errors import UserError
from prm.formatting import Formatter
from prm.inference.engines.base import EngineError, GenerationRequest
from prm.inference.engines.transformers import TransformersAdapterFeatures, TransformersGenerate
from prm.inference.engines.vllm import VllmFeatures, VllmGenerate
from prm.records import user_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def formatter(smollm2_path: Path) -> Formatter:
    return Formatter(open_tokenizer(str(smollm2_path)), 128)


@pytest.fixture(scope="module")
def sequences(formatter: Formatter) -> list[tuple[int, ...]]:
    """Ragged lengths, shared prefixes, equal rows, and one that fills the context."""
    prompt = user_prompt("Write a title for a paper about the weather on other planets.")
    rows = [(prompt, "Rain on Mars"), (prompt, "Rain on Mars, and how to stay dry while it lasts"), (prompt, "Rain")]
    rows += [(user_prompt("Hi"), "Hello"), (prompt, "Rain on Mars"), (user_prompt("word " * 200), "Long")]
    found = [e.ids for e in formatter.encode_all(rows)]
    assert max(map(len, found)) == 128
    return found


@pytest.fixture(scope="module")
def reference(smollm2_path: Path, adapters: dict[str, Path]) -> TransformersAdapterFeatures:
    return TransformersAdapterFeatures(str(smollm2_path), dtype="float32", adapters=adapters)


@pytest.mark.parametrize("adapter", [None, "small", "large"])
def test_features_equal_transformers(
    feature_engine: VllmFeatures,
    reference: TransformersAdapterFeatures,
    sequences: list[tuple[int, ...]],
    adapter: str | None,
) -> None:
    expected = reference.features(sequences, adapter)
    found = feature_engine.features(sequences, adapter)
    assert found.shape == expected.shape and found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(found[0] - found[4]).max() < 1e-5 * np.abs(expected).max()


def test_every_adapter_changes_the_features(feature_engine: VllmFeatures, sequences: list[tuple[int, ...]]) -> None:
    bare, small, large = (feature_engine.features(sequences, a) for a in (None, "small", "large"))
    for one, other in ((bare, small), (bare, large), (small, large)):
        assert np.abs(one - other).max() > 1e-2 * np.abs(bare).max()
    again = feature_engine.features(sequences, None)
    assert np.abs(again - bare).max() < 1e-5 * np.abs(bare).max()


def test_calls_that_do_not_fit_are_refused_and_the_engine_lives(feature_engine: VllmFeatures) -> None:
    with pytest.raises(ValueError, match="unknown adapter"):
        feature_engine.features([(1, 2)], "nobody")
    with pytest.raises(UserError, match="context is 128"):
        feature_engine.features([tuple(range(129))])
    assert feature_engine.features([(1, 2, 3)]).shape[0] == 1


def requests(formatter: Formatter, **options: Any) -> list[GenerationRequest]:
    asked = [
        "Name a colour.",
        "Write a title for a paper about bees.",
        "What is the capital of France?",
        "Count to five.",
    ]
    return [GenerationRequest(formatter.prompt_ids(user_prompt(text)), max_tokens=12, **options) for text in asked]


def test_greedy_answers_equal_transformers(
    generate_engine: VllmGenerate, smollm2_path: Path, formatter: Formatter
) -> None:
    plain = requests(formatter)
    expected = TransformersGenerate(str(smollm2_path), dtype="float32").generate(plain)
    assert generate_engine.generate(plain) == expected
    assert any(row[0].finish_reason == "length" for row in expected)
    assert any(row[0].finish_reason == "stop" for row in expected)


def test_a_seeded_batch_equals_each_request_alone(generate_engine: VllmGenerate, formatter: Formatter) -> None:
    batch = [replace(r, seed=seed, n=3, temperature=1.0) for seed, r in enumerate(requests(formatter))]
    together = generate_engine.generate(batch)
    assert [len(row) for row in together] == [3] * len(batch)
    assert together == [generate_engine.generate([r])[0] for r in batch]
    assert together == generate_engine.generate(batch[::-1])[::-1]
    other = generate_engine.generate([replace(r, seed=r.seed + 100) for r in batch])
    assert other != together
    assert len({g.token_ids for row in together for g in row}) > len(batch)


def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_lives(
    generate_engine: VllmGenerate, formatter: Formatter
) -> None:
    with pytest.raises(UserError, match="context is 512"):
        generate_engine.generate([GenerationRequest(tuple([5] * 510), max_tokens=3)])
    assert generate_engine.generate([GenerationRequest(tuple([5] * 510), max_tokens=2)])[0][0].token_ids
    assert generate_engine.generate([]) == []


def session_processes(session: int) -> list[int]:
    """Processes of a session that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_close_leaves_no_process_and_a_dead_worker_is_one_line(small_model: Path, tmp_path: Path) -> None:
    request = GenerationRequest((1, 5, 6), max_tokens=2)
    engine = VllmGenerate(str(small_model), dtype="float32", max_model_len=64, log=tmp_path / "first.log")
    session = engine.process.pid
    assert session_processes(session)
    assert engine.generate([request])
    os.kill(session, signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        engine.generate([request])
    assert "SIGKILL" in str(caught.value) and str(tmp_path / "first.log") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert session_processes(session) == []
    with pytest.raises(EngineError, match="closed"):
        engine.generate([request])
    engine.close()

    with VllmFeatures(str(small_model), dtype="float32", max_model_len=64) as features:
        session = features.process.pid
        assert features.features([(1, 5, 6)]).shape == (1, 64)
    assert session_processes(session) == []
    assert not features.log.exists()  # a log that nobody asked for goes with its engine


def test_an_engine_that_cannot_start_is_one_line(smollm2_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(EngineError) as caught:
        VllmGenerate(str(broken), max_model_len=64, log=tmp_path / "log")
    assert "\n" not in str(caught.value) and str(tmp_path / "log") in str(caught.value)
    assert "no-such-model" in (tmp_path / "log").read_text()
