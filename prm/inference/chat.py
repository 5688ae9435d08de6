"""From chat prompts to generation requests: earlier examples as chat turns, and what does not fit the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prm.errors import UserError
from prm.formatting import Formatter
from prm.inference.engines.base import GenerateEngine, Generation, GenerationRequest
from prm.records import Prompt

Shot = tuple[Prompt, str]


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that fits the context.

    Attributes:
        token_ids: what the model continues.
        shots: examples that stand in it.
        dropped: examples that did not fit.
        cut: prompt tokens cut from the left, after every example was dropped.
    """

    token_ids: tuple[int, ...]
    shots: int = 0
    dropped: int = 0
    cut: int = 0


def with_shots(prompt: Prompt, shots: Sequence[Shot]) -> Prompt:
    """The prompt after earlier turns: each example's prompt, then its answer. The prompt's own system turn is first."""
    system = [m for m in prompt if m["role"] == "system"]
    turns = [m for m in prompt if m["role"] != "system"]
    earlier: Prompt = []
    for asked, answer in shots:
        earlier += [m for m in asked if m["role"] != "system"]
        earlier.append({"role": "assistant", "content": answer})
    return [*system, *earlier, *turns]


class ChatModel:
    """An engine that answers chat prompts.

    Args:
        engine: what generates.
        tokenizer: the model's tokenizer, with its chat template.
        max_new_tokens: most tokens of an answer.
        top_p: nucleus of sampled answers.
    """

    def __init__(self, engine: GenerateEngine, tokenizer: object, *, max_new_tokens: int, top_p: float = 1.0) -> None:
        self.engine = engine
        self.max_new_tokens, self.top_p = max_new_tokens, top_p
        self.room = engine.max_model_len - max_new_tokens
        if self.room < 8:
            raise UserError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in a context of "
                f"{engine.max_model_len} tokens: lower it, or raise --max-model-len"
            )
        self.formatter = Formatter(tokenizer, engine.max_model_len)

    def fit(self, prompt: Prompt, shots: Sequence[Shot] = ()) -> FittedPrompt:
        """The prompt with as many of its examples as fit; the first are dropped first, then the prompt's left end."""
        for dropped in range(len(shots) + 1):
            ids = self.formatter.prompt_ids(with_shots(prompt, shots[dropped:]))
            if len(ids) <= self.room:
                return FittedPrompt(ids, len(shots) - dropped, dropped)
        return FittedPrompt(ids[-self.room :], 0, len(shots), len(ids) - self.room)

    def answers(
        self, prompts: Sequence[FittedPrompt], seeds: Sequence[int], *, n: int = 1, temperature: float = 0.0
    ) -> list[list[Generation]]:
        """n answers to every prompt, each prompt sampled under its own seed."""
        requests = [
            GenerationRequest(
                p.token_ids,
                n=n,
                max_tokens=self.max_new_tokens,
                temperature=temperature,
                top_p=self.top_p,
                seed=seed if temperature > 0 else None,
            )
            for p, seed in zip(prompts, seeds, strict=True)
        ]
        return self.engine.generate(requests)
