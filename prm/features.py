"""Backbone features of token sequences through plain transformers: the reference for every faster way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from prm.backbones import Backbone
from prm.formatting import Encoded
from prm.progress import Progress
from prm.reward_models import FeatureReward


def pad_batch(
    sequences: Sequence[Sequence[int]], pad_id: int, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N, T] and attention mask [N, T] of ragged sequences, padded on the right (or left) to the longest."""
    width = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, place] = torch.as_tensor(sequence, dtype=torch.long)
        mask[row, place] = 1
    return ids, mask


class TransformersFeatures:
    """Features by the backbone's own forward, in batches of similar length, without gradients.

    Args:
        backbone: an open backbone, with its adapter if it has one.
        batch_size: sequences per forward.
        label: shown with the progress.
    """

    def __init__(self, backbone: Backbone, batch_size: int = 16, label: str = "features") -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: a number of 1 or more is needed")
        self.backbone = backbone
        self.batch_size = batch_size
        self.label = label

    @torch.inference_mode()
    def features(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 features [N, d] of N token sequences, in their order."""
        device = next(self.backbone.parameters()).device
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        result = np.zeros((len(sequences), self.backbone.hidden_size), dtype=np.float32)
        bar = Progress(self.label, len(sequences), "sequences")
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                ids, mask = pad_batch([sequences[i] for i in rows], self.backbone.pad_id)
                result[rows] = self.backbone(ids.to(device), mask.to(device)).cpu().numpy()
                bar.update(len(rows))
        finally:
            self.backbone.train(was_training)
        if len(sequences) > self.batch_size:
            bar.close()
        return result


def input_features(
    head: FeatureReward,
    encoded: Sequence[Encoded],
    compute: Callable[[Sequence[Sequence[int]]], np.ndarray],
) -> torch.Tensor:
    """Inputs [N, head.input_dim] of a head for N encoded texts; each distinct token sequence is computed once.

    Equal texts get one feature, so their rewards are equal to the last bit.

    Args:
        head: whose `reads_prompt` says whether the prompt's own feature stands behind the text's.
        encoded: the texts.
        compute: from distinct token sequences to their features [M, d].
    """
    texts = [e.ids for e in encoded]
    prompts = [e.ids[: e.prompt_length] for e in encoded] if head.reads_prompt else []
    place: dict[tuple[int, ...], int] = {}
    for ids in (*texts, *prompts):
        place.setdefault(ids, len(place))
    features = torch.from_numpy(compute(list(place)))
    parts = [features[[place[ids] for ids in rows]] for rows in (texts, prompts) if rows]
    return torch.cat(parts, -1) if parts else torch.zeros(0, head.input_dim)
