"""A live model of a run's configuration and gathered weights: what training had in memory, on one CPU."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from prm.backbones import Backbone, LoraSpec, content_hash, open_backbone
from prm.checkpoints import KINDS, RewardCheckpoint, load_class, read_info
from prm.dataset_dir import DatasetDir
from prm.errors import UserError
from prm.export.sources import Source
from prm.export.zero import zero_weights
from prm.formatting import Formatter
from prm.reward_models import FeatureReward
from prm.training.states import newest_state, read_state
from prm.user_states import UserStates

log = logging.getLogger(__name__)
_USERS = "users.states"


def rebuild(
    source: Source, *, dtype: str | None = None, allow_code: Sequence[str] = (), trust_pickle: bool = False
) -> RewardCheckpoint:
    """Open the model of a resume state or of a ZeRO directory; `info` holds the further facts for its prm.json.

    Args:
        source: of kind "resume" or "zero".
        dtype: of the backbone; None takes the one it was trained in.
        allow_code: module prefixes beside `prm` whose classes may be imported.
        trust_pickle: whether the pickles of a ZeRO directory may be opened.

    Raises:
        UserError: a damaged source, weights of another model, foreign code, or a dataset that is needed for the
            users' ids and missing.
    """
    assert source.run is not None
    recorded = _recorded(source.run)
    if source.kind == "resume":
        state = read_state(source.path)
        config, weights, user_ids = state.info["config"], state.weights(), state.info["user_ids"]
        facts = {"step": state.step, "data_fingerprint": state.info["data_fingerprint"]}
    else:
        # Before the configuration: what is refused is then refused whatever stands around it.
        weights = zero_weights(source.path, trust_pickle=trust_pickle)
        config = _read_config(source.run)
        user_ids, fingerprint = _user_ids(source.run, config, recorded)
        facts = {"data_fingerprint": fingerprint}
    if recorded.get("data_fingerprint") == facts["data_fingerprint"]:
        facts |= {key: recorded[key] for key in ("data",) if key in recorded}
    facts |= {key: recorded[key] for key in ("run_uuid", "mlflow_run_id") if key in recorded}
    facts["exported_from"] = {"kind": source.kind, "directory": source.path.name}
    try:
        model, max_length = config["model"], config["data"]["max_length"]
        wanted = {key: model[key] for key in ("revision", "pooling")}
        lora = None if model["lora"] is None else LoraSpec(**model["lora"])
        name, class_path, trained_in = model["backbone"], model["reward_model"]["class_path"], model["dtype"]
        arguments = model["reward_model"].get("init_args") or {}
    except (KeyError, TypeError) as error:
        raise UserError(f"{source.path}: its run's configuration is not one of a reward model: {error}") from error
    cls = load_class(class_path, KINDS["reward_model"], allow_code)
    known = recorded.get("backbone", {})
    if known.get("name") == name and known.get("sha256") not in (None, content_hash(name)):
        raise UserError(f"the backbone {name} is not the one {source.run} was trained on: its weights changed")
    backbone = open_backbone(name, dtype=dtype or _dtype(trained_in, recorded), lora=lora, **wanted)
    head = _head(cls, backbone.hidden_size, arguments, class_path)
    head, states = head.finished(_load(source.path, backbone, head, user_ids, weights))
    users = UserStates(user_ids, states)
    formatter = Formatter(backbone.tokenizer, max_length, encoder=backbone.encoder)
    return RewardCheckpoint(source.path, facts, backbone.eval(), head.eval(), users, formatter)


def _head(cls: type, feature_dim: int, arguments: dict[str, Any], class_path: str) -> FeatureReward:
    try:
        head: FeatureReward = cls(feature_dim, **arguments)
    except TypeError as error:
        raise UserError(f"the run's configuration does not fit {class_path}: {error}") from error
    return head


def _load(
    path: Path, backbone: Backbone, head: FeatureReward, user_ids: list[str], weights: dict[str, Tensor]
) -> Tensor:
    """Load the adapter and the head, and return the users' states; every name and shape must fit, none may be empty."""
    own = {f"backbone.{name}": p for name, p in backbone.named_parameters() if p.requires_grad}
    own |= {f"head.{name}": value for name, value in head.state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    if head.user_dim:
        shapes[_USERS] = (len(user_ids), head.user_dim)
    if odd := sorted(shapes.keys() ^ weights.keys()):
        raise UserError(f"{path} holds the weights of another model: {odd[0]} differs ({len(odd)} names in all)")
    for name, shape in shapes.items():
        value = weights[name]
        if value.shape != shape or not value.numel():
            raise UserError(f"{path}: {name} has shape {list(value.shape)}, the run's model has {list(shape)}")
        if not value.isfinite().all():
            raise UserError(f"{path}: {name} holds numbers that are not finite: the training went wrong before this")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])
    return weights.get(_USERS, torch.zeros(len(user_ids), 0))


def _read_config(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no configuration")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    return config


def _recorded(run: Path) -> dict[str, Any]:
    """Facts that the run's own checkpoints and its tracking wrote down; empty for a run that was killed early."""
    found: dict[str, Any] = {}
    for name in ("last", "best"):
        path = run / "checkpoints" / name
        with contextlib.suppress(UserError):
            found = {**read_info(path), "checkpoint": path}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        ids = json.loads((run / "mlflow.json").read_text(encoding="utf-8"))
        found |= {"run_uuid": ids["run_uuid"]} | ({"mlflow_run_id": ids["run_id"]} if ids.get("run_id") else {})
    return found


def _dtype(trained_in: str, recorded: dict[str, Any]) -> str:
    """The dtype that `auto` was where the run was trained, if anything says so."""
    if trained_in == "auto" and "dtype" in recorded:
        return str(recorded["dtype"])
    if trained_in == "auto" and not torch.cuda.is_available():
        log.warning("the run's model.dtype was auto: taken as float32, as on this machine; --dtype says otherwise")
    return trained_in


def _user_ids(run: Path, config: dict[str, Any], recorded: dict[str, Any]) -> tuple[list[str], str]:
    """Ids of the training users in their order, and the dataset's fingerprint.

    A ZeRO directory holds neither: they come from the run's newest resume state, from a checkpoint of it, or from its
    dataset.
    """
    if (state := newest_state(run)) is not None:
        return list(state.info["user_ids"]), str(state.info["data_fingerprint"])
    if "checkpoint" in recorded:
        return UserStates.load(recorded["checkpoint"] / "users").ids, str(recorded["data_fingerprint"])
    try:
        data = DatasetDir.open(config["data"]["data"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{run}/config.yaml names no dataset, and the users' ids come from there") from error
    except UserError as error:
        raise UserError(f"the users' ids come from the run's dataset, and {error}") from error
    return sorted({pair.user_id for pair in data.pairs(["train"])}), data.fingerprint
