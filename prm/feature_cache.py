"""Features of token sequences on disk: computed once, memory-mapped from then on, never read under a stale key.

    CACHE/features/KEY/          features.npy: float32 [N, d]; entry.json: its key, shape and sha256, and the versions
    CACHE/features/KEY.parts/    chunks of an entry that is not finished, each with its sha256
    CACHE/features/KEY.lock      which rows a process is busy with, as locks on byte ranges

It stands beside `store.Cache`, which fills a directory in one go and trusts one that is there: filling may take hours
here, so a killed process loses a chunk at most, and what is read decides a model's weights, so it is verified. Any
number of processes may fill one entry at a time, also over a network file system: they share the chunks among them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prm import store
from prm.errors import UserError
from prm.progress import Progress
from prm.provenance import package_versions

SCHEMA_VERSION = 1
#: Texts a chunk: what a killed process computes again, and among which an engine sorts by length.
CHUNK = 256

log = logging.getLogger(__name__)
Sequences = Sequence[Sequence[int]]
#: Features [n, d] of n sequences; it calls its second argument with the number of sequences that it got done.
Compute = Callable[[Sequences, Callable[[int], None]], np.ndarray]


def feature_key(
    *,
    sequences: Sequences,
    data_fingerprint: str,
    backbone: Mapping[str, str | None],
    chat_template: object,
    max_length: int,
    pooling: str,
    dtype: str,
    engine: str,
) -> dict[str, Any]:
    """A JSON value that names features [N, d] fully: two that are equal stand for equal features.

    Versions of the software are kept with an entry and are no part of its key: a release rounds otherwise at most.

    Args:
        sequences: N token sequences, in order. Their sha256 stands for texts, template and length.
        data_fingerprint: of the dataset directory they come from.
        backbone: name, revision, and one of sha256 (of the weights' files) and commit (of a hub id).
        chat_template: the tokenizer's, or None; its sha256 is kept.
        max_length, pooling, dtype, engine: how features are computed; dtype is a name of one, not "auto".

    Raises:
        UserError: a backbone whose weights are not pinned by a content hash or a commit.
        ValueError: a dtype that stands for different ones.
    """
    if not (backbone.get("sha256") or backbone.get("commit")):
        raise UserError(
            f"the features of {backbone.get('name')} cannot be cached, since nothing says which weights these are: "
            "give a commit hash as the revision, or a model directory"
        )
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {dtype!r} in a key: float32 or bfloat16 is needed")
    return {
        "schema_version": SCHEMA_VERSION,
        "tokens": _tokens_digest(sequences),
        "sequences": len(sequences),
        "data": data_fingerprint,
        "backbone": {k: backbone.get(k) for k in ("name", "revision", "sha256", "commit")},
        "chat_template": None if chat_template is None else store.fingerprint(chat_template),
        "max_length": max_length,
        "pooling": pooling,
        "dtype": dtype,
        "engine": engine,
    }


def _tokens_digest(sequences: Sequences) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        # The length first: without it [[1], [2]] and [[1, 2]] would be the same.
        digest.update(np.array([len(sequence), *sequence], dtype="<i8").tobytes())
    return digest.hexdigest()


def features_path(key: Mapping[str, Any], root: str | Path | None = None) -> Path:
    """Directory of a key's features, there or not; `root` is the directory of all caches."""
    return Path(root or store.cache_root()) / "features" / store.fingerprint(key)[:32]


def open_features(key: Mapping[str, Any], root: str | Path | None = None) -> np.ndarray | None:
    """The finished features of a key, memory-mapped and read-only, or None when there are none.

    A damaged entry counts as none: it is named in the log and not read.
    """
    entry = features_path(key, root)
    return _open(entry, key) if entry.is_dir() else None


def cached_features(
    key: Mapping[str, Any],
    sequences: Sequences,
    compute: Compute,
    *,
    root: str | Path | None = None,
    chunk: int = CHUNK,
    label: str = "features",
) -> np.ndarray:
    """Features [N, d] of a key, memory-mapped and read-only; `compute` makes what is not there yet.

    Args:
        key: from `feature_key`, of these sequences.
        sequences: N token sequences, at least one.
        compute: called with a chunk of them at a time; not at all when the features are there.
        root: directory of all caches; None takes `store.cache_root()`.
        chunk: sequences a chunk.
        label: shown with the progress.

    Raises:
        UserError: features that are not finite numbers, or a cache that cannot be written.
    """
    if not sequences or chunk < 1:
        raise ValueError(f"{len(sequences)} sequences in chunks of {chunk}: at least one each is needed")
    if key["sequences"] != len(sequences):
        raise ValueError(f"the key is of {key['sequences']} sequences, not of these {len(sequences)}")
    if (found := open_features(key, root)) is not None:
        return found
    entry = features_path(key, root)
    chunks = [_Chunk(i, min(chunk, len(sequences) - i)) for i in range(0, len(sequences), chunk)]
    lock, publishing = entry.with_suffix(".lock"), len(sequences)
    with exclusive(lock, publishing):
        # Nobody is publishing now, so what is damaged is not somebody's fresh entry.
        if entry.is_dir() and _open(entry, key) is None:
            with store.writing(entry):
                shutil.rmtree(entry)
    while not entry.is_dir():
        _fill(entry, chunks, sequences, compute, label)
        with exclusive(lock, publishing):
            if not entry.is_dir():
                _publish(entry, key, chunks)
    if (found := _open(entry, key)) is None:
        raise UserError(f"{entry} was written and cannot be read back: check the disk")
    return found


@contextlib.contextmanager
def exclusive(lock: Path, first: int = 0, count: int = 1, *, wait: bool = True) -> Iterator[bool]:
    """Hold bytes [first, first + count) of a lock file against other processes; False when one has them and not `wait`.

    A process that ends lets go of them, however it ends. Where the file system knows no locks nothing is held: work is
    then done twice at worst, since files appear whole or not at all.
    """
    with contextlib.ExitStack() as stack:
        with store.writing(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("ab"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), count, first)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError as error:
            log.debug("no locks at %s: %s", lock.parent, error)
        yield True


@dataclass(frozen=True)
class _Chunk:
    """Rows [start, start + rows) of an entry that is not finished: the sha256 of a .npy file, and that file."""

    start: int
    rows: int

    def file(self, entry: Path) -> Path:
        """Where its features lie, or would lie."""
        return entry.with_suffix(".parts") / f"{self.start:09d}+{self.rows}.chunk"

    def write(self, entry: Path, features: np.ndarray) -> None:
        """Keep its features [rows, d]."""
        if features.ndim != 2 or len(features) != self.rows:
            raise ValueError(f"features of shape {list(features.shape)} for {self.rows} sequences")
        if not np.isfinite(features).all():
            row = self.start + int(np.argmin(np.isfinite(features).all(1)))
            raise UserError(f"the features of text {row} are not finite numbers: take dtype float32, or other weights")
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(features, dtype=np.float32), allow_pickle=False)
        data = buffer.getvalue()
        store.write_bytes(self.file(entry), hashlib.sha256(data).digest() + data)

    def read(self, entry: Path) -> np.ndarray:
        """Its features [rows, d].

        Raises:
            _Damaged: they are not what was written, and the file is now removed.
        """
        file = self.file(entry)
        data = file.read_bytes() if file.exists() else b""
        if data[:32] != hashlib.sha256(data[32:]).digest():
            file.unlink(missing_ok=True)
            raise _Damaged(str(file))
        features: np.ndarray = np.load(io.BytesIO(data[32:]), allow_pickle=False)
        return features


class _Damaged(Exception):
    """A chunk that is not what was written; the message is its path."""


def _fill(entry: Path, chunks: Sequence[_Chunk], sequences: Sequences, compute: Compute, label: str) -> None:
    """Compute the chunks that are not there: first what nobody else is busy with, then what others did not finish."""
    missing = [c for c in chunks if not c.file(entry).exists()]
    total = sum(c.rows for c in missing)
    if total < len(sequences):
        log.info("%s: %d of %d are there from before", label, len(sequences) - total, len(sequences))
    bar = Progress(label, total, "sequences")
    for wait in (False, True):
        if wait and missing:
            log.info("%s: waiting for another process, busy with %d of them", label, sum(c.rows for c in missing))
        for chunk in list(missing):
            with exclusive(entry.with_suffix(".lock"), chunk.start, chunk.rows, wait=wait) as held:
                if not held:
                    continue
                missing.remove(chunk)
                before = bar.done
                # Somebody may have finished the chunk, or all of them, which are then one entry.
                if not chunk.file(entry).exists() and not entry.is_dir():
                    chunk.write(entry, compute(sequences[chunk.start : chunk.start + chunk.rows], bar.update))
                bar.update(before + chunk.rows - bar.done)
    if total:
        bar.close()


def _publish(entry: Path, key: Mapping[str, Any], chunks: Sequence[_Chunk]) -> None:
    """Put the chunks together as the finished entry and remove them; with a damaged one, remove just that."""
    rows = sum(c.rows for c in chunks)
    for abandoned in entry.parent.glob(f".{entry.name}.*"):
        # Of a process that was killed at this point.
        shutil.rmtree(abandoned, ignore_errors=True)
    try:
        with store.atomic_directory(entry, overwrite=True) as directory:
            width = chunks[0].read(entry).shape[1]
            array = np.lib.format.open_memmap(
                directory / "features.npy", mode="w+", dtype=np.float32, shape=(rows, width)
            )
            for chunk in chunks:
                array[chunk.start : chunk.start + chunk.rows] = chunk.read(entry)
            array.flush()
            info = {
                "key": dict(key),
                "shape": [rows, width],
                "sha256": store.fingerprint_file(directory / "features.npy"),
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": package_versions(),
            }
            store.write_json(directory / "entry.json", info)
    except _Damaged as error:
        log.warning("%s is damaged: its features are computed again", error)
        return
    shutil.rmtree(entry.with_suffix(".parts"), ignore_errors=True)


def _open(entry: Path, key: Mapping[str, Any]) -> np.ndarray | None:
    """Verified features of a finished entry, or None after a line in the log that says what is wrong with them."""
    file = entry / "features.npy"
    try:
        info = json.loads((entry / "entry.json").read_text(encoding="utf-8"))
        if info["key"] != key:
            raise ValueError("it has another key")
        if store.fingerprint_file(file) != info["sha256"]:
            raise ValueError("features.npy is not what was written")
        features: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        if list(features.shape) != info["shape"] or len(features) != key["sequences"]:
            raise ValueError(f"features.npy has the shape {list(features.shape)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("cached features at %s are damaged (%s): they are computed again", entry, error)
        return None
    return features
