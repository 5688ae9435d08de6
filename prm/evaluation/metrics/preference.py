"""Figures of rewards: RM accuracy over pairs, and win / tie / loss of guided over plain answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prm.inference.decoding.best_of_n import chance_win
from prm.preference_accuracy import UserPreferenceAccuracy
from prm.statistics import mean_over_users, preference_credit

__all__ = ["UserPreferenceAccuracy", "rm_accuracy", "win_rate"]


def rm_accuracy(user_ids: Sequence[str], chosen: Sequence[float], rejected: Sequence[float]) -> dict[str, Any]:
    """RM accuracy of N unique pairs: mean over users with its interval, ties at 1/2; strict accuracy and tie count.

    (arXiv 2512.23067, Def. 1.)
    """
    users = {user: row for row, user in enumerate(dict.fromkeys(user_ids))}
    metric = UserPreferenceAccuracy()
    metric.update(
        torch.arange(len(user_ids)),
        torch.tensor([users[user] for user in user_ids]),
        torch.tensor(list(chosen), dtype=torch.float64),
        torch.tensor(list(rejected), dtype=torch.float64),
    )
    figures = metric.compute()
    credit = [preference_credit(c, r) for c, r in zip(chosen, rejected, strict=True)]
    estimate = mean_over_users(user_ids, credit)
    return {**estimate.as_dict(), "strict": figures["strict"], "ties": figures["ties"]}


def win_rate(user_ids: Sequence[str], guided: Sequence[float], plain: Sequence[float], n: int) -> dict[str, Any]:
    """Cases in which a reward scores its own guided answer above, equal to and below the plain one.

    (arXiv 2512.23067, Table 5, with ties at 1/2.) Best-of-n wins n / (n + 1) without any skill: `chance`. That is
    exact for distinct answers that the reward ranks at random; only what exceeds it speaks for or against the reward.
    """
    credit = [preference_credit(g, p) for g, p in zip(guided, plain, strict=True)]
    return {
        "win": credit.count(1.0),
        "tie": credit.count(0.5),
        "loss": credit.count(0.0),
        "win_rate": mean_over_users(user_ids, credit).as_dict(),
        "chance": chance_win(n),
    }
