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
    actions = parser.add_subparsers(dest="action", required=True, metavar="{build,check}")
    build = actions.add_parser("build", help="make a dataset directory")
    sources = build.add_subparsers(dest="source", required=True, metavar="{pref-lamp,synthetic}")
    pref_lamp = sources.add_parser("pref-lamp", help="Pref-LaMP pairs from LaMP-5 files, by hard negatives")
    _pref_lamp_arguments(pref_lamp)
    synthetic = sources.add_parser("synthetic", help="made-up authors with planted tastes, as mirrored twins")
    _synthetic_arguments(synthetic)
    for source in (pref_lamp, synthetic):
        source.add_argument("--out", required=True, metavar="DIR", help="dataset directory to write")
        source.add_argument("--overwrite", action="store_true", help="replace DIR when it exists")
        source.add_argument("--seed", type=int, default=0, help="seed of every draw (default: 0)")
        source.add_argument("--json", action="store_true", help="print the result as JSON")
    check = actions.add_parser("check", help="list every bad row: file, line, field, reason")
    check.add_argument("directory", metavar="DIR", help="dataset directory")
    check.add_argument("--json", action="store_true", help="print the result as JSON")


def _pref_lamp_arguments(parser: argparse.ArgumentParser) -> None:
    from data_modules.bad_rows import POLICIES
    from data_modules.lamp_splits import PrefLampOptions as Options
    from prm.retrieval import DEFAULT_ENCODER

    add = parser.add_argument
    add("--questions", required=True, metavar="FILE", help="LaMP-5 questions file (.json, .gz or .xz)")
    add("--outputs", required=True, metavar="FILE", help="LaMP-5 outputs file with the gold titles")
    add("--bad-rows", choices=POLICIES, default="error", help="skip: set bad rows aside in DIR.bad_rows.jsonl")
    add("--top-k", type=int, default=Options.top_k, help="draw the rejected title from the k nearest (default: 10)")
    add(
        "--adapt-fraction",
        type=float,
        default=Options.adapt_fraction,
        help="share of users kept as new ones (default: 0.2062)",
    )
    add("--adapt-users", type=int, metavar="N", help="number of users kept as new ones, in place of the share")
    add("--support", type=int, metavar="N", help="support papers a new user (default: half of the profile)")
    add("--test-per-user", type=int, metavar="N", help="most test papers a new user (default: all)")
    for name in ("validation", "test-seen"):
        default = getattr(Options, f"{name.replace('-', '_')}_fraction")
        add(f"--{name}-fraction", type=float, default=default, help=f"share of papers (default: {default})")
    add("--max-users", type=int, metavar="N", help="build from N users drawn by seed (default: all)")
    add("--encoder", default=DEFAULT_ENCODER, help=f"sentence encoder of the abstracts (default: {DEFAULT_ENCODER})")
    add("--encoder-revision", metavar="REV", help="revision of an encoder from the hub")
    add("--encoder-batch-size", type=int, default=16, metavar="N", help="abstracts a forward pass (default: 16)")
    add("--encoder-max-length", type=int, default=128, metavar="N", help="tokens read of an abstract (default: 128)")
    add("--licence", default="as the source's", help="terms of the files, kept in dataset.json")


def _synthetic_arguments(parser: argparse.ArgumentParser) -> None:
    from data_modules.synthetic import SyntheticOptions as Options

    described = {
        "train_users": "training users, an even number: they come as twins",
        "adapt_users": "adaptation users, an even number",
        "pairs_per_user": "pairs of a training user over train, validation and test_seen",
        "support": "support pairs of an adaptation user",
        "test": "test pairs of an adaptation user",
        "axes": "axes of taste, 1 to 4",
        "users_per_pair": "users who judge the same pairs, an even number",
    }
    for name, text in described.items():
        default = getattr(Options, name)
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{text} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when `check` finds a bad row."""
    if args.action == "check":
        return _check(args)
    return _build_pref_lamp(args) if args.source == "pref-lamp" else _build_synthetic(args)


def _build_pref_lamp(args: argparse.Namespace) -> int:
    from data_modules.bad_rows import quarantine_file
    from data_modules.lamp_splits import PrefLampOptions
    from data_modules.pref_lamp import build_pref_lamp
    from prm.retrieval import SentenceEncoder

    options = PrefLampOptions(**{name: getattr(args, name) for name in PrefLampOptions.__dataclass_fields__})
    encoder = SentenceEncoder(
        args.encoder,
        revision=args.encoder_revision,
        max_length=args.encoder_max_length,
        batch_size=args.encoder_batch_size,
    )
    data = build_pref_lamp(
        args.questions,
        args.outputs,
        args.out,
        encoder,
        options,
        bad_rows=args.bad_rows,
        licence=args.licence,
        overwrite=args.overwrite,
    )
    if data.info["counts"].get("bad_rows"):
        print(f"warning: bad rows were left out, see {quarantine_file(args.out)}", file=sys.stderr)
    return _report_build(data, args.json)


def _build_synthetic(args: argparse.Namespace) -> int:
    from data_modules.synthetic import SyntheticOptions, build_synthetic

    options = SyntheticOptions(**{name: getattr(args, name) for name in SyntheticOptions.__dataclass_fields__})
    return _report_build(build_synthetic(args.out, options, overwrite=args.overwrite), args.json)


def _report_build(data: DatasetDir, as_json: bool) -> int:
    counts: dict[str, Any] = dict(data.info["counts"])
    if as_json:
        print(json.dumps({"out": str(data.path), "fingerprint": data.fingerprint, **data.info}))
        return 0
    for split in (*TRAIN_SPLITS, *ADAPT_SPLITS):
        if not counts["pairs"].get(split):
            print(f"warning: the split {split} has no pairs", file=sys.stderr)
    print(f"{data.name}{' (synthetic)' if data.synthetic else ''}: {data.path}")
    for name in ("users", "pairs", "completions"):
        print(f"  {name}: " + ", ".join(f"{key} {number}" for key, number in counts.pop(name).items()))
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
