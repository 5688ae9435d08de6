"""The rewards of a checkpoint without its backbone in this process: features from an engine, the head in torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prm.backbones import content_hash, open_tokenizer
from prm.checkpoints import fingerprint, load_head
from prm.errors import UserError
from prm.features import input_features
from prm.formatting import Formatter
from prm.inference.engines.base import FeatureEngine
from prm.records import Prompt


@dataclass(frozen=True)
class EngineKey:
    """What must agree for two checkpoints to share one feature engine."""

    name: str
    revision: str | None
    pooling: str
    dtype: str


class UserReward:
    """r_u(x, y) of a checkpoint; `attach` gives it the engine its features come from.

    Args:
        path: checkpoint directory.
        label: its name in results, and the name of its adapter in the engine.
        dtype: of the backbone; None takes the one it was trained in.
        allow_code: prefixes of class paths outside prm that may be imported.
    """

    def __init__(
        self, path: str | Path, label: str, *, dtype: str | None = None, allow_code: Sequence[str] = ()
    ) -> None:
        self.path, self.label = Path(path), label
        self.head, self.users, self.info = load_head(path, allow_code)
        self.fingerprint = fingerprint(path)
        backbone = self.info["backbone"]
        found = content_hash(backbone["name"])
        if backbone["sha256"] and found and found != backbone["sha256"]:
            raise UserError(f"{path} was trained on other weights than {backbone['name']} has now: restore them")
        self.engine_key = EngineKey(
            backbone["name"], backbone["revision"], self.info["pooling"], dtype or self.info["dtype"]
        )
        self.adapter = self.path / "adapter" if backbone["lora"] else None
        formatting = self.info["formatting"]
        tokenizer = open_tokenizer(backbone["name"], backbone["revision"])
        self.formatter = Formatter(tokenizer, formatting["max_length"], encoder=formatting["encoder"])
        self._engine: FeatureEngine | None = None

    @property
    def class_path(self) -> str:
        return str(self.info["class_path"])

    @property
    def training_data(self) -> str | None:
        """Fingerprint of the dataset it was trained on, where it is known."""
        found: Any = self.info.get("data_fingerprint")
        return None if found is None else str(found)

    def attach(self, engine: FeatureEngine | None) -> None:
        """Take features from `engine` from now on."""
        self._engine = engine

    def require_users(self, user_ids: Iterable[str]) -> None:
        """Raise UserError when the method looks at users and some of these have no state."""
        if not self.head.user_dim:
            return
        wanted = dict.fromkeys(user_ids)
        missing = [user for user in wanted if not self.users.has(user)]
        if missing:
            raise UserError(
                f"{self.path} does not know {len(missing)} of {len(wanted)} users of the data (first: {missing[0]}): "
                f"run `prm adapt {self.path} --data DIR --out CHECKPOINT2` and evaluate that"
            )

    @torch.inference_mode()
    def scores(self, user_ids: Sequence[str], rows: Sequence[tuple[Prompt, str]]) -> tuple[np.ndarray, np.ndarray]:
        """Rewards [N], float64, of (prompt, response) rows, each for its user; and the prompt tokens [N] that were cut.

        Equal rows get one feature, so their rewards are equal to the last bit.
        """
        if self._engine is None:
            raise RuntimeError("no engine is attached")
        encoded = self.formatter.encode_all(rows)
        engine, adapter = self._engine, self.label if self.adapter is not None else None
        inputs_nd = input_features(self.head, encoded, lambda sequences: engine.features(sequences, adapter))
        states = self.users.rows(user_ids) if self.head.user_dim else torch.zeros(len(rows), 0)
        scores = self.head.scores(inputs_nd, states).double().numpy()
        if not np.isfinite(scores).all():
            raise UserError(f"{self.path} gives rewards that are not finite: the checkpoint is not usable")
        return scores, np.array([e.cut for e in encoded])
