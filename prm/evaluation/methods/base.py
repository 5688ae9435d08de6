"""The contract of a method: many requests of many users in, one response each out, in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prm.inference.chat import FittedPrompt
from prm.inference.engines.base import Generation
from prm.records import Completion, Prompt


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of a user.

    Attributes:
        case_id: which case of the benchmark it is.
        user_id: whose prompt it is.
        prompt: chat messages, the last from the user.
        history: what the user wrote before: prompts with the user's own text.
        seed: of everything random in the answer.
    """

    case_id: str
    user_id: str
    prompt: Prompt
    history: tuple[Completion, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, and what was left out to get it.

    Attributes:
        text: the answer, without surrounding white space.
        length_limited: it ended at the token limit.
        shots: the user's own examples that stood in the prompt.
        shots_dropped: examples that did not fit the context.
        prompt_cut: prompt tokens that did not fit the context.
        score: the user's reward of the answer, for methods that have one.
    """

    text: str
    length_limited: bool = False
    shots: int = 0
    shots_dropped: int = 0
    prompt_cut: int = 0
    score: float | None = None


class Method(Protocol):
    """Answers requests."""

    name: str

    def respond(self, requests: Sequence[Request]) -> list[Response]:
        """One response to every request, in order."""
        ...


def response_of(prompt: FittedPrompt, answer: Generation) -> Response:
    """The response that a language model gave to a fitted prompt."""
    return Response(answer.text.strip(), answer.finish_reason == "length", prompt.shots, prompt.dropped, prompt.cut)
