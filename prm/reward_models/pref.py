"""PReF: personalization by reward factorization."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from prm.errors import UserError
from prm.losses import weighted_mean
from prm.reward_models.base import FeatureReward
from prm.reward_models.pref_start import PairCells, Start, feature_svd_start, svd_start


class PReF(FeatureReward):
    """Factorized reward: users are directions in a shared space of reward features.

    r_u(x, y) = u . phi(h),  phi(h) = W h without bias, W: [J, d] shared, u: [J] one row a user.
    (Shenfeld et al. 2025, eq. 3.) Trained with the Bradley-Terry loss from an SVD start (`pref_start`; arXiv
    2512.23067, appendix D). A new user is the posterior mode of a logistic regression on phi(y_c) - phi(y_r): convex,
    under a Gaussian prior with the training users' mean and covariance.

    (R u, R^-T W) gives the same rewards for any invertible R, so only rewards are comparable, never u or W.

    Args:
        feature_dim: d, width of the backbone feature.
        num_factors: J; 5 to 16 in the papers.
        start: how training starts. svd: from the truncated SVD of the matrix of all training users' choices, which
            needs users who have judged the same pairs; feature_svd: from the SVD of one ridge fit a user, which does
            not; random: neither.
        distance_penalty: weight of mean ||phi(y_c) - phi(y_r)|| in the loss; the published code has 0.02.
    """

    linear: ClassVar[bool] = True
    #: Without training users to take a prior from.
    adaptation_precision: ClassVar[float] = 1.0
    STARTS: ClassVar[tuple[str, ...]] = ("svd", "feature_svd", "random")

    def __init__(
        self, feature_dim: int, num_factors: int = 8, start: str = "svd", distance_penalty: float = 0.0
    ) -> None:
        super().__init__(feature_dim)
        if num_factors < 1:
            raise UserError(f"num_factors is {num_factors}: PReF needs at least one factor")
        if start not in self.STARTS:
            raise UserError(f"start {start!r} is not known to PReF: use one of {', '.join(self.STARTS)}")
        if distance_penalty < 0:
            raise UserError(f"distance_penalty is {distance_penalty}: 0 or more is needed")
        self.num_factors = num_factors
        self.user_dim = num_factors
        self.start = start
        self.distance_penalty = distance_penalty
        self.weight = nn.Parameter(torch.randn(num_factors, feature_dim) / feature_dim**0.5)

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_users, self.num_factors, generator=generator) / self.num_factors**0.5

    def prior_precision(self, trained_uz: Tensor) -> Tensor | float:
        """Inverse of the training users' covariance [J, J], shrunk to a multiple of the identity.

        cov = (U S + J s I) / (U + J) with the sample covariance S and s = trace(S) / J: with few users the data say
        little about directions, and the fewer, the more they are told to be alike.
        """
        users = len(trained_uz)
        if users < 2:
            return self.adaptation_precision
        centred = trained_uz.double() - trained_uz.double().mean(0)
        sample = centred.T @ centred / (users - 1)
        scale = sample.diagonal().mean()
        if not scale > 0:
            return self.adaptation_precision
        identity = torch.eye(self.num_factors, dtype=torch.double, device=trained_uz.device)
        shrunk = (users * sample + self.num_factors * scale * identity) / (users + self.num_factors)
        # A direction in which nobody differs would have no bound.
        return torch.linalg.inv(shrunk + 1e-6 * scale * identity)

    def project(self, inputs_nd: Tensor) -> Tensor:
        """phi(h): [.., J]."""
        return inputs_nd @ self.weight.T

    def mixing(self, users_z: Tensor) -> Tensor:
        return users_z

    def mixing_jacobian(self, users_uz: Tensor) -> Tensor:
        """The identity for every user."""
        return torch.eye(self.num_factors, dtype=users_uz.dtype, device=users_uz.device).expand(len(users_uz), -1, -1)

    def loss(self, chosen_nd: Tensor, rejected_nd: Tensor, user_nz: Tensor, weight_n: Tensor | None = None) -> Tensor:
        """Bradley-Terry, and the distance penalty where it is set."""
        gap_nj = self.project(chosen_nd) - self.project(rejected_nd)
        loss = self.pair_loss((user_nz * gap_nj).sum(-1), weight_n)
        if self.distance_penalty:
            loss = loss + self.distance_penalty * weighted_mean(torch.linalg.vector_norm(gap_nj, dim=-1), weight_n)
        return loss

    def start_from(self, cells: PairCells, difference_pd: Tensor, seed: int) -> Start:
        """Put the start into this head and return it with the users' states.

        Args:
            cells: the training users' choices.
            difference_pd: h(first) - h(second) of each distinct pair, [P, d].
            seed: of the cells that are held out.
        """
        factorize = svd_start if self.start == "svd" else feature_svd_start
        found = factorize(cells, difference_pd, self.num_factors, seed=seed)
        with torch.no_grad():
            self.weight.copy_(found.weight)
        return found
