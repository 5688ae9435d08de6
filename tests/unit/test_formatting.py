"""From (prompt, response) to token ids and to the pooled feature: the texts alone may tell responses apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prm.backbones import open_backbone, open_tokenizer, pool
from prm.errors import UserError
from prm.features import TransformersFeatures, pad_batch
from prm.formatting import Formatter
from prm.records import user_prompt

PROMPT = user_prompt("Name a colour that goes well with a wooden table.")
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Name a colour."},
]


@pytest.fixture(scope="module")
def causal(smollm2_path: Path) -> Any:
    return open_tokenizer(str(smollm2_path))


@pytest.fixture(scope="module")
def bidirectional(minilm_path: Path) -> Any:
    return open_tokenizer(str(minilm_path))


@pytest.fixture(params=["causal", "encoder"])
def formatter(request: pytest.FixtureRequest, causal: Any, bidirectional: Any) -> Formatter:
    encoder = request.param == "encoder"
    return Formatter(bidirectional if encoder else causal, 128, encoder=encoder)


@pytest.mark.parametrize("response", [["Green"], ("Green",), b"Green", None, 7])
def test_a_response_that_is_no_str_is_a_type_error(formatter: Formatter, response: Any) -> None:
    """A list printed as "['Green']" on one side only would let the model tell chosen from rejected."""
    for row in ((PROMPT, response), (CHAT, response)):
        with pytest.raises(TypeError, match="a response is a str"):
            formatter.encode(*row)
        with pytest.raises(TypeError, match="a response is a str"):
            formatter.encode_all([(PROMPT, "Red"), row])


def test_a_prompt_that_is_no_list_is_a_type_error(formatter: Formatter) -> None:
    with pytest.raises(TypeError, match="a prompt is a list of messages"):
        formatter.encode("Name a colour.", "Green")  # type: ignore[arg-type]


def test_identical_texts_give_identical_ids(formatter: Formatter) -> None:
    chosen, rejected = formatter.encode_all([(PROMPT, "Green"), (PROMPT, "".join(["Gr", "een"]))])
    assert chosen == rejected
    assert chosen != formatter.encode(PROMPT, "Grey")


def test_responses_to_one_prompt_share_its_tokens_exactly(formatter: Formatter) -> None:
    prompt_ids = formatter.prompt_ids(CHAT)
    for response in ("Green", "\n\nGreen", " green", ".", "é🎨"):
        encoded = formatter.encode(CHAT, response)
        assert encoded.ids[: encoded.prompt_length] == prompt_ids
        assert encoded.cut == 0 and len(encoded.ids) > len(prompt_ids) + 1


def test_the_causal_form_is_the_chat_template_then_the_response_then_eos(causal: Any) -> None:
    formatter = Formatter(causal, 128)
    text = formatter.render_prompt(CHAT)
    assert text.endswith("<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n")
    encoded = formatter.encode(CHAT, "Green")
    assert causal.decode(encoded.ids) == text + "Green<|im_end|>"
    assert causal.decode(encoded.ids[encoded.prompt_length :]) == "Green<|im_end|>"


def test_a_tokenizer_without_a_template_gets_blocks_of_text(causal: Any) -> None:
    plain = SimpleNamespace(
        cls_token_id=None, sep_token_id=None, bos_token_id=1, eos_token_id=2, chat_template=None, seen=[]
    )

    class Tokenizer:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            assert not add_special_tokens
            plain.seen.append(text)
            return {"input_ids": [10 + ord(c) for c in text]}

    encoded = Formatter(Tokenizer(), 128).encode(CHAT, "Green")
    assert plain.seen == ["Answer briefly.\n\nHi\n\nHello\n\nName a colour.\n\n", "Green"]
    assert encoded.ids[0] == 1 and encoded.ids[-1] == 2


@pytest.mark.parametrize("response", ["Green", "Green.\n", "A long answer " * 5, "<|im_end|>"])
def test_a_response_always_ends_in_its_closing_token(formatter: Formatter, response: str) -> None:
    tokenizer = formatter.tokenizer
    closing = tokenizer.sep_token_id if formatter.encoder else tokenizer.eos_token_id
    encoded = formatter.encode(PROMPT, response)
    assert encoded.ids[-1] == closing
    bare = tokenizer(response, add_special_tokens=False)["input_ids"]
    assert list(encoded.ids[encoded.prompt_length :]) == [*bare, closing]


def test_what_is_too_long_is_cut_from_the_left_of_the_prompt_and_counted(causal: Any) -> None:
    formatter = Formatter(causal, 24)
    prompt_ids = formatter.prompt_ids(PROMPT)
    response_ids = (*causal("Green and gold", add_special_tokens=False)["input_ids"], causal.eos_token_id)
    encoded = formatter.encode(PROMPT, "Green and gold")
    assert len(encoded.ids) == 24
    assert encoded.ids[encoded.prompt_length :] == response_ids
    assert encoded.cut == len(prompt_ids) + len(response_ids) - 24 > 0
    assert encoded.ids[: encoded.prompt_length] == prompt_ids[encoded.cut :]
    assert (formatter.cut_rows, formatter.cut_tokens) == (1, encoded.cut)
    again = formatter.encode(PROMPT, "Green")
    assert (formatter.cut_rows, formatter.cut_tokens) == (2, encoded.cut + again.cut)
    assert formatter.prompt_ids(PROMPT) == prompt_ids, "cutting one row must not change what the next one gets"


def test_what_just_fits_is_not_cut(formatter: Formatter) -> None:
    length = len(formatter.encode(PROMPT, "Green").ids)
    exact = Formatter(formatter.tokenizer, length, encoder=formatter.encoder)
    assert exact.encode(PROMPT, "Green").cut == 0 and exact.cut_rows == 0
    shorter = Formatter(formatter.tokenizer, length - 1, encoder=formatter.encoder)
    assert shorter.encode(PROMPT, "Green").cut == 1 and shorter.cut_rows == 1


def test_an_encoder_keeps_its_first_token_when_the_prompt_is_cut(bidirectional: Any) -> None:
    formatter = Formatter(bidirectional, 10, encoder=True)
    prompt_ids = formatter.prompt_ids(PROMPT)
    assert prompt_ids[0] == bidirectional.cls_token_id and prompt_ids[-1] == bidirectional.sep_token_id
    encoded = formatter.encode(PROMPT, "green")
    assert len(encoded.ids) == 10
    assert encoded.ids[0] == bidirectional.cls_token_id
    assert encoded.ids[1 : encoded.prompt_length] == prompt_ids[encoded.cut + 1 :]
    assert encoded.ids[-1] == bidirectional.sep_token_id
    assert formatter.cut_tokens == encoded.cut == len(prompt_ids) - encoded.prompt_length


def test_the_tightest_fit_leaves_one_token_of_the_prompt(formatter: Formatter) -> None:
    response = "a b c d e f g"
    length = len(formatter.tokenizer(response, add_special_tokens=False)["input_ids"]) + 1
    tight = Formatter(formatter.tokenizer, length + 1, encoder=formatter.encoder)
    encoded = tight.encode(PROMPT, response)
    assert (len(encoded.ids), encoded.prompt_length) == (length + 1, 1)
    if formatter.encoder:
        assert encoded.ids[0] == formatter.tokenizer.cls_token_id


def test_a_response_that_does_not_fit_is_one_line_and_is_never_cut(formatter: Formatter) -> None:
    response = "green " * 40
    length = len(formatter.tokenizer(response, add_special_tokens=False)["input_ids"]) + 1
    for max_length in (16, length):
        short = Formatter(formatter.tokenizer, max_length, encoder=formatter.encoder)
        with pytest.raises(UserError, match=f"a response of {length} tokens does not fit max_length {max_length}"):
            short.encode(PROMPT, response)
        assert short.cut_rows == 0


def test_tokenizers_and_lengths_that_do_not_fit_are_refused(causal: Any) -> None:
    with pytest.raises(UserError, match="max_length 7 is too short"):
        Formatter(causal, 7)
    with pytest.raises(UserError, match="CLS and SEP"):
        Formatter(causal, 64, encoder=True)
    with pytest.raises(UserError, match="no end-of-sequence token"):
        Formatter(SimpleNamespace(eos_token_id=None), 64)


def test_a_checkpoint_can_build_the_same_formatter(formatter: Formatter) -> None:
    assert formatter.state() == {"max_length": 128, "encoder": formatter.encoder}
    twin = Formatter(formatter.tokenizer, **formatter.state())
    assert twin.encode(CHAT, "Green") == formatter.encode(CHAT, "Green")


# The feature: chosen by the attention mask, never by the pad id

# Four rows of hidden states [4, 5, 2]; the values say row and position.
HIDDEN = torch.tensor([[[10.0 * row + t, -(10.0 * row + t)] for t in range(5)] for row in range(4)])
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("last", [2, 14, 24, 34]), ("first", [0, 12, 20, 34]), ("mean", [1, 13, 22, 34])],
)
def test_pooling_on_either_side_of_padding(pooling: str, expected: list[float]) -> None:
    pooled = pool(HIDDEN, MASK, pooling)
    assert pooled.tolist() == [[value, -value] for value in expected]


@pytest.mark.parametrize("left", [False, True])
def test_real_tokens_that_equal_the_pad_id_are_pooled_as_real(left: bool) -> None:
    """The pad id is the end-of-sequence id, 2, which closes every response and stands inside the second one."""
    sequences = [[5, 2], [5, 2, 7, 2, 2], [2]]
    ids, mask = pad_batch(sequences, 2, left=left)
    assert mask.sum(1).tolist() == [2, 5, 1]
    # A "hidden state" that says which real token of its row it is: 1, 2, 3, ...
    hidden = (mask.cumsum(1) * mask)[..., None].float()
    assert pool(hidden, mask, "last").flatten().tolist() == [2, 5, 1]
    assert pool(hidden, mask, "first").flatten().tolist() == [1, 1, 1]
    assert pool(hidden, mask, "mean").flatten().tolist() == [1.5, 3, 1]
    assert ids[mask.bool()].tolist() == [5, 2, 5, 2, 7, 2, 2, 2]


@pytest.mark.parametrize("left", [False, True])
def test_a_model_whose_pad_is_its_eos_gives_the_feature_of_the_closing_token(tiny_llama_path: Path, left: bool) -> None:
    backbone = open_backbone(str(tiny_llama_path), dtype="float32")
    assert backbone.tokenizer.pad_token_id == backbone.tokenizer.eos_token_id == backbone.pad_id
    formatter = Formatter(backbone.tokenizer, 128)
    rows = [(PROMPT, "Green"), (PROMPT, "A deep and quiet green, near to grey"), (CHAT, "<|im_end|>")]
    sequences = [list(e.ids) for e in formatter.encode_all(rows)]
    alone = torch.from_numpy(TransformersFeatures(backbone, batch_size=1).features(sequences))
    with torch.inference_mode():
        batched = backbone(*pad_batch(sequences, backbone.pad_id, left=left))
        without_eos = backbone(*pad_batch([s[:-1] for s in sequences], backbone.pad_id, left=left))
    torch.testing.assert_close(batched, alone, atol=1e-5, rtol=1e-4)
    assert (batched - without_eos).abs().amax(1).min() > 1e-2
