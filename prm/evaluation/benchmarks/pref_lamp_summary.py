"""The figures of a Pref-LaMP evaluation, from what its stages wrote. Text metrics are shares in [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from prm import store
from prm.evaluation.cases import Case
from prm.evaluation.metrics.bertscore import BertScore
from prm.evaluation.metrics.preference import rm_accuracy, win_rate
from prm.evaluation.metrics.text import rouge
from prm.inference.decoding.best_of_n import chance_win
from prm.statistics import mean_over_users, preference_credit

BENCHMARK = "pref_lamp"
SCHEMA_VERSION = 1
TEXT_METRICS = ("rouge1", "rougeL", "bertscore_f1")
CASE_SCHEMA = pa.schema(
    [
        ("case_id", pa.string()),
        ("user_id", pa.string()),
        ("method", pa.string()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
        ("response", pa.string()),
        *((name, pa.float64()) for name in TEXT_METRICS),
        ("score", pa.float64()),
        ("prompt_hash", pa.string()),
    ]
)


@dataclass
class Results:
    """What the stages wrote, in the order of the cases, and the text metrics of it.

    Attributes:
        responses: method -> one row a case.
        candidates: one row a case.
        choices: checkpoint label -> one row a case.
        pairs: checkpoint label -> one row a pair.
        text: method -> metric -> values [cases], computed by `measure`.
    """

    cases: Sequence[Case]
    responses: Mapping[str, Sequence[dict[str, Any]]]
    candidates: Sequence[dict[str, Any]]
    choices: Mapping[str, Sequence[dict[str, Any]]]
    pairs: Mapping[str, Sequence[dict[str, Any]]]
    best_of: int
    bertscore_model: str
    text: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    bertscore_cut: int = 0

    def methods(self) -> dict[str, Sequence[dict[str, Any]]]:
        """Rows of every method, `guided[LABEL]` among them."""
        return {**self.responses, **{f"guided[{label}]": rows for label, rows in self.choices.items()}}

    def measure(self) -> None:
        """Compute the text metrics of all methods."""
        encoder = BertScore(self.bertscore_model)
        references = [c.reference for c in self.cases]
        for name, rows in self.methods().items():
            texts = [row["text"] for row in rows]
            self.text[name] = {**rouge(texts, references), "bertscore_f1": encoder.f1(texts, references)}
        self.bertscore_cut = encoder.truncated


def cases_table(results: Results) -> pa.Table:
    """One row a method and case: ids, texts, metrics, the reward of guided responses, the hash of the prompt."""
    rows = []
    for method, responses in results.methods().items():
        for i, (case, row) in enumerate(zip(results.cases, responses, strict=True)):
            rows.append(
                {
                    "case_id": case.request.case_id,
                    "user_id": case.request.user_id,
                    "method": method,
                    "prompt": "\n".join(m["content"] for m in case.request.prompt),
                    "reference": case.reference,
                    "response": row["text"],
                    **{name: float(results.text[method][name][i]) for name in TEXT_METRICS},
                    "score": row.get("score"),
                    "prompt_hash": store.fingerprint(case.request.prompt),
                }
            )
    return pa.Table.from_pylist(rows, schema=CASE_SCHEMA)


def summarize(results: Results, facts: Mapping[str, Any]) -> dict[str, Any]:
    """summary.json without the time it took: the figures beside `facts` on what was evaluated."""
    results.measure()
    users = [c.request.user_id for c in results.cases]
    accuracy = {label: _accuracy(rows) for label, rows in results.pairs.items()}
    methods = {
        name: {metric: mean_over_users(users, values.tolist()).as_dict() for metric, values in figures.items()}
        for name, figures in results.text.items()
    }
    win = {
        f"guided[{label}]": win_rate(
            users, [r["score"] for r in rows], [r["plain_score"] for r in rows], results.best_of
        )
        for label, rows in results.choices.items()
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": BENCHMARK,
        **facts,
        "chance_win": chance_win(results.best_of),
        "rm_accuracy": accuracy,
        "methods": methods,
        "win": win,
        "counts": _counts(results),
        "metrics": _flat_metrics(results, accuracy, methods, win),
    }


def _accuracy(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return rm_accuracy([r["user_id"] for r in rows], [r["chosen"] for r in rows], [r["rejected"] for r in rows])


def _counts(results: Results) -> dict[str, int]:
    """Everything that was cut, dropped or empty, beside how much there was."""
    counts = {
        "cases": len(results.cases),
        "users": len({c.request.user_id for c in results.cases}),
        "cases_without_history": sum(not c.request.history for c in results.cases),
        "bertscore_texts_cut": results.bertscore_cut,
    }
    for method, rows in results.responses.items():
        counts[f"{method}_length_limited"] = sum(r["length_limited"] for r in rows)
        counts[f"{method}_prompts_cut"] = sum(r["prompt_cut"] > 0 for r in rows)
        if method != "plain":
            counts[f"{method}_shots"] = sum(r["shots"] for r in rows)
            counts[f"{method}_shots_dropped"] = sum(r["shots_dropped"] for r in rows)
    if results.candidates:
        counts["candidates"] = sum(len(r["texts"]) for r in results.candidates)
        counts["candidates_length_limited"] = sum(r["length_limited"] for r in results.candidates)
        counts["candidates_duplicate"] = sum(len(r["texts"]) - len(set(r["texts"])) for r in results.candidates)
        counts["candidates_empty"] = sum(not text for r in results.candidates for text in r["texts"])
        counts["candidates_prompts_cut"] = sum(r["cut"] > 0 for r in results.candidates)
    for label, rows in results.pairs.items():
        counts[f"pairs_{label}"] = len(rows)
        counts[f"pairs_{label}_cut"] = sum(r["cut"] > 0 for r in rows)
    for label, rows in results.choices.items():
        counts[f"guided_{label}_cases_cut"] = sum(r["reward_cut"] > 0 for r in rows)
    for method, rows in results.methods().items():
        counts[f"{method}_empty"] = sum(not r["text"] for r in rows)
    return counts


def _flat_metrics(
    results: Results,
    accuracy: Mapping[str, dict[str, Any]],
    methods: Mapping[str, dict[str, dict[str, Any]]],
    win: Mapping[str, dict[str, Any]],
) -> dict[str, float]:
    """Metric name -> figure, for MLflow and gates. What names no checkpoint is about the last one."""
    users = [c.request.user_id for c in results.cases]
    flat: dict[str, float] = {}
    for name, figures in methods.items():
        place = name.replace("[", "_").replace("]", "")
        flat |= {f"{place}/{metric}": estimate["mean"] for metric, estimate in figures.items()}
    for label, estimate in accuracy.items():
        flat |= {
            f"rm_accuracy_{label}": estimate["mean"],
            f"rm_accuracy_{label}_low": estimate["low"],
            f"rm_accuracy_{label}_strict": estimate["strict"],
        }
    for label in results.choices:
        place, name = f"guided_{label}", f"guided[{label}]"
        flat |= {f"{place}/win_rate": win[name]["win_rate"]["mean"], f"{place}/win_chance": win[name]["chance"]}
        for metric in TEXT_METRICS:
            gain = mean_over_users(users, (results.text[name][metric] - results.text["plain"][metric]).tolist())
            flat |= {f"{place}/{metric}_gain": gain.mean, f"{place}/{metric}_gain_low": gain.low}
    if accuracy:
        last = list(accuracy)[-1]
        for suffix in ("", "_low", "_strict"):
            flat[f"rm_accuracy{suffix}"] = flat[f"rm_accuracy_{last}{suffix}"]
        for other in list(accuracy)[:-1]:
            gain = mean_over_users(*_credit_gain(results.pairs[last], results.pairs[other]))
            flat |= {f"rm_accuracy_gain_over_{other}": gain.mean, f"rm_accuracy_gain_over_{other}_low": gain.low}
        flat |= {
            f"guided/{key.partition('/')[2]}": value
            for key, value in list(flat.items())
            if key.partition("/")[0] == f"guided_{last}"
        }
    return {f"{BENCHMARK}/{key}": value for key, value in flat.items()}


def _credit_gain(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> tuple[list[str], list[float]]:
    """User and difference in credit of every pair, between two checkpoints."""
    gains = [
        preference_credit(r["chosen"], r["rejected"]) - preference_credit(o["chosen"], o["rejected"])
        for r, o in zip(rows, others, strict=True)
    ]
    return [r["user_id"] for r in rows], gains
