"""PAL: pluralistic alignment. A user is a mixture of a few prototypes, and likes what lies near."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from prm.errors import UserError
from prm.losses import bradley_terry, hinge
from prm.reward_models.base import FeatureReward


def _checked(num_groups: int, width: int) -> None:
    if num_groups < 1:
        raise UserError(f"num_groups is {num_groups}: PAL needs at least one prototype")
    if width < 1:
        raise UserError(f"width is {width}: 1 or more is needed")


class PALA(FeatureReward):
    """PAL-A: the reward is the nearness of a response to the user's ideal point.

    r_u(x, y) = -||f(h) - f(sum_k softmax(w_u)_k P_k)||,  f: an MLP d -> width, P: [K, d] prototypes in f's input
    space, w_u: [K] one row a user. (Chen et al. 2024, PAL-A.) P starts as Gaussian rows of unit norm; the loss is the
    hinge max(0, 1 - Delta r), or Bradley-Terry.

    K groups are what it can tell apart: users between K ideal points. With K = 1 it is blind to users; tastes on
    several axes need more prototypes than the paper's two.

    Args:
        feature_dim: d, width of the backbone feature.
        num_groups: K.
        width: of f's output; 512 in the paper.
        pair_loss_name: hinge or logistic.
    """

    LOSSES: ClassVar[tuple[str, ...]] = ("hinge", "logistic")
    adaptation_precision: ClassVar[float] = 0.1
    adaptation_lr: ClassVar[float] = 0.1

    def __init__(self, feature_dim: int, num_groups: int = 2, width: int = 512, pair_loss_name: str = "hinge") -> None:
        super().__init__(feature_dim)
        _checked(num_groups, width)
        if pair_loss_name not in self.LOSSES:
            raise UserError(f"pair_loss_name {pair_loss_name!r} is not known: use one of {', '.join(self.LOSSES)}")
        self.num_groups, self.width, self.pair_loss_name = num_groups, width, pair_loss_name
        self.user_dim = num_groups
        self.mapping = nn.Sequential(nn.Linear(feature_dim, width), nn.GELU(), nn.Linear(width, width, bias=False))
        self.prototypes = nn.Parameter(nn.functional.normalize(torch.randn(num_groups, feature_dim), dim=-1))

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_users, self.num_groups, generator=generator)

    def project(self, inputs_nd: Tensor) -> Tensor:
        """f(h): [.., width]."""
        mapped: Tensor = self.mapping(inputs_nd)
        return mapped

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        ideal = self.mapping(users_z.softmax(-1) @ self.prototypes)
        return -torch.linalg.vector_norm(projected_p - ideal, dim=-1)

    def pair_loss(self, delta_n: Tensor, weight_n: Tensor | None = None) -> Tensor:
        return hinge(delta_n, weight_n) if self.pair_loss_name == "hinge" else bradley_terry(delta_n, weight_n)


class PALB(FeatureReward):
    """PAL-B: the user's prototypes read the prompt, the reward is their angle to the response.

    r_u(x, y) = s cos(sum_k softmax(w_u)_k g_k(h(x)), f(h(x, y))),  f and each g_k linear d -> width, w_u: [K] one row
    a user, h(x) the feature of the prompt's last token. s = exp(log_scale) starts at 1 / 0.07 and is kept to 100 at
    most. (Chen et al. 2024, PAL-B; the two-class cross-entropy over (chosen, rejected) is -log sigma(Delta r).)

    The head's input is [h(x, y); h(x)].

    Args:
        feature_dim: d, width of the backbone feature.
        num_groups: K.
        width: of the space in which the angle is taken; 512 in the paper.
    """

    reads_prompt: ClassVar[bool] = True
    adaptation_precision: ClassVar[float] = 0.1
    adaptation_lr: ClassVar[float] = 0.1

    def __init__(self, feature_dim: int, num_groups: int = 2, width: int = 512) -> None:
        super().__init__(feature_dim)
        _checked(num_groups, width)
        self.num_groups, self.width = num_groups, width
        self.user_dim = num_groups
        self.response = nn.Linear(feature_dim, width)
        self.prompt = nn.Linear(feature_dim, num_groups * width)
        self.log_scale = nn.Parameter(torch.tensor([math.log(1 / 0.07)]))

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_users, self.num_groups, generator=generator)

    def project(self, inputs_nd: Tensor) -> Tensor:
        """[f(h(x, y)) of unit norm; g_1(h(x)), .., g_K(h(x))]: [.., (1 + K) width]."""
        response, prompt = inputs_nd.split(self.feature_dim, -1)
        return torch.cat([nn.functional.normalize(self.response(response), dim=-1), self.prompt(prompt)], -1)

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        response = projected_p[..., : self.width]
        prototypes = projected_p[..., self.width :].unflatten(-1, (self.num_groups, self.width))
        mixed = (users_z.softmax(-1)[..., None] * prototypes).sum(-2)
        cosine = (nn.functional.normalize(mixed, dim=-1) * response).sum(-1)
        return self.log_scale.exp().clamp(max=100.0) * cosine
