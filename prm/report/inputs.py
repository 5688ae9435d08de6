"""What a report is made of, read from the directories that hold it: evaluation, training run, verdict."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prm.errors import UserError

SUMMARY_VERSION = 1
_CASE_COLUMNS = ("case_id", "user_id", "method", "prompt", "reference", "response", "rouge1", "score")
Curves = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Response:
    """What one method wrote for a case."""

    method: str
    text: str
    rouge1: float | None
    reward: float | None


@dataclass(frozen=True)
class Case:
    """One prompt with the user's own text and every method's response."""

    case_id: str
    user_id: str
    prompt: str
    reference: str
    responses: list[Response] = field(default_factory=list)


def read_summary(evaluation: str | Path) -> dict[str, Any]:
    """summary.json of an evaluation directory.

    Raises:
        UserError: none there, damaged, or of another version.
    """
    file = Path(evaluation) / "summary.json"
    summary = _read_json(
        file, "run `prm evaluate pref-lamp ... --out DIR` first; an interrupted one has no summary yet"
    )
    if summary.get("schema_version") != SUMMARY_VERSION:
        raise UserError(f"{file} has schema version {summary.get('schema_version')}, this prm reads {SUMMARY_VERSION}")
    for key in ("benchmark", "methods", "rm_accuracy"):
        if key not in summary:
            raise UserError(f"{file} has no {key}: it is damaged, evaluate again")
    return summary


def read_verdict(evaluation: str | Path, verdict: str | Path | None) -> dict[str, Any] | None:
    """A verdict that `prm promote --out` wrote: the given file, else verdict.json of the evaluation, else None."""
    file = Path(verdict) if verdict is not None else Path(evaluation) / "verdict.json"
    if verdict is None and not file.is_file():
        return None
    content = _read_json(file, "write one with `prm promote ... --out FILE`")
    if not isinstance(content.get("gates"), list) or "passed" not in content:
        raise UserError(f"{file} is no verdict: write one with `prm promote ... --out FILE`")
    return content


def _read_json(file: Path, remedy: str) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"no {file}: {remedy}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it is no JSON object")
    return content


def read_cases(evaluation: str | Path, count: int) -> tuple[list[Case], int]:
    """`count` cases evenly spaced over the evaluation (never picked by score), and how many cases there are."""
    file = Path(evaluation) / "cases.parquet"
    if not file.is_file():
        raise UserError(f"no {file}: the evaluation is not complete, run it again to finish it")
    try:
        table = pq.read_table(file, columns=list(_CASE_COLUMNS))
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, KeyError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    cases: dict[str, Case] = {}
    for row in table.to_pylist():
        case = cases.setdefault(
            row["case_id"], Case(str(row["case_id"]), str(row["user_id"]), str(row["prompt"]), str(row["reference"]))
        )
        case.responses.append(Response(row["method"], str(row["response"]), row["rouge1"], row["score"]))
    found = list(cases.values())
    count = min(count, len(found))
    picked = [found[(2 * index + 1) * len(found) // (2 * count)] for index in range(count)]
    return picked, len(found)


def read_curves(run_dir: str | Path) -> tuple[Curves, int]:
    """Points (step, value) by metric name from a training run's metrics.jsonl, and how many rows were left out.

    A step logged twice keeps its last value (a resumed run logs again what it repeats). Rows without a finite value
    and lines cut by a crash are left out and counted; system metrics are not read.
    """
    file = Path(run_dir) / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"no {file}: pass the run directory of a training (its save_dir) to --train-run")
    points: dict[str, dict[float, float]] = {}
    left_out = 0
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            name, step, value = str(row["name"]), float(row["step"]), row["value"]
        except (ValueError, KeyError, TypeError):
            left_out += 1
            continue
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            left_out += 1
        elif not name.startswith("system/"):
            points.setdefault(name, {})[step] = float(value)
    return {name: sorted(steps.items()) for name, steps in points.items()}, left_out
