"""The lines of a JSON-lines file, plain, gzip or xz, one at a time.

A damaged line does not hide the ones after it, and every fault has a line number. Bytes that are not UTF-8 come through
as lone surrogates, which `records.text_problem` refuses by name.
"""

from __future__ import annotations

import codecs
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

from data_modules.json_rows import Element, open_bytes
from prm.records import RowProblem

_QUOTED_ROW = 2000


def text_lines(path: str | Path) -> Iterator[tuple[int, str] | RowProblem]:
    """(number counted from 1, line) of a UTF-8 text file; a compressed stream that breaks off ends in a RowProblem.

    Raises:
        UserError: the file cannot be opened, or is empty.
    """
    number = 0
    with open_bytes(path) as file:
        while True:
            try:
                data = file.readline()
            except EOFError:
                yield RowProblem(str(path), number + 1, "row", "the compressed file is truncated")
                return
            except (OSError, lzma.LZMAError, zlib.error) as error:
                yield RowProblem(str(path), number + 1, "row", f"the file cannot be read on ({error})")
                return
            if not data:
                return
            number += 1
            data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            yield number, data.decode("utf-8", "surrogateescape")


def json_lines(path: str | Path) -> Iterator[Element | RowProblem]:
    """The value of every line that is not blank, or what is wrong with it.

    Raises:
        UserError: the file cannot be opened, or is empty.
    """
    count = 0
    for item in text_lines(path):
        if isinstance(item, RowProblem):
            yield item
            continue
        line, text = item
        if not text.strip():
            continue
        count += 1
        try:
            yield Element(line, count, json.loads(text))
        except json.JSONDecodeError as error:
            reason = f"is not JSON: {error.msg} (column {error.colno})"
            yield RowProblem(str(path), line, "row", reason, text.strip()[:_QUOTED_ROW])
        except (ValueError, RecursionError) as error:
            reason = "is nested too deep" if isinstance(error, RecursionError) else f"is not JSON: {error}"
            yield RowProblem(str(path), line, "row", reason, text.strip()[:_QUOTED_ROW])
