"""Rows of any table: a Parquet or JSON file, a directory of them, a saved or published Hugging Face dataset.

    file        Parquet, JSON lines (plain, .gz, .xz) or one JSON array, told apart by their first bytes
    directory   one that `save_to_disk` wrote, or else all Parquet and JSON-lines files below it, sorted by name
    hub id      OWNER/NAME, fetched by the datasets library, which runs no code of the dataset

What holds several splits needs the name of one, or "all": rows of a published test split never slip in unasked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data_modules.json_lines import json_lines
from data_modules.json_rows import ArrayRows, open_bytes
from prm import extras
from prm.errors import ExtraMissing, UserError
from prm.records import RowProblem

ALL_SPLITS = "all"
_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.xz", ".ndjson.xz")
_SAVED = ("dataset_dict.json", "state.json")
_SPLIT_WORD = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
_SHARD = re.compile(r"(.+?)-\d+-of-\d+(-\w+)?")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILE_SUFFIXES = (*_SUFFIXES, ".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".xz", ".zip")
# A column that stands in none of so many rows is missing; waiting for the end of a large file would help nobody.
_ROWS_TO_FIND_A_COLUMN = 10_000
_QUOTED_ROW = 2000


class Row(NamedTuple):
    """One row: the file or dataset it stands in, its line there (of JSON) or number (from 1), and its columns.

    `file` is a name without the folders of this machine, so that records made of it are the same everywhere.
    """

    file: str
    line: int
    value: dict[str, Any]

    def problem(self, field: str, reason: str) -> RowProblem:
        """What is wrong with a field of this row."""
        quoted = json.dumps(self.value, ensure_ascii=False, default=str)[:_QUOTED_ROW]
        return RowProblem(self.file, self.line, field, reason, quoted)


@dataclass(frozen=True)
class TableSource:
    """Where rows come from, and which columns are read.

    Attributes:
        path: file, directory or hub id.
        columns: those that must be there.
        optional: those that are read where they are.
        split: of a dataset with several; "all" reads every one.
        config, revision: of a dataset from the hub.
    """

    path: str
    columns: Sequence[str]
    optional: Sequence[str] = ()
    split: str | None = None
    config: str | None = None
    revision: str | None = None

    def rows(self) -> Iterator[Row | RowProblem]:
        """The rows in order, and a RowProblem in place of each that cannot be read.

        Raises:
            UserError: nothing there, another format, no such split or column.
        """
        path = Path(self.path)
        if path.is_dir():
            saved = any((path / name).is_file() for name in _SAVED)
            yield from self._library_rows(saved=True) if saved else self._directory_rows(path)
        elif path.exists() or not _HUB_ID.fullmatch(self.path) or self.path.endswith(_FILE_SUFFIXES):
            if self.split or self.config or self.revision:
                raise UserError(f"--hf-split, --hf-config and --hf-revision do not go with the one file {path}")
            yield from self._file_rows(path, path.name)
        else:
            yield from self._library_rows(saved=False)

    def require_columns(self, present: Sequence[str], place: str) -> None:
        """Raise UserError, naming the columns that are there, when one that must be there is not."""
        for name in self.columns:
            if name not in present:
                raise UserError(f"{place} has no column {name!r}: its columns are {', '.join(present) or 'none'}")

    def _wanted(self, present: Sequence[str]) -> list[str]:
        return [name for name in dict.fromkeys([*self.columns, *self.optional]) if name in present]

    def _directory_rows(self, directory: Path) -> Iterator[Row | RowProblem]:
        if self.config or self.revision:
            raise UserError(f"--hf-config and --hf-revision do not go with the directory {directory}")
        names = sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file())
        files = [p for p in names if p.name.endswith(_SUFFIXES) and not any(part.startswith(".") for part in p.parts)]
        if not files:
            kinds = ", ".join(sorted({p.suffix or "no suffix" for p in names})[:8]) or "no files"
            raise UserError(f"{directory} holds no Parquet or JSON-lines files ({kinds}): give the file itself")
        splits = {file: _split_of(file) for file in files}
        for file in _of_split(splits, self.split, str(directory)):
            yield from self._file_rows(directory / file, file.as_posix())

    def _file_rows(self, path: Path, name: str) -> Iterator[Row | RowProblem]:
        with open_bytes(path) as file:
            try:
                head = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
            except (OSError, EOFError):
                head = b"{"  # The reader of lines names the fault.
        if head.startswith(b"PAR1"):
            yield from self._parquet_rows(path, name)
        elif head[:1] in (b"{", b"["):
            rows = json_lines(path) if head.startswith(b"{") else ArrayRows(path, shape="an array of objects")
            yield from self._json_rows(rows, name)
        elif not head:
            raise UserError(f"{path} holds no rows")
        else:
            raise UserError(f"{path} is neither Parquet nor JSON lines: convert it to one of them")

    def _parquet_rows(self, path: Path, name: str) -> Iterator[Row | RowProblem]:
        try:
            with pq.ParquetFile(path) as file:
                present = file.schema_arrow.names
                self.require_columns(present, str(path))
                number = 0
                for batch in file.iter_batches(batch_size=1024, columns=self._wanted(present)):
                    yield from _batch_rows(batch, name, number)
                    number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error

    def _json_rows(self, rows: Any, name: str) -> Iterator[Row | RowProblem]:
        seen: dict[str, None] = {}
        sound = 0
        for item in rows:
            if isinstance(item, RowProblem):
                yield RowProblem(name, item.line, item.field, item.reason, item.row)
                continue
            if not isinstance(item.value, dict):
                reason = f"has type {type(item.value).__name__}, an object is needed"
                yield RowProblem(name, item.line, "row", reason, json.dumps(item.value)[:_QUOTED_ROW])
                continue
            seen |= dict.fromkeys(item.value)
            sound += 1
            if sound == _ROWS_TO_FIND_A_COLUMN:
                self.require_columns(list(seen), name)
            yield Row(name, item.line, {column: item.value[column] for column in self._wanted(list(item.value))})
        if sound:
            self.require_columns(list(seen), name)

    def _library_rows(self, *, saved: bool) -> Iterator[Row | RowProblem]:
        """Rows of a dataset that the datasets library opens: one that it saved, or one from the hub."""
        if extras.installed_version("datasets") is None:
            raise ExtraMissing(
                f"reading {self.path} needs the package datasets: pip install datasets, or give a Parquet or JSONL file"
            )
        import datasets

        if saved and (self.config or self.revision):
            raise UserError(f"--hf-config and --hf-revision do not go with the saved dataset {self.path}")
        try:
            opened: Any = (
                datasets.load_from_disk(self.path)
                if saved
                else datasets.load_dataset(self.path, self.config, revision=self.revision)
            )
        except Exception as error:  # the library raises classes of many kinds
            what = "the saved dataset" if saved else "no file or directory, and no dataset of the hub:"
            hint = " (choose one with --hf-config)" if "onfig name is missing" in str(error) else ""
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(f"{what} {self.path} cannot be opened: {reason}{hint}") from error
        parts = opened if isinstance(opened, dict) else {None: opened}
        for split in _of_split({name: name for name in parts}, self.split, self.path):
            table = parts[split]
            place = (Path(self.path).resolve().name if saved else self.path) + (f"[{split}]" if split else "")
            self.require_columns(table.column_names, place)
            for number, value in enumerate(table.select_columns(self._wanted(table.column_names)), 1):
                yield Row(place, number, value)


def _split_of(file: Path) -> str | None:
    """The split that a file's name, or the names of its folders, tell: NAME-00000-of-00002, or a common word."""
    stem = file.name.split(".")[0]
    if shard := _SHARD.fullmatch(stem):
        return shard[1]
    words = _SPLIT_WORD.findall("/".join([*file.parts[:-1], stem]).lower())
    return str(words[-1]) if words else None


def _of_split(splits: dict[Any, str | None], wanted: str | None, place: str) -> list[Any]:
    """The keys whose split is the wanted one.

    Raises:
        UserError: several splits and none is wanted, or the wanted one is not there.
    """
    names = sorted({name or "(unnamed)" for name in splits.values()})
    if wanted == ALL_SPLITS or (wanted is None and len(names) == 1):
        return list(splits)
    if wanted is None:
        raise UserError(f"{place} holds the splits {', '.join(names)}: choose one with --hf-split, or --hf-split all")
    if found := [key for key, name in splits.items() if name == wanted]:
        return found
    raise UserError(f"{place} has no split {wanted!r}: its splits are {', '.join(names)}")


def _batch_rows(batch: pa.RecordBatch, name: str, start: int) -> Iterator[Row | RowProblem]:
    """Rows of a batch; a text that is not UTF-8 costs its row only."""
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield Row(name, start + number + 1, batch.slice(number, 1).to_pylist()[0])
            except UnicodeDecodeError:
                yield RowProblem(name, start + number + 1, "row", "holds bytes that are not UTF-8")
        return
    for number, value in enumerate(values, start + 1):
        yield Row(name, number, value)
