"""`prm history`: every promotion, refusal and rollback of a registered model."""

from __future__ import annotations

import argparse
import json
from typing import Any

from prm.commands.register import add_tracking_uri
from prm.tracking.client import open_client, reachable, resolve_tracking_uri
from prm.tracking.promotion import history
from prm.tracking.registry import registered_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="registered model")
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="print aliases and events as JSON")


def run(args: argparse.Namespace) -> int:
    uri = resolve_tracking_uri(args.tracking_uri)
    client = open_client(uri, timeout_seconds=30, wanted_by="prm history")
    with reachable(uri):
        events = history(client, args.name)
        aliases = {alias: int(version) for alias, version in registered_model(client, args.name).aliases.items()}
    if args.json:
        print(json.dumps({"name": args.name, "aliases": aliases, "events": events}))
        return 0
    for event in events:
        print(event_line(event))
    print("now: " + (", ".join(f"{alias} = version {v}" for alias, v in sorted(aliases.items())) or "no alias is set"))
    return 0


def event_line(event: dict[str, Any]) -> str:
    """One event as a line."""
    text = f"{event['when']}  {event['who']}  {event['action'].replace('_', ' ')}  {event['alias']}"
    if event["action"] == "rolled_back":
        return f"{text}  version {event['from']} -> {event['version']}"
    gates = event["gates"]
    text += f"  version {event['version']}  {sum(gate[3] for gate in gates)} of {len(gates)} gates passed"
    text += f"  policy {event['policy_sha256'][:12]}  run {event['evaluation_run']}"
    failed = [
        f"{metric} {'missing' if figure is None else f'{figure:.4f}'} {rule}"
        for metric, figure, rule, passed in gates
        if not passed
    ]
    return text + (f"  failed: {'; '.join(failed)}" if failed else "")
