"""One matrix of tests over every feature reward, and the equations of each on hand-computed numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prm.adaptation import adapt_users
from prm.errors import UserError
from prm.losses import bradley_terry, gaussian_kl, hinge
from prm.reward_models import MPU, PALA, PALB, VPL, FeatureReward, GlobalBT, GlobalMean, LoRE, LoREAlt, MPUAvg, PReF

METHODS: list[tuple[type[FeatureReward], dict[str, Any]]] = [
    (GlobalBT, {}),
    (GlobalMean, {}),
    (LoRE, {"num_bases": 4}),
    (LoREAlt, {"num_bases": 4, "period": 2}),
    (PReF, {"num_factors": 3, "start": "random"}),
    (PALA, {"num_groups": 3, "width": 8}),
    (PALA, {"num_groups": 3, "width": 8, "pair_loss_name": "logistic"}),
    (PALB, {"num_groups": 3, "width": 8}),
    (MPU, {"width": 5}),
    (MPUAvg, {"width": 5}),
    (MPUAvg, {"width": 5, "members": 3, "average": "scores"}),
    (VPL, {"latent_dim": 4, "width": 16}),
    (VPL, {"latent_dim": 4, "width": 16, "normalize": True}),
]
IDS = [f"{cls.__name__}-{number}" for number, (cls, _) in enumerate(METHODS)]
DIM = 6


def _head(cls: type[FeatureReward], arguments: dict[str, Any], seed: int = 0) -> FeatureReward:
    torch.manual_seed(seed)
    head = cls(DIM, **arguments)
    if isinstance(head, MPUAvg) and head.members:
        head.member_states.data = torch.randn_like(head.member_states)
    return head


def _users(head: FeatureReward, number: int, seed: int = 1) -> Tensor:
    """Users that differ, also where training starts all from one state."""
    start = head.initial_users(number, torch.Generator().manual_seed(seed))
    return start + 0.3 * torch.randn(start.shape, generator=torch.Generator().manual_seed(seed))


# Equations


def test_bradley_terry_on_hand_computed_numbers() -> None:
    delta = torch.tensor([0.0, math.log(3.0), -math.log(3.0)])
    # -log sigma: log 2, log(4/3), log 4
    expected = [math.log(2), math.log(4 / 3), math.log(4)]
    assert bradley_terry(delta).item() == pytest.approx(sum(expected) / 3)
    weighted = bradley_terry(delta, torch.tensor([3.0, 0.0, 1.5])).item()
    assert weighted == pytest.approx((3 * expected[0] + 1.5 * expected[2]) / 3)


def test_hinge_on_hand_computed_numbers() -> None:
    delta = torch.tensor([0.0, 0.25, 2.0, -1.0])
    assert hinge(delta).item() == pytest.approx((1 + 0.75 + 0 + 2) / 4)
    assert hinge(delta, torch.tensor([2.0, 0.0, 1.0, 1.0])).item() == pytest.approx((2 + 2) / 4)


def test_gaussian_kl_on_hand_computed_numbers_and_against_torch() -> None:
    assert gaussian_kl(torch.tensor([[2.0]]), torch.tensor([[0.0]])).item() == pytest.approx(2.0)
    assert gaussian_kl(torch.zeros(1, 1), torch.full((1, 1), math.log(4.0))).item() == pytest.approx(
        0.5 * (4 - 1 - math.log(4))
    )
    mean, log_variance = torch.randn(3, 4), torch.randn(3, 4)
    normal = torch.distributions.Normal
    theirs = torch.distributions.kl_divergence(normal(mean, (log_variance / 2).exp()), normal(0.0, 1.0))
    torch.testing.assert_close(gaussian_kl(mean, log_variance), theirs)


def test_global_reward_on_hand_computed_numbers() -> None:
    head = GlobalBT(2)
    head.weight.data = torch.tensor([1.0, -2.0])
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 1.0]])
    assert head.scores(features, torch.zeros(3, 0)).tolist() == [1.0, -2.0, 1.0]


def test_lore_on_hand_computed_numbers() -> None:
    head = LoRE(2, num_bases=2)
    head.bases.data = torch.tensor([[1.0, 0.0], [0.0, 4.0]])  # basis rewards: h_1 and 4 h_2
    user = torch.tensor([[0.0, math.log(3.0)]])  # softmax: 1/4, 3/4
    assert head.scores(torch.tensor([[2.0, 1.0]]), user).item() == pytest.approx(0.25 * 2 + 0.75 * 4)


def test_lore_alt_rests_by_turns() -> None:
    head = LoREAlt(2, num_bases=2, period=2)
    turns = [head.resting(step) for step in range(6)]
    assert turns[0] == turns[1] == turns[4] == {"users"}
    assert turns[2] == turns[3] == {"head", "adapter"}


def test_pref_on_hand_computed_numbers() -> None:
    head = PReF(2, num_factors=2, start="random", distance_penalty=0.02)
    head.weight.data = torch.tensor([[1.0, 1.0], [0.0, 2.0]])  # phi = (h_1 + h_2, 2 h_2)
    user = torch.tensor([[3.0, -1.0]])
    chosen, rejected = torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 0.0]])
    assert head.scores(chosen, user).item() == pytest.approx(3 * 3 - 2)
    # phi_c - phi_r = (3, 2)
    expected = math.log1p(math.exp(-7.0)) + 0.02 * math.sqrt(13)
    assert head.loss(chosen, rejected, user).item() == pytest.approx(expected, rel=1e-5)


def test_pref_takes_its_prior_from_the_training_users() -> None:
    head = PReF(4, num_factors=2, start="random")
    users = torch.tensor([[1.0, 5.0], [-1.0, 5.0], [1.0, 5.0], [-1.0, 5.0]]).repeat(500, 1)
    assert head.new_users(1, users)[0].tolist() == pytest.approx([0.0, 5.0])
    precision = head.prior_precision(users)
    assert isinstance(precision, Tensor)
    # Variance 1 on the first axis; on the second none was seen, so little is allowed.
    assert precision[0, 0].item() == pytest.approx(1.0, abs=0.01)
    assert precision[1, 1].item() > 100
    assert head.prior_precision(users[:1]) == head.adaptation_precision
    assert head.prior_precision(users[:1].repeat(5, 1)) == head.adaptation_precision


def test_pal_a_on_hand_computed_numbers() -> None:
    head = PALA(2, num_groups=2, width=2)
    head.mapping = nn.Sequential(nn.Linear(2, 2))  # f(x) = 2 x + 1, in place of the MLP
    head.mapping[0].weight.data, head.mapping[0].bias.data = 2 * torch.eye(2), torch.ones(2)
    head.prototypes.data = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    user = torch.tensor([[0.0, math.log(3.0)]])  # ideal point (1, 3) in f's input space, f of it (3, 7)
    # f(h) = (9, 15): the distance of (6, 8) is 10
    assert head.scores(torch.tensor([[4.0, 7.0]]), user).item() == pytest.approx(-10.0)


def test_pal_b_on_hand_computed_numbers() -> None:
    head = PALB(2, num_groups=2, width=2)
    head.response.weight.data, head.response.bias.data = torch.eye(2), torch.zeros(2)
    # g_1(p) = p, g_2(p) = p turned by a right angle
    head.prompt.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [1.0, 0.0]])
    head.prompt.bias.data = torch.zeros(4)
    inputs = torch.tensor([[3.0, 4.0, 1.0, 0.0]])  # response (3, 4), prompt (1, 0)
    alone = torch.tensor([[50.0, -50.0]])
    both = torch.zeros(1, 2)  # 1/2 (1, 0) + 1/2 (0, 1)
    scale = 1 / 0.07
    assert head.scores(inputs, alone).item() == pytest.approx(scale * 0.6, rel=1e-5)
    assert head.scores(inputs, both).item() == pytest.approx(scale * 7 / 5 / math.sqrt(2), rel=1e-5)
    head.log_scale.data += 100.0
    assert head.scores(inputs, alone).item() == pytest.approx(100 * 0.6, rel=1e-5)


def test_mpu_on_hand_computed_numbers() -> None:
    head = MPU(2, width=2)
    first, bias, last = torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([0.5, 0.0]), torch.tensor([2.0, 3.0])
    user = torch.cat([first.flatten(), bias, last])[None]
    # h = (1, 1): A h + a = (1.5, 1)
    assert head.scores(torch.tensor([[1.0, 1.0]]), user).item() == pytest.approx(2 * 1.5 + 3 * 1)
    # h = (1, 0): (1.5, -1)
    assert head.scores(torch.tensor([[1.0, 0.0]]), user).item() == pytest.approx(3.0)


def test_mpu_is_a_network_of_torch_for_every_user() -> None:
    head = _head(MPU, {"width": 5})
    assert isinstance(head, MPU)
    users, features = _users(head, 3), torch.randn(7, DIM)
    for user, scores in zip(users, head.scores_for_all(features, users), strict=True):
        first, bias, last = head.networks(user)
        network = nn.Sequential(nn.Linear(DIM, 5), nn.ReLU(), nn.Linear(5, 1, bias=False))
        network[0].weight.data, network[0].bias.data, network[2].weight.data = first.T, bias, last[None]
        torch.testing.assert_close(scores, network(features)[:, 0])


def test_vpl_draws_its_users_and_weighs_the_divergence() -> None:
    head = _head(VPL, {"latent_dim": 2, "width": 4})
    assert isinstance(head, VPL)
    chosen, rejected = torch.randn(2, 2, DIM)
    context_c, context_r, owner = torch.randn(3, DIM), torch.randn(3, DIM), torch.tensor([0, 0, 1])
    noise, which, weight = torch.randn(3, 2), torch.tensor([1, 2]), torch.tensor([1.5, 0.5])
    mean, log_variance = head.encode(context_c, context_r, owner, 3)
    users = mean + (log_variance / 2).exp() * noise
    users[2] = 0  # an empty context
    kl = gaussian_kl(mean, log_variance).sum(-1)
    assert kl[2].item() == 0.0
    plain = bradley_terry(head.scores(chosen, users[which]) - head.scores(rejected, users[which]), weight)
    loss, figure = head.context_loss(chosen, rejected, context_c, context_r, owner, which, noise, weight, 0.25)
    assert figure.item() == pytest.approx((1.5 * kl[1] + 0.5 * kl[2]).item() / 2)
    assert loss.item() == pytest.approx((plain + 0.25 * figure).item())


def test_vpl_anneals_in_cycles() -> None:
    head = VPL(2, 2, 2, beta=0.4, annealing_period=8)
    assert [round(head.kl_weight(step), 6) for step in range(9)] == [
        *(round(0.2 * (1 - math.cos(math.pi * n / 4)), 6) for n in range(4)), 0.4, 0.4, 0.4, 0.4, 0.0,
    ]  # fmt: skip
    assert VPL(2, 2, 2, beta=0.4).kl_weight(0) == 0.4


# Invariances and limits of single methods


def test_lore_with_one_basis_is_the_global_model() -> None:
    lore, glob = LoRE(DIM, num_bases=1), GlobalBT(DIM)
    glob.weight.data = lore.bases.data[:, 0].clone()
    features, users = torch.randn(5, DIM), torch.randn(5, 1)
    torch.testing.assert_close(lore.scores(features, users), glob.scores(features, users))


def test_a_constant_added_to_a_lore_user_changes_nothing() -> None:
    head = _head(LoRE, {"num_bases": 4})
    features, users = torch.randn(5, DIM), torch.randn(5, 4)
    torch.testing.assert_close(head.scores(features, users), head.scores(features, users + 7.0))


@pytest.mark.parametrize(("cls", "arguments"), [(PALA, {"num_groups": 1}), (PALB, {"num_groups": 1})])
def test_pal_with_one_group_is_blind_to_users(cls: type[FeatureReward], arguments: dict[str, int]) -> None:
    head = _head(cls, arguments)
    scores = head.scores_for_all(torch.randn(5, head.input_dim), torch.tensor([[-3.0], [0.0], [8.0]]))
    torch.testing.assert_close(scores, scores[:1].expand(3, 5))


def test_pref_under_a_change_of_basis() -> None:
    head = _head(PReF, {"num_factors": 3, "start": "random"})
    assert isinstance(head, PReF)
    features, users, change = torch.randn(5, DIM), torch.randn(4, 3), torch.randn(3, 3)
    before = head.scores_for_all(features, users)
    head.weight.data = torch.linalg.inv(change).T @ head.weight.data
    torch.testing.assert_close(head.scores_for_all(features, users @ change.T), before, atol=1e-4, rtol=1e-4)


def test_vpl_under_permuting_its_context() -> None:
    head = _head(VPL, {"latent_dim": 4, "width": 16})
    assert isinstance(head, VPL)
    chosen, rejected = torch.randn(2, 6, DIM)
    owner = torch.tensor([0, 1, 0, 1, 1, 0])
    order = torch.randperm(6)
    one = head.encode_users(chosen, rejected, owner, 2)
    torch.testing.assert_close(head.encode_users(chosen[order], rejected[order], owner[order], 2), one)
    assert (head.encode_users(rejected, chosen, owner, 2) - one).abs().max() > 1e-3


def test_vpl_normalizes_in_training_and_evaluation_alike() -> None:
    head = _head(VPL, {"latent_dim": 4, "width": 16, "normalize": True})
    assert isinstance(head, VPL)
    chosen, rejected, owner = torch.randn(3, DIM), torch.randn(3, DIM), torch.tensor([0, 0, 1])
    states = head.encode_users(chosen, rejected, owner, 3)
    assert states.norm(dim=-1).tolist() == pytest.approx([2.0, 2.0, 0.0])
    noise = torch.zeros(3, 4)
    loss, _ = head.context_loss(chosen, rejected, chosen, rejected, owner, owner, noise, None, 0.0)
    assert loss.item() == pytest.approx(head.loss(chosen, rejected, states[owner]).item())


@pytest.mark.parametrize("average", MPUAvg.AVERAGES)
def test_equal_networks_make_the_average_equal_to_each(average: str) -> None:
    head = _head(MPUAvg, {"width": 5, "average": average})
    user = torch.randn(1, head.user_dim)
    features = torch.randn(4, DIM)
    done, states = head.finished(user.repeat(3, 1))
    assert done.user_dim == 0 and states.shape == (3, 0)
    torch.testing.assert_close(done.scores(features, torch.zeros(4, 0)), head.scores(features, user.expand(4, -1)))


def test_the_two_averages_are_what_they_say() -> None:
    features = torch.randn(4, DIM)
    found = {}
    for average in MPUAvg.AVERAGES:
        head = _head(MPUAvg, {"width": 5, "average": average})
        users = torch.randn(3, head.user_dim, generator=torch.Generator().manual_seed(2))
        done, _ = head.finished(users)
        again = type(done)(**done.arguments())
        again.load_state_dict(done.state_dict())
        found[average] = again.scores_for_all(features, torch.zeros(2, 0))
        plain = (
            head.scores(features, users.mean(0).expand(4, -1))
            if average == "parameters"
            else head.scores_for_all(features, users).mean(0)
        )
        torch.testing.assert_close(found[average], plain.expand(2, 4))
    assert (found["parameters"] - found["scores"]).abs().max() > 1e-2


def test_an_mpu_user_starts_at_the_common_network() -> None:
    head = _head(MPU, {"width": 5})
    trained = torch.randn(4, head.user_dim)
    start = head.initial_users(1, torch.Generator())
    assert torch.equal(head.new_users(2, trained), start.repeat(2, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRE(DIM, num_bases=0), "num_bases"),
        (lambda: LoREAlt(DIM, period=0), "period"),
        (lambda: PReF(DIM, num_factors=0), "num_factors"),
        (lambda: PReF(DIM, start="pca"), "start 'pca'.*svd, feature_svd, random"),
        (lambda: PReF(DIM, distance_penalty=-1.0), "distance_penalty"),
        (lambda: PALA(DIM, num_groups=0), "num_groups"),
        (lambda: PALA(DIM, pair_loss_name="mse"), "hinge, logistic"),
        (lambda: PALB(DIM, width=0), "width"),
        (lambda: MPU(DIM, width=0), "width"),
        (lambda: MPUAvg(DIM, average="median"), "parameters, scores"),
        (lambda: VPL(DIM, latent_dim=0), "latent_dim"),
        (lambda: VPL(DIM, context_pairs=0), "context_pairs"),
        (lambda: VPL(DIM, beta=-1.0), "beta"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


# Every method


@pytest.mark.parametrize(("cls", "arguments"), METHODS, ids=IDS)
class TestEveryMethod:
    def test_arguments_rebuild_it(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        again = cls(**head.arguments())
        again.load_state_dict(head.state_dict())
        inputs, users = torch.randn(4, head.input_dim), _users(head, 4)
        assert torch.equal(head.scores(inputs, users), again.scores(inputs, users))

    def test_equal_features_differ_by_exactly_zero_and_swapping_flips(
        self, cls: type[FeatureReward], arguments: dict[str, Any]
    ) -> None:
        head = _head(cls, arguments)
        a, b = torch.randn(2, 4, head.input_dim)
        users = _users(head, 4)
        assert torch.equal(head.scores(a, users) - head.scores(a, users), torch.zeros(4))
        delta = head.scores(a, users) - head.scores(b, users)
        assert delta.abs().min() > 0
        assert torch.equal(delta, -(head.scores(b, users) - head.scores(a, users)))

    def test_scores_do_not_depend_on_the_batch(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        inputs, users = torch.randn(9, head.input_dim), _users(head, 9)
        alone = torch.cat([head.scores(inputs[i : i + 1], users[i : i + 1]) for i in range(9)])
        torch.testing.assert_close(head.scores(inputs, users), alone, atol=1e-5, rtol=1e-5)

    def test_scores_for_all_users_equal_the_plain_way(
        self, cls: type[FeatureReward], arguments: dict[str, Any]
    ) -> None:
        head = _head(cls, arguments)
        inputs, users = torch.randn(5, head.input_dim), _users(head, 3)
        plain = torch.stack([head.scores(inputs, users[u].repeat(5, 1)) for u in range(3)])
        found = head.scores_for_all(inputs, users)
        assert found.shape == (3, 5)
        torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)

    def test_blocks_of_users_with_their_own_texts_equal_rows(
        self, cls: type[FeatureReward], arguments: dict[str, Any]
    ) -> None:
        head = _head(cls, arguments)
        inputs, users = torch.randn(3, 4, head.input_dim), _users(head, 3)
        block = head.projected_scores(head.project(inputs), users[:, None])
        rows = head.scores(inputs.flatten(0, 1), users.repeat_interleave(4, 0))
        torch.testing.assert_close(block.flatten(), rows, atol=1e-5, rtol=1e-5)

    def test_the_jacobian_of_linear_methods(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        if not head.linear:
            with pytest.raises(NotImplementedError):
                head.mixing(torch.zeros(1, 1))
            return
        users = _users(head, 3)
        theirs = torch.func.vmap(torch.func.jacrev(head.mixing))(users)
        torch.testing.assert_close(head.mixing_jacobian(users), theirs)
        weight = torch.randn(theirs.shape[:2])
        bent = head.mixing_curvature(users, weight)
        second = torch.func.vmap(torch.func.hessian(lambda z, c: (c * head.mixing(z)).sum()))(users, weight)
        torch.testing.assert_close(torch.zeros_like(second) if bent is None else bent, second)
        # And the projection is linear, so that differences may be projected.
        a, b = torch.randn(2, 4, head.input_dim)
        torch.testing.assert_close(head.project(a - b), head.project(a) - head.project(b), atol=1e-5, rtol=1e-5)

    def test_initial_users_follow_the_generator(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        first, second = (head.initial_users(3, torch.Generator().manual_seed(5)) for _ in range(2))
        assert first.shape == (3, head.user_dim)
        assert torch.equal(first, second)
        for trained in (first, first[:0]):
            assert head.new_users(2, trained).shape == (2, head.user_dim)

    def test_every_parameter_has_a_gradient(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        a, b = torch.randn(2, 8, head.input_dim)
        users = _users(head, 8).requires_grad_(True)
        if isinstance(head, VPL):
            owner = torch.arange(8) // 2
            loss, _ = head.context_loss(a, b, a, b, owner, owner.flip(0), torch.randn(4, head.latent_dim), None, 0.1)
        else:
            loss = head.loss(a, b, users)
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
        if head.user_dim and not head.context_pairs:
            assert users.grad is not None and (users.grad.abs().sum(-1) > 0).all()

    def test_loss_falls_on_separable_data(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        chosen, rejected = torch.randn(64, head.input_dim) + 1.0, torch.randn(64, head.input_dim) - 1.0
        users = head.initial_users(1, torch.Generator().manual_seed(1)).requires_grad_(True)
        optimizer = torch.optim.Adam([*head.parameters(), users], lr=0.03)
        first = head.loss(chosen, rejected, users.expand(64, -1)).item()
        for _ in range(100):
            optimizer.zero_grad()
            loss = head.loss(chosen, rejected, users.expand(64, -1))
            loss.backward()
            optimizer.step()
        assert loss.item() < min(0.2, first)

    def test_adaptation_leaves_the_head_alone(self, cls: type[FeatureReward], arguments: dict[str, Any]) -> None:
        head = _head(cls, arguments)
        before = {k: v.clone() for k, v in head.state_dict().items()}
        index = torch.tensor([0, 0, 1, 1, 1])
        chosen, rejected = torch.randn(2, 5, head.input_dim)
        fit = adapt_users(head, chosen, rejected, index, head.new_users(2, torch.zeros(0, head.user_dim)), steps=20)
        assert fit.states.shape == (2, head.user_dim)
        assert fit.unfinished == 0
        assert all(torch.equal(before[k], v) for k, v in head.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in head.parameters())
        assert head.training
