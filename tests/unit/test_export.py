"""prm export: what a run left behind becomes the same model elsewhere, or one line says why not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prm import checkpoints, store
from prm.backbones import open_backbone
from prm.checkpoints import open_checkpoint, read_info, save_checkpoint
from prm.cli import main
from prm.dataset_dir import DatasetDir, write_dataset
from prm.errors import UserError
from prm.export import hugging_face, rebuild, zero
from prm.export.hugging_face import load_exported_head
from prm.export.sources import find_source
from prm.formatting import Formatter
from prm.records import PreferencePair, User, user_prompt
from prm.reward_models import GlobalBT
from prm.user_states import UserStates

STEPS = 4
ROW = (user_prompt("Title of matter 3"), "On matter 3")
TENSORS = ("head.safetensors", "adapter/adapter_model.safetensors", "users/part-0.safetensors")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = []
    for number in range(3):
        for i in range(6):
            titles = (f"On matter {i}", f"Matter {i}: why does it matter?")
            chosen, rejected = titles[:: 1 if number % 2 else -1]
            split, prompt = "train" if i else "validation", user_prompt(f"Title of matter {i}")
            pairs.append(PreferencePair(f"{number}/{i}", f"user-{number}", split, prompt, chosen, rejected))
    users = [User(f"user-{number}", "train") for number in range(3)]
    out = tmp_path_factory.mktemp("data") / "toy"
    write_dataset(out, name="toy", pairs=pairs, completions=[], users=users, source="made", licence="CC0", seed=0)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path, data: Path) -> Path:
    """A run directory of the recipe, with an adapter that is far from nothing."""
    from data_modules.preference_data import PreferenceDataModule
    from prm.training.cli import RecipeCLI
    from prm.training.module import RewardModelModule

    out = tmp_path_factory.mktemp("runs") / "run"
    options = {
        "model.backbone": tiny_llama_path, "model.reward_model": "prm.reward_models.LoRE", "model.lora.r": 4,
        "model.adapter_lr": 3e-2, "model.user_lr": 1e-1, "data.data": data, "data.batch_size": 3,
        "data.max_length": 64, "trainer.accelerator": "cpu", "trainer.max_steps": STEPS, "trainer.logger": "false",
        "resume_every": 2, "run_dir": out,
    }  # fmt: skip
    arguments = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    RecipeCLI(RewardModelModule, PreferenceDataModule, ["fit", *arguments])
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """`export(source, ...)` runs the command and returns its JSON."""

    def call(*words: object) -> dict:
        status = main(["export", *map(str, words), "--json"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        (line,) = captured.out.splitlines()
        return dict(json.loads(line))

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """`refused(source, ...)` runs the command, which must end with one line and leave nothing; it returns the line."""

    def call(*words: object) -> str:
        before = sorted(tmp_path.iterdir())
        assert main(["export", *map(str, words), "--out", str(tmp_path / "out")]) == 2
        captured = capsys.readouterr()
        (line,) = [text for text in captured.err.splitlines() if "passed over" not in text]
        assert line.startswith("prm: error: ") and captured.out == ""
        assert sorted(tmp_path.iterdir()) == before
        return line

    return call


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {f"{file}:{name}": value for file in TENSORS for name, value in load_file(directory / file).items()}


def same(first: Path, second: Path) -> bool:
    a, b = tensors(first), tensors(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewards(checkpoint: Path) -> list[float]:
    opened = open_checkpoint(checkpoint)
    return [float(r) for r in opened.rewards(opened.users.ids, [ROW] * len(opened.users))]


def change_state(state: Path, weights: Callable[[dict], dict] = dict, config: Callable[[dict], object] = bool) -> None:
    """Change weights or the configuration of a resume state, and let its hashes fit again."""
    save_file(weights(load_file(state / "weights.safetensors")), state / "weights.safetensors")
    info = json.loads((state / "state.json").read_text())
    config(info["config"])
    info["files"]["weights.safetensors"] = store.fingerprint_file(state / "weights.safetensors")
    store.write_json(state / "state.json", info)


# A prm checkpoint of a run


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_checkpoint_is_copied_as_it_is(trained, tmp_path, export, which):
    words = [] if which == "best" else ["--which", which]
    report = export(trained, "--out", tmp_path / "out", *words)
    source = trained / "checkpoints" / which
    assert report["directory"] == str(source) and report["source"] == "checkpoint" and report["users"] == 3
    assert checkpoints.fingerprint(tmp_path / "out") == checkpoints.fingerprint(source)
    assert report["data_fingerprint"] == read_info(source)["data_fingerprint"]


def test_the_newest_resume_state_gives_what_training_itself_saved(trained, tmp_path, export):
    out = tmp_path / "out"
    report = export(trained, "--out", out, "--which", "resume")
    last = trained / "checkpoints/last"
    assert (report["source"], report["step"]) == ("resume", STEPS) and report["directory"].endswith(f"resume/{STEPS}")
    assert same(out, last) and rewards(out) == rewards(last)
    info, theirs = read_info(out), read_info(last)
    for key in ("class_path", "arguments", "backbone", "pooling", "formatting", "dtype", "data", "data_fingerprint"):
        assert info[key] == theirs[key], key
    assert info["exported_from"] == {"kind": "resume", "directory": str(STEPS)}
    assert open_checkpoint(out).users.ids == ["user-0", "user-1", "user-2"]


def test_a_killed_run_has_its_resume_states_alone(run, tmp_path, export, refused):
    shutil.rmtree(run / "checkpoints")
    assert f"--which resume (step {STEPS})" in refused(run)
    assert export(run, "--out", tmp_path / "newest", "--which", "resume")["step"] == STEPS
    assert export(run / "resume/2", "--out", tmp_path / "earlier")["step"] == 2
    assert not same(tmp_path / "newest", tmp_path / "earlier")
    shutil.rmtree(run / "resume")
    (run / "checkpoints/last").mkdir(parents=True)
    assert "--which last" in refused(run)
    (run / "checkpoints/last").rmdir()
    assert "before it had saved anything" in refused(run)


def test_a_half_written_state_is_passed_over(run, tmp_path, export, refused):
    newest = run / f"resume/{STEPS}/weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert export(run, "--out", tmp_path / "kept", "--which", "resume")["step"] == 2
    assert "not a whole resume state" in refused(newest.parent)
    (run / "resume/2/state.json").write_text("{")
    assert "holds no whole resume state" in refused(run, "--which", "resume")


def test_the_dtype_of_a_rebuilt_model_can_be_chosen(trained, tmp_path, export):
    report = export(trained, "--out", tmp_path / "out", "--which", "resume", "--dtype", "bfloat16")
    assert report["dtype"] == read_info(tmp_path / "out")["dtype"] == "bfloat16"
    assert same(tmp_path / "out", trained / "checkpoints/last")


def test_what_is_there_is_kept_unless_told_otherwise(run, tmp_path, export, capsys):
    out = tmp_path / "kept"
    out.mkdir()
    (out / "own").write_text("own")
    assert main(["export", str(run), "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err and [p.name for p in out.iterdir()] == ["own"]
    export(run, "--out", out, "--overwrite")
    assert not (out / "own").exists() and (out / "prm.json").is_file()
    before = store.fingerprint_tree(run)
    for place in (run, run / "checkpoints", run / "checkpoints/best", run / "checkpoints/best/users"):
        assert main(["export", str(run), "--out", str(place), "--overwrite"]) == 2
        assert "overlaps" in capsys.readouterr().err
    assert store.fingerprint_tree(run) == before


def test_damage_is_found(run, refused):
    best = run / "checkpoints/best"
    head = load_file(best / "head.safetensors")
    save_file({name: value * 1.01 for name, value in head.items()}, best / "head.safetensors")
    assert "does not give the scores it was written with" in refused(run)
    assert "does not give the scores it was written with" in refused(run, "--format", "hf")
    adapter = best / "adapter/adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-8])
    assert "damaged" in refused(best)
    (best / "prm.json").unlink()
    assert "no prm.json" in refused(run)


# Weights and configuration that do not belong together


def _without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: value for key, value in weights.items() if name not in key}


def _fill(name: str, value: float) -> Callable[[dict], dict]:
    return lambda weights: {k: torch.full_like(v, value) if name in k else v for k, v in weights.items()}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (_without("layers.1.self_attn.q_proj.lora_B"), "holds the weights of another model"),
        (_without("users"), "users.states differs"),
        (lambda w: {**w, "head.bias": torch.zeros(3)}, "head.bias differs"),
        (lambda w: {**w, "users.states": w["users.states"][:2].clone()}, r"users.states has shape \[2, 8\]"),
        (lambda w: {k: v[:0].clone() if "lora_A" in k else v for k, v in w.items()}, r"has shape \[0, 64\]"),
        (_fill("head", float("nan")), "not finite"),
    ],
)
def test_weights_of_another_model_are_refused(run, refused, weights, said):
    change_state(run / f"resume/{STEPS}", weights=weights)
    assert re.search(said, refused(run, "--which", "resume"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda model: model["lora"].update(r=2), r"has shape \[4, 64\], the run's model has \[2, 64\]"),
        (lambda model: model["lora"].update(rank=2), "configuration is not one of a reward model"),
        (lambda model: model.pop("lora"), "configuration is not one of a reward model"),
        (lambda model: model["reward_model"].update(class_path="os.path.Head"), "--allow-code os"),
        (lambda model: model["reward_model"].update(init_args={"rank": 3}), "does not fit prm.reward_models"),
        (lambda model: model.update(backbone="/nowhere/model"), "no model directory at /nowhere"),
    ],
)
def test_a_configuration_of_another_model_is_refused(run, refused, config, said):
    change_state(run / f"resume/{STEPS}", config=lambda c: config(c["model"]))
    assert re.search(said, refused(run, "--which", "resume"))


def test_a_backbone_that_changed_is_refused(run, tmp_path, tiny_llama_path, refused):
    model = Path(shutil.copytree(tiny_llama_path, tmp_path / "model"))
    change_state(run / f"resume/{STEPS}", config=lambda c: c["model"].update(backbone=str(model)))
    for name in ("best", "last"):
        info = read_info(run / "checkpoints" / name)
        info["backbone"]["name"] = str(model)
        store.write_json(run / "checkpoints" / name / "prm.json", info)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    for words in ([], ["--which", "resume"], ["--format", "hf"]):
        assert "weights changed" in refused(run, *words)


# A native ZeRO directory (real ones: tests/distributed/test_export_zero.py)


def _fake_zero(run: Path) -> Path:
    folder = run / "native/checkpoint"
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"no pickle")
    (folder.parent / "latest").write_text("checkpoint")
    return folder.parent


def test_pickles_are_opened_only_when_trusted(run, tmp_path, refused):
    native = _fake_zero(run)
    assert "--trust-pickle" in refused(native)
    assert "cannot be gathered" in refused(native, "--trust-pickle")
    assert "cannot be gathered" in refused(native / "checkpoint", "--trust-pickle")
    (native / "latest").write_text("elsewhere")
    assert "names 'elsewhere'" in refused(native, "--trust-pickle")
    assert "--run" in refused(native, "--run", tmp_path)
    (run / "config.yaml").unlink()
    assert "name its run directory with --run" in refused(native)


def test_prefixes_of_wrappers_are_taken_off(run, monkeypatch):
    from deepspeed.utils import zero_to_fp32

    found = {"_forward_module.module.head.bases": torch.ones(2), "users.states": torch.ones(1, 2).bfloat16()}
    monkeypatch.setattr(zero_to_fp32, "get_fp32_state_dict_from_zero_checkpoint", lambda *_, **__: found)
    weights = zero.zero_weights(_fake_zero(run), trust_pickle=True)
    assert set(weights) == {"head.bases", "users.states"}
    assert all(value.dtype == torch.float32 for value in weights.values())
    found["head.bases"] = torch.ones(2)
    with pytest.raises(UserError, match=r"two weights named head\.bases"):
        zero.zero_weights(run / "native", trust_pickle=True)


def test_users_of_a_zero_directory_come_from_what_the_run_knows(run, data, monkeypatch):
    native, weights = _fake_zero(run), load_file(run / f"resume/{STEPS}/weights.safetensors")
    monkeypatch.setattr(rebuild, "zero_weights", lambda *_, **__: weights)
    written = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(written.replace(str(data), "/nowhere"))
    models = [rebuild.rebuild(find_source(native))]
    shutil.rmtree(run / "resume")
    models.append(rebuild.rebuild(find_source(native)))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="ids come from the run's dataset, and no dataset directory at /nowhere"):
        rebuild.rebuild(find_source(native))
    (run / "config.yaml").write_text(written)
    models.append(rebuild.rebuild(find_source(native, run=run)))
    for model in models:
        assert model.users.ids == ["user-0", "user-1", "user-2"]
        assert torch.equal(model.users.states, weights["users.states"])
        assert model.info["data_fingerprint"] == DatasetDir.open(data).fingerprint
    (run / "config.yaml").write_text("model: [")
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        rebuild.rebuild(find_source(native))


# A model for plain transformers


def run_readme(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """The reward that the code of README.md computes, and the one that it promises."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code
    monkeypatch.chdir(directory)
    names: dict[str, float] = {}
    exec(code[1], names)
    promised = re.search(r"# (-?\d+\.\d+)$", code[1].strip())
    assert promised
    return names["reward"], float(promised[1])


def test_a_merged_model_opens_in_plain_transformers(trained, tiny_llama_path, tmp_path, export, monkeypatch):
    from transformers import AutoModelForCausalLM

    out, source = tmp_path / "out", open_checkpoint(trained / "checkpoints/best")
    report = export(trained, "--out", out, "--format", "hf")
    assert report["largest_feature_difference"] < 1e-5
    assert {p.name for p in out.glob("*.safetensors")} == {"model.safetensors"}
    weights, plain = load_file(out / "model.safetensors"), load_file(tiny_llama_path / "model.safetensors")
    assert weights.keys() == plain.keys()
    adapter = source.backbone.adapter_state()
    for name, value in plain.items():
        low = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{low}.lora_A.weight" in adapter:
            # W + (alpha / r) B A, alpha 16 and r 4.
            value = value + 4.0 * adapter[f"{low}.lora_B.weight"] @ adapter[f"{low}.lora_A.weight"]
            assert (value - plain[name]).abs().max() > 1e-2
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(out)(ids).logits
        torch.testing.assert_close(logits, source.backbone.model(ids).logits, rtol=0, atol=1e-4)
    head, users = load_exported_head(out)
    assert users.ids == source.users.ids and torch.equal(users.states, source.users.states)
    assert all(torch.equal(value, source.head.state_dict()[name]) for name, value in head.state_dict().items())
    reward, promised = run_readme(out, monkeypatch)
    probe = json.loads((out / "prm_export.json").read_text())["probe"][0]
    expected = source.rewards([probe["user"]], [(user_prompt(probe["prompt"]), probe["response"])])[0]
    assert reward == pytest.approx(float(expected), abs=1e-4) == pytest.approx(promised, abs=1e-4)


def test_a_resume_state_is_merged_too_and_in_another_dtype(trained, tmp_path, export):
    export(trained, "--out", tmp_path / "single", "--format", "hf", "--which", "resume")
    half = export(trained, "--out", tmp_path / "half", "--format", "hf", "--which", "resume", "--dtype", "bfloat16")
    assert half["dtype"] == "bfloat16" and 1e-4 < half["largest_feature_difference"] < 6e-2
    wide, narrow = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "half"))
    for name, value in narrow.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), wide[name], rtol=2**-7, atol=1e-3)


def _save(path: Path, model: Path, pooling: str, max_length: int = 96) -> Path:
    backbone = open_backbone(str(model), dtype="float32", pooling=pooling, lora=None)
    head, users = GlobalBT(backbone.hidden_size), UserStates([], torch.zeros(0, 0))
    formatter = Formatter(backbone.tokenizer, max_length, encoder=backbone.encoder)
    return save_checkpoint(path, backbone=backbone, head=head, users=users, formatter=formatter)


def test_without_an_adapter_it_is_the_backbone(tiny_llama_path, tmp_path, export, monkeypatch):
    saved = _save(tmp_path / "saved", tiny_llama_path, "last")
    export(saved, "--out", tmp_path / "out", "--format", "hf")
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "out", tiny_llama_path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    reward, promised = run_readme(tmp_path / "out", monkeypatch)
    assert reward == pytest.approx(promised, abs=1e-4)
    assert reward == pytest.approx(read_info(saved)["probe"][0][0], abs=1e-4)


def test_an_encoder_with_mean_pooling_is_exported(minilm_path, tmp_path, export, monkeypatch):
    saved = _save(tmp_path / "saved", minilm_path, "mean")
    export(saved, "--out", tmp_path / "out", "--format", "hf")
    reward, promised = run_readme(tmp_path / "out", monkeypatch)
    assert reward == pytest.approx(promised, abs=1e-4)
    assert reward == pytest.approx(read_info(saved)["probe"][0][0], abs=1e-4)


def test_a_tokenizer_without_a_chat_template(tiny_llama_path, tmp_path, export, monkeypatch):
    model = Path(shutil.copytree(tiny_llama_path, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    saved = _save(tmp_path / "saved", model, "first", max_length=20)
    export(saved, "--out", tmp_path / "out", "--format", "hf")
    reward, promised = run_readme(tmp_path / "out", monkeypatch)
    assert reward == pytest.approx(promised, abs=1e-4)


@pytest.mark.parametrize("spoil", ["weights", "head", "missing"])
def test_an_export_that_reopens_as_another_model_is_not_kept(trained, tmp_path, monkeypatch, spoil):
    """Files are changed between being written and being read back."""
    real_features, real_head = hugging_face.plain_features, hugging_face.load_exported_head

    def features(directory: Path, *rest: object) -> object:
        weights = load_file(directory / "model.safetensors")
        name = "model.layers.1.self_attn.v_proj.weight"
        if spoil == "weights":
            weights[name] = weights[name] * 1.01
        if spoil == "missing":
            del weights[name]
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return real_features(directory, *rest)

    def head(directory: Path, **options: object) -> object:
        file = directory / "reward/head.safetensors"
        if spoil == "head":
            save_file({name: value + 1e-3 for name, value in load_file(file).items()}, file)
        return real_head(directory, **options)

    monkeypatch.setattr(hugging_face, "plain_features", features)
    monkeypatch.setattr(hugging_face, "load_exported_head", head)
    live = open_checkpoint(trained / "checkpoints/best")
    with pytest.raises(RuntimeError, match=r"not kept|are missing"):
        hugging_face.export_hugging_face(live, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_is_not_finite_is_not_merged(trained, tmp_path):
    live = open_checkpoint(trained / "checkpoints/best")
    state = live.backbone.adapter_state()
    live.backbone.load_adapter_state({name: value * float("inf") for name, value in state.items()})
    with pytest.raises(UserError, match="not finite"):
        hugging_face.export_hugging_face(live, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_not_whole_is_one_line(trained, tmp_path, export):
    with pytest.raises(UserError, match="not a whole export"):
        load_exported_head(trained)
    out = tmp_path / "out"
    export(trained, "--out", out, "--format", "hf")
    facts = json.loads((out / "prm_export.json").read_text())
    store.write_json(out / "prm_export.json", {**facts, "class_path": "os.Head"})
    with pytest.raises(UserError, match="--allow-code os"):
        load_exported_head(out)
    store.write_json(out / "prm_export.json", facts)
    (out / "reward/head.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="not a whole export"):
        load_exported_head(out)


# Wrong use


def test_options_that_would_do_nothing_are_refused(run, tmp_path, refused):
    best = run / "checkpoints/best"
    assert "--which last chooses within a run directory" in refused(best, "--which", "last")
    assert "--which best chooses within a run directory" in refused(run / "resume/2", "--which", "best")
    assert "--run belongs to a native ZeRO directory" in refused(run, "--run", run)
    assert "--run belongs to a native ZeRO directory" in refused(best, "--run", run)
    assert "--dtype does not change a prm checkpoint" in refused(run, "--dtype", "bfloat16")
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "is a file" in refused(run / "config.yaml")
    assert "neither a run directory" in refused(run / "checkpoints")
    assert "neither a run directory" in refused(tmp_path)


def test_the_backbone_is_never_replaced(run, tiny_llama_path, capsys):
    before = store.fingerprint_tree(tiny_llama_path)
    assert main(["export", str(run), "--out", str(tiny_llama_path), "--format", "hf", "--overwrite"]) == 2
    assert "overlaps" in capsys.readouterr().err
    assert store.fingerprint_tree(tiny_llama_path) == before
