"""What flows through the system: preference pairs, completions, users. Schemas, and the checks of single rows.

A prompt is a list of chat messages `{"role": ..., "content": ...}`; responses are plain strings. Chosen and rejected
are of one type and pass through one formatting path, so nothing but their text can tell them apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from prm.errors import UserError

ROLES = ("system", "user", "assistant")
TRAIN_SPLITS = ("train", "validation", "test_seen")
ADAPT_SPLITS = ("support", "test")
SPLITS = TRAIN_SPLITS + ADAPT_SPLITS
USER_ROLES = ("train", "adapt")

Message = dict[str, str]
Prompt = list[Message]


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One user's choice between two responses to one prompt.

    Attributes:
        pair_id: unique in its dataset.
        user_id: whose choice it is.
        split: one of SPLITS.
        prompt: chat messages, the last from the user.
        chosen, rejected: response texts.
        margin: strength of the preference where the source has one, else None.
        meta: anything else the source knows (JSON).
    """

    pair_id: str
    user_id: str
    split: str
    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the text that this user wrote for it. Those of the `support` split are the user's history."""

    example_id: str
    user_id: str
    split: str
    prompt: Prompt
    reference: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class User:
    """A user of the dataset: `train` users shape the shared parameters, `adapt` users are new to them."""

    user_id: str
    role: str
    profile: str | None = None
    history: list[dict[str, Any]] | None = None
    persona: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RowProblem:
    """A bad row: where it stands and what is wrong with it. `row` is the offending source text, shortened."""

    file: str
    line: int
    field: str
    reason: str
    row: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.reason}"


_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
PAIR_SCHEMA = pa.schema(
    [
        ("pair_id", pa.string()),
        ("user_id", pa.string()),
        ("split", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("margin", pa.float64()),
        ("meta", pa.string()),
    ]
)
COMPLETION_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("user_id", pa.string()),
        ("split", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("reference", pa.string()),
        ("meta", pa.string()),
    ]
)
USER_SCHEMA = pa.schema(
    [
        ("user_id", pa.string()),
        ("role", pa.string()),
        ("profile", pa.string()),
        ("history", pa.string()),
        ("persona", pa.string()),
    ]
)


def user_prompt(text: str) -> Prompt:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def text_problem(value: Any) -> str | None:
    """Why `value` cannot stand as a text of the dataset, or None."""
    if value is None:
        return "is missing"
    if isinstance(value, float) and not math.isfinite(value):
        return "is NaN or infinite, a text is needed"
    if not isinstance(value, str):
        return f"has type {type(value).__name__}, a text is needed"
    if not value.strip():
        return "is empty"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds bytes that are not UTF-8"
    return None


def prompt_problem(prompt: Any) -> str | None:
    """Why `prompt` is not a list of chat messages that ends with the user's, or None."""
    if not isinstance(prompt, list) or not prompt:
        return "must be a non-empty list of {role, content} messages"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"message {index} must have exactly role and content"
        if message["role"] not in ROLES:
            return f"message {index} has role {message['role']!r}, one of {', '.join(ROLES)} is needed"
        reason = text_problem(message["content"])
        if reason:
            return f"message {index}: content {reason}"
    if prompt[-1]["role"] != "user":
        return "the last message must be the user's"
    return None


def json_problem(value: Any) -> str | None:
    """Why `value` cannot be kept as JSON, or None."""
    try:
        (_json_or_none(value) or "").encode()
    except (TypeError, ValueError) as error:
        return f"cannot be written as JSON: {error}"
    return None


def pair_problems(pair: PreferencePair) -> list[tuple[str, str]]:
    """(field, reason) for everything wrong with one pair."""
    found = [(name, reason) for name in ("pair_id", "user_id") if (reason := text_problem(getattr(pair, name)))]
    if pair.split not in SPLITS:
        found.append(("split", f"is {pair.split!r}, one of {', '.join(SPLITS)} is needed"))
    if reason := prompt_problem(pair.prompt):
        found.append(("prompt", reason))
    for name in ("chosen", "rejected"):
        if reason := text_problem(getattr(pair, name)):
            found.append((name, reason))
    if pair.chosen == pair.rejected:
        found.append(("rejected", "equals chosen: the pair carries no preference"))
    if pair.margin is not None and (not isinstance(pair.margin, (int, float)) or not math.isfinite(pair.margin)):
        found.append(("margin", "must be a finite number or absent"))
    if reason := json_problem(pair.meta):
        found.append(("meta", reason))
    return found


def completion_problems(completion: Completion) -> list[tuple[str, str]]:
    """(field, reason) for everything wrong with one completion."""
    found = [
        (name, reason) for name in ("example_id", "user_id") if (reason := text_problem(getattr(completion, name)))
    ]
    if completion.split not in SPLITS:
        found.append(("split", f"is {completion.split!r}, one of {', '.join(SPLITS)} is needed"))
    if reason := prompt_problem(completion.prompt):
        found.append(("prompt", reason))
    if reason := text_problem(completion.reference):
        found.append(("reference", reason))
    if reason := json_problem(completion.meta):
        found.append(("meta", reason))
    return found


def user_problems(user: User) -> list[tuple[str, str]]:
    """(field, reason) for everything wrong with one user."""
    found = []
    if reason := text_problem(user.user_id):
        found.append(("user_id", reason))
    if user.role not in USER_ROLES:
        found.append(("role", f"is {user.role!r}, one of {', '.join(USER_ROLES)} is needed"))
    if user.profile is not None and (reason := text_problem(user.profile)):
        found.append(("profile", reason))
    for name in ("history", "persona"):
        if reason := json_problem(getattr(user, name)):
            found.append((name, reason))
    return found


def _json_or_none(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)


def pairs_table(pairs: Sequence[PreferencePair]) -> pa.Table:
    """Arrow table of PAIR_SCHEMA."""
    columns: dict[str, list[Any]] = {name: [getattr(p, name) for p in pairs] for name in PAIR_SCHEMA.names}
    columns["meta"] = [_json_or_none(p.meta) for p in pairs]
    return pa.table(columns, schema=PAIR_SCHEMA)


def completions_table(completions: Sequence[Completion]) -> pa.Table:
    """Arrow table of COMPLETION_SCHEMA."""
    columns: dict[str, list[Any]] = {name: [getattr(c, name) for c in completions] for name in COMPLETION_SCHEMA.names}
    columns["meta"] = [_json_or_none(c.meta) for c in completions]
    return pa.table(columns, schema=COMPLETION_SCHEMA)


def users_table(users: Sequence[User]) -> pa.Table:
    """Arrow table of USER_SCHEMA."""
    return pa.table(
        {
            "user_id": [u.user_id for u in users],
            "role": [u.role for u in users],
            "profile": [u.profile for u in users],
            "history": [_json_or_none(u.history) for u in users],
            "persona": [_json_or_none(u.persona) for u in users],
        },
        schema=USER_SCHEMA,
    )


def _parsed(row: dict[str, Any], name: str, empty: Any) -> Any:
    """A JSON column of a row; what is not JSON is a UserError that names the row."""
    text = row[name]
    if not text:
        return empty
    try:
        return json.loads(text)
    except ValueError as error:
        identity = row.get("pair_id") or row.get("example_id") or row.get("user_id")
        raise UserError(f"row {identity!r}: {name} is not JSON ({error}): build the dataset again") from error


def pairs_from_table(table: pa.Table) -> list[PreferencePair]:
    """Rows of a PAIR_SCHEMA table as records."""
    return [PreferencePair(**{**row, "meta": _parsed(row, "meta", {})}) for row in table.to_pylist()]


def completions_from_table(table: pa.Table) -> list[Completion]:
    """Rows of a COMPLETION_SCHEMA table as records."""
    return [Completion(**{**row, "meta": _parsed(row, "meta", {})}) for row in table.to_pylist()]


def users_from_table(table: pa.Table) -> list[User]:
    """Rows of a USER_SCHEMA table as records."""
    return [
        User(
            row["user_id"],
            row["role"],
            row["profile"],
            _parsed(row, "history", None),
            _parsed(row, "persona", None),
        )
        for row in table.to_pylist()
    ]
