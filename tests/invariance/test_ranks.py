"""Two ranks train what one rank trains that accumulates two batches; one start of torchrun for all methods."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two_ranks(invariance_data, tiny_llama_path, all_methods, method_arguments, tmp_path_factory):
    found = {f"{c.__module__}.{c.__qualname__}": method_arguments(c) for c in all_methods}
    out = tmp_path_factory.mktemp("ranks") / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("two_ranks.py"))
    done = subprocess.run(
        [*command, script, str(out), str(invariance_data), str(tiny_llama_path), json.dumps(found)],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_two_ranks_are_one_rank_with_two_batches(method, train, two_ranks):
    one = train(method, batch_size=4, accumulate=2, layout="shared")
    two = two_ranks[f"{method.__module__}.{method.__qualname__}"]
    assert two["losses"] == pytest.approx(one.losses, abs=1e-5)
    # 20 validation pairs in batches of 16 over two ranks: figures over unique pairs.
    assert two["figures"] == pytest.approx(one.figures, abs=1e-4)
    for name, values in two["weights"].items():
        assert float((torch.tensor(values) - one.weights[name].flatten()).abs().max()) < 1e-4, name
