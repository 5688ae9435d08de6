"""Pref-LaMP built from LaMP-5 files: hard negatives, co-authored papers, splits, counts and bad rows."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_modules.lamp5 import INSTRUCTION
from data_modules.lamp_splits import PrefLampOptions
from data_modules.papers import normalised
from data_modules.pref_lamp import build_pref_lamp
from prm.dataset_dir import DatasetDir, check_dataset
from prm.errors import UserError


class WordCounts:
    """A stand-in for a sentence encoder: hashed word counts, unit length."""

    truncated = 0

    def encode(self, texts: Any, *, label: str = "") -> np.ndarray:
        vectors = np.zeros((len(texts), 64), np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row, zlib.crc32(word.encode()) % 64] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def info(self) -> dict[str, Any]:
        return {"name": "word counts"}


TOPICS = ["graphs", "robots", "parsing", "privacy", "caches"]


def source(users: int = 20, papers: int = 12) -> tuple[list[dict], dict]:
    """LaMP-5 rows of `users` authors; paper k of user u is about topic k mod 5."""
    draw = random.Random(0)

    def paper(user: int, k: int) -> dict[str, str]:
        words = " ".join(draw.choice(["fast", "slow", "large", "small", "new", "old"]) for _ in range(8))
        topic = TOPICS[k % 5]
        return {
            "id": f"{user}.{k}",
            "title": f"Title of {topic} paper {user}.{k}",
            "abstract": f"{topic} {topic} {topic} {words} {user}.{k}",
        }

    questions = []
    golds = []
    for user in range(users):
        newest, *profile = (paper(user, k) for k in range(papers))
        questions.append({"id": str(user), "input": INSTRUCTION + newest["abstract"], "profile": profile})
        golds.append({"id": str(user), "output": newest["title"]})
    return questions, {"task": "LaMP_5", "golds": golds}


def build(
    tmp_path: Path, questions: Any, outputs: Any, *, out: str = "data", bad_rows: str = "error", **options: Any
) -> DatasetDir:
    (tmp_path / "q.json").write_text(json.dumps(questions, indent=1))
    (tmp_path / "o.json").write_text(json.dumps(outputs, indent=1))
    return build_pref_lamp(
        tmp_path / "q.json",
        tmp_path / "o.json",
        tmp_path / out,
        WordCounts(),
        PrefLampOptions(**options),
        bad_rows=bad_rows,
        overwrite=True,
    )


def adapt_ids(data: DatasetDir) -> list[str]:
    return [u.user_id for u in data.users("adapt")]


def test_sizes_prompts_and_negatives(tmp_path: Path) -> None:
    questions, outputs = source()
    data = build(tmp_path, questions, outputs)
    assert check_dataset(data.path) == []
    assert data.info["counts"]["users"] == {"adapt": 4, "train": 16}
    assert len(data.pairs()) == len(data.completions()) == 20 * 12
    assert not data.synthetic and "q.json" in data.info["source"]
    owner = {p["title"]: str(q["id"]) for q in questions for p in q["profile"]}
    owner |= {g["output"]: g["id"] for g in outputs["golds"]}
    role = {u.user_id: u.role for u in data.users()}
    topic = {title: title.split()[2] for title in owner}
    same_topic = 0
    for pair in data.pairs():
        assert pair.prompt[0]["content"].startswith(INSTRUCTION)
        assert owner[pair.chosen] == pair.user_id != owner[pair.rejected]
        assert role[owner[pair.rejected]] == role[pair.user_id]
        same_topic += topic[pair.chosen] == topic[pair.rejected]
    # By chance a fifth would share the topic; the nearest abstracts do.
    assert same_topic / len(data.pairs()) > 0.7
    question_splits = {
        p.split for p in data.pairs() if p.user_id in adapt_ids(data) and p.pair_id.endswith("/question")
    }
    assert question_splits == {"test"}
    support = Counter(p.user_id for p in data.pairs("support"))
    assert set(support.values()) == {6}


def test_no_training_title_is_rejected_in_one_split_and_chosen_in_another(tmp_path: Path) -> None:
    data = build(tmp_path, *source(30, 20))
    for split in ("train", "validation", "test_seen"):
        rejected = {p.rejected for p in data.pairs(split)}
        assert rejected and not rejected & {p.chosen for p in data.pairs() if p.split != split}
    for user in adapt_ids(data):
        rejected = {s: {p.rejected for p in data.pairs(s) if p.user_id == user} for s in ("support", "test")}
        assert not rejected["support"] & rejected["test"]


def test_top_k_bounds_the_draw(tmp_path: Path) -> None:
    """With k = 1 the rejected title belongs to the nearest abstract allowed."""
    data = build(tmp_path, *source(), top_k=1)
    chosen = [p for p in data.pairs("train") if p.user_id == data.users("train")[0].user_id]
    encoder = WordCounts()
    others = [p for p in data.pairs("train") if p.user_id != chosen[0].user_id]
    theirs = encoder.encode([p.prompt[0]["content"].removeprefix(INSTRUCTION) for p in others])
    for pair in chosen:
        mine = encoder.encode([pair.prompt[0]["content"].removeprefix(INSTRUCTION)])[0]
        similarity = theirs @ mine
        assert pair.meta["similarity"] == pytest.approx(similarity.max(), abs=1e-4)
    assert data.info["arguments"]["top_k"] == 1


def test_same_seed_same_data_and_independent_of_row_order(tmp_path: Path) -> None:
    questions, outputs = source()
    first = build(tmp_path, questions, outputs, out="a", seed=3)
    again = build(tmp_path, questions, outputs, out="b", seed=3)
    assert first.fingerprint == again.fingerprint
    turned = build(tmp_path, questions[::-1], outputs, out="c", seed=3)
    assert {p.pair_id: p.split for p in turned.pairs()} == {p.pair_id: p.split for p in first.pairs()}
    other = build(tmp_path, questions, outputs, out="d", seed=4)
    assert other.fingerprint != first.fingerprint


def shared_paper(questions: list[dict], holders: list[int], **changes: str) -> dict[str, str]:
    """Put one more paper into the profiles of these users."""
    paper = {"id": "shared", "title": "A Shared Paper", "abstract": "graphs graphs shared by co-authors"}
    for position, user in enumerate(holders):
        questions[user]["profile"].append(paper | (changes if position else {}))
    return paper


@pytest.mark.parametrize(
    "copy",
    [{}, {"title": "An Entirely Different Title"}, {"abstract": "another version"}, {"title": "a shared  PAPER!"}],
    ids=["equal", "same abstract", "same title", "same title but for case"],
)
def test_co_authored_paper_never_crosses(tmp_path: Path, copy: dict[str, str]) -> None:
    """Two training users and one adaptation user hold one paper, in copies that differ."""
    questions, outputs = source()
    roles = build(tmp_path, questions, outputs)
    train, adapt = ([int(u.user_id) for u in roles.users(role)] for role in ("train", "adapt"))
    for seed_user in range(4):
        questions, outputs = source()
        holders = [train[seed_user], train[-1], adapt[0]]
        shared_paper(questions, holders, **copy)
        data = build(tmp_path, questions, outputs)
        titles = {"A Shared Paper", copy.get("title", "A Shared Paper")}
        rows = [p for p in data.pairs() if p.chosen in titles]
        assert sorted(int(p.user_id) for p in rows) == sorted(holders[:2])
        assert len({p.split for p in rows}) == 1
        assert not [p for p in data.pairs() if int(p.user_id) in holders and p.rejected in titles]
        assert not [c for c in data.completions(["support", "test"]) if c.reference in titles]
        assert data.info["counts"]["papers_shared_with_training_users"] == 1


def test_identity_runs_through_a_third_copy(tmp_path: Path) -> None:
    """A and B share a title, B and C an abstract: all three are one work."""
    questions, outputs = source()
    users = [int(u.user_id) for u in build(tmp_path, questions, outputs).users("train")[:3]]
    copies = [("One Title", "first abstract"), ("One Title", "second abstract"), ("Other Title", "second abstract")]
    for user, (title, abstract) in zip(users, copies, strict=True):
        questions[user]["profile"].append({"id": "c", "title": title, "abstract": abstract})
    data = build(tmp_path, questions, outputs)
    rows = [p for p in data.pairs() if p.pair_id.endswith("/c")]
    assert len(rows) == 3 and len({p.meta["work"] for p in rows}) == 1 and len({p.split for p in rows}) == 1


def test_question_shared_with_a_training_user_is_dropped_and_counted(tmp_path: Path) -> None:
    questions, outputs = source()
    data = build(tmp_path, questions, outputs)
    new, old = adapt_ids(data)[0], data.users("train")[0].user_id
    abstract = questions[int(new)]["input"].removeprefix(INSTRUCTION)
    questions[int(old)]["profile"].append({"id": "co", "title": "Draft title", "abstract": abstract})
    data = build(tmp_path, questions, outputs)
    assert data.info["counts"]["questions_shared_with_training_users"] == 1
    assert f"{new}/question" not in {p.pair_id for p in data.pairs()}
    assert {p.split for p in data.pairs() if p.user_id == new} == {"support", "test"}


def test_repeated_paper_in_one_profile(tmp_path: Path) -> None:
    questions, outputs = source()
    copy = dict(questions[0]["profile"][0], id="copy")
    questions[0]["profile"].append(copy)
    data = build(tmp_path, questions, outputs)
    assert data.info["counts"]["repeated_papers"] == 1
    assert "0/copy" not in {p.pair_id for p in data.pairs()}


def test_support_cap_and_max_users(tmp_path: Path) -> None:
    data = build(tmp_path, *source(), support=3, test_per_user=4, adapt_users=5, max_users=15)
    assert data.info["counts"]["users"] == {"adapt": 5, "train": 10}
    assert data.info["counts"]["users_over_max"] == 5
    for split, size in (("support", 3), ("test", 4)):
        assert set(Counter(p.user_id for p in data.pairs(split)).values()) == {size}
    assert data.info["counts"]["test_papers_over_cap"] == 5 * (12 - 3 - 4)
    assert sum(p.pair_id.endswith("/question") for p in data.pairs("test")) == 5


def test_users_left_without_papers_are_dropped_and_counted(tmp_path: Path) -> None:
    questions, outputs = source()
    data = build(tmp_path, questions, outputs)
    (first, second, *_), old = adapt_ids(data), data.users("train")[0].user_id
    # All profile papers of the first, and all but one of the second with its question, belong to a training user too.
    lent = questions[int(first)]["profile"] + questions[int(second)]["profile"][1:]
    lent.append({"id": "q", "title": "x", "abstract": questions[int(second)]["input"].removeprefix(INSTRUCTION)})
    questions[int(old)]["profile"] += lent
    data = build(tmp_path, questions, outputs)
    counts = data.info["counts"]
    assert (counts["adapt_users_without_support"], counts["adapt_users_without_test"]) == (1, 1)
    assert counts["users"]["adapt"] == 2 and first not in adapt_ids(data)


def test_normalised_keeps_what_is_only_marks() -> None:
    assert normalised("  A  \uff26ull-width, Title! ") == "a full width title"
    assert normalised("???") == "???"


def _drop(row: dict, name: str) -> None:
    del row[name]


MISTAKES: dict[str, tuple[Any, str]] = {
    "missing field": (lambda q, o: _drop(q[3]["profile"][3], "abstract"), "profile[3].abstract: is missing"),
    "wrong type": (lambda q, o: q[3].update(profile="x"), "profile: has type str"),
    "empty text": (lambda q, o: q[3]["profile"][0].update(title="  "), "profile[0].title: is empty"),
    "duplicate id": (lambda q, o: q[3].update(id="2"), "id: '2' is the id of row 3 too"),
    "duplicate gold": (lambda q, o: o["golds"].append(o["golds"][0]), "id: '0' is the id of row 1 too"),
    "unknown gold id": (lambda q, o: o["golds"].append({"id": "99", "output": "T"}), "id: no question has the id '99'"),
    "missing gold": (lambda q, o: o["golds"].pop(), "id: no gold title for the question '19'"),
    "empty gold": (lambda q, o: o["golds"][4].update(output=""), "output: is empty"),
    "NaN": (lambda q, o: q[3]["profile"][1].update(abstract=float("nan")), "profile[1].abstract: is NaN"),
    "a user with one example": (lambda q, o: q[3].update(profile=[]), "profile: is empty: a user with one example"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_earlier_outputs(tmp_path: Path, name: str) -> None:
    mistake, message = MISTAKES[name]
    earlier = build(tmp_path, *source())
    before = {path: path.read_bytes() for path in earlier.path.iterdir()}
    questions, outputs = source()
    mistake(questions, outputs)
    with pytest.raises(UserError) as caught:
        build(tmp_path, questions, outputs)
    text = str(caught.value)
    assert message in text and text.endswith("mend the source, or pass --bad-rows skip") and "\n" not in text
    # A duplicate id also leaves the gold of the id it replaced without its question.
    assert ("more bad row" in text) == (name == "duplicate id")
    assert {path: path.read_bytes() for path in earlier.path.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "o.json", "q.json"]


def test_skip_writes_a_quarantine_file_and_counts(tmp_path: Path) -> None:
    questions, outputs = source()
    for name in ("missing field", "NaN", "unknown gold id"):
        MISTAKES[name][0](questions, outputs)
    questions[5]["profile"] = 7
    data = build(tmp_path, questions, outputs, bad_rows="skip")
    rows = [json.loads(line) for line in (tmp_path / "data.bad_rows.jsonl").read_text().splitlines()]
    assert data.info["counts"]["bad_rows"] == len(rows) == 4
    assert [(Path(r["file"]).name, r["field"]) for r in rows] == [
        ("q.json", "profile[1].abstract"),
        ("q.json", "profile[3].abstract"),
        ("q.json", "profile"),
        ("o.json", "id"),
    ]
    assert all(row["line"] and row["reason"] and row["row"] for row in rows)
    assert "5" not in {u.user_id for u in data.users()} and "3" in {u.user_id for u in data.users()}
    build(tmp_path, *source(), bad_rows="skip")
    assert not (tmp_path / "data.bad_rows.jsonl").exists()


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    questions, outputs = source(2)
    with pytest.raises(UserError, match=r"no user is left of .*q\.json"):
        build(tmp_path, [], {"task": "LaMP_5", "golds": []})
    for question in questions:
        question["profile"] = []
    with pytest.raises(UserError, match=r"all rows are bad \(2 problems\), the first: .*a user with one example"):
        build(tmp_path, questions, outputs, bad_rows="skip")
    with pytest.raises(UserError, match="1 user is left, one to train on and one to adapt to"):
        build(tmp_path, *source(1))
    with pytest.raises(UserError, match="no training user has pairs"):
        build(tmp_path, *source(2))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "--top-k 0"),
        ({"adapt_fraction": 1.0}, "--adapt-fraction"),
        ({"adapt_users": 20}, "--adapt-users 20 leaves no training user of 20"),
        ({"support": 0}, "--support 0"),
        ({"test_per_user": 0}, "--test-per-user 0"),
        ({"validation_fraction": 0.5, "test_seen_fraction": 0.5}, "--validation-fraction and --test-seen-fraction"),
        ({"max_users": 1}, "--max-users 1"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tmp_path, *source(), **options)
