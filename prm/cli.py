"""prm: train, adapt, evaluate and promote personalized reward models."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

import prm
from prm import extras
from prm.errors import UserError

# command -> (module, what it does, extras it needs). A module is imported when its command is chosen.
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "data": ("prm.commands.data", "build a dataset directory, or check one", ()),
    "features": ("prm.commands.features", "compute a frozen backbone's features ahead of training", ("train",)),
    "adapt": ("prm.commands.adapt", "add new users to a checkpoint from their support pairs", ("train",)),
    "export": ("prm.commands.export", "a run's weights as a prm checkpoint or a Hugging Face model", ("train",)),
    "score": ("prm.commands.score", "raw rewards of responses, one JSON a line", ("train",)),
    "evaluate": ("prm.commands.evaluate", "generate, score and compare with the users' own texts", ()),
    "register": ("prm.commands.register", "put a checkpoint into MLflow's model registry", ("track",)),
    "promote": ("prm.commands.promote", "move an alias to a version if every gate passes", ("track",)),
    "rollback": ("prm.commands.rollback", "give the alias back to the version before", ("track",)),
    "history": ("prm.commands.history", "what was promoted, refused and rolled back", ("track",)),
    "sync": ("prm.commands.sync", "send what a dead tracking server missed", ("track",)),
    "report": ("prm.commands.report", "one self-contained HTML file of an evaluation", ("report",)),
    "doctor": ("prm.commands.doctor", "what is installed, what works here, how to mend what does not", ()),
}

EPILOG = """training is started by torchrun:
  torchrun --standalone --nproc-per-node 2 recipes/reward_model.py fit --config recipes/configs/pref_lamp/lore.yaml

exit status: 0 done, 1 a gate or a check said no, 2 wrong use (one line says what to do)"""


class _Parser(argparse.ArgumentParser):
    """Wrong use is one line on stderr and exit status 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"prm: error: {message} (see `{self.prog} --help`)\n")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="prm", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"prm {prm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, text, _) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            imported = importlib.import_module(module)
            imported.add_arguments(sub)
            nested = any(isinstance(action, argparse._SubParsersAction) for action in sub._actions)
            if not nested and not any("--json" in action.option_strings for action in sub._actions):
                sub.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = _parser(chosen)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    module, _, needed = COMMANDS[args.command]
    try:
        for extra in needed:
            extras.require(extra, wanted_by=f"prm {args.command}")
        return int(importlib.import_module(module).run(args))
    except UserError as error:
        print(f"prm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away; what is buffered has nowhere to go.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("prm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
