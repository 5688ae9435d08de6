"""Preference pairs by hard negatives: the user's own title against the title of a similar paper of somebody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from data_modules.lamp5 import prompt_text
from data_modules.lamp_splits import PrefLampOptions, SplitUser
from data_modules.papers import HeldPaper, Work, seeded_unit
from prm.records import ADAPT_SPLITS, TRAIN_SPLITS, PreferencePair, user_prompt
from prm.retrieval import top_k


class NegativePool:
    """Works whose titles may be rejected titles, and their abstracts' embeddings.

    Args:
        works: indices of the works, sorted.
        embeddings_wd: unit-length embeddings of all works.
    """

    def __init__(self, works: Sequence[int], embeddings_wd: np.ndarray) -> None:
        self.works = np.asarray(works, dtype=np.int64)
        self.embeddings = embeddings_wd[self.works]

    def nearest(self, queries_qd: np.ndarray, k: int, forbidden: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Works [Q, K] nearest to each query and their similarities, without the forbidden works."""
        exclude = np.flatnonzero(np.isin(self.works, np.asarray(forbidden, dtype=np.int64)))
        columns, similarities = top_k(queries_qd, self.embeddings, k, exclude=exclude)
        return self.works[columns], similarities


def preference_pairs(
    users: Sequence[SplitUser],
    works: Sequence[Work],
    embeddings_wd: np.ndarray,
    options: PrefLampOptions,
    counts: Counter[str],
) -> list[PreferencePair]:
    """One pair for each paper that has a negative; `counts["pairs_without_negative"]` counts the others.

    Negatives of training users come from works of the same split; those of adaptation users from the works of all
    adaptation users, except that a work which was a negative in the user's support is none in their test. So no title
    is rejected in one split and chosen in another one of the training users, or seen again by an adapted user.
    """

    def pool(role: str, splits: Sequence[str]) -> NegativePool:
        held = {p.work for u in users if u.role == role for p, split in u.papers if split in splits}
        return NegativePool(sorted(held), embeddings_wd)

    pools = {split: pool("train", (split,)) for split in TRAIN_SPLITS}
    pools |= dict.fromkeys(ADAPT_SPLITS, pool("adapt", ADAPT_SPLITS))
    pairs: list[PreferencePair] = []
    for user in users:
        forbidden = set(user.works)
        for split in TRAIN_SPLITS if user.role == "train" else ADAPT_SPLITS:
            papers = user.of(split)
            queries = embeddings_wd[[p.work for p in papers]]
            near, similarities = pools[split].nearest(queries, options.top_k, sorted(forbidden))
            if near.shape[1] == 0:
                counts["pairs_without_negative"] += len(papers)
                continue
            for paper, candidates, scores in zip(papers, near, similarities, strict=True):
                draw = int(seeded_unit(options.seed, "negative", user.user_id, works[paper.work].key) * len(candidates))
                negative = int(candidates[draw])
                pairs.append(_pair(user.user_id, split, paper, works, negative, float(scores[draw])))
                forbidden |= {negative} if split == "support" else set()
    return pairs


def _pair(
    user_id: str, split: str, paper: HeldPaper, works: Sequence[Work], negative: int, similarity: float
) -> PreferencePair:
    return PreferencePair(
        pair_id=f"{user_id}/{paper.paper.paper_id}",
        user_id=user_id,
        split=split,
        prompt=user_prompt(prompt_text(paper.paper.abstract)),
        chosen=paper.paper.title,
        rejected=works[negative].title,
        meta={
            "work": works[paper.work].key,
            "rejected_work": works[negative].key,
            "similarity": round(similarity, 4),
        },
    )
