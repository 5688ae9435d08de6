"""What a Pref-LaMP evaluation is asked to do, and which of it a result depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prm.backbones import content_hash, torch_dtype
from prm.errors import UserError
from prm.evaluation.methods import METHODS
from prm.evaluation.metrics.bertscore import DEFAULT_MODEL as DEFAULT_BERTSCORE_MODEL
from prm.inference.user_reward import UserReward
from prm.retrieval import DEFAULT_ENCODER


@dataclass(frozen=True)
class PrefLampOptions:
    """What `prm evaluate pref-lamp` was asked to do.

    Attributes:
        data, out: dataset directory, evaluation directory.
        lm, lm_revision, lm_dtype: the language model.
        checkpoints: (label, directory) of reward models; the last one is the candidate for promotion.
        methods: of METHODS.
        engine: "vllm" or "transformers".
        split: whose cases and pairs.
        seed: of all sampling.
        limit, limit_users, limit_pairs: most cases, users, pairs; None is all.
        best_of: N, candidates of a case.
        shots: examples in the prompt, for icl and icl_rag.
        temperature: of the candidates; plain_temperature: of the other methods, 0 is greedy.
        top_p: nucleus of all sampling.
        max_new_tokens, max_model_len: of the language model.
        unit_size: cases of a unit of work.
        rm_dtype: of the backbones; None takes the one each was trained in.
        bertscore_model, rag_encoder: encoders of BERTScore and of icl_rag's retrieval.
        allow_code: prefixes of reward classes outside prm.
        overwrite: start afresh where another evaluation stands.
        command: the command line, for the record.
    """

    data: Path
    out: Path
    lm: str
    checkpoints: tuple[tuple[str, Path], ...] = ()
    methods: tuple[str, ...] = METHODS
    lm_revision: str | None = None
    lm_dtype: str = "auto"
    engine: str = "vllm"
    split: str = "test"
    seed: int = 0
    limit: int | None = None
    limit_users: int | None = None
    limit_pairs: int | None = None
    best_of: int = 8
    shots: int = 3
    temperature: float = 0.7
    plain_temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 48
    max_model_len: int | None = None
    unit_size: int = 16
    rm_dtype: str | None = None
    bertscore_model: str = DEFAULT_BERTSCORE_MODEL
    rag_encoder: str = DEFAULT_ENCODER
    allow_code: tuple[str, ...] = ()
    overwrite: bool = False
    command: str = ""

    def check(self) -> None:
        """Raise UserError when options do not fit each other."""
        if unknown := [m for m in self.methods if m not in METHODS]:
            raise UserError(f"--methods: {', '.join(unknown)} is not known; choose among {', '.join(METHODS)}")
        if not self.methods:
            raise UserError(f"--methods names none; choose among {', '.join(METHODS)}")
        if "guided" in self.methods and not self.checkpoints:
            raise UserError("the method guided needs a CHECKPOINT: name one, or leave it out of --methods")
        if "guided" in self.methods and "plain" not in self.methods:
            raise UserError("the method guided is compared with plain: add plain to --methods")
        if self.best_of < 1:
            raise UserError(f"--best-of {self.best_of}: at least one candidate is needed")
        if "guided" in self.methods and self.best_of > 1 and self.temperature <= 0:
            raise UserError("--temperature 0 makes all candidates the same: use a temperature above 0")
        if min(self.temperature, self.plain_temperature) < 0 or not 0 < self.top_p <= 1:
            raise UserError("temperatures must be 0 or more, and --top-p in (0, 1]")
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {self.max_new_tokens} must be 1 or more")

    def resolved_lm_dtype(self) -> str:
        """The language model's dtype; "auto" is bfloat16 on CUDA devices that have it, float32 elsewhere."""
        return str(torch_dtype(self.lm_dtype)).removeprefix("torch.")

    def settings(self, data_fingerprint: str, rewards: Sequence[UserReward]) -> dict[str, Any]:
        """Everything a result depends on, by content and not by path."""
        guided = "guided" in self.methods
        in_context = {"icl", "icl_rag"} & set(self.methods)
        return {
            "benchmark": "pref_lamp",
            "data": data_fingerprint,
            "split": self.split,
            "lm": [content_hash(self.lm) or self.lm, self.lm_revision],
            "lm_dtype": self.resolved_lm_dtype(),
            "engine": self.engine,
            "checkpoints": [[r.label, r.fingerprint] for r in rewards],
            "rm_dtype": self.rm_dtype,
            "methods": sorted(self.methods),
            "seed": self.seed,
            "limit": self.limit,
            "limit_users": self.limit_users,
            "limit_pairs": self.limit_pairs,
            "best_of": self.best_of if guided else None,
            "temperature": self.temperature if guided else None,
            "plain_temperature": self.plain_temperature,
            "top_p": self.top_p,
            "shots": self.shots if in_context else None,
            "max_new_tokens": self.max_new_tokens,
            "max_model_len": self.max_model_len,
            "unit_size": self.unit_size,
            "bertscore_model": content_hash(self.bertscore_model) or self.bertscore_model,
            "rag_encoder": (content_hash(self.rag_encoder) or self.rag_encoder) if "icl_rag" in in_context else None,
        }
