"""`prm data build` makes a dataset directory from source files; `prm data check` lists its bad rows."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from prm.dataset_dir import DatasetDir, check_dataset
from prm.records import ADAPT_SPLITS, TRAIN_SPLITS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from data_modules.sources import SOURCES

    actions = parser.add_subparsers(dest="action", required=True, metavar="{build,check}")
    build = actions.add_parser("build", help="make a dataset directory")
    sources = build.add_subparsers(dest="source", required=True, metavar=f"{{{','.join(SOURCES)}}}")
    for name, source in SOURCES.items():
        options = sources.add_parser(name, help=source.help, description=source.help[0].upper() + source.help[1:] + ".")
        source.add_arguments(options)
        options.add_argument("--out", required=True, metavar="DIR", help="dataset directory to write")
        options.add_argument("--overwrite", action="store_true", help="replace DIR when it exists")
        options.add_argument("--seed", type=int, default=0, help="seed of every draw (default: 0)")
        options.add_argument("--json", action="store_true", help="print the result as JSON")
    check = actions.add_parser("check", help="list every bad row: file, line, field, reason")
    check.add_argument("directory", metavar="DIR", help="dataset directory")
    check.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when `check` finds a bad row."""
    return _check(args) if args.action == "check" else _build(args)


def _build(args: argparse.Namespace) -> int:
    from data_modules.bad_rows import quarantine_file
    from data_modules.sources import SOURCES

    data = SOURCES[args.source].build(args)
    if data.info["counts"].get("bad_rows"):
        print(f"warning: bad rows were left out, see {quarantine_file(args.out)}", file=sys.stderr)
    return _report_build(data, args.json)


def _report_build(data: DatasetDir, as_json: bool) -> int:
    counts: dict[str, Any] = dict(data.info["counts"])
    if data.split_warning:
        print(f"warning: {data.split_warning}", file=sys.stderr)
    if as_json:
        facts = {"out": str(data.path), "fingerprint": data.fingerprint, "split_warning": data.split_warning}
        print(json.dumps({**facts, **data.info}))
        return 0
    for split in (*TRAIN_SPLITS, *ADAPT_SPLITS):
        if not counts["pairs"].get(split):
            print(f"warning: the split {split} has no pairs", file=sys.stderr)
    print(f"{data.name}{' (synthetic)' if data.synthetic else ''}: {data.path}")
    for name in ("users", "pairs", "completions"):
        print(f"  {name}: " + (", ".join(f"{key} {number}" for key, number in counts.pop(name).items()) or "none"))
    for name, number in counts.items():
        print(f"  {name.replace('_', ' ')}: {number}")
    return 0


def _check(args: argparse.Namespace) -> int:
    problems = check_dataset(args.directory)
    if args.json:
        print(json.dumps({"sound": not problems, "problems": [asdict(p) for p in problems]}))
        return 1 if problems else 0
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} bad rows in {args.directory}")
        return 1
    rows = sum(pq.read_metadata(file).num_rows for file in Path(args.directory).glob("*.parquet"))
    print(f"{args.directory} is sound: {rows} rows")
    return 0
