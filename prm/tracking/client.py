"""Opening an MLflow client: which tracking URI, a fresh database only once, and which errors mean what.

MLflow is imported inside functions: it takes two seconds, and `prm` works without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prm import extras, store
from prm.errors import UserError
from prm.tracking.masking import strip_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
    "INVALID_STATE",
}

# MLflow reads these at every request, so the client opened last decides; what the user has set stays.
_SET_BY_USER = {name for name in os.environ if name.startswith("MLFLOW_HTTP_REQUEST_")}


def resolve_tracking_uri(option: str | None = None) -> str:
    """The tracking URI: the option, else $MLFLOW_TRACKING_URI, else `sqlite:///<cwd>/runs/mlflow.db`.

    A relative SQLite path becomes absolute, so that what is written down keeps its meaning elsewhere.

    Raises:
        UserError: a scheme that MLflow does not take, or a plain directory (its file store is gone).
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'runs' / 'mlflow.db'}"
    scheme = uri.partition("://")[0].partition("+")[0] if "://" in uri else uri
    if scheme not in _SCHEMES or ("://" not in uri and scheme != "databricks"):
        raise UserError(
            f"tracking URI {strip_credentials(uri)!r} is not one of {', '.join(_SCHEMES)}: "
            "use sqlite:///runs/mlflow.db or http://host:port"
        )
    file = sqlite_file(uri)
    return uri if file is None else f"{uri.partition(':///')[0]}:///{file}"


def sqlite_file(uri: str) -> Path | None:
    """Absolute path of a SQLite tracking URI, or None for any other."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///(.+)", uri)
    return (Path.cwd() / match.group(1)).resolve() if match else None


def artifact_location(uri: str, experiment: str) -> str | None:
    """Where a new experiment keeps its artifacts: beside a SQLite database; None leaves it to the server."""
    file = sqlite_file(uri)
    if file is None:
        return None
    return (file.parent / "mlartifacts" / re.sub(r"[^\w.-]+", "_", experiment)).as_uri()


def open_client(uri: str, *, timeout_seconds: int = 2, wanted_by: str = "tracking with MLflow") -> MlflowClient:
    """A client for a resolved tracking URI.

    A server that does not answer fails after `timeout_seconds`, without retries, instead of MLflow's four minutes;
    $MLFLOW_HTTP_REQUEST_TIMEOUT and $MLFLOW_HTTP_REQUEST_MAX_RETRIES win where they are set. A SQLite database that
    is not there yet is made under a file lock, because two processes that migrate it at once break it.

    Raises:
        ExtraMissing: MLflow is not installed.
        UserError: the SQLite database cannot be made or opened there.
    """
    extras.require("track", wanted_by=wanted_by)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for variable, value in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 0), ("MLFLOW_HTTP_REQUEST_TIMEOUT", timeout_seconds)):
        if variable not in _SET_BY_USER:
            os.environ[variable] = str(value)
    # Standard output belongs to a command's own result.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "mlflow.store.db.utils", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
    file = sqlite_file(uri)
    if file is None:
        return MlflowClient(tracking_uri=uri)
    with store.writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(file.parent / f".{file.name}.lock"):
            try:
                client = MlflowClient(tracking_uri=uri)
                client.search_experiments(max_results=1)
            except MlflowException as error:
                raise UserError(f"the tracking database {file} cannot be opened: {first_line(error)}") from error
    return client


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file (made when missing) among the processes of this machine."""
    with open(path, "a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """Id of the experiment `name`, made when it is missing (also when another process makes it meanwhile).

    Raises:
        UserError: the experiment was deleted in MLflow.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifact_location(uri, name)))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    if found.lifecycle_stage != "active":
        raise UserError(f"the MLflow experiment {name!r} is deleted: restore it, or choose another experiment name")
    return str(found.experiment_id)


def is_refusal(error: Exception) -> bool:
    """Whether sending it again cannot help: the store understood and said no, or a file to send is gone."""
    return isinstance(error, FileNotFoundError) or getattr(error, "error_code", None) in _REFUSALS


def connection_problem(error: BaseException | None) -> str | None:
    """Why a server could not be reached, in a few words, if that is what an error (or its cause) says."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, ConnectionRefusedError):
            return "connection refused"
        if isinstance(error, socket.gaierror):
            return "unknown host"
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            return "no answer in time"
        # urllib3 keeps the cause in `reason`, requests in its first argument.
        inner = getattr(error, "reason", None) or next((a for a in error.args if isinstance(a, BaseException)), None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """What an error says in one line: why there was no connection, or its text's first line without credentials."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return connection_problem(error) or strip_credentials(lines[0])[:200]


@contextlib.contextmanager
def reachable(uri: str) -> Iterator[None]:
    """For commands that cannot go on without the store: its errors become one line that names the URI."""
    import requests
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, requests.RequestException) as error:
        place = f"MLflow at {strip_credentials(uri)}"
        if problem := connection_problem(error):
            raise UserError(f"{place} cannot be reached ({problem}): start it, or pass --tracking-uri") from error
        raise UserError(f"{place} says: {first_line(error)}") from error
