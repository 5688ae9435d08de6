"""Promotion: a version becomes champion when the gates agree, and the one before it comes back on a rollback.

Aliases keep no history in MLflow, so every decision is written as a tag `prm.event.<number>` of the registered model.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prm import store
from prm.errors import UserError
from prm.provenance import user_name
from prm.tracking.gates import GateResult, Policy
from prm.tracking.lock import promotion_lock
from prm.tracking.registry import alias_version, model_version, registered_model

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_EVENT = "prm.event."
# What MLflow's SQL stores keep of a registered model's tag.
_MAX_EVENT = 5000


@dataclass(frozen=True)
class Verdict:
    """Outcome of a promotion.

    Attributes:
        passed: all gates passed; the alias stands on this version then.
        moved: the alias was moved (False also when it stood there before).
        previous: version that held the alias before, or None.
    """

    name: str
    version: int
    alias: str
    passed: bool
    moved: bool
    previous: int | None
    evaluation_run: str
    policy: str
    policy_sha256: str
    gates: list[GateResult]
    when: str = field(default_factory=lambda: _now())
    who: str = field(default_factory=user_name)

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "gates": [gate.as_dict() for gate in self.gates]}


def promote(
    client: MlflowClient, name: str, version: int, policy: Policy, *, alias: str = "champion", run_id: str | None = None
) -> Verdict:
    """Check a version's evaluation against a policy and move the alias to it when every gate passes.

    Args:
        run_id: evaluation run to judge by; by default the newest finished one of this checkpoint.

    Raises:
        UserError: unknown name, version or run, no finished evaluation of this checkpoint, a reserved alias.
    """
    check_alias(alias)
    candidate = model_version(client, name, version)
    fingerprint = candidate.tags.get("prm.checkpoint_fingerprint")
    if not fingerprint:
        raise UserError(f"version {version} of {name} was not registered by `prm register`: its checkpoint is unknown")
    evaluation = find_evaluation(client, fingerprint, run_id)
    results = policy.check(evaluation.data.metrics)
    passed = all(result.passed for result in results)
    with promotion_lock(client, name) as holding:
        previous = alias_version(client, name, alias)
        moves = passed and previous != version
        verdict = Verdict(
            name, version, alias, passed, moves, previous, evaluation.info.run_id, policy.path, policy.sha256, results
        )
        holding()
        # The event first: a rollback skips one whose alias was never moved, and cannot see a move without an event.
        _record(client, verdict)
        if moves:
            client.set_registered_model_alias(name, alias, str(version))
    return verdict


def rollback(client: MlflowClient, name: str, *, alias: str = "champion") -> tuple[int, int]:
    """Move the alias back to the version that held it before; returns (from, to).

    Raises:
        UserError: the alias is not set, was set outside prm, or the previous version is gone.
    """
    check_alias(alias)
    registered_model(client, name)
    with promotion_lock(client, name) as holding:
        current = alias_version(client, name, alias)
        if current is None:
            raise UserError(f"{name} has no {alias}: nothing to roll back")
        stack = _promotions(history(client, name), alias)
        while stack and stack[-1][0] != current:
            stack.pop()
        if not stack:
            raise UserError(f"version {current} of {name} became {alias} outside prm: set the alias in MLflow by hand")
        previous = stack[-1][1]
        if previous is None:
            raise UserError(f"version {current} is the first {alias} of {name}: nothing to roll back to")
        model_version(client, name, previous)
        holding()
        event = {"action": "rolled_back", "alias": alias, "version": previous, "from": current}
        _write_event(client, name, {**event, "when": _now(), "who": user_name()})
        client.set_registered_model_alias(name, alias, str(previous))
    return current, previous


def history(client: MlflowClient, name: str) -> list[dict[str, Any]]:
    """Every decision about a registered model, oldest first."""
    tags = registered_model(client, name).tags
    return [json.loads(tags[key]) for key in sorted(tags) if key.startswith(_EVENT)]


def find_evaluation(client: MlflowClient, fingerprint: str, run_id: str | None = None) -> Run:
    """The newest finished evaluation run of a checkpoint, or the given one if it is a finished evaluation of it."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        found = client.search_runs(
            experiments,
            f"tags.`prm.checkpoint_fingerprint` = '{fingerprint}' and tags.`prm.kind` = 'evaluation' "
            "and attributes.status = 'FINISHED'",
            order_by=["attributes.end_time DESC"],
            max_results=1,
        )
        if not found:
            raise UserError(
                f"no finished evaluation of the checkpoint {fingerprint[:12]} in this MLflow: "
                "run `prm evaluate` on it first, or pass --run"
            )
        return found[0]
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"no run {run_id} in this MLflow: look it up with `mlflow runs list`") from error
    if run.data.tags.get("prm.kind") != "evaluation" or run.info.status != "FINISHED":
        raise UserError(f"the run {run_id} is not a finished evaluation: pass the run of `prm evaluate` to --run")
    if run.data.tags.get("prm.checkpoint_fingerprint") != fingerprint:
        raise UserError(f"the run {run_id} evaluated another checkpoint than this version's ({fingerprint[:12]})")
    return run


def check_alias(alias: str) -> None:
    """Raise UserError for an alias that MLflow reserves or does not take (`latest`, `v1`, other characters)."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,255}", alias) or re.fullmatch(r"[vV]?\d+|latest", alias, re.IGNORECASE):
        raise UserError(f"the alias {alias!r} is reserved or not a plain word: choose another, such as champion")


def _promotions(events: list[dict[str, Any]], alias: str) -> list[tuple[int, int | None]]:
    """Promotions that were not rolled back, oldest first: (version, version that held the alias before)."""
    stack: list[tuple[int, int | None]] = []
    for event in events:
        if event.get("alias") != alias:
            continue
        if event["action"] == "promoted":
            stack.append((event["version"], event["previous"]))
        elif event["action"] == "rolled_back":
            while stack and stack[-1][0] != event["from"]:
                stack.pop()
            if stack:
                stack.pop()
    return stack


def _record(client: MlflowClient, verdict: Verdict) -> None:
    """Write a verdict as an event of the model and as tags of the version."""
    action = "promoted" if verdict.moved else "kept" if verdict.passed else "refused"
    event: dict[str, Any] = {
        "action": action,
        "alias": verdict.alias,
        "version": verdict.version,
        "previous": verdict.previous,
        "when": verdict.when,
        "who": verdict.who,
        "policy_sha256": verdict.policy_sha256,
        "evaluation_run": verdict.evaluation_run,
        "gates": [[gate.metric, gate.figure, gate.rule, gate.passed] for gate in verdict.gates],
    }
    _write_event(client, verdict.name, event)
    tags = {
        "prm.verdict": action,
        "prm.judged_at": verdict.when,
        "prm.judged_by": verdict.who,
        "prm.policy_sha256": verdict.policy_sha256,
        "prm.evaluation_run": verdict.evaluation_run,
    }
    if verdict.moved and verdict.previous is not None:
        tags["previous_" + verdict.alias] = str(verdict.previous)
    for key, value in tags.items():
        client.set_model_version_tag(verdict.name, str(verdict.version), key, value)


def _write_event(client: MlflowClient, name: str, event: Mapping[str, Any]) -> None:
    text = store.canonical_json(event)
    if len(text) > _MAX_EVENT and "gates" in event:
        failed = [gate for gate in event["gates"] if not gate[3]][:10]
        text = store.canonical_json({**event, "gates": failed, "gates_left_out": len(event["gates"]) - len(failed)})
    # Under the promotion lock, so numbers are not given twice.
    number = sum(key.startswith(_EVENT) for key in registered_model(client, name).tags) + 1
    client.set_registered_model_tag(name, f"{_EVENT}{number:06d}", text)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
