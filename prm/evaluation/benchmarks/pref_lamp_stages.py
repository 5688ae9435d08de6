"""The stages of a Pref-LaMP evaluation: what runs in which engine, and what each unit of work keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from prm.backbones import open_tokenizer
from prm.evaluation.benchmarks.pref_lamp_options import PrefLampOptions
from prm.evaluation.benchmarks.pref_lamp_summary import Results
from prm.evaluation.cases import Case, units
from prm.evaluation.directory import EvaluationDir
from prm.evaluation.methods import METHODS, Guided, InContext, Method, Plain, Request, RetrievedInContext
from prm.evaluation.methods.guided import sampler
from prm.inference.chat import ChatModel
from prm.inference.decoding.best_of_n import Candidates
from prm.inference.engines.opening import Engines, context_length
from prm.inference.user_reward import UserReward
from prm.records import PreferencePair
from prm.retrieval import SentenceEncoder

log = logging.getLogger(__name__)
Rows = list[dict[str, Any]]

# Pairs of a unit: two rewards each.
_PAIRS_PER_UNIT = 64
_RESPONSES = pa.schema(
    [
        ("case_id", pa.string()),
        ("text", pa.string()),
        ("length_limited", pa.bool_()),
        ("shots", pa.int32()),
        ("shots_dropped", pa.int32()),
        ("prompt_cut", pa.int32()),
    ]
)
_CANDIDATES = pa.schema(
    [
        ("case_id", pa.string()),
        ("texts", pa.list_(pa.string())),
        ("length_limited", pa.int32()),
        ("cut", pa.int32()),
    ]
)
_CHOICES = pa.schema(
    [
        ("case_id", pa.string()),
        ("text", pa.string()),
        ("score", pa.float64()),
        ("plain_score", pa.float64()),
        ("index", pa.int32()),
        ("duplicates", pa.int32()),
        ("reward_cut", pa.int32()),
    ]
)
_PAIRS = pa.schema(
    [
        ("pair_id", pa.string()),
        ("user_id", pa.string()),
        ("chosen", pa.float64()),
        ("rejected", pa.float64()),
        ("cut", pa.int32()),
    ]
)


class Stages:
    """The stages of one evaluation over its units of work."""

    def __init__(
        self,
        options: PrefLampOptions,
        directory: EvaluationDir,
        cases: Sequence[Case],
        pairs: Sequence[PreferencePair],
        opener: Engines,
    ) -> None:
        self.options, self.directory, self.opener = options, directory, opener
        self.cases, self.pairs = cases, pairs
        self.units = units([c.request for c in cases], options.unit_size)
        self.pair_units = units(pairs, _PAIRS_PER_UNIT)
        self.answering = [m for m in METHODS if m in options.methods and m != "guided"]

    def generate(self) -> None:
        """All that the language model writes."""
        stages = [*self.answering, *(["candidates"] if "guided" in self.options.methods else [])]
        open_stages = [s for s in stages if self.directory.pending(s, len(self.units))]
        for stage in stages:
            if stage not in open_stages:
                log.info("%s: all %d units were done before", stage, len(self.units))
        if not open_stages:
            return
        o = self.options
        length = context_length(o.lm, o.lm_revision, o.max_model_len)
        tokenizer = open_tokenizer(o.lm, o.lm_revision)
        log.info("starting the %s engine of %s (%s, context %d)", o.engine, o.lm, o.resolved_lm_dtype(), length)
        with self.opener.generate(o.lm, o.lm_revision, o.resolved_lm_dtype(), length) as engine:
            chat = ChatModel(engine, tokenizer, max_new_tokens=o.max_new_tokens, top_p=o.top_p)
            for stage in open_stages:
                if stage == "candidates":
                    self.directory.work(stage, self.units, self._candidate_work(chat), _CANDIDATES)
                else:
                    self.directory.work(stage, self.units, _answer_work(self._method(stage, chat)), _RESPONSES)

    def _candidate_work(self, chat: ChatModel) -> Callable[[Sequence[Request]], Rows]:
        sample = sampler(chat, n=self.options.best_of, temperature=self.options.temperature)

        def rows(unit: Sequence[Request]) -> Rows:
            return [
                {"case_id": r.case_id, "texts": list(c.texts), "length_limited": c.length_limited, "cut": c.cut}
                for r, c in zip(unit, sample(unit), strict=True)
            ]

        return rows

    def _method(self, name: str, chat: ChatModel) -> Method:
        o = self.options
        if name == "plain":
            return Plain(chat, o.plain_temperature)
        if name == "icl":
            return InContext(chat, o.shots, o.plain_temperature)
        retrieving = RetrievedInContext(chat, SentenceEncoder(o.rag_encoder), o.shots, o.plain_temperature)
        retrieving.prepare([c.request for c in self.cases])
        return retrieving

    def reward(self, rewards: Sequence[UserReward]) -> None:
        """All rewards of all checkpoints, one feature engine for those that share a backbone."""
        groups: dict[Any, list[UserReward]] = {}
        for reward in rewards:
            if self._reward_pending(reward):
                groups.setdefault(reward.engine_key, []).append(reward)
            else:
                log.info("rewards of %s: all units were done before", reward.label)
        for key, group in groups.items():
            length = max(r.formatter.max_length for r in group)
            adapters = {r.label: r.adapter for r in group if r.adapter is not None}
            log.info(
                "starting the %s engine of %s for %s", self.options.engine, key.name, ", ".join(r.label for r in group)
            )
            with ExitStack() as stack:
                engine = stack.enter_context(self.opener.features(key, length, adapters))
                for reward in group:
                    reward.attach(engine)
                    stack.callback(reward.attach, None)
                    self._reward_one(reward)

    def _reward_pending(self, reward: UserReward) -> bool:
        counts = {f"pairs_{reward.label}": len(self.pair_units)}
        if "guided" in self.options.methods:
            counts[f"guided_{reward.label}"] = len(self.units)
        return any(self.directory.pending(stage, count) for stage, count in counts.items())

    def _reward_one(self, reward: UserReward) -> None:
        def pair_rows(unit: Sequence[PreferencePair]) -> Rows:
            rows = [(p.prompt, text) for p in unit for text in (p.chosen, p.rejected)]
            scores, cut = reward.scores([p.user_id for p in unit for _ in range(2)], rows)
            return [
                {
                    "pair_id": p.pair_id,
                    "user_id": p.user_id,
                    "chosen": scores[2 * i],
                    "rejected": scores[2 * i + 1],
                    "cut": int(cut[2 * i : 2 * i + 2].sum()),
                }
                for i, p in enumerate(unit)
            ]

        self.directory.work(f"pairs_{reward.label}", self.pair_units, pair_rows, _PAIRS)
        if "guided" not in self.options.methods:
            return
        candidates = {
            row["case_id"]: Candidates(tuple(row["texts"]), row["length_limited"], row["cut"])
            for row in self.directory.rows("candidates", len(self.units))
        }
        plain = {row["case_id"]: row["text"] for row in self.directory.rows("plain", len(self.units))}
        method = Guided(lambda requests: [candidates[r.case_id] for r in requests], reward)

        def choice_rows(unit: Sequence[Request]) -> Rows:
            choices = method.choose(unit)
            plain_scores, _ = reward.scores([r.user_id for r in unit], [(r.prompt, plain[r.case_id]) for r in unit])
            return [
                {
                    "case_id": r.case_id,
                    "text": c.response.text,
                    "score": c.response.score,
                    # In low precision the same text may score otherwise in another batch; it is a tie all the same.
                    "plain_score": c.response.score if c.response.text == plain[r.case_id] else float(score),
                    "index": c.index,
                    "duplicates": c.duplicates,
                    "reward_cut": c.reward_cut,
                }
                for r, c, score in zip(unit, choices, plain_scores, strict=True)
            ]

        self.directory.work(f"guided_{reward.label}", self.units, choice_rows, _CHOICES)

    def results(self, rewards: Iterable[UserReward]) -> Results:
        """Everything the stages wrote."""
        labels = [r.label for r in rewards]
        guided = "guided" in self.options.methods
        count = len(self.units)
        return Results(
            cases=self.cases,
            responses={m: self.directory.rows(m, count) for m in self.answering},
            candidates=self.directory.rows("candidates", count) if guided else [],
            choices={label: self.directory.rows(f"guided_{label}", count) for label in labels} if guided else {},
            pairs={label: self.directory.rows(f"pairs_{label}", len(self.pair_units)) for label in labels},
            best_of=self.options.best_of,
            bertscore_model=self.options.bertscore_model,
        )


def _answer_work(method: Method) -> Callable[[Sequence[Request]], Rows]:
    def rows(unit: Sequence[Request]) -> Rows:
        return [
            {
                "case_id": request.case_id,
                "text": r.text,
                "length_limited": r.length_limited,
                "shots": r.shots,
                "shots_dropped": r.shots_dropped,
                "prompt_cut": r.prompt_cut,
            }
            for request, r in zip(unit, method.respond(unit), strict=True)
        ]

    return rows
