"""VPL: variational preference learning. A user is encoded from annotated pairs, never trained."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from prm.errors import UserError
from prm.losses import gaussian_kl, weighted_mean
from prm.reward_models.base import FeatureReward


class VPL(FeatureReward):
    """Variational preference learning: r_u(x, y) = MLP([h; z]) with z from an encoder of the user's pairs.

    q(z | pairs) = N(m, diag exp(v)), [m; v] = A mean_i e([h(y_c,i); h(y_r,i)]),  e an MLP, so the order of the pairs
    does not matter. Training draws z ~ q, evaluation takes z = m. The loss is -log sigma(Delta r) + beta_t KL(q || N(0,
    I)), beta_t rising from 0 to beta over the first half of every `annealing_period` steps, as a half cosine.
    (Poddar et al. 2024, eq. 3; cyclical annealing of Fu et al. 2019.)

    The context of a training pair holds other pairs of its user, never itself nor another pair of its prompt; between
    2 and `context_pairs` of them, drawn anew in each epoch. A user without pairs has z = 0.

    Watch for posterior collapse: a decoder that ignores z. KL, active units and the accuracy with another user's z in
    place of the user's own are logged.

    Args:
        feature_dim: d, width of the backbone feature.
        latent_dim: L, width of z; 512 in the paper's language experiments.
        width: hidden units of the encoder and of the reward.
        context_pairs: most pairs that a user is encoded from; 2 to 8 in the paper. Adaptation reads all support pairs.
        beta: weight of the KL; 0, 3e-6 or 1e-4 in the paper's code.
        annealing_period: optimizer steps of a cycle; 0 keeps beta constant.
        normalize: scale z to length sqrt(L), in training and evaluation alike. The published code does it in training
            alone.
    """

    adaptation_precision: ClassVar[float] = 0.0

    def __init__(
        self,
        feature_dim: int,
        latent_dim: int = 512,
        width: int = 256,
        context_pairs: int = 8,
        beta: float = 1e-4,
        annealing_period: int = 0,
        normalize: bool = False,
    ) -> None:
        super().__init__(feature_dim)
        if latent_dim < 1 or width < 1:
            raise UserError(f"latent_dim {latent_dim}, width {width}: 1 or more is needed")
        if context_pairs < 1:
            raise UserError(f"context_pairs is {context_pairs}: VPL encodes users from at least one pair")
        if beta < 0 or annealing_period < 0:
            raise UserError(f"beta {beta}, annealing_period {annealing_period}: 0 or more is needed")
        self.latent_dim, self.width, self.context_pairs = latent_dim, width, context_pairs
        self.beta, self.annealing_period, self.normalize = beta, annealing_period, normalize
        self.user_dim = latent_dim
        self.pair_encoder = nn.Sequential(
            nn.Linear(2 * feature_dim, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.posterior = nn.Linear(width, 2 * latent_dim)
        # The first layer of the MLP on [h; z], split so that h is projected once for all users.
        self.from_feature = nn.Linear(feature_dim, width)
        self.from_latent = nn.Linear(latent_dim, width, bias=False)
        self.reward = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1, bias=False))

    def new_users(self, num_users: int, trained_uz: Tensor) -> Tensor:
        """z = 0, the prior's mean: what an empty context gives."""
        return torch.zeros(num_users, self.latent_dim)

    def project(self, inputs_nd: Tensor) -> Tensor:
        projected: Tensor = self.from_feature(inputs_nd)
        return projected

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        rewards: Tensor = self.reward(projected_p + self.from_latent(users_z))[..., 0]
        return rewards

    def encode(self, chosen_cd: Tensor, rejected_cd: Tensor, owner_c: Tensor, num_contexts: int) -> tuple[Tensor, ...]:
        """Posteriors of contexts.

        Args:
            chosen_cd, rejected_cd: features [C, d] of the annotated pairs of all contexts.
            owner_c: which context each pair belongs to, [C].
            num_contexts: K. One without pairs gets the prior.

        Returns:
            Mean and log-variance, each [K, L].
        """
        encoded = self.pair_encoder(torch.cat([chosen_cd, rejected_cd], -1))
        total = encoded.new_zeros(num_contexts, self.width).index_add(0, owner_c, encoded)
        counts = encoded.new_zeros(num_contexts).index_add(0, owner_c, encoded.new_ones(len(owner_c)))
        mean, log_variance = self.posterior(total / counts.clamp_min(1)[:, None]).chunk(2, -1)
        some = (counts > 0)[:, None]
        return mean * some, log_variance * some

    def state(self, latent_kl: Tensor) -> Tensor:
        """Users' states [K, L] of values of z: z itself, or z sqrt(L) / ||z||."""
        if not self.normalize:
            return latent_kl
        return latent_kl * (
            self.latent_dim**0.5 / torch.linalg.vector_norm(latent_kl, dim=-1, keepdim=True).clamp_min(1e-8)
        )

    def encode_users(self, chosen_cd: Tensor, rejected_cd: Tensor, owner_c: Tensor, num_users: int) -> Tensor:
        """States [U, L] of users from their pairs: the posterior means."""
        return self.state(self.encode(chosen_cd, rejected_cd, owner_c, num_users)[0])

    def kl_weight(self, step: int) -> float:
        """beta_t of an optimizer step."""
        if not self.annealing_period:
            return self.beta
        place = step % self.annealing_period / self.annealing_period
        return self.beta * (1 - math.cos(math.pi * min(1.0, 2 * place))) / 2

    def context_loss(
        self,
        chosen_nd: Tensor,
        rejected_nd: Tensor,
        context_chosen_cd: Tensor,
        context_rejected_cd: Tensor,
        owner_c: Tensor,
        context_n: Tensor,
        noise_kl: Tensor,
        weight_n: Tensor | None,
        kl_weight: float,
    ) -> tuple[Tensor, Tensor]:
        """Loss of N pairs and the mean KL (both scalar, KL in nats).

        Args:
            chosen_nd, rejected_nd: features [N, d] of the pairs.
            context_chosen_cd, context_rejected_cd, owner_c: K contexts, as in `encode`.
            context_n: which context each pair is judged with, [N].
            noise_kl: standard normal noise [K, L].
            weight_n: weights of the pairs; the KL of a pair's context has its pair's.
            kl_weight: beta_t.
        """
        mean, log_variance = self.encode(context_chosen_cd, context_rejected_cd, owner_c, len(noise_kl))
        latent = mean + (log_variance / 2).exp() * noise_kl
        # An empty context has z = 0, in training as in evaluation.
        filled = torch.zeros(len(noise_kl), dtype=torch.bool, device=owner_c.device).index_fill(0, owner_c, True)
        user_nz = self.state(latent * filled[:, None])[context_n]
        kl_n = gaussian_kl(mean, log_variance).sum(-1)[context_n]
        kl = weighted_mean(kl_n, weight_n)
        return self.loss(chosen_nd, rejected_nd, user_nz, weight_n) + kl_weight * kl, kl.detach()
