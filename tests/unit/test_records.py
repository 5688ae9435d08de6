"""The checks of single rows, one wrong thing at a time, and the way through Arrow and back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prm import records, store
from prm.errors import UserError
from prm.records import Completion, PreferencePair, RowProblem, User, user_prompt

CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue"},
    {"role": "user", "content": "Another. 色 🎨"},
]
PAIR = PreferencePair("p1", "ada", "train", CHAT, "Green", "Red", 0.5, {"source": "ü", "n": [1, None]})
COMPLETION = Completion("c1", "ada", "support", user_prompt("Title?"), "On Colours", {"line": 3})
USER = User("ada", "adapt", "likes green", [{"title": "é"}], {"age": 30})
LONE_SURROGATE = "\ud800"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "is missing"),
        (math.nan, "NaN or infinite"),
        (math.inf, "NaN or infinite"),
        (3, "has type int"),
        (["a"], "has type list"),
        (b"a", "has type bytes"),
        ("", "is empty"),
        (" \n\t", "is empty"),
        (LONE_SURROGATE, "not UTF-8"),
    ],
)
def test_what_is_no_text(value: object, words: str) -> None:
    assert words in str(records.text_problem(value))


@pytest.mark.parametrize("value", ["a", " a ", "0", "é 🎨"])
def test_what_is_a_text(value: str) -> None:
    assert records.text_problem(value) is None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "non-empty list"),
        ("Name a colour.", "non-empty list"),
        ([], "non-empty list"),
        (tuple(CHAT), "non-empty list"),
        (["Name a colour."], "message 0 must have exactly role and content"),
        ([{"role": "user"}], "message 0 must have exactly"),
        ([{"role": "user", "content": "a", "name": "b"}], "message 0 must have exactly"),
        ([CHAT[0], {"role": "tool", "content": "a"}], "message 1 has role 'tool'"),
        ([{"role": None, "content": "a"}], "message 0 has role None"),
        ([{"role": "user", "content": "  "}], "message 0: content is empty"),
        ([{"role": "user", "content": None}], "message 0: content is missing"),
        ([CHAT[1], CHAT[2]], "the last message must be the user's"),
    ],
)
def test_what_is_no_prompt(prompt: Any, words: str) -> None:
    assert words in str(records.prompt_problem(prompt))


def test_what_is_a_prompt() -> None:
    assert records.prompt_problem(CHAT) is None
    assert records.prompt_problem(user_prompt("Hi")) is None


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"pair_id": ""}, "pair_id", "is empty"),
        ({"user_id": None}, "user_id", "is missing"),
        ({"split": "dev"}, "split", "'dev'"),
        ({"split": None}, "split", "None"),
        ({"prompt": []}, "prompt", "non-empty list"),
        ({"chosen": ["Green"]}, "chosen", "has type list"),
        ({"rejected": " "}, "rejected", "is empty"),
        ({"rejected": "Green"}, "rejected", "equals chosen"),
        ({"margin": math.nan}, "margin", "finite"),
        ({"margin": math.inf}, "margin", "finite"),
        ({"margin": "0.5"}, "margin", "finite"),
        ({"meta": {"a": math.nan}}, "meta", "JSON"),
        ({"meta": {"a": {1, 2}}}, "meta", "JSON"),
        ({"meta": {"a": LONE_SURROGATE}}, "meta", "JSON"),
    ],
)
def test_each_mistake_of_a_pair_is_named(change: dict[str, Any], field: str, words: str) -> None:
    assert records.pair_problems(PAIR) == []
    ((found, reason),) = records.pair_problems(replace(PAIR, **change))
    assert found == field and words in reason


def test_all_mistakes_of_a_pair_are_listed() -> None:
    bad = PreferencePair("", "", "x", [], "", "", math.nan)
    names = [name for name, _ in records.pair_problems(bad)]
    assert names == ["pair_id", "user_id", "split", "prompt", "chosen", "rejected", "rejected", "margin"]


@pytest.mark.parametrize("margin", [None, 0, -2, 1.5])
def test_margins_that_are_fine(margin: float | None) -> None:
    assert records.pair_problems(replace(PAIR, margin=margin)) == []


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"example_id": None}, "example_id", "is missing"),
        ({"user_id": 7}, "user_id", "has type int"),
        ({"split": "dev"}, "split", "'dev'"),
        ({"prompt": "Title?"}, "prompt", "non-empty list"),
        ({"reference": ""}, "reference", "is empty"),
        ({"meta": {"a": object()}}, "meta", "JSON"),
    ],
)
def test_each_mistake_of_a_completion_is_named(change: dict[str, Any], field: str, words: str) -> None:
    assert records.completion_problems(COMPLETION) == []
    ((found, reason),) = records.completion_problems(replace(COMPLETION, **change))
    assert found == field and words in reason


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"user_id": "  "}, "user_id", "is empty"),
        ({"role": "new"}, "role", "'new'"),
        ({"profile": 3}, "profile", "has type int"),
        ({"history": [{"a": math.nan}]}, "history", "JSON"),
        ({"persona": {"a": math.inf}}, "persona", "JSON"),
    ],
)
def test_each_mistake_of_a_user_is_named(change: dict[str, Any], field: str, words: str) -> None:
    assert records.user_problems(USER) == []
    ((found, reason),) = records.user_problems(replace(USER, **change))
    assert found == field and words in reason


def test_a_problem_says_where_it_stands() -> None:
    assert str(RowProblem("d/pairs.parquet", 7, "chosen", "is empty", "row")) == "d/pairs.parquet:7: chosen: is empty"


def test_records_come_back_through_parquet_as_they_were(tmp_path: Path) -> None:
    pairs = [PAIR, replace(PAIR, pair_id="p2", margin=None, meta={}, prompt=user_prompt("Hi"))]
    completions = [COMPLETION, replace(COMPLETION, example_id="c2", meta={})]
    users = [USER, User("bob", "train")]
    for name, rows, to_table, from_table in (
        ("pairs", pairs, records.pairs_table, records.pairs_from_table),
        ("completions", completions, records.completions_table, records.completions_from_table),
        ("users", users, records.users_table, records.users_from_table),
    ):
        path = store.write_table(tmp_path / f"{name}.parquet", to_table(rows))
        assert from_table(pq.read_table(path)) == rows


@pytest.mark.parametrize(
    ("table", "schema", "back"),
    [
        (records.pairs_table, records.PAIR_SCHEMA, records.pairs_from_table),
        (records.completions_table, records.COMPLETION_SCHEMA, records.completions_from_table),
        (records.users_table, records.USER_SCHEMA, records.users_from_table),
    ],
)
def test_tables_without_rows_keep_their_schema(table: Any, schema: pa.Schema, back: Any) -> None:
    assert table([]).schema == schema
    assert back(table([])) == []


def test_a_json_column_that_is_not_json_names_its_row() -> None:
    table = records.pairs_table([PAIR])
    broken = table.set_column(table.schema.get_field_index("meta"), "meta", pa.array(["{half"]))
    with pytest.raises(UserError, match="row 'p1': meta is not JSON"):
        records.pairs_from_table(broken)
    table = records.users_table([USER])
    broken = table.set_column(table.schema.get_field_index("history"), "history", pa.array(["["]))
    with pytest.raises(UserError, match="row 'ada': history is not JSON"):
        records.users_from_table(broken)
