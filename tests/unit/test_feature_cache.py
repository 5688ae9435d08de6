"""Cached features are those of the live backbone, computed once, and never read when stale, damaged or half-written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers.utils.hub
from safetensors.torch import load_file, save_file

import prm.frozen_features
from data_modules.preference_data import PreferenceDataModule
from prm import extras
from prm.backbones import open_backbone, open_tokenizer
from prm.cli import main
from prm.dataset_dir import DatasetDir
from prm.errors import UserError
from prm.feature_cache import cached_features, feature_key, features_path, open_features
from prm.features import TransformersFeatures
from prm.formatting import Formatter
from prm.frozen_features import FrozenBackbone, backbone_features
from prm.inference.engines import vllm
from prm.records import user_prompt

ROOT = Path(__file__).resolve().parents[2]
SEQUENCES = [tuple(range(1, 2 + n % 5)) for n in range(23)]
FACTS: dict[str, Any] = {
    "sequences": SEQUENCES,
    "data_fingerprint": "d" * 64,
    "backbone": {"name": "model", "revision": None, "sha256": "a" * 64},
    "chat_template": "{{ messages }}",
    "max_length": 64,
    "pooling": "last",
    "dtype": "float32",
    "engine": "transformers",
}
KEY = feature_key(**FACTS)


def expected(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array([[sum(s), len(s), 0.5] for s in sequences], dtype=np.float32)


class Counting:
    """A `compute` that keeps what it was asked for, and fails when it is asked for more than `limit` sequences."""

    def __init__(self, limit: int = 10**6) -> None:
        self.asked: list[Sequence[int]] = []
        self.limit = limit

    def __call__(self, sequences: Sequence[Sequence[int]], count: Callable[[int], None]) -> np.ndarray:
        if len(self.asked) + len(sequences) > self.limit:
            raise RuntimeError("killed")
        self.asked += sequences
        count(len(sequences))
        return expected(sequences)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of each test's own."""
    monkeypatch.setenv("PRM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The cache itself


def test_features_are_computed_once_and_memory_mapped(root: Path) -> None:
    first = Counting()
    features = cached_features(KEY, SEQUENCES, first, chunk=5)
    assert first.asked == SEQUENCES
    again = cached_features(KEY, SEQUENCES, Counting(limit=0), chunk=5)
    for found in (features, again, open_features(KEY)):
        assert isinstance(found, np.memmap) and found.dtype == np.float32 and not found.flags.writeable
        np.testing.assert_array_equal(found, expected(SEQUENCES))
    assert sorted(p.name for p in features_path(KEY).iterdir()) == ["entry.json", "features.npy"]
    assert not list(root.glob("features/*.parts")) and not list(root.glob("features/.*"))


@pytest.mark.parametrize(
    "change",
    [
        {"sequences": [*SEQUENCES[:-1], (1, 2, 9)]},
        {"sequences": SEQUENCES[::-1]},
        {"data_fingerprint": "e" * 64},
        {"backbone": {"name": "model", "revision": None, "sha256": "b" * 64}},
        {"backbone": {"name": "organization/model", "revision": "main", "commit": "a" * 40}},
        {"chat_template": None},
        {"chat_template": "{{ messages }} "},
        {"max_length": 65},
        {"pooling": "mean"},
        {"dtype": "bfloat16"},
        {"engine": "vllm"},
    ],
    ids=str,
)
def test_each_part_of_the_key_gives_an_entry_of_its_own(change: dict[str, Any]) -> None:
    cached_features(KEY, SEQUENCES, Counting())
    changed = {**FACTS, **change}
    assert open_features(feature_key(**changed)) is None
    compute = Counting()
    cached_features(feature_key(**changed), changed["sequences"], compute)
    assert compute.asked == changed["sequences"]


def test_where_one_sequence_ends_is_part_of_the_key() -> None:
    keys = [feature_key(**{**FACTS, "sequences": s}) for s in ([(1,), (2,)], [(1, 2), ()], [(), (1, 2)])]
    assert len({key["tokens"] for key in keys}) == 3


def test_weights_that_nothing_names_are_refused() -> None:
    with pytest.raises(UserError, match="commit hash"):
        feature_key(**{**FACTS, "backbone": {"name": "organization/model", "revision": "main"}})
    with pytest.raises(ValueError, match="auto"):
        feature_key(**{**FACTS, "dtype": "auto"})


def test_a_stopped_run_goes_on_where_it_stopped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prm")
    first = Counting(limit=12)
    with pytest.raises(RuntimeError, match="killed"):
        cached_features(KEY, SEQUENCES, first, chunk=5)
    assert first.asked == SEQUENCES[:10] and open_features(KEY) is None
    second = Counting()
    features = cached_features(KEY, SEQUENCES, second, chunk=5)
    assert second.asked == SEQUENCES[10:]
    np.testing.assert_array_equal(features, expected(SEQUENCES))
    assert "10 of 23 are there from before" in caplog.text


def test_chunks_of_another_size_do_not_mix() -> None:
    with pytest.raises(RuntimeError):
        cached_features(KEY, SEQUENCES, Counting(limit=12), chunk=5)
    np.testing.assert_array_equal(cached_features(KEY, SEQUENCES, Counting(), chunk=7), expected(SEQUENCES))


WORKER = """
import json, os, signal, sys, time
import numpy as np
from prm.feature_cache import cached_features
job = json.loads(sys.argv[1])
asked = []
def compute(sequences, count):
    if len(asked) >= job["die_after"]:
        os.kill(os.getpid(), signal.SIGKILL)
    print("computing", flush=True)
    time.sleep(job["seconds"])
    asked.extend(sequences)
    return np.array([[sum(s), len(s), 0.5] for s in sequences], dtype=np.float32)
features = cached_features(job["key"], job["sequences"], compute, chunk=5)
print(json.dumps({"asked": asked, "features": features.tolist()}))
"""


def worker(die_after: int = 10**6, seconds: float = 0.0) -> subprocess.Popen[str]:
    job = json.dumps({"key": KEY, "sequences": SEQUENCES, "die_after": die_after, "seconds": seconds})
    command = [sys.executable, "-c", WORKER, job]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_loses_one_chunk() -> None:
    killed = worker(die_after=15)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    compute = Counting()
    np.testing.assert_array_equal(cached_features(KEY, SEQUENCES, compute, chunk=5), expected(SEQUENCES))
    assert compute.asked == SEQUENCES[15:]


def test_processes_share_the_work_and_agree() -> None:
    workers = [worker(seconds=0.5) for _ in range(3)]
    results = []
    for process in workers:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    for result in results:
        np.testing.assert_array_equal(np.array(result["features"]), expected(SEQUENCES))
    # No sequence twice, unless one process was done before another had started.
    assert sorted(s for r in results for s in r["asked"]) == sorted(map(list, SEQUENCES))


def test_what_a_dead_process_held_is_computed_by_the_one_that_waits() -> None:
    holder = worker(seconds=600)
    assert holder.stdout is not None and holder.stdout.readline() == "computing\n"
    waiting = worker()
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.communicate(timeout=3)
    holder.kill()
    holder.communicate()
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, err
    assert "damaged" not in err
    asked = json.loads(out.splitlines()[-1])["asked"]
    # Last of all the first chunk, which it had to wait for.
    assert asked == [list(s) for s in SEQUENCES[5:] + SEQUENCES[:5]]


def truncate(entry: Path) -> None:
    os.truncate(entry / "features.npy", (entry / "features.npy").stat().st_size - 4)


def flip(entry: Path) -> None:
    data = bytearray((entry / "features.npy").read_bytes())
    data[-7] ^= 1
    (entry / "features.npy").write_bytes(data)


def empty(entry: Path) -> None:
    (entry / "features.npy").write_bytes(b"")


def lose_facts(entry: Path) -> None:
    (entry / "entry.json").unlink()


def damage_facts(entry: Path) -> None:
    (entry / "entry.json").write_text("[]")


def take_another(entry: Path) -> None:
    """A whole entry, of another key."""
    other = {**FACTS, "pooling": "mean"}
    cached_features(feature_key(**other), SEQUENCES, lambda s, count: 2 * expected(s))
    shutil.rmtree(entry)
    shutil.copytree(features_path(feature_key(**other)), entry)


@pytest.mark.parametrize("damage", [truncate, flip, empty, lose_facts, damage_facts, take_another])
def test_a_damaged_entry_is_computed_again(
    damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture, root: Path
) -> None:
    cached_features(KEY, SEQUENCES, Counting())
    damage(features_path(KEY))
    assert open_features(KEY) is None
    assert str(features_path(KEY)) in caplog.text and "computed again" in caplog.text
    compute = Counting()
    np.testing.assert_array_equal(cached_features(KEY, SEQUENCES, compute), expected(SEQUENCES))
    assert compute.asked == SEQUENCES
    assert open_features(KEY) is not None and not list(root.glob("features/.*"))


def test_a_damaged_chunk_is_computed_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError):
        cached_features(KEY, SEQUENCES, Counting(limit=12), chunk=5)
    file = sorted(root.glob("features/*.parts/*"))[1]
    data = bytearray(file.read_bytes())
    data[-2] ^= 64
    file.write_bytes(data)
    compute = Counting()
    np.testing.assert_array_equal(cached_features(KEY, SEQUENCES, compute, chunk=5), expected(SEQUENCES))
    assert compute.asked == SEQUENCES[10:] + SEQUENCES[5:10]
    assert f"{file} is damaged" in caplog.text


def test_what_a_kill_while_publishing_left_is_swept(root: Path) -> None:
    left = root / "features" / f".{features_path(KEY).name}.abc.part"
    left.mkdir(parents=True)
    (left / "features.npy").write_bytes(b"half")
    cached_features(KEY, SEQUENCES, Counting())
    assert sorted(p.name for p in (root / "features").iterdir()) == [
        features_path(KEY).name,
        f"{features_path(KEY).name}.lock",
    ]


def test_features_that_cannot_be_right_are_refused() -> None:
    def nan(sequences: Sequence[Sequence[int]], count: Callable[[int], None]) -> np.ndarray:
        features = expected(sequences)
        features[len(sequences) - 1, 1] = np.nan
        return features

    with pytest.raises(UserError, match="text 22 are not finite"):
        cached_features(KEY, SEQUENCES, nan)
    with pytest.raises(ValueError, match=r"shape \[22, 3\] for 23"):
        cached_features(KEY, SEQUENCES, lambda s, count: expected(s[1:]))
    with pytest.raises(ValueError, match="not of these 22"):
        cached_features(KEY, SEQUENCES[1:], Counting())
    assert open_features(KEY) is None


def test_a_cache_that_cannot_be_written_is_one_line(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(UserError, match="a file stands where a directory is needed"):
        cached_features(KEY, SEQUENCES, Counting())


# Through a backbone


@pytest.fixture
def model(tiny_llama_path: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to change."""
    return Path(shutil.copytree(tiny_llama_path, tmp_path / "model"))


@pytest.fixture(scope="module")
def data(synthetic_dir: Path) -> DatasetDir:
    return DatasetDir.open(synthetic_dir)


ROWS = [(user_prompt(f"Name the number {n}."), "one " * (n % 7 + 1)) for n in range(20)]


def formatter_of(path: Path, max_length: int = 128) -> Formatter:
    return Formatter(open_tokenizer(str(path)), max_length)


def encode(formatter: Formatter, rows: list[Any] = ROWS) -> list[tuple[int, ...]]:
    return [e.ids for e in formatter.encode_all(rows)]


def live(path: Path, sequences: Sequence[Sequence[int]], **options: Any) -> np.ndarray:
    return TransformersFeatures(open_backbone(str(path), **{"dtype": "float32", **options})).features(sequences)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backbones that were opened."""
    names: list[str] = []

    def counting(name: str, **options: Any) -> Any:
        names.append(name)
        return open_backbone(name, **options)

    monkeypatch.setattr(prm.frozen_features, "open_backbone", counting)
    return names


def test_cached_features_are_the_live_ones_and_need_no_backbone(
    model: Path, data: DatasetDir, opened: list[str]
) -> None:
    formatter = formatter_of(model)
    both = {"train": encode(formatter), "validation": encode(formatter, ROWS[:3])}
    options: dict[str, Any] = {"data": data, "formatter": formatter, "batch_size": 3}
    features = backbone_features(str(model), sequences=both, **options)
    assert opened == [str(model)]
    for split, sequences in both.items():
        assert isinstance(features[split], np.memmap)
        np.testing.assert_allclose(features[split], live(model, sequences), rtol=0, atol=1e-6)
    again = backbone_features(str(model), sequences=both, **options)
    assert opened == [str(model)]
    np.testing.assert_array_equal(again["train"], features["train"])


def test_another_name_of_the_same_directory_finds_the_features(
    model: Path, data: DatasetDir, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    formatter = formatter_of(model)
    backbone_features(str(model), data=data, sequences={"train": encode(formatter)}, formatter=formatter)
    monkeypatch.chdir(model.parent)
    backbone_features(f"./{model.name}/", data=data, sequences={"train": encode(formatter)}, formatter=formatter)
    assert len(opened) == 1


def test_whatever_changes_a_stale_entry_is_never_read(model: Path, data: DatasetDir, opened: list[str]) -> None:
    formatter = formatter_of(model)
    sequences = encode(formatter)

    def features(sequences: list[tuple[int, ...]] = sequences, **options: Any) -> np.ndarray:
        return backbone_features(
            str(model), sequences={"train": sequences}, **{"data": data, "formatter": formatter, **options}
        )["train"]

    before = features()
    assert len(opened) == 1

    other_text = encode(formatter, [*ROWS[:-1], (ROWS[-1][0], "two")])
    np.testing.assert_allclose(features(other_text), live(model, other_text), atol=1e-6)
    assert len(opened) == 2

    # The same tokens: nothing was cut, and the template differs by a comment.
    assert encode(formatter_of(model, 129)) == sequences
    features(formatter=formatter_of(model, 129))
    assert len(opened) == 3
    commented = formatter_of(model)
    commented.tokenizer.chat_template += "{# a comment #}"
    assert encode(commented) == sequences
    features(formatter=commented)
    assert len(opened) == 4

    np.testing.assert_allclose(features(pooling="mean"), live(model, sequences, pooling="mean"), atol=1e-6)
    np.testing.assert_allclose(features(dtype="bfloat16"), live(model, sequences, dtype="bfloat16"), atol=2e-2)
    assert len(opened) == 6

    class Vllm:
        def features(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
            return np.full((len(sequences), 64), 7, dtype=np.float32)

    assert (features(engine="vllm", open_engine=lambda frozen: nullcontext(Vllm())) == 7).all()

    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    changed = features()
    assert len(opened) == 7
    assert np.abs(changed - before).max() > 1e-3
    np.testing.assert_allclose(changed, live(model, sequences), atol=1e-6)

    np.testing.assert_array_equal(features(other_text[:-1]), features(other_text[:-1]))
    assert len(opened) == 8


def test_weights_that_change_meanwhile_are_not_kept(model: Path, data: DatasetDir) -> None:
    class Careless:
        def features(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
            (model / "generation_config.json").write_text("{}")
            return expected(sequences)

    formatter = formatter_of(model)
    sequences = {"train": encode(formatter)}
    frozen = FrozenBackbone.find(str(model), None, dtype="auto", pooling="last", engine="transformers")
    key = frozen.key(sequences["train"], data_fingerprint=data.fingerprint, formatter=formatter)
    with pytest.raises(UserError, match="changed while features were computed"):
        backbone_features(
            str(model),
            data=data,
            sequences=sequences,
            formatter=formatter,
            open_engine=lambda frozen: nullcontext(Careless()),
        )
    assert open_features(key) is None and not list(features_path(key).with_suffix(".parts").glob("*"))


def test_unknown_options_are_one_line(model: Path) -> None:
    for options, message in (
        ({"engine": "onnx"}, "transformers, vllm"),
        ({"dtype": "int8"}, "float32"),
        ({"pooling": "max"}, "mean"),
    ):
        with pytest.raises(UserError, match=message):
            FrozenBackbone.find(
                str(model), None, **{"dtype": "auto", "pooling": "last", "engine": "transformers", **options}
            )


HUB = """
import sys
from prm.errors import UserError
from prm.frozen_features import FrozenBackbone
for revision in (None, "main", sys.argv[1]):
    found = FrozenBackbone.find("organization/tiny", revision, dtype="float32", pooling="last", engine="transformers")
    print(found.revision, found.sha256)
"""


@pytest.mark.slow
def test_a_hub_id_stands_for_the_commit_it_means_now(tiny_llama_path: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "models--organization--tiny"
    (hub / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_llama_path, hub / "snapshots" / commit)
    for commit in ("a" * 40, "b" * 40):
        (hub / "refs" / "main").write_text(commit)
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", HUB, commit]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines() == [f"{commit} None"] * 3, done.stderr


def test_a_hub_id_without_a_commit_is_refused(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.hub, "cached_file", lambda *_, **__: str(tiny_llama_path / "config.json"))
    with pytest.raises(UserError, match="commit hash as the revision"):
        FrozenBackbone.find("organization/tiny", "main", dtype="auto", pooling="last", engine="transformers")


# The command


def run_features(capsys: pytest.CaptureFixture[str], data: Path, model: Path, *options: str) -> dict[str, Any]:
    assert main(["features", str(data), "--backbone", str(model), "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_fills_the_cache_that_training_reads(
    synthetic_dir: Path, tiny_llama_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_features(capsys, synthetic_dir, tiny_llama_path, "--max-length", "200")
    assert [row["was_there"] for row in first["splits"].values()] == [False, False] and len(opened) == 1
    again = run_features(
        capsys, synthetic_dir, tiny_llama_path, "--max-length", "200", "--splits", "validation,train,test_seen"
    )
    assert [row["was_there"] for row in again["splits"].values()] == [True, True, False]
    assert again["splits"]["train"] == {**first["splits"]["train"], "was_there": True}

    module = PreferenceDataModule(str(synthetic_dir), str(tiny_llama_path), max_length=200)
    module.setup("fit")
    tokens = {name: module.split_tokens(name) for name in ("train", "validation")}
    sequences = {name: found.sequences for name, found in tokens.items() if found is not None}
    opened.clear()
    features = backbone_features(
        str(tiny_llama_path), data=module.directory, sequences=sequences, formatter=module.formatter
    )
    assert not opened
    for name, rows in sequences.items():
        np.testing.assert_allclose(features[name], live(tiny_llama_path, rows), rtol=0, atol=1e-6)
        assert first["splits"][name]["texts"] == len(rows) and first["splits"][name]["width"] == 64


def test_the_command_says_where_and_how_much(
    synthetic_dir: Path, tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["features", str(synthetic_dir), "--backbone", str(tiny_llama_path), "--splits", "validation"]
    for what in ("computed", "was there"):
        assert main(command) == 0
        line = capsys.readouterr().out.strip()
        assert line.startswith("validation: ") and f" texts, 64 wide, {what}: " in line
        assert Path(line.rpartition(": ")[2], "features.npy").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--splits", "train,test"], "'test' is none of train, validation, test_seen"),
        (["--splits", ","], "is none of train"),
        (["--batch-size", "0"], "--batch-size"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization"),
        (["--max-length", "2"], "max_length"),
        (["--backbone", "./nowhere"], "nowhere"),
    ],
)
def test_wrong_use_is_one_line(
    options: list[str],
    message: str,
    synthetic_dir: Path,
    tiny_llama_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["features", str(synthetic_dir), "--backbone", str(tiny_llama_path), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_training_has_vllm_features_computed_by_the_command(
    synthetic_dir: Path,
    tiny_llama_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []

    class Vllm:
        """In place of the engine: features that transformers would not give."""

        def __init__(self, model: str, *, revision: None, dtype: str, max_model_len: int, **_: Any) -> None:
            assert model == str(tiny_llama_path) and dtype == "float32" and max_model_len <= 200
            self.longest = max_model_len

        def __enter__(self) -> Vllm:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def features(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
            assert max(map(len, sequences)) <= self.longest
            return expected(sequences)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "prm.cli"]
        started.append(command)
        return subprocess.CompletedProcess(command, main(command[3:]))

    monkeypatch.setattr(vllm, "VllmFeatures", Vllm)
    monkeypatch.setattr(extras, "require", lambda *_, **__: None)
    monkeypatch.setattr(prm.frozen_features.subprocess, "run", run)
    module = PreferenceDataModule(str(synthetic_dir), str(tiny_llama_path), max_length=200)
    module.setup("fit")
    tokens = {name: module.split_tokens(name) for name in ("train", "validation")}
    sequences = {name: found.sequences for name, found in tokens.items() if found is not None}
    options: dict[str, Any] = {"data": module.directory, "formatter": module.formatter, "engine": "vllm"}
    for _ in range(2):
        features = backbone_features(str(tiny_llama_path), sequences=sequences, dtype="float32", **options)
        for name, rows in sequences.items():
            np.testing.assert_array_equal(features[name], expected(rows))
    assert len(started) == 1

    other = {"train": sequences["train"][1:]}
    with pytest.raises(RuntimeError, match="other features than those of train"):
        backbone_features(str(tiny_llama_path), sequences=other, dtype="float32", **options)
    monkeypatch.setattr(Vllm, "features", lambda *_: (_ for _ in ()).throw(UserError("the engine died")))
    with pytest.raises(UserError, match="ended with status 2"):
        backbone_features(str(tiny_llama_path), sequences=sequences, dtype="float32", pooling="mean", **options)
    assert "the engine died" in capsys.readouterr().err
