"""Runs on a real SQLite MLflow: what is logged, what never is, and which mistakes are refused."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from prm.errors import UserError
from prm.tracking import masking
from prm.tracking.client import open_client, resolve_tracking_uri
from prm.tracking.runs import open_run, read_record, training_run_id


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A migrated SQLite store; migrating takes seconds, so one serves the module."""
    made = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    open_client(made)
    return made


def test_uri_resolution(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_tracking_uri() == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_tracking_uri() == "http://tracking:5000"
    assert resolve_tracking_uri("sqlite:///x.db") == f"sqlite:///{tmp_path}/x.db"


@pytest.mark.parametrize("wrong", ["mlruns", "file:///tmp/mlruns", "foo://x", "/tmp/mlruns"])
def test_uris_that_mlflow_does_not_take(wrong):
    with pytest.raises(UserError, match="tracking URI"):
        resolve_tracking_uri(wrong)


def test_a_run_holds_everything_once(tmp_path, uri):
    config = {"model": {"lr": 0.1, "sizes": [1, 2]}, "data": {"source": "https://me:pw@host/data?token=abc&x=1"}}
    with open_run(
        "whole", "first", kind="evaluation", run_dir=tmp_path, tracking_uri=uri,
        parent_run_id="p1", data_fingerprint="d1", checkpoint_fingerprint="c1", params=config, tags={"lm": "tiny"},
    ) as run:  # fmt: skip
        run.log_params(config)
        for step in range(50):
            run.log_metrics({"train/loss": 1.0 / (step + 1), "pref_lamp/guided[lore]/rouge1": 0.3}, step=step)
        run.log_config({"a": {"hf_token": "hush", "b": 1}})
    client = open_client(uri)
    logged = client.get_run(run.run_id)
    assert logged.info.status == "FINISHED"
    assert logged.data.params == {
        "model.lr": "0.1",
        "model.sizes": "[1, 2]",
        "data.source": "https://host/data?token=***&x=1",
    }
    assert len(client.get_metric_history(run.run_id, "train/loss")) == 50
    assert logged.data.metrics["pref_lamp/guided_lore/rouge1"] == 0.3
    tags = logged.data.tags
    assert (tags["prm.kind"], tags["prm.data_fingerprint"], tags["prm.checkpoint_fingerprint"], tags["lm"]) == (
        "evaluation", "d1", "c1", "tiny",
    )  # fmt: skip
    assert tags["mlflow.parentRunId"] == "p1"
    assert tags["prm.run_uuid"] == run.run_uuid
    assert tags["prm.version.mlflow"]
    text = Path(client.download_artifacts(run.run_id, "config.yaml", str(tmp_path))).read_text()
    assert "hush" not in text
    assert "b: 1" in text
    assert read_record(tmp_path)["run_id"] == run.run_id
    assert not (tmp_path / "spool").exists()


def test_no_secret_reaches_the_database(tmp_path, uri):
    with open_run("secrets", kind="training", run_dir=tmp_path, tracking_uri=uri) as run:
        run.log_params(
            {
                "hub": {"hf_token": "s3cr3t-a", "apiKey": "s3cr3t-b", "credentials": {"user": "s3cr3t-c"}},
                "db": "postgresql://u:s3cr3t-d@h/db",
                "list": [{"password": "s3cr3t-e"}],
                "max_new_tokens": 32,
                "tokenizer": "t",
            }
        )
        run.set_tags({"store": "s3://k:s3cr3t-f@bucket"})
    file = uri.removeprefix("sqlite:///")
    assert b"s3cr3t" not in b"".join(row.encode() for row in sqlite3.connect(file).iterdump())
    assert open_client(uri).get_run(run.run_id).data.params["max_new_tokens"] == "32"
    assert "hub.hf_token" in open_client(uri).get_run(run.run_id).data.tags["prm.params_hidden"]


def test_secret_flags_are_hidden_in_the_command_line():
    line = masking.command_line(
        ["prm", "evaluate", "--api-key", "abc", "--token=def", "--uri", "http://a:b@h", "--n", "1"]
    )
    assert line == "prm evaluate --api-key '***' '--token=***' --uri http://h --n 1"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pref_lamp/guided[lore]/rouge1", "pref_lamp/guided_lore/rouge1"),
        ("win@4 (%)", "win_4"),
        ("/a//b/", "a/b"),
        ("a/../b", "a/b"),
        ("rm_accuracy", "rm_accuracy"),
    ],
)
def test_metric_names_that_mlflow_takes(name, expected):
    from mlflow.utils.validation import _validate_metric_name

    assert masking.metric_name(name) == expected
    _validate_metric_name(expected)


def test_figures_that_are_not_finite_are_refused_with_name_and_step(tmp_path, uri):
    with open_run("nan", kind="training", run_dir=tmp_path, tracking_uri=uri) as run:
        with pytest.raises(UserError, match="step 7: loss is nan"):
            run.log_metrics({"loss": float("nan"), "acc": 1.0}, step=7)
        with pytest.raises(UserError, match="inf"):
            run.log_metrics({"loss": float("inf")}, step=8)
    assert open_client(uri).get_run(run.run_id).data.metrics == {}


def test_a_parameter_cannot_change_and_two_names_cannot_become_one(tmp_path, uri):
    with open_run("change", kind="training", run_dir=tmp_path, tracking_uri=uri, params={"lr": 1}) as run:
        with pytest.raises(UserError, match="lr was logged as '1'"):
            run.log_params({"lr": 2})
        run.log_metrics({"a(b)": 1.0})
        with pytest.raises(ValueError, match="one MLflow name"):
            run.log_metrics({"a[b]": 1.0})


def test_an_error_ends_the_run_as_failed(tmp_path, uri):
    with (
        pytest.raises(RuntimeError),
        open_run("fails", kind="training", run_dir=tmp_path, tracking_uri=uri) as run,
    ):
        raise RuntimeError
    assert open_client(uri).get_run(run.run_id).info.status == "FAILED"


def test_a_run_is_reopened_by_its_uuid(tmp_path, uri):
    with open_run("again", kind="training", run_dir=tmp_path, tracking_uri=uri) as first:
        first.log_metrics({"a": 1.0})
    with open_run("again", kind="training", run_dir=tmp_path, tracking_uri=uri, run_uuid=first.run_uuid) as second:
        second.log_metrics({"b": 1.0})
    assert second.run_id == first.run_id
    assert set(open_client(uri).get_run(first.run_id).data.metrics) == {"a", "b"}


def test_the_training_run_of_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "best"
    checkpoint.mkdir(parents=True)
    (checkpoint / "prm.json").write_text("{}")
    assert training_run_id(checkpoint) is None
    (tmp_path / "run" / "mlflow.json").write_text('{"run_id": "above"}')
    assert training_run_id(checkpoint) == "above"
    (checkpoint / "prm.json").write_text('{"mlflow_run_id": "own"}')
    assert training_run_id(checkpoint) == "own"


@pytest.mark.slow
def test_processes_that_open_a_fresh_database_at_once(tmp_path):
    code = (
        "import sys; from prm.tracking.runs import open_run\n"
        "with open_run('e', kind='training', run_dir=sys.argv[1]) as run: run.log_metrics({'a': 1.0})\n"
        "assert run.run_id and not run.waiting"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / str(i))], cwd=tmp_path, stderr=subprocess.PIPE)
        for i in range(3)
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert (tmp_path / "runs" / "mlflow.db").is_file()
    assert not (tmp_path / "mlruns").exists()


def test_the_lightning_logger_writes_rows_run_and_config(tmp_path, uri, caplog):
    pytest.importorskip("lightning")
    from prm.training.mlflow_logger import MLflowLogger

    logger = MLflowLogger(experiment="lightning", tracking_uri=uri, save_dir=str(tmp_path), system_metrics=False)
    assert logger.save_dir == str(tmp_path)
    assert not list(tmp_path.iterdir()), "the run is opened at first use"
    (tmp_path / "metrics.jsonl").write_text("rows of an earlier run\n")
    (tmp_path / "config.yaml").write_text("model: {lr: 0.1, api_key: hush}\n")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"train/loss": 0.5, "epoch": 0}, step=3)
    logger.log_metrics({"train/loss": float("nan"), "acc": 0.5, "epoch": 1}, step=4)
    run_id = logger.run_id
    logger.finalize("success")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 3, "epoch": 0.0, "name": "train/loss", "value": 0.5},
        {"step": 4, "epoch": 1.0, "name": "train/loss", "value": None},
        {"step": 4, "epoch": 1.0, "name": "acc", "value": 0.5},
    ]
    assert "train/loss is nan at step 4" in caplog.text
    client = open_client(uri)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["lr"]) == ("FINISHED", "0.1")
    assert run.data.metrics == {"train/loss": 0.5, "epoch": 1.0, "acc": 0.5}
    assert [a.path for a in client.list_artifacts(run_id)] == ["config.yaml"]
    logger.log_metrics({"test/acc": 1.0}, step=5)
    logger.finalize("success")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4, "the rows before are kept"
    assert client.get_run(run_id).data.metrics["test/acc"] == 1.0
    assert read_record(tmp_path)["run_id"] == run_id


def test_the_lightning_logger_on_another_rank_writes_nothing(tmp_path, uri, monkeypatch):
    pytest.importorskip("lightning")
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from prm.training.mlflow_logger import MLflowLogger

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MLflowLogger(tracking_uri=uri, save_dir=str(tmp_path))
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"a": 1.0}, step=1)
    logger.experiment.set_tags({"a": "b"})
    logger.finalize("success")
    assert logger.run_id is None
    assert not list(tmp_path.iterdir())


def test_system_metrics_reach_the_run():
    pytest.importorskip("psutil")
    import time

    from prm.tracking.system_metrics import SystemMetrics

    seen = []
    sampler = SystemMetrics(lambda figures, step: seen.append((step, figures)), seconds=0.05)
    until = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    sampler.stop()
    assert [step for step, _ in seen[:2]] == [0, 1]
    assert seen[0][1]["system/system_memory_usage_percentage"] > 0
