"""One self-contained HTML page of an evaluation: no script, no external file, everything a model wrote escaped."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from prm import __version__, store
from prm.dataset_dir import split_warning
from prm.report import charts
from prm.report.inputs import Curves, read_cases, read_curves, read_summary, read_verdict
from prm.tracking.runs import read_record

TEXT_METRICS = {"rouge1": "ROUGE-1", "rougeL": "ROUGE-L", "bertscore_f1": "BERTScore F1"}
_MAX_CHARTS = 8
_STAGES = ("train", "validation", "val", "test")


def write_report(
    evaluation: str | Path,
    out: str | Path,
    *,
    train_run: str | Path | None = None,
    verdict: str | Path | None = None,
    num_cases: int = 3,
) -> Path:
    """Write the report of an evaluation directory to the HTML file `out`.

    Args:
        evaluation: directory with summary.json and cases.parquet.
        train_run: run directory of the training; its metrics.jsonl gives the curves.
        verdict: file of `prm promote --out`; by default verdict.json of the evaluation, if there.
        num_cases: cases shown side by side.

    Raises:
        UserError: something is missing or damaged.
    """
    summary = read_summary(evaluation)
    decision = read_verdict(evaluation, verdict)
    cases, total_cases = read_cases(evaluation, num_cases)
    curves, rows_left_out = read_curves(train_run) if train_run is not None else ({}, 0)
    record = read_record(evaluation) or {}
    shown, not_shown, once = _curve_charts(curves)
    page = (
        _environment()
        .get_template("template.html")
        .render(
            summary=summary,
            split_warning=split_warning(summary.get("split_rule")),
            verdict=decision,
            other_evaluation=bool(
                decision and record.get("run_id") and decision.get("evaluation_run") != record["run_id"]
            ),
            accuracy=_accuracy_rows(summary["rm_accuracy"]),
            metrics=_used_metrics(summary["methods"]),
            methods=_method_rows(summary["methods"]),
            wins=_win_rows(summary.get("win") or {}),
            curves=shown,
            curves_not_shown=not_shown,
            logged_once=once,
            curve_rows_left_out=rows_left_out,
            cases=cases,
            total_cases=total_cases,
            counts=_flat(summary.get("counts") or {}),
            versions=sorted((summary.get("versions") or {}).items()),
            record=record,
            prm_version=__version__,
            now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )
    return store.write_text(out, page)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = lambda value, digits=3: "-" if value is None else f"{value:.{digits}f}"
    environment.filters["percent"] = lambda value: "-" if value is None else f"{100 * value:.1f} %"
    environment.filters["signed"] = lambda value: f"{100 * value:+.1f}"
    return environment


def _axis(estimates: Iterable[Mapping[str, float]], *references: float) -> tuple[float, float]:
    """Ends of a common axis that holds all intervals and references, with a little room."""
    values = [value for e in estimates for value in (e["low"], e["high"], e["mean"])] + list(references)
    room = (max(values) - min(values)) * 0.06 or 0.01
    return min(values) - room, max(values) + room


def _accuracy_rows(accuracy: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    axis = _axis(accuracy.values(), 0.5)
    return [
        {"label": label, **e, "strip": charts.interval_strip(e["mean"], e["low"], e["high"], axis, reference=0.5)}
        for label, e in accuracy.items()
    ]


def _used_metrics(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {key: label for key, label in TEXT_METRICS.items() if any(method.get(key) for method in methods.values())}


def _method_rows(methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each method its estimates, each with a strip on the axis of its metric; the first method is the reference."""
    used = _used_metrics(methods)
    axes = {key: _axis(m[key] for m in methods.values() if m.get(key)) for key in used}
    base = methods.get("plain", {})
    rows = []
    for name, figures in methods.items():
        cells = {}
        for key in used:
            if estimate := figures.get(key):
                reference = base[key]["mean"] if base.get(key) else None
                strip = charts.interval_strip(
                    estimate["mean"], estimate["low"], estimate["high"], axes[key], reference=reference, width=110
                )
                cells[key] = {**estimate, "strip": strip}
        any_estimate = next(iter(cells.values()), {})
        rows.append(
            {
                "name": name,
                "cells": cells,
                "users": any_estimate.get("num_users", "-"),
                "rows": any_estimate.get("num_rows", "-"),
            }
        )
    return rows


def _win_rows(win: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each guided method its outcomes as shares, and the excess of its win rate over what chance gives."""
    rows = []
    axis = _axis((w["win_rate"] for w in win.values()), *(w["chance"] for w in win.values())) if win else (0.0, 1.0)
    for name, outcome in win.items():
        total = sum(outcome[key] for key in ("win", "tie", "loss")) or 1
        shares = [(key, outcome[key] / total) for key in ("win", "tie", "loss")]
        rate = outcome["win_rate"]
        rows.append(
            {
                "name": name,
                "shares": dict(shares),
                "bar": charts.shares_bar(shares),
                "rate": rate,
                "chance": outcome["chance"],
                "excess": rate["mean"] - outcome["chance"],
                "strip": charts.interval_strip(
                    rate["mean"], rate["low"], rate["high"], axis, reference=outcome["chance"], width=110
                ),
            }
        )
    return rows


def _chart_and_line(name: str) -> tuple[str, str]:
    """Chart and line of a metric: train/loss and validation/loss are lines of `loss`, lr/head is a line of `lr`."""
    first, _, rest = name.partition("/")
    if rest and first in _STAGES:
        return rest, first
    return (first, rest) if rest and first == "lr" else (name, name)


def _curve_charts(curves: Curves) -> tuple[list[Markup], list[str], list[tuple[str, float]]]:
    """The charts, the names of curves that found no place, and what was logged only once (name, value)."""
    once = [(name, points[0][1]) for name, points in curves.items() if len(points) == 1]
    groups: dict[str, Curves] = {}
    for name, points in curves.items():
        if len(points) > 1:
            title, line = _chart_and_line(name)
            groups.setdefault(title, {})[line] = points
    order = sorted(groups, key=lambda title: (not any(word in title for word in ("loss", "accuracy")), title))
    shown = [
        charts.line_chart(title, groups[title], x_label="step", y_label=title.rsplit("/", 1)[-1])
        for title in order[:_MAX_CHARTS]
    ]
    return shown, order[_MAX_CHARTS:], once


def _flat(counts: Mapping[str, Any], place: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in counts.items():
        name = f"{place} / {key}" if place else str(key)
        rows += _flat(value, name) if isinstance(value, Mapping) else [(name.replace("_", " "), value)]
    return rows
