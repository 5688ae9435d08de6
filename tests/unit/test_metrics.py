"""Text metrics and figures of rewards."""

import numpy as np
import pytest
import torch

from prm.errors import UserError
from prm.evaluation.metrics.bertscore import BertScore, greedy_match_f1
from prm.evaluation.metrics.preference import rm_accuracy, win_rate
from prm.evaluation.metrics.text import rouge
from prm.inference.decoding.best_of_n import chance_win, choose

RESPONSES = ["A study of neural networks", "On the energy of stars", "", "Learning", "the energy of a star, revisited"]
REFERENCES = [
    "On neural network study",
    "On the energy of stars",
    "Anything",
    "Deep learning for very long sequences of molecules",
    "Stars",
]


def test_rouge_by_hand() -> None:
    figures = rouge(["the cat sat", "cat the sat", "", "dog"], ["the cat ran fast", "the cat sat", "cat", "cat"])
    # Overlap of 2 words: precision 2/3, recall 2/4, F1 4/7. The second has all words and a common subsequence of 2.
    assert figures["rouge1"] == pytest.approx([4 / 7, 1.0, 0.0, 0.0])
    assert figures["rougeL"] == pytest.approx([4 / 7, 2 / 3, 0.0, 0.0])


def test_bertscore_matches_tokens_greedily() -> None:
    axes = torch.eye(3)
    response, reference = axes[[0, 1]][None], axes[[0, 2, 2]][None]
    f1 = greedy_match_f1(response, reference, torch.ones(1, 2), torch.ones(1, 3))
    precision, recall = 1 / 2, 1 / 3
    assert f1.tolist() == pytest.approx([2 * precision * recall / (precision + recall)])


@pytest.fixture(scope="module")
def encoder(minilm_path: str) -> BertScore:
    return BertScore(str(minilm_path), batch_size=2)


def test_bertscore_is_torchmetrics_row_by_row(encoder: BertScore, minilm_path: str) -> None:
    from torchmetrics.functional.text import bert_score

    ours = encoder.f1(RESPONSES, REFERENCES)
    for response, reference, value in zip(RESPONSES, REFERENCES, ours, strict=True):
        theirs = bert_score([response], [reference], model_name_or_path=str(minilm_path))["f1"] if response else 0.0
        assert value == pytest.approx(float(theirs), abs=1e-5)


def test_bertscore_does_not_depend_on_the_batch(encoder: BertScore) -> None:
    together = encoder.f1(RESPONSES, REFERENCES)
    alone = [float(encoder.f1([a], [b])[0]) for a, b in zip(RESPONSES, REFERENCES, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    assert together[1] == pytest.approx(1.0, abs=1e-5)
    assert together[2] == 0.0


def test_bertscore_counts_what_it_cuts(minilm_path: str) -> None:
    encoder = BertScore(str(minilm_path), max_length=8)
    encoder.f1(["word " * 50, "short"], ["short", "short"])
    assert encoder.truncated == 1


def test_bertscore_model_that_is_not_there(tmp_path) -> None:
    with pytest.raises(UserError):
        BertScore(str(tmp_path / "nothing"))


def test_rm_accuracy_has_interval_strict_and_ties() -> None:
    figures = rm_accuracy(["a", "a", "b"], [1.0, 0.0, 1.0], [0.0, 0.0, 2.0])
    assert figures["mean"] == pytest.approx((0.75 + 0.0) / 2)
    assert figures["strict"] == pytest.approx((0.5 + 0.0) / 2)
    assert (figures["ties"], figures["num_users"], figures["num_rows"]) == (1, 2, 3)
    assert figures["low"] <= figures["mean"] <= figures["high"]


def test_win_rate_counts_ties_one_half() -> None:
    figures = win_rate(["a", "a", "b", "b"], [1.0, 2.0, 0.0, 3.0], [0.0, 2.0, 1.0, 1.0], n=4)
    assert (figures["win"], figures["tie"], figures["loss"]) == (2, 1, 1)
    assert figures["win_rate"]["mean"] == pytest.approx((0.75 + 0.5) / 2)
    assert figures["chance"] == pytest.approx(4 / 5)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_reward_without_skill_wins_at_the_chance_level(n: int) -> None:
    scores = np.random.default_rng(0).normal(size=(20_000, n + 1))
    wins = np.mean([row[:n][choose(row[:n])] > row[n] for row in scores])
    assert wins == pytest.approx(chance_win(n), abs=0.01)


def test_the_first_of_equal_candidates_is_chosen() -> None:
    assert choose([1.0, 3.0, 2.0]) == 1
    assert choose([2.0, 3.0, 3.0]) == 1
    with pytest.raises(ValueError):
        choose([])
    with pytest.raises(ValueError):
        choose([1.0, float("nan")])
