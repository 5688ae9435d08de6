"""In-context learning with retrieval: the user's own examples that are nearest to the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from prm.evaluation.methods.base import Request
from prm.evaluation.methods.icl import InContext
from prm.inference.chat import ChatModel
from prm.records import Completion, Prompt


class TextEncoder(Protocol):
    """What `prm.retrieval.SentenceEncoder` does."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit-length embeddings [N, d] of N texts."""
        ...


class RetrievedInContext(InContext):
    """The k examples whose prompts have the largest cosine with the request's prompt, the nearest last.

    Only the user's own history is searched. Those that do not fit the context are dropped, the farthest first.

    Args:
        chat: the language model.
        encoder: of sentences.
        shots: k; a user with fewer examples gets them all.
        temperature: 0 is greedy.
    """

    name = "icl_rag"

    def __init__(self, chat: ChatModel, encoder: TextEncoder, shots: int = 3, temperature: float = 0.0) -> None:
        super().__init__(chat, shots, temperature)
        self.encoder = encoder
        self._known: dict[str, np.ndarray] = {}

    def prepare(self, requests: Sequence[Request]) -> None:
        """Encode the prompts of requests and of their histories; one call for all costs less than one a batch."""
        texts = (prompt_text(asked) for r in requests for asked in (r.prompt, *(e.prompt for e in r.history)))
        new = [t for t in dict.fromkeys(texts) if t not in self._known]
        if new:
            self._known.update(zip(new, self.encoder.encode(new), strict=True))

    def examples(self, requests: Sequence[Request]) -> list[list[Completion]]:
        self.prepare(requests)
        chosen: list[list[Completion]] = []
        for request in requests:
            if not request.history:
                chosen.append([])
                continue
            history_nd = np.stack([self._known[prompt_text(e.prompt)] for e in request.history])
            similarity_n = history_nd @ self._known[prompt_text(request.prompt)]
            nearest = np.argsort(-similarity_n, kind="stable")[: self.shots]
            chosen.append([request.history[i] for i in nearest[::-1]])
        return chosen


def prompt_text(prompt: Prompt) -> str:
    """What a prompt is about: the text of its user turns."""
    return "\n".join(m["content"] for m in prompt if m["role"] == "user")
