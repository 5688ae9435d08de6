"""What happens beside the steps: prm checkpoints (best and last), learning rates, and progress on stderr."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from prm import store
from prm.backbones import Backbone
from prm.checkpoints import RewardCheckpoint, probe_scores, save_checkpoint
from prm.progress import Progress
from prm.training.module import RewardModelModule
from prm.user_states import UserStates

log = logging.getLogger(__name__)


def full_state(module: RewardModelModule) -> dict[str, Tensor]:
    """Trainable parameters and the head's buffers by name, whole and in float32, on the CPU.

    DeepSpeed keeps the float32 weights in shards and gathers them here, so every rank must call this.
    """
    state = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        full = parameter.detach()
        if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
            from deepspeed.utils import safe_get_full_fp32_param

            full = safe_get_full_fp32_param(parameter)
        expected = getattr(parameter, "ds_shape", parameter.shape)
        assert full is not None and full.shape == expected, f"{name} was not gathered"
        state[name] = full.detach().float().cpu().clone()
    for name, value in module.head.state_dict().items():
        # Parameters are there already, and whole.
        if f"head.{name}" not in state:
            state[f"head.{name}"] = value.detach().float().cpu().clone()
    return state


def is_partitioned(module: RewardModelModule) -> bool:
    """True under ZeRO stage 3, where a forward needs every rank."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def export_checkpoint(
    module: RewardModelModule, state: dict[str, Tensor], out: Path, info: dict[str, Any], *, write: bool = True
) -> Path:
    """Write a prm checkpoint of gathered weights. An earlier checkpoint at `out` is replaced.

    Args:
        module: the module in training; its modes and the random state are left as they were.
        state: from `full_state`.
        out: directory of the checkpoint.
        info: further facts for prm.json.
        write: False on the ranks that only take part in the forward of a partitioned model.
    """
    data = module.trainer.datamodule
    head_state = {k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")}
    with torch.random.fork_rng(devices=[]):
        head = type(module.head)(**module.head.arguments())
        head.load_state_dict(head_state)
        head, states = head.finished(state.get("users.states", module.users.states))
        head_state = head.state_dict()
        users = UserStates(data.user_ids, states)
        live = RewardCheckpoint(out, {}, module.backbone, head.eval(), users, data.formatter)
        probe = probe_scores(live)
        if write:
            save_checkpoint(
                out,
                backbone=module.backbone,
                head=head,
                users=users,
                formatter=data.formatter,
                info=info,
                adapter_state=adapter_tensors(module.backbone, state),
                head_state=head_state,
                overwrite=True,
                probe=probe,
                # In a process that loads partitioned, nothing can be loaded by one rank.
                reload=not module.load_partitioned,
            )
    module.training_mode()
    return out


def adapter_tensors(backbone: Backbone, state: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The adapter's tensors under PEFT's names, of gathered weights; None without an adapter."""
    if backbone.lora is None:
        return None
    from peft import get_peft_model_state_dict

    prefix = "backbone.model."
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return dict(get_peft_model_state_dict(backbone.model, own, save_embedding_layers=False))


class PrmCheckpoint(Callback):
    """`best` whenever validation improves, `last` at the end of the fit, both as prm checkpoints.

    Best is the highest validation accuracy, between equal ones the lowest validation loss. Without validation pairs
    `best` is `last`. When the last step comes between two validations, one more is made, so that every fit has one.

    Args:
        directory: where `best` and `last` go.
        info: facts of the run for prm.json.
    """

    def __init__(self, directory: Path, info: dict[str, Any]) -> None:
        self.directory = directory
        self.info = info
        self.best: tuple[float, float] | None = None
        self.best_step = -1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if 0 <= trainer.max_steps <= trainer.global_step:
            # Lightning validates once more when asked to stop, but not when it runs out of steps.
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = trainer.callback_metrics
        accuracy, loss = (float(metrics[name]) for name in ("preferences/rm_accuracy", "validation/loss"))
        log.info("step %d: validation accuracy %.2f %%, loss %.4f", trainer.global_step, 100 * accuracy, loss)
        if self.best is None or (accuracy, -loss) > self.best:
            self.best, self.best_step = (accuracy, -loss), trainer.global_step
            self._export(trainer, module, "best")

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if self.best is not None and self.best_step == trainer.global_step:
            self._copy(trainer, "best", "last")
        else:
            self._export(trainer, module, "last")
        if self.best is None:
            log.warning("there are no validation pairs: checkpoints/best is the last step")
            self._copy(trainer, "last", "best")

    def _export(self, trainer: Trainer, module: RewardModelModule, name: str) -> None:
        state = full_state(module)
        if trainer.is_global_zero or is_partitioned(module):
            figures = {k: float(v) for k, v in trainer.callback_metrics.items() if "/" in k and v.isfinite()}
            info = {**self.info, "step": trainer.global_step, "metrics": figures, **_run_ids(trainer)}
            export_checkpoint(module, state, self.directory / name, info, write=trainer.is_global_zero)
        trainer.strategy.barrier(f"checkpoint {name}")

    def _copy(self, trainer: Trainer, source: str, target: str) -> None:
        if trainer.is_global_zero:
            with store.atomic_directory(self.directory / target, overwrite=True) as directory:
                shutil.copytree(self.directory / source, directory, dirs_exist_ok=True)
        trainer.strategy.barrier(f"checkpoint {target}")


def _run_ids(trainer: Trainer) -> dict[str, Any]:
    """Ids of the MLflow run, where there is one: ours, and MLflow's as soon as the server has answered."""
    run = getattr(trainer.logger, "experiment", None)
    ids = {"run_uuid": getattr(run, "run_uuid", None), "mlflow_run_id": getattr(trainer.logger, "run_id", None)}
    return {key: value for key, value in ids.items() if value}


class RunRecord(Callback):
    """At the start of the fit, when everything could be opened: config.yaml, and what the data module read and cut.

    Args:
        directory: the run directory.
        config: the resolved configuration as YAML.
        resumed_at: the step from which an earlier run goes on; its later figures will come again.
    """

    def __init__(self, directory: Path, config: str, resumed_at: int | None = None) -> None:
        self.directory, self.config, self.resumed_at = directory, config, resumed_at

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.is_global_zero:
            return
        # Before the first figure, with which the logger sends it to MLflow.
        store.write_text(self.directory / "config.yaml", self.config)
        # Of an earlier run in this directory; the logger appends.
        metrics = self.directory / "metrics.jsonl"
        if self.resumed_at is None:
            metrics.unlink(missing_ok=True)
        elif metrics.is_file():
            lines = [
                line for line in metrics.read_text(encoding="utf-8").splitlines() if _step(line) <= self.resumed_at
            ]
            store.write_text(metrics, "".join(line + "\n" for line in lines))
        data = trainer.datamodule
        log.info("%s", data.summary())
        if trainer.logger is not None:
            trainer.logger.log_metrics({f"data/{name}": float(n) for name, n in data.counts.items()}, step=0)


def _step(line: str) -> float:
    """Step of a line of metrics.jsonl; beyond all others for one that a kill cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class RareSigtermChecks(Callback):
    """Let ranks agree on a SIGTERM every `log_every_n_steps` batches.

    Lightning broadcasts the answer, and waits for it on the host, before every batch.
    """

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        ask = loop._broadcast_sigterm_tensor

        def now_and_then() -> None:
            # The batches of all ranks have the same numbers.
            if loop.total_batch_idx % max(1, trainer.log_every_n_steps) == 0:
                ask()

        loop._broadcast_sigterm_tensor = now_and_then


class LearningRates(Callback):
    """Log the learning rate of every parameter group as `lr/<group>`."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.logger is None or trainer.global_step % trainer.log_every_n_steps:
            return
        rates = {f"lr/{g['name']}": float(g["lr"]) for g in trainer.optimizers[0].param_groups}
        trainer.logger.log_metrics(rates, step=trainer.global_step)


class TrainingProgress(Callback):
    """Steps done, rate and time left on stderr of rank 0."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            total = trainer.estimated_stepping_batches
            self._bar = Progress("train", int(total) if total != float("inf") else None, "steps")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._bar is not None and trainer.global_step > self._bar.done:
            self._bar.update(trainer.global_step - self._bar.done)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
