"""Pref-LaMP's roles and splits: which users are new, and which of a user's papers is for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data_modules.papers import Author, HeldPaper, Work, seeded_unit
from prm.errors import UserError


@dataclass(frozen=True)
class PrefLampOptions:
    """How Pref-LaMP is built; the defaults are the paper's sizes where it names them.

    Attributes:
        seed: of every draw.
        top_k: the rejected title is drawn from the k nearest abstracts. Smaller = harder negatives.
        adapt_fraction: share of users held back as new users (126 of 611 in the paper).
        adapt_users: their number; overrides the share.
        support: profile papers of an adaptation user that are shown to adaptation; None takes half of them.
        test_per_user: at most so many test papers an adaptation user; None takes all.
        validation_fraction, test_seen_fraction: shares of the training users' works.
        max_users: build from so many users, drawn by seed; None takes all.
    """

    seed: int = 0
    top_k: int = 10
    adapt_fraction: float = 0.2062
    adapt_users: int | None = None
    support: int | None = None
    test_per_user: int | None = None
    validation_fraction: float = 0.1
    test_seen_fraction: float = 0.1
    max_users: int | None = None

    def check(self) -> None:
        """Raise UserError for a value that cannot be used, naming the option."""
        for name, least in (("top_k", 1), ("adapt_users", 1), ("support", 1), ("test_per_user", 1), ("max_users", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} {value}: use {least} or more")
        if not 0 < self.adapt_fraction < 1:
            raise UserError(f"--adapt-fraction {self.adapt_fraction}: use a share between 0 and 1")
        held_back = self.validation_fraction + self.test_seen_fraction
        if not (self.validation_fraction >= 0 and self.test_seen_fraction >= 0 and held_back < 1):
            raise UserError("--validation-fraction and --test-seen-fraction must be 0 or more and sum to less than 1")


@dataclass(frozen=True)
class SplitUser:
    """A user with role and the split of each paper that stays.

    Attributes:
        works: all works the user holds, kept or not: none of them may be a negative here.
    """

    user_id: str
    role: str
    papers: tuple[tuple[HeldPaper, str], ...]
    works: frozenset[int]

    def of(self, split: str) -> list[HeldPaper]:
        """The papers of one split."""
        return [paper for paper, name in self.papers if name == split]


def split_authors(
    authors: Sequence[Author], works: Sequence[Work], options: PrefLampOptions, counts: Counter[str]
) -> list[SplitUser]:
    """Training users, then adaptation users, each in file order.

    A training user needs two papers, one of them in the split `train`; an adaptation user one paper for support and
    one for test, once the works of training users are taken away. Others are dropped and counted.

    Raises:
        UserError: no user of one role is left.
    """
    ids = _adaptation_ids([a.user_id for a in authors], options)
    train = []
    for author in authors:
        if author.user_id in ids:
            continue
        user = _train_user(author, works, options)
        if len(author.papers) < 2:
            counts["train_users_with_one_paper"] += 1
        elif not user.of("train"):
            counts["train_users_without_train_papers"] += 1
        else:
            train.append(user)
    known = {paper.work for user in train for paper, _ in user.papers}
    adapt = []
    for author in authors:
        if author.user_id in ids and (new := _adapt_user(author, known, options, counts)):
            adapt.append(new)
    for role, users in (("training", train), ("adaptation", adapt)):
        if not users:
            removed = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()) if n) or "nothing was removed"
            raise UserError(f"no {role} user is left ({removed}): give more users, or users with more papers")
    return [*train, *adapt]


def _adaptation_ids(user_ids: Sequence[str], options: PrefLampOptions) -> set[str]:
    total = len(user_ids)
    if total < 2:
        raise UserError(f"{total} user is left, one to train on and one to adapt to are needed: give more users")
    wanted = options.adapt_users
    if wanted is None:
        wanted = min(max(round(options.adapt_fraction * total), 1), total - 1)
    if wanted >= total:
        raise UserError(f"--adapt-users {wanted} leaves no training user of {total}: use {total - 1} or fewer")
    return set(sorted(user_ids, key=lambda user: (seeded_unit(options.seed, "role", user), user))[:wanted])


def _train_user(author: Author, works: Sequence[Work], options: PrefLampOptions) -> SplitUser:
    """The split is drawn for the work, so co-authors have a paper in the same split."""

    def split(paper: HeldPaper) -> str:
        draw = seeded_unit(options.seed, "split", works[paper.work].key)
        if draw < options.validation_fraction:
            return "validation"
        return "test_seen" if draw < options.validation_fraction + options.test_seen_fraction else "train"

    return SplitUser(author.user_id, "train", tuple((p, split(p)) for p in author.papers), author.works)


def _adapt_user(author: Author, known: set[int], options: PrefLampOptions, counts: Counter[str]) -> SplitUser | None:
    """The question is test, a seeded part of the profile support, the rest test; None when one of them is empty."""
    fresh = [p for p in author.papers if p.work not in known]
    counts["papers_shared_with_training_users"] += len(author.papers) - len(fresh)
    question = [p for p in fresh if p.is_question]
    counts["questions_shared_with_training_users"] += not question
    profile = sorted(
        (p for p in fresh if not p.is_question),
        key=lambda p: (seeded_unit(options.seed, "support", author.user_id, p.paper.paper_id), p.paper.paper_id),
    )
    if not profile:
        counts["adapt_users_without_support"] += 1
        return None
    if not question and len(profile) == 1:
        counts["adapt_users_without_test"] += 1
        return None
    most = len(profile) if question else len(profile) - 1
    wanted = options.support if options.support is not None else (len(profile) + 1) // 2
    counts["adapt_users_with_less_support"] += wanted > most
    shown, held_back = profile[: min(wanted, most)], profile[min(wanted, most) :]
    test = (question + held_back)[: options.test_per_user]
    counts["test_papers_over_cap"] += len(question) + len(held_back) - len(test)
    papers = tuple([(p, "support") for p in shown] + [(p, "test") for p in test])
    return SplitUser(author.user_id, "adapt", papers, author.works)
