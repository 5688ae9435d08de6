"""Pref-LaMP: does a reward model rank a user's titles, and does what it guides come closer to the user's own?

(arXiv 2512.23067, section 5.) Stages, each in units of fixed size so that a rerun continues where one stopped:

    plain, icl, icl_rag     one answer a case, by the language model
    candidates              N sampled answers a case, shared by all checkpoints
    pairs_LABEL             rewards of the test pairs, by a checkpoint
    guided_LABEL            the candidate each user's reward chooses

The language model's engine is closed before the reward models' engines start, so only one model is in memory.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from prm.dataset_dir import DatasetDir
from prm.evaluation.benchmarks.pref_lamp_options import PrefLampOptions
from prm.evaluation.benchmarks.pref_lamp_stages import Stages
from prm.evaluation.benchmarks.pref_lamp_summary import cases_table, summarize
from prm.evaluation.cases import select_cases, select_pairs
from prm.evaluation.directory import EvaluationDir
from prm.inference.engines.opening import Engines, engines
from prm.inference.user_reward import UserReward
from prm.provenance import package_versions
from prm.records import PreferencePair

log = logging.getLogger(__name__)


def evaluate(options: PrefLampOptions, opener: Engines | None = None) -> dict[str, Any]:
    """Run what is left of an evaluation and return its summary.

    Args:
        options: what to do.
        opener: opens engines; by default those of `options.engine`.

    Raises:
        UserError: a mistake in the options, the data or a checkpoint; found before any model runs where possible.
    """
    started = time.monotonic()
    options.check()
    data = DatasetDir.open(options.data)
    cases = select_cases(data, options.split, seed=options.seed, limit=options.limit, limit_users=options.limit_users)
    rewards = [
        UserReward(path, label, dtype=options.rm_dtype, allow_code=options.allow_code)
        for label, path in options.checkpoints
    ]
    pairs: list[PreferencePair] = []
    if rewards:
        pairs = select_pairs(data, options.split, limit=options.limit_pairs, limit_users=options.limit_users)
        guided = [c.request.user_id for c in cases] if "guided" in options.methods else []
        for reward in rewards:
            reward.require_users([*(p.user_id for p in pairs), *guided])
    with EvaluationDir(
        options.out, options.settings(data.fingerprint, rewards), overwrite=options.overwrite
    ) as directory:
        if (finished := directory.summary()) is not None:
            log.info("%s is complete: nothing to do", options.out)
            return finished
        opener = opener or engines(options.engine, Path(options.out) / "logs")
        work = Stages(options, directory, cases, pairs, opener)
        work.generate()
        work.reward(rewards)
        results = work.results(rewards)
        facts = {
            "dataset": {"name": data.name, "fingerprint": data.fingerprint, "path": str(options.data)},
            "synthetic": data.synthetic,
            "split": options.split,
            "split_rule": data.info.get("split_rule"),
            "lm": options.lm,
            "lm_dtype": options.resolved_lm_dtype(),
            "engine": options.engine,
            "seed": options.seed,
            "limit": options.limit,
            "best_of": options.best_of,
            "bertscore_model": options.bertscore_model,
            "checkpoints": [
                {"label": r.label, "path": str(r.path), "class_path": r.class_path, "fingerprint": r.fingerprint}
                for r in rewards
            ],
            "command": options.command,
            "versions": package_versions(),
        }
        figures = summarize(results, facts)
        directory.finish(cases_table(results), {**figures, "seconds": round(time.monotonic() - started, 1)})
        return directory.summary() or {}
