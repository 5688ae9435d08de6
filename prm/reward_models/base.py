"""What all feature rewards share: r_u(x, y) = g(h(x, y); theta, z_u).

h is the backbone's feature, theta the head's shared parameters, z_u the user's state. The head never sees the
backbone, so one forward of the backbone serves every user and every method.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from prm.losses import bradley_terry


class FeatureReward(nn.Module):
    """Base of the feature rewards. A method says how users start, how they score, and how new users are adapted.

    Args:
        feature_dim: d, width of the backbone feature; the first argument of every method.

    Attributes:
        user_dim: width of a user's state z_u; 0 means that the method does not look at the user.
    """

    user_dim: int = 0
    #: Precision (inverse variance) of the Gaussian prior around the start that adaptation uses unless told otherwise.
    adaptation_precision: ClassVar[float] = 0.0

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, as a checkpoint stores them: each is kept under its own name."""
        return {
            name: getattr(self, name) for name in inspect.signature(type(self).__init__).parameters if name != "self"
        }

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        """States [U, user_dim] that training starts from."""
        return torch.zeros(num_users, self.user_dim)

    def new_users(self, num_users: int, trained_uz: Tensor) -> Tensor:
        """States [num_users, user_dim] that adaptation starts from: the mean of the training users' states."""
        if len(trained_uz) == 0:
            return torch.zeros(num_users, self.user_dim)
        return trained_uz.float().mean(0, keepdim=True).repeat(num_users, 1)

    def forward(self, part: str, *args: Any) -> Any:
        """`loss` or `scores`, by name: strategies that shard parameters gather them around a module's forward."""
        return getattr(self, part)(*args)

    def scores(self, features_nd: Tensor, user_nz: Tensor) -> Tensor:
        """Rewards [N] of features [N, d], each for the user whose state is the same row of [N, user_dim]."""
        raise NotImplementedError

    def scores_for_all(self, features_nd: Tensor, users_uz: Tensor) -> Tensor:
        """Rewards [U, N] of every feature for every user."""
        num_users, num_rows = len(users_uz), len(features_nd)
        features = features_nd.repeat(num_users, 1)
        users = users_uz.repeat_interleave(num_rows, 0)
        return self.scores(features, users).view(num_users, num_rows)

    def loss(self, chosen_nd: Tensor, rejected_nd: Tensor, user_nz: Tensor, weight_n: Tensor | None = None) -> Tensor:
        """Training loss (scalar) of pairs: Bradley-Terry on the rewards, unless a method has its own."""
        return bradley_terry(self.scores(chosen_nd, user_nz) - self.scores(rejected_nd, user_nz), weight_n)
