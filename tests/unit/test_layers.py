"""The order of imports, and what must not stand in the code, held by walking the syntax tree of every module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prm import extras
from prm.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]

# A module imports only from the lines above its own, and from its own package. Imports in functions count.
LAYERS: list[set[str]] = [
    {"errors"},
    {"extras", "progress"},
    {"records", "store", "statistics", "provenance"},
    {"dataset_dir", "formatting"},
    {"packing"},
    {"backbones", "losses"},
    {"retrieval", "preference_accuracy"},
    {"reward_models"},
    {"user_states"},
    {"features", "adaptation", "feature_cache"},
    {"frozen_features"},
    {"checkpoints", "tracking"},
    {"training", "inference"},
    {"export"},
    {"evaluation"},
    {"report"},
    {"commands"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
OUTERMOST = {"commands", "cli"}
HEAVY = ("torch", "transformers", "mlflow", "lightning", "vllm", "peft", "deepspeed")

Modules = dict[str, ast.Module]


def _modules(*folders: str) -> Modules:
    """Dotted name -> syntax tree of every Python file below these folders."""
    found: Modules = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


PRM = _modules("prm")
DATA_MODULES = _modules("data_modules")
ALL = _modules("prm", "data_modules", "recipes")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _unit(name: str) -> str | None:
    """The entry of LAYERS that a dotted name belongs to: None for `prm` itself and what its __init__ defines."""
    parts = name.split(".")
    if parts[0] != "prm" or len(parts) == 1 or (len(parts) == 2 and f"prm.{parts[1]}" not in PRM):
        return None
    return parts[1]


def _broken_order(modules: Modules) -> list[str]:
    """Imports against the order of LAYERS."""
    broken = []
    for module, tree in modules.items():
        own = _unit(module)
        for line, name in _imports(tree):
            other = _unit(name)
            if other is None or other == own:
                continue
            if own is None or RANK[other] >= RANK[own]:
                broken.append(f"{module}:{line} imports {name}")
    return broken


def _offences(modules: Modules, offends: Callable[[ast.AST], bool]) -> list[str]:
    return [
        f"{module}:{getattr(node, 'lineno', 0)}"
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if offends(node)
    ]


def _python(code: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
    )


# Order


def test_the_table_names_every_module_once() -> None:
    units = {name.split(".")[1] for name in PRM if "." in name}
    assert units == set(RANK), "put the module into LAYERS, after all that it imports"
    assert sum(len(names) for names in LAYERS) == len(RANK)


def test_every_import_follows_the_order() -> None:
    assert _broken_order(PRM) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("prm.store", "import prm.dataset_dir"),
        ("prm.store", "from prm import checkpoints"),
        ("prm.training.module", "from prm.inference.chat import ChatModel"),
        ("prm.inference.chat", "def f():\n    from prm.training import module"),
        ("prm.evaluation.cases", "if True:\n    from prm.report.html import write_report"),
        ("prm", "from prm import store"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, code: str) -> None:
    assert len(_broken_order({module: ast.parse(code)})) == 1


def test_training_and_inference_do_not_import_each_other() -> None:
    assert RANK["training"] == RANK["inference"]
    for module, tree in PRM.items():
        other = {"training": "inference", "inference": "training"}.get(_unit(module) or "")
        assert not [name for _, name in _imports(tree) if other and _unit(name) == other], module


def test_only_the_command_line_knows_the_source_formats() -> None:
    users = {
        module for module, tree in PRM.items() for _, name in _imports(tree) if name.split(".")[0] == "data_modules"
    }
    assert users and {_unit(module) for module in users} <= OUTERMOST


def test_source_formats_do_not_know_what_is_done_with_their_rows() -> None:
    for module, tree in DATA_MODULES.items():
        for line, name in _imports(tree):
            assert name.split(".")[0] != "recipes", f"{module}:{line}"
            unit = _unit(name) or "errors"
            assert RANK[unit] <= RANK["training"] and unit != "inference", f"{module}:{line} imports {name}"


def test_nothing_imports_the_recipes() -> None:
    assert not [m for m, tree in ALL.items() for _, name in _imports(tree) if name.split(".")[0] == "recipes"]


def test_the_table_of_commands_is_the_folder_of_commands() -> None:
    listed = {module for module, _, _ in COMMANDS.values()}
    assert listed == {m for m in PRM if m.startswith("prm.commands.")}
    for extra in {extra for _, _, needed in COMMANDS.values() for extra in needed}:
        assert extra in extras.EXTRAS


# What must not stand in the code


def _named(node: ast.AST, *dotted: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in dotted


def _keyword(node: ast.AST, name: str) -> ast.expr | None:
    """The value given to a keyword in a call or to a string key in a dict display."""
    if isinstance(node, ast.keyword) and node.arg == name:
        return node.value
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                return value
    return None


def _prints(node: ast.AST) -> bool:
    return _named(node, "print")


def _pickles(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        return any(n.split(".")[0] in {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"} for n in names)
    allowed = _keyword(node, "allow_pickle")
    return allowed is not None and not (isinstance(allowed, ast.Constant) and allowed.value is False)


def _loads_pickled_weights(node: ast.AST) -> bool:
    if not (_named(node, "torch.load") or (isinstance(node, ast.ImportFrom) and node.module == "torch")):
        return False
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "load" for alias in node.names)
    assert isinstance(node, ast.Call)
    only = [k.value for k in node.keywords if k.arg == "weights_only"]
    return not (only and isinstance(only[0], ast.Constant) and only[0].value is True)


# Loaders that build plain data only: those of PyYAML, and classes of ours that add checks to them.
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"} | {
    node.name
    for tree in ALL.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
}


def _loads_unsafe_yaml(node: ast.AST) -> bool:
    loaders = [
        f"yaml.{n}" for n in ("load", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all")
    ]
    if _named(node, "yaml.load", "yaml.load_all"):
        assert isinstance(node, ast.Call)
        given = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "Loader")]
        return not (given and ast.unparse(given[0]) in SAFE_LOADERS)
    from_yaml = isinstance(node, ast.ImportFrom) and node.module == "yaml"
    return _named(node, *loaders) or (from_yaml and any(f"yaml.{alias.name}" in loaders for alias in node.names))


def _trusts_remote_code(node: ast.AST) -> bool:
    trust = _keyword(node, "trust_remote_code")
    return trust is not None and not (isinstance(trust, ast.Constant) and trust.value is False)


def _evaluates(node: ast.AST) -> bool:
    return _named(node, "eval", "exec", "builtins.eval", "builtins.exec")


@pytest.mark.parametrize(
    "offends", [_pickles, _loads_pickled_weights, _loads_unsafe_yaml, _trusts_remote_code, _evaluates]
)
def test_no_code_runs_what_it_reads(offends: Callable[[ast.AST], bool]) -> None:
    assert _offences(ALL, offends) == []


def test_only_the_command_line_prints() -> None:
    inner = {name: tree for name, tree in PRM.items() if _unit(name) not in OUTERMOST}
    assert _offences({**inner, **DATA_MODULES}, _prints) == []


@pytest.mark.parametrize(
    ("offends", "code"),
    [
        (_prints, "def f():\n    print(1)"),
        (_pickles, "import pickle"),
        (_pickles, "def f():\n    from cloudpickle import loads"),
        (_pickles, "np.load(p, allow_pickle=True)"),
        (_loads_pickled_weights, "torch.load(p)"),
        (_loads_pickled_weights, "torch.load(p, weights_only=False)"),
        (_loads_pickled_weights, "from torch import load"),
        (_loads_unsafe_yaml, "yaml.load(f)"),
        (_loads_unsafe_yaml, "yaml.load(f, yaml.Loader)"),
        (_loads_unsafe_yaml, "yaml.load(f, Loader=MyLoader)"),
        (_loads_unsafe_yaml, "from yaml import unsafe_load"),
        (_trusts_remote_code, "open(n, trust_remote_code=True)"),
        (_trusts_remote_code, "open(n, trust_remote_code=flag)"),
        (_trusts_remote_code, "options = {'trust_remote_code': True}"),
        (_evaluates, "eval('1')"),
        (_evaluates, "exec(text)"),
    ],
)
def test_each_offence_is_found(offends: Callable[[ast.AST], bool], code: str) -> None:
    assert len(_offences({"m": ast.parse(code)}, offends)) == 1


@pytest.mark.parametrize(
    ("offends", "code"),
    [
        (_loads_pickled_weights, "torch.load(p, weights_only=True)"),
        (_loads_unsafe_yaml, "yaml.safe_load(f)"),
        (_loads_unsafe_yaml, "yaml.load(f, Loader=yaml.SafeLoader)"),
        (_trusts_remote_code, "open(n, trust_remote_code=False)"),
        (_evaluates, "model.eval()"),
    ],
)
def test_what_is_allowed_is_no_offence(offends: Callable[[ast.AST], bool], code: str) -> None:
    assert _offences({"m": ast.parse(code)}, offends) == []


# What an import costs

CORE = ("errors", "extras", "progress", "records", "store", "statistics", "dataset_dir", "formatting", "retrieval")


def test_the_core_and_all_commands_import_without_anything_heavy() -> None:
    names = ["prm", *(f"prm.{name}" for name in CORE), "prm.cli", *(module for module, _, _ in COMMANDS.values())]
    done = _python(
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} imports {loaded}'\n"
    )
    assert done.returncode == 0, done.stderr


def test_help_imports_nothing_heavy() -> None:
    done = _python(
        "import sys\n"
        "from prm.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        f"loaded = [name for name in (*{HEAVY}, 'numpy', 'pyarrow') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_help_takes_less_than_two_seconds() -> None:
    """The best of three, as other work may share the machine."""
    taken = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "prm.cli", "--help"], cwd=ROOT, capture_output=True, check=False, timeout=60
        )
        taken.append(time.monotonic() - started)
        assert done.returncode == 0
    assert min(taken) < 2.0


@pytest.mark.slow
def test_every_module_imports() -> None:
    absent = [name for extra in ("train", "track", "report") for name in extras.missing(extra)]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    names = [*PRM, *DATA_MODULES]
    assert len(names) > 60
    done = _python(
        "import importlib, traceback\n"
        f"for name in {names}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException:\n"
        "        traceback.print_exc()\n"
        "        raise SystemExit(name)\n",
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Folders


def test_the_mlflow_folder_does_not_shadow_the_library() -> None:
    assert (ROOT / "mlflow").is_dir()
    assert not list((ROOT / "mlflow").rglob("*.py"))


def test_recipes_are_run_and_not_imported() -> None:
    done = _python("import recipes")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: recipes are run, not imported")


CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))


def test_there_are_recipe_settings() -> None:
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.relative_to(ROOT / "recipes" / "configs").as_posix())
def test_a_recipe_setting_opens_with_how_to_start_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    opening = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    text = re.sub(r" *\\\n# *", " ", "\n".join(opening))
    own = path.relative_to(ROOT).as_posix()
    assert re.search(rf"torchrun .*recipes/\w+\.py fit .*--config {re.escape(own)}(\s|$)", text), (
        f"the comment that opens {own} needs its torchrun line with --config {own}"
    )
    for word in ("Hardware:", "Time:", "Expected:"):
        assert word in text, f"the comment that opens {own} does not say {word}"
    assert not re.search(r"@[A-Z]+@", text), f"{own} still has a placeholder"
