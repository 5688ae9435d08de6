"""`prm data build` and `prm data check` as a user types them: exit status, one clear line, earlier outputs kept."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_modules.lamp5 import INSTRUCTION

_ROOT = Path(__file__).parents[2]


def prm(*arguments: object, cwd: Path = _ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dstub_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


SMALL = ["--train-users", "4", "--adapt-users", "2", "--pairs-per-user", "10", "--support", "3", "--test", "4"]


def build_small(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return prm("data", "build", "synthetic", "--out", out, *SMALL, *more)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("prm: error: "), done.stderr
    return done.stderr


def test_build_check_and_overwrite(tmp_path: Path) -> None:
    out = tmp_path / "data"
    done = build_small(out)
    assert done.returncode == 0, done.stderr
    assert "synthetic (synthetic)" in done.stdout and "train 4" in done.stdout
    assert prm("data", "check", out).returncode == 0
    before = contents(out)
    assert "pass --overwrite" in one_line(build_small(out, "--seed", "5"))
    assert contents(out) == before
    done = build_small(out, "--seed", "5", "--overwrite", "--json")
    info = json.loads(done.stdout)
    assert info["synthetic"] is True and info["seed"] == 5 and info["out"] == str(out)
    assert contents(out) != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_bad_option_is_one_line(tmp_path: Path) -> None:
    assert "--axes 9: use 1 to 4" in one_line(build_small(tmp_path / "data", "--axes", "9"))


def test_building_synthetic_needs_only_the_core(tmp_path: Path) -> None:
    code = (
        "import sys, prm.commands.data as command, argparse\n"
        "parser = argparse.ArgumentParser(); command.add_arguments(parser)\n"
        f"args = parser.parse_args(['build', 'synthetic', '--out', {str(tmp_path / 'data')!r}, *{SMALL!r}])\n"
        "assert command.run(args) == 0\n"
        "heavy = {'torch', 'transformers', 'peft', 'lightning', 'mlflow', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT, check=False)
    assert done.returncode == 0, done.stderr


def spoil(directory: Path, file: str, column: str, values: dict[int, object]) -> None:
    """Change single cells of a Parquet file."""
    table = pq.read_table(directory / file)
    rows = table.column(column).to_pylist()
    for row, value in values.items():
        rows[row] = value
    index = table.schema.get_field_index(column)
    changed = table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))
    pq.write_table(changed, directory / file)


def test_check_lists_every_bad_row(tmp_path: Path) -> None:
    out = tmp_path / "data"
    build_small(out)
    pairs = pq.read_table(out / "pairs.parquet").to_pylist()
    spoil(out, "pairs.parquet", "chosen", {2: " ", 4: pairs[4]["rejected"], 6: None})
    spoil(out, "pairs.parquet", "pair_id", {8: pairs[0]["pair_id"]})
    spoil(out, "pairs.parquet", "margin", {9: float("nan")})
    spoil(out, "pairs.parquet", "split", {10: "holdout", 11: "test"})
    spoil(out, "completions.parquet", "user_id", {1: "nobody"})
    done = prm("data", "check", out)
    assert done.returncode == 1
    for line in (
        "pairs.parquet:3: chosen: is empty",
        "pairs.parquet:5: rejected: equals chosen",
        "pairs.parquet:7: chosen: is missing",
        f"pairs.parquet:9: pair_id: {pairs[0]['pair_id']!r} stands in row 1 too",
        "pairs.parquet:10: margin: must be a finite number",
        "pairs.parquet:11: split: is 'holdout'",
        "pairs.parquet:12: split: 'test' is not for a user of role 'train'",
        "completions.parquet:2: user_id: 'nobody' is not in users.parquet",
        "its fingerprint is not the one in dataset.json",
    ):
        assert line in done.stdout
    found = json.loads(prm("data", "check", out, "--json").stdout)
    assert found["sound"] is False and len(found["problems"]) == len(done.stdout.splitlines()) - 1


def test_check_of_what_is_no_dataset(tmp_path: Path) -> None:
    assert "no dataset directory at" in one_line(prm("data", "check", tmp_path / "absent"))
    assert "holds no dataset.json" in one_line(prm("data", "check", tmp_path))
    build_small(tmp_path / "data")
    (tmp_path / "data/pairs.parquet").write_bytes(b"PAR1 no longer")
    assert "pairs.parquet cannot be read" in one_line(prm("data", "check", tmp_path / "data"))


def lamp5(directory: Path) -> tuple[Path, Path]:
    """Two LaMP-5 files of six authors."""
    papers = [
        [{"id": f"{u}.{k}", "title": f"Title {u} {k}", "abstract": f"About {u} {k}."} for k in range(4)]
        for u in range(6)
    ]
    questions = [{"id": str(u), "input": INSTRUCTION + f"New {u}.", "profile": papers[u]} for u in range(6)]
    golds = {"task": "LaMP_5", "golds": [{"id": str(u), "output": f"Newest {u}"} for u in range(6)]}
    (directory / "q.json").write_text(json.dumps(questions, indent=1))
    (directory / "o.json").write_text(json.dumps(golds))
    return directory / "q.json", directory / "o.json"


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def pack(path: Path, keep: int) -> None:
    path.write_bytes(gzip.compress(path.read_bytes())[:keep])


FILE_MISTAKES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing file": (lambda q, o: q.unlink(), "no file"),
    "a directory": (lambda q, o: (q.unlink(), q.mkdir()), "is a directory: give the file itself"),
    "empty file": (lambda q, o: o.write_bytes(b""), "o.json is empty"),
    "swapped files": (lambda q, o: q.write_bytes(o.read_bytes()), "the LaMP-5 questions file"),
    "not UTF-8": (
        lambda q, o: replace(q, b"Title 2 1", b"Titr\xe9"),
        "profile[1].title: holds bytes that are not UTF-8",
    ),
    "NaN": (lambda q, o: replace(q, b'"About 2 1."', b"NaN"), "profile[1].abstract: is NaN"),
    "truncated": (lambda q, o: q.write_bytes(q.read_bytes()[:-500]), "the file is truncated"),
    "truncated gzip": (lambda q, o: pack(q, 200), "the compressed file is truncated"),
    "no rows": (lambda q, o: (q.write_text("[]"), o.write_text('{"golds": []}')), "no user is left of"),
    "unknown gold": (lambda q, o: replace(o, b'"id": "3"', b'"id": "77"'), "no question has the id '77'"),
    "one example": (
        lambda q, o: q.write_text('[{"id": "0", "input": "' + INSTRUCTION + 'A.", "profile": []}]'),
        "one example",
    ),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_file_mistakes_are_one_line_with_exit_status_2(tmp_path: Path, name: str) -> None:
    questions, outputs = lamp5(tmp_path)
    mistake, message = FILE_MISTAKES[name]
    mistake(questions, outputs)
    out = tmp_path / "data"
    build_small(out)
    before = contents(out)
    options = ["--questions", questions, "--outputs", outputs, "--encoder", tmp_path / "never-opened"]
    done = prm("data", "build", "pref-lamp", *options, "--out", out, "--overwrite")
    assert message in one_line(done)
    assert contents(out) == before
    assert not list(tmp_path.glob("*.bad_rows.jsonl")) and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_real_authors(tmp_path: Path, minilm_path: Path, lamp5_small: tuple[Path, Path]) -> None:
    """The 40 authors of the small file; a second build takes its embeddings from the cache and writes the same."""
    options = ["--questions", lamp5_small[0], "--outputs", lamp5_small[1], "--encoder", minilm_path, "--max-users", 12]
    first = prm("data", "build", "pref-lamp", *options, "--out", tmp_path / "a", "--json")
    assert first.returncode == 0, first.stderr
    info = json.loads(first.stdout)
    assert info["counts"]["users"] == {"adapt": 2, "train": 10} and info["counts"]["users_over_max"] == 28
    assert prm("data", "check", tmp_path / "a").returncode == 0
    again = json.loads(prm("data", "build", "pref-lamp", *options, "--out", tmp_path / "b", "--json").stdout)
    assert again["fingerprint"] == info["fingerprint"]


@pytest.fixture
def lamp5_small() -> tuple[Path, Path]:
    import os

    folder = Path(os.environ.get("PRM_TEST_DATA", _ROOT.parent / "shared" / "data")) / "arxiv_titles"
    files = folder / "lamp5_small_questions.json", folder / "lamp5_small_outputs.json"
    if not all(file.is_file() for file in files):
        pytest.skip(f"no real data in {folder} (set PRM_TEST_DATA)")
    return files
