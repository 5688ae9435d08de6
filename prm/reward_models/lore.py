"""LoRE: low-rank reward modelling."""

from __future__ import annotations

from typing import ClassVar

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
    w, and only w is fitted, under a weak Gaussian prior around that start: without it, w of a one-sided support set
    has no end.

    What the simplex can say: opposite tastes on K axes need 0 inside the hull of the bases, so num_bases >= K + 1.
    With one basis this is GlobalBT.

    Args:
        feature_dim: d, width of the backbone feature.
        num_bases: B. More bases fit finer taste and need more pairs per user; 1-50 in the paper.
    """

    linear: ClassVar[bool] = True
    adaptation_precision: ClassVar[float] = 0.1

    def __init__(self, feature_dim: int, num_bases: int = 8) -> None:
        super().__init__(feature_dim)
        if num_bases < 1:
            raise UserError(f"num_bases is {num_bases}: LoRE needs at least one basis reward")
        self.num_bases = num_bases
        self.user_dim = num_bases
        self.bases = nn.Parameter(torch.randn(feature_dim, num_bases) / feature_dim**0.5)

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_users, self.num_bases, generator=generator)

    def project(self, inputs_nd: Tensor) -> Tensor:
        """The basis rewards [.., B]."""
        return inputs_nd @ self.bases

    def mixing(self, users_z: Tensor) -> Tensor:
        return users_z.softmax(-1)

    def mixing_jacobian(self, users_uz: Tensor) -> Tensor:
        """diag(p) - p p^T of p = softmax(w)."""
        p = users_uz.softmax(-1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]

    def mixing_curvature(self, users_uz: Tensor, weight_up: Tensor) -> Tensor:
        """diag(q) - q p^T - p q^T with q = p (c - c . p), of p = softmax(w) and weights c."""
        p = users_uz.softmax(-1)
        q = p * (weight_up - (weight_up * p).sum(-1, keepdim=True))
        crossed = q[:, :, None] * p[:, None, :]
        return torch.diag_embed(q) - crossed - crossed.mT


class LoREAlt(LoRE):
    """LoRE trained by turns: some optimizer steps move the bases, the next ones the users' weights.

    The reward and the loss are LoRE's. (arXiv 2512.23067, section 6.2, "LoRE-Alt".) While one side rests its learning
    rate is 0; the optimizer still averages its gradients.

    Args:
        feature_dim: d, width of the backbone feature.
        num_bases: B, as in LoRE.
        period: optimizer steps of each turn. The bases, and an adapter below them, begin.
    """

    def __init__(self, feature_dim: int, num_bases: int = 8, period: int = 1) -> None:
        super().__init__(feature_dim, num_bases)
        if period < 1:
            raise UserError(f"period is {period}: a turn takes at least one step")
        self.period = period

    def resting(self, step: int) -> frozenset[str]:
        return frozenset({"head", "adapter"} if step // self.period % 2 else {"users"})
