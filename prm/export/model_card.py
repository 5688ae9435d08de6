"""The README.md of an exported model: what lies there, and code that scores with it."""

from __future__ import annotations

import inspect
from typing import Any

from prm.backbones import Backbone

_POOLING = {
    "last": "last_hidden_state[0, -1]",
    "mean": "last_hidden_state[0].mean(0)",
    "first": "last_hidden_state[0, 0]",
}
_WHICH = {"last": "hidden state of the last token", "mean": "mean of the hidden states", "first": "first hidden state"}


def _token_lines(backbone: Backbone, prompt: str, response: str) -> list[str]:
    """Code that makes `ids` as `prm.formatting` does."""
    tokenizer = backbone.tokenizer
    plain = 'add_special_tokens=False)["input_ids"]'
    lines = [f"prompt, response = {prompt!r}, {response!r}"]
    if backbone.encoder:
        lines += [
            f"ids = [tokenizer.cls_token_id, *tokenizer(prompt, {plain}, tokenizer.sep_token_id]",
            f"ids += [*tokenizer(response, {plain}, tokenizer.sep_token_id]",
        ]
        return lines
    if getattr(tokenizer, "chat_template", None):
        lines += [
            'messages = [{"role": "user", "content": prompt}]',
            "text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)",
            f"ids = tokenizer(text, {plain}",
        ]
    else:
        start = "[tokenizer.bos_token_id] + " if tokenizer.bos_token_id is not None else ""
        lines.append(f'ids = {start}tokenizer(prompt + "\\n\\n", {plain}')
    lines.append(f"ids += [*tokenizer(response, {plain}, tokenizer.eos_token_id]")
    return lines


def model_card(facts: dict[str, Any], backbone: Backbone, method: type) -> str:
    """README.md of what `prm_export.json` describes."""
    probe = facts["probe"][0]
    user = f"users.rows([{probe['user']!r}])" if facts["user_dim"] else "torch.zeros(1, 0)"
    allow = "" if facts["class_path"].startswith("prm.") else f", allow_code=[{facts['class_path'].split('.')[0]!r}]"
    code = [
        "import torch",
        "from transformers import AutoModel, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'model = AutoModel.from_pretrained(".", dtype="auto").eval()',
        *_token_lines(backbone, probe["prompt"], probe["response"]),
        "",
        "from prm.export.hugging_face import load_exported_head",
        "",
        f'head, users = load_exported_head("."{allow})',
        "with torch.inference_mode():",
        f"    feature = model(input_ids=torch.tensor([ids])).{_POOLING[facts['pooling']]}.float()",
        f"    reward = head.scores(feature[None], {user}).item()  # {probe['reward']:.4f}",
    ]
    adapter = facts["backbone"]["merged_adapter"]
    model = "the backbone with its LoRA adapter merged into the weights" if adapter else "the backbone, unchanged"
    return "\n".join(
        [
            f"# A reward model: {method.__name__} on {facts['backbone']['name']}",
            "",
            "Exported by `prm export`. Plain transformers opens it; peft is not needed.",
            "",
            f"- `config.json`, `model.safetensors`, tokenizer: {model}, {facts['dtype']}",
            "- `reward/head.safetensors`: the shared parameters of the reward, float32",
            f"- `reward/users/`: the states of {facts['users']} users, and their ids",
            "- `prm_export.json`: class path, arguments, formatting, and probe texts with their token ids and rewards",
            "",
            f"The feature h of a prompt with its response is the {_WHICH[facts['pooling']]}; the reward is a function "
            "of h and of the user:",
            "",
            *(f"    {line}".rstrip() for line in _description(method)),
            "",
            "```python",
            *code,
            "```",
            "",
            "The prompt and the response are tokenized apart, and the closing token above belongs to the text. Prompts "
            f"were cut from the left to {facts['formatting']['max_length']} tokens in all.",
            "",
        ]
    )


def _description(method: type) -> list[str]:
    """The method's docstring, without its arguments."""
    text = (inspect.getdoc(method) or method.__name__).split("\nArgs:")[0]
    return text.strip().splitlines()
