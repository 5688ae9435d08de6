"""Adapt new users to a trained reward model: the shared parameters stay frozen, all users are fitted at once."""

from __future__ import annotations

import torch
from torch import Tensor

from prm.errors import UserError
from prm.losses import bradley_terry
from prm.reward_models import FeatureReward


def adapt_users(
    head: FeatureReward,
    chosen_nd: Tensor,
    rejected_nd: Tensor,
    user_index_n: Tensor,
    start_uz: Tensor,
    *,
    steps: int = 500,
    learning_rate: float = 0.1,
    precision: float | None = None,
) -> Tensor:
    """Fit the states of U users on their support pairs, theta frozen.

    Each user u minimises the mean over its n_u pairs of -log sigma(Delta r) plus precision / (2 n_u) ||z - z_0||^2,
    that is, the posterior mode under a Gaussian prior N(z_0, I / precision). Adam works element by element and the
    losses of users are summed, so users do not touch each other: a batch gives what each user alone would get.
    (Adam, learning rate 0.1, 500 steps, precision 0: the published code of LoRE.)

    Args:
        head: the trained reward model; its parameters get no gradient.
        chosen_nd, rejected_nd: features [N, d] of the support pairs.
        user_index_n: which of the U users each pair belongs to, [N].
        start_uz: where each user starts, [U, user_dim]; a user without pairs stays there.
        steps: gradient steps.
        learning_rate: of Adam.
        precision: of the prior; None takes the method's own.

    Returns:
        States [U, user_dim], float32.

    Raises:
        UserError: the fit did not stay finite.
    """
    start_uz = start_uz.detach().float()
    if head.user_dim == 0 or len(chosen_nd) == 0:
        return start_uz.clone()
    precision = head.adaptation_precision if precision is None else precision
    counts_u = torch.bincount(user_index_n, minlength=len(start_uz)).clamp_min(1).float()
    weight_n = len(chosen_nd) / counts_u[user_index_n]
    states = start_uz.clone().requires_grad_(True)
    frozen = [(p, p.requires_grad) for p in head.parameters()]
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(False)
        optimizer = torch.optim.Adam([states], lr=learning_rate)
        with torch.enable_grad():
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                rows = states[user_index_n]
                delta_n = head.scores(chosen_nd, rows) - head.scores(rejected_nd, rows)
                loss = bradley_terry(delta_n, weight_n)
                if precision:
                    loss = loss + (precision / 2 * (states - start_uz).square().sum(1) / counts_u).sum()
                loss.backward()
                optimizer.step()
    finally:
        for parameter, required in frozen:
            parameter.requires_grad_(required)
    result = states.detach()
    if not torch.isfinite(result).all():
        raise UserError("adaptation diverged: lower --learning-rate or raise --precision")
    return result
