"""Sentence embeddings against plain transformers, their cache, and the nearest-neighbour search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prm.errors import UserError
from prm.retrieval import SentenceEncoder, top_k


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_top_k_by_hand() -> None:
    corpus = np.array([[1, 0], [0.8, 0.6], [0, 1], [-1, 0]], np.float32)
    indices, similarities = top_k(np.array([[1, 0], [0, 1]], np.float32), corpus, 2)
    assert indices.tolist() == [[0, 1], [2, 1]]
    np.testing.assert_allclose(similarities, [[1, 0.8], [1, 0.6]], atol=1e-6)
    indices, _ = top_k(np.array([[1, 0]], np.float32), corpus, 9, exclude=[0, 3, 3])
    assert indices.tolist() == [[1, 2]]


def test_top_k_equals_a_full_sort_whatever_the_block() -> None:
    generator = np.random.default_rng(0)
    queries, corpus = unit(generator.standard_normal((37, 8))), unit(generator.standard_normal((200, 8)))
    exclude = generator.choice(200, 20, replace=False)
    scores = queries @ corpus.T
    scores[:, exclude] = -np.inf
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    for block in (1, 5, 37, 1024):
        indices, similarities = top_k(queries, corpus, 10, exclude=exclude, block=block)
        assert (indices == wanted).all()
        np.testing.assert_allclose(similarities, np.take_along_axis(scores, wanted, axis=1), atol=1e-6)


def test_top_k_of_nothing() -> None:
    corpus = unit(np.ones((3, 4)))
    assert top_k(corpus, corpus, 2, exclude=[0, 1, 2])[0].shape == (3, 0)
    assert top_k(corpus[:0], corpus, 2)[0].shape == (0, 2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT with random weights and a tokenizer of a few words."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tiny-encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
    )
    transformers.BertModel(config).save_pretrained(path)
    return str(path)


TEXTS = ["a b c", "b", "z y x w v u t s r", "a b c", "q " * 60]


def test_embeddings_are_the_mean_of_the_tokens(tiny_encoder: str, cache: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    encoder = SentenceEncoder(tiny_encoder, max_length=16, batch_size=2)
    found = encoder.encode(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder)
    model = AutoModel.from_pretrained(tiny_encoder).eval()
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            ids = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")
            mean = model(**ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
    assert found.dtype == np.float32 and np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert encoder.truncated == 1


def test_embeddings_do_not_depend_on_batches_or_neighbours(tiny_encoder: str, cache: Path) -> None:
    import torch

    threads = torch.get_num_threads()
    alone = np.concatenate([SentenceEncoder(tiny_encoder, max_length=16).encode([text]) for text in TEXTS])
    for size in (1, 3, 64):
        together = SentenceEncoder(tiny_encoder, max_length=16, batch_size=size, cache=False).encode(TEXTS)
        np.testing.assert_allclose(together, alone, atol=1e-5)
    assert torch.get_num_threads() == threads


def test_cache_answers_without_the_model_and_knows_its_content(
    tiny_encoder: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SentenceEncoder(tiny_encoder, max_length=16)
    vectors = first.encode(TEXTS)
    again = SentenceEncoder(tiny_encoder, max_length=16)
    monkeypatch.setattr(again, "_open", lambda: pytest.fail("the model was opened"))
    assert (again.encode(TEXTS[::-1]) == vectors[::-1]).all()
    assert again.truncated == first.truncated == 1
    other = SentenceEncoder(tiny_encoder, max_length=8)
    assert not np.allclose(other.encode(TEXTS)[2], vectors[2])


def test_mistakes_are_one_line(tiny_encoder: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, options, message in (
        (str(tmp_path / "absent"), {}, "no model directory"),
        (str(tmp_path / "empty"), {}, "no config.json"),
        (tiny_encoder, {"max_length": 64}, "reads at most 40 tokens"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            SentenceEncoder(name, **options).encode(["a"])
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="batch size 0"):
        SentenceEncoder(tiny_encoder, batch_size=0)


def test_minilm_finds_the_abstract_on_the_same_subject(minilm_path: str, cache: Path) -> None:
    encoder = SentenceEncoder(str(minilm_path))
    corpus = ["A parser for German sentences.", "Grasping objects with a robot arm.", "Detecting attacks on networks."]
    queries = ["Syntactic analysis of languages.", "Intrusions into computers."]
    indices, _ = top_k(encoder.encode(queries), encoder.encode(corpus), 1)
    assert indices.ravel().tolist() == [0, 2]
