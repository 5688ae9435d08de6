"""Means over users: by hand, and the coverage of the interval on simulated users."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prm.statistics import Estimate, mean_over_users, per_user_means, preference_credit


def test_every_user_counts_once_however_many_rows_they_have() -> None:
    """a: (1 + 1 + 1 + 0) / 4 = 3/4, b: 0, c: (1 + 0) / 2 = 1/2; the mean of the three is 5/12, that of the rows 4/7."""
    users = ["a", "b", "a", "c", "a", "c", "a"]
    values = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert per_user_means(users, values) == {"a": 0.75, "b": 0.0, "c": 0.5}
    estimate = mean_over_users(users, values)
    assert estimate.mean == pytest.approx(5 / 12)
    assert (estimate.num_users, estimate.num_rows) == (3, 7)
    assert 0.0 <= estimate.low < estimate.mean < estimate.high <= 0.75


def test_users_stand_in_the_order_of_their_first_row() -> None:
    assert list(per_user_means(["z", "a", "z"], [1, 2, 3])) == ["z", "a"]


@pytest.mark.parametrize("users", [["a"] * 4, ["a", "a", "b", "c"]])
def test_the_interval_of_constant_data_is_a_point(users: list[str]) -> None:
    assert mean_over_users(users, [0.25] * 4) == Estimate(0.25, 0.25, 0.25, len(set(users)), 4)


def test_one_user_has_no_interval_whatever_their_rows_say() -> None:
    """The unit of resampling is the user: rows of one user give no width."""
    estimate = mean_over_users(["a"] * 50, list(range(50)))
    assert estimate.low == estimate.mean == estimate.high == 24.5


def test_the_interval_is_the_percentile_bootstrap_over_users() -> None:
    """Two users at 0 and 1: a resample averages 0, 1/2 or 1 with probability 1/4, 1/2, 1/4."""
    estimate = mean_over_users(["a", "b", "b", "b"], [0, 1, 1, 1], level=0.95, resamples=4000)
    assert (estimate.low, estimate.mean, estimate.high) == (0.0, 0.5, 1.0)
    narrow = mean_over_users(["a", "b", "b", "b"], [0, 1, 1, 1], level=0.4, resamples=4000)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_rows_of_one_user_do_not_narrow_the_interval() -> None:
    users, values = ["a", "b", "c"], [0.0, 0.5, 1.0]
    assert mean_over_users(users * 40, values * 40).high == pytest.approx(mean_over_users(users, values).high)


def test_a_seed_gives_the_same_interval_and_another_seed_another() -> None:
    rng = np.random.default_rng(1)
    users, values = [f"u{i}" for i in range(30)], rng.normal(size=30).tolist()
    first = mean_over_users(users, values, seed=5)
    assert first == mean_over_users(users, values, seed=5)
    other = mean_over_users(users, values, seed=6)
    assert other.mean == first.mean
    assert (other.low, other.high) != (first.low, first.high)


def test_a_higher_level_is_wider() -> None:
    rng = np.random.default_rng(2)
    users, values = [f"u{i}" for i in range(40)], rng.normal(size=40).tolist()
    wide, narrow = (mean_over_users(users, values, level=level) for level in (0.99, 0.8))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_interval_covers_the_true_mean_about_95_times_in_100() -> None:
    """400 simulated studies of 60 users whose rows are correlated within the user, unbalanced.

    The standard error of a coverage of 0.95 over 400 studies is 0.011, and the percentile bootstrap of 60 users runs
    a little low. Resampling rows would cover about half as often.
    """
    rng = np.random.default_rng(7)
    covered = 0
    for study in range(400):
        sizes = rng.integers(1, 12, size=60)
        taste = rng.normal(0.6, 0.2, size=60)
        users = [f"u{user}" for user, size in enumerate(sizes) for _ in range(size)]
        values = np.repeat(taste, sizes) + rng.normal(0, 0.1, size=len(users))
        estimate = mean_over_users(users, values.tolist(), resamples=400, seed=study)
        covered += estimate.low <= 0.6 <= estimate.high
    assert 0.91 <= covered / 400 <= 0.98


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        mean_over_users(["a", "b"], [0.5, bad])


def test_nothing_to_average_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        mean_over_users([], [])


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0]])
def test_other_lengths_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="2 user ids"):
        mean_over_users(["a", "b"], values)


def test_a_tie_counts_half() -> None:
    assert preference_credit(2.0, 1.0) == 1.0
    assert preference_credit(1.0, 2.0) == 0.0
    assert preference_credit(-3.5, -3.5) == 0.5
    assert math.isnan(preference_credit(math.nan, 1.0)), "a score that is no number must not count as a tie"


def test_an_estimate_as_json() -> None:
    assert mean_over_users(["a"], [1]).as_dict() == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "num_users": 1,
        "num_rows": 1,
    }
