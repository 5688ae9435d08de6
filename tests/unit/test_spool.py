"""A tracking server that is away: the job goes on, nothing is lost, `prm sync` sends it."""

import argparse
import json
import socket
import time

import pytest

from prm.commands import sync
from prm.errors import UserError
from prm.tracking.client import open_client
from prm.tracking.runs import open_run, read_record
from prm.tracking.spool import Spool


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A migrated SQLite store; migrating takes seconds, so one serves the module."""
    made = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    open_client(made)
    return made


@pytest.fixture
def dead_uri():
    """The address of a loopback port where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://user:secret-word@127.0.0.1:{held.getsockname()[1]}"


def _log_something(run, tmp_path):
    file = tmp_path / "summary.json"
    file.write_text('{"x": 1}')
    run.log_params({"lr": 0.1, "api_key": "secret-word"})
    run.log_metrics({"loss": 0.5}, step=1)
    run.log_metrics({"loss": 0.25}, step=2)
    run.log_artifact(file)
    file.unlink()


def _sync(run_dir, uri):
    parser = argparse.ArgumentParser()
    sync.add_arguments(parser)
    return sync.run(parser.parse_args([str(run_dir), "--tracking-uri", uri]))


def test_a_dead_server_costs_seconds_and_everything_is_sent_later(tmp_path, dead_uri, uri, caplog):
    began = time.monotonic()
    with open_run("away", "job", kind="training", run_dir=tmp_path / "run", tracking_uri=dead_uri) as run:
        assert run.run_id is None
        _log_something(run, tmp_path)
    assert time.monotonic() - began < 10
    assert run.waiting
    assert "prm sync" in caplog.text
    spooled = "".join(p.read_text() for p in (tmp_path / "run").rglob("*.json*"))
    assert "secret-word" not in spooled + caplog.text

    assert _sync(tmp_path / "run", uri) == 0
    assert not Spool.all_in(tmp_path / "run")
    record = read_record(tmp_path / "run")
    client = open_client(uri)
    sent = client.get_run(record["run_id"])
    assert sent.info.status == "FINISHED"
    assert sent.info.run_name == "job"
    assert sent.data.params == {"lr": "0.1"}
    assert [(m.step, m.value) for m in client.get_metric_history(record["run_id"], "loss")] == [(1, 0.5), (2, 0.25)]
    assert [a.path for a in client.list_artifacts(record["run_id"])] == ["summary.json"]
    assert sent.data.tags["prm.run_uuid"] == run.run_uuid
    assert _sync(tmp_path / "run", uri) == 0, "a second sync has nothing to do"


def test_a_server_that_dies_in_between_and_comes_back(tmp_path, uri, monkeypatch):
    from mlflow import MlflowClient

    alive = MlflowClient.log_batch

    def dead(*_args, **_kwargs):
        raise ConnectionError("connection refused")

    run = open_run("away", kind="training", run_dir=tmp_path, tracking_uri=uri)
    run.log_metrics({"loss": 3.0}, step=1)
    run.flush()
    monkeypatch.setattr(MlflowClient, "log_batch", dead)
    run.log_metrics({"loss": 2.0}, step=2)
    run.flush()
    assert run.waiting
    monkeypatch.setattr(MlflowClient, "log_batch", alive)
    run.log_metrics({"loss": 1.0}, step=3)
    run.end()
    assert not run.waiting
    history = open_client(uri).get_metric_history(run.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_sending_that_is_interrupted_goes_on_where_it_stopped(tmp_path, uri, monkeypatch):
    from mlflow import MlflowClient

    spool = Spool(tmp_path / "spool", "abc")
    start = {
        "event": "start",
        "run_uuid": "abc",
        "run_id": None,
        "experiment": "away",
        "name": "n",
        "tags": {"prm.run_uuid": "abc"},
        "time": 1,
    }
    for step in range(3):
        spool.append({"event": "metrics", "rows": [["loss", float(step), 1, step]]}, start=start)
    alive, calls = MlflowClient.log_batch, []

    def breaks_at_the_second(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("gone")
        return alive(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", breaks_at_the_second)
    client = open_client(uri)
    with pytest.raises(ConnectionError):
        spool.send(client, uri)
    outcome = spool.send(client, uri)
    assert outcome.sent == 2, "the first was sent before"
    assert len(client.get_metric_history(outcome.run.run_id, "loss")) == 3
    found = client.search_runs([outcome.run.experiment_id], "tags.`prm.run_uuid` = 'abc'")
    assert len(found) == 1, "the run is made once"


def test_what_the_server_refuses_is_kept_with_its_reason_and_the_rest_arrives(tmp_path, uri):
    run = open_run("away", kind="training", run_dir=tmp_path, tracking_uri=uri)
    run._delivery.put({"event": "params", "params": {"lr": "1"}})
    run._delivery.put({"event": "params", "params": {"lr": "2"}})
    run.log_metrics({"loss": 1.0})
    run.end()
    refused = list((tmp_path / "spool").glob("*.refused.jsonl"))
    assert json.loads(refused[0].read_text())["event"]["params"] == {"lr": "2"}
    assert open_client(uri).get_run(run.run_id).data.metrics["loss"] == 1.0


def test_a_line_cut_by_a_crash_is_counted_and_the_rest_is_sent(tmp_path, dead_uri, uri, capsys):
    with open_run("away", kind="training", run_dir=tmp_path, tracking_uri=dead_uri) as run:
        run.log_metrics({"loss": 1.0})
    file = next((tmp_path / "spool").glob("*.jsonl"))
    file.write_text(file.read_text() + '{"event": "met')
    assert _sync(tmp_path, uri) == 1
    assert "1 lines unreadable" in capsys.readouterr().out
    assert open_client(uri).get_run(read_record(tmp_path)["run_id"]).data.metrics == {"loss": 1.0}


def test_sync_to_a_server_that_is_still_away_loses_nothing(tmp_path, dead_uri):
    with open_run("away", kind="training", run_dir=tmp_path, tracking_uri=dead_uri) as run:
        run.log_metrics({"loss": 1.0})
    before = next((tmp_path / "spool").glob("*.jsonl")).read_text()
    with pytest.raises(UserError, match="cannot be reached") as caught:
        _sync(tmp_path, dead_uri)
    assert "secret-word" not in str(caught.value)
    assert next((tmp_path / "spool").glob("*.jsonl")).read_text() == before
