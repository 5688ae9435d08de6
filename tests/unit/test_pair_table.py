"""`prm data build pairs`: every kind of file and prompt gives the same pairs; what is wrong is named and counted."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_modules.bad_rows import quarantine_file
from data_modules.pair_table import PairColumns, build_pairs
from data_modules.user_splits import SplitOptions
from prm.dataset_dir import DatasetDir, check_dataset
from prm.errors import ExtraMissing, UserError

Rows = list[dict[str, Any]]
COLUMNS = PairColumns(user="who")


def table(users: int = 6, each: int = 8) -> Rows:
    return [
        {
            "who": f"u{u}",
            "prompt": f"Question {u} {n}?",
            "chosen": f"good {u} {n}",
            "rejected": f"bad {u} {n}",
            "gap": n / 2,
            "talk": n // 2,
        }
        for u in range(users)
        for n in range(each)
    ]


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversations(rows: Rows, before: Callable[[str], list[dict[str, Any]]] | None = None) -> Rows:
    """The rows with chosen and rejected as conversations and no column `prompt`."""
    found = []
    for row in rows:
        start = before(row["prompt"]) if before else [say("user", row["prompt"])]
        talks = {name: [*start, say("assistant", row[name])] for name in ("chosen", "rejected")}
        found.append({**{k: v for k, v in row.items() if k != "prompt"}, **talks})
    return found


def jsonl(rows: Rows) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def write(path: Path, rows: Rows) -> Path:
    """A file of the kind that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(jsonl(rows)))
    return path


def build(path: Path | str, out: Path, columns: PairColumns = COLUMNS, **more: Any) -> DatasetDir:
    return build_pairs(path, columns, out, more.pop("options", None), overwrite=True, **more)


def essence(data: DatasetDir) -> list[tuple[Any, ...]]:
    """Everything of the pairs but where they were read."""
    assert check_dataset(data.path) == []
    return [(p.pair_id, p.split, p.prompt, p.chosen, p.rejected, p.margin) for p in data.pairs()]


# Kinds of files


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.json", "dir/sub/b.ndjson"])
@pytest.mark.parametrize("talk", [False, True])
def test_every_kind_of_file_gives_the_same_pairs(tmp_path: Path, name: str, talk: bool) -> None:
    rows = table()
    expected = essence(build(write(tmp_path / "reference.jsonl", rows), tmp_path / "x"))
    assert len(expected) == 48
    path = write(tmp_path / name, conversations(rows) if talk else rows)
    data = build(tmp_path / "dir" if name.startswith("dir") else path, tmp_path / "out")
    assert essence(data) == expected
    assert data.name == ("dir" if name.startswith("dir") else "a") and str(tmp_path) not in json.dumps(data.info)


def test_the_fingerprint_does_not_depend_on_the_folder_or_the_time(tmp_path: Path) -> None:
    prints = [build(write(tmp_path / f / "a.parquet", table()), tmp_path / "out").fingerprint for f in "xy"]
    assert prints[0] == prints[1]


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    rows = table()
    write(tmp_path / "d/2.jsonl", rows[20:])
    write(tmp_path / "d/1.parquet", rows[:20])
    write(tmp_path / "d/.hidden.jsonl", rows)
    (tmp_path / "d/README.md").write_text("about")
    data = build(tmp_path / "d", tmp_path / "out")
    assert essence(data) == essence(build(write(tmp_path / "a.jsonl", rows), tmp_path / "x"))
    assert {p.meta["source"].split(":")[0] for p in data.pairs()} == {"1.parquet", "2.jsonl"}


@pytest.mark.parametrize("names", [("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"), ("train", "test")])
def test_a_test_split_is_not_read_unasked(tmp_path: Path, names: tuple[str, str]) -> None:
    rows = table()
    for name, part in zip(names, (rows[:40], rows[40:]), strict=True):
        write(tmp_path / "d" / (name if name.endswith("parquet") else f"{name}/rows.jsonl"), part)
    with pytest.raises(UserError, match="holds the splits test, train: choose one with --hf-split"):
        build(tmp_path / "d", tmp_path / "out")
    with pytest.raises(UserError, match="has no split 'dev': its splits are test, train"):
        build(tmp_path / "d", tmp_path / "out", split="dev")
    assert len(build(tmp_path / "d", tmp_path / "out", split="train").pairs()) == 40
    assert len(build(tmp_path / "d", tmp_path / "out", split="all").pairs()) == 48


def test_a_saved_dataset_of_the_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = table()
    expected = essence(build(write(tmp_path / "a.jsonl", rows), tmp_path / "x"))
    datasets.Dataset.from_list(conversations(rows)).save_to_disk(tmp_path / "one")
    assert essence(build(tmp_path / "one", tmp_path / "out")) == expected
    parts = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:3])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match="holds the splits test, train"):
        build(tmp_path / "two", tmp_path / "out")
    assert essence(build(tmp_path / "two", tmp_path / "out", split="train")) == expected
    with pytest.raises(UserError, match="has no column 'user': its columns are who, prompt"):
        build(tmp_path / "two", tmp_path / "out", PairColumns(user="user"), split="train")


def test_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = table()
    asked: list[Any] = []

    def load_dataset(path: str, config: str | None, *, revision: str | None) -> Any:
        asked.append((path, config, revision))
        if config is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['a']")
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = build("owner/prefs", tmp_path / "out", config="a", revision="v1")
    assert asked == [("owner/prefs", "a", "v1")] and data.name == "prefs"
    assert data.info["source"] == "Hugging Face dataset owner/prefs, config a, revision v1"
    assert essence(data) == essence(build(write(tmp_path / "a.jsonl", rows), tmp_path / "x"))
    with pytest.raises(UserError, match=r"owner/prefs cannot be opened: Config name .*--hf-config") as caught:
        build("owner/prefs", tmp_path / "out")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("prm.extras.installed_version", lambda *names: None)
    with pytest.raises(ExtraMissing, match="pip install datasets"):
        build("owner/prefs", tmp_path / "out")


# Kinds of prompts


def test_prompts_as_text_as_messages_and_inside_conversations_are_one(tmp_path: Path) -> None:
    rows = table()
    start = {r["prompt"]: [say("system", "Be brief."), say("user", r["prompt"])] for r in rows}
    explicit = [{**row, "prompt": start[row["prompt"]]} for row in rows]
    bare = [{**row, **{n: [say("assistant", row[n])] for n in ("chosen", "rejected")}} for row in explicit]
    whole = [
        {**row, **{n: [*row["prompt"], say("assistant", row[n])] for n in ("chosen", "rejected")}} for row in explicit
    ]
    implicit = conversations(rows, start.__getitem__)
    found = [
        essence(build(write(tmp_path / f"{n}.jsonl", kind), tmp_path / "out"))
        for n, kind in enumerate((explicit, bare, whole, implicit))
    ]
    assert {pair[0]: pair[2] for pair in found[0]}["u0/1"] == start["Question 0 0?"]
    assert found[1:] == [found[0]] * 3


def test_implicit_prompt_passes_over_the_column(tmp_path: Path) -> None:
    rows = [{**row, "prompt": "an id"} for row in conversations(table())]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"a.jsonl:1: chosen: begins with other messages than the prompt"):
        build(path, tmp_path / "out")
    data = build(path, tmp_path / "out", PairColumns(user="who", implicit_prompt=True))
    assert essence(data) == essence(build(write(tmp_path / "b.jsonl", table()), tmp_path / "x"))


def test_chosen_and_rejected_may_differ_in_kind_and_come_out_as_texts(tmp_path: Path) -> None:
    rows = [{**row, "chosen": [say("assistant", row["chosen"])]} for row in table()]
    data = build(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert essence(data) == essence(build(write(tmp_path / "b.jsonl", table()), tmp_path / "x"))


def test_whole_numbers_name_users_and_further_fields_of_messages_are_counted(tmp_path: Path) -> None:
    rows = [{**row, "who": float(int(row["who"][1:]))} for row in conversations(table())]
    rows[0]["chosen"][0] = {**rows[0]["chosen"][0], "name": "Ada", "tool_calls": None}
    data = build(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert {u.user_id for u in data.users()} == set("012345")
    assert data.info["counts"]["message_lists_with_further_fields"] == 1


def test_margin_and_dialog(tmp_path: Path) -> None:
    rows = table(12)
    rows[3]["gap"] = None
    columns = PairColumns(user="who", dialog="talk", margin="gap")
    options = SplitOptions(split_rule="dialog")
    data = build(write(tmp_path / "a.jsonl", rows), tmp_path / "out", columns, options=options)
    assert data.split_rule == "dialog" and data.split_warning is None
    by_id = {p.pair_id: p for p in data.pairs()}
    assert by_id["u0/3"].margin == 1.0 and by_id["u0/4"].margin is None
    sides: dict[tuple[str, str], set[str]] = {}
    for pair in by_id.values():
        sides.setdefault((pair.user_id, pair.meta["dialog"]), set()).add(pair.split)
    assert len(sides) == 48 and all(len(found) == 1 for found in sides.values())
    with pytest.raises(UserError, match="--split-rule dialog needs --dialog-column"):
        build(tmp_path / "a.jsonl", tmp_path / "out", options=options)


def test_split_by_pair_warns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", table())
    assert build(path, tmp_path / "out", options=SplitOptions(split_rule="pair")).split_warning
    assert build(path, tmp_path / "out").split_warning is None


# What is counted, what is bad


def test_identical_repeated_and_contradicting_pairs_are_counted(tmp_path: Path) -> None:
    rows = table()
    same, swapped = dict(rows[0]), {**rows[9], "chosen": rows[9]["rejected"], "rejected": rows[9]["chosen"]}
    rows += [same, swapped, {**rows[20], "chosen": "x", "rejected": "x"}]
    counts = build(write(tmp_path / "a.jsonl", rows), tmp_path / "out").info["counts"]
    names = ("rows_read", "repeated_pairs", "contradicting_pairs", "identical_responses")
    assert [counts[name] for name in names] == [51, 1, 2, 1] and sum(counts["pairs"].values()) == 47


ASKED, ANSWERED = [say("user", "Q?")], say("assistant", "a")
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no user": ({"who": None}, "who: is missing"),
    "a list for a user": ({"who": ["a"]}, "who: must be a text or a whole number"),
    "NaN for a user": ({"who": float("nan")}, "who: must be a text or a whole number"),
    "true for a user": ({"who": True}, "who: must be a text or a whole number"),
    "no prompt": ({"prompt": None}, "chosen: is a text, and there is no prompt: name the prompt's column"),
    "an empty prompt": ({"prompt": " "}, "prompt: is empty"),
    "a number for a prompt": ({"prompt": 3}, "prompt: has type int"),
    "a prompt of the assistant": ({"prompt": [say("assistant", "Hi")]}, "prompt: the last message must be the user's"),
    "an unknown role": ({"prompt": [say("human", "Hi")]}, "prompt: message 0 has role 'human'"),
    "other keys": ({"prompt": [{"from": "human", "value": "Hi"}]}, "prompt: message 0 must have role and content"),
    "no messages": ({"prompt": []}, "prompt: must be a non-empty list"),
    "no chosen": ({"chosen": None}, "chosen: is missing"),
    "a number for rejected": ({"rejected": 1.5}, "rejected: has type float, a text is needed"),
    "an empty response": ({"rejected": "\n"}, "rejected: is empty"),
    "an empty message": ({"chosen": [say("assistant", "")]}, "chosen: is empty"),
    "parts of content": ({"chosen": [say("assistant", [{"type": "text", "text": "a"}])]}, "chosen: has type list"),
    "an empty conversation": ({"chosen": []}, "chosen: must end with a message of the assistant"),
    "ends with the user": ({"chosen": [*ASKED]}, "chosen: must end with a message of the assistant"),
    "different beginnings": (
        {"prompt": None, "chosen": [*ASKED, ANSWERED], "rejected": [*ASKED, *ASKED, ANSWERED]},
        "rejected: begins with other messages than chosen: one prompt is needed",
    ),
    "responses alone": (
        {"prompt": None, "chosen": [ANSWERED], "rejected": [ANSWERED]},
        "chosen: holds the response alone: name the prompt's column",
    ),
    "two answers at the end": (
        {"prompt": None, **{n: [*ASKED, ANSWERED, say("assistant", n)] for n in ("chosen", "rejected")}},
        "chosen: before the response: the last message must be the user's",
    ),
    "a text for a margin": ({"gap": "much"}, "gap: is 'much', a finite number or nothing is needed"),
    "NaN for a margin": ({"gap": float("nan")}, "gap: is nan, a finite number or nothing is needed"),
    "no JSON": (b'{"who": "u0", ', "row: is not JSON"),
    "no object": (b"[1]", "row: has type list, an object is needed"),
    "not UTF-8": (jsonl(table()[:1]).replace(b"good", b"g\xff"), "chosen: holds bytes that are not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_stops_or_is_set_aside(tmp_path: Path, name: str) -> None:
    change, message = BAD_ROWS[name]
    rows = table()
    line = change if isinstance(change, bytes) else jsonl([{**rows[0], **change}])
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(rows) + b"\n\n" + line + b"\n")
    columns = PairColumns(user="who", margin="gap")
    out = tmp_path / "out"
    with pytest.raises(UserError) as caught:
        build(path, out, columns)
    assert f"a.jsonl:50: {message}" in str(caught.value) and "--bad-rows skip" in str(caught.value)
    assert not out.exists()
    data = build(path, out, columns, bad_rows="skip")
    assert data.info["counts"]["bad_rows"] == 1 and data.info["counts"]["rows_read"] == 48
    set_aside = [json.loads(text) for text in quarantine_file(out).read_text().splitlines()]
    assert [(problem["line"], problem["file"]) for problem in set_aside] == [(50, "a.jsonl")]


def test_a_truncated_file_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(table(100)), mtime=0)[:-200])
    with pytest.raises(UserError, match="the compressed file is truncated"):
        build(path, tmp_path / "out")
    counts = build(path, tmp_path / "out", bad_rows="skip").info["counts"]
    assert counts["bad_rows"] >= 1 and 100 < counts["rows_read"] < 800


def test_a_parquet_row_that_is_not_utf8_costs_that_row(tmp_path: Path) -> None:
    rows = table()
    columns = {name: [row[name] for row in rows] for name in ("who", "prompt", "rejected")}
    chosen = pa.array([b"g\xff" if n == 5 else row["chosen"].encode() for n, row in enumerate(rows)])
    pq.write_table(pa.table({**columns, "chosen": chosen.view(pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet:6: row: holds bytes that are not UTF-8"):
        build(tmp_path / "a.parquet", tmp_path / "out")
    assert build(tmp_path / "a.parquet", tmp_path / "out", bad_rows="skip").info["counts"]["rows_read"] == 47


MISTAKES: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "missing": (lambda p: p.unlink(), {}, "no file"),
    "empty": (lambda p: p.write_bytes(b""), {}, "a.jsonl is empty"),
    "blank": (lambda p: p.write_bytes(b" \n"), {}, "a.jsonl holds no rows"),
    "an empty array": (lambda p: p.write_bytes(b"[]"), {}, "a.jsonl holds no rows"),
    "CSV": (lambda p: p.write_bytes(b"who,prompt\na,b\n"), {}, "is neither Parquet nor JSON lines"),
    "damaged Parquet": (lambda p: p.write_bytes(b"PAR1" + b"x" * 99), {}, "a.jsonl cannot be read"),
    "all bad": (lambda p: p.write_bytes(b"{\n{\n"), {"bad_rows": "skip"}, "all rows are bad"),
    "no user column": (
        lambda p: None,
        {"columns": PairColumns(user="user")},
        "has no column 'user': its columns are who, prompt, chosen, rejected, gap, talk",
    ),
    "no chosen column": (lambda p: None, {"columns": PairColumns(user="who", chosen="better")}, "no column 'better'"),
    "no prompt column": (lambda p: None, {"columns": PairColumns(user="who", prompt="text")}, "no column 'text'"),
    "no margin column": (lambda p: None, {"columns": PairColumns(user="who", margin="m")}, "no column 'm'"),
    "a column twice": (lambda p: None, {"columns": PairColumns(user="chosen")}, "'chosen' is given for two things"),
    "both prompts": (
        lambda p: None,
        {"columns": PairColumns(user="who", prompt="prompt", implicit_prompt=True)},
        "leave --prompt-column out",
    ),
    "a split of a file": (lambda p: None, {"split": "train"}, "do not go with the one file"),
    "an unknown policy": (lambda p: None, {"bad_rows": "drop"}, "--bad-rows 'drop': use one of"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.jsonl", table())
    mistake, options, message = MISTAKES[name]
    mistake(path)
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(UserError) as caught:
        build(path, tmp_path / "out", **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} == before


def test_a_directory_without_tables_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.csv").write_text("who")
    with pytest.raises(UserError, match=r"d holds no Parquet or JSON-lines files \(.csv\): give the file itself"):
        build(tmp_path / "d", tmp_path / "out")


# The command line


def test_the_command_line(tmp_path: Path, run_prm: Callable[..., Any]) -> None:
    path = write(tmp_path / "a.parquet", table())
    options = ["--path", path, "--user-column", "who", "--margin-column", "gap", "--out", tmp_path / "out"]
    done = run_prm("data", "build", "pairs", *options, "--support", 3, "--adapt-users", 2, "--dialog-column", "talk")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert all(part in done.stdout for part in ("users: adapt 2, train 4", "support 6", "completions: none"))
    info = DatasetDir.open(tmp_path / "out").info
    assert info["split_rule"] == "dialog" and info["arguments"]["columns"]["margin"] == "gap"
    refused = run_prm("data", "build", "pairs", *options)
    assert refused.returncode == 2 and "pass --overwrite" in refused.stderr
    again = run_prm("data", "build", "pairs", *options, "--overwrite", "--split-rule", "pair", "--json")
    assert json.loads(again.stdout)["split_warning"] and again.stderr.startswith("warning: split by pair")
    wrong = run_prm("data", "build", "pairs", *options, "--overwrite", "--prompt-column", "question")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
    assert "has no column 'question': its columns are who, prompt" in wrong.stderr
    assert DatasetDir.open(tmp_path / "out").split_rule == "pair"
