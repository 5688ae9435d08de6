"""`prm register`: a checkpoint becomes a version of a registered model."""

from __future__ import annotations

import argparse
import dataclasses
import json

from prm.tracking.client import open_client, reachable, resolve_tracking_uri
from prm.tracking.registry import register


def add_tracking_uri(parser: argparse.ArgumentParser) -> None:
    """The option every registry command has."""
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="MLflow's address (default: $MLFLOW_TRACKING_URI, else sqlite:///runs/mlflow.db)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="prm checkpoint directory")
    parser.add_argument("--name", required=True, help="name of the registered model, made when missing")
    parser.add_argument("--run", metavar="RUN_ID", help="run that keeps the files (default: the training run)")
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    uri = resolve_tracking_uri(args.tracking_uri)
    client = open_client(uri, timeout_seconds=30, wanted_by="prm register")
    with reachable(uri):
        made = register(client, uri, args.checkpoint, args.name, args.run)
    if args.json:
        print(json.dumps(dataclasses.asdict(made)))
    else:
        known = " (it was registered before)" if made.existed else ""
        print(f"{made.name} version {made.version}{known}: checkpoint {made.fingerprint[:12]}, run {made.run_id}")
    return 0
