"""The sources that `prm data build` knows: for each its options on the command line, and what builds it.

A new source is one entry of SOURCES. Modules are imported when their source is chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from data_modules.bad_rows import POLICIES
from prm.dataset_dir import SPLIT_RULES, DatasetDir

if TYPE_CHECKING:
    from data_modules.user_splits import SplitOptions


@dataclass(frozen=True)
class Source:
    """One source of `prm data build`.

    Attributes:
        help: what it is, in a line.
        add_arguments: adds its options; --out, --overwrite, --seed and --json are common to all.
        build: builds the dataset directory from the parsed options.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    build: Callable[[argparse.Namespace], DatasetDir]


def _options(kind: type[Any], args: argparse.Namespace) -> Any:
    """An options dataclass from the command line's options of the same names."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def _bad_rows_argument(parser: argparse.ArgumentParser) -> None:
    text = "skip: set bad rows aside in DIR.bad_rows.jsonl (default: error)"
    parser.add_argument("--bad-rows", choices=POLICIES, default="error", help=text)


def _share_arguments(parser: argparse.ArgumentParser, defaults: Any, parts: str) -> None:
    """Shares and numbers that all sources of real users have; `parts` is what a share is a share of."""
    add = parser.add_argument
    default = defaults.adapt_fraction
    add("--adapt-fraction", type=float, default=default, help=f"share of users kept as new ones (default: {default})")
    add("--adapt-users", type=int, metavar="N", help="number of users kept as new ones, in place of the share")
    for name in ("validation", "test-seen"):
        default = getattr(defaults, f"{name.replace('-', '_')}_fraction")
        add(f"--{name}-fraction", type=float, default=default, help=f"share of {parts} (default: {default})")


# Pref-LaMP


def _pref_lamp_arguments(parser: argparse.ArgumentParser) -> None:
    from data_modules.lamp_splits import PrefLampOptions as Options
    from prm.retrieval import DEFAULT_ENCODER

    add = parser.add_argument
    add("--questions", required=True, metavar="FILE", help="LaMP-5 questions file (.json, .gz or .xz)")
    add("--outputs", required=True, metavar="FILE", help="LaMP-5 outputs file with the gold titles")
    _bad_rows_argument(parser)
    add("--top-k", type=int, default=Options.top_k, help="draw the rejected title from the k nearest (default: 10)")
    _share_arguments(parser, Options, "papers")
    add("--support", type=int, metavar="N", help="support papers a new user (default: half of the profile)")
    add("--test-per-user", type=int, metavar="N", help="most test papers a new user (default: all)")
    add("--max-users", type=int, metavar="N", help="build from N users drawn by seed (default: all)")
    add("--encoder", default=DEFAULT_ENCODER, help=f"sentence encoder of the abstracts (default: {DEFAULT_ENCODER})")
    add("--encoder-revision", metavar="REV", help="revision of an encoder from the hub")
    add("--encoder-batch-size", type=int, default=16, metavar="N", help="abstracts a forward pass (default: 16)")
    add("--encoder-max-length", type=int, default=128, metavar="N", help="tokens read of an abstract (default: 128)")
    add("--licence", default="as the source's", help="terms of the files, kept in dataset.json")


def _build_pref_lamp(args: argparse.Namespace) -> DatasetDir:
    from data_modules.lamp_splits import PrefLampOptions
    from data_modules.pref_lamp import build_pref_lamp
    from prm.retrieval import SentenceEncoder

    encoder = SentenceEncoder(
        args.encoder,
        revision=args.encoder_revision,
        max_length=args.encoder_max_length,
        batch_size=args.encoder_batch_size,
    )
    return build_pref_lamp(
        args.questions,
        args.outputs,
        args.out,
        encoder,
        _options(PrefLampOptions, args),
        bad_rows=args.bad_rows,
        licence=args.licence,
        overwrite=args.overwrite,
    )


# Synthetic


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


def _build_synthetic(args: argparse.Namespace) -> DatasetDir:
    from data_modules.synthetic import SyntheticOptions, build_synthetic

    return build_synthetic(args.out, _options(SyntheticOptions, args), overwrite=args.overwrite)


# Real choices of users


def _split_arguments(parser: argparse.ArgumentParser, defaults: SplitOptions) -> None:
    add = parser.add_argument
    _share_arguments(parser, defaults, "what the split rule keeps together")
    add("--support", type=int, metavar="N", help="support pairs a new user, the rest test (default: half)")
    add(
        "--min-pairs",
        type=int,
        default=defaults.min_pairs,
        metavar="N",
        help=f"drop users with fewer pairs (default: {defaults.min_pairs})",
    )
    _bad_rows_argument(parser)


def _llmfao_arguments(parser: argparse.ArgumentParser) -> None:
    from data_modules.llmfao import DEFAULTS, LICENCE, SPLIT_RULES

    add = parser.add_argument
    add("--comparisons", required=True, metavar="FILE", help="crowd-comparisons.csv: the workers' votes")
    add("--pairs", required=True, metavar="FILE", help="pairs-crowd.jsonl: prompts and answers")
    rules = "what never crosses a user's splits; there are 13 prompts, so `prompt` leaves little (default: pair)"
    add("--split-rule", choices=SPLIT_RULES, default=DEFAULTS.split_rule, help=rules)
    _split_arguments(parser, DEFAULTS)
    add("--licence", default=LICENCE, help="terms of the files, kept in dataset.json (default: %(default)s)")


def _build_llmfao(args: argparse.Namespace) -> DatasetDir:
    from data_modules.llmfao import build_llmfao
    from data_modules.user_splits import SplitOptions

    return build_llmfao(
        args.comparisons,
        args.pairs,
        args.out,
        _options(SplitOptions, args),
        bad_rows=args.bad_rows,
        licence=args.licence,
        overwrite=args.overwrite,
    )


def _pairs_arguments(parser: argparse.ArgumentParser) -> None:
    from data_modules.user_splits import SplitOptions

    add = parser.add_argument
    add(
        "--path",
        required=True,
        metavar="FILE|DIR|ID",
        help="Parquet or JSON-lines file (.gz, .xz too), a directory of them, or OWNER/NAME on the Hugging Face hub",
    )
    add("--user-column", required=True, metavar="C", help="whose choice the row is")
    add("--prompt-column", metavar="C", help="text or chat messages (default: `prompt`, else implicit)")
    add("--chosen-column", default="chosen", metavar="C", help="text or messages (default: chosen)")
    add("--rejected-column", default="rejected", metavar="C", help="text or messages (default: rejected)")
    add("--implicit-prompt", action="store_true", help="take the prompt from the conversations in chosen and rejected")
    add("--dialog-column", metavar="C", help="which of the user's dialogs the row belongs to")
    add("--margin-column", metavar="C", help="strength of the preference, a number")
    add("--hf-split", metavar="NAME", help="split of a dataset that has several; all: every one")
    add("--hf-config", metavar="NAME", help="configuration of a dataset on the hub")
    add("--hf-revision", metavar="REV", help="revision of a dataset on the hub")
    rules = "what never crosses a user's splits (default: dialog with a --dialog-column, else prompt)"
    add("--split-rule", choices=SPLIT_RULES, help=rules)
    _split_arguments(parser, SplitOptions())
    add("--name", help="of the dataset (default: the path's last part)")
    add("--licence", default="as the source's", help="terms of the rows, kept in dataset.json")


def _build_pairs(args: argparse.Namespace) -> DatasetDir:
    from data_modules.pair_table import PairColumns, build_pairs
    from data_modules.user_splits import SplitOptions

    args.split_rule = args.split_rule or ("dialog" if args.dialog_column else "prompt")
    columns = PairColumns(
        user=args.user_column,
        prompt=args.prompt_column,
        chosen=args.chosen_column,
        rejected=args.rejected_column,
        implicit_prompt=args.implicit_prompt,
        dialog=args.dialog_column,
        margin=args.margin_column,
    )
    return build_pairs(
        args.path,
        columns,
        args.out,
        _options(SplitOptions, args),
        split=args.hf_split,
        config=args.hf_config,
        revision=args.hf_revision,
        bad_rows=args.bad_rows,
        name=args.name,
        licence=args.licence,
        overwrite=args.overwrite,
    )


SOURCES: dict[str, Source] = {
    "pref-lamp": Source("Pref-LaMP pairs from LaMP-5 files, by hard negatives", _pref_lamp_arguments, _build_pref_lamp),
    "llmfao": Source("crowd workers' choices between answers of models", _llmfao_arguments, _build_llmfao),
    "synthetic": Source(
        "made-up authors with planted tastes, as mirrored twins", _synthetic_arguments, _build_synthetic
    ),
    "pairs": Source("any Parquet, JSON-lines or Hugging Face set of pairs with users", _pairs_arguments, _build_pairs),
}
