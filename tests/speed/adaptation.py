"""Fitting new users all at once, as `prm adapt` does, against one by one with Adam: users per second in one run.

    python tests/speed/adaptation.py                          # 100,000 LoRE users, d 576, B 8, 20 pairs each
    python tests/speed/adaptation.py --method PReF --users 10000
    python tests/speed/adaptation.py --networks               # all users' MPU networks in one product, or user by user

Features are made up, and made in memory: reading them from a disk is not in the time. Users are handed over in chunks,
as differences of features, so that memory is bounded by a chunk. One by one, a sample of users is timed and the rest
is taken to be alike; that loop is Adam of PyTorch over 500 steps, as the published code has it. Both minimise the same
penalised loss, whose mean over the sample is printed for both.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional

from prm.adaptation import adapt_users
from prm.reward_models import MPU, LoRE, PReF

STEPS = 500


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="LoRE", choices=("LoRE", "PReF"))
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=20, help="of each user")
    parser.add_argument("--dim", type=int, default=576, help="d, width of the features")
    parser.add_argument("--bases", type=int, default=8, help="B")
    parser.add_argument("--precision", type=float, default=0.1, help="of the prior")
    parser.add_argument("--chunk", type=int, default=10_000, help="users handed over at once")
    parser.add_argument("--sample", type=int, default=20, help="users that are fitted one by one")
    parser.add_argument("--networks", action="store_true", help="measure MPU's networks instead")
    return parser.parse_args()


def one_by_one(head: LoRE | PReF, gap_npd: Tensor, precision: float) -> Tensor:
    """States of users fitted one after another on differences [U, n, d], from 0."""
    states = []
    for gap_nd in gap_npd:
        projected = head.project(gap_nd).detach()
        z = torch.zeros(head.user_dim, requires_grad=True)
        adam = torch.optim.Adam([z], lr=0.1)
        for _ in range(STEPS):
            adam.zero_grad()
            loss = -functional.logsigmoid((head.mixing(z) * projected).sum(-1)).sum() + precision / 2 * z.square().sum()
            loss.backward()
            adam.step()
        states.append(z.detach())
    return torch.stack(states)


def penalised(head: LoRE | PReF, gap_npd: Tensor, states_uz: Tensor, precision: float) -> float:
    delta = (head.mixing(states_uz)[:, None] * head.project(gap_npd)).sum(-1)
    loss = -functional.logsigmoid(delta).sum(-1) + precision / 2 * states_uz.square().sum(-1)
    return float(loss.mean())


def users(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    head = LoRE(args.dim, args.bases) if args.method == "LoRE" else PReF(args.dim, args.bases, start="random")
    head.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    seconds, done, unfinished = 0.0, 0, 0
    first: tuple[Tensor, Tensor] | None = None
    while done < args.users:
        number = min(args.chunk, args.users - done)
        gap = torch.randn(number * args.pairs, args.dim, generator=generator)
        index = torch.arange(number).repeat_interleave(args.pairs)
        started = time.perf_counter()
        fit = adapt_users(head, gap, None, index, torch.zeros(number, head.user_dim), precision=args.precision)
        seconds += time.perf_counter() - started
        unfinished += fit.unfinished
        if first is None:
            sample = min(args.sample, number)
            first = gap.unflatten(0, (number, args.pairs))[:sample].clone(), fit.states[:sample]
        done += number
    assert first is not None
    started = time.perf_counter()
    plain = one_by_one(head, first[0], args.precision)
    each = (time.perf_counter() - started) / len(plain)
    losses = [penalised(head, first[0], states, args.precision) for states in (first[1], plain)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{args.method}, d {args.dim}, {args.bases} numbers a user, {args.pairs} pairs each; {fit.how}")
    print(f"together:   {args.users} users in {seconds:.2f} s, {unfinished} unfinished; peak memory {memory:.1f} GiB")
    print(f"one by one: {each * 1e3:.0f} ms a user ({len(plain)} users timed), Adam x {STEPS}")
    print(f"ratio {each * args.users / seconds:.0f}; mean penalised loss {losses[0]:.6f} and {losses[1]:.6f}")


def networks(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    number = min(args.users, 200)
    head = MPU(args.dim, 16).requires_grad_(False)
    states = head.initial_users(number, torch.Generator()) + 0.01 * torch.randn(number, head.user_dim)
    texts = torch.randn(number, args.pairs, args.dim)
    times: dict[str, list[float]] = {"together": [], "one by one": []}
    for _ in range(5):
        started = time.perf_counter()
        together = head.projected_scores(texts, states[:, None])
        times["together"].append(time.perf_counter() - started)
        started = time.perf_counter()
        alone = torch.stack([head.projected_scores(t, s[None]) for t, s in zip(texts, states, strict=True)])
        times["one by one"].append(time.perf_counter() - started)
    best = {name: min(seconds) for name, seconds in times.items()}
    gap = float((together - alone).abs().max())
    print(f"MPU, {number} users' networks of 16 hidden units on {args.pairs} texts each, d {args.dim}; best of 5")
    print(f"together {best['together'] * 1e3:.1f} ms, one by one {best['one by one'] * 1e3:.1f} ms")
    print(f"ratio {best['one by one'] / best['together']:.1f}; largest gap of a reward {gap:.1e}")


if __name__ == "__main__":
    args = arguments()
    networks(args) if args.networks else users(args)
    sys.exit(0)
