"""Progress of long work on stderr: done, total, rate and the time that is left. Silent with PRM_PROGRESS=0."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")


def _clock(seconds: float) -> str:
    seconds = int(seconds)
    return (
        f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        if seconds >= 3600
        else (f"{seconds // 60}:{seconds % 60:02d}")
    )


class Progress:
    """A counter with a label. On a terminal one line is redrawn; elsewhere a line is printed every ten seconds."""

    def __init__(self, label: str, total: int | None = None, unit: str = "rows", stream: TextIO | None = None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.stream = stream or sys.stderr
        self.done = 0
        self._last = -1
        self._start = time.monotonic()
        self._shown = self._start
        self._terminal = self.stream.isatty()
        self._silent = os.environ.get("PRM_PROGRESS") == "0"

    def update(self, count: int = 1) -> None:
        """Count `count` more, and show it if it is time."""
        self.done += count
        now = time.monotonic()
        if not self._silent and now - self._shown >= (0.2 if self._terminal else 10.0):
            self._shown = now
            self._show(end="\r" if self._terminal else "\n")

    def _show(self, end: str) -> None:
        self._last = self.done
        passed = max(time.monotonic() - self._start, 1e-6)
        rate = self.done / passed
        text = f"{self.label}: {self.done}" + (f"/{self.total}" if self.total else "")
        text += f" {self.unit}, {rate:.1f}/s, {_clock(passed)}"
        if self.total and self.done and self.done < self.total:
            text += f", {_clock((self.total - self.done) / rate)} left"
        self.stream.write(text + ("\x1b[K" if self._terminal else "") + end)
        self.stream.flush()

    def close(self) -> None:
        """Show the last state, unless it was shown already."""
        if not self._silent and (self._terminal or self._last != self.done):
            self._show(end="\n")


def progress(items: Iterable[T], *, label: str, total: int | None = None, unit: str = "rows") -> Iterator[T]:
    """Yield `items`, showing progress."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    bar = Progress(label, total, unit)
    try:
        for item in items:
            yield item
            bar.update()
    finally:
        bar.close()
