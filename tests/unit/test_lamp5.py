"""The LaMP-5 readers: published layouts, compressed files, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from data_modules.lamp5 import INSTRUCTION, Gold, Question, read_golds, read_questions
from prm.errors import UserError
from prm.records import RowProblem


def paper(number: int, **changes: object) -> dict:
    return {"id": f"p{number}", "title": f"Title {number}", "abstract": f"Abstract number {number}."} | changes


def question(number: int, **changes: object) -> dict:
    profile = [paper(10 * number + k) for k in range(3)]
    return {"id": str(number), "input": INSTRUCTION + f"New abstract {number}.", "profile": profile} | changes


def write(path: Path, rows: object, indent: int | None = None) -> Path:
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    return path


def problems(items: object) -> list[RowProblem]:
    return [item for item in items if isinstance(item, RowProblem)]  # type: ignore[attr-defined]


def only_problem(items: object) -> RowProblem:
    found = problems(items)
    assert len(found) == 1, found
    assert "\n" not in str(found[0])
    return found[0]


def test_reads_a_published_question(tmp_path: Path) -> None:
    rows = [question(0), question(1, user_id="u1", profile=[paper(7, date="2012-03-23")])]
    first, second = read_questions(write(tmp_path / "q.json", rows))
    assert isinstance(first, Question) and isinstance(second, Question)
    assert (first.user_id, first.abstract, len(first.profile)) == ("0", "New abstract 0.", 3)
    assert (second.user_id, second.profile[0].paper_id, second.profile[0].date) == ("u1", "p7", "2012-03-23")
    golds = {"task": "LaMP_5", "golds": [{"id": "0", "output": "Zero"}]}
    assert list(read_golds(write(tmp_path / "o.json", golds))) == [Gold("0", "Zero", 1)]


@pytest.mark.parametrize(("suffix", "open_it"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files_read_as_plain_ones(tmp_path: Path, suffix: str, open_it: object) -> None:
    rows = [question(n) for n in range(30)]
    plain = write(tmp_path / "q.json", rows, indent=1)
    packed = tmp_path / f"q.json{suffix}"
    with open_it(packed, "wb") as file:  # type: ignore[operator]
        file.write(plain.read_bytes())
    assert list(read_questions(packed)) == list(read_questions(plain))


def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes, brackets in strings and letters of several bytes may lie across any chunk border."""
    texts = ['quote " backslash \\ brace } ] , {[', "\u00e9\u6f22\U0001f600" * 5, "\\" * 7, 'end\\"']
    rows = [question(n, profile=[paper(k, title=t, abstract=t) for k, t in enumerate(texts)]) for n in range(3)]
    path = tmp_path / "q.json"
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    whole = list(read_questions(path))
    assert [p.title for p in whole[0].profile] == texts  # type: ignore[union-attr]
    for size in (1, 2, 3, 7):
        monkeypatch.setattr("data_modules.json_rows._CHUNK", size)
        assert list(read_questions(path)) == whole


def test_line_is_where_the_row_starts(tmp_path: Path) -> None:
    rows = [question(0), question(1), question(2)]
    rows[1]["profile"][2]["abstract"] = " "
    text = json.dumps(rows, indent=2)
    path = tmp_path / "q.json"
    path.write_text(text)
    found = only_problem(read_questions(path))
    starts = [number for number, line in enumerate(text.splitlines(), 1) if line == "  {"]
    assert (found.line, found.field) == (starts[1], "profile[2].abstract")
    assert str(found) == f"{path}:{starts[1]}: profile[2].abstract: is empty (row 2)"


def test_a_bad_paper_costs_only_itself(tmp_path: Path) -> None:
    rows = [question(0)]
    del rows[0]["profile"][1]["title"]
    items = list(read_questions(write(tmp_path / "q.json", rows)))
    assert only_problem(items).reason == "is missing (row 1)"
    kept = [item for item in items if isinstance(item, Question)]
    assert [p.paper_id for p in kept[0].profile] == ["p0", "p2"]


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"id": None}, "id", "is missing"),
        ({"id": 7}, "id", "has type int"),
        ({"id": ""}, "id", "is empty"),
        ({"input": NAN}, "input", "is NaN"),
        ({"input": ["x"]}, "input", "has type list"),
        ({"input": "Write a title."}, "input", "does not start with"),
        ({"input": INSTRUCTION}, "input", "holds no abstract"),
        ({"profile": None}, "profile", "has type NoneType"),
        ({"profile": {}}, "profile", "has type dict"),
        ({"profile": []}, "profile", "a user with one example"),
        ({"profile": [paper(1), "x"]}, "profile[1]", "has type str"),
        ({"profile": [paper(1), paper(2, abstract=NAN)]}, "profile[1].abstract", "is NaN"),
        ({"profile": [paper(1), paper(2, title=3)]}, "profile[1].title", "has type int"),
        ({"profile": [paper(1), paper(2, title="\ud800")]}, "profile[1].title", "not UTF-8"),
        ({"profile": [paper(1), paper(1, title="Other")]}, "profile[1].id", "the id of another paper"),
        ({"profile": [paper(1), paper(2, date=2012)]}, "profile[1].date", "has type int"),
    ],
)
def test_one_fault_is_one_problem_with_its_field(tmp_path: Path, change: dict, field: str, reason: str) -> None:
    path = write(tmp_path / "q.json", [question(0), question(1, **change), question(2)])
    items = list(read_questions(path))
    found = only_problem(items)
    assert (found.file, found.field) == (str(path), field)
    assert reason in found.reason and "(row 2)" in found.reason
    assert {q.question_id for q in items if isinstance(q, Question)} >= {"0", "2"}


def test_missing_fields_and_rows_of_another_type(tmp_path: Path) -> None:
    rows: list = [question(n) for n in range(3)]
    for row, name in zip(rows, ("id", "input", "profile"), strict=True):
        del row[name]
    found = problems(read_questions(write(tmp_path / "q.json", [*rows, 5])))
    assert [(p.field, p.reason) for p in found[:3]] == [
        ("id", "is missing (row 1)"),
        ("input", "is missing (row 2)"),
        ("profile", "is missing (row 3)"),
    ]
    assert found[3].field == "row" and "has type int" in found[3].reason


def test_duplicate_ids_even_on_one_line(tmp_path: Path) -> None:
    found = only_problem(read_questions(write(tmp_path / "q.json", [question(0), question(1), question(0)])))
    assert (found.field, found.reason) == ("id", "'0' is the id of row 1 too (row 3)")
    rows = [question(0, user_id="u"), question(1, user_id="u")]
    assert only_problem(read_questions(write(tmp_path / "u.json", rows))).field == "user_id"
    golds = {"task": "LaMP_5", "golds": [{"id": "0", "output": "A"}, {"id": "0", "output": "B"}]}
    assert only_problem(read_golds(write(tmp_path / "o.json", golds))).reason == "'0' is the id of row 1 too (row 2)"


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    rows = [question(0, profile=[paper(1), paper(2, title="CAFE")]), question(1)]
    path = write(tmp_path / "q.json", rows)
    path.write_bytes(path.read_bytes().replace(b"CAFE", b"caf\xe9"))
    found = only_problem(read_questions(path))
    assert (found.field, found.reason) == ("profile[1].title", "holds bytes that are not UTF-8 (row 1)")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text(json.dumps([question(0)]), encoding="utf-8-sig")
    assert len(problems(read_questions(path))) == 0


def test_damaged_row_does_not_hide_the_next(tmp_path: Path) -> None:
    text = json.dumps([question(0), question(1), question(2)], indent=1).replace('"id": "1",', '"id": "1"')
    path = tmp_path / "q.json"
    path.write_text(text)
    items = list(read_questions(path))
    found = only_problem(items)
    fault = next(number for number, line in enumerate(text.splitlines(), 1) if line.strip() == '"id": "1"') + 1
    assert found.field == "row" and f"row 2 is not JSON: Expecting ',' delimiter (line {fault}," in found.reason
    assert [q.question_id for q in items if isinstance(q, Question)] == ["0", "2"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{},]", "a comma too many"),
        ('[{"id": "0"} {"id": "1"}]', "is not JSON: Extra data"),
        ("[1] x", "what follows the last row"),
        ("[" + "[" * 100_000 + "]" * 100_000 + "]", "nested too deep"),
    ],
)
def test_broken_arrays(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "q.json"
    path.write_text(text)
    assert any(reason in problem.reason for problem in problems(read_questions(path)))


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, keep: float) -> None:
    content = json.dumps([question(n) for n in range(200)], indent=1).encode()
    plain = tmp_path / "q.json"
    plain.write_bytes(content[: int(len(content) * keep)])
    items = list(read_questions(plain))
    found = only_problem(items)
    assert found.field == "row" and "truncated" in found.reason
    assert len(items) > 50
    lines = plain.read_bytes().splitlines()
    assert lines[found.line - 1] == b" {"


@pytest.mark.parametrize(("suffix", "packed"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("keep", [0.1, 0.7, 0.98])
def test_truncated_compressed_files(tmp_path: Path, suffix: str, packed: object, keep: float) -> None:
    noise = [question(n, profile=[paper(n, title=os.urandom(300).hex())]) for n in range(200)]
    data = packed(json.dumps(noise).encode())  # type: ignore[operator]
    path = tmp_path / f"q.json{suffix}"
    path.write_bytes(data[: int(len(data) * keep)])
    try:
        reason = only_problem(read_questions(path)).reason
    except UserError as error:
        reason = str(error)
    assert "the compressed file is truncated" in reason


def test_damaged_compressed_file(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(json.dumps([question(n) for n in range(50)]).encode()))
    data[len(data) // 2] ^= 255
    path = tmp_path / "q.json.gz"
    path.write_bytes(data)
    try:
        reason = problems(read_questions(path))[-1].reason
    except UserError as error:
        reason = str(error)
    assert "cannot be read on" in reason or "not JSON" in reason or "truncated" in reason


def test_files_that_cannot_be_read_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_bytes(b"")
    (tmp_path / "blank.json").write_text(" \n ")
    (tmp_path / "not.json.gz").write_text("[]")
    (tmp_path / "rows.jsonl").write_text(json.dumps(question(0)) + "\n" + json.dumps(question(1)))
    for name, reason in {
        "absent.json": "no file",
        ".": "is a directory",
        "empty.json": "is empty",
        "blank.json": "holds no rows",
        "not.json.gz": "is not gz data",
        "rows.jsonl": "starts with '{'",
    }.items():
        with pytest.raises(UserError, match=reason) as caught:
            list(read_questions(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_outputs_file_mistakes(tmp_path: Path) -> None:
    cases = {
        "[]": "starts with '\\['",
        '{"task": "LaMP_5"}': "holds no rows",
        '{"task": "LaMP_4", "golds": []}': "belongs to the task 'LaMP_4'",
    }
    for text, reason in cases.items():
        path = tmp_path / "o.json"
        path.write_text(text)
        with pytest.raises(UserError, match=reason):
            list(read_golds(path))
    golds = {"golds": [{"id": "0"}, {"id": "1", "output": " "}, {"output": "A"}, 3], "task": "LaMP_5"}
    found = problems(read_golds(write(tmp_path / "o.json", golds)))
    assert [p.field for p in found] == ["output", "output", "id", "row"]


def test_memory_holds_one_row_at_a_time(tmp_path: Path) -> None:
    """The reader stops asking for chunks once it has a row to give."""
    import data_modules.json_rows as json_rows

    path = write(tmp_path / "q.json", [question(n, input=INSTRUCTION + "x" * 50_000) for n in range(100)])
    rows = json_rows.ArrayRows(path, shape="an array")
    longest = 0
    for _ in rows:
        longest = max(longest, len(rows._buffer))
    assert longest < 4 * json_rows._CHUNK < path.stat().st_size / 10
