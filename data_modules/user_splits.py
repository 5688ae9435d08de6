"""Users and their choices into roles and splits, for every source of real preferences.

    users    -> train | adapt                      by a draw on the user
    groups   -> train | validation | test_seen     by a draw on the group, the same for all training users
    groups   -> support | test                     by a draw of each adaptation user

A group is what may not stand on two sides: the pairs that share a prompt (`prompt`), that share a dialog or a prompt,
directly or through a third (`dialog`), or that are the same two responses to the same prompt (`pair`). Since training
users share the draw, none of them is tested on what another one was trained on. Everything removed is counted, so that
the counts add up to the choices that came in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from data_modules.papers import seeded_unit
from prm import store
from prm.dataset_dir import SPLIT_RULES
from prm.errors import UserError
from prm.records import PreferencePair, Prompt, User


@dataclass(frozen=True)
class Choice:
    """One user's choice before it has a split; the fields are those of `records.PreferencePair`.

    Attributes:
        dialog: the conversation that the pair is part of, where the source names one; ids may repeat between users.
    """

    pair_id: str
    user_id: str
    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None
    dialog: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def prompt_key(self) -> str:
        """Identifies the prompt, whatever white space surrounds its messages."""
        return store.fingerprint([[message["role"], message["content"].strip()] for message in self.prompt])

    @cached_property
    def pair_key(self) -> str:
        """Identifies the two responses to the prompt, whichever of them was chosen."""
        return store.fingerprint([self.prompt_key, sorted((self.chosen.strip(), self.rejected.strip()))])


@dataclass(frozen=True)
class SplitOptions:
    """How users and their choices are split.

    Attributes:
        seed: of every draw.
        split_rule: "prompt", "dialog" or "pair".
        adapt_fraction: share of users held back as new users.
        adapt_users: their number; overrides the share.
        support: pairs of an adaptation user that are shown to adaptation; None takes half of them, in whole groups.
        validation_fraction, test_seen_fraction: shares of the training users' groups.
        min_pairs: users with fewer pairs are dropped.
    """

    seed: int = 0
    split_rule: str = "prompt"
    adapt_fraction: float = 0.2
    adapt_users: int | None = None
    support: int | None = None
    validation_fraction: float = 0.1
    test_seen_fraction: float = 0.1
    min_pairs: int = 2

    def check(self) -> None:
        """Raise UserError for a value that cannot be used, naming the option."""
        for name in ("adapt_users", "support", "min_pairs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: use 1 or more")
        if self.split_rule not in SPLIT_RULES:
            raise UserError(f"--split-rule {self.split_rule}: use one of {', '.join(SPLIT_RULES)}")
        if not 0 < self.adapt_fraction < 1:
            raise UserError(f"--adapt-fraction {self.adapt_fraction}: use a share between 0 and 1")
        held_back = self.validation_fraction + self.test_seen_fraction
        if not (self.validation_fraction >= 0 and self.test_seen_fraction >= 0 and held_back < 1):
            raise UserError("--validation-fraction and --test-seen-fraction must be 0 or more and sum to less than 1")


def split_choices(
    choices: Sequence[Choice], options: SplitOptions, counts: Counter[str]
) -> tuple[list[User], list[PreferencePair]]:
    """Users with their roles, and their pairs with their splits.

    Training users come first, each user in the order of first appearance. A training user's pairs keep their order; an
    adaptation user's come in the order of the draw, so the first N support pairs are a fair sample of them.

    Args:
        choices: of all users, each sound in itself.
        options: what to draw.
        counts: counted into.

    Raises:
        UserError: an option that does not fit, or no user of one role is left.
    """
    options.check()
    by_user: dict[str, list[Choice]] = {}
    for choice in distinct_choices(choices, counts):
        by_user.setdefault(choice.user_id, []).append(choice)
    by_user = _drop(by_user, lambda own: len(own) < options.min_pairs, "users_under_min_pairs", counts)
    if not by_user:
        raise UserError(
            f"no user has {options.min_pairs} pairs ({_removed(counts)}): lower --min-pairs, or give more rows"
        )
    new = _adaptation_ids(list(by_user), options)
    groups = _groups([c for own in by_user.values() for c in own], options.split_rule)
    train = {user: own for user, own in by_user.items() if user not in new}
    split = _group_splits({groups[c.pair_id] for own in train.values() for c in own}, options)
    train = _drop(
        train,
        lambda own: all(split[groups[c.pair_id]] != "train" for c in own),
        "train_users_without_train_pairs",
        counts,
    )
    adapt = _drop(
        {user: own for user, own in by_user.items() if user in new},
        lambda own: len({groups[c.pair_id] for c in own}) < 2,
        "adapt_users_without_a_second_group",
        counts,
    )
    for role, left in (("training", train), ("adaptation", adapt)):
        if not left:
            raise UserError(f"no {role} user is left ({_removed(counts)}): give more users, or users with more pairs")
    pairs = [_pair(c, split[groups[c.pair_id]]) for own in train.values() for c in own]
    known = {c.pair_key for own in train.values() for c in own}
    for own in adapt.values():
        for choice, name in _adaptation_splits(own, groups, options, counts):
            pairs.append(_pair(choice, name))
            counts[f"{name}_pairs_that_train_users_judged"] += choice.pair_key in known
    return [User(user, role) for role, users in (("train", train), ("adapt", adapt)) for user in users], pairs


def distinct_choices(choices: Iterable[Choice], counts: Counter[str]) -> list[Choice]:
    """Choices that carry a preference, one for each user and pair, in their order.

    Left out and counted: pairs whose responses are the same text, a user's repeated choices (the first stays), and all
    of a user's choices on a pair that was decided both ways.
    """
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        if choice.chosen.strip() == choice.rejected.strip():
            counts["identical_responses"] += 1
        else:
            groups.setdefault((choice.user_id, choice.pair_key), []).append(choice)
    kept = []
    for same in groups.values():
        if len({choice.chosen.strip() for choice in same}) > 1:
            counts["contradicting_pairs"] += len(same)
        else:
            counts["repeated_pairs"] += len(same) - 1
            kept.append(same[0])
    return kept


def _drop(
    users: dict[str, list[Choice]], leave: Callable[[list[Choice]], bool], name: str, counts: Counter[str]
) -> dict[str, list[Choice]]:
    """Users whom `leave` does not name; the others and their pairs are counted."""
    left = [user for user, own in users.items() if leave(own)]
    counts[name] += len(left)
    counts[f"pairs_of_{name}"] += sum(len(users[user]) for user in left)
    return {user: own for user, own in users.items() if user not in set(left)}


def _removed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()) if n) or "nothing was removed"


def _adaptation_ids(users: Sequence[str], options: SplitOptions) -> set[str]:
    total = len(users)
    if total < 2:
        raise UserError(f"{total} user is left, one to train on and one to adapt to are needed: give more users")
    wanted = options.adapt_users
    if wanted is None:
        wanted = min(max(round(options.adapt_fraction * total), 1), total - 1)
    if wanted >= total:
        raise UserError(f"--adapt-users {wanted} leaves no training user of {total}: use {total - 1} or fewer")
    return set(sorted(users, key=lambda user: (seeded_unit(options.seed, "role", user), user))[:wanted])


def _groups(choices: Sequence[Choice], split_rule: str) -> dict[str, str]:
    """pair_id -> group, named so that it does not depend on the order of the choices."""
    if split_rule == "pair":
        return {c.pair_id: c.pair_key for c in choices}
    if split_rule == "prompt":
        return {c.pair_id: c.prompt_key for c in choices}
    parent: dict[str, str] = {}

    def root(item: str) -> str:
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for choice in choices:
        if choice.dialog is not None:
            # The smaller name becomes the root, so the root is the smallest name of its group.
            low, high = sorted((root(choice.prompt_key), root(store.fingerprint([choice.user_id, choice.dialog]))))
            parent[high] = low
    return {c.pair_id: root(c.prompt_key) for c in choices}


def _group_splits(groups: set[str], options: SplitOptions) -> dict[str, str]:
    """group -> split of the training users; a share above 0 gets one group at least while `train` keeps one."""
    order = sorted(groups, key=lambda group: (seeded_unit(options.seed, "split", group), group))
    split = dict.fromkeys(order, "train")
    start = 0
    for name, share in (("validation", options.validation_fraction), ("test_seen", options.test_seen_fraction)):
        wanted = max(round(share * len(order)), 1) if share > 0 else 0
        end = min(start + wanted, len(order) - 1)
        split.update(dict.fromkeys(order[start:end], name))
        start = end
    return split


def _adaptation_splits(
    own: Sequence[Choice], groups: dict[str, str], options: SplitOptions, counts: Counter[str]
) -> list[tuple[Choice, str]]:
    """Whole groups in the order of the draw: support until it is full, the rest test, one group of it at least.

    What the last support group holds beyond a number that was asked for can stand on neither side: it is dropped and
    counted.
    """

    def draw(kind: str, key: str) -> tuple[float, str]:
        return seeded_unit(options.seed, "support", own[0].user_id, kind, key), key

    members: dict[str, list[Choice]] = {}
    for choice in sorted(own, key=lambda c: draw("pair", c.pair_key)):
        members.setdefault(groups[choice.pair_id], []).append(choice)
    order = sorted(members, key=lambda group: draw("group", group))
    wanted = options.support or (len(own) + 1) // 2
    support: list[Choice] = []
    taken = 0
    while taken < len(order) - 1 and len(support) < wanted:
        support += members[order[taken]]
        taken += 1
    counts["adapt_users_with_less_support"] += len(support) < wanted
    if options.support is not None:
        counts["support_pairs_over_number"] += max(0, len(support) - wanted)
        support = support[:wanted]
    test = [c for group in order[taken:] for c in members[group]]
    return [*((c, "support") for c in support), *((c, "test") for c in test)]


def _pair(choice: Choice, split: str) -> PreferencePair:
    return PreferencePair(
        choice.pair_id,
        choice.user_id,
        split,
        choice.prompt,
        choice.chosen,
        choice.rejected,
        choice.margin,
        choice.meta,
    )
