"""One MLflow run of one job: parameters once, metrics in async batches, provenance; it survives a dead server.

    with open_run("prm", "evaluate pref-lamp", kind="evaluation", run_dir=out, params={"seed": 0}) as run:
        run.log_metrics({"pref_lamp/rm_accuracy": 0.62})
        run.log_artifact(out / "summary.json")

The run directory gets `mlflow.json` (which run this is) and, only when something could not be sent, `spool/`.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from prm import store
from prm.errors import UserError
from prm.tracking import client as clients
from prm.tracking import masking
from prm.tracking.delivery import Delivery
from prm.tracking.provenance import provenance_tags
from prm.tracking.spool import Spool

log = logging.getLogger(__name__)
KINDS = ("training", "adaptation", "evaluation")
RUN_RECORD = "mlflow.json"
_MAX_PARAM, _MAX_TAG = 6000, 5000


def open_run(
    experiment: str,
    name: str | None = None,
    *,
    kind: str,
    run_dir: str | Path,
    tracking_uri: str | None = None,
    run_uuid: str | None = None,
    parent_run_id: str | None = None,
    data_fingerprint: str | None = None,
    checkpoint_fingerprint: str | None = None,
    params: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> Run:
    """Open a run (or reopen the one of `run_uuid`) and write `mlflow.json` into `run_dir`.

    Args:
        experiment: MLflow experiment, made when missing.
        kind: one of KINDS, tag `prm.kind`.
        run_dir: directory of the job; `spool/` and `mlflow.json` go there.
        tracking_uri: see `resolve_tracking_uri`.
        run_uuid: our own id of the run (tag `prm.run_uuid`); a given one is looked for before a run is made.
        parent_run_id: MLflow id of the run this one belongs to (an evaluation's training run).
        data_fingerprint: `DatasetDir.fingerprint` of the data.
        checkpoint_fingerprint: of the checkpoint that an evaluation is about; promotion finds the run by it.

    Raises:
        UserError: the URI is wrong, the database cannot be made, the experiment is deleted. A server that does not
            answer is no error: the run goes on and spools.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}, one of {KINDS} is needed")
    uri = clients.resolve_tracking_uri(tracking_uri)
    client = clients.open_client(uri)
    identity = run_uuid or uuid.uuid4().hex
    all_tags = {**provenance_tags(data_fingerprint), **(tags or {}), "prm.run_uuid": identity, "prm.kind": kind}
    if parent_run_id:
        all_tags |= {"mlflow.parentRunId": parent_run_id, "prm.parent_run_id": parent_run_id}
    if checkpoint_fingerprint:
        all_tags["prm.checkpoint_fingerprint"] = checkpoint_fingerprint
    start = {
        "event": "start",
        "run_uuid": identity,
        "run_id": None,
        "experiment": experiment,
        "name": name or f"{kind}-{identity[:8]}",
        "tags": _tags(all_tags),
        "time": _now(),
        "fresh": run_uuid is None,
    }
    delivery = Delivery(client, uri, start, Spool(Path(run_dir) / "spool", identity))
    run = Run(delivery, run_dir=Path(run_dir), run_uuid=identity, experiment=experiment, tracking_uri=uri)
    if run_uuid is not None:
        delivery.put({"event": "resume"})
    if params:
        run.log_params(params)
    return run


class Run:
    """An open run. Made by `open_run`; usable as a context manager that ends it FINISHED or FAILED."""

    def __init__(self, delivery: Delivery, *, run_dir: Path, run_uuid: str, experiment: str, tracking_uri: str) -> None:
        self._delivery = delivery
        self.run_dir, self.run_uuid, self.experiment = run_dir, run_uuid, experiment
        self.tracking_uri = masking.strip_credentials(tracking_uri)
        self._params: dict[str, str] = {}
        self._metric_names: dict[str, str] = {}
        self._ending = threading.Lock()
        self._ended = False
        self._write_record()
        atexit.register(self._abandon)

    @property
    def run_id(self) -> str | None:
        """MLflow's id, None as long as the server could not be reached."""
        return self._delivery.run_id

    @property
    def waiting(self) -> bool:
        """Whether events wait in the spool for `prm sync`."""
        return self._delivery.waiting

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters, flattened, without secrets.

        Raises:
            UserError: a parameter was logged before with another value.
        """
        flat, hidden = masking.flatten(params)
        new = {}
        for key, value in flat.items():
            if key in self._params and self._params[key] != value:
                raise UserError(f"the parameter {key} was logged as {self._params[key]!r}, it cannot become {value!r}")
            if key not in self._params:
                new[key] = self._params[key] = value
        long = [key for key, value in new.items() if len(value) > _MAX_PARAM]
        if long:
            log.warning("%d parameters were cut to %d characters for MLflow: %s", len(long), _MAX_PARAM, long)
            self.set_tags({"prm.params_cut": ", ".join(long)})
        if hidden:
            self.set_tags({"prm.params_hidden": ", ".join(hidden)})
        if new:
            self._delivery.put({"event": "params", "params": {key: value[:_MAX_PARAM] for key, value in new.items()}})

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log figures of one step; they are sent in batches from another thread.

        Raises:
            UserError: a value is not finite (MLflow would store it as 1.8e308); nothing of the call is logged.
            ValueError: two names become one when MLflow's forbidden characters are replaced.
        """
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if bad:
            shown = ", ".join(f"{name} is {float(value)}" for name, value in bad.items())
            raise UserError(f"not logged at step {step}: {shown}; only finite figures can be logged")
        now, rows = _now(), []
        for name, value in metrics.items():
            key = masking.metric_name(name)
            if self._metric_names.setdefault(key, name) != name:
                raise ValueError(f"the metrics {name!r} and {self._metric_names[key]!r} have one MLflow name, {key!r}")
            rows.append([key, float(value), now, int(step)])
        if rows:
            self._delivery.put({"event": "metrics", "rows": rows})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; credentials in URIs are stripped."""
        self._delivery.put({"event": "tags", "tags": _tags(tags)})

    def log_artifact(self, path: str | Path, artifact_path: str | None = None) -> None:
        """Log a file or a directory, and wait until it was sent or copied into the spool."""
        path = Path(path)
        if not path.exists():
            raise UserError(f"no file to log at {path}")
        self._delivery.put({"event": "artifact", "path": str(path.resolve()), "artifact_path": artifact_path})
        self.flush()

    def log_config(self, config: Mapping[str, Any] | str | Path, file: str = "config.yaml") -> None:
        """Log a resolved configuration (a mapping, or the path of a YAML file) without its secrets."""
        if isinstance(config, (str, Path)):
            config = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
        cleaned, _ = masking.without_secrets(config)
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory) / file
            target.write_text(yaml.safe_dump(json.loads(json.dumps(cleaned, default=str)), sort_keys=False))
            self.log_artifact(target)

    def flush(self) -> None:
        """Wait until everything logged so far was sent or spooled."""
        self._delivery.flush()

    def end(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED, FAILED or KILLED. A second call does nothing."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            atexit.unregister(self._abandon)
            self._delivery.put({"event": "status", "status": status, "time": _now()})
            self._delivery.close()
            self._write_record()
        if self.waiting:
            log.warning(
                "tracking: events wait in %s: send them with `prm sync %s`", self.run_dir / "spool", self.run_dir
            )
        if self._delivery.lost or self._delivery.refused:
            log.warning("tracking: %d events refused, %d lost", self._delivery.refused, self._delivery.lost)

    def _abandon(self) -> None:
        self.end("FAILED")

    def _write_record(self) -> None:
        store.write_json(
            self.run_dir / RUN_RECORD,
            {
                "run_id": self.run_id,
                "experiment_id": self._delivery.experiment_id,
                "run_uuid": self.run_uuid,
                "experiment": self.experiment,
                "tracking_uri": self.tracking_uri,
            },
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("FINISHED" if kind is None else "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")


def read_record(run_dir: str | Path) -> dict[str, Any] | None:
    """Content of a run directory's `mlflow.json`, or None when there is none."""
    file = Path(run_dir) / RUN_RECORD
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error})") from error
    return record if isinstance(record, dict) else None


def training_run_id(checkpoint: str | Path) -> str | None:
    """MLflow id of the run that made a checkpoint: `mlflow_run_id` of its prm.json, else of the run directory above.

    A checkpoint lies at most three levels below its run directory (`<run>/checkpoints/best`).
    """
    path = Path(checkpoint).resolve()
    try:
        info = json.loads((path / "prm.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        info = {}
    if isinstance(info, dict) and info.get("mlflow_run_id"):
        return str(info["mlflow_run_id"])
    for directory in (path, *path.parents[:2]):
        record = read_record(directory)
        if record is not None and record.get("run_id"):
            return str(record["run_id"])
    return None


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: masking.strip_credentials(str(value))[:_MAX_TAG] for key, value in tags.items()}


def _now() -> int:
    return int(time.time() * 1000)
