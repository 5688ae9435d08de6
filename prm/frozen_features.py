"""Features of a frozen backbone for a dataset's texts, through the cache: it is opened for what is new alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import prm
from prm.backbones import Backbone, content_hash, open_backbone, resolve, torch_dtype
from prm.backbones.backbone import POOLINGS
from prm.dataset_dir import DatasetDir
from prm.errors import UserError
from prm.feature_cache import Sequences, cached_features, exclusive, feature_key, features_path, open_features
from prm.features import TransformersFeatures
from prm.formatting import Formatter

ENGINES = ("transformers", "vllm")

log = logging.getLogger(__name__)


class FeatureEngine(Protocol):
    """Maps token sequences to backbone features."""

    def features(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 features [N, d] of N token sequences, in their order."""
        ...


@dataclass(frozen=True)
class FrozenBackbone:
    """Everything that a feature depends on, save the tokens.

    Attributes:
        name: hub id, model directory or "pip:PACKAGE".
        revision: of a hub id: the commit, also where a branch or nothing was given.
        sha256: of the files of a local model; None for a hub id.
        dtype: "float32" or "bfloat16".
        pooling: which hidden state is the feature.
        engine: what computes them.
    """

    name: str
    revision: str | None
    sha256: str | None
    dtype: str
    pooling: str
    engine: str

    @classmethod
    def find(cls, name: str, revision: str | None, *, dtype: str, pooling: str, engine: str) -> FrozenBackbone:
        """Read which weights stand behind a name now, without opening them.

        Raises:
            UserError: no model there, an unknown option, or a hub id whose commit cannot be told.
        """
        if engine not in ENGINES:
            raise UserError(f"features by {engine!r} are not known: use one of {', '.join(ENGINES)}")
        if pooling not in POOLINGS:
            raise UserError(f"pooling {pooling!r} is not supported: use one of {', '.join(POOLINGS)}")
        # A wheel's model is hashed as it lies here, converted.
        sha256 = content_hash(resolve(name))
        if sha256 is None:
            revision = _commit(name, revision)
        # What dtype "auto" means depends on the machine.
        return cls(name, revision, sha256, str(torch_dtype(dtype)).removeprefix("torch."), pooling, engine)

    def key(self, sequences: Sequences, *, data_fingerprint: str, formatter: Formatter) -> dict[str, Any]:
        """Key in the cache of the features of these sequences."""
        local = self.sha256 is not None and not self.name.startswith("pip:")
        return feature_key(
            sequences=sequences,
            data_fingerprint=data_fingerprint,
            backbone={
                # A directory may be named in many ways, and moved.
                "name": Path(resolve(self.name)).name if local else self.name,
                "revision": None if local else self.revision,
                "sha256": self.sha256,
                "commit": None if self.sha256 else self.revision,
            },
            chat_template=getattr(formatter.tokenizer, "chat_template", None),
            max_length=formatter.max_length,
            pooling=self.pooling,
            dtype=self.dtype,
            engine=self.engine,
        )

    def refuse_changed(self) -> None:
        """Raise UserError when the weights on disk are no longer those of `find`."""
        if self.sha256 is not None and content_hash(resolve(self.name)) != self.sha256:
            raise UserError(f"the weights of {self.name} changed while features were computed: start again")


def _commit(name: str, revision: str | None) -> str:
    """Commit of a hub id's branch, tag or default.

    Raises:
        UserError: it cannot be told, as for files that were not put there by a hub client.
    """
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        file = cached_file(name, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot open the model {name}: {str(error).strip().splitlines()[0][:300]}") from error
    # The hub's cache has a directory for each commit.
    commit = extract_commit_hash(file, None)
    if not commit:
        raise UserError(
            f"which commit of {name} this is cannot be told, so its features cannot be cached: "
            "give a commit hash as the revision, or a model directory"
        )
    return commit


OpenEngine = Callable[[FrozenBackbone], AbstractContextManager[FeatureEngine]]


def backbone_features(
    backbone: str,
    revision: str | None = None,
    *,
    data: DatasetDir,
    sequences: Mapping[str, Sequences],
    formatter: Formatter,
    pooling: str = "last",
    dtype: str = "auto",
    engine: str = "transformers",
    batch_size: int = 16,
    open_engine: OpenEngine | None = None,
) -> dict[str, np.ndarray]:
    """Features [N, d] of the texts of some splits, memory-mapped and read-only; computed where the cache has none.

    The backbone is opened for what is missing alone, once for all splits. Several processes share that work.

    Args:
        backbone: hub id, model directory or "pip:PACKAGE".
        revision: of a hub id.
        data: the dataset directory.
        sequences: split of the directory -> token sequences of its texts; one entry of the cache for each.
        formatter: what made the sequences.
        pooling: which hidden state is the feature.
        dtype: of the backbone; "auto" is bfloat16 on CUDA devices that have it.
        engine: "transformers" computes here, on CUDA where there is a device; "vllm" in `prm features`, as a process
            of its own.
        batch_size: sequences per forward of transformers.
        open_engine: opens the engine in this process instead.

    Raises:
        UserError: the backbone or an option does not fit, or `prm features` failed.
    """
    frozen = FrozenBackbone.find(backbone, revision, dtype=dtype, pooling=pooling, engine=engine)
    keys = {
        split: frozen.key(rows, data_fingerprint=data.fingerprint, formatter=formatter)
        for split, rows in sequences.items()
    }
    if open_engine is None:
        if engine == "vllm":
            return _by_command(frozen, keys, data, formatter)
        open_engine = _transformers(batch_size)
    with ExitStack() as stack:
        opened: list[FeatureEngine] = []

        def compute(rows: Sequences, count: Callable[[int], None]) -> np.ndarray:
            if not opened:
                opened.append(stack.enter_context(open_engine(frozen)))
            features = _in_batches(opened[0], rows, count)
            # After, so that no chunk of other weights is kept under this key.
            frozen.refuse_changed()
            return features

        return {
            split: cached_features(keys[split], rows, compute, label=f"features of {split}")
            for split, rows in sequences.items()
        }


def _in_batches(engine: FeatureEngine, rows: Sequences, count: Callable[[int], None]) -> np.ndarray:
    """Features of a chunk; batch by batch, where an engine has a batch size, to show progress."""
    size = getattr(engine, "batch_size", None)
    if size is None:
        return engine.features(rows)
    # Similar lengths in one batch, as the engine would order them itself.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    parts = []
    for start in range(0, len(rows), size):
        parts.append(engine.features([rows[i] for i in order[start : start + size]]))
        count(len(parts[-1]))
    result = np.empty((len(rows), parts[0].shape[1]), dtype=np.float32)
    result[order] = np.concatenate(parts)
    return result


def _transformers(batch_size: int) -> OpenEngine:
    def opened(frozen: FrozenBackbone) -> AbstractContextManager[FeatureEngine]:
        import torch

        model: Backbone = open_backbone(
            frozen.name, revision=frozen.revision, dtype=frozen.dtype, pooling=frozen.pooling
        )
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        return nullcontext(TransformersFeatures(model, batch_size, label="features of a batch"))

    return opened


def _by_command(
    frozen: FrozenBackbone, keys: Mapping[str, dict[str, Any]], data: DatasetDir, formatter: Formatter
) -> dict[str, np.ndarray]:
    """Features that `prm features` computes in a process of its own; one process of several starts it."""
    if not keys:
        return {}
    first = features_path(next(iter(keys.values())))
    with exclusive(first.with_suffix(".start")):
        missing = [split for split, key in keys.items() if open_features(key) is None]
        if missing:
            log.info("features of %s are computed by vLLM, once", ", ".join(missing))
            _run_command(frozen, missing, data, formatter)
    found = {split: open_features(key) for split, key in keys.items()}
    if lost := [split for split, features in found.items() if features is None]:
        raise RuntimeError(f"`prm features` computed other features than those of {', '.join(lost)}")
    return {split: features for split, features in found.items() if features is not None}


def _run_command(frozen: FrozenBackbone, splits: Sequence[str], data: DatasetDir, formatter: Formatter) -> None:
    options = {
        "--backbone": frozen.name,
        "--revision": None if frozen.sha256 else frozen.revision,
        "--dtype": frozen.dtype,
        "--pooling": frozen.pooling,
        "--engine": frozen.engine,
        "--max-length": str(formatter.max_length),
        "--splits": ",".join(splits),
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    source = str(Path(prm.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "prm.cli", "features", str(data.path), *words]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(
            f"`prm features` ended with status {done.returncode}, its message stands above: mend that, or take "
            "data.cached_features transformers"
        )
