"""`prm promote`: move an alias to a version when every gate of the policy passes."""

from __future__ import annotations

import argparse
import json

from prm import store
from prm.commands.register import add_tracking_uri
from prm.tracking.client import open_client, reachable, resolve_tracking_uri
from prm.tracking.gates import GateResult, read_policy
from prm.tracking.promotion import Verdict, check_alias, promote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="registered model")
    parser.add_argument("--version", type=int, required=True, metavar="V", help="version to promote")
    parser.add_argument("--policy", required=True, metavar="YAML", help="gates, such as mlflow/promotion.yaml")
    parser.add_argument("--alias", default="champion", help="alias to move (default: champion)")
    parser.add_argument(
        "--run", metavar="RUN_ID", help="evaluation run to judge by (default: the newest finished one of the version)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the verdict as JSON too, for `prm report --verdict`")
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when all gates passed, 1 when one said no."""
    check_alias(args.alias)
    policy = read_policy(args.policy)
    uri = resolve_tracking_uri(args.tracking_uri)
    client = open_client(uri, timeout_seconds=30, wanted_by="prm promote")
    with reachable(uri):
        verdict = promote(client, args.name, args.version, policy, alias=args.alias, run_id=args.run)
    if args.out:
        store.write_json(args.out, verdict.as_dict())
    if args.json:
        print(json.dumps(verdict.as_dict()))
    else:
        for gate in verdict.gates:
            print(gate_line(gate))
        print(verdict_line(verdict))
    return 0 if verdict.passed else 1


def gate_line(gate: GateResult) -> str:
    """One gate as a line: outcome, metric, figure, rule, and why."""
    figure = "-" if gate.figure is None else f"{gate.figure:.4f}"
    threshold = f" = {gate.threshold:.4f}" if gate.compared and gate.threshold is not None else ""
    remark = gate.reason or gate.note
    return f"{'pass' if gate.passed else 'FAIL'}  {gate.metric} {figure} ({gate.rule}{threshold})" + (
        f"  # {remark}" if remark else ""
    )


def verdict_line(verdict: Verdict) -> str:
    """The outcome as a sentence."""
    failed = sum(not gate.passed for gate in verdict.gates)
    who = f"{verdict.name} version {verdict.version}"
    if failed:
        stays = (
            f"{verdict.alias} stays at version {verdict.previous}" if verdict.previous else f"no {verdict.alias} yet"
        )
        return f"refused: {who} failed {failed} of {len(verdict.gates)} gates; {stays}"
    if not verdict.moved:
        return f"passed: {who} is {verdict.alias} already"
    before = f" (before: version {verdict.previous})" if verdict.previous else ""
    return f"promoted: {who} is {verdict.alias} now{before}"
