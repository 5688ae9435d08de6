"""Roles and splits of users: nothing crosses, everything removed is counted, the same seed gives the same draw."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from data_modules.user_splits import Choice, SplitOptions, distinct_choices, split_choices
from prm.errors import UserError
from prm.records import ADAPT_SPLITS, TRAIN_SPLITS, PreferencePair, user_prompt


def choice(user: str, number: int, prompt: str = "P?", chosen: str = "a", rejected: str = "b", **more: Any) -> Choice:
    return Choice(f"{user}/{number}", user, user_prompt(prompt), chosen, rejected, **more)


def many(users: int = 20, each: int = 14, prompts: int = 12) -> list[Choice]:
    """Users who choose between drawn answers to few prompts; some choices repeat, contradict or carry nothing."""
    draw = random.Random(0)
    rows = []
    for u in range(users):
        for n in range(each):
            number = draw.randrange(prompts)
            answers = [f"answer {draw.randrange(5)}" for _ in range(2)]
            rows.append(choice(f"u{u}", n, f"P{number}?", *answers, dialog=str(number // 2)))
    return rows


def split(choices: list[Choice], **options: Any) -> tuple[dict[str, str], list[PreferencePair], Counter[str]]:
    counts: Counter[str] = Counter()
    users, pairs = split_choices(choices, SplitOptions(**options), counts)
    return {user.user_id: user.role for user in users}, pairs, counts


def splits_of(pairs: list[PreferencePair], key: Any) -> dict[Any, set[str]]:
    found: dict[Any, set[str]] = {}
    for pair in pairs:
        found.setdefault(key(pair), set()).add(pair.split)
    return found


def prompt_of(pair: PreferencePair) -> str:
    return pair.prompt[0]["content"]


def texts_of(pair: PreferencePair) -> tuple[str, frozenset[str]]:
    return prompt_of(pair), frozenset((pair.chosen, pair.rejected))


# Distinct choices


def test_a_choice_between_equal_texts_is_left_out() -> None:
    counts: Counter[str] = Counter()
    kept = distinct_choices([choice("u", 1), choice("u", 2, chosen=" c\n", rejected="c")], counts)
    assert [c.pair_id for c in kept] == ["u/1"] and counts["identical_responses"] == 1


def test_a_repeated_choice_stays_once_and_another_users_stays() -> None:
    counts: Counter[str] = Counter()
    rows = [choice("u", 1), choice("v", 1), choice("u", 2, " P?", "a ", "b"), choice("u", 3, "Q?")]
    assert [c.pair_id for c in distinct_choices(rows, counts)] == ["u/1", "v/1", "u/3"]
    assert counts == {"repeated_pairs": 1}


def test_a_pair_decided_both_ways_is_left_out_whole() -> None:
    counts: Counter[str] = Counter()
    rows = [choice("u", 1), choice("u", 2), choice("u", 3, chosen="b", rejected="a"), choice("u", 4, "Q?")]
    assert [c.pair_id for c in distinct_choices(rows, counts)] == ["u/4"]
    assert counts["contradicting_pairs"] == 3 and counts["repeated_pairs"] == 0


# Splits


@pytest.mark.parametrize("rule", ["prompt", "dialog", "pair"])
@pytest.mark.parametrize("support", [None, 3])
def test_the_counts_add_up_and_users_keep_to_their_splits(rule: str, support: int | None) -> None:
    rows = many()
    roles, pairs, counts = split(rows, split_rule=rule, support=support, min_pairs=10)
    gone = {"identical_responses", "repeated_pairs", "contradicting_pairs", "support_pairs_over_number"}
    removed = sum(n for name, n in counts.items() if name in gone or name.startswith("pairs_of_"))
    assert len(pairs) + removed == len(rows)
    assert {pair.user_id for pair in pairs} == set(roles)
    assert all(p.split in (TRAIN_SPLITS if roles[p.user_id] == "train" else ADAPT_SPLITS) for p in pairs)
    for user, role in roles.items():
        own = {pair.split for pair in pairs if pair.user_id == user}
        assert own >= ({"train"} if role == "train" else {"support", "test"})
    assert all(counts[name] for name in ("identical_responses", "repeated_pairs", "contradicting_pairs"))
    assert counts["users_under_min_pairs"] > 0


def test_a_prompt_stays_on_one_side_of_a_user_and_of_all_training_users() -> None:
    roles, pairs, _ = split(many(), split_rule="prompt")
    assert all(len(found) == 1 for found in splits_of(pairs, lambda p: (p.user_id, prompt_of(p))).values())
    trained = [p for p in pairs if roles[p.user_id] == "train"]
    assert all(len(found) == 1 for found in splits_of(trained, prompt_of).values())
    assert {p.split for p in trained} == set(TRAIN_SPLITS)


def test_a_pair_stays_on_one_side_and_its_prompt_need_not() -> None:
    roles, pairs, _ = split(many(), split_rule="pair")
    assert all(len(found) == 1 for found in splits_of(pairs, lambda p: (p.user_id, texts_of(p))).values())
    trained = [p for p in pairs if roles[p.user_id] == "train"]
    assert all(len(found) == 1 for found in splits_of(trained, texts_of).values())
    assert any(len(found) > 1 for found in splits_of(pairs, lambda p: (p.user_id, prompt_of(p))).values())


def test_a_dialog_and_all_that_shares_its_prompts_stay_on_one_side() -> None:
    """Chains: dialogs 1 and 2 share a prompt, 2 and 3 another one; the rest stands alone."""
    chain = [("A?", "1"), ("B?", "1"), ("B?", "2"), ("C?", "2"), ("C?", "3"), ("D?", "3")]
    alone = [(f"Z{n}?", f"z{n}") for n in range(6)]
    rows = [
        choice(f"u{u}", n, prompt, dialog=dialog, rejected=f"b{n}")
        for u in range(10)
        for n, (prompt, dialog) in enumerate([*chain, *alone])
    ]
    for seed in range(5):
        _, pairs, _ = split(rows, split_rule="dialog", seed=seed)
        assert len(pairs) == len(rows)
        sides = splits_of([p for p in pairs if prompt_of(p) in "A?B?C?D?"], lambda p: p.user_id)
        assert all(len(found) == 1 for found in sides.values())


def test_dialogs_of_two_users_with_one_id_are_two() -> None:
    rows = [choice(f"u{u}", n, f"P{u} {n}?", dialog=str(n // 2)) for u in range(30) for n in range(12)]
    roles, pairs, _ = split(rows, split_rule="dialog")
    trained = [p for p in pairs if roles[p.user_id] == "train"]
    first = {(p.user_id, p.split) for p in trained if p.pair_id.endswith(("/0", "/1"))}
    assert len({user for user, _ in first}) == len(first) and len({name for _, name in first}) > 1


def test_support_has_the_number_asked_for_and_the_rest_is_test() -> None:
    rows = [choice(f"u{u}", n, f"P{n}?") for u in range(10) for n in range(9)]
    _, pairs, counts = split(rows, support=4, adapt_users=3)
    sizes = Counter((p.user_id, p.split) for p in pairs if p.split in ADAPT_SPLITS)
    assert sorted(sizes.values()) == [4, 4, 4, 5, 5, 5] and counts["support_pairs_over_number"] == 0
    _, pairs, counts = split(rows, support=50, adapt_users=3)
    sizes = Counter(p.split for p in pairs)
    assert (sizes["support"], sizes["test"]) == (24, 3) and counts["adapt_users_with_less_support"] == 3


def test_a_group_larger_than_the_support_is_cut_and_counted() -> None:
    rows = [choice(f"u{u}", n, f"P{n % 2}?", rejected=f"b{n}") for u in range(10) for n in range(12)]
    _, pairs, counts = split(rows, support=4, adapt_users=2)
    sizes = Counter(p.split for p in pairs)
    assert (sizes["support"], sizes["test"], counts["support_pairs_over_number"]) == (8, 12, 4)
    _, pairs, counts = split(rows, adapt_users=2)
    assert Counter(p.split for p in pairs)["support"] == 12 and counts["support_pairs_over_number"] == 0


def test_support_is_a_draw_and_does_not_follow_the_order_of_the_rows() -> None:
    rows = [choice(f"u{u}", n, f"P{n}?") for u in range(4) for n in range(40)]
    _, pairs, _ = split(rows, support=20, adapt_users=1)
    shown = [int(p.pair_id.split("/")[1]) for p in pairs if p.split == "support"]
    assert shown != sorted(shown) and max(shown) >= 25


def test_support_is_drawn_for_each_user_by_the_seed() -> None:
    rows = [choice(f"u{u}", n, f"P{n}?") for u in range(8) for n in range(40)]
    shown: dict[str, dict[int, set[str]]] = {}
    for seed in range(2):
        for pair in split(rows, support=10, adapt_users=7, seed=seed)[1]:
            if pair.split == "support":
                shown.setdefault(pair.user_id, {}).setdefault(seed, set()).add(prompt_of(pair))
    twice = [by_seed for by_seed in shown.values() if len(by_seed) == 2]
    assert len(twice) >= 6 and all(by_seed[0] != by_seed[1] for by_seed in twice)
    assert len({frozenset(by_seed[0]) for by_seed in twice}) == len(twice)


def test_what_adaptation_users_judge_like_training_users_is_counted() -> None:
    rows = [choice(f"u{u}", n, f"P{n}?") for u in range(10) for n in range(8)]
    counts = split(rows, support=3, adapt_users=2)[2]
    assert counts["support_pairs_that_train_users_judged"] == 6 and counts["test_pairs_that_train_users_judged"] == 10
    rows = [replace(row, rejected=f"b {row.pair_id}") for row in rows]
    assert not [n for name, n in split(rows, adapt_users=2)[2].items() if name.endswith("users_judged") and n]


@pytest.mark.parametrize("rule", ["prompt", "dialog", "pair"])
def test_a_draw_depends_on_the_seed_and_not_on_the_order_of_the_rows(rule: str) -> None:
    rows = many()
    first = split(rows, split_rule=rule, seed=3)
    assert split(rows, split_rule=rule, seed=3) == first
    shuffled = [row for row in rows if row.user_id != "u0"] + [row for row in rows if row.user_id == "u0"]
    roles, pairs, _ = split(shuffled, split_rule=rule, seed=3)
    assert roles == first[0] and {(p.pair_id, p.split) for p in pairs} == {(p.pair_id, p.split) for p in first[1]}
    assert split(rows, split_rule=rule, seed=4)[0] != first[0]


def test_a_share_above_zero_gets_a_group_and_zero_gets_none() -> None:
    rows = [choice(f"u{u}", n, f"P{n}?") for u in range(6) for n in range(4)]
    _, pairs, _ = split(rows, validation_fraction=0.01, test_seen_fraction=0.01)
    assert {p.split for p in pairs} == {*TRAIN_SPLITS, *ADAPT_SPLITS}
    _, pairs, _ = split(rows, validation_fraction=0, test_seen_fraction=0)
    assert {p.split for p in pairs} == {"train", *ADAPT_SPLITS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapt_users": 20}, "--adapt-users 20 leaves no training user of 20: use 19 or fewer"),
        ({"adapt_users": 0}, "--adapt-users 0: use 1 or more"),
        ({"support": 0}, "--support 0: use 1 or more"),
        ({"min_pairs": 0}, "--min-pairs 0: use 1 or more"),
        ({"min_pairs": 99}, "no user has 99 pairs (contradicting_pairs"),
        ({"adapt_fraction": float("nan")}, "--adapt-fraction nan: use a share between 0 and 1"),
        ({"validation_fraction": 0.5, "test_seen_fraction": 0.5}, "sum to less than 1"),
        ({"split_rule": "user"}, "--split-rule user: use one of prompt, dialog, pair"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        split(many(), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_one_user_or_one_prompt_is_not_enough() -> None:
    with pytest.raises(UserError, match="1 user is left"):
        split([choice("u", n, f"P{n}?") for n in range(5)])
    with pytest.raises(UserError, match=r"no adaptation user is left .*adapt_users_without_a_second_group 1"):
        split([choice(f"u{u}", n, rejected=f"b{n}") for u in range(5) for n in range(5)])
