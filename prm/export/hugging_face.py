"""The adapter merged into the backbone, as a model directory that plain transformers opens, with the head beside it.

    config.json, model.safetensors, tokenizer ...   the model (no peft needed)
    reward/head.safetensors, reward/users/          the reward model's shared parameters, and its users
    prm_export.json                                 what it is: class path, arguments, pooling, formatting, probe scores
    README.md                                       how to score with it

The head has a folder of its own, since vLLM reads every .safetensors file beside config.json as weights of the model.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from prm import store
from prm.backbones import Backbone, lora_as_dict, pool
from prm.checkpoints import KINDS, PROBE, RewardCheckpoint, load_class
from prm.errors import UserError
from prm.export.model_card import model_card
from prm.features import TransformersFeatures
from prm.formatting import Formatter
from prm.provenance import git_revision, package_versions
from prm.records import user_prompt
from prm.reward_models import FeatureReward
from prm.user_states import UserStates

SCHEMA_VERSION = 1
# Largest difference of features, relative to the largest of them. Merging in float32 alone gives 1e-6; a merged
# weight that is rounded to bfloat16 gives 1e-2.
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}


def export_hugging_face(live: RewardCheckpoint, out: str | Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the directory, open it by plain transformers, compare its features with the unmerged model's, and only
    then keep it. The live model is merged afterwards, whatever comes of it.

    Returns:
        What prm_export.json holds.

    Raises:
        UserError: `out` is taken, or the merged weights are not finite.
        RuntimeError: the reloaded model gives other features; nothing is kept then.
    """
    out = Path(out)
    dtype = str(live.backbone.dtype).removeprefix("torch.")
    encoded = probe_ids(live.formatter)
    before = TransformersFeatures(live.backbone).features(encoded)
    model = merged(live.backbone)
    with store.atomic_directory(out, overwrite=overwrite) as directory:
        with quiet():
            model.save_pretrained(directory)
        live.backbone.tokenizer.save_pretrained(directory)
        reward = directory / "reward"
        reward.mkdir()
        tensors = {k: v.detach().float().cpu().contiguous() for k, v in live.head.state_dict().items()}
        save_file(tensors, reward / "head.safetensors")
        live.users.save(reward / "users")
        facts = export_facts(live, dtype)
        store.write_json(directory / "prm_export.json", facts)
        allowed = () if facts["class_path"].startswith("prm.") else (facts["class_path"].split(".")[0],)
        head, users = load_exported_head(directory, allow_code=allowed)
        if any(not torch.equal(tensors[k], v) for k, v in head.state_dict().items()) or users.ids != live.users.ids:
            raise RuntimeError(f"{out} was reloaded and its head or users differ: it was not kept")
        after = plain_features(directory, encoded, live.formatter, live.backbone.pooling)
        facts["largest_feature_difference"] = compare_features(before, after, dtype, out)
        facts["probe"] = _probe(head, users, after, encoded)
        store.write_json(directory / "prm_export.json", facts)
        store.write_text(directory / "README.md", model_card(facts, live.backbone, type(live.head)))
    return facts


def merged(backbone: Backbone) -> Any:
    """The Hugging Face model with the adapter in its weights, each rounded once to the backbone's dtype."""
    if backbone.lora is None:
        return backbone.model
    model: Any = backbone.model
    model = model.merge_and_unload()
    if bad := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        raise UserError(f"the merged weights are not finite ({bad[0]}): the adapter is not usable")
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without log lines below errors: saving imports DeepSpeed, which reports on stdout that it found no GPU."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def probe_ids(formatter: Formatter) -> list[tuple[int, ...]]:
    """Token ids of the probe texts, uncut."""
    uncut = Formatter(formatter.tokenizer, max(64, formatter.max_length), encoder=formatter.encoder)
    return [uncut.encode(user_prompt(prompt), response).ids for prompt, response in PROBE]


@torch.inference_mode()
def plain_features(directory: Path, encoded: Sequence[Sequence[int]], formatter: Formatter, pooling: str) -> np.ndarray:
    """Features [N, d] as a stranger computes them: transformers' own classes, one text at a time.

    Raises:
        RuntimeError: weights are missing, or the tokenizer gives other ids.
    """
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    again = probe_ids(Formatter(tokenizer, formatter.max_length, encoder=formatter.encoder))
    if again != [tuple(ids) for ids in encoded]:
        raise RuntimeError(f"{directory}: the reloaded tokenizer gives other tokens")
    model, report = AutoModel.from_pretrained(directory, dtype="auto", output_loading_info=True)
    # An encoder's pooler, which transformers adds on top of it, has no part in the feature.
    if absent := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise RuntimeError(f"{directory}: {len(absent)} weights are missing from it ({absent[0]}, ...)")
    model.eval()
    rows = []
    for sequence in encoded:
        ids = torch.tensor([list(sequence)])
        rows.append(pool(model(input_ids=ids).last_hidden_state, torch.ones_like(ids), pooling).float()[0])
    return torch.stack(rows).numpy()


def compare_features(before: np.ndarray, after: np.ndarray, dtype: str, out: Path) -> float:
    """Largest difference relative to the largest feature; RuntimeError when it is beyond the dtype's tolerance."""
    gap = float(np.abs(before - after).max() / np.abs(before).max())
    if not gap <= TOLERANCE[dtype]:
        raise RuntimeError(f"{out} was reloaded and its features differ by {gap:.2g} of the largest: it was not kept")
    return gap


def load_exported_head(directory: str | Path, allow_code: Sequence[str] = ()) -> tuple[FeatureReward, UserStates]:
    """Head and users of an exported model directory, on the CPU.

    Raises:
        UserError: not such a directory, damaged, or foreign code.
    """
    directory = Path(directory)
    try:
        facts = json.loads((directory / "prm_export.json").read_text(encoding="utf-8"))
        cls = load_class(facts["class_path"], KINDS[facts["kind"]], allow_code)
        head: FeatureReward = cls(**facts["arguments"])
        head.load_state_dict(load_file(directory / "reward" / "head.safetensors"))
    except UserError:
        raise
    except Exception as error:  # missing or damaged files of two formats
        raise UserError(f"{directory} is not a whole export: {str(error).splitlines()[0]}") from error
    return head.eval(), UserStates.load(directory / "reward" / "users")


def export_facts(live: RewardCheckpoint, dtype: str) -> dict[str, Any]:
    """What prm_export.json says of a model, before it is written."""
    kept = ("step", "data", "data_fingerprint", "metrics", "run_uuid", "mlflow_run_id", "adaptation")
    head = live.head
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "reward_model",
        "class_path": f"{type(head).__module__}.{type(head).__qualname__}",
        "arguments": head.arguments(),
        "backbone": {
            "name": live.backbone.name,
            "revision": live.backbone.revision,
            "merged_adapter": lora_as_dict(live.backbone.lora),
        },
        "pooling": live.backbone.pooling,
        "dtype": dtype,
        "formatting": live.formatter.state(),
        "users": len(live.users),
        "user_dim": head.user_dim,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "versions": package_versions(),
        **{key: live.info[key] for key in kept if key in live.info},
    }


@torch.inference_mode()
def _probe(
    head: FeatureReward, users: UserStates, features: np.ndarray, encoded: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Rewards of the probe texts, for whoever writes code of their own to compare it with."""
    user_id = users.ids[0] if head.user_dim and len(users) else None
    state = users.rows([user_id]) if user_id is not None else torch.zeros(1, head.user_dim)
    rewards = head.scores_for_all(torch.from_numpy(features), state)[0].tolist()
    return [
        {"prompt": prompt, "response": response, "input_ids": list(ids), "user": user_id, "reward": reward}
        for (prompt, response), ids, reward in zip(PROBE, encoded, rewards, strict=True)
    ]
