"""How close a generated text is to the user's own: ROUGE-1 and ROUGE-L, one figure a case, in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prm.progress import progress


def rouge(responses: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """F1 of ROUGE-1 and ROUGE-L (Lin 2004), each [N], without stemming. An empty response has 0."""
    # Other keys of rouge_score download a sentence splitter.
    from torchmetrics.functional.text import rouge_score

    keys = ("rouge1", "rougeL")
    found: dict[str, list[float]] = {key: [] for key in keys}
    pairs = zip(responses, references, strict=True)
    for response, reference in progress(pairs, label="ROUGE", total=len(responses), unit="cases"):
        scores = rouge_score(response, reference, rouge_keys=keys)
        for key in keys:
            found[key].append(float(scores[f"{key}_fmeasure"]))
    return {key: np.array(values) for key, values in found.items()}
