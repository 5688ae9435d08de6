"""Synthetic Pref-LaMP: authors with planted tastes in titles, as mirrored twins.

    t_u ~ N(0, I_K),  t_twin(u) = -t_u
    chosen = the title of style s1 when t_u . (s1 - s2) > 0, else the one of style s2

Both titles belong to the same abstract, so that only taste tells chosen from rejected. Twins hold the same pairs in
every split with chosen and rejected swapped: a scorer that does not know the user gets exactly 1/2, ties counted one
half, whatever it looks at. Blocks of users share their pairs: few texts, many preferences. No abstract stands in two
splits.

Everything here is made up by this program, and says so: `synthetic` in dataset.json and in every row's meta.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_modules.lamp5 import prompt_text
from data_modules.style_titles import AXES, Slots, abstract, draw_slots, title
from prm.dataset_dir import DatasetDir, write_dataset
from prm.errors import UserError
from prm.records import Completion, PreferencePair, Prompt, User, user_prompt

PLANTED = "planted.json"
# The grammar has two and a half million; drawing unused ones stays quick far below that.
MOST_ABSTRACTS = 500_000


@dataclass(frozen=True)
class SyntheticOptions:
    """Sizes of the synthetic dataset.

    Attributes:
        train_users, adapt_users: users of each role, even numbers (twins).
        pairs_per_user: pairs of a training user; a tenth of them (one at least) is validation, a tenth test_seen.
        support, test: pairs of an adaptation user in each of the two splits.
        axes: K, the style axes that vary (1 to 4, in the order of style_titles.AXES).
        users_per_pair: users that share their pairs, an even number. More = fewer texts for the same preferences.
        seed: of every draw.
    """

    train_users: int = 64
    adapt_users: int = 16
    pairs_per_user: int = 40
    support: int = 20
    test: int = 20
    axes: int = 3
    users_per_pair: int = 8
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for a value that cannot be used, naming the option."""
        least = {"train_users": 2, "adapt_users": 2, "users_per_pair": 2, "pairs_per_user": 3, "support": 1, "test": 1}
        for name, value in least.items():
            option, given = "--" + name.replace("_", "-"), getattr(self, name)
            if given < value:
                raise UserError(f"{option} {given}: use {value} or more")
            if value == 2 and given % 2:
                raise UserError(f"{option} {given}: use an even number, users come as twins")
        if not 1 <= self.axes <= len(AXES):
            raise UserError(f"--axes {self.axes}: use 1 to {len(AXES)} ({', '.join(AXES)})")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: use 0 or more")
        blocks = [-(-users // self.users_per_pair) for users in (self.train_users, self.adapt_users)]
        wanted = blocks[0] * self.pairs_per_user + blocks[1] * (self.support + self.test)
        if wanted > MOST_ABSTRACTS:
            raise UserError(f"{wanted} abstracts are more than {MOST_ABSTRACTS}: raise --users-per-pair")


@dataclass(frozen=True)
class _SharedPair:
    """Two titles of one abstract, before anybody chooses."""

    slots: Slots
    styles: tuple[tuple[int, ...], tuple[int, ...]]

    def prompt(self) -> Prompt:
        return user_prompt(prompt_text(abstract(self.slots)))


def build_synthetic(out: str | Path, options: SyntheticOptions | None = None, *, overwrite: bool = False) -> DatasetDir:
    """Build a synthetic dataset directory; the tastes are kept in `planted.json`, user id -> {taste, twin}.

    Raises:
        UserError: an option that does not fit, or `out` exists.
    """
    options = options or SyntheticOptions()
    options.check()
    generator = np.random.default_rng(options.seed)
    held_out = max(1, options.pairs_per_user // 10)
    sizes = {
        "train": {
            "train": options.pairs_per_user - 2 * held_out,
            "validation": held_out,
            "test_seen": held_out,
        },
        "adapt": {"support": options.support, "test": options.test},
    }
    pairs: list[PreferencePair] = []
    completions: list[Completion] = []
    users: list[User] = []
    planted: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for role, count in (("train", options.train_users), ("adapt", options.adapt_users)):
        tastes = _twins(role, count, options.axes, generator)
        planted |= tastes
        users += [User(user_id, role) for user_id in tastes]
        ids = list(tastes)
        for start in range(0, count, options.users_per_pair):
            for split, size in sizes[role].items():
                shared = [_draw_pair(options.axes, generator, taken) for _ in range(size)]
                for user_id in ids[start : start + options.users_per_pair]:
                    taste = tastes[user_id]["taste"]
                    rows = list(enumerate(shared))
                    pairs += [_preference(f"{user_id}/{split}-{i}", user_id, split, p, taste) for i, p in rows]
                    if role == "adapt":
                        completions += [_own_title(f"{user_id}/{split}-{i}", user_id, split, p, taste) for i, p in rows]
    return write_dataset(
        out,
        name="synthetic",
        pairs=pairs,
        completions=completions,
        users=users,
        source="synthetic: texts and preferences made up by prm",
        licence="CC0-1.0",
        seed=options.seed,
        synthetic=True,
        counts={"abstracts": len(taken)},
        arguments={**asdict(options), "axis_names": list(AXES[: options.axes])},
        extra_files={PLANTED: (json.dumps(planted, indent=1) + "\n").encode()},
        overwrite=overwrite,
    )


def _twins(role: str, count: int, axes: int, generator: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Tastes by user id; twins stand side by side."""
    found: dict[str, dict[str, Any]] = {}
    for couple in range(count // 2):
        taste = generator.standard_normal(axes)
        ids = [f"synthetic-{role}-{couple:04d}{letter}" for letter in "ab"]
        for user_id, twin, own in zip(ids, reversed(ids), (taste, -taste), strict=True):
            found[user_id] = {"taste": [float(x) for x in own], "twin": twin}
    return found


def _draw_pair(axes: int, generator: np.random.Generator, taken: set[str]) -> _SharedPair:
    """An abstract that was not used before, and two styles that differ in one axis at least."""
    while abstract(slots := draw_slots(generator)) in taken:
        pass
    taken.add(abstract(slots))
    while True:
        first, second = (tuple(int(x) for x in generator.choice((-1, 1), axes)) for _ in range(2))
        if first != second:
            return _SharedPair(slots, (first, second))


def _preference(pair_id: str, user_id: str, split: str, pair: _SharedPair, taste: Sequence[float]) -> PreferencePair:
    first, second = pair.styles
    wins = float(np.dot(taste, np.subtract(first, second))) > 0
    chosen, rejected = (first, second) if wins else (second, first)
    return PreferencePair(
        pair_id,
        user_id,
        split,
        pair.prompt(),
        title(pair.slots, chosen),
        title(pair.slots, rejected),
        meta={"synthetic": True, "chosen_style": list(chosen), "rejected_style": list(rejected)},
    )


def _own_title(example_id: str, user_id: str, split: str, pair: _SharedPair, taste: Sequence[float]) -> Completion:
    """The title this user would write: every axis as the taste has it."""
    style = [1 if x > 0 else -1 for x in taste]
    meta = {"synthetic": True, "style": style}
    return Completion(example_id, user_id, split, pair.prompt(), title(pair.slots, style), meta)
