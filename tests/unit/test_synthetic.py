"""The synthetic dataset: mirrored twins make every user-blind scorer a coin, and planted tastes can be learned."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_modules.style_titles import AXES, Slots, abstract, draw_slots, title
from data_modules.synthetic import SyntheticOptions, build_synthetic
from prm.dataset_dir import DatasetDir, check_dataset
from prm.errors import UserError
from prm.records import SPLITS, PreferencePair
from prm.statistics import per_user_means, preference_credit


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetDir:
    options = SyntheticOptions(train_users=20, adapt_users=12, support=20, test=30, users_per_pair=8)
    return build_synthetic(tmp_path_factory.mktemp("synthetic") / "data", options)


@pytest.fixture(scope="module")
def planted(data: DatasetDir) -> dict:
    return json.loads((data.path / "planted.json").read_text())


def accuracy(pairs: list[PreferencePair], score: Callable[[PreferencePair, str, str], float]) -> float:
    """Mean over users of the share of pairs whose chosen text scores higher, ties at one half."""
    credits = [preference_credit(score(p, "chosen", p.chosen), score(p, "rejected", p.rejected)) for p in pairs]
    return float(np.mean(list(per_user_means([p.user_id for p in pairs], credits).values())))


def _hash(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


BLIND: dict[str, Callable[[PreferencePair, str, str], float]] = {
    "hash of the text": lambda pair, side, text: _hash(text),
    "hash of prompt and text": lambda pair, side, text: _hash(pair.prompt[0]["content"] + text),
    "length": lambda pair, side, text: len(text),
    "question mark": lambda pair, side, text: float("?" in text),
    "constant": lambda pair, side, text: 1.0,
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scorer", BLIND)
def test_any_user_blind_scorer_gets_exactly_one_half(data: DatasetDir, split: str, scorer: str) -> None:
    assert accuracy(data.pairs(split), BLIND[scorer]) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("split", SPLITS)
def test_the_planted_taste_explains_every_choice(data: DatasetDir, planted: dict, split: str) -> None:
    def oracle(pair: PreferencePair, side: str, text: str) -> float:
        return float(np.dot(planted[pair.user_id]["taste"], pair.meta[f"{side}_style"]))

    assert accuracy(data.pairs(split), oracle) == 1.0


def read_style(text: str) -> list[int]:
    """The default three axes, read off a title."""
    return [1 if mark in text else -1 for mark in ("?", ": ", " Easy")]


def test_styles_can_be_read_off_the_text_alone(data: DatasetDir) -> None:
    for pair in data.pairs():
        assert read_style(pair.chosen) == pair.meta["chosen_style"]
        assert read_style(pair.rejected) == pair.meta["rejected_style"]


def fit(pairs: list[PreferencePair]) -> np.ndarray:
    """Logistic regression without bias on style differences: -log sigma(w . d) + |w|^2 / 2, by gradient steps."""
    differences = np.array([np.subtract(read_style(p.chosen), read_style(p.rejected)) for p in pairs], float)
    weights = np.zeros(differences.shape[1])
    for _ in range(300):
        slope = -differences.T @ (1 / (1 + np.exp(differences @ weights))) + weights
        weights -= 0.02 * slope
    return weights


def test_own_support_teaches_the_taste_and_the_twins_its_opposite(data: DatasetDir, planted: dict) -> None:
    support = defaultdict(list)
    for pair in data.pairs("support"):
        support[pair.user_id].append(pair)
    weights = {user: fit(pairs) for user, pairs in support.items()}
    own = accuracy(data.pairs("test"), lambda p, side, text: float(weights[p.user_id] @ read_style(text)))
    twin = accuracy(
        data.pairs("test"), lambda p, side, text: float(weights[planted[p.user_id]["twin"]] @ read_style(text))
    )
    assert own > 0.65
    assert twin < 0.5


def test_twins_mirror_each_other_in_every_split(data: DatasetDir, planted: dict) -> None:
    rows = defaultdict(list)
    for pair in data.pairs():
        rows[pair.user_id, pair.split].append((pair.prompt[0]["content"], pair.chosen, pair.rejected))
    for (user, split), own in rows.items():
        twin = planted[user]["twin"]
        assert planted[twin]["twin"] == user
        assert planted[twin]["taste"] == [-x for x in planted[user]["taste"]]
        assert [(prompt, rejected, chosen) for prompt, chosen, rejected in own] == rows[twin, split]


def test_blocks_share_pairs_and_abstracts_never_cross_splits(data: DatasetDir) -> None:
    users, splits = defaultdict(set), defaultdict(set)
    for pair in data.pairs():
        users[pair.prompt[0]["content"]].add(pair.user_id)
        splits[pair.prompt[0]["content"]].add(pair.split)
    # 20 training users are blocks of 8, 8 and 4; 12 adaptation users blocks of 8 and 4.
    assert {len(u) for u in users.values()} == {8, 4}
    assert {len(s) for s in splits.values()} == {1}
    assert data.info["counts"]["abstracts"] == len(users) == 3 * 40 + 2 * 50


def test_completions_are_written_in_the_users_style(data: DatasetDir, planted: dict) -> None:
    rows = data.completions()
    assert data.info["counts"]["completions"] == {"support": 12 * 20, "test": 12 * 30}
    for row in rows:
        assert read_style(row.reference) == [1 if x > 0 else -1 for x in planted[row.user_id]["taste"]]
    prompts = {(p.pair_id, p.prompt[0]["content"]) for p in data.pairs(["support", "test"])}
    assert {(c.example_id, c.prompt[0]["content"]) for c in rows} == prompts


def test_it_says_that_it_is_synthetic(data: DatasetDir) -> None:
    assert check_dataset(data.path) == []
    assert data.synthetic and data.name == "synthetic" and "synthetic" in data.info["source"]
    assert all(row.meta["synthetic"] is True for row in [*data.pairs(), *data.completions()])
    assert all(user.user_id.startswith("synthetic-") and user.persona is None for user in data.users())
    assert data.info["arguments"]["axis_names"] == ["question", "subtitle", "everyday"]


def test_every_axis_shows_and_none_depends_on_the_slots() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        slots = draw_slots(generator)
        assert 30 <= len(abstract(slots).split()) <= 50
        texts = {
            style: title(slots, style) for style in [tuple(1 - 2 * (n >> k & 1) for k in range(4)) for n in range(16)]
        }
        assert len(set(texts.values())) == 16
        for style, text in texts.items():
            assert read_style(text) == list(style[:3])
            longer = title(slots, (*style[:3], 1))
            assert len(longer) > len(title(slots, (*style[:3], -1)))


def test_titles_read_like_titles() -> None:
    slots = Slots(task=1, method=4, setting=0, study=1, corpus=0, result=0, number=0)
    assert title(slots, (-1, -1, -1)) == "Improved Route Planning via Reinforcement Learning"
    assert title(slots, (1, 1, 1)) == "What We Tried: Can Trial and Error Make Finding the Way Easy?"
    assert title(slots, (1, -1, -1, 1)) == "Can Reinforcement Learning Improve Route Planning under Distribution Shift?"
    assert title(slots, ()) == title(slots, (-1, -1, -1, -1))


def test_one_seed_one_dataset(tmp_path: Path) -> None:
    small = {"train_users": 4, "adapt_users": 2, "pairs_per_user": 5, "support": 2, "test": 2}
    first = build_synthetic(tmp_path / "a", SyntheticOptions(**small, seed=1))
    again = build_synthetic(tmp_path / "b", SyntheticOptions(**small, seed=1))
    other = build_synthetic(tmp_path / "c", SyntheticOptions(**small, seed=2))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (tmp_path / "a/planted.json").read_bytes() == (tmp_path / "b/planted.json").read_bytes()


@pytest.mark.parametrize("axes", range(1, len(AXES) + 1))
def test_every_number_of_axes(tmp_path: Path, axes: int) -> None:
    options = SyntheticOptions(train_users=2, adapt_users=2, pairs_per_user=3, support=1, test=1, axes=axes)
    data = build_synthetic(tmp_path / "data", options)
    assert {len(p.meta["chosen_style"]) for p in data.pairs()} == {axes}
    assert {p.split for p in data.pairs()} == set(SPLITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_users": 7}, "--train-users 7: use an even number"),
        ({"adapt_users": 0}, "--adapt-users 0: use 2 or more"),
        ({"users_per_pair": 3}, "--users-per-pair 3: use an even number"),
        ({"pairs_per_user": 2}, "--pairs-per-user 2: use 3 or more"),
        ({"support": 0}, "--support 0: use 1 or more"),
        ({"axes": 5}, "--axes 5: use 1 to 4"),
        ({"seed": -1}, "--seed -1"),
        ({"train_users": 10**6, "users_per_pair": 2}, "raise --users-per-pair"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_synthetic(tmp_path / "data", SyntheticOptions(**options))
    assert list(tmp_path.iterdir()) == []
