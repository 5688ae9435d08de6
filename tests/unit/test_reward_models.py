"""One matrix of tests over every feature reward, and the equations of each on hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from prm.adaptation import adapt_users
from prm.errors import UserError
from prm.losses import bradley_terry
from prm.reward_models import FeatureReward, GlobalBT, LoRE

METHODS = [(GlobalBT, {}), (LoRE, {"num_bases": 4})]
IDS = [cls.__name__ for cls, _ in METHODS]
DIM = 6


def _head(cls: type[FeatureReward], arguments: dict[str, int], seed: int = 0) -> FeatureReward:
    torch.manual_seed(seed)
    return cls(DIM, **arguments)


def test_bradley_terry_on_hand_computed_numbers() -> None:
    delta = torch.tensor([0.0, math.log(3.0), -math.log(3.0)])
    # -log sigma: log 2, log(4/3), log 4
    expected = [math.log(2), math.log(4 / 3), math.log(4)]
    assert bradley_terry(delta).item() == pytest.approx(sum(expected) / 3)
    weighted = bradley_terry(delta, torch.tensor([3.0, 0.0, 1.5])).item()
    assert weighted == pytest.approx((3 * expected[0] + 1.5 * expected[2]) / 3)


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


def test_lore_with_one_basis_is_the_global_model() -> None:
    lore, glob = LoRE(DIM, num_bases=1), GlobalBT(DIM)
    glob.weight.data = lore.bases.data[:, 0].clone()
    features, users = torch.randn(5, DIM), torch.randn(5, 1)
    torch.testing.assert_close(lore.scores(features, users), glob.scores(features, users))


def test_a_constant_added_to_a_lore_user_changes_nothing() -> None:
    head = _head(LoRE, {"num_bases": 4})
    features, users = torch.randn(5, DIM), torch.randn(5, 4)
    torch.testing.assert_close(head.scores(features, users), head.scores(features, users + 7.0))


def test_lore_needs_a_basis() -> None:
    with pytest.raises(UserError, match="num_bases"):
        LoRE(DIM, num_bases=0)


@pytest.mark.parametrize(("cls", "arguments"), METHODS, ids=IDS)
class TestEveryMethod:
    def test_arguments_rebuild_it(self, cls: type[FeatureReward], arguments: dict[str, int]) -> None:
        head = _head(cls, arguments)
        again = cls(**head.arguments())
        again.load_state_dict(head.state_dict())
        features, users = torch.randn(4, DIM), head.initial_users(4, torch.Generator().manual_seed(1))
        assert torch.equal(head.scores(features, users), again.scores(features, users))

    def test_equal_features_differ_by_exactly_zero_and_swapping_flips(
        self, cls: type[FeatureReward], arguments: dict[str, int]
    ) -> None:
        head = _head(cls, arguments)
        a, b = torch.randn(4, DIM), torch.randn(4, DIM)
        users = head.initial_users(4, torch.Generator().manual_seed(1))
        assert torch.equal(head.scores(a, users) - head.scores(a, users), torch.zeros(4))
        delta = head.scores(a, users) - head.scores(b, users)
        assert torch.equal(delta, -(head.scores(b, users) - head.scores(a, users)))

    def test_scores_do_not_depend_on_the_batch(self, cls: type[FeatureReward], arguments: dict[str, int]) -> None:
        head = _head(cls, arguments)
        features, users = torch.randn(9, DIM), head.initial_users(9, torch.Generator().manual_seed(1))
        alone = torch.cat([head.scores(features[i : i + 1], users[i : i + 1]) for i in range(9)])
        torch.testing.assert_close(head.scores(features, users), alone, atol=1e-6, rtol=1e-6)

    def test_scores_for_all_users_equal_the_plain_way(
        self, cls: type[FeatureReward], arguments: dict[str, int]
    ) -> None:
        head = _head(cls, arguments)
        features, users = torch.randn(5, DIM), head.initial_users(3, torch.Generator().manual_seed(1))
        plain = torch.stack([head.scores(features, users[u].repeat(5, 1)) for u in range(3)])
        torch.testing.assert_close(head.scores_for_all(features, users), plain, atol=1e-6, rtol=1e-6)

    def test_initial_users_follow_the_generator(self, cls: type[FeatureReward], arguments: dict[str, int]) -> None:
        head = _head(cls, arguments)
        first, second = (head.initial_users(3, torch.Generator().manual_seed(5)) for _ in range(2))
        assert first.shape == (3, head.user_dim)
        assert torch.equal(first, second)

    def test_loss_falls_on_separable_data(self, cls: type[FeatureReward], arguments: dict[str, int]) -> None:
        head = _head(cls, arguments)
        chosen, rejected = torch.randn(64, DIM) + 1.0, torch.randn(64, DIM) - 1.0
        users = head.initial_users(1, torch.Generator().manual_seed(1)).repeat(64, 1)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        first = head.loss(chosen, rejected, users).item()
        for _ in range(60):
            optimizer.zero_grad()
            loss = head.loss(chosen, rejected, users)
            loss.backward()
            optimizer.step()
        assert loss.item() < min(0.2, first)

    def test_adaptation_leaves_the_head_alone(self, cls: type[FeatureReward], arguments: dict[str, int]) -> None:
        head = _head(cls, arguments)
        before = {k: v.clone() for k, v in head.state_dict().items()}
        index = torch.tensor([0, 0, 1, 1, 1])
        states = adapt_users(head, torch.randn(5, DIM), torch.randn(5, DIM), index, torch.zeros(2, head.user_dim))
        assert states.shape == (2, head.user_dim)
        assert all(torch.equal(before[k], v) for k, v in head.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in head.parameters())


def _planted(num_users: int, pairs: int, axes: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Pairs of users with linear tastes over the first `axes` features, and the tastes."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.randn(num_users, axes, generator=generator)
    a, b = torch.randn(2, num_users, pairs, DIM, generator=generator)
    better = ((a - b)[..., :axes] * taste[:, None]).sum(-1) > 0
    chosen, rejected = torch.where(better[..., None], a, b), torch.where(better[..., None], b, a)
    index = torch.arange(num_users).repeat_interleave(pairs)
    return chosen.reshape(-1, DIM), rejected.reshape(-1, DIM), index


def _accuracy(head: FeatureReward, chosen: torch.Tensor, rejected: torch.Tensor, users: torch.Tensor) -> float:
    with torch.no_grad():
        return (head.scores(chosen, users) > head.scores(rejected, users)).float().mean().item()


def test_lore_recovers_planted_users_where_the_global_model_cannot() -> None:
    axes = 3
    chosen, rejected, index = _planted(60, 40, axes, seed=0)
    results = {}
    for head in (_head(GlobalBT, {}), _head(LoRE, {"num_bases": 2 * axes + 2})):
        users = torch.nn.Parameter(head.initial_users(60, torch.Generator().manual_seed(0)))
        optimizer = torch.optim.Adam([*head.parameters(), users], lr=0.05)
        for _ in range(400):
            optimizer.zero_grad()
            head.loss(chosen, rejected, users[index]).backward()
            optimizer.step()
        new_chosen, new_rejected, new_index = _planted(30, 60, axes, seed=1)
        support = torch.arange(len(new_index)) % 60 < 20
        start = head.new_users(30, users.detach())
        states = adapt_users(head, new_chosen[support], new_rejected[support], new_index[support], start)
        test = ~support
        results[type(head).__name__] = _accuracy(head, new_chosen[test], new_rejected[test], states[new_index[test]])
    assert results["LoRE"] > 0.8
    assert results["GlobalBT"] < 0.6


def test_users_adapted_together_equal_users_adapted_alone() -> None:
    """The fast path (all users in one fit) against the plain one, for ragged supports; a user without pairs stays."""
    head = _head(LoRE, {"num_bases": 4})
    counts = [3, 1, 7, 0]
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    chosen, rejected = torch.randn(11, DIM), torch.randn(11, DIM)
    start = torch.randn(4, 4)
    for precision in (0.0, 0.5):
        together = adapt_users(head, chosen, rejected, index, start, precision=precision, steps=100)
        for user in range(3):
            mine = index == user
            alone = adapt_users(
                head,
                chosen[mine],
                rejected[mine],
                torch.zeros(int(mine.sum()), dtype=torch.long),
                start[user : user + 1],
                precision=precision,
                steps=100,
            )
            torch.testing.assert_close(together[user], alone[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(together[3], start[3])


def test_adaptation_reaches_the_posterior_mode() -> None:
    """Two bases and one pair: the stationary point of the stated objective, found by a grid."""
    head = LoRE(2, num_bases=2)
    head.bases.data = torch.eye(2)
    chosen, rejected = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    found = adapt_users(
        head, chosen, rejected, torch.tensor([0]), torch.zeros(1, 2), precision=1.0, steps=2000, learning_rate=0.02
    )[0]
    grid = torch.linspace(0, 2, 20001)  # w = (a, -a) by symmetry; Delta r = softmax_1 - softmax_2 = tanh(a)
    objective = -torch.nn.functional.logsigmoid(torch.tanh(grid)) + 0.5 * 2 * grid**2
    best = grid[objective.argmin()].item()
    assert found[0].item() == pytest.approx(best, abs=1e-3)
    assert found[1].item() == pytest.approx(-best, abs=1e-3)


def test_adaptation_that_diverges_is_refused() -> None:
    head = _head(LoRE, {"num_bases": 2})
    with pytest.raises(UserError, match="learning-rate"):
        adapt_users(head, torch.full((1, DIM), float("inf")), torch.randn(1, DIM), torch.tensor([0]), torch.zeros(1, 2))
