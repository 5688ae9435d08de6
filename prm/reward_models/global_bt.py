"""The reward model that is the same for everybody: the baseline every personalized one has to beat."""

from __future__ import annotations

from typing import ClassVar

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

    def project(self, inputs_nd: Tensor) -> Tensor:
        return (inputs_nd @ self.weight)[..., None]

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        """The projected input itself, for every user; the states are not read."""
        shape = torch.broadcast_shapes(projected_p.shape[:-1], users_z.shape[:-1])
        return projected_p[..., 0].expand(shape)


class GlobalMean(GlobalBT):
    """Global reward v2: the mean of a linear reward over all tokens, no user.

    r(x, y) = 1/T sum_t v . h_t = v . (1/T sum_t h_t),  v: [d]. (arXiv 2512.23067, section 6.2, "Global v2".)

    The mean over tokens is the backbone's pooling, so `model.pooling` must be mean.

    Args:
        feature_dim: d, width of the backbone feature.
    """

    required_pooling: ClassVar[str | None] = "mean"
