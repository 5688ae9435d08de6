"""Pref-LaMP (arXiv 2512.23067, section 5): preference pairs from LaMP-5 by hard negatives.

The prompt asks for a paper's title; chosen is the author's own title, rejected the title of another paper, drawn from
the k most similar abstracts of other users of the same role. All titles are human.

Splits. Adaptation users' question papers are test; a part of their profiles is support, the rest test. Training users'
papers go to train, validation or test_seen by a draw on the work, so a co-authored paper is in one split for all its
authors. Nothing leaks through co-authors: a work is never a negative for an author who holds it, and a training user's
work enters neither support nor test. What is removed is counted by reason in dataset.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_modules.bad_rows import BadRows
from data_modules.hard_negatives import preference_pairs
from data_modules.lamp5 import Question, prompt_text, read_golds, read_questions
from data_modules.lamp_splits import PrefLampOptions, SplitUser, split_authors
from data_modules.papers import Work, collect_authors, seeded_unit
from prm import store
from prm.dataset_dir import DatasetDir, write_dataset
from prm.errors import UserError
from prm.records import Completion, PreferencePair, RowProblem, User, user_prompt


class Encoder(Protocol):
    """What is asked of a sentence encoder (`prm.retrieval.SentenceEncoder`)."""

    truncated: int

    def encode(self, texts: Sequence[str], *, label: str = ...) -> np.ndarray: ...

    def info(self) -> dict[str, Any]: ...


def build_pref_lamp(
    questions: str | Path,
    outputs: str | Path,
    out: str | Path,
    encoder: Encoder,
    options: PrefLampOptions | None = None,
    *,
    bad_rows: str = "error",
    licence: str = "as the source's",
    overwrite: bool = False,
) -> DatasetDir:
    """Build a Pref-LaMP dataset directory.

    Args:
        questions, outputs: LaMP-5 files as published (plain, .gz or .xz).
        out: directory to write.
        encoder: of the abstracts; an abstract it cuts is counted.
        options: sizes, shares and the seed.
        bad_rows: "error" stops at bad rows, "skip" sets them aside in `<out>.bad_rows.jsonl`.
        licence: terms of the source, for dataset.json.
        overwrite: replace an existing directory.

    Raises:
        UserError: a bad row under the policy "error", an option that does not fit, or nothing left.
    """
    options = options or PrefLampOptions()
    options.check()
    store.refuse_existing(out, overwrite=overwrite)
    bad = BadRows(bad_rows, out)
    counts: Counter[str] = Counter()
    rows, titles = _read(questions, outputs, bad, counts)
    bad.stop_on_error()
    if not rows:
        raise bad.empty(f"no user is left of {questions}")
    rows = _limit(rows, options, counts)
    authors, works = collect_authors(rows, titles, counts)
    users = split_authors(authors, works, options, counts)
    pairs = preference_pairs(users, works, _embed(users, works, encoder, counts), options, counts)
    users = _with_pairs(users, pairs, counts)
    kept = {user.user_id for user in users}
    dataset = write_dataset(
        out,
        name="pref-lamp",
        pairs=[pair for pair in pairs if pair.user_id in kept],
        completions=[completion for user in users for completion in _completions(user)],
        users=[User(user.user_id, user.role) for user in users],
        source=f"LaMP-5 layout files given by the user: {Path(questions).name}, {Path(outputs).name}",
        licence=licence,
        seed=options.seed,
        split_rule="prompt",
        counts={name: count for name, count in sorted(counts.items()) if count},
        arguments={**asdict(options), "encoder": encoder.info()},
        overwrite=overwrite,
    )
    bad.write_quarantine()
    return dataset


def _read(
    questions: str | Path, outputs: str | Path, bad: BadRows, counts: Counter[str]
) -> tuple[list[Question], dict[str, str]]:
    """Sound questions that have a sound gold title, and the titles by question id. One fault is one bad row."""
    asked: set[str] = set()
    answered: set[str] = set()
    rows = list(bad.sift(read_questions(questions, asked)))
    # A row that is no JSON hides its id: then a gold without a question is no fault of the outputs file.
    hidden_ids = any(problem.field == "row" for problem in bad.problems)
    before_golds = len(bad)
    titles: dict[str, str] = {}
    for gold in bad.sift(read_golds(outputs, answered)):
        titles[gold.question_id] = gold.title
        if gold.question_id in asked:
            continue
        if hidden_ids:
            counts["golds_without_question"] += 1
        else:
            reason = f"no question has the id {gold.question_id!r}"
            bad.add(RowProblem(str(outputs), gold.line, "id", reason, gold.title))
    hidden_golds = any(problem.field == "row" for problem in bad.problems[before_golds:])
    sound = []
    for question in rows:
        if question.question_id in titles:
            sound.append(question)
        elif hidden_golds or question.question_id in answered:
            counts["questions_with_a_bad_gold"] += 1
        else:
            reason = f"no gold title for the question {question.question_id!r} in {outputs}"
            bad.add(RowProblem(str(questions), question.line, "id", reason))
    counts["bad_rows"] = len(bad)
    counts["questions_read"] = len(sound)
    return sound, titles


def _limit(rows: list[Question], options: PrefLampOptions, counts: Counter[str]) -> list[Question]:
    """At most `max_users` of the questions, drawn by seed, in file order."""
    if options.max_users is None or len(rows) <= options.max_users:
        return rows
    drawn = sorted(rows, key=lambda q: (seeded_unit(options.seed, "user", q.user_id), q.user_id))
    kept = {q.user_id for q in drawn[: options.max_users]}
    counts["users_over_max"] = len(rows) - len(kept)
    return [q for q in rows if q.user_id in kept]


def _embed(users: Sequence[SplitUser], works: Sequence[Work], encoder: Encoder, counts: Counter[str]) -> np.ndarray:
    """Embeddings [W, d] of the works' abstracts; rows of works that no user keeps stay zero."""
    used = sorted({paper.work for user in users for paper, _ in user.papers})
    vectors = encoder.encode([works[index].abstract for index in used], label="embed abstracts")
    counts["works"] = len(used)
    counts["abstracts_cut_for_the_encoder"] = encoder.truncated
    embeddings = np.zeros((len(works), vectors.shape[1]), np.float32)
    embeddings[used] = vectors
    return embeddings


def _with_pairs(users: Sequence[SplitUser], pairs: Sequence[PreferencePair], counts: Counter[str]) -> list[SplitUser]:
    """Users that have the pairs their role needs: train, or support and test."""
    have = {(pair.user_id, pair.split) for pair in pairs}
    needed = {"train": ("train",), "adapt": ("support", "test")}
    kept = [user for user in users if all((user.user_id, split) in have for split in needed[user.role])]
    counts["users_without_pairs"] = len(users) - len(kept)
    for role, name in (("train", "training"), ("adapt", "adaptation")):
        if not any(user.role == role for user in kept):
            raise UserError(f"no {name} user has pairs: other {name} users with other papers are needed for negatives")
    return kept


def _completions(user: SplitUser) -> list[Completion]:
    """One completion a paper: the abstract's prompt and the user's own title."""
    return [
        Completion(
            f"{user.user_id}/{paper.paper.paper_id}",
            user.user_id,
            split,
            user_prompt(prompt_text(paper.paper.abstract)),
            paper.paper.title,
            {"date": paper.paper.date} if paper.paper.date else {},
        )
        for paper, split in user.papers
    ]
