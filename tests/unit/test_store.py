"""Nothing half-written ever stands under its final name: not after an error, a full disk, or a kill."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prm import store
from prm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TABLE = pa.table({"x": list(range(50_000))})


def _names(directory: Path) -> list[str]:
    """Everything in a directory, leftovers of a write included."""
    return sorted(p.name for p in directory.iterdir())


def _content(directory: Path) -> dict[str, str]:
    return {p.relative_to(directory).as_posix(): p.read_text() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A directory written before, whose content must survive."""
    with store.atomic_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("first")
        (directory / "below").mkdir()
        (directory / "below" / "b").write_text("second")
    return tmp_path / "out"


WHOLE = {"a": "first", "below/b": "second"}


# Single files


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    store.write_json(path, {"é": 1})
    store.write_json(path, {"é": 2})
    assert path.read_text(encoding="utf-8") == '{\n  "é": 2\n}\n'
    assert _names(path.parent) == ["file.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_writer_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = store.write_text(tmp_path / "file", "old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        store.write_atomic(path, write)
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["file"]


def test_json_that_is_refused_leaves_the_old_file(tmp_path: Path) -> None:
    path = store.write_json(tmp_path / "file", [1])
    with pytest.raises(ValueError, match="Out of range"):
        store.write_json(path, [math.nan])
    assert path.read_text() == "[\n  1\n]\n"
    assert _names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EROFS, "choose a writable directory"),
        (errno.EACCES, "choose a writable directory"),
    ],
)
def test_a_fault_of_the_disk_is_one_line_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    path = store.write_text(tmp_path / "file", "old")

    def fault(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", fault)
    with pytest.raises(UserError, match=words) as caught:
        store.write_text(path, "new")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["file"]


def test_an_error_that_is_no_fault_of_the_disk_keeps_its_class(tmp_path: Path) -> None:
    def write(_: Path) -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken") as caught:
        store.write_atomic(tmp_path / "file", write)
    assert not isinstance(caught.value, UserError)


def test_a_file_in_the_place_of_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file stands where a directory is needed"):
        store.write_text(tmp_path / "file" / "below", "x")


# Full and read-only disks, for real

needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


def _bytes_to(path: Path) -> None:
    path.write_bytes(b"x" * 100_000)


def _parquet_to(path: Path) -> None:
    pq.write_table(TABLE, path)


@needs_dev_full
@pytest.mark.parametrize("fill", [_bytes_to, _parquet_to])
def test_a_full_device_keeps_the_old_file(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    path = store.write_text(tmp_path / "file", "old")

    def write(temporary: Path) -> None:
        temporary.unlink()
        temporary.symlink_to("/dev/full")
        fill(temporary)

    with pytest.raises(UserError, match="no space left to write"):
        store.write_atomic(path, write)
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["file"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() or mount is None:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _safetensors_to(path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(200_000)}, path)


@pytest.mark.parametrize("fill", [_bytes_to, _parquet_to, _safetensors_to])
def test_a_full_disk_keeps_the_earlier_directory(tiny_disk: Path, fill: Callable[[Path], None]) -> None:
    """safetensors has an exception of its own for it, which is no OSError."""
    with store.atomic_directory(tiny_disk / "out") as directory:
        (directory / "a").write_text("first")
    with (
        pytest.raises(UserError, match="no space left to write"),
        store.atomic_directory(tiny_disk / "out", overwrite=True) as directory,
    ):
        for part in range(5):
            fill(directory / f"part-{part}")
    assert _content(tiny_disk / "out") == {"a": "first"}
    assert _names(tiny_disk) == ["out"]


READ_ONLY = """
import os, sys
from prm import store
from prm.errors import UserError
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for write in (store.write_text, lambda path, text: store.atomic_directory(path).__enter__()):
    try:
        write(sys.argv[1] + "/new", "x")
    except UserError as error:
        print(error)
"""


def test_a_directory_without_write_permission_is_one_line(tmp_path: Path) -> None:
    """In a process of its own that gives up root, whom permissions do not stop."""
    place = tmp_path / "mine"
    place.mkdir()
    for parent in (tmp_path, *list(tmp_path.parents)[:2]):
        if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    place.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(place)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("choose a writable directory" in line and f"{place}/new" in line for line in lines)
    assert _names(place) == []


# Directories


def test_an_existing_directory_is_refused_without_the_flag(earlier: Path) -> None:
    with pytest.raises(UserError, match="--overwrite"), store.atomic_directory(earlier):
        pytest.fail("the block ran")
    assert _content(earlier) == WHOLE


def test_a_file_is_refused_even_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="is a file"), store.atomic_directory(tmp_path / "out", overwrite=True):
        pytest.fail("the block ran")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with store.atomic_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("x")
    assert _content(tmp_path / "out") == {"a": "x"}
    assert _names(tmp_path) == ["out"]


def test_overwriting_replaces_the_whole_directory(earlier: Path) -> None:
    with store.atomic_directory(earlier, overwrite=True) as directory:
        (directory / "c").write_text("new")
        assert _content(earlier) == WHOLE, "the old content must stand until the block ends"
    assert _content(earlier) == {"c": "new"}
    assert _names(earlier.parent) == ["out"]


@pytest.mark.parametrize("fault", [RuntimeError("broken off"), KeyboardInterrupt(), SystemExit(3)])
def test_a_block_that_fails_leaves_the_old_directory(earlier: Path, fault: BaseException) -> None:
    with pytest.raises(type(fault)), store.atomic_directory(earlier, overwrite=True) as directory:
        (directory / "a").write_text("half")
        raise fault
    assert _content(earlier) == WHOLE
    assert _names(earlier.parent) == ["out"]


def test_a_block_that_fails_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), store.atomic_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("half")
        raise RuntimeError
    assert _names(tmp_path) == []


def test_a_rename_that_fails_puts_the_old_directory_back(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).suffix == ".part":
            raise OSError(errno.ENOSPC, "full")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(UserError, match="no space"), store.atomic_directory(earlier, overwrite=True) as directory:
        (directory / "c").write_text("new")
    assert _content(earlier) == WHOLE
    assert _names(earlier.parent) == ["out"]


KILLED = """
import sys, time
from prm import store
with store.atomic_directory(sys.argv[1], overwrite=True) as directory:
    (directory / "a").write_text("half")
    print("inside", flush=True)
    time.sleep(60)
"""


def test_a_kill_in_the_middle_leaves_the_earlier_directory_whole(earlier: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(earlier)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"inside\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdout.close()
    assert _content(earlier) == WHOLE
    with store.atomic_directory(earlier, overwrite=True) as directory:
        (directory / "c").write_text("new")
    assert _content(earlier) == {"c": "new"}


# The cache


def test_the_cache_fills_a_key_once(tmp_path: Path) -> None:
    cache = store.Cache("things", tmp_path)
    calls = []

    def fill(directory: Path) -> None:
        calls.append(directory)
        (directory / "a").write_text("content")

    first = cache.get({"b": 1, "a": [2]}, fill)
    assert cache.get({"a": [2], "b": 1}, fill) == first == cache.path({"a": [2], "b": 1})
    assert len(calls) == 1
    assert _content(first) == {"a": "content", "key.json": '{"a":[2],"b":1}'}
    assert cache.get({"a": [2], "b": 2}, fill) != first


def test_a_fill_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = store.Cache("things", tmp_path)

    def fill(directory: Path) -> None:
        (directory / "a").write_text("half")
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        cache.get("key", fill)
    assert _names(cache.root) == []


def test_a_fill_that_was_killed_is_never_taken_for_whole(tmp_path: Path) -> None:
    cache = store.Cache("things", tmp_path)

    def killed(directory: Path) -> None:
        (directory / "a").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=cache.get, args=("key", killed))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len(_names(cache.root)) == 1, "the half-filled directory should be there for this test to mean something"
    filled = cache.get("key", lambda directory: store.write_text(directory / "a", "whole") and None)
    assert (filled / "a").read_text() == "whole"


FILLING = """
import sys, time
from pathlib import Path
from prm.store import Cache
def fill(directory):
    (directory / "a").write_text("half")
    Path(sys.argv[2]).touch()
    until = time.monotonic() + 30
    while not Path(sys.argv[3]).exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert Path(sys.argv[3]).exists(), "the other process never came"
    (directory / "a").write_text("content")
print(Cache("things", sys.argv[1]).get("key", fill))
"""


def test_two_processes_fill_one_key_and_both_succeed(tmp_path: Path) -> None:
    marks = [tmp_path / "one", tmp_path / "two"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FILLING, str(tmp_path), str(own), str(other)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own, other in (marks, marks[::-1])
    ]
    results = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    cache = store.Cache("things", tmp_path)
    assert {out.strip() for out, _ in results} == {str(cache.path("key"))}
    assert _names(cache.root) == [cache.path("key").name]
    assert (cache.path("key") / "a").read_text() == "content"


def test_where_the_caches_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PRM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_root() == tmp_path / "xdg" / "prm"
    monkeypatch.setenv("PRM_CACHE", str(tmp_path / "own"))
    assert store.cache_root() == tmp_path / "own"


# Shards


def test_shards_are_appended_and_never_replaced(tmp_path: Path) -> None:
    shards = store.Shards(tmp_path / "shards")
    assert shards.table() is None and shards.names() == []
    shards.append("b", pa.table({"x": [2, 3]}))
    shards.append("a", pa.table({"x": [1]}))
    assert "a" in shards and "c" not in shards
    with pytest.raises(FileExistsError, match="shard a exists"):
        shards.append("a", pa.table({"x": [9]}))
    assert shards.names() == ["a", "b"]
    assert shards.table().to_pydict() == {"x": [1, 2, 3]}


def test_a_shard_broken_off_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = store.Shards(tmp_path)

    def half(_: pa.Table, path: Path) -> None:
        Path(path).write_bytes(b"PAR1 half")
        raise RuntimeError("broken off")

    monkeypatch.setattr(store.pq, "write_table", half)
    with pytest.raises(RuntimeError, match="broken off"):
        shards.append("a", TABLE)
    assert "a" not in shards and shards.names() == []
    assert _names(tmp_path) == []


# Fingerprints


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {"a": [1, math.nan]}])
def test_canonical_json_refuses_what_is_not_json(value: object) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        store.canonical_json(value)


def test_a_fingerprint_does_not_depend_on_key_order() -> None:
    one = {"a": 1, "b": {"c": [1, 2], "d": "é"}}
    other = {"b": {"d": "é", "c": [1, 2]}, "a": 1}
    assert store.canonical_json(one) == '{"a":1,"b":{"c":[1,2],"d":"é"}}'
    assert store.fingerprint(one) == store.fingerprint(other)
    assert store.fingerprint(one) != store.fingerprint({**one, "b": {"c": [2, 1], "d": "é"}})


def test_a_tree_fingerprint_follows_names_and_bytes(earlier: Path) -> None:
    before = store.fingerprint_tree(earlier)
    copy = shutil.copytree(earlier, earlier.parent / "copy")
    assert store.fingerprint_tree(copy) == before
    (copy / "a").rename(copy / "z")
    assert store.fingerprint_tree(copy) != before
    (copy / "z").rename(copy / "a")
    (copy / "below" / "b").write_text("Second")
    assert store.fingerprint_tree(copy) != before
