"""Accuracy of a reward over preference pairs: per user over unique pairs, then the mean over users.

    accuracy_u = mean over the user's pairs of [r(y_c) > r(y_r)] + 1/2 [r(y_c) = r(y_r)]
    accuracy   = mean over users of accuracy_u

(arXiv 2512.23067, Def. 1, with ties at one half; `strict` counts a tie as wrong, as the paper does.) A distributed
sampler may hand one pair to two ranks to make their shares equal: a pair counts once, by its sample id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class UserPreferenceAccuracy(Metric):
    """Mean over users of the share of unique pairs whose chosen response scores higher.

    `compute()` returns a dict of numbers:

        accuracy   ties count one half
        strict     ties count as wrong
        ties       number of unique pairs with equal scores
        num_users, num_pairs   unique users and pairs

    Example:
        >>> metric = UserPreferenceAccuracy()
        >>> ids, users = torch.tensor([0, 1]), torch.tensor([0, 0])
        >>> metric.update(ids, users, chosen=torch.tensor([1.0, 2.0]), rejected=torch.tensor([0.0, 2.0]))
        >>> metric.compute()["accuracy"]
        0.75
    """

    full_state_update = False
    higher_is_better = True

    # torchmetrics declares states at run time; these lines declare them to the type checker.
    sample_ids: list[Tensor]
    user_index: list[Tensor]
    credit: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("sample_ids", "user_index", "credit"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, sample_ids: Tensor, user_index: Tensor, chosen: Tensor, rejected: Tensor) -> None:
        """Add N pairs.

        Args:
            sample_ids: LongTensor [N], one id a pair, unique in the data set.
            user_index: LongTensor [N], the user of each pair.
            chosen, rejected: rewards [N] of the two responses.

        Raises:
            ValueError: the shapes differ, or a reward is not finite (it would count as a tie or a loss unseen).
        """
        shapes = {tuple(t.shape) for t in (sample_ids, user_index, chosen, rejected)}
        if len(shapes) != 1 or chosen.ndim != 1:
            raise ValueError(f"sample_ids, user_index, chosen and rejected need one shape [N], got {sorted(shapes)}")
        if not (torch.isfinite(chosen).all() and torch.isfinite(rejected).all()):
            raise ValueError("a reward is not finite")
        self.sample_ids.append(sample_ids.long())
        self.user_index.append(user_index.long())
        self.credit.append(0.5 * ((chosen > rejected).float() + (chosen >= rejected).float()))

    def compute(self) -> dict[str, float]:
        """The figures over all pairs seen.

        Raises:
            ValueError: no pairs were added, or one sample id stands with two users.
        """
        if not (isinstance(self.sample_ids, Tensor) or self.sample_ids):
            raise ValueError("no pairs to average: update() was never called")
        ids, first = _unique_with_first(dim_zero_cat(self.sample_ids))
        if ids.numel() == 0:
            raise ValueError("no pairs to average: every update was empty")
        all_users = dim_zero_cat(self.user_index)
        position = torch.searchsorted(ids, dim_zero_cat(self.sample_ids))
        users, credit = all_users[first], dim_zero_cat(self.credit)[first].double()
        if not torch.equal(users[position], all_users):
            raise ValueError("one sample id stands with two users: sample ids must be unique in the data set")
        _, inverse = users.unique(return_inverse=True)
        counts = torch.bincount(inverse).double()
        per_user = torch.bincount(inverse, weights=credit) / counts
        strict = torch.bincount(inverse, weights=(credit == 1.0).double()) / counts
        return {
            "accuracy": float(per_user.mean()),
            "strict": float(strict.mean()),
            "ties": int((credit == 0.5).sum()),
            "num_users": counts.numel(),
            "num_pairs": ids.numel(),
        }


def _unique_with_first(ids_n: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted unique ids [M] and, for each, the position [M] at which it first stands."""
    unique, inverse = ids_n.unique(sorted=True, return_inverse=True)
    order = torch.arange(ids_n.numel(), device=ids_n.device)
    first = torch.full_like(unique, ids_n.numel()).scatter_reduce(0, inverse, order, reduce="amin")
    return unique, first
