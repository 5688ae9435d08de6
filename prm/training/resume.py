"""Resume states: what a killed run needs to end as if nothing had happened.

    resume/STEP/weights.safetensors   trainable parameters by name, whole, float32
                moments.safetensors   exp_avg/NAME and exp_avg_sq/NAME of AdamW
                rng.json              random states, one a rank
                state.json            step, position, best figures, configuration, sha256 of the files above

A state is a directory that is written beside its place and renamed; one whose files do not have their hashes is passed
over. Nothing in it depends on the number of ranks or on ZeRO's stage: tensors are gathered, the position in the data is
a number of steps, and a step is the same pairs whatever the number of ranks. It is written, and read back, just before
the first batch of a step, when the step before is wholly done, its validation and checkpoint included.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from safetensors.torch import save_file
from torch import Tensor

from prm import store
from prm.errors import UserError
from prm.training.callbacks import PrmCheckpoint, full_state
from prm.training.module import RewardModelModule
from prm.training.moments import gather_moments, restore_moments
from prm.training.states import FILES, SCHEMA_VERSION, ResumeState

log = logging.getLogger(__name__)
KEEP = 2
_RNG_BYTES = 1 << 15
# What may differ between the run that was killed and the one that goes on, since it changes no figure.
_FREE = (
    "run_dir", "overwrite", "resume", "resume_every", "dry_run", "experiment", "run_name", "ckpt_path", "weights_only",
    "data.data", "data.batch_size", "data.eval_batch_size", "data.num_workers", "data.layout", "data.min_shared",
    "data.row_tokens", "model.gradient_checkpointing", "model.attention", "model.load_partitioned",
)  # fmt: skip
_FIXED_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm", "limit_train_batches", "overfit_batches", "precision")


def check_config(state: ResumeState, config: dict[str, Any]) -> None:
    """Raise UserError when the configuration differs from the state's in what changes figures."""
    old, new = (_flat(c) for c in (state.info["config"], config))
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not any(key == free or key.startswith(free + ".") for free in _FREE)
        and not (key.startswith("trainer.") and key.split(".")[1] not in _FIXED_TRAINER)
    ]
    if changed:
        key = changed[0]
        raise UserError(
            f"--resume: {key} was {old.get(key)!r} and is {new.get(key)!r} now"
            + (f" ({len(changed) - 1} further options differ)" if len(changed) > 1 else "")
            + ": give the old value, or start another run with --run_dir"
        )
    limits = [k for k in ("trainer.max_steps", "trainer.max_epochs") if old.get(k) != new.get(k)]
    if limits and new.get("model.schedule") == "linear":
        log.warning("%s changed: the linear schedule now ends elsewhere", " and ".join(limits))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


class Resume(Callback):
    """Write a state every few steps and at the end, and start from one.

    Args:
        directory: the run directory.
        every: steps between states; 0 writes none.
        config: the resolved configuration, kept in each state.
        checkpoints: whose best figures belong to the state.
        start: the state to start from.
    """

    def __init__(
        self, directory: Path, every: int, config: dict[str, Any], checkpoints: PrmCheckpoint, start: ResumeState | None
    ) -> None:
        self.folder, self.every, self.config = directory / "resume", every, config
        self.checkpoints, self.start = checkpoints, start
        self._written = -1

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if self.start is None or stage != "fit":
            return
        data, info = trainer.datamodule, self.start.info
        if data.fingerprint != info["data_fingerprint"]:
            raise UserError(f"--resume: {data.directory.path} is not the dataset that the run was started on")
        pairs = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        if pairs != info["pairs_per_step"]:
            raise UserError(
                f"--resume: a step had {info['pairs_per_step']} pairs and would have {pairs} now (data.batch_size "
                f"{data.batch_size} x {trainer.world_size} ranks x trainer.accumulate_grad_batches "
                f"{trainer.accumulate_grad_batches}): change one of them"
            )
        data.resume_at = (info["epoch"], info["step_in_epoch"])
        module.initial_state = self.start.weights()

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        if self.start is None:
            return
        info, step = self.start.info, self.start.step
        restore_moments(trainer, module, self.start.moments(), step)
        best = info["best"]
        if best is not None:
            self.checkpoints.best, self.checkpoints.best_step = (best["accuracy"], -best["loss"]), best["step"]
        scheduler: Any = trainer.strategy.lr_scheduler_configs[0].scheduler
        scheduler.last_epoch = step
        scheduler._step_count = step + 1
        for group, base, factor in zip(
            scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(step)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        _set_progress(trainer, info)
        self._written = step
        if trainer.is_global_zero:
            log.info("going on from step %d of %s", step, self.start.path)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_index: int) -> None:
        step = trainer.global_step
        if self.start is not None:
            _restore_rng(json.loads((self.start.path / "rng.json").read_text()), trainer)
            self.start = None
            return
        due = self.every and step and step % self.every == 0 and step != self._written
        if due and batch_index % trainer.accumulate_grad_batches == 0:
            self._write(trainer, module)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        # Not after an interrupt, which may come in the middle of a step.
        if self.every and trainer.global_step and not trainer.interrupted and self._written != trainer.global_step:
            self._write(trainer, module)

    def _write(self, trainer: Trainer, module: RewardModelModule) -> None:
        step = trainer.global_step
        weights, moments, rng = full_state(module), gather_moments(trainer, module), _gather_rng(trainer)
        self._written = step
        if trainer.is_global_zero:
            self._write_files(trainer, weights, moments, rng)
        trainer.strategy.barrier(f"resume state {step}")

    def _write_files(
        self, trainer: Trainer, weights: dict[str, Tensor], moments: dict[str, Tensor], rng: list[dict[str, Any]]
    ) -> None:
        data, step = trainer.datamodule, trainer.global_step
        steps_per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        best = self.checkpoints.best
        with store.atomic_directory(self.folder / str(step), overwrite=True) as directory:
            save_file(weights, directory / "weights.safetensors")
            save_file(moments, directory / "moments.safetensors")
            store.write_json(directory / "rng.json", rng)
            info = {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "epoch": step // steps_per_epoch,
                "step_in_epoch": step % steps_per_epoch,
                "steps_per_epoch": steps_per_epoch,
                "pairs_per_step": data.batch_size * trainer.world_size * trainer.accumulate_grad_batches,
                "ranks": trainer.world_size,
                "data_fingerprint": data.fingerprint,
                "user_ids": data.user_ids,
                "best": best and {"accuracy": best[0], "loss": -best[1], "step": self.checkpoints.best_step},
                "config": self.config,
                "files": {name: store.fingerprint_file(directory / name) for name in FILES},
            }
            store.write_json(directory / "state.json", info)
        self._drop_old()

    def _drop_old(self) -> None:
        steps = sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit())
        for step in steps[:-KEEP]:
            # Renamed first: half a directory must not look like a state.
            retired = self.folder / f".{step}.old"
            os.rename(self.folder / str(step), retired)
            shutil.rmtree(retired, ignore_errors=True)


def _set_progress(trainer: Trainer, info: dict[str, Any]) -> None:
    """Put Lightning's loops where they were between two steps.

    Its own way back is meant for its own checkpoints, and iterates over the epoch's first batches again.
    """
    loop = trainer.fit_loop
    epoch_loop = loop.epoch_loop
    step, epoch, accumulate = info["step"], info["epoch"], trainer.accumulate_grad_batches
    for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
        progress.ready = progress.started = progress.processed = progress.completed = epoch
    total = epoch_loop.batch_progress.total
    total.ready = total.started = total.processed = total.completed = step * accumulate
    steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready = steps.completed = step
    epoch_loop._batches_that_stepped = step
    original = epoch_loop.on_run_start

    def on_run_start(fetcher: Any) -> None:
        # Between the reset of the epoch's counters and the first batch there is no other hook.
        epoch_loop.on_run_start = original
        original(fetcher)
        current = epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = current.completed = info["step_in_epoch"] * accumulate
        fetcher.fetched += current.ready

    epoch_loop.on_run_start = on_run_start


def _gather_rng(trainer: Trainer) -> list[dict[str, Any]]:
    """Random states of Python, NumPy and torch on every rank; all ranks must call this."""
    device = trainer.strategy.root_device
    name, keys, *rest = np.random.get_state(legacy=True)
    own = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state(device).tolist()).hex() if device.type == "cuda" else None,
    }
    text = json.dumps(own).encode()
    assert len(text) <= _RNG_BYTES
    padded = torch.tensor(list(text.ljust(_RNG_BYTES)), dtype=torch.uint8, device=device)
    gathered = trainer.strategy.all_gather(padded).reshape(-1, _RNG_BYTES).cpu()
    return [json.loads(bytes(row.tolist())) for row in gathered]


def _restore_rng(states: list[dict[str, Any]], trainer: Trainer) -> None:
    if trainer.global_rank >= len(states):
        log.warning("rank %d was not there before: its random state is its seed's", trainer.global_rank)
        return
    own, device = states[trainer.global_rank], trainer.strategy.root_device
    version, keys, gauss = own["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = own["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(own["torch"])), dtype=torch.uint8))
    if own["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(own["cuda"])), dtype=torch.uint8), device)
