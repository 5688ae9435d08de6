"""`prm rollback`: give an alias back to the version that held it before."""

from __future__ import annotations

import argparse
import json

from prm.commands.register import add_tracking_uri
from prm.tracking.client import open_client, reachable, resolve_tracking_uri
from prm.tracking.promotion import rollback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="registered model")
    parser.add_argument("--alias", default="champion", help="alias to move back (default: champion)")
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    uri = resolve_tracking_uri(args.tracking_uri)
    client = open_client(uri, timeout_seconds=30, wanted_by="prm rollback")
    with reachable(uri):
        left, restored = rollback(client, args.name, alias=args.alias)
    if args.json:
        print(json.dumps({"name": args.name, "alias": args.alias, "from": left, "version": restored}))
    else:
        print(f"{args.alias} of {args.name} is version {restored} again (was {left})")
    return 0
