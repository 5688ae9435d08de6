"""The model registry: a checkpoint becomes a version of a registered model.

A version's source is a copy of the checkpoint directory among the artifacts of a run: plain files, no pickle.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prm import store
from prm.errors import UserError
from prm.provenance import user_name
from prm.tracking.client import experiment_id
from prm.tracking.lock import SUFFIX
from prm.tracking.provenance import provenance_tags
from prm.tracking.runs import training_run_id

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


@dataclass(frozen=True)
class Registered:
    """A registered version. `existed` is set when the same checkpoint was registered before."""

    name: str
    version: int
    run_id: str
    fingerprint: str
    source: str
    existed: bool


def register(
    client: MlflowClient, uri: str, checkpoint: str | Path, name: str, run_id: str | None = None
) -> Registered:
    """Copy a checkpoint into a run's artifacts and make it a version of the registered model `name`.

    The artifacts are downloaded again and compared before the version is made. The same checkpoint is registered once.

    Args:
        run_id: run that keeps the files; by default the checkpoint's training run, or a new one when the store
            does not know it.

    Raises:
        UserError: no checkpoint there, a name MLflow does not take, an unknown run.
    """
    checkpoint = Path(checkpoint)
    info = _checkpoint_info(checkpoint)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII) or name.endswith(SUFFIX):
        raise UserError(f"{name!r} cannot name a registered model: take letters, digits, '-', '_' and '.'")
    fingerprint = store.fingerprint_tree(checkpoint)
    for old in versions(client, name):
        if old.tags.get("prm.checkpoint_fingerprint") == fingerprint:
            return Registered(name, int(old.version), old.run_id, fingerprint, old.source, existed=True)
    run = _run_for(client, uri, checkpoint, run_id)
    place = f"checkpoint-{fingerprint[:12]}"
    client.log_artifacts(run.info.run_id, str(checkpoint), place)
    with tempfile.TemporaryDirectory() as directory:
        copy = client.download_artifacts(run.info.run_id, place, directory)
        if store.fingerprint_tree(copy) != fingerprint:
            raise UserError(f"the artifact store gave back other bytes than {checkpoint} holds: nothing was registered")
    tags = {
        "prm.checkpoint_fingerprint": fingerprint,
        "prm.class_path": str(info.get("class_path", "")),
        "prm.checkpoint_kind": str(info.get("kind", "")),
        "prm.data_fingerprint": str(info.get("data_fingerprint") or ""),
        "prm.run_id": run.info.run_id,
        "prm.registered_by": user_name(),
    }
    source = f"{run.info.artifact_uri}/{place}"
    _ensure_model(client, name)
    made = client.create_model_version(name, source, run.info.run_id, tags={k: v for k, v in tags.items() if v})
    return Registered(name, int(made.version), run.info.run_id, fingerprint, source, existed=False)


def alias_version(client: MlflowClient, name: str, alias: str) -> int | None:
    """Version that holds an alias, or None."""
    held = registered_model(client, name).aliases.get(alias)
    return None if held is None else int(held)


def _checkpoint_info(checkpoint: Path) -> dict[str, Any]:
    try:
        info = json.loads((checkpoint / "prm.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{checkpoint} is not a prm checkpoint: it holds no prm.json") from error
    except ValueError as error:
        raise UserError(f"{checkpoint / 'prm.json'} is damaged: {error}") from error
    if not isinstance(info, dict):
        raise UserError(f"{checkpoint / 'prm.json'} is damaged: it is no JSON object")
    return info


def _run_for(client: MlflowClient, uri: str, checkpoint: Path, run_id: str | None) -> Run:
    from mlflow.exceptions import MlflowException

    wanted = run_id or training_run_id(checkpoint)
    if wanted is not None:
        try:
            return client.get_run(wanted)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            if run_id is not None:
                raise UserError(f"no run {run_id} in this MLflow: leave out --run to make one") from error
    tags = {**provenance_tags(), "prm.kind": "registration"}
    run = client.create_run(experiment_id(client, uri, "prm"), tags=tags, run_name=f"register {checkpoint.name}")
    client.set_terminated(run.info.run_id)
    return run


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def registered_model(client: MlflowClient, name: str) -> RegisteredModel:
    """A registered model, or UserError."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise UserError(
            f"no registered model {name!r} in this MLflow: make it with `prm register CHECKPOINT --name {name}`"
        ) from error


def model_version(client: MlflowClient, name: str, version: int) -> ModelVersion:
    """A version of a registered model, or UserError naming those that exist."""
    from mlflow.exceptions import MlflowException

    registered_model(client, name)
    try:
        return client.get_model_version(name, str(version))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        known = ", ".join(sorted((str(v.version) for v in versions(client, name)), key=int)) or "none"
        raise UserError(f"{name} has no version {version}; versions: {known}") from error


def versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model."""
    found: list[ModelVersion] = []
    token = None
    while True:
        page = client.search_model_versions(f"name='{name}'", max_results=200, page_token=token)
        found += page
        if not (token := page.token):
            return found
