"""Adapt new users to a trained reward model: the shared parameters stay frozen, all users are fitted at once.

Each user u minimises over the n_u support pairs

    sum_i loss(r_u(y_c,i) - r_u(y_r,i)) + 1/2 (z - z_0)^T Lambda (z - z_0),

the posterior mode under a Gaussian prior N(z_0, Lambda^-1). Users do not touch each other. They are sorted by the
number of their pairs and fitted in padded blocks, so memory is bounded and no loop runs over users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from prm.errors import UserError
from prm.reward_models import FeatureReward
from prm.reward_models.vpl import VPL

#: Numbers of padded projected pairs in one block; with their curvature, some hundred MB.
BLOCK_NUMBERS = 4_000_000
#: A Newton fit ends for a user when no derivative of the penalised loss is larger.
GRADIENT = 1e-6
#: Most Newton steps of a user; a handful is the rule.
NEWTON_STEPS = 100

Optimizer = Literal["auto", "newton", "adam"]


@dataclass(frozen=True)
class UserFit:
    """Fitted users.

    Attributes:
        states: [U, Z], float32.
        how: "newton", "adam", "encoded" or "none".
        unfinished: users whose Newton fit ended before its gradient was small.
    """

    states: Tensor
    how: str
    unfinished: int = 0


@dataclass(frozen=True)
class _Block:
    """Some users [u] with their pairs [u, n], padded to the most pairs of one, and whether a place holds a pair."""

    users: Tensor
    pairs: Tensor
    real: Tensor


def adapt_users(
    head: FeatureReward,
    chosen_nd: Tensor,
    rejected_nd: Tensor | None,
    user_index_n: Tensor,
    start_uz: Tensor,
    *,
    optimizer: Optimizer = "auto",
    steps: int = 500,
    learning_rate: float | None = None,
    precision: float | Tensor | None = None,
) -> UserFit:
    """Fit the states of U users on their support pairs, theta frozen.

    Args:
        head: the trained reward model; its parameters get no gradient.
        chosen_nd, rejected_nd: inputs [N, input_dim] of the support pairs. None for the rejected ones: the first are
            differences of inputs already, which methods with a linear projection (LoRE, PReF) can use.
        user_index_n: which of the U users each pair belongs to, [N].
        start_uz: where each user starts, and the prior is centred, [U, Z]; a user without pairs stays there.
        optimizer: newton (damped, float64, to convergence; methods with a linear reward), adam (all others; learning
            rate 0.1 for 500 steps is LoRE's published code), or auto. VPL encodes, whatever stands here.
        steps: of Adam.
        learning_rate: of Adam; None takes the method's own.
        precision: Lambda, a number or a matrix [Z, Z]; None takes the method's own number.

    Raises:
        UserError: an optimizer that does not fit the method, or a fit that did not stay finite.
    """
    start_uz = start_uz.detach().float()
    precision = head.adaptation_precision if precision is None else precision
    if head.user_dim == 0 or len(chosen_nd) == 0:
        return UserFit(start_uz.clone(), "none")
    if rejected_nd is None and not head.linear:
        raise UserError(f"{type(head).__name__} needs both responses' features, not their differences")
    if optimizer != "auto" and isinstance(head, VPL):
        raise UserError(f"VPL encodes its users from their pairs: {optimizer} does not fit it, leave it at auto")
    if optimizer == "newton" and not head.linear:
        raise UserError(f"{type(head).__name__} has no linear reward, as Newton steps need: use adam or auto")
    for inputs in (chosen_nd, rejected_nd):
        if inputs is not None and not bool(inputs.isfinite().all()):
            raise UserError("features of the support pairs are not finite: the backbone or its checkpoint is damaged")
    with _frozen(head):
        if isinstance(head, VPL):
            assert rejected_nd is not None
            with torch.no_grad():
                states, how, unfinished = _encoded(head, chosen_nd, rejected_nd, user_index_n, start_uz), "encoded", 0
        elif head.linear and optimizer != "adam":
            states, unfinished = _newton(head, chosen_nd, rejected_nd, user_index_n, start_uz, precision)
            how = "newton"
        else:
            rate = head.adaptation_lr if learning_rate is None else learning_rate
            states = _adam(head, chosen_nd, rejected_nd, user_index_n, start_uz, precision, steps, rate)
            how, unfinished = "adam", 0
    if not torch.isfinite(states).all():
        raise UserError("adaptation diverged: lower --learning-rate or raise --precision")
    return UserFit(states, how, unfinished)


class _frozen:
    """The head in eval mode and without gradients; as before afterwards."""

    def __init__(self, head: FeatureReward) -> None:
        self._head, self._training = head, head.training
        self._required = [(p, p.requires_grad) for p in head.parameters()]

    def __enter__(self) -> None:
        self._head.eval()
        for parameter, _ in self._required:
            parameter.requires_grad_(False)

    def __exit__(self, *error: object) -> None:
        self._head.train(self._training)
        for parameter, required in self._required:
            parameter.requires_grad_(required)


def _blocks(user_index_n: Tensor, num_users: int, numbers_a_pair: int) -> Iterator[_Block]:
    """Users with pairs, in blocks of users with about as many pairs each."""
    by_user = torch.argsort(user_index_n, stable=True)
    counts = torch.bincount(user_index_n, minlength=num_users)
    first = counts.cumsum(0) - counts
    order = torch.argsort(counts, stable=True)
    order = order[counts[order] > 0]
    sizes = counts[order].tolist()
    begin = 0
    while begin < len(sizes):
        # As many users as fit at the width of the first; the last, which has the most pairs, decides the width.
        end = min(len(sizes), begin + max(1, BLOCK_NUMBERS // (sizes[begin] * numbers_a_pair)))
        while end - begin > 1 and (end - begin) * sizes[end - 1] * numbers_a_pair > BLOCK_NUMBERS:
            end = begin + max(1, (end - begin) // 2)
        users, width = order[begin:end], sizes[end - 1]
        place = torch.arange(width, device=user_index_n.device)
        real = place < counts[users][:, None]
        pairs = by_user[(first[users][:, None] + place).clamp_max(len(by_user) - 1)]
        yield _Block(users, pairs, real)
        begin = end


def _encoded(head: VPL, chosen_nd: Tensor, rejected_nd: Tensor, user_index_n: Tensor, start_uz: Tensor) -> Tensor:
    states = start_uz.clone()
    width = head.width + 2 * head.feature_dim
    for block in _blocks(user_index_n, len(start_uz), width):
        rows = block.pairs[block.real]
        owner = block.real.nonzero()[:, 0]
        states[block.users] = head.encode_users(chosen_nd[rows], rejected_nd[rows], owner, len(block.users)).float()
    return states


def _newton(
    head: FeatureReward,
    chosen_nd: Tensor,
    rejected_nd: Tensor | None,
    user_index_n: Tensor,
    start_uz: Tensor,
    precision: float | Tensor,
) -> tuple[Tensor, int]:
    """Newton steps, damped for each user until the penalised loss falls (Levenberg-Marquardt)."""
    width = head.user_dim
    prior = torch.as_tensor(precision, dtype=torch.double, device=start_uz.device)
    prior = prior * torch.eye(width, dtype=torch.double, device=start_uz.device) if prior.ndim == 0 else prior
    states, unfinished = start_uz.clone(), 0
    for block in _blocks(user_index_n, len(start_uz), width + head.input_dim // 4):
        shape = block.pairs.shape
        rows = block.pairs.flatten()
        # The projection is linear, so the difference may be taken before it or after.
        gap = head.project(chosen_nd[rows] if rejected_nd is None else chosen_nd[rows] - rejected_nd[rows])
        gap_unp = (gap.double() * block.real.flatten()[:, None]).unflatten(0, shape)
        found, left = _newton_block(head, gap_unp, block.real, start_uz[block.users].double(), prior)
        states[block.users] = found.float()
        unfinished += left
    return states, unfinished


def _newton_block(
    head: FeatureReward, gap_unp: Tensor, real_un: Tensor, start_uz: Tensor, prior_zz: Tensor
) -> tuple[Tensor, int]:
    identity = torch.eye(start_uz.shape[1], dtype=torch.double, device=start_uz.device)
    strength = float(prior_zz.diagonal().mean())

    def objective(z: Tensor, gap: Tensor, real: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        delta_un = (gap @ head.mixing(z)[..., None])[..., 0]
        loss = -(functional.logsigmoid(delta_un) * real).sum(-1)
        away = z - start
        return loss + 0.5 * ((away @ prior_zz) * away).sum(-1), delta_un

    z = start_uz.clone()
    damping = torch.full((len(z),), 1e-3, dtype=torch.double, device=z.device)
    active = torch.arange(len(z), device=z.device)
    value, delta_un = objective(z, gap_unp, real_un, start_uz)
    stuck = 0
    for _ in range(NEWTON_STEPS):
        gap, real, start, now, delta = gap_unp[active], real_un[active], start_uz[active], z[active], delta_un[active]
        jacobian_upz = head.mixing_jacobian(now)
        away = now - start
        wrong = torch.sigmoid(-delta) * real
        slope_up = -(gap.mT @ wrong[..., None])[..., 0]
        gradient = (jacobian_upz.mT @ slope_up[..., None])[..., 0] + away @ prior_zz
        small = gradient.abs().amax(-1) < GRADIENT
        curvature = wrong * torch.sigmoid(delta)
        inner = gap.mT @ (curvature[..., None] * gap)
        hessian = jacobian_upz.mT @ inner @ jacobian_upz + prior_zz
        scale = hessian.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(max(strength, 1e-3))
        bent = head.mixing_curvature(now, slope_up)
        if bent is not None:
            # Where this makes the sum indefinite, steps fail until the damping outweighs it.
            hessian = hessian + bent
        # Directions that neither the pairs nor the prior know stay where they are.
        hessian = hessian + (damping[active] * scale)[:, None, None] * identity
        step, _ = torch.linalg.solve_ex(hessian, gradient[..., None])
        proposed = now - step[..., 0]
        new_value, new_delta = objective(proposed, gap, real, start)
        better = (new_value <= value[active]) & ~small
        taken = active[better]
        z[taken], value[taken], delta_un[taken] = proposed[better], new_value[better], new_delta[better]
        damping[active] = torch.where(better, damping[active] / 10, damping[active] * 10).clamp(1e-8, 1e12)
        # At such damping no step improves on rounding.
        rounded = damping[active] > 1e8
        stuck += int((rounded & (gradient.abs().amax(-1) > 1e-3)).sum())
        active = active[~small & ~rounded]
        if not len(active):
            break
    return z, len(active) + stuck


def _adam(
    head: FeatureReward,
    chosen_nd: Tensor,
    rejected_nd: Tensor | None,
    user_index_n: Tensor,
    start_uz: Tensor,
    precision: float | Tensor,
    steps: int,
    learning_rate: float,
) -> Tensor:
    """Adam works element by element and the users' losses are summed, so users do not touch each other."""
    states = start_uz.clone()
    prior = torch.as_tensor(precision, dtype=torch.float, device=start_uz.device)
    for block in _blocks(user_index_n, len(start_uz), head.input_dim + head.user_dim // 8):
        shape = block.pairs.shape
        rows = block.pairs.flatten()
        with torch.no_grad():
            if rejected_nd is None:
                sides = (head.project(chosen_nd[rows]).unflatten(0, shape),)
            else:
                sides = tuple(head.project(x[rows]).unflatten(0, shape) for x in (chosen_nd, rejected_nd))
        counts = block.real.sum(-1).float()
        # `pair_loss` is a mean over all numbers it is given: this makes it each user's mean, summed over users.
        weight = (block.real / counts[:, None] * block.real.numel()).flatten()
        start = start_uz[block.users]
        z = start.clone().requires_grad_(True)
        adam = torch.optim.Adam([z], lr=learning_rate)
        with torch.enable_grad():
            for _ in range(steps):
                adam.zero_grad(set_to_none=True)
                scores = [head.projected_scores(side, z[:, None]) for side in sides]
                delta = scores[0] if len(scores) == 1 else scores[0] - scores[1]
                loss = head.pair_loss(delta.flatten(), weight)
                away = z - start
                pull = prior * away if prior.ndim == 0 else away @ prior
                loss = loss + (0.5 * (pull * away).sum(-1) / counts).sum()
                loss.backward()
                adam.step()
        states[block.users] = z.detach()
    return states
