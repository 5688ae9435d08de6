"""prm adapt: new users on their support pairs, the shared parameters frozen, all users in one fit."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="prm checkpoint directory, such as RUN/checkpoints/best")
    parser.add_argument("--data", required=True, metavar="DIR", help="dataset directory with `support` pairs")
    parser.add_argument(
        "--out", required=True, metavar="CHECKPOINT2", help="where the checkpoint with the new users goes"
    )
    parser.add_argument(
        "--support", type=int, metavar="N", help="use the first N support pairs of each user (default: all)"
    )
    parser.add_argument("--steps", type=int, default=500, help="steps of Adam (default 500, as LoRE's code)")
    parser.add_argument("--learning-rate", type=float, help="of Adam (default: the method's own; 0.1 in LoRE's code)")
    parser.add_argument(
        "--optimizer",
        choices=("auto", "newton", "adam"),
        default="auto",
        help="newton: damped second-order steps to convergence, for LoRE and PReF; adam: --steps of --learning-rate; "
        "auto: newton where it fits, else adam. VPL encodes its users and takes auto alone",
    )
    parser.add_argument(
        "--precision",
        type=float,
        help="Gaussian prior around the start, as an inverse variance (default: the method's own; PReF's comes from "
        "the training users)",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per forward of the backbone (default 16)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --out")
    parser.add_argument("--allow-code", action="append", default=[], metavar="PREFIX", help="allow classes outside prm")


def run(args: argparse.Namespace) -> int:
    from prm import store
    from prm.dataset_dir import DatasetDir
    from prm.errors import UserError

    for option in ("support", "steps", "batch_size"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: a number of 1 or more is needed")
    rate = args.learning_rate
    if (rate is not None and not rate > 0) or (args.precision is not None and not args.precision >= 0):
        raise UserError("--learning-rate must be positive and --precision not negative")
    store.refuse_existing(args.out, overwrite=args.overwrite)
    data = DatasetDir.open(args.data)

    import torch

    from prm.adaptation import adapt_users
    from prm.checkpoints import open_checkpoint, with_users
    from prm.statistics import mean_over_users, preference_credit
    from prm.user_states import UserStates

    pairs, dropped = [], 0
    taken: dict[str, int] = defaultdict(int)
    for pair in data.pairs(["support"]):
        if args.support is not None and taken[pair.user_id] >= args.support:
            dropped += 1
            continue
        taken[pair.user_id] += 1
        pairs.append(pair)
    if not pairs:
        raise UserError(f"{args.data} has no support pairs: there is nobody to adapt")
    started = time.monotonic()
    checkpoint = open_checkpoint(
        args.checkpoint, device="cuda" if torch.cuda.is_available() else "cpu", allow_code=args.allow_code
    )
    head = checkpoint.head
    if crossing := sorted(user for user in taken if checkpoint.users.has(user)):
        raise UserError(
            f"{len(crossing)} users of {args.data} are in the checkpoint already ({crossing[0]}, ...): new users only"
        )
    user_ids = list(taken)
    texts = {(store.fingerprint(p.prompt), text): (p.prompt, text) for p in pairs for text in (p.chosen, p.rejected)}
    rows = {key: row for row, key in enumerate(texts)}
    # Each text once, also in what the formatter counts as cut.
    features = checkpoint.features(list(texts.values()), args.batch_size, label="features of the support pairs")
    keys = [store.fingerprint(p.prompt) for p in pairs]
    chosen = features[[rows[k, p.chosen] for k, p in zip(keys, pairs, strict=True)]]
    rejected = features[[rows[k, p.rejected] for k, p in zip(keys, pairs, strict=True)]]
    place = {user: row for row, user in enumerate(user_ids)}
    index = torch.tensor([place[p.user_id] for p in pairs])
    head.cpu()
    start = head.new_users(len(user_ids), checkpoint.users.states)
    precision = head.prior_precision(checkpoint.users.states) if args.precision is None else args.precision
    fit_started = time.monotonic()
    fit = adapt_users(
        head,
        chosen,
        rejected,
        index,
        start,
        optimizer=args.optimizer,
        steps=args.steps,
        learning_rate=args.learning_rate,
        precision=precision,
    )
    states = fit.states
    fit_seconds = time.monotonic() - fit_started
    with torch.inference_mode():
        score_chosen, score_rejected = (head.scores(f, states[index]).tolist() for f in (chosen, rejected))
    credit = [preference_credit(c, r) for c, r in zip(score_chosen, score_rejected, strict=True)]
    support = mean_over_users([p.user_id for p in pairs], credit)
    adaptation = {
        "data": {
            "name": data.name,
            "fingerprint": data.fingerprint,
            "synthetic": data.synthetic,
            "split_rule": data.split_rule,
        },
        "users": len(user_ids),
        "pairs": len(pairs),
        "fit": fit.how,
        "unfinished_users": fit.unfinished,
        **({"steps": args.steps, "learning_rate": rate or head.adaptation_lr} if fit.how == "adam" else {}),
        "precision": precision.tolist() if isinstance(precision, torch.Tensor) else precision,
        "support_accuracy": support.mean,
        "cut_rows": checkpoint.formatter.cut_rows,
    }
    with_users(
        args.checkpoint,
        args.out,
        UserStates(user_ids, states),
        {"adaptation": adaptation},
        allow_code=args.allow_code,
        overwrite=args.overwrite,
    )
    report = {
        "checkpoint": str(args.out),
        **adaptation,
        "split_warning": data.split_warning,
        "pairs_left_out": dropped,
        "fit_seconds": round(fit_seconds, 3),
        "seconds": round(time.monotonic() - started, 3),
    }
    if data.split_warning:
        print(f"warning: {data.split_warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(report))
    else:
        note = f" ({fit.how})" if head.user_dim else f" ({type(head).__name__} ignores users: nothing was fitted)"
        if fit.unfinished:
            note += f", {fit.unfinished} of them not to the end"
        print(
            f"{len(user_ids)} users adapted on {len(pairs)} support pairs in {fit_seconds:.2f} s{note}; "
            f"accuracy on those pairs {100 * support.mean:.1f} %; {dropped} pairs left out by --support, "
            f"{checkpoint.formatter.cut_rows} prompts cut from the left"
        )
        print(f"checkpoint: {args.out} (reloaded, same scores)")
    sys.stdout.flush()
    return 0
