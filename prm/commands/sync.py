"""`prm sync`: send what a run could not log while its tracking server was away."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from prm import store
from prm.commands.register import add_tracking_uri
from prm.errors import UserError
from prm.tracking.client import first_line, open_client, resolve_tracking_uri
from prm.tracking.masking import strip_credentials
from prm.tracking.runs import RUN_RECORD, read_record
from prm.tracking.spool import Spool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run or evaluation directory with a spool/ in it")
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when the server refused events or lines of the spool could not be read."""
    directory = Path(args.run_dir)
    if not directory.is_dir():
        raise UserError(f"no run directory at {directory}")
    record = read_record(directory)
    spools = Spool.all_in(directory)
    sent = refused = damaged = 0
    run_ids = []
    if spools:
        uri = resolve_tracking_uri(_uri(args.tracking_uri, record))
        client = open_client(uri, timeout_seconds=30, wanted_by="prm sync")
        for spool in spools:
            try:
                outcome = spool.send(client, uri)
            except UserError:
                raise
            except Exception as error:  # anything the client raises means that the store is not there
                raise UserError(
                    f"MLflow at {strip_credentials(uri)} cannot be reached, nothing is lost: {first_line(error)}"
                ) from error
            sent, refused, damaged = sent + outcome.sent, refused + outcome.refused, damaged + outcome.damaged
            run_ids.append(outcome.run.run_id)
            if record is not None and record.get("run_uuid") == spool.run_uuid:
                ids = {"run_id": outcome.run.run_id, "experiment_id": outcome.run.experiment_id}
                store.write_json(directory / RUN_RECORD, {**record, **ids})
    if args.json:
        print(json.dumps({"runs": run_ids, "sent": sent, "refused": refused, "damaged": damaged}))
    elif not spools:
        print(f"nothing to send in {directory}")
    else:
        print(f"sent {sent} events to {len(run_ids)} run(s): {', '.join(run_ids)}")
        if refused or damaged:
            print(f"{refused} events refused (kept in {directory / 'spool'}), {damaged} lines unreadable")
    return 1 if refused or damaged else 0


def _uri(option: str | None, record: dict[str, str] | None) -> str | None:
    """The option, else where the run was logged. Its record has no credentials: the environment's URI has them."""
    recorded = (record or {}).get("tracking_uri")
    environment = os.environ.get("MLFLOW_TRACKING_URI")
    if option or not recorded or (environment and strip_credentials(environment) == recorded):
        return option
    return recorded
