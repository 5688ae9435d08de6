"""The checkpoint directory: reloaded before it is kept, opened without foreign code, users appended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from prm import checkpoints
from prm.backbones import LoraSpec, open_backbone
from prm.checkpoints import load_head, open_checkpoint, read_info, save_checkpoint, with_users
from prm.errors import UserError
from prm.formatting import Formatter
from prm.records import user_prompt
from prm.reward_models import LoRE
from prm.user_states import UserStates

ROWS = [(user_prompt("Name a colour."), "Blue"), (user_prompt("Name a colour."), "A deep and quiet green")]


def _save(path: Path, model: Path, **options: object) -> Path:
    torch.manual_seed(3)
    backbone = open_backbone(str(model), dtype="float32", lora=LoraSpec(r=2))
    backbone.load_adapter_state({k: torch.randn_like(v) * 0.3 for k, v in backbone.adapter_state().items()})
    head = LoRE(backbone.hidden_size, 3)
    users = UserStates(["ada", "bob"], head.initial_users(2, torch.Generator().manual_seed(0)))
    formatter = Formatter(backbone.tokenizer, 96)
    return save_checkpoint(path, backbone=backbone, head=head, users=users, formatter=formatter, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Path:
    return _save(tmp_path_factory.mktemp("checkpoint") / "c", tiny_llama_path, info={"metrics": {"a": 1.0}})


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def _edit(path: Path, **changes: object) -> None:
    info = json.loads((path / "prm.json").read_text())
    (path / "prm.json").write_text(json.dumps({**info, **changes}))


def test_it_holds_what_was_promised_and_no_pickle(saved: Path) -> None:
    names = {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()}
    assert {"prm.json", "head.safetensors", "adapter/adapter_model.safetensors", "users/manifest.json"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pkl", ".ckpt"))]
    info = read_info(saved)
    assert info["class_path"] == "prm.reward_models.lore.LoRE"
    assert info["arguments"] == {"feature_dim": 64, "num_bases": 3}
    assert info["metrics"] == {"a": 1.0}
    assert str(Path.home()) not in (saved / "adapter" / "adapter_config.json").read_text()


def test_reopened_scores_equal_and_do_not_depend_on_the_batch(saved: Path) -> None:
    first, second = open_checkpoint(saved), open_checkpoint(saved)
    users = ["ada", "bob"]
    assert first.rewards(users, ROWS).tolist() == second.rewards(users, ROWS).tolist()
    alone = [float(first.rewards([u], [row])[0]) for u, row in zip(users, ROWS, strict=True)]
    assert first.rewards(users, ROWS).tolist() == pytest.approx(alone, abs=1e-5)
    assert first.rewards(["ada"], ROWS[:1])[0] != pytest.approx(first.rewards(["bob"], ROWS[:1])[0], abs=1e-4)
    torch.testing.assert_close(torch.tensor(checkpoints.probe_scores(first)), torch.tensor(read_info(saved)["probe"]))


def test_a_save_whose_reload_scores_differently_is_not_kept(
    tmp_path: Path, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints.open_checkpoint

    def damaged(path: Path, **options: object) -> object:
        checkpoint = real(path, **options)  # type: ignore[arg-type]
        state = checkpoint.backbone.adapter_state()
        checkpoint.backbone.load_adapter_state({k: v + 0.1 for k, v in state.items()})
        return checkpoint

    monkeypatch.setattr(checkpoints, "open_checkpoint", damaged)
    with pytest.raises(RuntimeError, match="not kept"):
        _save(tmp_path / "c", tiny_llama_path)
    assert list(tmp_path.iterdir()) == []


def test_gathered_weights_replace_the_live_ones(tmp_path: Path, tiny_llama_path: Path) -> None:
    """Weights that are not the live model's must be noticed by the comparison of scores."""
    backbone = open_backbone(str(tiny_llama_path), dtype="float32", lora=LoraSpec(r=2))
    other = {k: torch.randn_like(v) for k, v in backbone.adapter_state().items()}
    with pytest.raises(RuntimeError, match="not kept"):
        _save(tmp_path / "c", tiny_llama_path, adapter_state=other)


def test_an_existing_checkpoint_is_kept_unless_overwrite(copy: Path, tiny_llama_path: Path) -> None:
    before = checkpoints.fingerprint(copy)
    with pytest.raises(UserError, match="--overwrite"):
        _save(copy, tiny_llama_path)
    assert checkpoints.fingerprint(copy) == before
    _save(copy, tiny_llama_path, overwrite=True)


def test_users_are_appended_and_unknown_ones_refused(saved: Path, tmp_path: Path) -> None:
    new = UserStates(["eve"], torch.tensor([[1.0, 2.0, 3.0]]))
    out = with_users(saved, tmp_path / "more", new, {"adaptation": {"users": 1}})
    _, users, info = load_head(out)
    assert users.ids == ["ada", "bob", "eve"]
    assert users.rows(["eve"]).tolist() == [[1.0, 2.0, 3.0]]
    assert info["adaptation"] == {"users": 1}
    assert info["metrics"] == {"a": 1.0}
    with pytest.raises(UserError, match="unknown user 'zoe'"):
        open_checkpoint(out).rewards(["zoe"], ROWS[:1])
    with pytest.raises(UserError, match="itself"):
        with_users(saved, saved, new, {})


@pytest.mark.parametrize(
    ("class_path", "message"),
    [
        ("os.system", "outside prm"),
        ("prmevil.Head", "outside prm"),
        ("prm.errors.UserError", "is no FeatureReward"),
        ("prm.reward_models.lore.Missing", "cannot be imported"),
        ("prm..x", "not a class path"),
        ("__import__('os')", "not a class path"),
    ],
)
def test_class_paths_are_checked(copy: Path, class_path: str, message: str) -> None:
    _edit(copy, class_path=class_path)
    with pytest.raises(UserError, match=message):
        load_head(copy)


def test_foreign_code_is_not_even_imported(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evilcode.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _edit(copy, class_path="evilcode.Head")
    with pytest.raises(UserError, match="--allow-code evilcode"):
        load_head(copy)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="cannot be imported"):
        load_head(copy, allow_code=["evilcode"])
    assert (tmp_path / "ran").exists()


def test_damage_is_one_line(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no prm\.json"):
        read_info(tmp_path)
    info = read_info(copy)
    _edit(copy, schema_version=99)
    with pytest.raises(UserError, match="schema version 99"):
        read_info(copy)
    _edit(copy, schema_version=info["schema_version"], kind="router")
    with pytest.raises(UserError, match="router checkpoint"):
        read_info(copy)
    _edit(copy, kind="reward_model", arguments={"feature_dim": 64, "num_bases": 5})
    with pytest.raises(UserError, match="does not fit"):
        load_head(copy)
    _edit(copy, arguments=info["arguments"])
    (copy / "head.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(UserError, match="damaged"):
        load_head(copy)
    (copy / "prm.json").write_text('{"schema_version": 1')
    with pytest.raises(UserError, match="damaged"):
        read_info(copy)


def test_a_backbone_that_changed_since_training_is_refused(copy: Path, tiny_llama_path: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama_path, tmp_path / "model"))
    info = read_info(copy)
    _edit(copy, backbone={**info["backbone"], "name": str(model)})
    assert open_checkpoint(copy)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match="weights changed"):
        open_checkpoint(copy)


def test_a_pip_backbone_of_a_checkpoint_must_stand_in_our_table(copy: Path) -> None:
    info = read_info(copy)
    _edit(copy, backbone={**info["backbone"], "name": "pip:some-other-package"})
    with pytest.raises(UserError, match="known packages"):
        open_checkpoint(copy)


def test_damaged_users_are_one_line(copy: Path) -> None:
    manifest = json.loads((copy / "users" / "manifest.json").read_text())
    manifest["parts"][0]["count"] = 7
    (copy / "users" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="7 expected"):
        load_head(copy)
