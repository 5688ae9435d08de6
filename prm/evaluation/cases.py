"""The cases of an evaluation: which prompts of which users, in which order, and in which units of work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prm.dataset_dir import DatasetDir
from prm.errors import UserError
from prm.evaluation.methods.base import Request
from prm.records import Completion, PreferencePair

# Where the history of a split's users lies: what they wrote before.
HISTORY_SPLIT = {"test": "support", "validation": "train", "test_seen": "train"}


@dataclass(frozen=True, slots=True)
class Case:
    """A request and the user's own text for it."""

    request: Request
    reference: str


class OfUser(Protocol):
    @property
    def user_id(self) -> str: ...


Row = TypeVar("Row", bound=OfUser)
T = TypeVar("T")


def case_seed(seed: int, case_id: str) -> int:
    """A case's own seed (31 bits): the same whichever cases stand beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{case_id}".encode()).digest()[:4], "big") >> 1


def spread(rows: Sequence[Row], limit: int | None = None, limit_users: int | None = None) -> list[Row]:
    """Rows user by user in turns (every user's first row, every user's second, ...), up to the limits.

    So a limited evaluation covers as many users as it can. Users and rows keep their order.

    Raises:
        UserError: a limit below 1.
    """
    for name, value in (("--limit", limit), ("--limit-users", limit_users)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} leaves nothing to evaluate: use 1 or more")
    by_user: dict[str, list[Row]] = {}
    for row in rows:
        by_user.setdefault(row.user_id, []).append(row)
    chosen = list(by_user.values())[:limit_users]
    turns = max((len(own) for own in chosen), default=0)
    return [own[turn] for turn in range(turns) for own in chosen if turn < len(own)][:limit]


def select_cases(
    data: DatasetDir, split: str, *, seed: int, limit: int | None = None, limit_users: int | None = None
) -> list[Case]:
    """Cases of the completions of a split; a user's history is what stands in the split before it.

    Raises:
        UserError: no completions in this split.
    """
    completions = data.completions([split])
    if not completions:
        raise UserError(f"{data.path} has no completions in the split {split}: choose another --split")
    history: dict[str, list[Completion]] = {}
    for earlier in data.completions([HISTORY_SPLIT[split]]):
        history.setdefault(earlier.user_id, []).append(earlier)
    cases = []
    for c in spread(completions, limit, limit_users):
        own = tuple(history.get(c.user_id, ()))
        request = Request(c.example_id, c.user_id, c.prompt, own, case_seed(seed, c.example_id))
        cases.append(Case(request, c.reference))
    return cases


def select_pairs(
    data: DatasetDir, split: str, *, limit: int | None = None, limit_users: int | None = None
) -> list[PreferencePair]:
    """Preference pairs of a split.

    Raises:
        UserError: no pairs in this split.
    """
    pairs = data.pairs([split])
    if not pairs:
        raise UserError(f"{data.path} has no pairs in the split {split}: choose another --split")
    return spread(pairs, limit, limit_users)


def units(rows: Sequence[T], size: int) -> list[list[T]]:
    """Fixed batches of `size` rows: the unit of work, which results may depend on and resuming does not change.

    Raises:
        UserError: size below 1.
    """
    if size < 1:
        raise UserError(f"--unit-size {size} must be 1 or more")
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
