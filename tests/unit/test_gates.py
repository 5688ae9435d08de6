"""Promotion policies: what a gate says, and what a policy file may hold."""

from pathlib import Path

import pytest

from prm.errors import UserError
from prm.tracking.gates import Gate, read_policy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("comparison", "figure", "passes"),
    [
        ("at_least", 0.5, True),
        ("at_least", 0.49, False),
        ("above", 0.5, False),
        ("above", 0.51, True),
        ("at_most", 0.5, True),
        ("at_most", 0.51, False),
        ("below", 0.5, False),
        ("below", 0.49, True),
    ],
)
def test_bounds(comparison, figure, passes):
    result = Gate("m", comparison, 0.5).check({"m": figure})
    assert result.passed is passes
    assert (result.figure, result.threshold) == (figure, 0.5)


def test_a_bound_that_is_a_metric_less_a_tolerance():
    gate = Gate("guided", "at_least", "plain", minus=0.01)
    assert gate.check({"guided": 0.295, "plain": 0.30}).passed
    result = gate.check({"guided": 0.28, "plain": 0.30})
    assert not result.passed
    assert result.threshold == pytest.approx(0.29)
    assert result.rule == ">= plain - 0.01"


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({}, "no metric guided"),
        ({"guided": 1.0}, "no metric plain"),
        ({"guided": float("nan"), "plain": 0.0}, "not finite"),
        ({"guided": 1.7976931348623157e308, "plain": 0.0}, "not finite"),
    ],
)
def test_what_is_missing_or_not_finite_fails_with_a_reason(metrics, reason):
    result = Gate("guided", "at_least", "plain").check(metrics)
    assert not result.passed
    assert reason in result.reason


def test_every_gate_is_judged_after_one_failed(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("gates:\n- {metric: a, above: 1}\n- {metric: b, below: 1, note: small}\n")
    policy = read_policy(file)
    assert [r.passed for r in policy.check({"a": 0, "b": 0})] == [False, True]
    assert len(policy.sha256) == 64


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gates: []", "at least one gate"),
        ("[1]", "must hold one key"),
        ("gates:\n- {metric: a, above: 1}\nextra: 1", "must hold one key"),
        ("gates:\n- {metric: a, at_leats: 1}", "unknown key 'at_leats'"),
        ("gates:\n- {metric: a}", "exactly one of"),
        ("gates:\n- {metric: a, above: 1, below: 2}", "exactly one of"),
        ("gates:\n- {metric: a, above: 1, above: 2}", "stands twice"),
        ("gates:\n- {above: 1}", "name of a metric"),
        ("gates:\n- {metric: a, above: '1'}", "finite number"),
        ("gates:\n- {metric: a, above: .nan}", "finite number"),
        ("gates:\n- {metric: a, above: true}", "finite number"),
        ("gates:\n- {metric: a, above: 1, minus: 0.1}", "beside one of the _metric bounds"),
        ("gates:\n- {metric: a, above_metric: 1}", "name of a metric"),
        ("gates:\n- !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("gates: [", "not valid YAML"),
    ],
)
def test_a_wrong_policy_is_one_clear_line(tmp_path, text, complaint):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        read_policy(file)
    assert "\n" not in str(caught.value)


def test_a_missing_policy_file():
    with pytest.raises(UserError, match="no policy file"):
        read_policy("nowhere.yaml")


def test_the_shipped_policy_passes_a_good_checkpoint_and_no_other():
    policy = read_policy(ROOT / "mlflow" / "promotion.yaml")
    good = {
        "pref_lamp/rm_accuracy_low": 0.58,
        "pref_lamp/rm_accuracy": 0.66,
        "pref_lamp/guided/rouge1_gain": 0.002,
    }
    assert all(result.passed for result in policy.check(good))
    for name, value in {
        "pref_lamp/rm_accuracy_low": 0.49,
        "pref_lamp/rm_accuracy": 0.54,
        "pref_lamp/guided/rouge1_gain": -0.02,
    }.items():
        assert [r.metric for r in policy.check({**good, name: value}) if not r.passed] == [name]


def test_every_gate_of_the_shipped_policy_says_what_it_is_for():
    assert all(gate.note for gate in read_policy(ROOT / "mlflow" / "promotion.yaml").gates)
