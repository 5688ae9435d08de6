"""What an engine does, independent of what runs it. Token ids go in: a rendered string would get a second BOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from prm.errors import UserError


class EngineError(UserError):
    """An engine could not start or died: one line with the cause and where its log lies."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        token_ids: the prompt.
        n: continuations wanted; more than one needs a temperature above 0.
        max_tokens: most tokens of a continuation.
        temperature: 0 is greedy.
        top_p: nucleus of the sampling.
        seed: of this request's sampling: its result then does not depend on the other requests of the batch
            (exactly so in float32; in lower precision rounding depends on the batch).
        stop_token_ids: tokens that end a continuation besides the model's own end-of-sequence tokens.
    """

    token_ids: tuple[int, ...]
    n: int = 1
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a request needs at least one token")
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n ({self.n}) and max_tokens ({self.max_tokens}) must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature {self.temperature} must be >= 0 and top_p {self.top_p} in (0, 1]")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"{self.n} greedy continuations are all the same: set a temperature above 0")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Generation:
    """A continuation: its text without special tokens, its tokens, and why it ended ("stop" or "length")."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


class GenerateEngine(Protocol):
    """Continues prompts."""

    max_model_len: int

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """n continuations of every request, in order. A request longer than max_model_len is refused."""
        ...


class FeatureEngine(Protocol):
    """Maps token sequences to backbone features."""

    def features(self, sequences: Sequence[Sequence[int]], adapter: str | None = None) -> np.ndarray:
        """float32 features [N, d] of N token sequences under one of the engine's adapters, or under none."""
        ...


def refuse_too_long(requests: Sequence[GenerationRequest], max_model_len: int) -> None:
    """Raise UserError when a prompt and its continuation do not fit the context."""
    longest = max((len(r.token_ids) + r.max_tokens for r in requests), default=0)
    if longest > max_model_len:
        raise UserError(
            f"a prompt and its continuation take {longest} tokens, the engine's context is {max_model_len}: "
            "raise --max-model-len, or shorten the prompts"
        )
