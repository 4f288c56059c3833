"""The GPU script, rehearsed on CPU in the interpreter: it runs to its end and writes what it should."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.common import RECIPES

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.interpreter
def test_rehearsal_writes_every_table(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "benchmarks/gpu/run_all.sh"), "--tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

    def rows(name: str) -> list[dict[str, str]]:
        assert (tmp_path / name).with_suffix(".md").read_text().count("|") > 20
        return list(csv.DictReader((tmp_path / name).with_suffix(".csv").read_text().splitlines()))

    steps, runs = rows("step_time"), rows("train")
    assert [row["recipe"] for row in steps if row["impl"] == "lowbit_optim"] == list(RECIPES)
    assert {row["recipe"] for row in runs} == {"torch fp32", "torch bf16", *RECIPES}
    assert all(float(row["median_ms"]) > 0 and float(row["bytes_per_param"]) > 5 for row in steps)
    # Two steps from the same weights on the same batches: no recipe can be far from another.
    losses = [float(row["valid_loss"]) for row in runs]
    assert max(losses) - min(losses) < 0.1
    parts = list(csv.DictReader((tmp_path / "parts.csv").read_text().splitlines()))
    assert [(part["part"], part["status"]) for part in parts] == [("step_time", "0"), ("train", "0")]
