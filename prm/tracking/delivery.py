"""Sending a run's events from a thread of its own, so that neither a slow nor a dead server holds up the work.

While the server answers, events go straight to it. Once it does not, they go to the spool, and every now and then
(30 s at first, at most 5 min) the whole spool is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from prm.errors import UserError
from prm.tracking import client as clients
from prm.tracking.masking import strip_credentials
from prm.tracking.spool import Event, Spool, apply, find_or_create_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 300.0


class Delivery:
    """The way of one run's events to the tracking store or to the spool.

    Args:
        client, uri: the store.
        start: the event that says how to find or create the run.
        spool: where events wait while the store cannot be reached.
        batch_seconds: how long metrics are gathered before a batch is sent.

    Attributes:
        run_id, experiment_id: MLflow's ids; None as long as the store could not be reached.
        spooled, refused, lost: events that went to the spool, that the store refused, that could be kept nowhere.

    Raises:
        UserError: the run cannot be opened for a reason that waiting does not mend (a deleted experiment).
    """

    def __init__(
        self, client: MlflowClient, uri: str, start: Event, spool: Spool, *, batch_seconds: float = 1.0
    ) -> None:
        self._client, self._uri, self._start, self._spool = client, uri, dict(start), spool
        self._batch_seconds = batch_seconds
        self._pause, self._next_try = _FIRST_PAUSE, 0.0
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.spooled = self.refused = self.lost = 0
        self._pending: list[Event] = []
        self._changed = threading.Condition()
        self._busy = self._hurry = self._closing = False
        self._connect()
        self._thread = threading.Thread(target=self._work, name="prm-tracking", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> bool:
        """Whether the spool holds events that were not sent."""
        return bool(self._spool)

    def put(self, event: Event) -> None:
        """Hand over one event; returns at once."""
        with self._changed:
            if self._pending and self._pending[-1]["event"] == event["event"] == "metrics":
                self._pending[-1]["rows"] += event["rows"]
            else:
                self._pending.append(event)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything handed over was sent or spooled."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending and not self._busy)
            self._hurry = False

    def close(self) -> None:
        """Flush, stop the thread, and try the spool a last time."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._spool:
            self._send_spool()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                self._changed.wait_for(lambda: self._hurry or self._closing, timeout=self._batch_seconds)
                events, self._pending, self._busy = self._pending, [], True
            for event in events:
                self._deliver(event)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _deliver(self, event: Event) -> None:
        if self._spool and time.monotonic() >= self._next_try:
            self._send_spool()
        if self._spool or self.run_id is None:
            self._keep(event)
            return
        try:
            apply(self._client, self.run_id, event)
        except Exception as error:  # whatever the store's client raises must not reach the training loop
            if clients.is_refusal(error):
                self._keep_refused(event, clients.first_line(error))
            else:
                self._lost_contact(error)
                self._keep(event)

    def _connect(self) -> None:
        try:
            self.run_id, self.experiment_id = find_or_create_run(self._client, self._uri, self._start)
        except UserError:
            raise
        except Exception as error:  # as above
            if clients.is_refusal(error):
                raise UserError(f"MLflow refused to open the run: {clients.first_line(error)}") from error
            self._lost_contact(error)
        self._start.pop("fresh", None)
        self._start["run_id"] = self.run_id
        if self.run_id is None:
            self._keep(self._start)

    def _send_spool(self) -> None:
        try:
            sent = self._spool.send(self._client, self._uri)
        except Exception as error:  # as above
            self._lost_contact(error)
            return
        self._pause = _FIRST_PAUSE
        self.run_id, self.experiment_id = sent.run
        self._start["run_id"] = self.run_id
        self.refused += sent.refused
        log.info("the tracking server answers again: %d spooled events were sent", sent.sent)

    def _lost_contact(self, error: Exception) -> None:
        # Warn once per outage: the pause grows with every vain try.
        if self._pause == _FIRST_PAUSE:
            log.warning(
                "MLflow at %s cannot be reached (%s): the work goes on, what it logs is kept in %s; "
                "send it later with `prm sync %s`",
                strip_credentials(self._uri),
                clients.first_line(error),
                self._spool.directory,
                self._spool.directory.parent,
            )
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _keep(self, event: Event) -> None:
        try:
            self._spool.append(event, start=self._start)
            self.spooled += 1
        except Exception as error:  # a full disk must not end the work either
            if not self.lost:
                log.warning("a tracking event can be neither sent nor kept: %s", clients.first_line(error))
            self.lost += 1

    def _keep_refused(self, event: Event, reason: str) -> None:
        log.warning("MLflow refused an event of kind %s: %s", event["event"], reason)
        self.refused += 1
        try:
            self._spool.keep_refused(event, reason)
        except Exception as error:  # as above
            log.warning("the refused event cannot be kept: %s", clients.first_line(error))
