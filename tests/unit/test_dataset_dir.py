"""The dataset directory: what it refuses to write, what it notices when it is opened, what the check lists."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prm import records, store
from prm.dataset_dir import SPLIT_RULES, DatasetDir, check_dataset, write_dataset
from prm.errors import UserError
from prm.records import Completion, PreferencePair, User, user_prompt

USERS = [User("ada", "train", history=[{"title": "On Colours"}]), User("new", "adapt", profile="likes green")]
PAIRS = [
    PreferencePair("1", "ada", "train", user_prompt("One?"), "a", "b", 0.5, {"k": [1]}),
    PreferencePair("2", "ada", "validation", user_prompt("Two?"), "a", "b"),
    PreferencePair("3", "ada", "test_seen", user_prompt("Three?"), "a", "b"),
    PreferencePair("4", "new", "support", user_prompt("One?"), "b", "a"),
    PreferencePair("5", "new", "test", user_prompt("Two?"), "b", "a"),
]
COMPLETIONS = [
    Completion("c1", "new", "support", user_prompt("Title?"), "Mine"),
    Completion("c2", "new", "test", user_prompt("Other?"), "Yours"),
]


def _write(out: Path, **changes: Any) -> DatasetDir:
    arguments: dict[str, Any] = {
        "name": "tiny",
        "pairs": PAIRS,
        "completions": COMPLETIONS,
        "users": USERS,
        "source": "made up",
        "licence": "CC0",
        "seed": 3,
    }
    return write_dataset(out, **{**arguments, **changes})


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return _write(tmp_path / "tiny").path


def _edit(path: Path, **changes: object) -> None:
    """Change dataset.json; the value ... removes a key."""
    info = {**json.loads((path / "dataset.json").read_text()), **changes}
    (path / "dataset.json").write_text(json.dumps({k: v for k, v in info.items() if v is not ...}))


def _rewrite(path: Path, name: str, table: pa.Table) -> None:
    """Replace a file and its fingerprint, as another program that writes this format would."""
    pq.write_table(table, path / name)
    prints = json.loads((path / "dataset.json").read_text())["fingerprints"]
    _edit(path, fingerprints={**prints, name: store.fingerprint_file(path / name)})


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    counts, options = {"rows_read": 9, "removed": {"empty": 2}}, {"top_k": 3}
    data = _write(tmp_path / "d", counts=counts, arguments=options, extra_files={"planted.json": b"{}"})
    assert data.all_records() == (PAIRS, COMPLETIONS, USERS)
    assert data.name == "tiny" and data.synthetic is False
    assert data.info["counts"] == {
        **counts,
        "pairs": {"support": 1, "test": 1, "test_seen": 1, "train": 1, "validation": 1},
        "completions": {"support": 1, "test": 1},
        "users": {"adapt": 1, "train": 1},
    }
    assert {k: data.info[k] for k in ("seed", "licence", "source", "split_rule", "arguments")} == {
        "seed": 3,
        "licence": "CC0",
        "source": "made up",
        "split_rule": "prompt",
        "arguments": options,
    }
    assert sorted(p.name for p in data.path.iterdir()) == [
        "completions.parquet",
        "dataset.json",
        "pairs.parquet",
        "planted.json",
        "users.parquet",
    ]
    assert check_dataset(data.path) == []


def test_rows_by_split_and_users_by_role(tiny: Path) -> None:
    data = DatasetDir.open(tiny)
    assert [p.pair_id for p in data.pairs(["train", "test"])] == ["1", "5"]
    assert [p.pair_id for p in data.pairs("support")] == ["4"], "one split may be named without a list"
    assert data.pairs([]) == []
    assert [c.example_id for c in data.completions(["test"])] == ["c2"]
    assert [u.user_id for u in data.users("adapt")] == ["new"]
    with pytest.raises(ValueError, match="unknown split"):
        data.pairs(["dev"])


def test_the_fingerprint_follows_the_rows_and_not_the_place(tmp_path: Path) -> None:
    one, same = _write(tmp_path / "one"), _write(tmp_path / "same", seed=9)
    other = _write(tmp_path / "other", pairs=[replace(PAIRS[0], chosen="c"), *PAIRS[1:]])
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_either_pairs_or_completions_are_enough(tmp_path: Path) -> None:
    assert _write(tmp_path / "a", pairs=[]).pairs() == []
    assert _write(tmp_path / "b", completions=[]).completions() == []


# What is refused before anything is written


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pairs": [], "completions": []}, "would be empty"),
        ({"pairs": [*PAIRS, replace(PAIRS[0], prompt=user_prompt("Six?"))]}, "pairs.parquet:6: pair_id: '1' stands in"),
        ({"completions": [*COMPLETIONS, COMPLETIONS[0]]}, "completions.parquet:3: example_id: 'c1' stands in row 1"),
        ({"users": [*USERS, User("ada", "train")]}, "users.parquet:3: user_id: 'ada' stands in row 1"),
        ({"users": USERS[:1]}, "'new' is not in users.parquet"),
        ({"pairs": [replace(PAIRS[0], split="support")]}, "split: 'support' is not for a user of role 'train'"),
        ({"pairs": [replace(PAIRS[3], split="train")]}, "split: 'train' is not for a user of role 'adapt'"),
        ({"completions": [replace(COMPLETIONS[0], split="test_seen")]}, "is not for a user of role 'adapt'"),
        ({"pairs": [replace(PAIRS[0], chosen="")]}, "pairs.parquet:1: chosen: is empty"),
        ({"pairs": [replace(PAIRS[0], rejected="a")]}, "equals chosen"),
        ({"users": [User("ada", "old"), USERS[1]]}, "role: is 'old'"),
    ],
)
def test_bad_records_are_refused_and_nothing_is_written(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        _write(tmp_path / "d", **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bad_records_are_counted(tmp_path: Path) -> None:
    bad = [replace(p, chosen="") for p in PAIRS]
    with pytest.raises(UserError, match=r"^5 bad records, the first: "):
        _write(tmp_path / "d", pairs=bad)


def test_an_unknown_split_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split_rule 'random'"):
        _write(tmp_path / "d", split_rule="random")


def test_an_existing_directory_is_replaced_only_on_demand(tiny: Path) -> None:
    before = DatasetDir.open(tiny).fingerprint
    with pytest.raises(UserError, match="--overwrite"):
        _write(tiny, pairs=PAIRS[:1])
    assert DatasetDir.open(tiny).fingerprint == before
    with pytest.raises(UserError, match="bad records"):
        _write(tiny, pairs=[PAIRS[0]] * 2, overwrite=True)
    assert DatasetDir.open(tiny).fingerprint == before
    assert _write(tiny, pairs=PAIRS[:1], overwrite=True).pairs() == PAIRS[:1]
    assert os.listdir(tiny.parent) == ["tiny"]


# What is noticed on opening


@pytest.mark.parametrize("name", ["pairs.parquet", "completions.parquet", "users.parquet"])
def test_a_file_that_changed_is_noticed_on_opening(tiny: Path, name: str) -> None:
    table = pq.read_table(tiny / name)
    pq.write_table(table.slice(1), tiny / name)
    with pytest.raises(UserError, match=rf"{name} changed since it was written"):
        DatasetDir.open(tiny)
    found = [p for p in check_dataset(tiny) if p.field == "file"]
    assert [p.file for p in found] == [str(tiny / name)]


def _truncate(path: Path) -> None:
    data = (path / "pairs.parquet").read_bytes()
    (path / "pairs.parquet").write_bytes(data[: len(data) // 2])


def _text(content: bytes) -> Callable[[Path], None]:
    return lambda path: (path / "dataset.json").write_bytes(content) and None


def _changes(**changes: object) -> Callable[[Path], None]:
    return lambda path: _edit(path, **changes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_text(b""), "dataset.json is damaged"),
        (_text(b'{"schema_version": 1'), "dataset.json is damaged"),
        (_text(b"[]"), "dataset.json is damaged"),
        (_text(b"null"), "dataset.json is damaged"),
        (_text(b"\xff\xfe{}"), "dataset.json is damaged"),
        (_changes(schema_version=...), "dataset.json is damaged"),
        (_changes(fingerprints=...), "dataset.json is damaged"),
        (_changes(fingerprints=7), "dataset.json is damaged"),
        (_changes(split_rule="random"), "dataset.json is damaged"),
        (_changes(split_rule=...), "dataset.json is damaged"),
        (_changes(name=...), "dataset.json is damaged"),
        (_changes(synthetic=...), "dataset.json is damaged"),
        (_changes(synthetic="no"), "dataset.json is damaged"),
        (_changes(schema_version=2), "schema version 2, this prm reads 1"),
        (_changes(fingerprints={}), "changed since it was written"),
        (lambda path: (path / "dataset.json").unlink(), "holds no dataset.json"),
        (lambda path: (path / "users.parquet").unlink(), "users.parquet is missing"),
        (_truncate, "pairs.parquet changed since it was written"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tiny: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(tiny)
    with pytest.raises(UserError) as caught:
        DatasetDir.open(tiny)
    assert words in str(caught.value) and str(tiny) in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_without_a_dataset_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prm data build"):
        DatasetDir.open(tmp_path / "nowhere")


def test_a_truncated_parquet_file_is_one_line_in_the_check_too(tiny: Path) -> None:
    _truncate(tiny)
    with pytest.raises(UserError, match=r"pairs.parquet cannot be read") as caught:
        check_dataset(tiny)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "values"),
    [("prompt", pa.array(["One?"])), ("margin", pa.array(["much"])), ("meta", pa.array([{"a": 1}]))],
)
def test_a_column_of_another_type_is_one_line(tiny: Path, column: str, values: pa.Array) -> None:
    table = records.pairs_table(PAIRS[:1])
    _rewrite(tiny, "pairs.parquet", table.set_column(table.schema.get_field_index(column), column, values))
    with pytest.raises(UserError, match=r"pairs.parquet cannot be read"):
        DatasetDir.open(tiny).pairs()


# What the check lists


def test_every_bad_row_is_listed_with_its_place(tiny: Path) -> None:
    bad = [
        replace(PAIRS[0], chosen=" "),
        PAIRS[1],
        replace(PAIRS[2], pair_id="2", split="dev"),
        replace(PAIRS[3], user_id="who"),
        replace(PAIRS[4], split="train"),
    ]
    _rewrite(tiny, "pairs.parquet", records.pairs_table(bad))
    found = check_dataset(tiny)
    assert [(p.line, p.field) for p in found] == [
        (1, "chosen"),
        (3, "split"),
        (3, "pair_id"),
        (4, "user_id"),
        (5, "split"),
    ]
    assert {p.file for p in found} == {str(tiny / "pairs.parquet")}
    assert all(p.row.startswith("PreferencePair(") and len(p.row) <= 200 for p in found)


def test_a_missing_column_is_listed_row_by_row(tiny: Path) -> None:
    _rewrite(tiny, "pairs.parquet", records.pairs_table(PAIRS).drop_columns(["chosen"]))
    assert [(p.line, p.field, p.reason) for p in check_dataset(tiny)] == [
        (line, "chosen", "is missing") for line in range(1, 6)
    ]


@pytest.mark.parametrize(("rule", "expected"), [("prompt", 1), ("dialog", 1), ("pair", 0)])
def test_a_prompt_in_two_splits_of_one_user_is_reported(tmp_path: Path, rule: str, expected: int) -> None:
    """Unless the dataset says that it splits by pair; another user's use of the prompt is no fault."""
    crossing = replace(PAIRS[4], pair_id="6", prompt=PAIRS[3].prompt, chosen="c")
    data = _write(tmp_path / "d", pairs=[*PAIRS, crossing], split_rule=rule)
    found = check_dataset(data.path)
    assert [(p.line, p.field) for p in found] == [(6, "split")] * expected
    assert all("stands in support too" in p.reason for p in found)


@pytest.mark.parametrize(("chosen", "rejected"), [("b", "a"), ("a", "b")])
def test_a_pair_in_two_splits_of_one_user_is_reported_whichever_was_chosen(
    tmp_path: Path, chosen: str, rejected: str
) -> None:
    crossing = replace(PAIRS[4], pair_id="6", prompt=PAIRS[3].prompt, chosen=chosen, rejected=rejected)
    found = check_dataset(_write(tmp_path / "d", pairs=[*PAIRS, crossing], split_rule="pair").path)
    assert [(p.line, p.reason) for p in found] == [(6, "this user's pair of responses stands in support too")]


def test_only_a_split_by_pair_warns(tmp_path: Path) -> None:
    warnings = {rule: _write(tmp_path / rule, split_rule=rule).split_warning for rule in SPLIT_RULES}
    assert warnings["prompt"] is None and warnings["dialog"] is None
    assert "nothing about new prompts" in (warnings["pair"] or "")


def test_an_emptied_dataset_is_reported(tiny: Path) -> None:
    _rewrite(tiny, "pairs.parquet", records.pairs_table([]))
    _rewrite(tiny, "completions.parquet", records.completions_table([]))
    assert [p.reason for p in check_dataset(tiny)] == ["the dataset is empty"]
