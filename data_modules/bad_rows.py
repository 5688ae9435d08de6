"""What to do with the bad rows of a source: stop, or set them aside in a file and say how many."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from prm import store
from prm.errors import UserError
from prm.records import RowProblem

POLICIES = ("error", "skip")

T = TypeVar("T")


def quarantine_file(out: str | Path) -> Path:
    """Where the bad rows of the dataset `out` are kept: beside it."""
    out = Path(out).absolute()
    return out.with_name(out.name + ".bad_rows.jsonl")


class BadRows:
    """Collects the problems that readers find.

    With the policy `error` the build stops once the sources are read: one line with the first problem and how many
    there are. With `skip` the build goes on without the bad rows, and they are written to a quarantine file,
    `<out>.bad_rows.jsonl`: file, line, field, reason and the row itself.

    Args:
        policy: one of POLICIES.
        out: the directory that is being built; the quarantine file stands beside it.
    """

    def __init__(self, policy: str, out: str | Path) -> None:
        if policy not in POLICIES:
            raise UserError(f"--bad-rows {policy!r}: use one of {', '.join(POLICIES)}")
        self.policy = policy
        self.quarantine = quarantine_file(out)
        self.problems: list[RowProblem] = []

    def __len__(self) -> int:
        return len(self.problems)

    def add(self, problem: RowProblem) -> None:
        """Note one problem."""
        self.problems.append(problem)

    def sift(self, rows: Iterable[T | RowProblem]) -> Iterator[T]:
        """The good rows of a reader; its problems are noted."""
        for row in rows:
            if isinstance(row, RowProblem):
                self.add(row)
            else:
                yield row

    def stop_on_error(self) -> None:
        """Raise when there are problems and the policy is `error`.

        Raises:
            UserError: the first problem, the number of all, and what to do.
        """
        if self.problems and self.policy == "error":
            more = len(self.problems) - 1
            others = f" (and {more} more bad row{'s' if more > 1 else ''})" if more else ""
            raise UserError(f"{self.problems[0]}{others}; mend the source, or pass --bad-rows skip")

    def empty(self, what: str) -> UserError:
        """The error for a source that has nothing left, naming the first bad row where there is one."""
        if not self.problems:
            return UserError(what)
        return UserError(f"{what}: all rows are bad ({len(self)} problems), the first: {self.problems[0]}")

    def write_quarantine(self) -> Path | None:
        """Write the bad rows beside the finished dataset; the file of an earlier build goes when there are none."""
        if not self.problems:
            self.quarantine.unlink(missing_ok=True)
            return None
        # ASCII escapes keep bytes that are not UTF-8 readable in a file that is.
        lines = [json.dumps(asdict(problem)) for problem in self.problems]
        return store.write_text(self.quarantine, "\n".join(lines) + "\n")
