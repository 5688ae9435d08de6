"""CPU, memory, disk, network and GPU use of the machine, as metrics `system/...` of a run."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from prm.extras import installed_version

log = logging.getLogger(__name__)
_MONITORS = (
    ("cpu_monitor", "CPUMonitor"),
    ("disk_monitor", "DiskMonitor"),
    ("network_monitor", "NetworkMonitor"),
    ("gpu_monitor", "GPUMonitor"),
)


class SystemMetrics:
    """Samples MLflow's monitors every `seconds` and hands the figures on, until `stop`.

    MLflow's own sampler is not used because it talks to the server itself, past the spool.

    Args:
        log_metrics: called with (figures, sample number) from a thread of its own.
        seconds: between samples.
    """

    def __init__(self, log_metrics: Callable[[dict[str, float], int], None], seconds: float = 10.0) -> None:
        self._log_metrics, self._seconds = log_metrics, seconds
        self._stopped = threading.Event()
        self._monitors: list[Any] = []
        if installed_version("psutil") is not None:
            for module, name in _MONITORS:
                try:
                    monitor = getattr(importlib.import_module(f"mlflow.system_metrics.metrics.{module}"), name)
                    self._monitors.append(monitor())
                except (ImportError, RuntimeError, OSError) as error:
                    log.debug("no %s: %s", name, error)
        self._thread = threading.Thread(target=self._sample, name="prm-system-metrics", daemon=True)
        if self._monitors:
            self._thread.start()

    def _sample(self) -> None:
        step = 0
        while not self._stopped.wait(self._seconds):
            figures: dict[str, float] = {}
            for monitor in self._monitors:
                try:
                    monitor.collect_metrics()
                    figures |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                    monitor.clear_metrics()
                except Exception as error:  # a sensor that fails must not end the sampling of the others
                    log.debug("%s: %s", type(monitor).__name__, error)
            self._log_metrics(figures, step)
            step += 1

    def stop(self) -> None:
        """Stop sampling; a sample under way is finished first."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
