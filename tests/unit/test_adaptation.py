"""New users, all at once: the fast fits against plain references, ragged and one-sided support sets, mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import prm.adaptation as adaptation
from prm.adaptation import adapt_users
from prm.errors import UserError
from prm.reward_models import MPU, PALA, PALB, VPL, FeatureReward, GlobalBT, LoRE, PReF

DIM = 6
HEADS: list[tuple[type[FeatureReward], dict[str, Any]]] = [
    (LoRE, {"num_bases": 4}),
    (PReF, {"num_factors": 4, "start": "random"}),
    (PALA, {"num_groups": 3, "width": 8}),
    (PALA, {"num_groups": 3, "width": 8, "pair_loss_name": "logistic"}),
    (PALB, {"num_groups": 3, "width": 8}),
    (MPU, {"width": 5}),
    (VPL, {"latent_dim": 4, "width": 8}),
]


def _head(cls: type[FeatureReward], arguments: dict[str, Any]) -> FeatureReward:
    torch.manual_seed(0)
    return cls(DIM, **arguments)


def _ragged(head: FeatureReward, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    # The pairs of a user need not stand together.
    index = index[torch.randperm(len(index), generator=generator)]
    chosen, rejected = torch.randn(2, len(index), head.input_dim, generator=generator)
    return chosen, rejected, index


@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize(("cls", "arguments"), HEADS)
def test_users_together_are_users_alone(
    cls: type[FeatureReward], arguments: dict[str, Any], small_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path (all users in padded blocks) against the plain one; a user without pairs stays."""
    if small_blocks:
        monkeypatch.setattr(adaptation, "BLOCK_NUMBERS", 150)
    head = _head(cls, arguments)
    counts = [3, 1, 7, 0, 2, 7]
    chosen, rejected, index = _ragged(head, counts)
    start = head.initial_users(6, torch.Generator().manual_seed(1))
    together = adapt_users(head, chosen, rejected, index, start, precision=0.5, steps=60)
    for user in (0, 1, 2, 4, 5):
        mine = index == user
        zero = torch.zeros(int(mine.sum()), dtype=torch.long)
        alone = adapt_users(head, chosen[mine], rejected[mine], zero, start[user : user + 1], precision=0.5, steps=60)
        torch.testing.assert_close(together.states[user], alone.states[0], atol=1e-4, rtol=1e-4)
    moved = [not torch.equal(together.states[user], start[user]) for user in range(6)]
    # A hinge lets users be whose pairs are all far enough apart.
    assert sum(moved) >= 4
    assert not moved[3]


def _penalised(head: FeatureReward, z: Tensor, start: Tensor, gap: Tensor, prior: Tensor) -> Tensor:
    delta = (gap * head.mixing(z)).sum(-1)
    return -logsigmoid(delta).sum() + 0.5 * (z - start) @ prior @ (z - start)


def _reference(head: FeatureReward, start: Tensor, gap: Tensor, prior: Tensor) -> Tensor:
    """One user in float64 by L-BFGS with a line search, then by exact Newton steps to a gradient below 1e-8."""
    z = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [z], max_iter=500, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _penalised(head, z, start, gap, prior)
        loss.backward()
        return loss

    optimizer.step(closure)
    z = z.detach()
    for _ in range(5):
        gradient = torch.func.grad(lambda x: _penalised(head, x, start, gap, prior))(z)
        hessian = torch.func.hessian(lambda x: _penalised(head, x, start, gap, prior))(z)
        z = z - torch.linalg.solve(hessian, gradient)
    gradient = torch.func.grad(lambda x: _penalised(head, x, start, gap, prior))(z)
    assert gradient.abs().max() < 1e-8
    return z


def _problem(head: FeatureReward, users: int, pairs: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of users with linear tastes, a fifth of them with support sets that agree on everything."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.randn(users, DIM, generator=generator)
    gap = torch.randn(users, pairs, DIM, generator=generator)
    noise = torch.randn(users, pairs, generator=generator)
    noise[: users // 5] = 0
    sign = ((gap * taste[:, None]).sum(-1) + noise).sign()
    gap = gap * sign[..., None]
    rejected = torch.randn(users * pairs, DIM, generator=generator)
    start = 0.5 * torch.randn(users, head.user_dim, generator=generator)
    return gap.flatten(0, 1) + rejected, rejected, torch.arange(users).repeat_interleave(pairs), start


@pytest.mark.parametrize("matrix", [False, True])
def test_pref_reaches_the_converged_reference(matrix: bool) -> None:
    head = _head(PReF, {"num_factors": 4, "start": "random"})
    chosen, rejected, index, start = _problem(head, 20, 12, seed=0)
    prior = torch.eye(4, dtype=torch.double) * 0.3
    if matrix:
        a = torch.randn(4, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
        prior = a @ a.T + 0.1 * torch.eye(4)
    fit = adapt_users(head, chosen, rejected, index, start, precision=prior if matrix else 0.3)
    assert (fit.how, fit.unfinished) == ("newton", 0)
    gap = head.project(chosen - rejected).double().detach()
    for user in range(20):
        best = _reference(head, start[user].double(), gap[index == user], prior)
        assert (fit.states[user] - best).abs().max() < 1e-3


def test_lore_ends_no_worse_than_the_converged_reference() -> None:
    """Its softmax is not convex: from the same start, the penalised loss is compared, not w."""
    head = _head(LoRE, {"num_bases": 4})
    head.bases.data *= 5  # rewards that matter
    chosen, rejected, index, start = _problem(head, 30, 12, seed=2)
    prior = 0.1 * torch.eye(4, dtype=torch.double)
    fit = adapt_users(head, chosen, rejected, index, start)
    assert fit.unfinished == 0
    gap = head.project(chosen - rejected).double().detach()
    for user in range(30):
        mine, begin = gap[index == user], start[user].double()
        best = _penalised(head, _reference(head, begin, mine, prior), begin, mine, prior)
        assert _penalised(head, fit.states[user].double(), begin, mine, prior) <= best + 1e-3


@pytest.mark.parametrize(("cls", "arguments"), HEADS[:2])
def test_adam_and_newton_agree(cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
    head = _head(cls, arguments)
    chosen, rejected, index, start = _problem(head, 10, 8, seed=4)
    options: dict[str, Any] = {"precision": 0.5}
    newton = adapt_users(head, chosen, rejected, index, start, optimizer="newton", **options)
    adam = adapt_users(
        head, chosen, rejected, index, start, optimizer="adam", steps=3000, learning_rate=0.01, **options
    )
    assert (newton.how, adam.how) == ("newton", "adam")
    torch.testing.assert_close(newton.states, adam.states, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("optimizer", ["newton", "adam"])
@pytest.mark.parametrize(("cls", "arguments"), HEADS[:2])
def test_differences_are_enough_for_linear_methods(
    cls: type[FeatureReward], arguments: dict[str, Any], optimizer: Any
) -> None:
    head = _head(cls, arguments)
    chosen, rejected, index, start = _problem(head, 5, 4, seed=5)
    both = adapt_users(head, chosen, rejected, index, start, optimizer=optimizer)
    gap = adapt_users(head, chosen - rejected, None, index, start, optimizer=optimizer)
    torch.testing.assert_close(both.states, gap.states, atol=1e-4, rtol=1e-4)


def test_the_posterior_mode_of_one_pair() -> None:
    """Two bases and one pair: the stationary point of the stated objective, found by a grid."""
    head = LoRE(2, num_bases=2)
    head.bases.data = torch.eye(2)
    chosen, rejected = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    grid = torch.linspace(0, 2, 20001)  # w = (a, -a) by symmetry; Delta r = softmax_1 - softmax_2 = tanh(a)
    objective = -logsigmoid(torch.tanh(grid)) + 0.5 * 2 * grid**2
    best = grid[objective.argmin()].item()
    options: list[dict[str, Any]] = [{}, {"optimizer": "adam", "steps": 2000, "learning_rate": 0.02}]
    for option in options:
        found = adapt_users(
            head, chosen, rejected, torch.tensor([0]), torch.zeros(1, 2), precision=1.0, **option
        ).states[0]
        assert found.tolist() == pytest.approx([best, -best], abs=1e-3)


@pytest.mark.parametrize(("cls", "arguments"), HEADS[:2])
def test_one_sided_support_sets_stay_finite(cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
    """Pairs that one direction explains wholly have no maximum likelihood; the method's own prior bounds them."""
    head = _head(cls, arguments)
    gap = torch.randn(1, DIM).repeat(20, 1)
    fit = adapt_users(head, gap, None, torch.zeros(20, dtype=torch.long), torch.zeros(1, head.user_dim))
    assert fit.unfinished == 0
    assert fit.states.abs().max() < 20


def test_without_a_prior_flat_directions_stay() -> None:
    """A constant on all of LoRE's w changes nothing: no precision, no motion along it, and no singular step."""
    head = _head(LoRE, {"num_bases": 4})
    chosen, rejected, index, start = _problem(head, 10, 30, seed=6)
    fit = adapt_users(head, chosen, rejected, index, start, precision=0.0)
    torch.testing.assert_close(fit.states.mean(-1), start.mean(-1), atol=1e-4, rtol=0)


def test_vpl_encodes_its_users() -> None:
    head = _head(VPL, {"latent_dim": 4, "width": 8})
    assert isinstance(head, VPL)
    chosen, rejected, index = _ragged(head, [3, 0, 5])
    fit = adapt_users(head, chosen, rejected, index, head.new_users(3, torch.zeros(0, 4)))
    assert fit.how == "encoded"
    with torch.no_grad():
        torch.testing.assert_close(fit.states, head.encode_users(chosen, rejected, index, 3))
    assert fit.states[1].tolist() == [0.0] * 4


def test_nothing_to_fit() -> None:
    none = torch.zeros(0, dtype=torch.long)
    fit = adapt_users(GlobalBT(DIM), torch.randn(2, DIM), torch.randn(2, DIM), torch.tensor([0, 0]), torch.zeros(1, 0))
    assert (fit.how, fit.states.shape) == ("none", (1, 0))
    head = _head(LoRE, {"num_bases": 4})
    start = torch.randn(2, 4)
    assert torch.equal(adapt_users(head, torch.zeros(0, DIM), torch.zeros(0, DIM), none, start).states, start)


@pytest.mark.parametrize(
    ("cls", "arguments", "options", "message"),
    [
        (MPU, {"width": 5}, {"optimizer": "newton"}, "MPU has no linear reward.*use adam or auto"),
        (VPL, {"latent_dim": 4, "width": 8}, {"optimizer": "adam"}, "VPL encodes its users"),
        (PReF, {"start": "random"}, {"optimizer": "adam", "learning_rate": math.inf}, "lower --learning-rate"),
    ],
)
def test_mistakes(cls: type[FeatureReward], arguments: dict[str, Any], options: dict[str, Any], message: str) -> None:
    head = _head(cls, arguments)
    chosen, rejected, index = _ragged(head, [2, 2])
    with pytest.raises(UserError, match=message):
        adapt_users(head, chosen, rejected, index, head.initial_users(2, torch.Generator()), **options)


@pytest.mark.parametrize(("cls", "arguments"), HEADS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_features_that_are_not_finite_are_refused(
    cls: type[FeatureReward], arguments: dict[str, Any], value: float
) -> None:
    head = _head(cls, arguments)
    chosen, rejected, index = _ragged(head, [2, 2])
    chosen[1, 0] = value
    with pytest.raises(UserError, match="not finite"):
        adapt_users(head, chosen, rejected, index, head.initial_users(2, torch.Generator()))


def test_differences_do_not_serve_methods_that_are_not_linear() -> None:
    head = _head(MPU, {"width": 5})
    with pytest.raises(UserError, match="both responses"):
        adapt_users(head, torch.randn(1, DIM), None, torch.tensor([0]), head.new_users(1, torch.zeros(0, 1)))
