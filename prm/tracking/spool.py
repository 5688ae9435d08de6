"""What a tracking server missed: events of a run as JSON lines on disk, and sending them later.

    <run directory>/spool/<run uuid>.jsonl          events in order, the first says how to find or create the run
    <run directory>/spool/<run uuid>.sent           how many of them were sent, so that sending can be interrupted
    <run directory>/spool/<run uuid>.files/         copies of the artifacts among them
    <run directory>/spool/<run uuid>.refused.jsonl  events that the server understood and refused, with its reason

Sending an event twice does no harm: MLflow keeps one row for equal metrics, and equal parameters are accepted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prm import store
from prm.errors import UserError
from prm.tracking import client as clients

if TYPE_CHECKING:
    import mlflow.entities
    from mlflow import MlflowClient

Event = dict[str, Any]
_BATCH = 100


class Spool:
    """The spooled events of one run. All methods may be called while another process sends the same spool."""

    def __init__(self, directory: str | Path, run_uuid: str) -> None:
        self.directory = Path(directory)
        self.run_uuid = run_uuid
        self.file = self.directory / f"{run_uuid}.jsonl"
        self._sent = self.directory / f"{run_uuid}.sent"
        self._files = self.directory / f"{run_uuid}.files"
        self._refused = self.directory / f"{run_uuid}.refused.jsonl"
        self._lock = self.directory / f".{run_uuid}.lock"

    @classmethod
    def all_in(cls, run_dir: str | Path) -> list[Spool]:
        """Every spool with events below `run_dir`/spool."""
        directory = Path(run_dir) / "spool"
        names = sorted(directory.glob("*.jsonl"))
        return [cls(directory, path.stem) for path in names if not path.name.endswith(".refused.jsonl")]

    def __bool__(self) -> bool:
        return self.file.is_file()

    def append(self, event: Event, *, start: Event) -> None:
        """Keep one event; `start` opens the file when this is its first. Artifacts are copied."""
        with store.writing(self.file):
            self.directory.mkdir(parents=True, exist_ok=True)
            with clients.locked_file(self._lock):
                if event["event"] == "artifact":
                    event = {**event, "path": str(self._copy(Path(event["path"])))}
                new = [start] if not self.file.is_file() and event["event"] != "start" else []
                with self.file.open("a", encoding="utf-8") as handle:
                    handle.write("".join(store.canonical_json(item) + "\n" for item in [*new, event]))

    def _copy(self, path: Path) -> Path:
        place = self._files / str(len(list(self._files.glob("*"))))
        place.mkdir(parents=True)
        copied = shutil.copytree(path, place / path.name) if path.is_dir() else shutil.copy2(path, place / path.name)
        return Path(copied).resolve()

    def keep_refused(self, event: Event, reason: str) -> None:
        """Keep an event that the server refused, with its reason; it is not sent again."""
        with store.writing(self._refused):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._refused.open("a", encoding="utf-8") as handle:
                handle.write(store.canonical_json({"reason": reason, "event": event}) + "\n")

    def events(self) -> tuple[list[Event], int]:
        """The events on disk, and how many lines could not be read (a process that died while writing leaves one)."""
        events, damaged = [], 0
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                damaged += 1
        return events, damaged

    def send(self, client: MlflowClient, uri: str) -> Sent:
        """Send what is left, in order, and remove the spool when all of it arrived.

        Raises:
            Exception: whatever the client raises when the store cannot be reached; what was sent is remembered.
        """
        with clients.locked_file(self._lock):
            events, damaged = self.events()
            if not events or events[0]["event"] != "start":
                raise UserError(f"{self.file} does not begin with how to open the run: it is damaged")
            done = int(self._sent.read_text()) if self._sent.is_file() else 0
            run = find_or_create_run(client, uri, events[0])
            sent = refused = 0
            for index, event in enumerate(events):
                if index < done or event["event"] == "start":
                    continue
                try:
                    apply(client, run.run_id, event)
                    sent += 1
                except Exception as error:
                    if not clients.is_refusal(error):
                        store.write_text(self._sent, str(index))
                        raise
                    self.keep_refused(event, clients.first_line(error))
                    refused += 1
            self.file.unlink()
            self._sent.unlink(missing_ok=True)
            shutil.rmtree(self._files, ignore_errors=True)
        return Sent(run, sent, refused, damaged)


class RunIds(NamedTuple):
    """MLflow's ids of a run and of its experiment."""

    run_id: str
    experiment_id: str


@dataclass(frozen=True)
class Sent:
    """Outcome of sending a spool: the run, events sent, events the server refused, lines that could not be read."""

    run: RunIds
    sent: int
    refused: int
    damaged: int


def find_or_create_run(client: MlflowClient, uri: str, start: Event) -> RunIds:
    """The run that a start event describes: by its run id, else by our UUID, else a new one."""
    from mlflow.exceptions import MlflowException

    if start.get("run_id"):
        try:
            return _ids(client.get_run(start["run_id"]))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    experiment = clients.experiment_id(client, uri, start["experiment"])
    if not start.get("fresh"):
        found = client.search_runs([experiment], f"tags.`prm.run_uuid` = '{start['run_uuid']}'", max_results=1)
        if found:
            return _ids(found[0])
    return _ids(client.create_run(experiment, start_time=start["time"], tags=start["tags"], run_name=start["name"]))


def _ids(run: mlflow.entities.Run) -> RunIds:
    return RunIds(str(run.info.run_id), str(run.info.experiment_id))


def apply(client: MlflowClient, run_id: str, event: Event) -> None:
    """Do one event on the tracking store."""
    from mlflow.entities import Metric, Param, RunTag

    kind = event["event"]
    if kind == "metrics":
        rows = [Metric(key, value, time, step) for key, value, time, step in event["rows"]]
        for first in range(0, len(rows), 1000):
            client.log_batch(run_id, metrics=rows[first : first + 1000], synchronous=True)
    elif kind == "params":
        params = [Param(key, value) for key, value in event["params"].items()]
        for first in range(0, len(params), _BATCH):
            client.log_batch(run_id, params=params[first : first + _BATCH], synchronous=True)
    elif kind == "tags":
        tags = [RunTag(key, value) for key, value in event["tags"].items()]
        for first in range(0, len(tags), _BATCH):
            client.log_batch(run_id, tags=tags[first : first + _BATCH], synchronous=True)
    elif kind == "artifact":
        path = event["path"]
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} is gone")
        send = client.log_artifacts if Path(path).is_dir() else client.log_artifact
        send(run_id, path, event["artifact_path"])
    elif kind == "status":
        client.set_terminated(run_id, status=event["status"], end_time=event["time"])
    elif kind == "resume":
        client.update_run(run_id, status="RUNNING")
    else:
        raise ValueError(f"unknown tracking event {kind!r}")
