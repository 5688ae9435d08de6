"""prm score: raw rewards, one JSON a line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="prm checkpoint directory")
    parser.add_argument("--user", help="user id; not needed for a method that does not look at users")
    parser.add_argument("--prompt", help="the user's message")
    parser.add_argument("--response", help="the response to score")
    parser.add_argument(
        "--input",
        metavar="FILE.jsonl",
        help='rows {"user", "prompt", "response"} (prompt: a text or chat messages) instead; - reads stdin',
    )
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per forward (default 16)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the backbone (default: as trained)")
    parser.add_argument("--allow-code", action="append", default=[], metavar="PREFIX", help="allow classes outside prm")


def run(args: argparse.Namespace) -> int:
    from prm.errors import UserError

    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: a number of 1 or more is needed")
    single = (args.prompt, args.response)
    if args.input and any(v is not None for v in (*single, args.user)):
        raise UserError("--input stands alone: leave --user, --prompt and --response out")
    if not args.input and None in single:
        raise UserError("give --prompt and --response (and --user), or --input FILE.jsonl")
    rows = _read(args.input) if args.input else [_row("--prompt/--response", 1, vars(args))]

    import torch

    from prm.checkpoints import open_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = open_checkpoint(args.checkpoint, device=device, dtype=args.dtype, allow_code=args.allow_code)
    if checkpoint.head.user_dim:
        if missing := [n for n, row in enumerate(rows, 1) if not row["user"]]:
            raise UserError(f"row {missing[0]} names no user: {type(checkpoint.head).__name__} needs --user")
        for row in rows:
            checkpoint.users.index(row["user"])
    rewards = checkpoint.rewards(
        [r["user"] for r in rows], [(r["prompt"], r["response"]) for r in rows], args.batch_size
    )
    for row, reward in zip(rows, rewards, strict=True):
        print(
            json.dumps({"user": row["user"], "response": row["response"], "reward": float(reward)}, ensure_ascii=False)
        )
    if checkpoint.formatter.cut_rows:
        print(f"prm: {checkpoint.formatter.cut_rows} prompts were cut from the left to fit", file=sys.stderr)
    return 0


def _row(file: str, line: int, row: Any) -> dict[str, Any]:
    from prm.errors import UserError
    from prm.records import prompt_problem, text_problem, user_prompt

    if not isinstance(row, dict):
        raise UserError(f"{file}:{line}: a JSON object with user, prompt and response is needed")
    prompt = row.get("prompt")
    if isinstance(prompt, str) and not text_problem(prompt):
        prompt = user_prompt(prompt)
    for name, reason in (("prompt", prompt_problem(prompt)), ("response", text_problem(row.get("response")))):
        if reason:
            raise UserError(f"{file}:{line}: {name}: {reason}")
    user = row.get("user")
    if user is not None and not isinstance(user, str):
        raise UserError(f"{file}:{line}: user: has type {type(user).__name__}, a text is needed")
    return {"user": user, "prompt": prompt, "response": row["response"]}


def _read(path: str) -> list[dict[str, Any]]:
    from prm.errors import UserError

    try:
        if path == "-":
            lines = sys.stdin.read().splitlines()
        else:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(path, number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg})") from error
    if not rows:
        raise UserError(f"{path} holds no rows")
    return rows
