"""Promotion policies: a YAML list of gates, each a metric, one bound and the reason for it.

    gates:
      - metric: pref_lamp/rm_accuracy_low
        above: 0.5
        note: better than chance with confidence
      - metric: pref_lamp/guided/rouge1
        at_least_metric: pref_lamp/plain/rouge1     # a bound that is itself a metric of the same run,
        minus: 0.01                                 # less a tolerance

Bounds: at_least, at_most, above, below, and the same with `_metric`. A metric that is missing or not finite fails its
gate. Nothing else is accepted: a misspelt key must not switch a gate off.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from prm import store
from prm.errors import UserError

_COMPARE: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "at_least": (operator.ge, ">="),
    "at_most": (operator.le, "<="),
    "above": (operator.gt, ">"),
    "below": (operator.lt, "<"),
}
_BOUNDS = (*_COMPARE, *(f"{name}_metric" for name in _COMPARE))
# MLflow stores infinities as the largest double.
_LARGEST = 1.79e308


@dataclass(frozen=True)
class Gate:
    """One condition on one metric.

    Attributes:
        metric: MLflow name of the figure.
        comparison: at_least, at_most, above or below.
        bound: a number, or the name of another metric.
        minus: subtracted from a bound that is a metric.
        note: what the gate is for.
    """

    metric: str
    comparison: str
    bound: float | str
    minus: float = 0.0
    note: str = ""

    def check(self, metrics: Mapping[str, float]) -> GateResult:
        """The outcome for the metrics of one evaluation run."""
        compare, sign = _COMPARE[self.comparison]
        rule = f"{sign} {self.bound}" + (f" - {self.minus:g}" if self.minus else "")
        figure, reason = _figure(metrics, self.metric)
        threshold: float | None
        if isinstance(self.bound, str):
            threshold, missing = _figure(metrics, self.bound)
            reason = reason or missing
            threshold = None if threshold is None else threshold - self.minus
        else:
            threshold = self.bound
        passed = figure is not None and threshold is not None and compare(figure, threshold)
        compared = self.bound if isinstance(self.bound, str) else None
        return GateResult(self.metric, figure, rule, threshold, passed, reason, self.note, compared)


@dataclass(frozen=True)
class GateResult:
    """Outcome of one gate.

    Attributes:
        figure, threshold: None when the metric is missing; `reason` says so then.
        rule: the gate as a text, such as `>= 0.55` or `>= pref_lamp/plain/rouge1 - 0.01`.
        compared: the metric that the threshold comes from, None for a fixed number.
    """

    metric: str
    figure: float | None
    rule: str
    threshold: float | None
    passed: bool
    reason: str
    note: str
    compared: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Policy:
    """The gates of a policy file and the sha256 of its bytes."""

    gates: tuple[Gate, ...]
    sha256: str
    path: str

    def check(self, metrics: Mapping[str, float]) -> list[GateResult]:
        """The outcome of every gate, also of those after one that failed."""
        return [gate.check(metrics) for gate in self.gates]


def _figure(metrics: Mapping[str, float], name: str) -> tuple[float | None, str]:
    if name not in metrics:
        return None, f"the evaluation logged no metric {name}"
    value = float(metrics[name])
    if not math.isfinite(value) or abs(value) >= _LARGEST:
        return None, f"{name} is not finite"
    return value, ""


class _StrictLoader(yaml.SafeLoader):
    """yaml.SafeLoader that refuses a key standing twice in a mapping; it would take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def read_policy(path: str | Path) -> Policy:
    """Read and check a policy file.

    Raises:
        UserError: no such file, not YAML, no gates, or a gate with an unknown key, no or two bounds, a wrong type.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no policy file at {path}: pass --policy mlflow/promotion.yaml or one of your own")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # a SafeLoader
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or set(content) != {"gates"}:
        raise UserError(f"{path} must hold one key, gates, with a list of gates")
    entries = content["gates"]
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: gates must be a list with at least one gate")
    gates = tuple(_gate(f"{path}: gate {number}", entry) for number, entry in enumerate(entries, 1))
    return Policy(gates, store.fingerprint_file(path), str(path))


def _gate(place: str, entry: Any) -> Gate:
    if not isinstance(entry, dict):
        raise UserError(f"{place} must be a mapping with metric and one of {', '.join(_BOUNDS)}")
    unknown = [str(key) for key in entry if key not in ("metric", "minus", "note", *_BOUNDS)]
    if unknown:
        raise UserError(
            f"{place} has the unknown key {unknown[0]!r}; known are metric, minus, note, {', '.join(_BOUNDS)}"
        )
    metric, note, minus = entry.get("metric"), entry.get("note", ""), entry.get("minus", 0.0)
    if not isinstance(metric, str) or not metric:
        raise UserError(f"{place}: metric must be the name of a metric")
    if not isinstance(note, str):
        raise UserError(f"{place}: note must be a text")
    bounds = [key for key in _BOUNDS if key in entry]
    if len(bounds) != 1:
        raise UserError(f"{place} ({metric}) needs exactly one of {', '.join(_BOUNDS)}, it has {len(bounds)}")
    key = bounds[0]
    bound = entry[key]
    compared = key.endswith("_metric")
    if compared and (not isinstance(bound, str) or not bound):
        raise UserError(f"{place} ({metric}): {key} must be the name of a metric")
    if not compared and not _is_number(bound):
        raise UserError(f"{place} ({metric}): {key} must be a finite number, it is {bound!r}")
    if "minus" in entry and not (compared and _is_number(minus)):
        raise UserError(f"{place} ({metric}): minus must be a finite number, beside one of the _metric bounds")
    return Gate(metric, key.removesuffix("_metric"), bound if compared else float(bound), float(minus), note)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
