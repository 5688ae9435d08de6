"""prm features: compute a frozen backbone's features of a dataset ahead of training."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING

from prm import extras
from prm.errors import UserError
from prm.records import TRAIN_SPLITS

if TYPE_CHECKING:
    from prm.frozen_features import FrozenBackbone
    from prm.inference.engines.vllm import VllmFeatures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", metavar="DATA", help="dataset directory")
    add("--backbone", required=True, metavar="MODEL", help="pip:PACKAGE, a directory or a hub id; as in training")
    add("--revision", metavar="REV", help="of a hub id")
    add("--pooling", choices=("last", "mean", "first"), default="last", help="which hidden state (default: last)")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", choices=dtypes, default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere (default: auto)")
    add("--max-length", type=int, default=512, metavar="N", help="most tokens of prompt and response (default: 512)")
    add("--engine", choices=("transformers", "vllm"), default="transformers", help="(default: transformers)")
    splits = f"comma-separated, of {', '.join(TRAIN_SPLITS)} (default: %(default)s, what training reads)"
    add("--splits", default="train,validation", metavar="LIST", help=splits)
    add("--batch-size", type=int, default=16, metavar="N", help="sequences per forward of transformers (default: 16)")
    memory = "share of a GPU's memory for vLLM (default: %(default)s)"
    add("--gpu-memory-utilization", type=float, default=0.85, metavar="X", help=memory)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the features of all the splits are in the cache."""
    splits = _splits(args.splits)
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: a number of 1 or more is needed")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise UserError(f"--gpu-memory-utilization {args.gpu_memory_utilization}: a share between 0 and 1 is needed")
    if args.engine == "vllm":
        extras.require("eval", wanted_by="prm features --engine vllm")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("prm").setLevel(logging.INFO)

    from data_modules.preference_data import LOADER_SPLITS, PreferenceDataModule
    from prm.feature_cache import features_path, open_features
    from prm.frozen_features import FrozenBackbone, backbone_features

    # The data module of training itself: texts, their order and their tokens are then the same.
    module = PreferenceDataModule(args.data, args.backbone, args.revision, max_length=args.max_length)
    module.setup("test" if "test_seen" in splits else "fit")
    loaders = {split: loader for loader, split in LOADER_SPLITS.items()}
    tokens = {split: module.split_tokens(loaders[split]) for split in splits}
    sequences = {split: found.sequences for split, found in tokens.items() if found is not None}
    for split in splits:
        if split not in sequences:
            print(f"warning: the split {split} has no pairs", file=sys.stderr)
    if module.counts["cut_sequences"]:
        print(f"prm: {module.summary()}", file=sys.stderr)

    frozen = FrozenBackbone.find(
        args.backbone, args.revision, dtype=args.dtype, pooling=args.pooling, engine=args.engine
    )
    keys = {
        split: frozen.key(rows, data_fingerprint=module.fingerprint, formatter=module.formatter)
        for split, rows in sequences.items()
    }
    found = {split: array for split, key in keys.items() if (array := open_features(key)) is not None}
    missing = {split: rows for split, rows in sequences.items() if split not in found}
    computed = backbone_features(
        args.backbone,
        frozen.revision,
        data=module.directory,
        sequences=missing,
        formatter=module.formatter,
        pooling=args.pooling,
        dtype=frozen.dtype,
        engine=args.engine,
        batch_size=args.batch_size,
        open_engine=_vllm(missing, args.gpu_memory_utilization) if args.engine == "vllm" else None,
    )
    rows = {
        split: {
            "path": str(features_path(key)),
            "texts": key["sequences"],
            "width": int((found | computed)[split].shape[1]),
            "was_there": split in found,
        }
        for split, key in keys.items()
    }
    if args.json:
        print(json.dumps({"data": str(module.directory.path), **asdict(frozen), "splits": rows}))
        return 0
    for split, row in rows.items():
        what = "was there" if row["was_there"] else "computed"
        print(f"{split}: {row['texts']} texts, {row['width']} wide, {what}: {row['path']}")
    return 0


def _splits(wanted: str) -> list[str]:
    splits = list(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    if odd := [name for name in splits if name not in TRAIN_SPLITS] or ([] if splits else [""]):
        raise UserError(f"--splits {wanted!r}: {odd[0]!r} is none of {', '.join(TRAIN_SPLITS)}")
    return splits


def _vllm(
    sequences: Mapping[str, Sequence[Sequence[int]]], gpu_memory_utilization: float
) -> Callable[[FrozenBackbone], AbstractContextManager[VllmFeatures]]:
    """Opens a vLLM engine with room for the longest of these sequences."""

    def opened(frozen: FrozenBackbone) -> VllmFeatures:
        from prm.inference.engines.vllm import VllmFeatures

        return VllmFeatures(
            frozen.name,
            revision=frozen.revision,
            dtype=frozen.dtype,
            pooling=frozen.pooling,
            max_model_len=max(len(s) for rows in sequences.values() for s in rows),
            gpu_memory_utilization=gpu_memory_utilization,
        )

    return opened
