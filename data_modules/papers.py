"""Who holds which paper: co-authors' copies of one paper are found by their normalised abstract or title."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data_modules.lamp5 import Paper, Question

QUESTION = "question"
_NOT_WORD = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class HeldPaper:
    """A paper as one author holds it.

    Attributes:
        paper: the author's own copy of title and abstract; the question's has the id "question".
        work: index of the work this is a copy of; all copies of one paper share it.
        is_question: the newest paper, which LaMP-5 asks about.
    """

    paper: Paper
    work: int
    is_question: bool


@dataclass(frozen=True, slots=True)
class Author:
    """An author and the papers left to them, the question first."""

    user_id: str
    papers: tuple[HeldPaper, ...]

    @property
    def works(self) -> frozenset[int]:
        return frozenset(p.work for p in self.papers)


@dataclass(frozen=True, slots=True)
class Work:
    """A paper behind its copies: the copy that stands for it and a key that does not depend on the file's order."""

    key: str
    title: str
    abstract: str


def normalised(text: str) -> str:
    """Letters and digits in compatibility form and lower case, single spaces between: what identifies a text."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NOT_WORD.sub(" ", folded).strip() or folded.strip()


def seeded_unit(seed: int, *parts: str) -> float:
    """A number in [0, 1) drawn by hash from the seed and a name, so that a draw does not depend on other rows."""
    digest = hashlib.sha256("\x1f".join([str(seed), *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class _Groups:
    """Union-find over texts."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def find(self, item: str) -> str:
        root = self.parent.setdefault(item, item)
        while root != self.parent[root]:
            root = self.parent[root]
        while self.parent[item] != root:
            self.parent[item], item = root, self.parent[item]
        return root

    def join(self, first: str, second: str) -> None:
        self.parent[self.find(first)] = self.find(second)


def collect_authors(
    questions: Sequence[Question], titles: dict[str, str], counts: Counter[str]
) -> tuple[list[Author], list[Work]]:
    """Authors with their papers, and the works behind the papers.

    Two papers are one work when their normalised abstracts or titles are equal, directly or through a third. A work
    that stands twice in one author's list stays once (the question's copy first); `counts["repeated_papers"]` counts
    the rest.

    Args:
        questions: rows of the questions file.
        titles: gold title of each question id.
        counts: counted into.
    """
    held: list[tuple[str, list[Paper]]] = [
        (q.user_id, [Paper(QUESTION, titles[q.question_id], q.abstract), *q.profile]) for q in questions
    ]
    groups = _Groups()
    for _, papers in held:
        for paper in papers:
            groups.join("abstract " + normalised(paper.abstract), "title " + normalised(paper.title))
    index: dict[str, int] = {}
    works: list[Work] = []
    members: dict[str, str] = {}
    for text in groups.parent:
        root = groups.find(text)
        members[root] = min(text, members.get(root, text))
    authors = []
    for user_id, papers in held:
        own: dict[int, HeldPaper] = {}
        for position, paper in enumerate(papers):
            root = groups.find("title " + normalised(paper.title))
            if root not in index:
                index[root] = len(works)
                key = hashlib.sha256(members[root].encode()).hexdigest()[:16]
                works.append(Work(key, paper.title, paper.abstract))
            if index[root] in own:
                counts["repeated_papers"] += 1
            else:
                own[index[root]] = HeldPaper(paper, index[root], position == 0)
        authors.append(Author(user_id, tuple(own.values())))
    return authors, works
