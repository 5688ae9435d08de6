"""Preference pairs of any table that names users: one row is one user's choice.

    user     prompt                      chosen, rejected
    any id   a text                      texts
    any id   chat messages               texts, or one assistant message each
    any id   none, or as above           conversations: the prompt and one assistant message, the same prompt in both

A conversation is a list of {role, content} messages; the last one is the response, what stands before it the prompt.
Chosen and rejected are read by one function and come out as texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_modules.bad_rows import BadRows
from data_modules.table_rows import Row, TableSource
from data_modules.user_splits import Choice, SplitOptions, split_choices
from prm import store
from prm.dataset_dir import DatasetDir, write_dataset
from prm.errors import UserError
from prm.progress import Progress
from prm.records import Message, Prompt, RowProblem, prompt_problem, text_problem, user_prompt

PROMPT_COLUMN = "prompt"


@dataclass(frozen=True)
class PairColumns:
    """Names of the columns.

    Attributes:
        user: whose choice the row is: a text or a whole number.
        prompt: a text or chat messages. None takes the column "prompt" of rows that have one, and else the
            conversations' common beginning.
        chosen, rejected: a text or messages.
        implicit_prompt: take the prompt from the conversations even where there is a column "prompt".
        dialog: which conversation of the user the row belongs to.
        margin: strength of the preference, a number or nothing.
    """

    user: str
    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    implicit_prompt: bool = False
    dialog: str | None = None
    margin: str | None = None

    def check(self) -> None:
        """Raise UserError when columns contradict each other."""
        if self.implicit_prompt and self.prompt:
            raise UserError("--implicit-prompt takes the prompt from the conversations: leave --prompt-column out")
        names = [n for n in (self.user, self.prompt, self.chosen, self.rejected, self.dialog, self.margin) if n]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"the column {twice[0]!r} is given for two things: give each its own")

    @property
    def required(self) -> list[str]:
        """The columns that must be there."""
        names = (self.user, self.prompt, self.chosen, self.rejected, self.dialog, self.margin)
        return [name for name in names if name]


class _Fault(Exception):
    """What makes a row no choice."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(column, reason)
        self.column, self.reason = column, reason


def build_pairs(
    path: str | Path,
    columns: PairColumns,
    out: str | Path,
    options: SplitOptions | None = None,
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    bad_rows: str = "error",
    name: str | None = None,
    licence: str = "as the source's",
    overwrite: bool = False,
) -> DatasetDir:
    """Build a dataset directory from a table of preference pairs.

    Args:
        path: a file, a directory or a hub id, see `table_rows`.
        columns: names of the columns.
        out: directory to write.
        options: roles and splits.
        split, config, revision: which part of a dataset with several, see `table_rows.TableSource`.
        bad_rows: "error" stops at bad rows, "skip" sets them aside in `<out>.bad_rows.jsonl`.
        name: of the dataset; by default the path's last part without its ending.
        licence: terms of the source, for dataset.json.
        overwrite: replace an existing directory.

    Raises:
        UserError: a bad row under the policy "error", a column that is not there, an option that does not fit, or
            nothing left.
    """
    options = options or SplitOptions()
    options.check()
    columns.check()
    if options.split_rule == "dialog" and columns.dialog is None:
        raise UserError("--split-rule dialog needs --dialog-column: the column that says which rows are one dialog")
    store.refuse_existing(out, overwrite=overwrite)
    bad = BadRows(bad_rows, out)
    counts: Counter[str] = Counter()
    optional = [] if columns.prompt or columns.implicit_prompt else [PROMPT_COLUMN]
    source = TableSource(str(path), columns.required, optional, split, config, revision)
    choices = list(bad.sift(_choices(_shown(source.rows()), columns, counts)))
    bad.stop_on_error()
    if not choices:
        raise bad.empty(f"{path} holds no rows")
    counts["bad_rows"] = len(bad)
    counts["rows_read"] = len(choices)
    users, pairs = split_choices(choices, options, counts)
    dataset = write_dataset(
        out,
        name=name or Path(path).name.split(".")[0] or "pairs",
        pairs=pairs,
        completions=[],
        users=users,
        source=_described(Path(path), split, config, revision),
        licence=licence,
        seed=options.seed,
        split_rule=options.split_rule,
        counts={key: count for key, count in sorted(counts.items()) if count},
        arguments={**asdict(options), "columns": asdict(columns)},
        overwrite=overwrite,
    )
    bad.write_quarantine()
    return dataset


def _described(path: Path, split: str | None, config: str | None, revision: str | None) -> str:
    """The source without the folders of this machine."""
    if path.exists():
        where = f"{'directory' if path.is_dir() else 'file'} given by the user: {path.resolve().name}"
    else:
        where = f"Hugging Face dataset {path}"
    parts = {"split": split, "config": config, "revision": revision}
    return where + "".join(f", {key} {value}" for key, value in parts.items() if value)


def _shown(rows: Iterable[Row | RowProblem]) -> Iterator[Row | RowProblem]:
    """The rows, with progress whose last line is not shown when reading ends in an error."""
    bar = Progress("read pairs")
    for row in rows:
        yield row
        bar.update()
    bar.close()


def _choices(
    rows: Iterable[Row | RowProblem], columns: PairColumns, counts: Counter[str]
) -> Iterator[Choice | RowProblem]:
    """One choice a row, or what is wrong with it. Ids number the rows, so that they are unique over files."""
    for number, row in enumerate(rows, 1):
        if isinstance(row, RowProblem):
            yield row
            continue
        try:
            yield _choice(row, number, columns, counts)
        except _Fault as fault:
            yield row.problem(fault.column, fault.reason)


def _choice(row: Row, number: int, columns: PairColumns, counts: Counter[str]) -> Choice:
    user = _identity(row.value, columns.user)
    dialog = _identity(row.value, columns.dialog) if columns.dialog else None
    margin = _margin(row.value, columns.margin) if columns.margin else None
    prompt = _explicit_prompt(row.value, columns, counts)
    (prompt, chosen), (other, rejected) = (
        _response(row.value, name, prompt, counts) for name in (columns.chosen, columns.rejected)
    )
    if prompt != other:
        raise _Fault(columns.rejected, f"begins with other messages than {columns.chosen}: one prompt is needed")
    if reason := prompt_problem(prompt):
        raise _Fault(columns.chosen, f"before the response: {reason}")
    meta = {"source": f"{row.file}:{row.line}", **({} if dialog is None else {"dialog": dialog})}
    return Choice(f"{user}/{number}", user, prompt, chosen, rejected, margin, dialog, meta)


def _identity(row: dict[str, Any], column: str) -> str:
    """The id in a column, as a text."""
    value = row.get(column)
    if isinstance(value, float) and value.is_integer():
        # A column of whole numbers with a gap is read as floats by many a tool.
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if reason := text_problem(value):
        raise _Fault(column, reason if value is None or isinstance(value, str) else "must be a text or a whole number")
    return str(value)


def _margin(row: dict[str, Any], column: str) -> float | None:
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _Fault(column, f"is {value!r}, a finite number or nothing is needed")
    return float(value)


def _messages(value: list[Any], column: str, counts: Counter[str]) -> Prompt:
    """Chat messages with role and content alone; lists with further fields (names, tool calls) are counted."""
    found: list[Message] = []
    further = False
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _Fault(column, f"message {index} must have role and content")
        further |= any(part not in (None, [], "") for name, part in message.items() if name not in ("role", "content"))
        found.append({"role": message["role"], "content": message["content"]})
    counts["message_lists_with_further_fields"] += further
    return found


def _explicit_prompt(row: dict[str, Any], columns: PairColumns, counts: Counter[str]) -> Prompt | None:
    """The prompt of its own column as messages; None when the conversations hold it."""
    column = columns.prompt or PROMPT_COLUMN
    value = row.get(column)
    if columns.implicit_prompt or (value is None and columns.prompt is None):
        return None
    if isinstance(value, list):
        prompt = _messages(value, column, counts)
        reason = prompt_problem(prompt)
    else:
        prompt = user_prompt(str(value))
        reason = text_problem(value)
    if reason:
        raise _Fault(column, reason)
    return prompt


def _response(row: dict[str, Any], column: str, prompt: Prompt | None, counts: Counter[str]) -> tuple[Prompt, str]:
    """The prompt, which a conversation brings itself, and the response: the one path of chosen and rejected."""
    value = row.get(column)
    if isinstance(value, list):
        messages = _messages(value, column, counts)
        if not messages or messages[-1]["role"] != "assistant":
            raise _Fault(column, "must end with a message of the assistant")
        beginning, value = messages[:-1], messages[-1]["content"]
        if prompt is None and not beginning:
            raise _Fault(column, "holds the response alone: name the prompt's column with --prompt-column")
        if prompt is not None and beginning not in ([], prompt):
            raise _Fault(column, "begins with other messages than the prompt: pass --implicit-prompt to take its own")
        prompt = prompt or beginning
    if reason := text_problem(value):
        raise _Fault(column, reason)
    if prompt is None:
        raise _Fault(column, "is a text, and there is no prompt: name the prompt's column with --prompt-column")
    return prompt, str(value)
