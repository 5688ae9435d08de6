"""llmfao: votes joined to answers, ties and empty answers counted, and the real files where they are."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_modules.bad_rows import quarantine_file
from data_modules.llmfao import DEFAULTS, build_llmfao
from data_modules.user_splits import SplitOptions
from prm.commands.evaluate import summary_lines
from prm.dataset_dir import DatasetDir, check_dataset
from prm.errors import UserError

COLUMNS = ["id", "prompt", "model_x", "model_y", "worker", "winner", "left", "right"]
EASY = SplitOptions(split_rule="pair", min_pairs=2)


def answer(identity: int, x: str | None = None, y: str | None = None) -> dict[str, Any]:
    prompt = identity % 3
    return {
        "id": identity, "prompt": prompt, "text": f"Prompt {prompt}?", "slug": f"slug{prompt}", "note": None,
        "model_x": 1, "result_x": f"left {identity}" if x is None else x,
        "model_y": 2, "result_y": f"right {identity}" if y is None else y,
    }  # fmt: skip


def vote(identity: int, worker: int, winner: str = "left") -> dict[str, Any]:
    key = {"id": identity, "prompt": identity % 3, "model_x": 1, "model_y": 2}
    return {**key, "worker": worker, "winner": winner, "left": "Model X", "right": "Model Y"}


class Files:
    """The two files, and a build from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.votes, self.answers, self.out = folder / "votes.csv", folder / "answers.jsonl", folder / "out"
        self.write([vote(n, w) for w in range(8) for n in range(9)], [answer(n) for n in range(9)])

    def write(self, votes: list[dict[str, Any]] | None = None, answers: list[Any] | None = None) -> None:
        if votes is not None:
            with self.votes.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(votes)
        if answers is not None:
            self.answers.write_text("\n".join(map(json.dumps, answers)) + "\n", encoding="utf-8")

    def build(self, options: SplitOptions = EASY, **more: Any) -> DatasetDir:
        return build_llmfao(self.votes, self.answers, self.out, options, **more)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_winning_side_is_chosen(files: Files) -> None:
    files.write([vote(n, w, ("left", "right")[(n + w) % 2]) for w in range(8) for n in range(9)])
    data = files.build()
    assert len(data.pairs()) == 72 and check_dataset(files.out) == []
    for pair in data.pairs():
        worker, number = map(int, pair.pair_id.split("/"))
        assert pair.user_id == str(worker) and pair.prompt == [{"role": "user", "content": f"Prompt {number % 3}?"}]
        sides = [(f"left {number}", "Model X"), (f"right {number}", "Model Y")]
        won, lost = sides if (number + worker) % 2 == 0 else sides[::-1]
        assert (pair.chosen, pair.meta["chosen_model"]) == won and (pair.rejected, pair.meta["rejected_model"]) == lost
        assert pair.meta["prompt"] == f"slug{number % 3}"


def test_it_is_split_by_pair_and_warns(files: Files) -> None:
    data = files.build()
    assert data.split_rule == "pair" and "new prompts" in (data.split_warning or "")
    assert data.info["licence"].startswith("CC-BY-4.0") and not data.synthetic
    by_prompt = files.build(SplitOptions(split_rule="prompt", min_pairs=2), overwrite=True)
    assert by_prompt.split_warning is None and check_dataset(files.out) == []
    with pytest.raises(UserError, match="llmfao has no dialogs, use pair or prompt"):
        files.build(SplitOptions(split_rule="dialog"), overwrite=True)


def test_every_vote_is_a_pair_or_counted(files: Files) -> None:
    votes = [vote(n, w) for w in range(8) for n in range(9)]
    votes += [vote(20, 0), vote(21, 0)]
    votes += [vote(9, 0, "tie"), vote(9, 1, "tie"), vote(9, 2, "tie"), vote(10, 0), vote(10, 1), vote(11, 0)]
    votes += [vote(0, 3), vote(12, 4), vote(13, 5, "right")]
    answers = [answer(n) for n in range(10)]
    answers += [answer(10, x=" \n"), answer(11, y=""), answer(12, "same", "same "), answer(13, "left 1", "right 1")]
    files.write(votes, answers)
    data = files.build()
    expected = {
        "votes_read": 83,
        "votes_without_answers": 2,
        "ties": 3,
        "votes_with_an_empty_answer": 3,
        "identical_responses": 1,
        "repeated_pairs": 1,
        "contradicting_pairs": 2,
    }
    assert {name: data.info["counts"].get(name) for name in expected} == expected
    assert len(data.pairs()) == 83 - 2 - 3 - 3 - 1 - 1 - 2
    assert "bad_rows" not in data.info["counts"]


def test_the_same_seed_gives_the_same_fingerprint(files: Files) -> None:
    first = files.build().fingerprint
    assert files.build(overwrite=True).fingerprint == first
    assert files.build(SplitOptions(split_rule="pair", seed=1), overwrite=True).fingerprint != first


def _edit(name: str, **fields: Any) -> Callable[[Files], None]:
    def edit(files: Files) -> None:
        if name == "votes":
            files.write(votes=[vote(n, w) for w in range(8) for n in range(9)] + [{**vote(1, 0), **fields}])
        else:
            files.write(answers=[answer(n) for n in range(9)] + [{**answer(9), **fields}])

    return edit


BAD_ROWS: dict[str, tuple[Callable[[Files], None], str]] = {
    "winner": (_edit("votes", winner="both"), "votes.csv:74: winner: is 'both', one of left, right, tie"),
    "worker": (_edit("votes", worker=""), "votes.csv:74: worker: is empty"),
    "another pair": (_edit("votes", model_x=7), "votes.csv:74: id: prompt and models ('1', '7', '2') are not those"),
    "short line": (lambda f: f.votes.write_text(f.votes.read_text() + "1,1\n"), "votes.csv:74: model_x: is missing"),
    "long line": (
        lambda f: f.votes.write_text(f.votes.read_text() + "1,1,1,2,0,left,a,b,c\n"),
        "votes.csv:74: row: has more fields than the header",
    ),
    "no JSON": (lambda f: f.answers.write_text(f.answers.read_text() + '{"id": 9'), "answers.jsonl:10: row: is not"),
    "id twice": (_edit("answers", id=3), "answers.jsonl:10: id: 3 is the id of line 4 too"),
    "id a text": (_edit("answers", id="x"), "answers.jsonl:10: id: must be a whole number"),
    "no answer": (_edit("answers", result_y=None), "answers.jsonl:10: result_y: is missing"),
    "no prompt": (_edit("answers", text=" "), "answers.jsonl:10: text: is empty"),
    "not UTF-8": (
        lambda f: f.answers.write_bytes(f.answers.read_bytes().replace(b"left 8", b"left \xff")),
        "answers.jsonl:9: result_x: holds bytes that are not UTF-8",
    ),
    "an array": (lambda f: f.answers.write_text(f.answers.read_text() + "[1]"), "has type list, an object with id"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_stops_or_is_set_aside(files: Files, name: str) -> None:
    edit, message = BAD_ROWS[name]
    edit(files)
    with pytest.raises(UserError) as caught:
        files.build()
    assert message in str(caught.value) and "--bad-rows skip" in str(caught.value) and not files.out.exists()
    data = files.build(bad_rows="skip")
    assert data.info["counts"]["bad_rows"] == 1
    [problem] = map(json.loads, quarantine_file(files.out).read_text().splitlines())
    assert f"{problem['field']}: {problem['reason']}" in str(caught.value)


FILE_MISTAKES: dict[str, tuple[Callable[[Files], object], str]] = {
    "no votes": (lambda f: f.write(votes=[]), "votes.csv holds no votes"),
    "empty": (lambda f: f.votes.write_text(""), "votes.csv is empty"),
    "swapped": (lambda f: f.votes.write_bytes(f.answers.read_bytes()), "votes.csv has no column 'id'"),
    "missing": (lambda f: f.answers.unlink(), "no file"),
    "another release": (lambda f: f.write(answers=[answer(n) for n in range(50, 60)]), "two files of one release"),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_a_wrong_file_is_one_line(files: Files, name: str) -> None:
    FILE_MISTAKES[name][0](files)
    with pytest.raises(UserError, match=FILE_MISTAKES[name][1]) as caught:
        files.build(bad_rows="skip")
    assert "\n" not in str(caught.value)
    assert not files.out.exists() and not quarantine_file(files.out).exists()


def test_votes_that_break_off_are_a_bad_row(files: Files) -> None:
    whole = gzip.compress(files.votes.read_bytes(), mtime=0)
    files.votes.write_bytes(whole[:-30])
    with pytest.raises(UserError, match="row: the compressed file is truncated"):
        files.build()


def test_results_carry_the_warning() -> None:
    figure = {"mean": 0.5, "low": 0.4, "high": 0.6}
    summary: dict[str, Any] = {
        "benchmark": "pref_lamp", "dataset": {"name": "d"}, "synthetic": False, "lm": "m", "rm_accuracy": {},
        "counts": {"users": 1, "cases": 1}, "bertscore_model": "b", "best_of": 1, "win": {},
        "methods": {"plain": dict.fromkeys(("rouge1", "rougeL", "bertscore_f1"), figure)},
    }  # fmt: skip
    warned = {
        rule: [line for line in summary_lines({**summary, "split_rule": rule}, Path("x")) if "warning" in line]
        for rule in ("pair", "prompt", None)
    }
    assert len(warned["pair"]) == 1 and "nothing about new prompts" in warned["pair"][0]
    assert warned["prompt"] == warned[None] == []


def test_real_votes(real_data: Path, tmp_path: Path, run_prm: Callable[..., Any]) -> None:
    """The published release: 8,931 votes of 124 workers on 2,139 pairs of answers to 13 prompts."""
    folder = real_data / "llmfao"
    if not folder.is_dir():
        pytest.skip(f"no llmfao files in {folder}")
    files = ["--comparisons", folder / "crowd-comparisons.csv", "--pairs", folder / "pairs-crowd.jsonl"]
    done = run_prm("data", "build", "llmfao", *files, "--out", tmp_path / "d", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: split by pair")
    info = json.loads(done.stdout)
    counts = info["counts"]
    assert info["split_rule"] == "pair" and counts["votes_read"] == 8931 and counts["ties"] == 3471
    assert "votes_without_answers" not in counts and "bad_rows" not in counts
    removed = ("ties", "votes_with_an_empty_answer", "repeated_pairs", "contradicting_pairs")
    total = sum(counts[name] for name in removed) + counts["pairs_of_users_under_min_pairs"]
    assert total + sum(counts["pairs"].values()) == 8931
    assert sum(counts["users"].values()) + counts["users_under_min_pairs"] <= 124
    checked = run_prm("data", "check", tmp_path / "d")
    assert checked.returncode == 0, checked.stdout
    pairs = DatasetDir.open(tmp_path / "d").pairs()
    assert len({pair.prompt[0]["content"] for pair in pairs}) <= 13
    assert min(Counter(pair.user_id for pair in pairs).values()) >= DEFAULTS.min_pairs
