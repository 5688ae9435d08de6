"""From (prompt, response) to token ids: the only path, for chosen and rejected, training and serving alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prm.errors import UserError
from prm.records import Prompt


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one (prompt, response).

    Attributes:
        ids: all token ids, the prompt's first.
        prompt_length: how many of them belong to the prompt; the rest are the response and its closing token.
        cut: prompt tokens that were cut from the left to fit the length.
    """

    ids: tuple[int, ...]
    prompt_length: int
    cut: int = 0


class Formatter:
    """Renders chat prompts and responses for one tokenizer.

    Causal models: the chat template's prompt with the assistant's header, the response, the end-of-sequence token
    (a tokenizer without a template gets "content" blocks separated by blank lines). Encoders: [CLS] prompt [SEP]
    response [SEP]. The prompt and the response are tokenized apart, so all responses to one prompt share its tokens
    exactly.

    What is too long is cut from the left of the prompt, never from the response; `cut_rows` and `cut_tokens` count it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: most tokens of prompt and response together.
        encoder: True for bidirectional encoders.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, encoder: bool = False) -> None:
        if max_length < 8:
            raise UserError(f"max_length {max_length} is too short to hold a prompt and a response: use 8 or more")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.encoder = encoder
        self.cut_rows = 0
        self.cut_tokens = 0
        self._prompts: dict[str, tuple[int, ...]] = {}
        if encoder and (tokenizer.cls_token_id is None or tokenizer.sep_token_id is None):
            raise UserError("an encoder's tokenizer needs CLS and SEP tokens: choose another backbone")
        if not encoder and tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token: choose another backbone")

    def render_prompt(self, prompt: Prompt) -> str:
        """The prompt as text, up to where the response begins."""
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"a prompt is a list of messages, not {type(prompt).__name__}")
        if self.encoder:
            return "\n".join(m["content"] for m in prompt)
        if getattr(self.tokenizer, "chat_template", None):
            return str(self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True))
        return "".join(m["content"] + "\n\n" for m in prompt)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the prompt alone, uncut: what a generating model continues."""
        text = self.render_prompt(prompt)
        if text not in self._prompts:
            if len(self._prompts) > 50_000:
                self._prompts.clear()
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if self.encoder:
                ids = [self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id]
            elif not getattr(self.tokenizer, "chat_template", None) and self.tokenizer.bos_token_id is not None:
                ids = [self.tokenizer.bos_token_id, *ids]
            self._prompts[text] = tuple(ids)
        return self._prompts[text]

    def encode(self, prompt: Prompt, response: str) -> Encoded:
        """Token ids of prompt and response.

        Raises:
            TypeError: the response is not a str (a list printed as "['...']" would leak which one it is).
            UserError: the response alone is longer than max_length.
        """
        if not isinstance(response, str):
            raise TypeError(f"a response is a str, not {type(response).__name__}")
        prompt_ids = self.prompt_ids(prompt)
        response_ids = list(self.tokenizer(response, add_special_tokens=False)["input_ids"])
        response_ids.append(self.tokenizer.sep_token_id if self.encoder else self.tokenizer.eos_token_id)
        room = self.max_length - len(response_ids)
        if room < 1:
            raise UserError(
                f"a response of {len(response_ids)} tokens does not fit max_length {self.max_length}: "
                f"raise max_length to {len(response_ids) + 64} or more (responses are never cut)"
            )
        cut = max(0, len(prompt_ids) - room)
        if cut:
            self.cut_rows += 1
            self.cut_tokens += cut
            # An encoder keeps its first token, which its pooling may read.
            prompt_ids = (prompt_ids[0], *prompt_ids[cut + 1 :]) if self.encoder else prompt_ids[cut:]
        return Encoded((*prompt_ids, *response_ids), len(prompt_ids), cut)

    def encode_all(self, rows: Sequence[tuple[Prompt, str]]) -> list[Encoded]:
        """`encode` over rows."""
        return [self.encode(prompt, response) for prompt, response in rows]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the formatting."""
        return {"max_length": self.max_length, "encoder": self.encoder}
