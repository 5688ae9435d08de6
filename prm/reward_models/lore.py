"""LoRE: low-rank reward modelling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prm.errors import UserError
from prm.reward_models.base import FeatureReward


class LoRE(FeatureReward):
    """Low-rank reward: every user mixes the same few basis rewards.

    r_u(x, y) = softmax(w_u) . (V^T h),  V: [d, B] shared, w_u: [B] one row a user.
    (Bose et al. 2025, eq. 4; trained with the Bradley-Terry loss.)

    V starts at N(0, 1/d) and w at N(0, 1), so that features of unit scale give rewards of unit scale; the published
    code draws both from N(0, 1) and divides the logit by 100. A new user starts at the mean of the training users'
    w and only w is fitted.

    What the simplex can say: opposite tastes on K axes need 0 inside the hull of the bases, so num_bases >= K + 1.
    With one basis this is GlobalBT.

    Args:
        feature_dim: d, width of the backbone feature.
        num_bases: B. More bases fit finer taste and need more pairs per user; 1-50 in the paper.
    """

    def __init__(self, feature_dim: int, num_bases: int = 8) -> None:
        super().__init__(feature_dim)
        if num_bases < 1:
            raise UserError(f"num_bases is {num_bases}: LoRE needs at least one basis reward")
        self.num_bases = num_bases
        self.user_dim = num_bases
        self.bases = nn.Parameter(torch.randn(feature_dim, num_bases) / feature_dim**0.5)

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_users, self.num_bases, generator=generator)

    def scores(self, features_nd: Tensor, user_nz: Tensor) -> Tensor:
        """Rewards [N] of features [N, d] for the users whose mixing rows are [N, B]."""
        return (features_nd @ self.bases * user_nz.softmax(-1)).sum(-1)

    def scores_for_all(self, features_nd: Tensor, users_uz: Tensor) -> Tensor:
        """Rewards [U, N]: one matrix product, since the basis rewards serve all users."""
        return users_uz.softmax(-1) @ (features_nd @ self.bases).T
