"""Best-of-N: sample N answers from the language model, keep the one with the highest reward.

    y* = argmax over y_1..y_N ~ pi(. | x) of r_u(x, y_i)

The candidates do not depend on the reward, so several reward models choose among the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prm.inference.chat import ChatModel
from prm.records import Prompt


@dataclass(frozen=True, slots=True)
class Candidates:
    """N candidate answers to one prompt, in the order they were sampled.

    Attributes:
        texts: the answers; equal ones may occur.
        length_limited: how many of them ended at the token limit.
        cut: prompt tokens that did not fit the language model's context.
    """

    texts: tuple[str, ...]
    length_limited: int = 0
    cut: int = 0


def sample_candidates(
    chat: ChatModel, prompts: Sequence[Prompt], seeds: Sequence[int], *, n: int, temperature: float
) -> list[Candidates]:
    """N answers to every prompt, in one batch."""
    fitted = [chat.fit(prompt) for prompt in prompts]
    answers = chat.answers(fitted, seeds, n=n, temperature=temperature)
    return [
        Candidates(tuple(g.text.strip() for g in row), sum(g.finish_reason == "length" for g in row), prompt.cut)
        for row, prompt in zip(answers, fitted, strict=True)
    ]


def choose(scores_n: Sequence[float] | np.ndarray) -> int:
    """Index of the highest score, the first among equals.

    Raises:
        ValueError: no scores, or one is not finite.
    """
    scores = np.asarray(scores_n, dtype=float)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise ValueError("a choice needs at least one score, all of them finite")
    return int(scores.argmax())


def chance_win(n: int) -> float:
    """How often the best of N beats one further answer when the reward has no skill: N / (N + 1).

    N + 1 exchangeable scores without ties: the highest is among the N with this probability.
    """
    if n < 1:
        raise ValueError(f"best of {n}: at least one candidate is needed")
    return n / (n + 1)
