"""The reward model that is the same for everybody: the baseline every personalized one has to beat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prm.reward_models.base import FeatureReward


class GlobalBT(FeatureReward):
    """Global reward: one linear head, no user.

    r(x, y) = v . h(x, y),  v: [d]. (Bradley-Terry reward model; Ouyang et al. 2022, section 3.5.)

    Args:
        feature_dim: d, width of the backbone feature.
    """

    def __init__(self, feature_dim: int) -> None:
        super().__init__(feature_dim)
        self.weight = nn.Parameter(torch.randn(feature_dim) / feature_dim**0.5)

    def scores(self, features_nd: Tensor, user_nz: Tensor) -> Tensor:
        """Rewards [N] of features [N, d]; `user_nz` is not read."""
        return features_nd @ self.weight
