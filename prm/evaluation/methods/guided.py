"""Guided generation in its simplest form: best-of-N by the user's own reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prm.evaluation.methods.base import Request, Response
from prm.inference.chat import ChatModel
from prm.inference.decoding.best_of_n import Candidates, choose, sample_candidates
from prm.inference.user_reward import UserReward

# Candidates of every request, in order: sampled on the spot, or sampled before and shared by several reward models.
CandidateSource = Callable[[Sequence[Request]], list[Candidates]]


def sampler(chat: ChatModel, *, n: int, temperature: float) -> CandidateSource:
    """A source that samples n candidates from the language model, each request under its own seed."""

    def sample(requests: Sequence[Request]) -> list[Candidates]:
        prompts, seeds = [r.prompt for r in requests], [r.seed for r in requests]
        return sample_candidates(chat, prompts, seeds, n=n, temperature=temperature)

    return sample


@dataclass(frozen=True, slots=True)
class Choice:
    """What best-of-N chose for one request.

    Attributes:
        response: the chosen answer with its reward.
        index: its place among the candidates.
        duplicates: candidates that are equal to an earlier one.
        reward_cut: prompt tokens, over all candidates, that did not fit the reward model's length.
    """

    response: Response
    index: int
    duplicates: int
    reward_cut: int


class Guided:
    """The candidate that the user's reward ranks highest; the first among equals.

    Args:
        candidates: where candidates come from.
        reward: the reward model, with its feature engine attached.
    """

    def __init__(self, candidates: CandidateSource, reward: UserReward) -> None:
        self.candidates, self.reward = candidates, reward
        self.name = f"guided[{reward.label}]"

    def respond(self, requests: Sequence[Request]) -> list[Response]:
        return [choice.response for choice in self.choose(requests)]

    def choose(self, requests: Sequence[Request]) -> list[Choice]:
        """The choice for every request, in one batch of rewards."""
        candidates = self.candidates(requests)
        rows = [(r.prompt, text) for r, c in zip(requests, candidates, strict=True) for text in c.texts]
        users = [r.user_id for r, c in zip(requests, candidates, strict=True) for _ in c.texts]
        scores, cut = self.reward.scores(users, rows)
        choices, start = [], 0
        for found in candidates:
            own = slice(start, start + len(found.texts))
            start = own.stop
            best = choose(scores[own])
            # Which candidates ended at the limit is counted when they are sampled.
            response = Response(found.texts[best], prompt_cut=found.cut, score=float(scores[own][best]))
            duplicates = len(found.texts) - len(set(found.texts))
            choices.append(Choice(response, best, duplicates, int(cut[own].sum())))
        return choices
