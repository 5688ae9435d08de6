"""The one place where files are written: atomic writes, a content-addressed cache, append-only shards.

Nothing here leaves a half-written file under its final name. A file is written beside its target, synced and renamed;
a directory is built beside its target and renamed as a whole; a shard is either whole or absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prm.errors import UserError

_CHUNK = 1 << 20


def cache_root() -> Path:
    """Directory of all caches: $PRM_CACHE, else $XDG_CACHE_HOME/prm, else ~/.cache/prm."""
    if os.environ.get("PRM_CACHE"):
        return Path(os.environ["PRM_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prm"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; NaN and infinities are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """sha256 (hex) of a JSON value, independent of key order."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def fingerprint_file(path: str | Path) -> str:
    """sha256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_tree(path: str | Path) -> str:
    """sha256 (hex) over the relative names and bytes of all files below a directory."""
    root = Path(path)
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    return fingerprint([[name, fingerprint_file(root / name)] for name in names])


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[None]:
    """Turn the faults of a disk (full, read-only, no permission) into one line that names the target."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(_no_space(target)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {target}: {error.strerror}; choose a writable directory") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"cannot write {target}: a file stands where a directory is needed") from error
        raise
    except Exception as error:
        # safetensors and tokenizers raise classes of their own, with the system's error in the text.
        if "(os error 28)" in str(error):
            raise UserError(_no_space(target)) from error
        raise


def _no_space(target: str | Path) -> str:
    return f"no space left to write {target}: free some disk space, or choose another --out"


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: str | Path) -> None:
    """Sync every file and directory below `path`, readable to all, so that a rename publishes whole content."""
    for directory, _, names in os.walk(path):
        for name in names:
            # Some writers leave files that only their owner can read.
            os.chmod(os.path.join(directory, name), 0o644)
            handle = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _sync_directory(Path(directory))


def write_atomic(path: str | Path, write: Callable[[Path], None]) -> Path:
    """Call `write(temporary_path)`, sync what it wrote and rename it to `path`."""
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            handle = os.open(temporary, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)
    return path


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Atomic write of bytes."""
    return write_atomic(path, lambda temporary: _write(temporary, data))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def write_text(path: str | Path, text: str) -> Path:
    """Atomic write of UTF-8 text."""
    return write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> Path:
    """Atomic write of indented JSON. NaN and infinities are refused (ValueError)."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_table(path: str | Path, table: pa.Table) -> Path:
    """Atomic write of a Parquet file."""
    return write_atomic(path, lambda temporary: pq.write_table(table, temporary))


@contextlib.contextmanager
def atomic_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Build a directory beside `path` and rename it there when the block ends without an error.

    An existing `path` is left as it was unless the block succeeds and `overwrite` is set.

    Raises:
        UserError: `path` exists and is not empty, and `overwrite` is not set.
    """
    path = Path(path)
    refuse_existing(path, overwrite=overwrite)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        os.chmod(temporary, 0o755)
        try:
            yield temporary
            sync_tree(temporary)
            retired = None
            if path.exists():
                retired = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
                os.rename(path, retired / "old")
            try:
                os.rename(temporary, path)
            except OSError:
                if retired is not None:
                    os.rename(retired / "old", path)
                    retired.rmdir()
                raise
            _sync_directory(path.parent)
            if retired is not None:
                shutil.rmtree(retired, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(path: str | Path, *, overwrite: bool) -> None:
    """Raise UserError when `path` is a file, or a directory with something in it and `overwrite` is not set."""
    path = Path(path)
    if path.is_file():
        raise UserError(f"{path} is a file: choose a directory with --out")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise UserError(f"{path} exists and is not empty: choose another --out, or pass --overwrite to replace it")


class Cache:
    """A content-addressed cache of directories: `key` is any JSON value that names the content fully.

    Two processes that fill one key at the same time both succeed; the first to finish is kept.
    """

    def __init__(self, name: str, root: str | Path | None = None) -> None:
        self.root = Path(root or cache_root()) / name

    def path(self, key: Any) -> Path:
        """Where the content of `key` lies, or would lie."""
        return self.root / fingerprint(key)[:32]

    def get(self, key: Any, fill: Callable[[Path], None]) -> Path:
        """Directory of `key`; `fill(directory)` makes it when it is not there yet."""
        target = self.path(key)
        if target.is_dir():
            return target
        with writing(target):
            self.root.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=self.root))
            os.chmod(temporary, 0o755)
            try:
                fill(temporary)
                write_text(temporary / "key.json", canonical_json(key))
                sync_tree(temporary)
                try:
                    os.rename(temporary, target)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return target


class Shards:
    """Append-only rows in a directory: every `append` is one Parquet file, whole or absent.

    Each shard has a name chosen by the caller (a unit of work), so that work done twice is seen and skipped.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def names(self) -> list[str]:
        """Names of the shards that are there, sorted."""
        return sorted(path.stem for path in self.directory.glob("*.parquet"))

    def __contains__(self, name: str) -> bool:
        return (self.directory / f"{name}.parquet").is_file()

    def append(self, name: str, table: pa.Table) -> Path:
        """Write the shard `name`. A shard is never replaced: an existing one raises FileExistsError."""
        if name in self:
            raise FileExistsError(f"shard {name} exists in {self.directory}")
        return write_table(self.directory / f"{name}.parquet", table)

    def read(self, name: str) -> pa.Table:
        """The rows of one shard."""
        return pq.read_table(self.directory / f"{name}.parquet")

    def table(self) -> pa.Table | None:
        """All rows of all shards in the order of their names, or None when there are none."""
        tables = [self.read(name) for name in self.names()]
        return pa.concat_tables(tables) if tables else None
