"""Preference losses: pure functions of tensors, each with its equation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def weighted_mean(loss_n: Tensor, weight_n: Tensor | None) -> Tensor:
    """Mean over N of weight * loss. The divisor is N, not the sum of the weights.

    With weights w_i = N_total / (U n_u) its expectation over uniformly drawn minibatches is then the mean over users
    of each user's mean.
    """
    return (loss_n if weight_n is None else loss_n * weight_n).mean()


def bradley_terry(delta_n: Tensor, weight_n: Tensor | None = None) -> Tensor:
    """Bradley-Terry negative log-likelihood: mean over pairs of weight * -log sigma(r(y_c) - r(y_r)).

    (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1.)

    Args:
        delta_n: r(chosen) - r(rejected), shape [N].
        weight_n: one weight a pair, shape [N]; None weighs all the same. See `weighted_mean`.

    Returns:
        Scalar.
    """
    return weighted_mean(-functional.logsigmoid(delta_n), weight_n)


def hinge(delta_n: Tensor, weight_n: Tensor | None = None) -> Tensor:
    """Hinge loss: mean over pairs of weight * max(0, 1 - (r(y_c) - r(y_r))). (PAL, Chen et al. 2024, PAL-A's loss.)

    Args:
        delta_n: r(chosen) - r(rejected), shape [N].
        weight_n: as in `bradley_terry`.

    Returns:
        Scalar.
    """
    return weighted_mean((1 - delta_n).clamp_min(0), weight_n)


def gaussian_kl(mean_nl: Tensor, log_variance_nl: Tensor) -> Tensor:
    """KL(N(mean, diag exp(log_variance)) || N(0, I)) of N diagonal Gaussians in L dimensions, in nats.

    1/2 sum_l (exp(v_l) + m_l^2 - 1 - v_l). (Kingma & Welling 2014, appendix B.)

    Returns:
        [N, L], by dimension; the sum over L is the divergence.
    """
    return 0.5 * (log_variance_nl.exp() + mean_nl.square() - 1 - log_variance_nl)
