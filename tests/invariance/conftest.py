"""Every reward model, on one small dataset: a new method adds a line to ARGUMENTS, and the suite runs over it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

import prm.reward_models
from data_modules.preference_data import PreferenceDataModule
from prm.backbones import LoraSpec
from prm.dataset_dir import write_dataset
from prm.records import PreferencePair, User, user_prompt
from prm.reward_models import FeatureReward
from prm.training.module import RewardModelModule

# Constructor arguments beside feature_dim.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "GlobalBT": {},
    "LoRE": {"num_bases": 3},
    "LoREAlt": {"num_bases": 3, "period": 2},
    "MPU": {"width": 4},
    "MPUAvg": {"width": 4},
    "PALA": {"num_groups": 3, "width": 8},
    "PReF": {"num_factors": 3, "start": "random"},
}


def arguments_of(method: type[FeatureReward]) -> dict[str, Any]:
    assert method.__name__ in ARGUMENTS, f"give {method.__name__}'s arguments in ARGUMENTS of {__file__}"
    return ARGUMENTS[method.__name__]


def methods() -> list[type[FeatureReward]]:
    """All reward models that prm exports and the recipe trains on the last token's feature."""
    found = [getattr(prm.reward_models, name) for name in prm.reward_models.__all__]
    classes = [c for c in found if inspect.isclass(c) and issubclass(c, FeatureReward) and c is not FeatureReward]
    # The module refuses these, which test_training_module holds; GlobalMean is GlobalBT on another pooling.
    return [c for c in classes if c.__name__ not in ("GlobalMean", "PALB", "VPL")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", methods(), ids=lambda c: c.__name__, scope="session")


@pytest.fixture(scope="session")
def invariance_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five users, three texts a prompt, prompts of several lengths; 64 training and 20 validation pairs."""
    pairs, users = [], []
    for number in range(5):
        user = f"user-{number}"
        users.append(User(user, "train"))
        for i in range(4 * number, 4 * number + (16 if number else 20)):
            titles = (f"On matter {i}", f"Matter {i}: why does it matter?", f"Notes on the matter of {i} and others")
            chosen, rejected = titles[number % 3], titles[(number + 1 + i % 2) % 3]
            split = "validation" if i % 4 == 3 else "train"
            prompt = user_prompt(f"Title of abstract {i}, please" + " and of more than that" * (i % 4))
            pairs.append(PreferencePair(f"{user}/{i}", user, split, prompt, chosen, rejected))
    out = tmp_path_factory.mktemp("invariance") / "data"
    write_dataset(out, name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0)
    return out


class Losses(Callback):
    """Training loss of every step: the mean over its accumulated batches."""

    def __init__(self) -> None:
        self.batches: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.batches.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)

    def steps(self, accumulate: int) -> list[float]:
        return [sum(self.batches[i : i + accumulate]) / accumulate for i in range(0, len(self.batches), accumulate)]


class Training:
    """What a fit of six steps of eight pairs left."""

    def __init__(self, module: RewardModelModule, data: PreferenceDataModule, trainer: Trainer, losses: Losses) -> None:
        from prm.training.callbacks import full_state

        self.module, self.data = module, data
        self.losses = losses.steps(trainer.accumulate_grad_batches)
        self.weights = full_state(module)
        self.figures = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "train/loss"}


@pytest.fixture(scope="session")
def train(invariance_data: Path, tiny_llama_path: Path) -> Any:
    """`train(method, batch_size=4, accumulate=2, lora=False, ...)` trains and returns a Training."""

    def train(
        method: type[FeatureReward],
        *,
        batch_size: int = 8,
        accumulate: int = 1,
        lora: bool = True,
        model: dict[str, Any] | None = None,
        **options: Any,
    ) -> Training:
        seed_everything(0, verbose=False)
        module = RewardModelModule(
            str(tiny_llama_path),
            lambda d: method(d, **arguments_of(method)),  # type: ignore[call-arg]
            lora=LoraSpec(r=4, alpha=8) if lora else None,
            dtype="float32",
            **{"adapter_lr": 1e-3, "head_lr": 1e-2, "user_lr": 1e-1, **(model or {})},
        )
        data = PreferenceDataModule(
            str(invariance_data), str(tiny_llama_path), batch_size=batch_size, max_length=96, dtype="float32", **options
        )
        losses = Losses()
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, max_steps=6,
            accumulate_grad_batches=accumulate, callbacks=[losses], val_check_interval=6 * accumulate,
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
        return Training(module, data, trainer, losses)

    return train


@pytest.fixture(scope="session")
def reference(train: Any) -> Any:
    """`reference(method)`: trained the plain way, one padded row for each text, on one rank, once a method."""
    known: dict[tuple[str, bool], Training] = {}

    def reference(method: type[FeatureReward], *, lora: bool = True) -> Training:
        key = (method.__name__, lora)
        if key not in known:
            known[key] = train(method, lora=lora, layout="padded")
        return known[key]

    return reference


def same(one: Training, other: Training, tolerance: float) -> None:
    """Assert equal losses, weights and validation figures."""
    assert len(one.losses) == len(other.losses) == 6
    assert max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)) < tolerance
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        assert float((value - other.weights[name]).abs().max()) < 10 * tolerance, name
    assert one.figures.keys() == other.figures.keys()
    for name, figure in one.figures.items():
        assert figure == pytest.approx(other.figures[name], abs=10 * tolerance), name


@pytest.fixture(scope="session")
def assert_same() -> Any:
    return same


@pytest.fixture(scope="session")
def method_arguments() -> Any:
    return arguments_of


@pytest.fixture(scope="session")
def all_methods() -> list[type[FeatureReward]]:
    return methods()
