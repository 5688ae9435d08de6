"""One user's reward as a sequence classifier with one label, which many tools read as a reward model.

It exists where the reward is linear in the feature once the user is fixed, r_u(x, y) = v_u . h(x, y), and h is the
hidden state of a causal model's last token: what transformers' ForSequenceClassification classes compute.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prm import store
from prm.checkpoints import CUDA_TOLERANCE, PROBE, TOLERANCE, RewardCheckpoint
from prm.errors import UserError
from prm.export.hugging_face import export_facts, merged, probe_ids, quiet
from prm.features import TransformersFeatures
from prm.records import user_prompt
from prm.reward_models import FeatureReward

_INSTEAD = "use --format hf, which keeps the head beside the model"
# Puts an assistant's last message where the reward model was trained to find it: behind the header that opens an
# answer, closed by the end-of-sequence token and nothing else.
_BEFORE = (
    "{% if messages[-1]['role'] == 'assistant' %}{% set answer = messages[-1]['content'] %}"
    "{% set messages = messages[:-1] %}{% set add_generation_prompt = true %}{% endif %}"
)
_AFTER = "{% if answer is defined %}{{ answer + eos_token }}{% endif %}"


def reward_vector(head: FeatureReward, user: Tensor | None) -> Tensor:
    """v_u [d] with r_u = v_u . h, for a user's state [z] (None for a method that does not look at users).

    Raises:
        UserError: the reward is not linear in the feature.
    """
    state = torch.zeros(1, head.user_dim) if user is None else user[None]
    with torch.inference_mode():
        vector = head.scores_for_all(torch.eye(head.feature_dim), state)[0]
        features = torch.randn(16, head.feature_dim, generator=torch.Generator().manual_seed(0)) * 3
        rewards = head.scores_for_all(features, state)[0]
    if not torch.allclose(features @ vector, rewards, rtol=1e-4, atol=1e-4):
        raise UserError(f"{type(head).__name__} is not linear in the feature, so it is no classifier: {_INSTEAD}")
    return vector


def export_classifier(
    live: RewardCheckpoint, out: str | Path, *, user: str | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write the merged model with v_u as its score layer, reopen it, compare its logits with the rewards, and only
    then keep it. The live model is merged afterwards, whatever comes of it.

    Args:
        live: the model.
        out: directory of the classifier.
        user: whose reward, for a method that looks at users.
        overwrite: replace an existing directory.

    Returns:
        What prm_export.json holds.

    Raises:
        UserError: `out` is taken; a backbone, a pooling or a method that makes no such classifier; an unknown user.
        RuntimeError: the reloaded model gives other rewards; nothing is kept then.
    """
    out = Path(out)
    vector = _vector_of(live, user)
    encoded = probe_ids(live.formatter)
    features = torch.from_numpy(TransformersFeatures(live.backbone).features(encoded))
    rewards = (features @ vector).numpy()
    dtype = str(live.backbone.dtype).removeprefix("torch.")
    facts = export_facts(live, dtype) | {"kind": "sequence_classifier", "user": user}
    tokenizer, same_text = _tokenizer(live)
    model = _classifier(merged(live.backbone), vector, tokenizer.pad_token_id)
    with store.atomic_directory(out, overwrite=overwrite) as directory:
        with quiet():
            model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        again = _logits(directory, encoded)
        gap = float(np.abs(rewards - again).max() / max(1.0, np.abs(rewards).max()))
        if not gap <= max(TOLERANCE[dtype], CUDA_TOLERANCE if dtype == "bfloat16" else 0.0):
            raise RuntimeError(f"{out} was reloaded and its rewards differ by {gap:.2g}: it was not kept")
        facts |= {"largest_reward_difference": gap, "chat_template_renders_as_trained": same_text}
        facts["probe"] = [
            {"prompt": prompt, "response": response, "input_ids": list(ids), "reward": float(reward)}
            for (prompt, response), ids, reward in zip(PROBE, encoded, again, strict=True)
        ]
        store.write_json(directory / "prm_export.json", facts)
        store.write_text(directory / "README.md", _readme(facts))
    return facts


def _vector_of(live: RewardCheckpoint, user: str | None) -> Tensor:
    name = type(live.head).__name__
    if live.backbone.encoder:
        raise UserError(f"a classifier on an encoder has layers of its own above the hidden state: {_INSTEAD}")
    if live.backbone.pooling != "last":
        raise UserError(
            f"a classifier reads the last token, and this model's pooling is {live.backbone.pooling}: {_INSTEAD}"
        )
    if not live.head.user_dim and user is not None:
        raise UserError(f"--user {user}: {name} does not look at users; leave it out")
    if live.head.user_dim and user is None:
        raise UserError(f"--user ID is needed: {name} has a reward for each user, and a classifier holds one")
    return reward_vector(live.head, None if user is None else live.users.rows([user])[0])


def _tokenizer(live: RewardCheckpoint) -> tuple[Any, bool]:
    """A tokenizer whose padding is told from a text's end, and whose chat template closes answers as training did.

    Returns:
        The tokenizer, and whether the chat template renders conversations as the model was trained on them.
    """
    tokenizer = copy.deepcopy(live.backbone.tokenizer)
    # The classes look for the last token that is not padding, by its id, and every text ends with this one.
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        others = [i for i in sorted(tokenizer.all_special_ids) if i != tokenizer.eos_token_id]
        if not others:
            raise UserError(f"the tokenizer has no special token but the one that ends a text: {_INSTEAD}")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(others[0])
    tokenizer.padding_side = "right"
    if not isinstance(tokenizer.chat_template, str):
        return tokenizer, False
    plain, wanted = tokenizer.chat_template, [list(ids) for ids in probe_ids(live.formatter)]
    for template in (plain, _BEFORE + plain + _AFTER):
        tokenizer.chat_template = template
        if _rendered(tokenizer) == wanted:
            return tokenizer, True
    tokenizer.chat_template = plain
    return tokenizer, False


def _rendered(tokenizer: Any) -> list[list[int]]:
    """Token ids of the probe conversations as a tool renders them that knows the chat template alone."""
    rows = []
    for prompt, response in PROBE:
        messages = [*user_prompt(prompt), {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        rows.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return rows


def _classifier(model: Any, vector: Tensor, pad_id: int) -> Any:
    """The model's layers under transformers' sequence classifier of its family, with `vector` as its score layer."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels, config.pad_token_id = 1, pad_id
    try:
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config, dtype=model.dtype)
        score = classifier.score
        if not isinstance(score, torch.nn.Linear) or score.bias is not None or score.out_features != 1:
            raise ValueError("its score layer is not one vector")
        body = model.get_decoder()
        if type(getattr(classifier, classifier.base_model_prefix)) is not type(body):
            raise ValueError("its layers are of another class")
    except (ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0][:150]
        raise UserError(
            f"transformers has no fitting classifier for {config.model_type} ({reason}): {_INSTEAD}"
        ) from error
    setattr(classifier, classifier.base_model_prefix, body)
    weight = vector.to(dtype=model.dtype).unsqueeze(0).clone()
    classifier.score.weight = torch.nn.Parameter(weight, requires_grad=False)
    return classifier.eval()


@torch.inference_mode()
def _logits(directory: Path, encoded: Sequence[Sequence[int]]) -> np.ndarray:
    """Rewards [N] as a stranger computes them: one padded batch in transformers' own classes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        raise RuntimeError(f"{directory}: weights are missing or of another model")
    batch = tokenizer.pad({"input_ids": [list(ids) for ids in encoded]}, return_tensors="pt")
    logits: np.ndarray = model.eval()(**batch).logits[:, 0].float().numpy()
    return logits


def _readme(facts: dict[str, Any]) -> str:
    probe = facts["probe"][0]
    whose = "" if facts["user"] is None else f" for the user {facts['user']!r}"
    text = (
        "The chat template of this directory renders a conversation as the model was trained on it."
        if facts["chat_template_renders_as_trained"]
        else "A chat template may render a conversation otherwise than the model was trained on it, and the reward is "
        "then another: `prm_export.json` holds probe texts with their token ids and rewards to compare with."
    )
    return f"""# A reward model as a sequence classifier: {facts["class_path"]} on {facts["backbone"]["name"]}

Exported by `prm export --format hf-classifier`. The logit is the raw reward{whose}: a number without a scale of its
own, to be compared between responses to one prompt. No sigmoid belongs to it.

```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSequenceClassification.from_pretrained(".", dtype="auto").eval()
conversation = [
    {{"role": "user", "content": {probe["prompt"]!r}}},
    {{"role": "assistant", "content": {probe["response"]!r}}},
]
text = tokenizer.apply_chat_template(conversation, tokenize=False)
batch = tokenizer(text, add_special_tokens=False, return_tensors="pt")
with torch.inference_mode():
    reward = model(**batch).logits[0, 0].item()  # {probe["reward"]:.4f}
```

{text}
"""
