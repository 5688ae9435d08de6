"""The README's first experiment, run as it stands: two ranks of DeepSpeed, real vLLM, a real MLflow store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prm.extras import missing

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- run -->\n```bash\n(.*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(1500)
def test_the_readmes_commands_run(tmp_path: Path, smollm2_path: Path, minilm_path: Path) -> None:
    if absent := [name for extra in ("train", "eval", "track", "report") for name in missing(extra)]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    blocks = MARK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) == 8
    # A directory that looks like the project's root, so that the README's relative paths land in a scratch place.
    for name in ("recipes", "mlflow", "prm", "data_modules"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "set -euo pipefail\n" + "\n".join(blocks)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"

    summary = json.loads((tmp_path / "evaluations/first/summary.json").read_text())
    assert summary["synthetic"] is True
    assert set(summary["methods"]) == {"plain", "icl", "icl_rag", "guided[lore]"}
    assert all(0 < figures["rouge1"]["mean"] < 1 for figures in summary["methods"].values())
    assert summary["rm_accuracy"]["lore"]["num_users"] == 8
    assert summary["rm_accuracy"]["lore"]["num_rows"] == 64
    verdict = json.loads((tmp_path / "evaluations/first/verdict.json").read_text())
    assert len(verdict["gates"]) >= 3
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "synthetic" in page.lower()
    assert "Traceback" not in done.stderr
    checkpoint = json.loads((tmp_path / "checkpoints/first/prm.json").read_text())
    assert checkpoint["adaptation"]["users"] == 8
    assert (tmp_path / "runs/first/config.yaml").is_file()
    assert "zero_optimization" in done.stdout and "GPU" in done.stdout
    frozen = json.loads((tmp_path / "runs/frozen/checkpoints/best/prm.json").read_text())
    assert frozen["backbone"]["lora"] is None
    other = json.loads((tmp_path / "runs/pref/checkpoints/best/prm.json").read_text())
    assert other["class_path"].endswith(".PReF")
    assert (tmp_path / "exports/first/model.safetensors").is_file()
