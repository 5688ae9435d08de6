"""Means over users with bootstrap intervals: the unit of resampling is the user, never the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over users with its interval.

    Attributes:
        mean: mean over users of each user's mean.
        low, high: percentile bootstrap interval over users (both equal `mean` when there is one user).
        num_users: users that entered.
        num_rows: rows that entered, over all users.
    """

    mean: float
    low: float
    high: float
    num_users: int
    num_rows: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def per_user_means(user_ids: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Mean of `values` for each user, in the order in which users first appear."""
    if len(user_ids) != len(values):
        raise ValueError(f"{len(user_ids)} user ids for {len(values)} values")
    sums: dict[str, list[float]] = {}
    for user, value in zip(user_ids, values, strict=True):
        sums.setdefault(user, []).append(float(value))
    return {user: float(np.mean(rows)) for user, rows in sums.items()}


def mean_over_users(
    user_ids: Sequence[str],
    values: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Mean over users of each user's mean, with a percentile bootstrap over users.

    Args:
        user_ids: user of each row, length N.
        values: one finite number a row, length N.
        level: coverage of the interval.
        resamples: bootstrap samples of users.
        seed: of the bootstrap, so that a figure can be reproduced.

    Raises:
        ValueError: no rows, lengths differ, or a value is not finite.
    """
    if len(values) == 0:
        raise ValueError("no rows to average")
    if not np.isfinite(np.asarray(values, dtype=float)).all():
        raise ValueError("a value to average is not finite")
    means = np.array(list(per_user_means(user_ids, values).values()))
    draws = np.random.default_rng(seed).integers(0, len(means), size=(resamples, len(means)))
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(means[draws].mean(axis=1), tails)
    return Estimate(float(means.mean()), float(low), float(high), len(means), len(values))


def preference_credit(chosen: float, rejected: float) -> float:
    """1 when the chosen response scores higher, 0 when lower, 1/2 for a tie."""
    return 0.5 * (1.0 + float(np.sign(chosen - rejected)))
