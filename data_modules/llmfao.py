"""llmfao: choices of crowd workers between answers of language models (D. Ustalov, github.com/dustalov/llmfao).

    crowd-comparisons.csv    id, prompt, model_x, model_y, worker, winner (left | right | tie), left, right
    pairs-crowd.jsonl        {"id", "prompt", "text", "slug", "model_x", "result_x", "model_y", "result_y", ...}

One row of the first file is one worker's vote; the second holds, under the same id, the prompt's text and the two
answers. Left is model_x and its answer result_x. Ties carry no preference, and answers may be empty: both are left out
and counted. Workers judge answers to 13 prompts only, so a worker's choices are split by pair; splits by prompt leave
little to train on.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_modules.bad_rows import BadRows
from data_modules.json_lines import json_lines, text_lines
from data_modules.json_rows import Element
from data_modules.user_splits import Choice, SplitOptions, split_choices
from prm import store
from prm.dataset_dir import DatasetDir, write_dataset
from prm.errors import UserError
from prm.records import RowProblem, text_problem, user_prompt

LICENCE = "CC-BY-4.0 (Dmitry Ustalov and crowd workers)"
DEFAULTS = SplitOptions(split_rule="pair", min_pairs=10)
SPLIT_RULES = ("pair", "prompt")
_VOTE_COLUMNS = ("id", "prompt", "model_x", "model_y", "worker", "winner", "left", "right")
_WINNERS = ("left", "right", "tie")
_QUOTED_ROW = 2000


@dataclass(frozen=True, slots=True)
class Answers:
    """Two answers to one prompt. `key` is (prompt, model_x, model_y), which the votes repeat."""

    pair_id: str
    key: tuple[str, str, str]
    slug: str
    prompt: str
    result_x: str
    result_y: str


@dataclass(frozen=True, slots=True)
class Vote:
    """A worker's vote: the answers' id and key, the winning side, and the names of the models on the two sides."""

    pair_id: str
    key: tuple[str, str, str]
    worker: str
    winner: str
    left: str
    right: str
    line: int


def build_llmfao(
    comparisons: str | Path,
    answers: str | Path,
    out: str | Path,
    options: SplitOptions = DEFAULTS,
    *,
    bad_rows: str = "error",
    licence: str = LICENCE,
    overwrite: bool = False,
) -> DatasetDir:
    """Build a dataset directory of llmfao's workers.

    Args:
        comparisons: the votes, crowd-comparisons.csv (plain, .gz or .xz).
        answers: the answers, pairs-crowd.jsonl (plain, .gz or .xz).
        out: directory to write.
        options: roles and splits; `split_rule` is one of SPLIT_RULES.
        bad_rows: "error" stops at bad rows, "skip" sets them aside in `<out>.bad_rows.jsonl`.
        licence: terms of the source, for dataset.json.
        overwrite: replace an existing directory.

    Raises:
        UserError: a bad row under the policy "error", an option that does not fit, files that do not belong together,
            or nothing left.
    """
    options.check()
    if options.split_rule not in SPLIT_RULES:
        raise UserError(f"--split-rule {options.split_rule}: llmfao has no dialogs, use {' or '.join(SPLIT_RULES)}")
    store.refuse_existing(out, overwrite=overwrite)
    bad = BadRows(bad_rows, out)
    counts: Counter[str] = Counter()
    known = {found.pair_id: found for found in bad.sift(read_answers(answers))}
    votes = list(bad.sift(read_votes(comparisons)))
    counts["votes_read"] = len(votes)
    choices = list(bad.sift(_choices(votes, known, str(comparisons), counts)))
    bad.stop_on_error()
    if not votes:
        raise bad.empty(f"{comparisons} holds no votes")
    if counts["votes_without_answers"] == len(votes):
        raise UserError(f"no vote of {comparisons} has its id in {answers}: give two files of one release")
    counts["bad_rows"] = len(bad)
    users, pairs = split_choices(choices, options, counts)
    dataset = write_dataset(
        out,
        name="llmfao",
        pairs=pairs,
        completions=[],
        users=users,
        source=f"llmfao files given by the user: {Path(comparisons).name}, {Path(answers).name}",
        licence=licence,
        seed=options.seed,
        split_rule=options.split_rule,
        counts={name: count for name, count in sorted(counts.items()) if count},
        arguments=asdict(options),
        overwrite=overwrite,
    )
    bad.write_quarantine()
    return dataset


def read_answers(path: str | Path) -> Iterator[Answers | RowProblem]:
    """The rows of pairs-crowd.jsonl. Empty answers pass: the votes on them are counted later.

    Raises:
        UserError: the file cannot be opened, or is empty.
    """
    seen: dict[str, int] = {}
    for item in json_lines(path):
        found = item if isinstance(item, RowProblem) else _answers(item, seen)
        if isinstance(found, tuple):
            assert isinstance(item, Element)
            yield RowProblem(str(path), item.line, *found, json.dumps(item.value)[:_QUOTED_ROW])
        else:
            yield found


def _answers(item: Element, seen: dict[str, int]) -> Answers | tuple[str, str]:
    """The answers of one row, or (field, reason) of its first fault."""
    row = item.value
    if not isinstance(row, dict):
        return "row", f"has type {type(row).__name__}, an object with id, prompt, text, result_x and result_y is needed"
    for name in ("id", "prompt", "model_x", "model_y"):
        if not isinstance(row.get(name), int) or isinstance(row[name], bool):
            return name, "must be a whole number" if name in row else "is missing"
    for name in ("text", "result_x", "result_y"):
        reason = text_problem(row.get(name))
        if reason and (name == "text" or reason != "is empty"):
            return name, reason
    pair_id = str(row["id"])
    if seen.setdefault(pair_id, item.line) != item.line:
        return "id", f"{pair_id} is the id of line {seen[pair_id]} too"
    key = (str(row["prompt"]), str(row["model_x"]), str(row["model_y"]))
    slug = str(row.get("slug") or row["prompt"])
    return Answers(pair_id, key, slug, row["text"], row["result_x"], row["result_y"])


def read_votes(path: str | Path) -> Iterator[Vote | RowProblem]:
    """The votes of crowd-comparisons.csv, in file order.

    Raises:
        UserError: the file cannot be opened, is empty, or lacks a column.
    """
    faults: list[RowProblem] = []

    def lines() -> Iterator[str]:
        for item in text_lines(path):
            if isinstance(item, RowProblem):
                faults.append(item)
            else:
                yield item[1]

    reader = csv.DictReader(lines())
    columns = reader.fieldnames or []
    if absent := [name for name in _VOTE_COLUMNS if name not in columns]:
        raise UserError(
            f"{path} has no column {absent[0]!r}, its columns are {', '.join(columns)[:200]}: "
            "llmfao's crowd-comparisons.csv is needed"
        )
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield RowProblem(str(path), reader.line_num, "row", f"is not CSV: {error}")
            continue
        if row is None:
            break
        reason = _vote_problem(row)
        if reason is None:
            key = (row["prompt"], row["model_x"], row["model_y"])
            yield Vote(row["id"], key, row["worker"], row["winner"], row["left"], row["right"], reader.line_num)
        else:
            yield RowProblem(str(path), reader.line_num, *reason, json.dumps(row)[:_QUOTED_ROW])
    yield from faults


def _vote_problem(row: dict[str | Any, Any]) -> tuple[str, str] | None:
    """(field, reason) of the first fault of a vote."""
    if None in row:
        return "row", "has more fields than the header"
    for name in _VOTE_COLUMNS:
        if reason := text_problem(row[name]):
            return name, reason
    if row["winner"] not in _WINNERS:
        return "winner", f"is {row['winner']!r}, one of {', '.join(_WINNERS)} is needed"
    return None


def _choices(
    votes: list[Vote], known: dict[str, Answers], file: str, counts: Counter[str]
) -> Iterator[Choice | RowProblem]:
    """One choice for each vote that decides between two answers; the others are counted."""
    for vote in votes:
        found = known.get(vote.pair_id)
        if found is None:
            counts["votes_without_answers"] += 1
        elif found.key != vote.key:
            reason = f"prompt and models {vote.key} are not those of the answers, {found.key}"
            yield RowProblem(file, vote.line, "id", reason, repr(vote)[:_QUOTED_ROW])
        elif vote.winner == "tie":
            counts["ties"] += 1
        elif not (found.result_x.strip() and found.result_y.strip()):
            counts["votes_with_an_empty_answer"] += 1
        else:
            sides = [(found.result_x, vote.left), (found.result_y, vote.right)]
            (chosen, winner), (rejected, loser) = sides if vote.winner == "left" else reversed(sides)
            yield Choice(
                pair_id=f"{vote.worker}/{vote.pair_id}",
                user_id=vote.worker,
                prompt=user_prompt(found.prompt),
                chosen=chosen,
                rejected=rejected,
                meta={"prompt": found.slug, "chosen_model": winner, "rejected_model": loser},
            )
