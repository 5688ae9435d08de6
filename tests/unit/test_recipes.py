"""Every YAML of the recipes parses, says what a reader needs, and can be overridden on the command line."""

import importlib
from pathlib import Path

import pytest
import yaml

from data_modules.preference_data import PreferenceDataModule
from prm.training import cli
from prm.training.module import RewardModelModule

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes/configs").rglob("*.yaml"))
OVERLAYS = {"cpu.yaml"}


def parse(*args: str) -> dict:
    """The resolved configuration that `fit ... --print_config` would print."""
    found = {}

    class Stop(Exception):
        pass

    class Parsed(cli.RecipeCLI):
        def before_instantiate_classes(self):
            text = self._parser("fit").dump(self.config["fit"], skip_none=False)
            found.update(yaml.safe_load(text))
            raise Stop

    with pytest.raises(Stop):
        Parsed(RewardModelModule, PreferenceDataModule, ["fit", *args])
    return found


def configs_for(path: Path) -> list[str]:
    base = [] if path.name not in OVERLAYS else ["--config", str(path.with_name("lore.yaml"))]
    return [*base, "--config", str(path)]


def test_there_are_configs():
    assert len(CONFIGS) >= 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_config_parses_and_keeps_its_values(path):
    written, parsed = yaml.safe_load(path.read_text()), parse(*configs_for(path))
    for section in ("model", "data", "trainer"):
        for key, value in written.get(section, {}).items():
            if not isinstance(value, dict):
                assert parsed[section][key] == value, f"{section}.{key}"
    assert parsed["model"]["reward_model"]["class_path"].startswith("prm.reward_models.")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_config_opens_with_what_a_reader_needs(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    for word in ("Launch:", "Hardware:", "Time:", "Expected:"):
        assert word in text, f"{path.name} does not say {word}"
    assert str(path.relative_to(ROOT)) in text


def test_values_can_be_overridden_and_links_hold():
    lore = str(ROOT / "recipes/configs/synthetic/lore.yaml")
    parsed = parse(
        *("--config", lore, "--data.data", "elsewhere", "--seed_everything", "7", "--trainer.max_steps", "10"),
        *("--model.reward_model.init_args.num_bases", "3", "--model.lora.r", "4", "--trainer.strategy", "ddp"),
    )
    assert parsed["data"]["data"] == "elsewhere"
    assert parsed["model"]["reward_model"]["init_args"]["num_bases"] == 3
    assert parsed["model"]["lora"]["r"] == 4
    assert (parsed["trainer"]["max_steps"], parsed["trainer"]["strategy"]) == (10, "ddp")
    assert "backbone" not in parsed["data"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.head_rate", "1"], "--model.head_rate"),
        (["--resume_every", "often"], "resume_every"),
        (["--ckpt_path", "x"], "--ckpt_path"),
        (["--data.batch_size", "many"], "data.batch_size"),
        (["--model.reward_model.class_path", "prm.reward_models.nothing.There"], "model.reward_model"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_status_2(options, said, capsys):
    lore = str(ROOT / "recipes/configs/synthetic/lore.yaml")
    with pytest.raises(SystemExit) as ended:
        cli.RecipeCLI(RewardModelModule, PreferenceDataModule, ["fit", "--config", lore, *options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prm: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trainer.precision", "bf16-mixed"], "model.dtype bfloat16"),
        (["--trainer.enable_checkpointing", "true"], "trainer.enable_checkpointing"),
        (["--data.data", "/nowhere"], "no dataset directory at /nowhere"),
        (["--resume", "auto", "--overwrite", "true"], "--resume goes with neither --overwrite"),
        (["--resume", "/nowhere"], "/nowhere is not a whole resume state"),
        (["--resume_every", "-1"], "--resume_every -1"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_written(options, said, capsys, tmp_path):
    lore = str(ROOT / "recipes/configs/synthetic/lore.yaml")
    with pytest.raises(SystemExit) as ended:
        cli.main(
            RewardModelModule, PreferenceDataModule, ["fit", "--config", lore, "--run_dir", str(tmp_path), *options]
        )
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_directory_with_something_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "old").write_text("kept")
    lore = str(ROOT / "recipes/configs/synthetic/lore.yaml")
    with pytest.raises(SystemExit):
        cli.main(RewardModelModule, PreferenceDataModule, ["fit", "--config", lore, "--run_dir", str(tmp_path)])
    assert "choose another --run_dir" in capsys.readouterr().err
    assert (tmp_path / "old").read_text() == "kept"


def test_what_a_run_leaves_that_never_began_is_no_run(tmp_path):
    assert not cli._holds_a_run(tmp_path / "absent")
    (tmp_path / "mlflow.json").write_text("{}")
    assert not cli._holds_a_run(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    assert cli._holds_a_run(tmp_path)


def test_resume_needs_the_run_directory(capsys):
    lore = str(ROOT / "recipes/configs/synthetic/lore.yaml")
    with pytest.raises(SystemExit):
        cli.main(RewardModelModule, PreferenceDataModule, ["fit", "--config", lore, "--resume", "auto"])
    assert "--resume needs --run_dir" in capsys.readouterr().err


def test_a_directory_without_a_run_is_not_resumed(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("kept")
    lore = str(ROOT / "recipes/configs/synthetic/lore.yaml")
    options = ["--run_dir", str(tmp_path), "--resume", "auto"]
    with pytest.raises(SystemExit):
        cli.main(RewardModelModule, PreferenceDataModule, ["fit", "--config", lore, *options])
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["deepspeed_stage_4", "deepspeed_stage_2_offload"])
def test_deepspeed_stages_that_do_not_work_are_refused(name):
    from prm.errors import UserError
    from prm.training.strategies import deepspeed_strategy

    with pytest.raises(UserError, match="is not supported: use deepspeed"):
        deepspeed_strategy(name, cuda=False, batch_size=1)


def test_recipes_cannot_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ModuleNotFoundError, match="run, not imported"):
        importlib.import_module("recipes")
