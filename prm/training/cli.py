"""The command line of the training recipes: LightningCLI with a run directory, torchrun's ranks and one-line errors."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers.utils import logging as transformers_logging

from prm.errors import UserError
from prm.extras import require
from prm.training.callbacks import LearningRates, PrmCheckpoint, RareSigtermChecks, RunRecord, TrainingProgress
from prm.training.dry_run import report as dry_run_report
from prm.training.resume import Resume, check_config
from prm.training.states import ResumeState, newest_state, read_state
from prm.training.strategies import deepspeed_strategy, is_deepspeed

log = logging.getLogger(__name__)

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,
    "log_every_n_steps": 10,
    # Ours instead: prm checkpoints, samplers that know ranks, progress that is quiet in log files.
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
# Warnings of libraries about what is meant as it is, or about each other.
_KNOWN_WARNINGS = (
    ".*LeafSpec.*",
    ".*does not have many workers.*",
    ".*in eval mode at the start of training.*",
    # Metrics over unique pairs are equal on all ranks.
    ".*when logging on epoch level in distributed setting.*",
    ".*all_gather.*",
)
_FIXED = {"enable_checkpointing": False, "use_distributed_sampler": False, "barebones": False, "fast_dev_run": False}


def rank() -> int:
    """Rank of this process as torchrun gives it, 0 without it."""
    return int(os.environ.get("RANK", "0"))


def fail(message: str) -> NoReturn:
    """End this rank with exit status 2, after one line from one rank.

    All ranks make the same mistake at nearly the same time, and torchrun ends all as soon as one has ended. So the
    others give rank 0 the time to speak, and speak themselves only if it had nothing to say.
    """
    if rank() != 0:
        time.sleep(20)
    line = "prm: error: " + " ".join(message.split())
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a block of its own, whose last line is what it finds here.
        Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    raise SystemExit(2)


class RecipeParser(LightningArgumentParser):
    """A parser whose errors are one line: what is wrong and where, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(message)


class RecipeCLI(LightningCLI):
    """`fit` with a run directory: config.yaml, mlflow.json, metrics.jsonl, checkpoints/{best,last}."""

    def __init__(self, module: type[LightningModule], data: type[LightningDataModule], args: Any = None) -> None:
        self.run_dir = Path()
        self.state: ResumeState | None = None
        self.planned_for = "cpu"
        super().__init__(
            module,
            data,
            save_config_callback=None,
            trainer_defaults=dict(TRAINER_DEFAULTS),
            parser_class=RecipeParser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "weights_only"},
        }

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=int, default=0, help="Seed of all that is drawn at random.")
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Run directory: config.yaml, mlflow.json, metrics.jsonl, checkpoints. Default: runs/<date and time>.",
        )
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="auto: go on from the newest whole state below --run_dir, or begin when there is none. Or a state "
            "directory (RUN/resume/STEP). The run ends with the weights it would have had without the break.",
        )
        parser.add_argument(
            "--resume_every", type=int, default=50, help="Steps between resume states; the last two are kept. 0: none."
        )
        parser.add_argument(
            "--dry_run",
            "--dry-run",
            action="store_true",
            help="Build the configuration, the data, the sampler and the model without weights; print trainable "
            "parameters, memory per GPU under ZeRO 0-3, tokens and padding a step, DeepSpeed's JSON; write nothing.",
        )
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace what a run directory holds.")
        parser.add_argument("--experiment", type=str, default="prm", help="MLflow experiment.")
        parser.add_argument("--run_name", type=str | None, default=None, help="Name of the MLflow run.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.backbone", "data.backbone")
        parser.link_arguments("model.revision", "data.revision")
        parser.link_arguments("model.pooling", "data.pooling")
        parser.link_arguments("model.dtype", "data.dtype")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        trainer = config.trainer
        for name, value in _FIXED.items():
            if trainer[name] not in (value, None):
                raise UserError(f"trainer.{name}: {trainer[name]} is not supported: the recipe does that itself")
        if str(trainer.precision) not in ("None", "32", "32-true"):
            raise UserError(
                f"trainer.precision {trainer.precision} is not supported: set model.dtype bfloat16, which the frozen "
                "backbone then has, while adapter, head and users stay float32"
            )
        if config.data.cached_features is not None and config.model.lora is not None:
            raise UserError(
                "data.cached_features needs a frozen backbone: set model.lora null, or leave cached_features out"
            )
        if torch.cuda.is_available() and trainer.accelerator in ("auto", "gpu", "cuda"):
            self.planned_for = "cuda"
        elif config.dry_run and trainer.accelerator in ("gpu", "cuda"):
            # Planned on a machine without one.
            self.planned_for, trainer.accelerator = "cuda", "cpu"
            if config.model.dtype == "auto":
                config.model.dtype = config.data.dtype = "bfloat16"
        if trainer.devices == "auto" and "LOCAL_WORLD_SIZE" in os.environ:
            # Lightning takes one device on a CPU machine, whatever torchrun has started.
            trainer.devices = int(os.environ["LOCAL_WORLD_SIZE"])
            trainer.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.run_dir = Path(config.run_dir or f"runs/{now}")
        if config.resume_every < 0:
            raise UserError(f"--resume_every {config.resume_every}: 0 or more steps are needed")
        if config.resume is not None:
            self._find_state(config)
        elif rank() == 0 and not config.overwrite and _holds_a_run(self.run_dir):
            raise UserError(
                f"{self.run_dir} is not empty: choose another --run_dir, go on with it by --resume auto, or pass "
                "--overwrite true"
            )

    def _find_state(self, config: Any) -> None:
        if config.run_dir is None:
            raise UserError("--resume needs --run_dir, the directory of the run that is to go on")
        if config.overwrite or config.get("ckpt_path"):
            raise UserError("--resume goes with neither --overwrite nor --ckpt_path: leave one of them out")
        self.state = newest_state(self.run_dir) if config.resume == "auto" else read_state(Path(config.resume))
        if self.state is not None:
            check_config(self.state, yaml.safe_load(self._resolved()))
        elif rank() == 0:
            if _holds_a_run(self.run_dir) and not (self.run_dir / "config.yaml").is_file():
                raise UserError(f"{self.run_dir} holds no run: choose another --run_dir")
            log.info("no resume state in %s: the run begins", self.run_dir)

    def _resolved(self) -> str:
        """The configuration as YAML."""
        return str(self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        dry_run = self._get(self.config_init, "dry_run")
        cuda = self.planned_for == "cuda"
        if not cuda:
            _use_all_cores()
        if is_deepspeed(config.strategy):
            kwargs["strategy"] = deepspeed_strategy(
                config.strategy,
                cuda=cuda,
                batch_size=self.datamodule.batch_size,
            )
        if dry_run:
            kwargs["logger"] = False
            return self._trainer(kwargs)
        if config.logger in (None, True):
            kwargs["logger"] = self._mlflow_logger()
        directory = self.datamodule.directory
        info = {
            "data": {
                "name": directory.name,
                "fingerprint": directory.fingerprint,
                "synthetic": directory.synthetic,
                "split_rule": directory.split_rule,
            },
            "data_fingerprint": directory.fingerprint,
        }
        checkpoints, resolved = PrmCheckpoint(self.run_dir / "checkpoints", info), self._resolved()
        every = self._get(self.config_init, "resume_every")
        self.trainer_defaults["callbacks"] = [
            RunRecord(self.run_dir, resolved, self.state.step if self.state else None),
            checkpoints,
            Resume(self.run_dir, every, yaml.safe_load(resolved), checkpoints, self.state),
            RareSigtermChecks(),
            LearningRates(),
            TrainingProgress(),
        ]
        return self._trainer(kwargs)

    def _trainer(self, kwargs: dict[str, Any]) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise UserError(f"trainer: {error}") from error

    def _mlflow_logger(self) -> Any:
        require("track", wanted_by="logging to MLflow (trainer.logger false goes without)")
        from prm.training.mlflow_logger import MLflowLogger

        config = self.config[self.subcommand]
        return MLflowLogger(
            experiment=config.experiment,
            run_name=config.run_name,
            save_dir=str(self.run_dir),
            data_fingerprint=self.datamodule.fingerprint,
            run_uuid=self._earlier_run() if self.state is not None else None,
        )

    def _earlier_run(self) -> str | None:
        """UUID of the MLflow run of the run directory."""
        file = self.run_dir / "mlflow.json"
        return str(json.loads(file.read_text(encoding="utf-8"))["run_uuid"]) if file.is_file() else None

    def _run_subcommand(self, subcommand: str) -> None:
        if not self._get(self.config, "dry_run"):
            super()._run_subcommand(subcommand)
        elif rank() == 0:
            sys.stdout.write(dry_run_report(self.model, self.datamodule, self.trainer, planned_for=self.planned_for))

    def after_fit(self) -> None:
        if self.trainer.interrupted:
            raise SystemExit(130)
        if rank() == 0:
            if self.state is not None and self.trainer.global_step == self.state.step:
                log.info("the run was complete after %d steps: nothing was left to do", self.state.step)
            sys.stderr.write(f"run directory: {self.run_dir}\n")


def _holds_a_run(directory: Path) -> bool:
    """True when something is there beside what the tracking of a run leaves that ended before its first step."""
    return directory.exists() and bool({p.name for p in directory.iterdir()} - {"mlflow.json", "spool"})


def _use_all_cores() -> None:
    """Undo torchrun's single thread a rank, which it sets whenever OMP_NUM_THREADS is not."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def _quiet_libraries() -> None:
    """Our own lines on rank 0, warnings of libraries, and nothing but errors on other ranks."""
    level = logging.INFO if rank() == 0 else logging.ERROR
    logging.basicConfig(level=logging.WARNING if rank() == 0 else logging.ERROR, format="%(message)s")
    logging.getLogger("prm").setLevel(level)
    logging.getLogger("data_modules").setLevel(level)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING if rank() == 0 else logging.ERROR)
    transformers_logging.disable_progress_bar()
    for pattern in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    if rank() != 0:
        warnings.filterwarnings("ignore")


def main(module: type[LightningModule], data: type[LightningDataModule], args: Any = None) -> None:
    """Run a recipe; a user's mistake ends it with one line and exit status 2."""
    _quiet_libraries()
    try:
        RecipeCLI(module, data, args)
    except UserError as error:
        fail(str(error))
