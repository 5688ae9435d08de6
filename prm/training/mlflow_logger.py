"""The MLflow logger of the recipes: one run, opened by rank 0 only, that outlives its tracking server.

Lightning's own MLFlowLogger opens the database on every rank, which breaks a fresh SQLite file, and has no `save_dir`
for it, which LightningCLI's SaveConfigCallback needs.
"""

from __future__ import annotations

import json
import logging
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from prm.errors import UserError
from prm.tracking.client import first_line
from prm.tracking.runs import Run, open_run
from prm.tracking.system_metrics import SystemMetrics

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
_STATUS = {"success": "FINISHED", "failed": "FAILED"}


class MLflowLogger(Logger):
    """Log a training job to MLflow and, line by line, to `<save_dir>/metrics.jsonl`.

    Figures that are not finite are refused by name and step: a warning is printed, and the file holds null for them.

    Args:
        experiment: MLflow experiment, made when missing.
        run_name: shown in MLflow; by default kind and number.
        tracking_uri: by default $MLFLOW_TRACKING_URI, else sqlite:///runs/mlflow.db.
        save_dir: the run directory: metrics.jsonl, mlflow.json, spool/; Lightning puts config and checkpoints there.
        data_fingerprint: of the dataset directory, a tag of the run.
        run_uuid: of a run to go on with (from its mlflow.json). Without it a run is made, and rows that an earlier
            run left in metrics.jsonl go.
        system_metrics: log CPU, memory, disk, network and GPU use every ten seconds.
    """

    def __init__(
        self,
        experiment: str = "prm",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str = "runs/train",
        data_fingerprint: str | None = None,
        system_metrics: bool = True,
        run_uuid: str | None = None,
    ) -> None:
        super().__init__()
        self._experiment, self._run_name, self._tracking_uri = experiment, run_name, tracking_uri
        self._save_dir = save_dir
        self.data_fingerprint = data_fingerprint
        self._wants_system_metrics = system_metrics
        self._run: Run | None = None
        self._run_uuid = run_uuid
        self._system_metrics: SystemMetrics | None = None
        self._config_logged = False
        self._refused: set[str] = set()

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def name(self) -> str:
        """Empty, like `version`: Lightning joins both to save_dir, and checkpoints belong into the run directory."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Run:
        """The open run on rank 0 (it is opened here, at first use); a stand-in that ignores everything elsewhere."""
        if self._run is None:
            if self._run_uuid is None:
                (Path(self._save_dir) / METRICS_FILE).unlink(missing_ok=True)
            self._run = open_run(
                self._experiment,
                self._run_name,
                kind="training",
                run_dir=self._save_dir,
                tracking_uri=self._tracking_uri,
                run_uuid=self._run_uuid,
                data_fingerprint=self.data_fingerprint,
            )
            self._run_uuid = self._run.run_uuid
            if self._wants_system_metrics:
                self._system_metrics = SystemMetrics(self._run.log_metrics)
        return self._run

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run on rank 0; None on other ranks and while the server has not been reached."""
        return self._run.run_id if self._run is not None else None

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        try:
            self.experiment.log_params(vars(params) if isinstance(params, Namespace) else params)
        except UserError as error:
            log.warning("%s", error)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        step, run = int(step or 0), self.experiment
        figures = {name: float(value) for name, value in metrics.items()}
        epoch = figures.get("epoch")
        self._write_rows(
            {"step": step, "epoch": epoch, "name": name, "value": value if math.isfinite(value) else None}
            for name, value in figures.items()
            if name != "epoch"
        )
        for name, value in figures.items():
            if not math.isfinite(value) and name not in self._refused:
                self._refused.add(name)
                log.warning("%s is %s at step %d: not logged (said once for each metric)", name, value, step)
        self._log_config()
        run.log_metrics({name: value for name, value in figures.items() if math.isfinite(value)}, step)

    def _write_rows(self, rows: Any) -> None:
        file = Path(self._save_dir) / METRICS_FILE
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as handle:
                handle.write("".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            if METRICS_FILE not in self._refused:
                self._refused.add(METRICS_FILE)
                log.warning("%s cannot be written: %s", file, first_line(error))

    def _log_config(self) -> None:
        """Log the resolved config that SaveConfigCallback has written into the run directory, once."""
        file = Path(self._save_dir) / "config.yaml"
        if self._config_logged or not file.is_file():
            return
        self._config_logged = True
        try:
            self.experiment.log_config(file)
        except Exception as error:  # a config that YAML's safe loader cannot read must not end the training
            log.warning("%s was not logged to MLflow: %s", file, first_line(error))

    @rank_zero_only
    def save(self) -> None:
        """Nothing is buffered here: rows are on disk, and MLflow's batches leave every second."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run. Logging again afterwards (a test after a fit) reopens it."""
        if self._run is None:
            return
        if self._system_metrics is not None:
            self._system_metrics.stop()
            self._system_metrics = None
        self._log_config()
        self._run.end(_STATUS.get(status, "KILLED"))
        self._run = None
