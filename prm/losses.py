"""Preference losses: pure functions of tensors, each with its equation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def bradley_terry(delta_n: Tensor, weight_n: Tensor | None = None) -> Tensor:
    """Bradley-Terry negative log-likelihood: mean over pairs of weight * -log sigma(r(y_c) - r(y_r)).

    (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1.)

    Args:
        delta_n: r(chosen) - r(rejected), shape [N].
        weight_n: one weight a pair, shape [N]; None weighs all the same. The divisor is N, not the sum of weights, so
            that weights w_i = N_total / (U n_u) make the expectation the mean over users of each user's mean.

    Returns:
        Scalar.
    """
    loss_n = -functional.logsigmoid(delta_n)
    return (loss_n if weight_n is None else loss_n * weight_n).mean()
