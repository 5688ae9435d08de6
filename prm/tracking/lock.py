"""A lock on a registered model, held in the registry itself so that it works between machines.

MLflow moves aliases without compare-and-swap. Creating a registered model is atomic, so `NAME.promotion-lock` is the
lock, with its holder and expiry as tags. An expired lock (of a process that died) is taken over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prm.errors import UserError
from prm.provenance import user_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

SUFFIX = ".promotion-lock"


@contextlib.contextmanager
def promotion_lock(
    client: MlflowClient, name: str, *, expiry_seconds: float = 120.0, wait_seconds: float = 10.0
) -> Iterator[Callable[[], None]]:
    """Hold the lock of registered model `name`; yields a function that raises unless it is still held.

    Args:
        expiry_seconds: after this a lock counts as left behind by a process that died.
        wait_seconds: how long to wait for another holder.

    Raises:
        UserError: another process holds it for longer than we wait, or it was lost meanwhile.
    """
    from mlflow.exceptions import MlflowException

    lock, token = name + SUFFIX, uuid.uuid4().hex
    until = time.monotonic() + wait_seconds

    def tags() -> dict[str, str]:
        try:
            return dict(client.get_registered_model(lock).tags)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise

    def holding() -> None:
        if tags().get("prm.token") != token:
            raise UserError(f"the promotion lock of {name} was lost to another process: run the command again")

    while True:
        holder = f"{user_name()}@{socket.gethostname()} (process {os.getpid()})"
        expires = time.time() + expiry_seconds
        try:
            client.create_registered_model(
                lock, tags={"prm.token": token, "prm.holder": holder, "prm.expires": f"{expires:.3f}"}
            )
            break
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        other = tags()
        if other and float(other.get("prm.expires", 0)) < time.time():
            _remove(client, lock)
            continue
        if time.monotonic() >= until:
            raise UserError(
                f"another promotion of {name} is under way, by {other.get('prm.holder', 'somebody')}: try again; "
                f"a lock left behind by a dead process ends after {expiry_seconds:.0f} s"
            )
        time.sleep(0.2)
    try:
        # Two processes may take over the same expired lock; the later one's token is the one that stands.
        holding()
        yield holding
    finally:
        if tags().get("prm.token") == token:
            _remove(client, lock)


def _remove(client: MlflowClient, lock: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.delete_registered_model(lock)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
