"""LaMP-5 files as published: an author's abstracts and titles (Salemi et al. 2023, "LaMP", task 5).

    questions   [{"id", "input", "profile": [{"id", "title", "abstract", "date"?}], "user_id"?}, ...]
    outputs     {"task": "LaMP_5", "golds": [{"id", "output"}, ...]}

`input` is "Generate a title for the following abstract of a paper: " and the abstract of the author's newest paper; its
title is the gold output; the profile holds the older papers. `user_id` is an addition of some files; without it every
question is an author. Both readers stream, and yield a `RowProblem` in place of what is wrong: a bad paper costs its
question that paper only, anything else costs the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_modules.json_rows import ArrayRows, Element
from prm.errors import UserError
from prm.records import RowProblem, text_problem

INSTRUCTION = "Generate a title for the following abstract of a paper: "
_TASK = "LaMP_5"
_QUOTED_ROW = 2000


@dataclass(frozen=True, slots=True)
class Paper:
    """One paper of an author's profile."""

    paper_id: str
    title: str
    abstract: str
    date: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One author: the abstract to be titled and the older papers.

    Attributes:
        question_id: links the question to its gold title.
        user_id: the author; the question's id where the file names no authors.
        abstract: of the newest paper, without the instruction.
        profile: the author's older papers, at least one.
        line: line of the file on which the row starts.
    """

    question_id: str
    user_id: str
    abstract: str
    profile: tuple[Paper, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Gold:
    """The author's own title of a question's abstract."""

    question_id: str
    title: str
    line: int


def prompt_text(abstract: str) -> str:
    """The prompt that asks for a paper's title, in LaMP-5's words."""
    return INSTRUCTION + abstract


class _Row:
    """One row under check: collects what is wrong with its fields."""

    def __init__(self, file: Path, element: Element) -> None:
        self.file = str(file)
        self.line, self.number, self.value = element
        self.problems: list[RowProblem] = []

    def problem(self, field: str, reason: str, row: Any = None) -> None:
        quoted = json.dumps(self.value if row is None else row, ensure_ascii=False)[:_QUOTED_ROW]
        # Published files hold all rows on one line: the number finds the row there.
        self.problems.append(RowProblem(self.file, self.line, field, f"{reason} (row {self.number})", quoted))

    def text(self, owner: dict[str, Any], name: str, path: str = "") -> str:
        """The text under `name`, or "" after noting what is wrong with it."""
        reason = "is missing" if name not in owner else text_problem(owner[name])
        if reason:
            self.problem(path + name, reason, owner)
            return ""
        return str(owner[name])


def read_questions(path: str | Path, ids: set[str] | None = None) -> Iterator[Question | RowProblem]:
    """Questions of a LaMP-5 questions file (plain, .gz or .xz), in file order.

    Args:
        path: the file.
        ids: receives the id of every row that has one, bad rows included.

    Raises:
        UserError: the file cannot be read, or is not a JSON array.
    """
    path = Path(path)
    shape = "the LaMP-5 questions file, a JSON array of {id, input, profile},"
    seen: dict[tuple[str, str], int] = {}
    for item in ArrayRows(path, shape=shape):
        if isinstance(item, RowProblem):
            yield item
            continue
        row = _Row(path, item)
        question = _question(row, seen)
        if ids is not None and isinstance(row.value, dict) and isinstance(row.value.get("id"), str):
            ids.add(row.value["id"])
        yield from row.problems
        if question is not None:
            yield question


def _question(row: _Row, seen: dict[tuple[str, str], int]) -> Question | None:
    value = row.value
    if not isinstance(value, dict):
        row.problem("row", f"has type {type(value).__name__}, an object with id, input and profile is needed")
        return None
    question_id = row.text(value, "id")
    user_id = row.text(value, "user_id") if "user_id" in value else question_id
    for name, identity in (("id", question_id), ("user_id", user_id)):
        first = seen.setdefault((name, identity), row.number) if identity and name in value else row.number
        if first != row.number:
            row.problem(name, f"{identity!r} is the {name} of row {first} too")
    text = row.text(value, "input")
    abstract = text.removeprefix(INSTRUCTION.rstrip()).strip()
    if text and not text.startswith(INSTRUCTION.rstrip()):
        row.problem("input", f"does not start with {INSTRUCTION.rstrip()!r}")
    elif text and not abstract:
        row.problem("input", "holds no abstract")
    sound = not row.problems
    profile = _profile(row)
    return Question(question_id, user_id, abstract, profile, row.line) if sound and profile else None


def _profile(row: _Row) -> tuple[Paper, ...]:
    """The sound papers of a row; none is a problem of its own, since a user with one example teaches nothing."""
    entries = row.value.get("profile")
    if not isinstance(entries, list):
        reason = f"has type {type(entries).__name__}, a list is needed" if "profile" in row.value else "is missing"
        row.problem("profile", reason)
        return ()
    papers: dict[str, Paper] = {}
    for index, entry in enumerate(entries):
        field = f"profile[{index}]"
        if not isinstance(entry, dict):
            row.problem(field, f"has type {type(entry).__name__}, an object with id, title and abstract is needed")
            continue
        before = len(row.problems)
        paper_id, title, abstract = (row.text(entry, name, f"{field}.") for name in ("id", "title", "abstract"))
        date = row.text(entry, "date", f"{field}.") if entry.get("date") is not None else None
        paper = Paper(paper_id, title, abstract, date)
        if len(row.problems) == before and papers.setdefault(paper_id, paper) != paper:
            row.problem(f"{field}.id", f"{paper_id!r} is the id of another paper of this profile too", entry)
    if not entries:
        row.problem("profile", "is empty: a user with one example cannot be learned from, two papers are needed")
    elif not papers:
        row.problem("profile", "holds no sound paper: a user with one example cannot be learned from")
    return tuple(papers.values())


def read_golds(path: str | Path, ids: set[str] | None = None) -> Iterator[Gold | RowProblem]:
    """Gold titles of a LaMP-5 outputs file (plain, .gz or .xz), in file order.

    Args:
        path: the file.
        ids: receives the id of every row that has one, bad rows included.

    Raises:
        UserError: the file cannot be read, is not an object with `golds`, or belongs to another LaMP task.
    """
    path = Path(path)
    rows = ArrayRows(path, key="golds", shape='the LaMP-5 outputs file, an object {"task": "LaMP_5", "golds": [...]},')
    seen: dict[str, int] = {}
    for item in rows:
        if isinstance(item, RowProblem):
            yield item
            continue
        row = _Row(path, item)
        if isinstance(row.value, dict):
            question_id, title = row.text(row.value, "id"), row.text(row.value, "output")
            if ids is not None:
                ids.add(question_id)
            if question_id and seen.setdefault(question_id, row.number) != row.number:
                row.problem("id", f"{question_id!r} is the id of row {seen[question_id]} too")
            if not row.problems:
                yield Gold(question_id, title, row.line)
        else:
            row.problem("row", f"has type {type(row.value).__name__}, an object with id and output is needed")
        yield from row.problems
    task = rows.envelope.get("task", _TASK) if rows.envelope else _TASK
    if task != _TASK:
        raise UserError(f"{path} belongs to the task {task!r}: the outputs file of {_TASK} is needed")
