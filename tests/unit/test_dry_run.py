"""`--dry-run`: its figures are those of the run, and it needs neither weights nor a place to write."""

import json
import shutil

import pytest
import torch

from data_modules.preference_data import PreferenceDataModule
from prm.backbones import LoraSpec
from prm.reward_models import LoRE
from prm.training import cli
from prm.training.dry_run import SavedForBackward, Tokens, activations, count_tokens, memory, parts
from prm.training.module import RewardModelModule


def a_module(path, **options):
    options = {"lora": LoraSpec(r=4, alpha=8), "dtype": "float32"} | options
    return RewardModelModule(str(path), lambda d: LoRE(d, 3), **options)


def empty(module, num_users=5):
    module.empty = True
    module.build(num_users)
    return module


def real(module, num_users=5):
    module.build(num_users)
    return module


@pytest.fixture(scope="module")
def data(synthetic_dir, tiny_llama_path):
    module = PreferenceDataModule(str(synthetic_dir), str(tiny_llama_path), batch_size=4)
    module.setup("fit")
    return module


def test_the_empty_model_has_the_parameters_of_the_real_one(tiny_llama_path):
    shapes, built = empty(a_module(tiny_llama_path)), real(a_module(tiny_llama_path))
    assert parts(shapes) == parts(built)
    assert parts(shapes)["adapter"].trainable == sum(p.numel() for p in built.backbone.parameters() if p.requires_grad)
    assert parts(shapes)["users"].parameters == 5 * 3
    assert all(p.is_meta for p in shapes.backbone.parameters())


def test_the_empty_model_needs_no_weights(tiny_llama_path, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_llama_path, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert parts(empty(a_module(bare)))["backbone"].parameters > 0


def test_an_encoder_can_be_planned(minilm_path):
    shapes = empty(a_module(minilm_path, pooling="mean"))
    assert parts(shapes) == parts(real(a_module(minilm_path, pooling="mean")))


def numbers(*sizes, trainable=False, dtype=torch.float32):
    return [torch.nn.Parameter(torch.empty(n, dtype=dtype, device="meta"), requires_grad=trainable) for n in sizes]


def test_memory_by_hand():
    large, small, trained = 1_000_000, 1_000, 2_000
    model = numbers(large, small, dtype=torch.bfloat16) + numbers(trained, trainable=True)
    weights = 2 * large + 2 * small + 4 * trained
    kinds = ("weights", "gradients", "optimizer", "buffers", "gathered")

    def found(gpus, stage):
        use = memory(model, gpus, stage, bucket=10)
        assert use.total == sum(getattr(use, kind) for kind in kinds)
        return tuple(getattr(use, kind) for kind in kinds)

    assert found(1, 0) == (weights, 4 * trained, 8 * trained, 0, 0)
    assert found(4, 0) == (weights, 4 * trained, 8 * trained, 4 * trained, 0)
    assert found(4, 1) == (weights, 4 * trained, 12 * 500, 40, 0)
    assert found(4, 2) == (weights, 4 * 500, 12 * 500, 40, 0)
    # What is small stays whole on each GPU; the large weight is gathered while it is used.
    assert found(4, 3) == (2 * 250_000 + 2 * small + 4 * trained, 4 * 500, 12 * 500, 40, 2 * large)


def test_a_model_beyond_deepspeeds_limit_is_never_gathered_whole():
    layers = numbers(*[300_000_000] * 10, dtype=torch.bfloat16)
    use = memory(layers, 8, 3)
    assert use.gathered == 2 * 900_000_000
    assert use.weights == 2 * 10 * 37_500_000


def test_memory_without_zero_is_that_of_a_real_step(tiny_llama_path, data):
    module = real(a_module(tiny_llama_path), len(data.user_ids))
    optimizer = torch.optim.AdamW(module.parameter_groups())
    chosen, rejected, users = module(data.split_tokens("train").collate([0, 1, 2, 3]))
    module.head.loss(chosen, rejected, users).backward()
    optimizer.step()
    use = memory(list(module.parameters()), 1, 0)
    assert use.weights == sum(p.nbytes for p in module.parameters())
    assert use.gradients == sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k.startswith("exp_avg")]
    assert use.optimizer == sum(v.nbytes for v in moments)


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_activations_without_weights_are_those_of_a_real_forward(layout, tiny_llama_path, data):
    data.rows.layout = layout
    batch = data.split_tokens("train").collate([0, 1, 2, 3])
    planned, scores = activations(empty(a_module(tiny_llama_path)), batch)
    seen, _ = activations(real(a_module(tiny_llama_path)), batch)
    # On the meta device attention is unfused: it keeps scores where the fused kernel keeps its output, T x d a layer.
    assert seen == pytest.approx(planned, rel=0.15)
    assert scores > 0


def test_checkpointed_layers_keep_less(tiny_llama_path, data):
    batch = data.split_tokens("train").collate([0, 1, 2, 3])
    plain, _ = activations(empty(a_module(tiny_llama_path)), batch)
    checkpointed, _ = activations(empty(a_module(tiny_llama_path, gradient_checkpointing=True)), batch)
    starts = 2 * batch["input_ids"].numel() * 64 * 4
    assert checkpointed == starts + plain // 2


def test_nothing_is_kept_below_a_frozen_backbone(tiny_llama_path, data):
    assert activations(empty(a_module(tiny_llama_path, lora=None)), data.split_tokens("train").collate([0])) == (0, 0)


def test_what_is_kept_is_counted_once():
    x = torch.ones(10, requires_grad=True)
    layer = torch.nn.Linear(10, 10)
    with SavedForBackward(layer, 7) as saved:
        y = layer(x)
        (y.exp() * y.exp()).sum()
    # x; y is not kept; both exponentials, each for itself and for the product. The weight is a parameter.
    assert saved.bytes == 3 * 40


def test_tokens_by_hand(data):
    tokens = data.split_tokens("train")
    batches = [[0, 1], [2, 3, 4]]
    texts = [[tokens.sequences[n] for n in tokens.text_numbers(ids)] for ids in batches]
    columns = [len(rows) * max(map(len, rows)) for rows in texts]
    real_ones = sum(len(row) for rows in texts for row in rows)
    assert count_tokens(tokens, batches, "padded") == Tokens(
        sum(columns) / 2, max(columns), 1 - real_ones / sum(columns)
    )
    shared = count_tokens(tokens, batches, "shared")
    # Each batch holds one or two prompts; with each kept once, less is left than was real before.
    assert shared.mean * 2 < real_ones
    assert 0 <= shared.padding < 0.5


def dry_run(capsys, tmp_path, *options):
    cli.main(
        RewardModelModule, PreferenceDataModule, ["fit", "--run_dir", str(tmp_path / "run"), "--dry-run", *options]
    )
    assert not list(tmp_path.iterdir()), "a dry run wrote something"
    return capsys.readouterr().out


@pytest.fixture
def options(synthetic_dir, tiny_llama_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [
        *("--model.backbone", str(tiny_llama_path), "--data.data", str(synthetic_dir), "--data.batch_size", "4"),
        *("--model.reward_model", "prm.reward_models.lore.LoRE", "--model.lora", "{r: 4, alpha: 8}"),
        *("--trainer.accelerator", "cpu"),
    ]


@pytest.fixture
def deepspeed_device(monkeypatch):
    """DeepSpeed's choice of device goes back to what it was."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("DS_ACCELERATOR")


@pytest.mark.usefixtures("deepspeed_device")
def test_the_recipe_reports_and_writes_nothing(options, capsys, tmp_path):
    out = dry_run(
        capsys, tmp_path, *options, "--trainer.strategy", "deepspeed_stage_3", "--trainer.devices", "2",
        "--trainer.accumulate_grad_batches", "3", "--trainer.gradient_clip_val", "0.5", "--trainer.max_steps", "2",
    )  # fmt: skip
    for said in ("8 users", "LoRE on", "24 pairs a step (4 pairs a batch x 2 CPU ranks x 3 batches accumulated)"):
        assert said in out
    assert "2 steps in all" in out
    assert [line.split()[0:2] for line in out.splitlines() if "ZeRO " in line][-3:] == [
        ["ZeRO", str(n)] for n in (1, 2, 3)
    ]
    config = json.loads(out[out.index("{\n") :])
    assert config["zero_optimization"]["stage"] == 3
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.usefixtures("deepspeed_device")
def test_a_cluster_is_planned_on_a_machine_without_a_gpu(options, capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    cluster = ("--trainer.accelerator", "gpu", "--trainer.devices", "2", "--trainer.num_nodes", "4")
    out = dry_run(capsys, tmp_path, *options, *cluster, "--trainer.strategy", "deepspeed_stage_2")
    assert "x 8 GPUs" in out
    assert "frozen weights in bfloat16" in out
    assert json.loads(out[out.index("{\n") :])["zero_optimization"]["overlap_comm"] is True


def test_cached_features_are_neither_computed_nor_counted(options, capsys, tmp_path):
    out = dry_run(capsys, tmp_path, *options, "--model.lora", "null", "--data.cached_features", "transformers")
    assert "features come from the cache" in out
    assert "no DeepSpeed configuration" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data.batch_size", "1000"], "do not fill one step"),
        (["--data.data", "/nowhere"], "no dataset directory at /nowhere"),
        (["--trainer.strategy", "deepspeed_stage_9"], "deepspeed_stage_9 is not supported"),
    ],
)
def test_what_would_stop_the_run_stops_the_dry_run(more, said, options, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        dry_run(capsys, tmp_path, *options, *more)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_layout_that_the_backbone_does_not_allow_is_refused(options, minilm_path, capsys, tmp_path):
    more = ("--model.backbone", str(minilm_path), "--model.pooling", "mean", "--data.layout", "shared")
    with pytest.raises(SystemExit):
        dry_run(capsys, tmp_path, *options, *more)
    assert "bidirectional encoder" in capsys.readouterr().err
    out = dry_run(capsys, tmp_path, *options, *more[:4])
    assert "padded " in out
