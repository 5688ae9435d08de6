"""In-context learning: some of the user's own examples as earlier turns of the chat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prm.errors import UserError
from prm.evaluation.methods.base import Request, Response, response_of
from prm.inference.chat import ChatModel
from prm.records import Completion


class InContext:
    """k random examples of the user's history, in the order in which the user wrote them.

    Each case draws its own examples from its own seed. Those that do not fit the context are dropped, the oldest first.

    Args:
        chat: the language model.
        shots: k; a user with fewer examples gets them all.
        temperature: 0 is greedy.
    """

    name = "icl"

    def __init__(self, chat: ChatModel, shots: int = 3, temperature: float = 0.0) -> None:
        if shots < 1:
            raise UserError(f"--shots {shots}: examples in the prompt need at least one (without any it is `plain`)")
        self.chat, self.shots, self.temperature = chat, shots, temperature

    def examples(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The examples of every request, in the order of the chat."""
        chosen = []
        for request in requests:
            count = min(self.shots, len(request.history))
            rows = np.random.default_rng(request.seed).permutation(len(request.history))[:count]
            chosen.append([request.history[i] for i in sorted(rows)])
        return chosen

    def respond(self, requests: Sequence[Request]) -> list[Response]:
        prompts = [
            self.chat.fit(request.prompt, [(e.prompt, e.reference) for e in examples])
            for request, examples in zip(requests, self.examples(requests), strict=True)
        ]
        answers = self.chat.answers(prompts, [r.seed for r in requests], temperature=self.temperature)
        return [response_of(p, a[0]) for p, a in zip(prompts, answers, strict=True)]
