"""Methods, best-of-N, and a whole Pref-LaMP evaluation on a tiny random model: resumed, refused, repeated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from prm.backbones import LoraSpec, open_backbone, open_tokenizer
from prm.checkpoints import open_checkpoint, save_checkpoint
from prm.commands import evaluate as command
from prm.dataset_dir import write_dataset
from prm.errors import UserError
from prm.evaluation.benchmarks.pref_lamp import evaluate
from prm.evaluation.benchmarks.pref_lamp_options import PrefLampOptions
from prm.evaluation.cases import case_seed, spread, units
from prm.evaluation.methods import Guided, InContext, Plain, Request, RetrievedInContext
from prm.formatting import Formatter
from prm.inference.chat import ChatModel
from prm.inference.decoding.best_of_n import Candidates
from prm.inference.engines.base import Generation, GenerationRequest
from prm.inference.engines.opening import TransformersEngines
from prm.records import Completion, PreferencePair, User, user_prompt
from prm.reward_models.global_bt import GlobalBT
from prm.reward_models.lore import LoRE
from prm.user_states import UserStates

USERS = ["ada", "bob", "cyd"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models here are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TOPICS = ["rain", "stars", "bees", "iron", "salt"]


def completion(user: str, number: int, split: str) -> Completion:
    topic = TOPICS[number % len(TOPICS)]
    prompt = user_prompt(f"Generate a title for a paper about {topic} number {number}.")
    return Completion(f"{user}-{split}-{number}", user, split, prompt, f"{topic.title()} by {user}")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "titles"
    completions = [
        completion(u, n, s) for u in USERS for s, ns in (("support", range(4)), ("test", (5, 6))) for n in ns
    ]
    pairs = [
        PreferencePair(f"{u}-{s}-{n}", u, s, user_prompt(f"A title about {s} {n}"), f"Good {u} {n}", f"Bad {n}")
        for u in USERS
        for s in ("support", "test")
        for n in range(3)
    ]
    users = [User(u, "adapt") for u in USERS]
    write_dataset(
        out, name="titles", pairs=pairs, completions=completions, users=users, source="test", licence="none", seed=0
    )
    return out


def make_checkpoint(out: Path, model: str, head: Any, users: Sequence[str]) -> Path:
    torch.manual_seed(0)
    backbone = open_backbone(model, dtype="float32", lora=LoraSpec(r=4))
    for name, parameter in backbone.named_parameters():
        if "lora_B" in name:  # zero in a fresh adapter, which would then change nothing
            torch.nn.init.normal_(parameter, std=0.1)
    states = UserStates(list(users), torch.randn(len(users), head.user_dim))
    return save_checkpoint(
        out, backbone=backbone, head=head, users=states, formatter=Formatter(backbone.tokenizer, 128)
    )


@pytest.fixture(scope="module")
def checkpoints(tiny_llama_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "lore": make_checkpoint(root / "lore", str(tiny_llama_path), LoRE(64, 3), USERS),
        "global": make_checkpoint(root / "global", str(tiny_llama_path), GlobalBT(64), []),
        "stranger": make_checkpoint(root / "stranger", str(tiny_llama_path), LoRE(64, 3), USERS[:1]),
    }


@pytest.fixture
def options(
    data_dir: Path, checkpoints: dict[str, Path], tiny_llama_path: str, minilm_path: str, tmp_path: Path
) -> PrefLampOptions:
    return PrefLampOptions(
        data=data_dir,
        out=tmp_path / "eval",
        lm=str(tiny_llama_path),
        checkpoints=(("global", checkpoints["global"]), ("lore", checkpoints["lore"])),
        engine="transformers",
        best_of=3,
        shots=2,
        max_new_tokens=6,
        unit_size=2,
        bertscore_model=str(minilm_path),
        rag_encoder=str(minilm_path),
    )


class Interrupted(Exception):
    pass


class CountingEngines(TransformersEngines):
    """Transformers engines that count calls, and stop the evaluation after so many of them."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls, self.opened, self.stop_after = 0, 0, stop_after

    def _counted(self, engine: Any, name: str) -> Any:
        self.opened += 1
        inner = getattr(engine, name)

        def call(*args: Any) -> Any:
            if self.calls == self.stop_after:
                raise Interrupted
            self.calls += 1
            return inner(*args)

        setattr(engine, name, call)
        return engine

    def generate(self, *args: Any) -> Any:
        return self._counted(super().generate(*args), "generate")

    def features(self, *args: Any) -> Any:
        return self._counted(super().features(*args), "features")


def outcome(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads((out / "summary.json").read_text())
    summary.pop("seconds")
    return summary, pq.read_table(out / "cases.parquet").to_pylist()


def test_a_resumed_evaluation_equals_an_undisturbed_one(options: PrefLampOptions) -> None:
    undisturbed = CountingEngines()
    evaluate(options, undisturbed)
    broken = replace(options, out=options.out.with_name("broken"))
    calls = 0
    # In the first stage, among the candidates, among the pairs, between two checkpoints, in the last unit.
    for stop_after in (1, 10, 2, 5, 3):
        stopped = CountingEngines(stop_after)
        with pytest.raises(Interrupted):
            evaluate(broken, stopped)
        calls += stopped.calls
        assert not (broken.out / "summary.json").exists()
    rest = CountingEngines()
    evaluate(broken, rest)
    assert outcome(broken.out) == outcome(options.out)
    # Only a unit of two calls is begun again: guided scores its candidates, then the plain answers.
    assert undisturbed.calls <= calls + rest.calls <= undisturbed.calls + 5


def test_a_complete_evaluation_is_not_done_again(options: PrefLampOptions) -> None:
    first = evaluate(options, CountingEngines())
    again = CountingEngines(stop_after=0)
    assert evaluate(options, again) == first
    assert again.opened == 0


def test_other_settings_are_refused_by_name_and_overwritten_on_request(options: PrefLampOptions) -> None:
    options = replace(options, methods=("plain",), checkpoints=())
    evaluate(options)
    before = outcome(options.out)
    other = replace(options, seed=1, max_new_tokens=5)
    with pytest.raises(UserError, match=r"max_new_tokens, seed.*--overwrite"):
        evaluate(other)
    assert outcome(options.out) == before
    assert evaluate(replace(other, overwrite=True))["seed"] == 1
    (options.out.parent / "else").mkdir()
    (options.out.parent / "else" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no evaluation"):
        evaluate(replace(options, out=options.out.parent / "else", overwrite=True))
    assert (options.out.parent / "else" / "notes.txt").read_text() == "mine"


def test_summary_and_cases_agree_with_the_reference(options: PrefLampOptions, checkpoints: dict[str, Path]) -> None:
    summary = evaluate(options)
    _, rows = outcome(options.out)
    assert set(summary["methods"]) == {"plain", "icl", "icl_rag", "guided[global]", "guided[lore]"}
    assert summary["chance_win"] == pytest.approx(3 / 4)
    assert summary["counts"]["candidates"] == 6 * 3
    # Rewards through the engine are those of the checkpoint itself.
    lore = open_checkpoint(checkpoints["lore"])
    by_case = {
        c.example_id: c
        for c in map(lambda u_n: completion(u_n[0], u_n[1], "test"), [(u, n) for u in USERS for n in (5, 6)])
    }
    guided = [r for r in rows if r["method"] == "guided[lore]"]
    prompts = [by_case[r["case_id"]].prompt for r in guided]
    users = [r["user_id"] for r in guided]
    expected = lore.rewards(users, list(zip(prompts, [r["response"] for r in guided], strict=True)))
    assert [r["score"] for r in guided] == pytest.approx(expected.tolist(), abs=1e-4)
    # ... and the guided answer is the best of the candidates that were kept.
    shards = [pq.read_table(f).to_pylist() for f in sorted((options.out / "shards").glob("candidates-*.parquet"))]
    candidates = {row["case_id"]: row["texts"] for shard in shards for row in shard}
    for row, prompt in zip(guided, prompts, strict=True):
        texts = candidates[row["case_id"]]
        scores = lore.rewards([row["user_id"]] * len(texts), [(prompt, text) for text in texts])
        assert row["response"] == texts[int(scores.argmax())]
    # Wins count what the rewards say.
    plain = {r["case_id"]: r["response"] for r in rows if r["method"] == "plain"}
    plain_scores = lore.rewards(users, [(p, plain[r["case_id"]]) for p, r in zip(prompts, guided, strict=True)])
    win = summary["win"]["guided[lore]"]
    assert win["win"] == sum(r["score"] > s + 1e-6 for r, s in zip(guided, plain_scores, strict=True))
    assert win["win"] + win["tie"] + win["loss"] == 6
    # The last checkpoint gives the figures that promotion reads.
    metrics = summary["metrics"]
    assert (
        metrics["pref_lamp/rm_accuracy"]
        == metrics["pref_lamp/rm_accuracy_lore"]
        == summary["rm_accuracy"]["lore"]["mean"]
    )
    assert metrics["pref_lamp/rm_accuracy_low"] == summary["rm_accuracy"]["lore"]["low"]
    assert metrics["pref_lamp/guided/rouge1_gain"] == pytest.approx(
        metrics["pref_lamp/guided_lore/rouge1"] - metrics["pref_lamp/plain/rouge1"]
    )
    assert metrics["pref_lamp/guided/win_rate"] == win["win_rate"]["mean"]


def test_users_without_state_are_refused_before_anything_runs(
    options: PrefLampOptions, checkpoints: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match="prm adapt"):
        evaluate(replace(options, checkpoints=(("x", checkpoints["stranger"]),)), CountingEngines(0))
    assert not options.out.exists()
    # A method that does not look at the user needs none.
    only = replace(options, checkpoints=(("g", checkpoints["global"]),), methods=("plain",), limit=1)
    assert evaluate(only)["rm_accuracy"]["g"]["num_users"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("plain", "magic")}, "magic"),
        ({"methods": ()}, "names none"),
        ({"methods": ("guided",)}, "add plain"),
        ({"checkpoints": ()}, "needs a CHECKPOINT"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"limit": 0}, "--limit 0"),
        ({"unit_size": 0}, "--unit-size 0"),
        ({"split": "validation"}, "no completions"),
        ({"max_model_len": 10}, "leaves no room"),
        ({"max_model_len": 10**6}, "made for"),
        ({"engine": "magic"}, "--engine"),
        ({"lm": "/nothing/here"}, "no model directory"),
    ],
)
def test_mistakes_are_one_line(options: PrefLampOptions, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        evaluate(replace(options, **change))
    assert "\n" not in str(caught.value)


# Methods alone


class Echo:
    """An engine that answers with the prompt's text and its seed."""

    def __init__(self, tokenizer: Any, max_model_len: int = 512) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.requests: list[GenerationRequest] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        self.requests += requests
        return [
            [Generation(f"{self.tokenizer.decode(r.token_ids)}|{r.seed}|{i}", (1,), "stop") for i in range(r.n)]
            for r in requests
        ]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path: str) -> Any:
    return open_tokenizer(str(tiny_llama_path))


def request(user: str = "ada", number: int = 9, history: int = 4) -> Request:
    own = tuple(completion(user, n, "support") for n in range(history))
    asked = completion(user, number, "test")
    return Request(asked.example_id, user, asked.prompt, own, case_seed(0, asked.example_id))


def chat(tokenizer: Any, max_model_len: int = 512) -> ChatModel:
    return ChatModel(Echo(tokenizer, max_model_len), tokenizer, max_new_tokens=16)


def test_plain_sees_nothing_of_the_user(tokenizer: Any) -> None:
    response = Plain(chat(tokenizer)).respond([request()])[0]
    assert "number 9" in response.text and "by ada" not in response.text
    assert response.text.endswith("|None|0")  # greedy: no seed


def test_examples_are_the_users_own_and_do_not_depend_on_the_batch(tokenizer: Any) -> None:
    method = InContext(chat(tokenizer), shots=2, temperature=0.5)
    requests = [request("ada"), request("bob"), request("cyd", history=1), request("dan", history=0)]
    together = method.respond(requests)
    assert together == [method.respond([r])[0] for r in requests]
    assert [r.shots for r in together] == [2, 2, 1, 0]
    for asked, response in zip(requests, together, strict=True):
        own = response.text.count(f"by {asked.user_id}")
        assert own == sum(response.text.count(f"by {u}") for u in [*USERS, "dan"]) == response.shots
    others = [InContext(chat(tokenizer), 2).examples([replace(requests[0], seed=s)])[0] for s in range(20)]
    assert len({tuple(e.example_id for e in row) for row in others}) > 1


def test_the_oldest_examples_go_first_when_the_context_is_short(tokenizer: Any) -> None:
    asked = request()
    need = len(chat(tokenizer).fit(asked.prompt, [(e.prompt, e.reference) for e in asked.history]).token_ids)
    response = InContext(chat(tokenizer, need + 16), shots=4).respond([asked])[0]
    assert (response.shots, response.shots_dropped) == (4, 0)
    response = InContext(chat(tokenizer, need + 15), shots=4).respond([asked])[0]
    assert (response.shots, response.shots_dropped, response.prompt_cut) == (3, 1, 0)
    assert "Rain by ada" not in response.text and "Iron by ada" in response.text
    tiny = chat(tokenizer, 16 + 10)
    response = InContext(tiny, shots=4).respond([asked])[0]
    assert response.shots_dropped == 4 and response.prompt_cut > 0
    assert len(tiny.engine.requests[0].token_ids) == 10


class ByNumber:
    """Embeds a text by the last number in it: near numbers, near vectors."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        angles = np.array([int("".join(c for c in t if c.isdigit())) / 10 for t in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_retrieval_takes_the_nearest_own_examples_nearest_last(tokenizer: Any) -> None:
    method = RetrievedInContext(chat(tokenizer), ByNumber(), shots=2)
    near, far = request("ada", number=9, history=4), request("bob", number=0, history=4)
    chosen = method.examples([near, far, request("eve", history=0)])
    assert [[e.example_id for e in row] for row in chosen] == [
        ["ada-support-2", "ada-support-3"],
        ["bob-support-1", "bob-support-0"],
        [],
    ]


class PlantedReward:
    """A reward that is the length of the text, negative for one user."""

    label = "planted"

    def scores(self, users: Sequence[str], rows: Sequence[tuple[Any, str]]) -> tuple[np.ndarray, np.ndarray]:
        signs = [-1.0 if user == "bob" else 1.0 for user in users]
        return np.array([s * len(text) for s, (_, text) in zip(signs, rows, strict=True)]), np.zeros(len(rows), int)


def test_guided_takes_what_the_users_own_reward_prefers() -> None:
    texts = ("aa", "aaaa", "bbbb", "a", "a")
    method = Guided(lambda requests: [Candidates(texts) for _ in requests], PlantedReward())
    long, short = method.choose([request("ada"), request("bob")])
    assert (long.response.text, long.index, long.response.score) == ("aaaa", 1, 4.0)  # the first of equals
    assert (short.response.text, short.index, short.response.score) == ("a", 3, -1.0)
    assert long.duplicates == 1
    assert method.name == "guided[planted]"
    assert [r.text for r in method.respond([request("ada")])] == ["aaaa"]


def test_limits_spread_over_users_and_units_are_fixed() -> None:
    rows = [SimpleNamespace(user_id=u, n=n) for u in "abc" for n in range(3)]
    assert [(r.user_id, r.n) for r in spread(rows, limit=4)] == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    assert {r.user_id for r in spread(rows, limit_users=2)} == {"a", "b"}
    assert len(spread(rows)) == 9
    assert units([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert case_seed(0, "x") != case_seed(1, "x") != case_seed(1, "y")


# The command


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["pref-lamp", *arguments]))


def test_the_command_prints_figures_with_the_chance_level(
    options: PrefLampOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *(f"{label}={path}" for label, path in options.checkpoints),
        *("--data", str(options.data), "--out", str(options.out), "--lm", options.lm, "--engine", "transformers"),
        *("--best-of", "3", "--max-new-tokens", "6", "--limit", "2", "--methods", "plain,guided", "--no-track"),
        *("--bertscore-model", options.bertscore_model),
    ]
    assert run_command(*arguments) == 0
    shown = capsys.readouterr().out
    assert "chance 0.750" in shown and "RM accuracy lore" in shown and "guided[lore] over plain" in shown
    assert run_command(*arguments, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["counts"]["cases"] == 2 and summary["mlflow_run_id"] is None


def test_labels_are_class_names_made_unique(checkpoints: dict[str, Path]) -> None:
    lore, other, glob = (str(checkpoints[k]) for k in ("lore", "stranger", "global"))
    labels = [label for label, _ in command.labelled_checkpoints([lore, glob])]
    assert labels == ["lore", "globalbt"]
    assert [x for x, _ in command.labelled_checkpoints([lore, other])] == ["lore_lore", "lore_stranger"]
    assert [x for x, _ in command.labelled_checkpoints([f"a={lore}", other])] == ["a", "lore"]
    with pytest.raises(UserError, match="LABEL="):
        command.labelled_checkpoints([lore, lore])
    with pytest.raises(UserError, match="LABEL="):
        command.labelled_checkpoints([f"low={lore}"])
    with pytest.raises(UserError, match=r"no prm\.json"):
        command.labelled_checkpoints(["/nothing/here"])
