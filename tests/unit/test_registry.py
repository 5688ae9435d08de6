"""Register, promote, roll back on a real SQLite MLflow, through the commands."""

import argparse
import importlib
import itertools
import json
import multiprocessing
import socket
import time

import pytest

from prm import store
from prm.commands import history as history_command
from prm.errors import UserError
from prm.tracking.client import open_client
from prm.tracking.lock import promotion_lock
from prm.tracking.promotion import check_alias, history
from prm.tracking.registry import alias_version, model_version
from prm.tracking.runs import open_run

_numbers = itertools.count()


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A migrated SQLite store; migrating takes seconds, so one serves the module."""
    made = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    open_client(made)
    return made


@pytest.fixture
def client(uri):
    return open_client(uri)


@pytest.fixture
def name():
    """A registered model's name that no other test uses."""
    return f"model-{next(_numbers)}"


@pytest.fixture
def policy(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("gates:\n- {metric: acc, at_least: 0.6, note: good}\n- {metric: guided, at_least_metric: plain}\n")
    return file


@pytest.fixture
def prm(uri, capsys):
    """Run a command with --json against the store: (exit status, result)."""

    def command(which, *arguments):
        module = importlib.import_module(f"prm.commands.{which}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        status = module.run(parser.parse_args([*map(str, arguments), "--tracking-uri", uri, "--json"]))
        return status, json.loads(capsys.readouterr().out)

    return command


def make_checkpoint(path, text="weights"):
    (path / "adapter").mkdir(parents=True)
    (path / "adapter" / "adapter_model.safetensors").write_bytes(text.encode())
    info = {"schema_version": 1, "kind": "reward_model", "class_path": "prm.reward_models.lore.LoRE"}
    store.write_json(path / "prm.json", {**info, "data_fingerprint": "data-1"})
    return path


def evaluate(path, uri, tmp_path, **metrics):
    """A finished evaluation run of a checkpoint; returns its id."""
    with open_run(
        "evaluations",
        kind="evaluation",
        run_dir=tmp_path / f"eval-{next(_numbers)}",
        tracking_uri=uri,
        checkpoint_fingerprint=store.fingerprint_tree(path),
    ) as run:
        run.log_metrics({"acc": 0.7, "guided": 0.3, "plain": 0.3, **metrics})
    return run.run_id


def registered(prm, uri, tmp_path, name, text, **metrics):
    """A registered and evaluated checkpoint; returns its version."""
    path = make_checkpoint(tmp_path / f"ckpt-{next(_numbers)}", text)
    evaluate(path, uri, tmp_path, **metrics)
    return prm("register", path, "--name", name)[1]["version"]


def test_a_registered_checkpoint_comes_back_byte_for_byte_and_holds_no_pickle(
    prm, client, uri, tmp_path, name, monkeypatch
):
    path = make_checkpoint(tmp_path / "run" / "checkpoints" / "best")
    with open_run("training", kind="training", run_dir=tmp_path / "run", tracking_uri=uri) as run:
        run.log_metrics({"loss": 1.0})
    status, made = prm("register", path, "--name", name)
    assert (status, made["version"], made["existed"]) == (0, 1, False)
    assert made["run_id"] == run.run_id, "the files go to the checkpoint's training run"
    version = client.get_model_version(name, "1")
    assert version.tags["prm.checkpoint_fingerprint"] == store.fingerprint_tree(path)
    assert version.tags["prm.class_path"] == "prm.reward_models.lore.LoRE"
    assert version.tags["prm.data_fingerprint"] == "data-1"
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    copy = mlflow.artifacts.download_artifacts(f"models:/{name}/1", dst_path=str(tmp_path / "copy"))
    assert {p.name for p in (tmp_path / "copy").rglob("*") if p.is_file()} >= {"prm.json", "adapter_model.safetensors"}
    assert not list((tmp_path / "copy").rglob("*.pkl"))
    assert (tmp_path / "copy" / "prm.json").read_text() == (path / "prm.json").read_text(), copy


def test_the_same_checkpoint_is_registered_once(prm, tmp_path, name):
    path = make_checkpoint(tmp_path / "ckpt")
    assert prm("register", path, "--name", name)[1]["version"] == 1
    assert prm("register", path, "--name", name)[1] | {"run_id": ""} == prm("register", path, "--name", name)[1] | {
        "run_id": "", "version": 1, "existed": True,
    }  # fmt: skip
    (path / "prm.json").write_text("{}")
    assert prm("register", path, "--name", name)[1]["version"] == 2


@pytest.mark.parametrize("case", ["no checkpoint", "damaged", "bad name", "unknown run"])
def test_wrong_use_of_register_changes_nothing(prm, client, tmp_path, name, case):
    path = make_checkpoint(tmp_path / "ckpt")
    arguments = [path, "--name", name]
    if case == "no checkpoint":
        arguments[0] = tmp_path
    elif case == "damaged":
        (path / "prm.json").write_text("{")
    elif case == "bad name":
        arguments[2] = name = "a/b"
    else:
        arguments += ["--run", "nope"]
    with pytest.raises(UserError) as caught:
        prm("register", *arguments)
    assert "\n" not in str(caught.value)
    assert name not in [model.name for model in client.search_registered_models()]


def test_promotion_moves_the_alias_only_when_all_gates_pass(prm, client, uri, tmp_path, name, policy):
    good = registered(prm, uri, tmp_path, name, "good")
    bad = registered(prm, uri, tmp_path, name, "bad", acc=0.59)
    out = tmp_path / "verdict.json"
    status, verdict = prm("promote", name, "--version", good, "--policy", policy, "--out", out)
    assert (status, verdict["passed"], verdict["previous"]) == (0, True, None)
    assert json.loads(out.read_text()) == verdict
    assert [g["passed"] for g in verdict["gates"]] == [True, True]
    status, verdict = prm("promote", name, "--version", bad, "--policy", policy)
    assert (status, verdict["passed"], verdict["moved"]) == (1, False, False)
    assert [g["passed"] for g in verdict["gates"]] == [False, True], "the gates after the failed one are shown too"
    assert verdict["gates"][0]["figure"] == 0.59
    assert alias_version(client, name, "champion") == good
    tags = client.get_model_version(name, str(bad)).tags
    assert tags["prm.verdict"] == "refused"
    assert tags["prm.policy_sha256"] == store.fingerprint_file(policy)
    assert [e["action"] for e in history(client, name)] == ["promoted", "refused"]
    assert history(client, name)[1]["gates"][0] == ["acc", 0.59, ">= 0.6", False]


def test_a_metric_that_was_not_logged_fails(prm, client, uri, tmp_path, name, policy):
    version = registered(prm, uri, tmp_path, name, "x")
    policy.write_text("gates:\n- {metric: never_logged, above: 0}\n")
    status, verdict = prm("promote", name, "--version", version, "--policy", policy)
    assert status == 1
    assert "no metric never_logged" in verdict["gates"][0]["reason"]
    assert alias_version(client, name, "champion") is None


def test_rollback_walks_back_through_promotions(prm, client, uri, tmp_path, name, policy):
    versions = [registered(prm, uri, tmp_path, name, str(i)) for i in range(3)]
    for version in versions:
        prm("promote", name, "--version", version, "--policy", policy)
    assert client.get_model_version(name, "3").tags["previous_champion"] == "2"
    assert prm("rollback", name)[1]["version"] == 2
    assert prm("rollback", name)[1]["version"] == 1
    with pytest.raises(UserError, match="the first champion"):
        prm("rollback", name)
    prm("promote", name, "--version", 3, "--policy", policy)
    assert prm("rollback", name)[1]["version"] == 1, "not to 2, which was rolled back itself"
    assert [e["action"] for e in prm("history", name)[1]["events"]] == [
        "promoted", "promoted", "promoted", "rolled_back", "rolled_back", "promoted", "rolled_back",
    ]  # fmt: skip


def test_promoting_the_champion_again_keeps_the_way_back(prm, uri, tmp_path, name, policy):
    for text in "ab":
        version = registered(prm, uri, tmp_path, name, text)
        prm("promote", name, "--version", version, "--policy", policy)
    status, verdict = prm("promote", name, "--version", 2, "--policy", policy)
    assert (status, verdict["moved"]) == (0, False)
    assert prm("rollback", name)[1]["version"] == 1


def test_an_alias_set_by_hand_is_not_rolled_back(prm, client, uri, tmp_path, name, policy):
    for text in "ab":
        registered(prm, uri, tmp_path, name, text)
    prm("promote", name, "--version", 1, "--policy", policy)
    client.set_registered_model_alias(name, "champion", "2")
    with pytest.raises(UserError, match="outside prm"):
        prm("rollback", name)
    assert alias_version(client, name, "champion") == 2


def test_the_newest_finished_evaluation_of_this_checkpoint_counts(prm, uri, tmp_path, name, policy):
    path = make_checkpoint(tmp_path / "ckpt")
    version = prm("register", path, "--name", name)[1]["version"]
    with pytest.raises(UserError, match="no finished evaluation"):
        prm("promote", name, "--version", version, "--policy", policy)
    good = evaluate(path, uri, tmp_path)
    time.sleep(0.01)
    worse = evaluate(path, uri, tmp_path, acc=0.1)
    with pytest.raises(ZeroDivisionError), open_run(
        "evaluations", kind="evaluation", run_dir=tmp_path / "failed", tracking_uri=uri,
        checkpoint_fingerprint=store.fingerprint_tree(path),
    ) as failed:  # fmt: skip
        failed.log_metrics({"acc": 1.0, "guided": 1.0, "plain": 0.0})
        raise ZeroDivisionError
    status, verdict = prm("promote", name, "--version", version, "--policy", policy)
    assert (status, verdict["evaluation_run"]) == (1, worse)
    status, verdict = prm("promote", name, "--version", version, "--policy", policy, "--run", good)
    assert (status, verdict["evaluation_run"]) == (0, good)
    with pytest.raises(UserError, match="not a finished evaluation"):
        prm("promote", name, "--version", version, "--policy", policy, "--run", failed.run_id)
    other = evaluate(make_checkpoint(tmp_path / "other", "other"), uri, tmp_path)
    with pytest.raises(UserError, match="another checkpoint"):
        prm("promote", name, "--version", version, "--policy", policy, "--run", other)


def test_unknown_names_versions_and_runs_are_one_clear_line(prm, client, uri, tmp_path, name, policy):
    with pytest.raises(UserError, match="no registered model"):
        prm("promote", name, "--version", 1, "--policy", policy)
    with pytest.raises(UserError, match="no registered model"):
        prm("rollback", name)
    with pytest.raises(UserError, match="no registered model"):
        prm("history", name)
    registered(prm, uri, tmp_path, name, "x")
    with pytest.raises(UserError, match="has no version 9; versions: 1"):
        prm("promote", name, "--version", 9, "--policy", policy)
    with pytest.raises(UserError, match="no run nope"):
        prm("promote", name, "--version", 1, "--policy", policy, "--run", "nope")
    with pytest.raises(UserError, match="nothing to roll back"):
        prm("rollback", name)
    assert model_version(client, name, 1).aliases == []


def test_a_server_that_is_away_is_one_clear_line_without_credentials():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        parser = argparse.ArgumentParser()
        history_command.add_arguments(parser)
        args = parser.parse_args(["m", "--tracking-uri", f"http://me:hush@{address}"])
        with pytest.raises(UserError) as caught:
            history_command.run(args)
    assert str(caught.value).startswith(f"MLflow at http://{address} cannot be reached (connection refused)")


@pytest.mark.parametrize("alias", ["latest", "LATEST", "v1", "V12", "7", "a b", "", "a/b"])
def test_aliases_that_are_refused(alias):
    with pytest.raises(UserError, match="alias"):
        check_alias(alias)


def test_other_aliases_have_a_history_of_their_own(prm, client, uri, tmp_path, name, policy):
    for text in "ab":
        version = registered(prm, uri, tmp_path, name, text)
        prm("promote", name, "--version", version, "--policy", policy, "--alias", "challenger")
    assert alias_version(client, name, "champion") is None
    assert prm("rollback", name, "--alias", "challenger")[1]["version"] == 1


def test_a_lock_that_is_held_stops_a_promotion_and_an_expired_one_does_not(client, name):
    client.create_registered_model(name)
    with promotion_lock(client, name) as holding:
        holding()
        with pytest.raises(UserError, match="another promotion"), promotion_lock(client, name, wait_seconds=0.3):
            pass
        holding()
    with promotion_lock(client, name, expiry_seconds=-1) as holding:
        with promotion_lock(client, name, wait_seconds=0.3):
            pass
        with pytest.raises(UserError, match="was lost"):
            holding()
    assert [m.name for m in client.search_registered_models() if m.name.endswith("promotion-lock")] == []


def _increment(uri, name, file):
    client = open_client(uri)
    with promotion_lock(client, name, wait_seconds=60):
        value = int(file.read_text())
        time.sleep(0.2)
        file.write_text(str(value + 1))


@pytest.mark.slow
def test_one_process_at_a_time_holds_the_lock(uri, client, name, tmp_path):
    client.create_registered_model(name)
    file = tmp_path / "counter"
    file.write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_increment, args=(uri, name, file)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert file.read_text() == "3"
