import itertools
import math

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from data_modules.preference_data import PreferenceDataModule
from prm.backbones import LoraSpec
from prm.checkpoints import load_head, open_checkpoint, read_info
from prm.dataset_dir import write_dataset
from prm.errors import UserError
from prm.losses import bradley_terry
from prm.records import PreferencePair, User, user_prompt
from prm.reward_models import MPU, PALB, VPL, GlobalBT, GlobalMean, LoRE, LoREAlt, MPUAvg, PReF
from prm.training.callbacks import PrmCheckpoint, full_state
from prm.training.module import RewardModelModule

WORDS = ["graph", "field", "walk", "matrix", "galaxy", "protein", "network", "cluster"]


@pytest.fixture(scope="module")
def toy_dir(tmp_path_factory):
    """Two users who want opposite titles of the same abstracts; one has four training pairs, the other eight."""
    pairs = []
    for user, count in (("ann", 4), ("bob", 8)):
        for i in [*range(count), 20, 21, 22, 23]:
            split = "train" if i < count else "validation"
            topic = f"{WORDS[i % 8]} {WORDS[(3 * i + 1) % 8]}"
            titles = (f"On {topic}", f"{topic}: why?")
            chosen, rejected = titles if user == "ann" else titles[::-1]
            name = f"{user}-{i}"
            pairs.append(PreferencePair(name, user, split, user_prompt(f"Title of {topic} {split}"), chosen, rejected))
    out = tmp_path_factory.mktemp("data") / "toy"
    users = [User("ann", "train"), User("bob", "train")]
    write_dataset(out, name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0)
    return str(out)


@pytest.fixture
def make(toy_dir, tiny_llama_path):
    def make(method=lambda d: LoRE(d, 2), batch_size=4, **options):
        options = {"lora": LoraSpec(r=4, alpha=8), "adapter_lr": 1e-3, "head_lr": 1e-2, "user_lr": 1e-1} | options
        module = RewardModelModule(str(tiny_llama_path), method, **options)
        data = PreferenceDataModule(toy_dir, str(tiny_llama_path), batch_size=batch_size, max_length=64)
        return module, data

    return make


def fit(module, data, **options):
    options = {"max_epochs": 1, "log_every_n_steps": 1} | options
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, datamodule=data)
    return trainer


def test_every_trainable_part_has_a_gradient_at_step_one_and_nothing_else_has(make):
    module, data = make()
    data.setup("fit")
    module.build(2)
    batch = next(iter(data.train_dataloader()))
    chosen, rejected, users = module(batch)
    module.head.loss(chosen, rejected, users, batch["weight"]).backward()
    assert module.head.bases.grad.abs().sum() > 0
    assert module.users.states.grad.abs().sum() > 0
    # LoRA starts at B = 0, so at step 1 the gradient reaches B and not yet A.
    grads = {n: p.grad for n, p in module.backbone.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for n, g in grads.items() if "lora_B" in n)
    assert all(g is None for n, g in grads.items() if "lora_" not in n)


def test_training_moves_the_trainable_parts_and_leaves_the_frozen_ones(make):
    module, data = make()
    data.setup("fit")
    module.build(2)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    fit(module, data, max_epochs=2)
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    assert moved == trainable
    assert {"head.bases", "users.states"} < moved
    assert any("lora_A" in n for n in moved)


def test_the_loss_falls_and_users_are_told_apart(make):
    module, data = make()
    trainer = fit(module, data, max_epochs=15, check_val_every_n_epoch=15)
    assert trainer.callback_metrics["train/loss"] < 0.2
    assert trainer.callback_metrics["preferences/rm_accuracy"] > 0.9
    assert trainer.callback_metrics["validation/loss"] < math.log(2)


def test_a_global_model_cannot_tell_opposite_users_apart(make, tmp_path):
    module, data = make(method=GlobalBT)
    assert not any(g["name"] == "users" for g in _built(module, data).parameter_groups())
    trainer = fit(module, data, max_epochs=3, callbacks=[PrmCheckpoint(tmp_path / "checkpoints", {})])
    assert trainer.callback_metrics["preferences/rm_accuracy"] == 0.5
    head, users, _ = load_head(tmp_path / "checkpoints/best")
    assert isinstance(head, GlobalBT)
    assert users.ids == ["ann", "bob"]
    assert users.states.shape == (2, 0)


def _built(module, data):
    data.setup("fit")
    module.build(len(data.user_ids))
    return module


@pytest.mark.parametrize("weighting", ["user", "pair"])
def test_the_training_loss_weighs_users_as_it_says(make, weighting):
    """Over one epoch without steps, the mean of the batch losses is the mean over users, or over pairs."""
    module, data = make(user_weighting=weighting, batch_size=3)
    _built(module, data)
    module.log = lambda *args, **options: None
    tokens = data._tokens["train"]
    with torch.no_grad():
        batches = [module.training_step(batch, 0).item() for batch in data.train_dataloader()]
        per_pair = {}
        for i in range(len(tokens)):
            batch = tokens.collate([i])
            chosen, rejected, users = module(batch)
            delta = module.head.scores(chosen, users) - module.head.scores(rejected, users)
            per_pair.setdefault(int(batch["user_index"][0]), []).append(bradley_terry(delta).item())
    assert [len(per_pair[u]) for u in (0, 1)] == [4, 8]
    over_users = sum(sum(rows) / len(rows) for rows in per_pair.values()) / 2
    over_pairs = sum(sum(rows) for rows in per_pair.values()) / 12
    assert abs(over_users - over_pairs) > 1e-3
    assert sum(batches) / len(batches) == pytest.approx(over_users if weighting == "user" else over_pairs, rel=1e-5)


def test_only_the_adapter_and_the_head_are_in_train_mode_during_the_fit(make):
    module, data = make(lora=LoraSpec(r=4, alpha=8, dropout=0.3))
    modes = []
    original = module.training_step

    def training_step(batch, batch_idx):
        modes.append({n: m.training for n, m in module.backbone.named_modules()} | {"head": module.head.training})
        return original(batch, batch_idx)

    module.training_step = training_step
    # A validation, and with it a saved checkpoint, comes between the steps.
    fit(module, data, max_epochs=2, val_check_interval=1)
    assert len(modes) == 6
    for step in modes:
        assert step["head"]
        assert all(on == ("lora_" in name) for name, on in step.items() if name != "head")


def test_groups_have_their_own_learning_rates_and_warm_up(make):
    module, data = make(warmup_steps=3, schedule="linear")
    rates = []

    class Watch(PrmCheckpoint):
        def on_train_batch_start(self, trainer, *_):
            rates.append({g["name"]: g["lr"] for g in trainer.optimizers[0].param_groups})

        def _export(self, *_):
            pass

        def _copy(self, *_):
            pass

    fit(module, data, max_epochs=2, callbacks=[Watch(None, {})])
    assert len(rates) == 6
    assert [round(r["head"] / 1e-2, 4) for r in rates] == [0.25, 0.5, 0.75, 1.0, 0.6667, 0.3333]
    assert all(
        r["users"] == pytest.approx(10 * r["head"]) and r["adapter"] == pytest.approx(r["head"] / 10) for r in rates
    )


def test_the_start_depends_on_the_seed_alone(make):
    first, data = make(seed=3)
    _built(first, data)
    torch.manual_seed(99)
    second, third = make(seed=3)[0], make(seed=4)[0]
    second.build(2)
    third.build(2)
    assert torch.equal(first.head.bases, second.head.bases)
    assert torch.equal(first.users.states, second.users.states)
    assert not torch.equal(first.head.bases, third.head.bases)


def test_best_and_last_are_written_and_score_like_the_live_model(make, tmp_path):
    module, data = make()
    facts = {"data": {"name": "toy", "synthetic": False}}
    fit(module, data, max_epochs=2, callbacks=[PrmCheckpoint(tmp_path, facts)])
    last = open_checkpoint(tmp_path / "last")
    assert last.info["data"] == facts["data"]
    assert last.info["step"] == 6
    assert 0 <= last.info["metrics"]["preferences/rm_accuracy"] <= 1
    assert last.users.ids == ["ann", "bob"]
    state = full_state(module)
    assert torch.equal(last.users.states, state["users.states"])
    assert torch.equal(last.head.bases, state["head.bases"])
    prompt = user_prompt("Title of graph walk")
    rewards = last.rewards(["ann", "bob"], [(prompt, "On graph walk")] * 2)
    ids = torch.tensor([data.formatter.encode(prompt, "On graph walk").ids])
    with torch.no_grad():
        feature = module.backbone.eval()(ids, torch.ones_like(ids))
        live = module.head.scores_for_all(feature, module.users.states)[:, 0]
    assert rewards == pytest.approx(live.numpy(), abs=1e-5)
    assert rewards[0] != pytest.approx(rewards[1], abs=1e-3)
    assert read_info(tmp_path / "best")["metrics"]["preferences/rm_accuracy"] >= 0


def test_a_fit_that_runs_out_of_steps_validates_once_more(make, tmp_path):
    module, data = make()
    trainer = fit(module, data, max_epochs=-1, max_steps=2, callbacks=[PrmCheckpoint(tmp_path, {})])
    assert trainer.global_step == 2
    assert read_info(tmp_path / "best")["step"] == 2
    assert "preferences/rm_accuracy" in trainer.callback_metrics


def test_saving_a_checkpoint_does_not_disturb_the_training(make, tmp_path):
    """With dropout, the weights after two epochs are the same whether or not checkpoints were written between."""
    ends = []
    for callbacks in ([], [PrmCheckpoint(tmp_path, {})]):
        module, data = make(lora=LoraSpec(r=4, alpha=8, dropout=0.2))
        torch.manual_seed(0)
        fit(module, data, max_epochs=2, callbacks=callbacks)
        ends.append(full_state(module))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# Methods


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (GlobalMean, "needs model.pooling mean"),
        (PReF, "init_args.start random"),
        (VPL, "annotated pairs of the user"),
        (PALB, "the prompt's own feature"),
    ],
)
def test_a_method_that_would_be_trained_as_something_else_is_refused(make, method, words):
    module, data = make(method)
    with pytest.raises(UserError, match=words):
        fit(module, data)


def test_the_mean_over_tokens_trains_where_it_is_the_pooling(make, tmp_path):
    module, data = make(GlobalMean, pooling="mean", lora=None)
    fit(module, data, callbacks=[PrmCheckpoint(tmp_path, {})])
    assert isinstance(open_checkpoint(tmp_path / "last").head, GlobalMean)


def test_turns(make):
    """Bases and adapter move in steps 1, 2 and 5, 6; users in 3, 4: a part that rests does not move at all."""
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append({n: v.clone() for n, v in full_state(module).items()})

    module, data = make(lambda d: LoREAlt(d, 2, period=2))
    data.setup("fit")
    module.build(2)
    seen.append(full_state(module))
    fit(module, data, max_epochs=2, callbacks=[Watch()])
    assert len(seen) == 7
    for step, (before, after) in enumerate(itertools.pairwise(seen)):
        moved = {n.split(".")[0] for n in after if not torch.equal(before[n], after[n])}
        assert moved == ({"users"} if step in (2, 3) else {"backbone", "head"}), step


@pytest.mark.parametrize("average", ["parameters", "scores"])
def test_the_average_of_all_users_networks_is_what_a_run_leaves(make, tmp_path, average):
    module, data = make(lambda d: MPUAvg(d, 4, average=average))
    fit(module, data, max_epochs=2, callbacks=[PrmCheckpoint(tmp_path, {})])
    last = open_checkpoint(tmp_path / "last")
    assert last.users.states.shape == (2, 0) and last.head.members == (1 if average == "parameters" else 2)
    features = torch.randn(5, module.backbone.hidden_size)
    own = module.head.eval().scores_for_all(features, module.users.states)
    assert (own[0] - own[1]).abs().max() > 1e-4
    mean = module.head.scores_for_all(features, module.users.states.mean(0, keepdim=True))[0]
    expected = mean if average == "parameters" else own.mean(0)
    found = last.head.scores_for_all(features, last.users.states)
    assert found.shape == (2, 5)
    assert torch.allclose(found, expected.expand(2, 5), atol=1e-5)


def test_a_new_users_network_begins_where_the_trained_ones_did(make, tmp_path):
    module, data = make(lambda d: MPU(d, 4))
    fit(module, data, max_epochs=2, callbacks=[PrmCheckpoint(tmp_path, {})])
    last = open_checkpoint(tmp_path / "last")
    start = module.head.initial_users(1, torch.Generator())
    assert torch.equal(last.head.new_users(1, last.users.states), start)
    assert not torch.equal(last.users.states[:1], start)


# Rows


LAYOUTS = ["padded", "packed", "shared"]


class Syncs(TorchDispatchMode):
    """Notes operations that make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().split("::")[1].split(".")[0] in self.WAITING:
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_does_not_wait_for_the_device(make, layout):
    module, data = make()
    data.rows.layout = layout
    _built(module, data)
    module.log = lambda *args, **options: None
    batch = next(iter(data.train_dataloader()))
    with Syncs() as syncs:
        module.training_step(batch, 0).backward()
    # Transformers looks whether a mask has padding; the layouts of ours give it nothing to look at.
    assert bool(syncs.found) == (layout == "padded"), syncs.found


def test_the_layouts_train_alike(make):
    ends = {}
    for layout in LAYOUTS:
        module, data = make(lora=LoraSpec(r=4, alpha=8))
        data.layout = data.rows.layout = layout
        fit(module, data, max_epochs=3)
        ends[layout] = full_state(module)
    for layout in ("packed", "shared"):
        for name, value in ends["padded"].items():
            assert (ends[layout][name] - value).abs().max() < 1e-4, f"{layout}: {name}"
    start = _built(*make()).head.bases
    assert (ends["padded"]["head.bases"] - start).abs().max() > 1e-2


def test_shared_rows_hold_fewer_tokens(make):
    _, data = make(batch_size=12)
    data.setup("fit")
    widths = {}
    for layout in LAYOUTS:
        data.rows.layout = layout
        widths[layout] = next(iter(data.train_dataloader()))["input_ids"].numel()
    assert widths["shared"] < 0.6 * widths["packed"] <= 0.6 * widths["padded"]


def test_a_backbone_that_cannot_share_falls_back_or_is_refused(make, monkeypatch, caplog):
    monkeypatch.setattr("prm.backbones.Backbone.rows_differ", lambda self: "this model counts positions by itself")
    module, data = make()
    with caplog.at_level("WARNING"):
        fit(module, data)
    assert "counts positions by itself: every text gets a row of its own" in caplog.text
    assert data.rows.layout == "padded"
    module, data = make()
    data.layout = "shared"
    with pytest.raises(UserError, match=r"data\.layout shared: this model counts positions by itself; use padded"):
        fit(module, data)


def test_flex_attention_by_name_needs_cuda(make):
    module, data = make(attention="flex_attention")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UserError, match="FlexAttention trains on CUDA"):
        fit(module, data)


def test_an_encoder_is_trained_on_padded_texts(toy_dir, minilm_path):
    module = RewardModelModule(str(minilm_path), GlobalBT, pooling="mean", dtype="float32")
    data = PreferenceDataModule(toy_dir, str(minilm_path), batch_size=4, max_length=64)
    fit(module, data, max_steps=1)
    assert data.rows.layout == "padded"
    data = PreferenceDataModule(toy_dir, str(minilm_path), batch_size=4, max_length=64, layout="shared")
    module = RewardModelModule(str(minilm_path), GlobalBT, pooling="mean", dtype="float32")
    with pytest.raises(UserError, match="bidirectional encoder"):
        fit(module, data, max_steps=1)


def test_a_partitioned_load_needs_stage_3(make):
    module, data = make(load_partitioned=True)
    with pytest.raises(UserError, match="deepspeed_stage_3"):
        fit(module, data)
