"""The prm checkpoint: a directory of JSON, safetensors and Parquet, opened without pickle and without foreign code.

prm.json             what it is: class path, arguments, backbone, formatting, data, metrics, probe scores
adapter/             the LoRA adapter in PEFT's format (plain `peft` and vLLM open it); absent without LoRA
head.safetensors     the reward model's shared parameters
users/               states of the users: part-N.{safetensors,parquet} and a manifest
tokenizer/           the backbone's tokenizer
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prm import store
from prm.backbones import Backbone, content_hash, lora_as_dict, lora_from_adapter, open_backbone
from prm.errors import UserError
from prm.features import TransformersFeatures, input_features
from prm.formatting import Formatter
from prm.provenance import git_revision, package_versions
from prm.records import user_prompt
from prm.reward_models import FeatureReward
from prm.user_states import UserStates

SCHEMA_VERSION = 1
KINDS = {"reward_model": FeatureReward}
# Texts of our own: a checkpoint is verified on them, and no user's text is kept in it.
PROBE = [
    ("Write a title for a note about the weather.", "Rain until Friday"),
    ("Write a title for a note about the weather.", "Will it ever stop raining?"),
    ("Name a good way to start the day.", "A short walk and a glass of water."),
]
# Largest relative difference between the scores of a live model and of what was reloaded.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# The reload is on the CPU, whose kernels round otherwise than a GPU's. An assumption: not measured on a GPU yet.
CUDA_TOLERANCE = 5e-2


@dataclass
class RewardCheckpoint:
    """An opened checkpoint."""

    path: Path
    info: dict[str, Any]
    backbone: Backbone
    head: FeatureReward
    users: UserStates
    formatter: Formatter

    @torch.inference_mode()
    def rewards(self, user_ids: Sequence[str], rows: Sequence[tuple[Any, str]], batch_size: int = 16) -> np.ndarray:
        """Raw rewards [N] of (prompt, response) rows, each for its user.

        Raises:
            UserError: an unknown user, for a method that looks at users.
        """
        states = self.users.rows(user_ids) if self.head.user_dim else torch.zeros(len(rows), 0)
        return self.head.cpu().scores(self.features(rows, batch_size), states).numpy()

    @torch.inference_mode()
    def features(self, rows: Sequence[tuple[Any, str]], batch_size: int = 16, label: str = "features") -> Tensor:
        """The head's inputs [N, input_dim], float32 on the CPU, of (prompt, response) rows."""
        source = TransformersFeatures(self.backbone, batch_size, label)
        return input_features(self.head, self.formatter.encode_all(rows), source.features)


def load_class(path: str, base: type, allow_code: Sequence[str] = ()) -> type:
    """The class at a dotted path, if it lies under `prm.` or a prefix the user allows, and is a subclass of `base`.

    The prefix is checked before anything is imported: a class path in a checkpoint is code.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path):
        raise UserError(f"{path!r} is not a class path: the checkpoint is damaged")
    if not any(path.startswith(prefix.rstrip(".") + ".") for prefix in ("prm", *allow_code)):
        prefix = path.split(".")[0]
        raise UserError(f"the checkpoint wants {path}, a class outside prm: pass --allow-code {prefix} if you trust it")
    module, name = path.rsplit(".", 1)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the checkpoint wants the class {path}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"the checkpoint wants {path}, which is no {base.__name__}")
    return found


def read_info(path: str | Path) -> dict[str, Any]:
    """prm.json of a checkpoint directory.

    Raises:
        UserError: no checkpoint there, damaged, or written by another schema.
    """
    path = Path(path)
    file = path / "prm.json"
    if not file.is_file():
        found = " (it holds a PEFT adapter alone)" if (path / "adapter_config.json").is_file() else ""
        raise UserError(f"{path} is not a prm checkpoint: it holds no prm.json{found}")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
        version, kind = info["schema_version"], info["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: {error}") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{file} has schema version {version}, this prm reads {SCHEMA_VERSION}")
    if kind not in KINDS:
        raise UserError(f"{path} is a {kind} checkpoint; one of {', '.join(KINDS)} is needed here")
    return info


def fingerprint(path: str | Path) -> str:
    """sha256 over all files of a checkpoint."""
    read_info(path)
    return store.fingerprint_tree(path)


def load_head(path: str | Path, allow_code: Sequence[str] = ()) -> tuple[FeatureReward, UserStates, dict[str, Any]]:
    """The head and the users of a checkpoint, on the CPU, without its backbone."""
    path = Path(path)
    info = read_info(path)
    cls = load_class(info["class_path"], KINDS[info["kind"]], allow_code)
    try:
        head: FeatureReward = cls(**info["arguments"])
        head.load_state_dict(_load_tensors(path / "head.safetensors"))
    except (TypeError, RuntimeError) as error:
        raise UserError(f"{path}: its head does not fit {info['class_path']}: {str(error).splitlines()[0]}") from error
    head.eval()
    users = UserStates.load(path / "users")
    if users.states.shape[1] != head.user_dim:
        raise UserError(f"{path}: users have {users.states.shape[1]} numbers each, the method needs {head.user_dim}")
    return head, users, info


def _load_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises its own class and OSErrors
        raise UserError(f"{file} cannot be read ({str(error)[:120]}): the checkpoint is damaged") from error


def open_checkpoint(
    path: str | Path, *, device: str = "cpu", dtype: str | None = None, allow_code: Sequence[str] = ()
) -> RewardCheckpoint:
    """Open a checkpoint with its backbone.

    Args:
        path: checkpoint directory.
        device: where the backbone goes; the head stays on the CPU.
        dtype: of the backbone; None takes the one it was trained in.
        allow_code: module prefixes beside `prm` whose classes may be imported.

    Raises:
        UserError: damaged, another schema, a backbone that changed since training, foreign code.
    """
    path = Path(path)
    head, users, info = load_head(path, allow_code)
    wanted = info["backbone"]
    adapter = path / "adapter"
    found = content_hash(wanted["name"])
    if wanted["sha256"] and found and found != wanted["sha256"]:
        raise UserError(f"the backbone {wanted['name']} is not the one {path} was trained on: its weights changed")
    backbone = open_backbone(
        wanted["name"],
        revision=wanted["revision"],
        dtype=dtype or info["dtype"],
        lora=lora_from_adapter(adapter) if wanted["lora"] else None,
        pooling=info["pooling"],
    )
    if wanted["lora"]:
        backbone.load_adapter_state(_load_tensors(adapter / "adapter_model.safetensors"))
    if backbone.hidden_size != head.feature_dim:
        raise UserError(
            f"{path}: the head reads {head.feature_dim} features, the backbone gives {backbone.hidden_size}"
        )
    backbone.to(device).eval()
    formatter = Formatter(backbone.tokenizer, info["formatting"]["max_length"], encoder=info["formatting"]["encoder"])
    return RewardCheckpoint(path, info, backbone, head, users, formatter)


def probe_scores(checkpoint: RewardCheckpoint) -> list[list[float]]:
    """Rewards of the probe texts: one row for each of (up to) the first and the last user, or one without users."""
    users = checkpoint.users
    states = (
        users.states[[0, -1]] if len(users) and checkpoint.head.user_dim else torch.zeros(1, checkpoint.head.user_dim)
    )
    formatter = Formatter(
        checkpoint.formatter.tokenizer, max(64, checkpoint.formatter.max_length), encoder=checkpoint.formatter.encoder
    )
    encoded = formatter.encode_all([(user_prompt(p), r) for p, r in PROBE])
    with torch.inference_mode():
        inputs = input_features(checkpoint.head, encoded, TransformersFeatures(checkpoint.backbone).features)
        return checkpoint.head.cpu().scores_for_all(inputs, states.float()).tolist()


def compare_probes(
    live: list[list[float]], reloaded: list[list[float]], dtype: str, path: str | Path, *, cuda: bool = False
) -> None:
    """Raise RuntimeError unless two sets of probe scores agree to the tolerance of the dtype and the device."""
    a, b = np.array(live), np.array(reloaded)
    gap = float(np.abs(a - b).max() / max(1.0, np.abs(a).max())) if a.shape == b.shape else float("inf")
    if not gap <= (CUDA_TOLERANCE if cuda else TOLERANCE[dtype]):
        raise RuntimeError(f"{path} was reloaded and its scores differ by {gap:.2g}: it was not kept")


def save_checkpoint(
    out: str | Path,
    *,
    backbone: Backbone,
    head: FeatureReward,
    users: UserStates,
    formatter: Formatter,
    info: dict[str, Any] | None = None,
    adapter_state: dict[str, Tensor] | None = None,
    head_state: dict[str, Tensor] | None = None,
    overwrite: bool = False,
    probe: list[list[float]] | None = None,
    reload: bool = True,
) -> Path:
    """Write a checkpoint, reload it from disk, compare its scores with the live model's, and only then keep it.

    Args:
        out: directory of the checkpoint.
        backbone, head, users, formatter: the live model.
        info: further facts for prm.json: data, metrics, run ids.
        adapter_state, head_state: float32 tensors that replace the live ones (weights gathered from shards).
        overwrite: replace an existing checkpoint.
        probe: the live model's `probe_scores`, where only all ranks together can make them; None makes them here.
        reload: False compares the tensors on disk alone, for a model that is too large to be opened once more.

    Raises:
        UserError: `out` is taken, or cannot be written.
        RuntimeError: the reloaded checkpoint scores differently; nothing is kept then.
    """
    out = Path(out)
    dtype = str(backbone.dtype).removeprefix("torch.")
    facts = {
        "schema_version": SCHEMA_VERSION,
        "kind": "reward_model",
        "class_path": f"{type(head).__module__}.{type(head).__qualname__}",
        "arguments": head.arguments(),
        "backbone": {
            "name": backbone.name,
            "revision": backbone.revision or getattr(backbone.model.config, "_commit_hash", None),
            "sha256": content_hash(backbone.name),
            "lora": lora_as_dict(backbone.lora),
        },
        "pooling": backbone.pooling,
        "dtype": dtype,
        "formatting": formatter.state(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "versions": package_versions(),
        **(info or {}),
    }
    live = probe if probe is not None else probe_scores(RewardCheckpoint(out, facts, backbone, head, users, formatter))
    with store.atomic_directory(out, overwrite=overwrite) as directory:
        if backbone.lora is not None:
            backbone.save_adapter(directory / "adapter", adapter_state)
        tensors = {k: v.detach().float().cpu().contiguous() for k, v in (head_state or head.state_dict()).items()}
        save_file(tensors, directory / "head.safetensors")
        users.save(directory / "users")
        backbone.tokenizer.save_pretrained(directory / "tokenizer")
        verified = "scores" if reload else "tensors"
        store.write_json(directory / "prm.json", {**facts, "probe": live, "verified": verified})
        if reload:
            allowed = () if facts["class_path"].startswith("prm.") else (facts["class_path"].split(".")[0],)
            reloaded = open_checkpoint(directory, allow_code=allowed)
            if any(not torch.equal(tensors[k], v) for k, v in reloaded.head.state_dict().items()):
                raise RuntimeError(f"{out} was reloaded and its head differs: it was not kept")
            cuda = next(backbone.parameters()).is_cuda
            compare_probes(live, probe_scores(reloaded), dtype, out, cuda=cuda)
        else:
            _compare_tensors(directory, tensors, users, adapter_state or {})
    return out


def _compare_tensors(directory: Path, head: dict[str, Tensor], users: UserStates, adapter: dict[str, Tensor]) -> None:
    """Raise RuntimeError unless the files hold exactly these tensors."""
    pairs = [(head, load_file(directory / "head.safetensors"))]
    pairs.append(({"states": users.states}, {"states": UserStates.load(directory / "users").states}))
    if adapter:
        pairs.append((adapter, load_file(directory / "adapter" / "adapter_model.safetensors")))
    for live, saved in pairs:
        if live.keys() != saved.keys() or any(not torch.equal(live[k].float(), saved[k]) for k in live):
            raise RuntimeError(f"{directory} was read back and its tensors differ: it was not kept")


def with_users(
    path: str | Path,
    out: str | Path,
    users: UserStates,
    info: dict[str, Any],
    *,
    allow_code: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """A copy of a checkpoint with further users in it; reopened and compared before it is kept.

    Raises:
        UserError: `out` is taken, or is the source itself.
    """
    path, out = Path(path), Path(out)
    if out.resolve() == path.resolve():
        raise UserError("--out is the checkpoint itself: choose another directory")
    _, old, facts = load_head(path, allow_code)
    both = old.extended(users)
    with store.atomic_directory(out, overwrite=overwrite) as directory:
        for name in ("adapter", "tokenizer"):
            if (path / name).is_dir():
                shutil.copytree(path / name, directory / name)
        shutil.copy2(path / "head.safetensors", directory / "head.safetensors")
        both.save(directory / "users")
        probe = open_checkpoint(path, allow_code=allow_code)
        probe.users = both
        live = probe_scores(probe)
        store.write_json(directory / "prm.json", {**facts, **info, "probe": live})
        reloaded = open_checkpoint(directory, allow_code=allow_code)
        if not torch.equal(reloaded.users.states, both.states) or reloaded.users.ids != both.ids:
            raise RuntimeError(f"{out} was reloaded and its users differ: it was not kept")
        compare_probes(live, probe_scores(reloaded), facts["dtype"], out)
    return out
