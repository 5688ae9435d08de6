"""Loss over evaluation pairs: over unique pairs, mean over users, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class UserMeanLoss(Metric):
    """Mean over users of each user's mean Bradley-Terry loss, -log sigma(r(y_c) - r(y_r)), over unique pairs.

    It is measured on the scores for every method, also for those that train with another loss.

    Example:
        >>> metric = UserMeanLoss()
        >>> ids, users = torch.tensor([0, 1]), torch.tensor([0, 0])
        >>> metric.update(ids, users, torch.zeros(2), torch.zeros(2))
        >>> round(metric.compute(), 4)
        0.6931
    """

    full_state_update = False
    higher_is_better = False
    sample_ids: list[Tensor]
    user_index: list[Tensor]
    losses: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("sample_ids", "user_index", "losses"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, sample_ids: Tensor, user_index: Tensor, chosen: Tensor, rejected: Tensor) -> None:
        """Add N pairs: unique ids, users and the rewards of both responses, each [N]."""
        self.sample_ids.append(sample_ids)
        self.user_index.append(user_index)
        self.losses.append(-functional.logsigmoid(chosen.detach() - rejected.detach()))

    def compute(self) -> float:
        """The figure over all pairs seen."""
        ids, users, losses = (dim_zero_cat(getattr(self, name)) for name in ("sample_ids", "user_index", "losses"))
        unique, position = ids.unique(return_inverse=True)
        # Repeats of a pair carry equal values, so it does not matter which one stays.
        user_of = torch.zeros_like(unique).scatter_(0, position, users)
        loss_of = torch.zeros(len(unique), dtype=torch.double, device=ids.device).scatter_(0, position, losses.double())
        _, user = user_of.unique(return_inverse=True)
        return float((torch.bincount(user, weights=loss_of) / torch.bincount(user)).mean())
