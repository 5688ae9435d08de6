"""The directory an evaluation writes: settings, shards of finished work, and at the end cases and summary.

settings.json        everything a result depends on; a rerun with the same settings continues, another is refused
shards/STAGE-N.parquet   one unit of work, whole or absent
cases.parquet        one row a case and method
summary.json         the figures; written last, so its presence says that the evaluation is complete
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from prm import store
from prm.errors import UserError
from prm.progress import Progress

log = logging.getLogger(__name__)
T = TypeVar("T")


class EvaluationDir:
    """An evaluation directory opened for writing by one process; a context manager.

    Args:
        path: the directory, new or of an earlier run with the same settings.
        settings: JSON of everything a result depends on.
        overwrite: start afresh where another evaluation stands.

    Raises:
        UserError: it holds another evaluation or something else, or another process writes to it.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.shards = store.Shards(self.path / "shards")
        file = self.path / "settings.json"
        if self.path.is_file():
            raise UserError(f"{path} is a file: choose a directory with --out")
        if overwrite and file.is_file():
            self._lock()
            for name in ("summary.json", "cases.parquet", "settings.json"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.shards.directory, ignore_errors=True)
        elif not file.is_file():
            if self.path.is_dir() and any(entry.name != ".lock" for entry in self.path.iterdir()):
                raise UserError(f"{path} is not empty and holds no evaluation: choose another --out")
            with store.writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
        else:
            self._lock()
        if file.is_file():
            _refuse_other(self.path, json.loads(file.read_text(encoding="utf-8")), settings)
        else:
            store.write_json(file, settings)

    def _lock(self) -> None:
        with store.writing(self.path / ".lock"):
            self._handle = (self.path / ".lock").open("a")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._handle.close()
            raise UserError(
                f"another evaluation is writing to {self.path}: wait for it, or choose another --out"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()

    def summary(self) -> dict[str, Any] | None:
        """The figures of a complete evaluation, or None."""
        return read_summary(self.path) if (self.path / "summary.json").is_file() else None

    def pending(self, stage: str, count: int) -> list[int]:
        """Units of a stage (of `count`) that are not done."""
        return [n for n in range(count) if _shard(stage, n) not in self.shards]

    def work(
        self,
        stage: str,
        units: Sequence[Sequence[T]],
        do: Callable[[Sequence[T]], list[dict[str, Any]]],
        schema: pa.Schema,
    ) -> None:
        """Do the units of a stage that are not done, each into a shard of its own."""
        todo = self.pending(stage, len(units))
        if len(todo) < len(units):
            log.info("%s: %d of %d units were done before", stage, len(units) - len(todo), len(units))
        if not todo:
            return
        bar = Progress(stage, sum(len(units[n]) for n in todo))
        for n in todo:
            self.shards.append(_shard(stage, n), pa.Table.from_pylist(do(units[n]), schema=schema))
            bar.update(len(units[n]))
        bar.close()

    def rows(self, stage: str, count: int) -> list[dict[str, Any]]:
        """Rows of all units of a stage, in order; every unit must be done."""
        return [row for n in range(count) for row in self.shards.read(_shard(stage, n)).to_pylist()]

    def finish(self, cases: pa.Table, summary: dict[str, Any]) -> None:
        """Write the cases, then the summary."""
        store.write_table(self.path / "cases.parquet", cases)
        store.write_json(self.path / "summary.json", summary)


def _shard(stage: str, unit: int) -> str:
    return f"{stage}-{unit:05d}"


def _refuse_other(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    new = json.loads(store.canonical_json(new))
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if changed:
        raise UserError(
            f"{path} holds an evaluation with other settings ({', '.join(changed)}): "
            "choose another --out, or pass --overwrite to start afresh"
        )


def read_summary(path: str | Path) -> dict[str, Any]:
    """summary.json of an evaluation directory.

    Raises:
        UserError: missing or damaged.
    """
    file = Path(path) / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} holds no summary.json: run `prm evaluate` to its end") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete it and run `prm evaluate` again") from error
    return summary
