"""prm export: the weights of a run as a prm checkpoint, or as a model that plain transformers opens."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prm.checkpoints import RewardCheckpoint
    from prm.export.sources import Source

_EPILOG = """what is exported from:
  a run directory    checkpoints/best, or what --which says; a run that was killed early has resume states alone
  a prm checkpoint   such as RUN/checkpoints/best, or what `prm adapt` wrote
  a ZeRO directory   DeepSpeed's own, from trainer.save_checkpoint. Its files are pickles: --trust-pickle

what lies in --out:
  --format prm       a prm checkpoint: adapter, head, users, tokenizer
  --format hf        config.json, model.safetensors and the tokenizer: the backbone with the LoRA adapter merged into
                     its weights (without an adapter, a copy of the backbone), which
                     transformers.AutoModel/AutoModelForCausalLM.from_pretrained opens without peft;
                     reward/head.safetensors and reward/users/; README.md and prm_export.json, which say how to score
  --format hf-classifier
                     the merged model as AutoModelForSequenceClassification with one label, whose logit is the reward
                     of --user (or of a method that does not look at users); for causal backbones with pooling last and
                     rewards that are linear in the feature

each is reopened before it is kept: a checkpoint must give the scores, and a merged model the features, of what it was
made from"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("source", metavar="RUN_OR_ZERO_DIR", help="run directory, prm checkpoint or ZeRO directory")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the export goes")
    parser.add_argument("--format", choices=["prm", "hf", "hf-classifier"], default="prm", help="(default: prm)")
    parser.add_argument(
        "--which", choices=["best", "last", "resume"], help="of a run directory (default: best); resume: newest state"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the backbone's weights (default: as trained); not for a prm checkpoint that is there already",
    )
    parser.add_argument("--user", metavar="ID", help="whose reward, for hf-classifier and a method that looks at users")
    parser.add_argument("--run", metavar="DIR", help="run directory of a ZeRO directory (default: the one above it)")
    parser.add_argument(
        "--trust-pickle", action="store_true", help="open the pickles of a ZeRO directory, which can run any code"
    )
    parser.add_argument("--allow-code", action="append", default=[], metavar="PREFIX", help="allow classes outside prm")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --out")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the export was reopened and is the same model."""
    from prm import store
    from prm.errors import UserError

    store.refuse_existing(args.out, overwrite=args.overwrite)

    from prm.export.sources import find_source, refuse_overlap

    if args.user is not None and args.format != "hf-classifier":
        raise UserError(f"--user belongs to --format hf-classifier; {args.format} keeps all users: leave it out")
    source = find_source(args.source, which=args.which, run=args.run)
    refuse_overlap(args.out, source.path)
    report = {"out": args.out, "format": args.format, "source": source.kind, "directory": str(source.path)}
    if args.format == "prm":
        report |= _to_prm(args, source)
    else:
        report |= _to_hugging_face(args, source)
    if args.json:
        print(json.dumps(report))
        return 0
    step = "" if report["step"] is None else f", step {report['step']}"
    print(f"{report['class_path']} of {source.path}{step}: {report['users']} users, backbone in {report['dtype']}")
    if args.format == "prm":
        print(f"checkpoint: {args.out} (reopened, same scores)")
    else:
        kind = "reward" if args.format == "hf-classifier" else "feature"
        gap = report[f"largest_{kind}_difference"]
        print(f"model: {args.out} (reopened by transformers, largest difference of a {kind} {gap:.1e}); see README.md")
    return 0


def _to_prm(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    from prm.errors import UserError
    from prm.export.prm_format import copy_checkpoint, write_checkpoint
    from prm.export.rebuild import rebuild

    if source.kind == "checkpoint":
        if args.dtype:
            raise UserError("--dtype does not change a prm checkpoint, which is copied: leave it out, or --format hf")
        kept = copy_checkpoint(source.path, args.out, allow_code=args.allow_code, overwrite=args.overwrite)
    else:
        live = rebuild(source, dtype=args.dtype, allow_code=args.allow_code, trust_pickle=args.trust_pickle)
        kept = write_checkpoint(live, args.out, overwrite=args.overwrite)
    return _summary(kept)


def _to_hugging_face(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    from pathlib import Path

    from prm.checkpoints import open_checkpoint
    from prm.export.hugging_face import export_hugging_face
    from prm.export.prm_format import check_scores
    from prm.export.rebuild import rebuild
    from prm.export.sources import refuse_overlap

    if source.kind == "checkpoint":
        live = open_checkpoint(source.path, dtype=args.dtype, allow_code=args.allow_code)
        if args.dtype in (None, live.info["dtype"]):
            check_scores(live, source.path)
    else:
        live = rebuild(source, dtype=args.dtype, allow_code=args.allow_code, trust_pickle=args.trust_pickle)
    if Path(live.backbone.name).is_dir():
        refuse_overlap(args.out, live.backbone.name)
    if args.format == "hf-classifier":
        from prm.export.classifier import export_classifier

        facts = export_classifier(live, args.out, user=args.user, overwrite=args.overwrite)
    else:
        facts = export_hugging_face(live, args.out, overwrite=args.overwrite)
    kept = ("largest_feature_difference", "largest_reward_difference", "user", "chat_template_renders_as_trained")
    return {**_summary(live), **{key: facts[key] for key in kept if key in facts}}


def _summary(model: RewardCheckpoint) -> dict[str, Any]:
    head = type(model.head)
    return {
        "class_path": f"{head.__module__}.{head.__qualname__}",
        "step": model.info.get("step"),
        "users": len(model.users),
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "data_fingerprint": model.info.get("data_fingerprint"),
    }
