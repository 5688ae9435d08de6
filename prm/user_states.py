"""The users of a checkpoint: ids and state vectors, in parts that can be appended, under a manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prm import store
from prm.errors import UserError


class UserStates:
    """States [U, z] of users, by user id.

    Args:
        ids: U different user ids.
        states: float32 tensor [U, z]; z is 0 for methods that do not look at users.
    """

    def __init__(self, ids: Sequence[str], states: Tensor) -> None:
        if len(ids) != len(states) or states.ndim != 2:
            raise ValueError(f"{len(ids)} users and states of shape {tuple(states.shape)}")
        self.ids = list(ids)
        self.states = states.detach().float().cpu().contiguous()
        self._index = {user: row for row, user in enumerate(self.ids)}
        if len(self._index) != len(self.ids):
            raise ValueError("a user id stands twice")

    def __len__(self) -> int:
        return len(self.ids)

    def has(self, user_id: str) -> bool:
        return user_id in self._index

    def index(self, user_id: str) -> int:
        """Row of a user.

        Raises:
            UserError: the user is unknown.
        """
        if user_id not in self._index:
            raise UserError(
                f"unknown user {user_id!r}: the checkpoint knows {len(self)} users; add new ones with `prm adapt`"
            )
        return self._index[user_id]

    def rows(self, user_ids: Sequence[str]) -> Tensor:
        """States [N, z] of N user ids, repeats allowed."""
        return self.states[[self.index(user) for user in user_ids]]

    def extended(self, other: UserStates) -> UserStates:
        """These users and others; a user of both takes the other's state, in its old place."""
        states = {**dict(zip(self.ids, self.states, strict=True)), **dict(zip(other.ids, other.states, strict=True))}
        width = self.states.shape[1]
        return UserStates(list(states), torch.stack(list(states.values())) if states else torch.zeros(0, width))

    def save(self, directory: Path) -> None:
        """Write as one part into a new directory."""
        directory.mkdir(parents=True)
        save_file({"states": self.states}, directory / "part-0.safetensors")
        store.write_table(directory / "part-0.parquet", pa.table({"user_id": pa.array(self.ids, pa.string())}))
        store.write_json(
            directory / "manifest.json",
            {"user_dim": self.states.shape[1], "parts": [{"name": "part-0", "count": len(self)}]},
        )

    @classmethod
    def load(cls, directory: Path) -> UserStates:
        """Read all parts.

        Raises:
            UserError: damaged.
        """
        try:
            manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
            ids: list[str] = []
            states = [torch.zeros(0, manifest["user_dim"])]
            for part in manifest["parts"]:
                ids += pq.read_table(directory / f"{part['name']}.parquet")["user_id"].to_pylist()
                states.append(load_file(directory / f"{part['name']}.safetensors")["states"])
                if len(states[-1]) != part["count"]:
                    raise ValueError(f"{part['name']} holds {len(states[-1])} users, {part['count']} expected")
            return cls(ids, torch.cat(states))
        except UserError:
            raise
        except Exception as error:  # missing or damaged files of three formats
            raise UserError(f"{directory} cannot be read ({str(error)[:150]}): the checkpoint is damaged") from error
