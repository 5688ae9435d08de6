"""A run that goes on from a state ends as if undisturbed, and no state that is not whole is ever taken for one."""

import itertools
import json
import random
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from data_modules.preference_data import PreferenceDataModule
from prm.backbones import LoraSpec
from prm.dataset_dir import write_dataset
from prm.errors import UserError
from prm.records import PreferencePair, User, user_prompt
from prm.reward_models import LoRE
from prm.training import resume
from prm.training.callbacks import PrmCheckpoint, RunRecord, full_state
from prm.training.module import RewardModelModule
from prm.training.resume import Resume, check_config
from prm.training.states import newest_state, read_state

CONFIG = {
    "model": {"adapter_lr": 1e-3, "schedule": "linear"},
    "data": {"batch_size": 2, "seed": 0, "layout": "shared"},
    "trainer": {"max_epochs": 2, "max_steps": -1, "gradient_clip_val": 1.0, "devices": 1},
    "seed_everything": 0,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """22 training pairs of two users: five and a half steps of two batches of two."""
    pairs = []
    for user in ("ann", "bob"):
        for i in range(15):
            titles = (f"On matter {i}", f"Matter {i}: why?")
            chosen, rejected = titles if user == "ann" else titles[::-1]
            split = "train" if i < 11 else "validation"
            prompt = user_prompt(f"Title of matter {i}" + " and more" * (i % 4))
            pairs.append(PreferencePair(f"{user}/{i}", user, split, prompt, chosen, rejected))
    out = tmp_path_factory.mktemp("data") / "toy"
    users = [User("ann", "train"), User("bob", "train")]
    write_dataset(out, name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0)
    return str(out)


class Watch(Callback):
    """Notes the pairs of every batch, and stops like a crash before a given batch."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        if trainer.fit_loop.total_batch_idx == self.stop_at:
            raise RuntimeError("crash")
        self.seen.append(batch["sample_ids"].tolist())


class NoFiles(PrmCheckpoint):
    """Keeps the best figures and writes nothing, which takes most of the time here."""

    def _export(self, *_):
        pass

    _copy = _export


@pytest.fixture(scope="module")
def fit(data_dir, tiny_llama_path):
    def fit(run_dir, *, every=2, stop_at=None, state=None, config=CONFIG, batch_size=2, accumulate=2, **options):
        seed_everything(0, verbose=False)
        lora = LoraSpec(r=4, alpha=8, dropout=0.2)  # dropout: random states matter
        module = RewardModelModule(
            str(tiny_llama_path), lambda d: LoRE(d, 2), lora=lora, user_lr=0.1, schedule="linear", warmup_steps=3
        )
        data = PreferenceDataModule(data_dir, str(tiny_llama_path), batch_size=batch_size, max_length=64)
        checkpoints = NoFiles(run_dir / "checkpoints", {})
        watch = Watch(stop_at)
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
            accumulate_grad_batches=accumulate, gradient_clip_val=1.0,
            callbacks=[checkpoints, watch, Resume(run_dir, every, config, checkpoints, state)],
            **{"max_epochs": 2, **options},
        )  # fmt: skip
        if stop_at is None:
            trainer.fit(module, datamodule=data)
        else:
            with pytest.raises(RuntimeError, match="crash"):
                trainer.fit(module, datamodule=data)
        return module, trainer, watch, checkpoints

    return fit


@pytest.fixture(scope="module")
def undisturbed(fit, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed"), val_check_interval=4)


@pytest.mark.parametrize(("stop_at", "every"), [(5, 1), (9, 2), (10, 1), (10, 2), (13, 2)])
def test_a_crashed_run_ends_with_the_same_weights_bit_for_bit(fit, undisturbed, tmp_path, stop_at, every):
    """Within the first epoch, at its end (batch 10 begins the second) and within the second."""
    module, trainer, watch, checkpoints = undisturbed
    assert len(watch.seen) == 20
    fit(tmp_path / "run", every=every, stop_at=stop_at, val_check_interval=4)
    state = newest_state(tmp_path / "run")
    assert 0 < state.step <= stop_at // 2
    resumed, trainer_2, watch_2, checkpoints_2 = fit(tmp_path / "run", state=state, val_check_interval=4)
    assert watch_2.seen == watch.seen[state.step * 2 :]
    assert trainer_2.global_step == trainer.global_step == 10
    assert trainer_2.current_epoch == trainer.current_epoch
    ours, theirs = full_state(resumed), full_state(module)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (checkpoints_2.best, checkpoints_2.best_step) == (checkpoints.best, checkpoints.best_step)


def test_batches_come_from_other_places_without_the_position(fit, undisturbed, tmp_path, monkeypatch):
    """What Lightning does by itself: the epoch's first batches again. So the test above can fail."""
    fit(tmp_path / "run", stop_at=7, val_check_interval=4)
    state = newest_state(tmp_path / "run")
    state.info["step_in_epoch"] = 0
    _, _, watch, _ = fit(tmp_path / "run", state=state, val_check_interval=4)
    assert watch.seen[: 20 - 2 * state.step] != undisturbed[2].seen[state.step * 2 :]


def test_a_complete_run_has_nothing_left_to_do_and_can_be_prolonged(fit, tmp_path):
    module, _, _, _ = fit(tmp_path / "run")
    state = newest_state(tmp_path / "run")
    assert state.step == 10
    again, trainer, watch, _ = fit(tmp_path / "run", state=state)
    assert watch.seen == [] and trainer.global_step == 10
    assert torch.equal(full_state(again)["head.bases"], full_state(module)["head.bases"])
    _, trainer, watch, _ = fit(tmp_path / "run", state=newest_state(tmp_path / "run"), max_epochs=3)
    assert trainer.global_step == 15 and len(watch.seen) == 10


def test_the_last_two_states_are_kept(fit, tmp_path):
    fit(tmp_path / "run", every=3)
    assert sorted(p.name for p in (tmp_path / "run/resume").iterdir()) == ["10", "9"]
    fit(tmp_path / "none", every=0)
    assert not (tmp_path / "none/resume").exists()


# What is whole


@pytest.fixture(scope="module")
def states(data_dir, tiny_llama_path, tmp_path_factory):
    run = tmp_path_factory.mktemp("states") / "run"
    module = RewardModelModule(str(tiny_llama_path), lambda d: LoRE(d, 2), lora=LoraSpec(r=4, alpha=8))
    data = PreferenceDataModule(data_dir, str(tiny_llama_path), batch_size=4, max_length=64)
    checkpoints = PrmCheckpoint(run / "checkpoints", {})
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, max_steps=4, limit_val_batches=0,
        callbacks=[checkpoints, Resume(run, 2, CONFIG, checkpoints, None)],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return run


@pytest.fixture
def run(states, tmp_path):
    return shutil.copytree(states, tmp_path / "run")


def test_a_state_holds_everything_by_name(run):
    state = newest_state(run)
    weights, moments = state.weights(), state.moments()
    assert {"head.bases", "users.states"} < set(weights)
    assert set(moments) == {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq") for name in weights}
    assert all(moments[f"exp_avg/{name}"].shape == value.shape for name, value in weights.items())
    assert all(v.dtype == torch.float32 and v.numel() for v in (weights | moments).values())
    assert moments["exp_avg_sq/head.bases"].abs().sum() > 0
    assert len(json.loads((state.path / "rng.json").read_text())) == 1
    assert state.info["user_ids"] == ["ann", "bob"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *itertools.product(["weights.safetensors", "moments.safetensors", "rng.json"], ["gone", "cut", "flipped"]),
        ("state.json", "gone"),
        ("state.json", "cut"),
    ],
)
def test_a_damaged_state_is_passed_over_with_a_warning(run, name, fault, caplog):
    file = run / "resume/4" / name
    data = bytearray(file.read_bytes())
    if fault == "gone":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(UserError, match="not a whole resume state"):
        read_state(run / "resume/4")
    with caplog.at_level("WARNING"):
        assert newest_state(run).step == 2
    assert "passed over" in caplog.text


def test_what_a_kill_leaves_in_the_middle_of_writing_is_no_state(run):
    half = run / "resume/.6.abc.part"
    shutil.copytree(run / "resume/4", half)
    (half / "state.json").unlink()
    shutil.move(run / "resume/2", run / "resume/.2.old")
    assert newest_state(run).step == 4
    assert newest_state(run / "elsewhere") is None


def test_another_schema_is_refused(run):
    file = run / "resume/4/state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 99}))
    with pytest.raises(UserError, match="schema version 99"):
        read_state(run / "resume/4")


# What must be the same


def changed(**changes):
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__adapter_lr": 1e-2}, "model.adapter_lr was 0.001 and is 0.01 now"),
        ({"seed_everything": 1}, "seed_everything was 0"),
        ({"trainer__gradient_clip_val": None}, "trainer.gradient_clip_val"),
        ({"data__seed": 1, "model__adapter_lr": 0}, "1 further options differ"),
    ],
)
def test_a_changed_option_is_refused_by_name(run, changes, said):
    with pytest.raises(UserError, match=said):
        check_config(newest_state(run), changed(**changes))


def test_options_that_change_no_figure_may_change(run, caplog):
    free = {"data__batch_size": 1, "data__layout": "padded", "trainer__devices": 2, "trainer__strategy": "ddp"}
    check_config(newest_state(run), changed(**free))
    assert not caplog.text
    with caplog.at_level("WARNING"):
        check_config(newest_state(run), changed(trainer__max_epochs=3))
    assert "linear schedule now ends elsewhere" in caplog.text


def test_a_step_must_have_as_many_pairs(fit, tmp_path):
    fit(tmp_path / "run", stop_at=7)
    with pytest.raises(UserError, match="a step had 4 pairs and would have 2 now"):
        fit(tmp_path / "run", state=newest_state(tmp_path / "run"), accumulate=1)
    _, trainer, _, _ = fit(tmp_path / "run", state=newest_state(tmp_path / "run"), accumulate=1, batch_size=4)
    assert trainer.global_step == 10


def test_another_dataset_is_refused(fit, tmp_path):
    fit(tmp_path / "run", stop_at=7)
    state = newest_state(tmp_path / "run")
    state.info["data_fingerprint"] = "other"
    with pytest.raises(UserError, match="is not the dataset"):
        fit(tmp_path / "run", state=state)


def test_weights_of_another_model_are_refused(fit, tmp_path):
    module, _, _, _ = fit(tmp_path / "run")
    state = full_state(module)
    with pytest.raises(UserError, match=r"do not fit this model: users\.states"):
        module.load_trainable({**state, "users.states": torch.zeros(3, 2)})
    with pytest.raises(UserError, match=r"do not fit this model: head\.bases"):
        module.load_trainable({k: v for k, v in state.items() if k != "head.bases"})


# Beside the weights


def test_random_states_come_back(tmp_path):
    class OneRank:
        global_rank = 0

        class strategy:
            root_device = torch.device("cpu")
            all_gather = staticmethod(lambda tensor: tensor)

    seed_everything(5, verbose=False)
    states = json.loads(json.dumps(resume._gather_rng(OneRank)))
    first = (random.random(), np.random.rand(), torch.rand(2).tolist(), random.gauss(0, 1), np.random.randn())
    resume._restore_rng(states, OneRank)
    assert first == (random.random(), np.random.rand(), torch.rand(2).tolist(), random.gauss(0, 1), np.random.randn())


def test_a_rank_that_was_not_there_says_so(caplog):
    class Third:
        global_rank = 2

        class strategy:
            root_device = torch.device("cpu")

    before = torch.get_rng_state()
    with caplog.at_level("WARNING"):
        resume._restore_rng([{}, {}], Third)
    assert "rank 2 was not there before" in caplog.text
    assert torch.equal(before, torch.get_rng_state())


def test_figures_after_the_state_are_dropped_from_the_file(tmp_path):
    rows = [{"step": s, "name": "train/loss", "value": 1.0} for s in (0, 4, 8, 9)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 10, "na')

    class Run:
        is_global_zero, logger = True, None

        class datamodule:
            counts: ClassVar = {}
            summary = staticmethod(lambda: "data")

    RunRecord(tmp_path, "a: 1\n", resumed_at=8).on_fit_start(Run)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 4, 8]
    RunRecord(tmp_path, "a: 1\n").on_fit_start(Run)
    assert not file.exists()
