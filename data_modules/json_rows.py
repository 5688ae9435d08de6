"""The elements of a JSON array in a large file, one at a time, each with the line on which it starts.

The text is read in chunks and cut at the commas between elements, so memory holds one element, a damaged element does
not hide the ones after it, and every fault has a line number. Plain, gzip and xz files are told apart by their first
bytes. Bytes that are not UTF-8 come through as lone surrogates, which `records.text_problem` refuses by name.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prm.errors import UserError
from prm.records import RowProblem

_CHUNK = 1 << 16
_QUOTED_ROW = 2000
_LONGEST_HEAD = 1 << 20
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_OUTSIDE_STRING = re.compile(r'["{}\[\],]')
_INSIDE_STRING = re.compile(r'["\\]')


def open_bytes(path: str | Path) -> io.BufferedIOBase:
    """Open a plain, gzip or xz file for reading its content.

    Raises:
        UserError: no such file, a directory, no permission, an empty file, or a name that promises another format.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory: give the file itself")
    try:
        with path.open("rb") as file:
            head = file.read(len(_XZ))
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not head:
        raise UserError(f"{path} is empty")
    if head.startswith(_GZIP):
        return gzip.open(path, "rb")
    if head == _XZ:
        return lzma.open(path, "rb")
    if path.suffix in (".gz", ".xz"):
        raise UserError(f"{path} is not {path.suffix[1:]} data: name it .json if it is plain, or fetch it again")
    return path.open("rb")


class Element(NamedTuple):
    """One element of the array: where it starts, its number counted from 1, and its value."""

    line: int
    number: int
    value: Any


class ArrayRows:
    """Iterate over the elements of a JSON array: an `Element` for each sound one, a RowProblem for each other.

    Args:
        path: the file.
        key: None when the file is the array itself; else the file is an object and the array stands under this key.
        shape: what the file should hold, for error messages.

    After the iteration `envelope` is the file's object without its rows (an empty list when `key` is None).
    """

    def __init__(self, path: str | Path, *, key: str | None = None, shape: str) -> None:
        self.path = Path(path)
        self.key = key
        self.shape = shape
        self.envelope: Any = None
        self._line = 1
        self._buffer = ""
        self._fault: str | None = None

    def _problem(self, line: int, reason: str, row: str = "") -> RowProblem:
        return RowProblem(str(self.path), line, "row", reason, row[:_QUOTED_ROW])

    def _chunks(self) -> Iterator[str]:
        """Decoded text; a damaged or truncated compressed stream ends it and sets `_fault`."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        with open_bytes(self.path) as file:
            while True:
                try:
                    data = file.read(_CHUNK)
                except EOFError:
                    self._fault = "the compressed file is truncated"
                except (OSError, lzma.LZMAError, zlib.error) as error:
                    self._fault = f"the file cannot be read on ({error})"
                if self._fault or not data:
                    break
                yield decoder.decode(data)
        yield decoder.decode(b"", final=True)

    def _take(self, end: int) -> str:
        """Cut the buffer at `end`, counting the lines that leave it."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._line += text.count("\n")
        return text

    def _open_array(self, chunks: Iterator[str]) -> str:
        """Read up to the array's bracket and return the text before it."""
        opening = re.compile(r"\s*\[" if self.key is None else rf'\s*\{{.*?"{re.escape(self.key)}"\s*:\s*\[', re.DOTALL)
        for chunk in chunks:
            self._buffer = (self._buffer + chunk).removeprefix("\ufeff")
            if match := opening.match(self._buffer):
                return self._take(match.end())
            start = self._buffer.lstrip()[:1]
            if start and start != ("[" if self.key is None else "{"):
                raise UserError(f"{self.path} starts with {start!r}: {self.shape} is needed")
            if len(self._buffer) > _LONGEST_HEAD:
                break
        if self._fault:
            raise UserError(f"{self.path}: {self._fault}: fetch it again")
        raise UserError(f"{self.path} holds no rows: {self.shape} is needed")

    def __iter__(self) -> Iterator[Element | RowProblem]:
        self._line, self._buffer, self._fault = 1, "", None
        chunks = self._chunks()
        head = self._open_array(chunks)
        position, depth, in_string, count = 0, 0, False, 0
        while True:
            match = (_INSIDE_STRING if in_string else _OUTSIDE_STRING).search(self._buffer, position)
            if match is None or (match[0] == "\\" and match.end() >= len(self._buffer)):
                position = match.start() if match else len(self._buffer)
                chunk = next(chunks, None)
                if chunk is None:
                    break
                self._buffer += chunk
                continue
            mark, position = match[0], match.end()
            if in_string:
                position += mark == "\\"
                in_string = mark != '"'
            elif mark == '"':
                in_string = True
            elif mark in "{[":
                depth += 1
            elif depth and mark in "}]":
                depth -= 1
            elif depth == 0 and mark in ",]":
                text = self._take(position - 1)
                if text.strip() or count or mark == ",":
                    count += 1
                    yield self._element(text, count)
                self._take(1)
                position = 0
                if mark == "]":
                    yield from self._close(head, chunks)
                    return
        line = self._line + self._leading_lines(self._buffer)
        reason = self._fault or "the file is truncated, or a bracket or quote is not closed"
        yield self._problem(line, f"the file ends inside row {count + 1}: {reason}", self._buffer.strip())

    @staticmethod
    def _leading_lines(text: str) -> int:
        return text[: len(text) - len(text.lstrip())].count("\n")

    def _element(self, text: str, number: int) -> Element | RowProblem:
        """The value of one element, which has just left the buffer."""
        line = self._line - text.count("\n") + self._leading_lines(text)
        if not text.strip():
            return self._problem(line, f"row {number} is empty: a comma too many")
        try:
            return Element(line, number, json.loads(text))
        except json.JSONDecodeError as error:
            fault_line = self._line - text.count("\n") + error.lineno - 1
            return self._problem(
                line, f"row {number} is not JSON: {error.msg} (line {fault_line}, column {error.colno})", text.strip()
            )
        except ValueError as error:
            return self._problem(line, f"row {number} is not JSON: {error}", text.strip())
        except RecursionError:
            return self._problem(line, f"row {number} is nested too deep", text.strip())

    def _close(self, head: str, chunks: Iterator[str]) -> Iterator[RowProblem]:
        """Check what follows the array."""
        line = self._line
        tail = self._buffer + "".join(chunks)
        if self._fault:
            yield self._problem(line, self._fault)
            return
        try:
            self.envelope = json.loads(f"{head}]{tail}".removeprefix("\ufeff"))
        except json.JSONDecodeError as error:
            yield self._problem(line, f"what follows the last row is not JSON: {error.msg}", tail.strip())
