"""The baseline that knows nothing of the user: the prompt alone."""

from __future__ import annotations

from collections.abc import Sequence

from prm.evaluation.methods.base import Request, Response, response_of
from prm.inference.chat import ChatModel


class Plain:
    """Zero-shot answers of the language model.

    Args:
        chat: the language model.
        temperature: 0 is greedy.
    """

    name = "plain"

    def __init__(self, chat: ChatModel, temperature: float = 0.0) -> None:
        self.chat, self.temperature = chat, temperature

    def respond(self, requests: Sequence[Request]) -> list[Response]:
        prompts = [self.chat.fit(r.prompt) for r in requests]
        answers = self.chat.answers(prompts, [r.seed for r in requests], temperature=self.temperature)
        return [response_of(p, a[0]) for p, a in zip(prompts, answers, strict=True)]
