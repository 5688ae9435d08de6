"""`prm report`: an evaluation as one HTML file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from prm import extras


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("evaluation", metavar="EVALDIR", help="directory that `prm evaluate` wrote")
    parser.add_argument("--out", required=True, metavar="FILE", help="HTML file to write")
    parser.add_argument("--train-run", metavar="RUNDIR", help="run directory of the training, for its curves")
    parser.add_argument(
        "--verdict", metavar="FILE", help="verdict of `prm promote --out` (default: verdict.json in EVALDIR, if there)"
    )
    parser.add_argument("--cases", type=int, default=3, metavar="N", help="cases shown side by side (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the path as JSON")


def run(args: argparse.Namespace) -> int:
    extras.require("report", wanted_by="prm report")
    from prm.report.html import write_report

    out = write_report(
        args.evaluation, args.out, train_run=args.train_run, verdict=args.verdict, num_cases=max(0, args.cases)
    )
    print(json.dumps({"report": str(out)}) if args.json else f"wrote {Path(out).resolve()}")
    return 0
