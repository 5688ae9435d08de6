"""Tracking with MLflow: runs, the model registry, and the gates a checkpoint must pass to become champion."""

from prm.tracking.client import resolve_tracking_uri
from prm.tracking.runs import Run, open_run, read_record, training_run_id

__all__ = ["Run", "open_run", "read_record", "resolve_tracking_uri", "training_run_id"]
