"""Accuracy over unique pairs, mean over users."""

import pytest
import torch

from prm.preference_accuracy import UserPreferenceAccuracy


def accuracy(rows: list[tuple[int, int, float, float]], parts: int = 1) -> dict[str, float]:
    """The figures of rows (sample id, user, chosen, rejected), fed in `parts` batches."""
    metric = UserPreferenceAccuracy()
    for part in range(parts):
        ids, users, chosen, rejected = zip(*rows[part::parts], strict=True)
        metric.update(torch.tensor(ids), torch.tensor(users), torch.tensor(chosen), torch.tensor(rejected))
    return metric.compute()


def test_is_the_mean_over_users_and_not_over_pairs() -> None:
    rows = [(0, 7, 1.0, 0.0), (1, 7, 1.0, 0.0), (2, 7, 1.0, 0.0), (3, 9, 0.0, 1.0)]
    figures = accuracy(rows)
    assert figures["accuracy"] == 0.5  # 3 of 4 pairs, but one user all right and one all wrong
    assert (figures["num_users"], figures["num_pairs"]) == (2, 4)


def test_a_pair_that_a_sampler_repeats_counts_once() -> None:
    rows = [(0, 0, 1.0, 0.0), (1, 0, 0.0, 1.0)]
    assert accuracy(rows) == accuracy([*rows, rows[0], rows[0]]) == accuracy([*rows, rows[1]], parts=3)
    assert accuracy([*rows, rows[0], rows[0]])["num_pairs"] == 2


def test_ties_count_one_half_and_are_reported() -> None:
    figures = accuracy([(0, 0, 1.0, 1.0), (1, 0, 2.0, 1.0), (2, 1, 3.0, 3.0)])
    assert figures["accuracy"] == pytest.approx((0.75 + 0.5) / 2)
    assert figures["strict"] == pytest.approx((0.5 + 0.0) / 2)
    assert figures["ties"] == 2


def test_small_differences_of_large_rewards_are_no_ties() -> None:
    metric = UserPreferenceAccuracy()
    large = torch.tensor([1e9 + 1], dtype=torch.float64)
    metric.update(torch.tensor([0]), torch.tensor([0]), large, large - 1)
    assert metric.compute()["ties"] == 0


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_does_not_depend_on_batches(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 2, generator=generator).tolist()
    rows = [(i, i % 7, chosen, rejected) for i, (chosen, rejected) in enumerate(scores)]
    assert accuracy(rows, parts) == pytest.approx(accuracy(rows))


def test_refuses_what_cannot_be_averaged() -> None:
    one, nan = torch.tensor([1.0]), torch.tensor([float("nan")])
    metric = UserPreferenceAccuracy()
    with pytest.raises(ValueError, match="never called"):
        metric.compute()
    with pytest.raises(ValueError, match="not finite"):
        metric.update(torch.tensor([0]), torch.tensor([0]), one, nan)
    with pytest.raises(ValueError, match="one shape"):
        metric.update(torch.tensor([0, 1]), torch.tensor([0]), one, one)
    metric.update(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match="two users"):
        metric.compute()


def test_reset_forgets() -> None:
    metric = UserPreferenceAccuracy()
    metric.update(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.0]), torch.tensor([1.0]))
    metric.reset()
    metric.update(torch.tensor([1]), torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert metric.compute()["accuracy"] == 1.0
