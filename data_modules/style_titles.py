"""Made-up abstracts and their titles in several styles, from slot grammars: the texts of the synthetic dataset.

A title is a function of an abstract's slots and of a style in {-1, +1}^K. The axes are visible in the text and do not
depend on the slots, so an abstract says nothing about the style in which somebody wants its title.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

AXES = ("question", "subtitle", "everyday", "long")

# (technical, everyday) wording of each slot.
_TASKS = (
    ("named entity recognition", "spotting names in text"),
    ("route planning", "finding the way"),
    ("anomaly detection", "noticing odd things"),
    ("speech recognition", "understanding spoken words"),
    ("image segmentation", "finding shapes in pictures"),
    ("load balancing", "sharing work fairly"),
    ("document retrieval", "finding the right page"),
    ("code completion", "finishing lines of code"),
    ("fraud detection", "catching cheats"),
    ("traffic forecasting", "guessing tomorrow's traffic"),
    ("machine translation", "carrying words between languages"),
    ("dialogue generation", "keeping a chat going"),
)
_METHODS = (
    ("contrastive learning", "side by side comparing"),
    ("graph neural networks", "following connections"),
    ("Bayesian optimization", "careful guessing"),
    ("knowledge distillation", "copying a bigger teacher"),
    ("reinforcement learning", "trial and error"),
    ("spectral clustering", "grouping what is alike"),
    ("sparse attention", "looking where it counts"),
    ("data augmentation", "practising on altered examples"),
    ("federated optimization", "learning together at a distance"),
    ("stochastic sampling", "rolling dice"),
    ("curriculum learning", "starting with easy cases"),
    ("dimensionality reduction", "keeping only what matters"),
)
_SETTINGS = (
    ("under distribution shift", "when the world changes"),
    ("in low-resource regimes", "with very little to learn from"),
    ("on embedded hardware", "on tiny machines"),
    ("with noisy annotations", "when the answers are often wrong"),
    ("at industrial scale", "for millions of people"),
    ("under latency constraints", "when every second counts"),
    ("in clinical environments", "in a busy hospital"),
    ("across heterogeneous networks", "over a patchwork of wires"),
)
_STUDIES = (
    ("An Empirical Analysis", "A Closer Look"),
    ("A Comparative Evaluation", "What We Tried"),
    ("A Systematic Investigation", "The Whole Story"),
    ("A Quantitative Assessment", "Numbers Made Simple"),
)
_CORPORA = ("three public collections", "two years of logs", "a new set of recordings", "five shared tasks")
_RESULTS = (
    "errors fall by a third",
    "cost is cut in half",
    "results hold up over time",
    "gains are largest on rare cases",
    "earlier systems are matched",
    "training takes half as long",
)
_SMALL_WORDS = frozenset(
    ["a", "an", "and", "at", "by", "for", "from", "in", "is", "on", "over", "the", "to", "under", "via", "with"]
)


class Slots(NamedTuple):
    """What an abstract is about: an index into each list of the grammar."""

    task: int
    method: int
    setting: int
    study: int
    corpus: int
    result: int
    number: int


def draw_slots(generator: np.random.Generator) -> Slots:
    """Slots drawn uniformly."""
    sizes = (len(_TASKS), len(_METHODS), len(_SETTINGS), len(_STUDIES), len(_CORPORA), len(_RESULTS), 90)
    return Slots(*(int(generator.integers(size)) for size in sizes))


def abstract(slots: Slots) -> str:
    """The abstract, about 35 words; its wording is the same whatever the style of the title."""
    task, method, setting = _TASKS[slots.task][0], _METHODS[slots.method][0], _SETTINGS[slots.setting][0]
    return (
        f"We study {task} {setting}. Our approach relies on {method} and is tested on {_CORPORA[slots.corpus]} with "
        f"{slots.number + 10} thousand examples. We find that {_RESULTS[slots.result]}, and discuss where it fails."
    )


def title(slots: Slots, style: Sequence[int]) -> str:
    """The title of an abstract in one style.

    Args:
        slots: of the abstract.
        style: +1 or -1 for each of the first K axes of AXES; axes beyond K are -1.
            question: a question instead of a statement; subtitle: a heading and a colon in front; everyday: plain
            instead of technical words; long: the setting is named too.
    """
    question, subtitle, everyday, long = (index < len(style) and style[index] > 0 for index in range(len(AXES)))
    words = 1 if everyday else 0
    task, method = _TASKS[slots.task][words], _METHODS[slots.method][words]
    setting = f" {_SETTINGS[slots.setting][words]}" if long else ""
    if everyday:
        main = f"can {method} make {task} easy{setting}?" if question else f"{task} made easy by {method}{setting}"
    else:
        main = f"can {method} improve {task}{setting}?" if question else f"improved {task} via {method}{setting}"
    heading = f"{_STUDIES[slots.study][words]}: " if subtitle else ""
    return heading + _title_case(main)


def _title_case(text: str) -> str:
    words = text.split()
    return " ".join(
        word if index and word in _SMALL_WORDS else word[0].upper() + word[1:] for index, word in enumerate(words)
    )
