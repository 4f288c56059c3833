"""The GPU script, rehearsed on CPU in the interpreter: it runs to its end and writes what it should."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.byte_lm import Corpus, manual_text
from benchmarks.gpu import offload
from benchmarks.gpu.common import RECIPES
from benchmarks.gpu.train import TINY, loss_of
from lowbit_optim import AdamW8bit, CPUOffloadOptimizer
from lowbit_optim.offload import HostCopier

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu/run_all.sh"


@pytest.mark.slow
@pytest.mark.interpreter
def test_rehearsal_writes_every_table(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(SCRIPT), "--tiny"], env=environment, capture_output=True, text=True, timeout=280)
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
    # A step makes the same of gradients wherever it is made, and whenever they are copied.
    places, tokens = rows("offload"), next(Corpus(manual_text(), TINY.context, TINY.batch).batches(seed=0))
    start = loss_of(offload.make_model(TINY, "cpu"), tokens).item()
    (recipe,) = offload.RECIPES["tiny"]
    found = {row["step"]: float(row["loss"]) for row in places if row["recipe"] == recipe}
    assert list(found) == list(offload.PLACES)
    assert max(found.values()) < start - 0.05
    assert found[offload.WITHIN] == found[offload.AFTER] == pytest.approx(found[offload.DEVICE], abs=1e-3)
    for row in places:
        step = float(row["iteration_ms"]) - float(row["backward_ms"])
        assert float(row["step_ms"]) == pytest.approx(step, abs=2e-3)
        assert (row["hidden_share"] != "") == (row["step"] == offload.WITHIN)
    parts = list(csv.DictReader((tmp_path / "parts.csv").read_text().splitlines()))
    assert [(part["part"], part["status"]) for part in parts] == [
        (name, "0") for name in ("step_time", "train", "offload")
    ]


def test_the_script_stops_every_part_in_time() -> None:
    tiny, full = SCRIPT.read_text().split("\nelse\n")
    for text, parts, end in (tiny, 3, 280), (full, 4, 480):
        stops = [int(second) for second in re.findall(r"^    part (\d+)", text, re.MULTILINE)]
        assert len(stops) == parts
        # Each must have time of its own even if those before it took all of theirs, and five seconds to die.
        assert min(later - earlier for earlier, later in zip([0, *stops], stops, strict=False)) > 60
        assert stops[-1] + 5 < end


@pytest.mark.parametrize(("place", "early"), [(offload.WITHIN, 1), (offload.AFTER, 0)])
def test_offload_is_measured_with_copies_within_backward_and_after_it(place: str, early: int) -> None:
    copied: list[int] = []

    class Recorder(HostCopier):
        def __init__(self, device: torch.device) -> None:
            pass

        def start(self, source: torch.Tensor, target: torch.Tensor) -> Any:
            copied.append(source.numel())
            return super().start(source, target)

    model = offload.make_model(TINY, "cpu")
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, make_copier=Recorder, backend="eager")
    large = sum(param.numel() for param in optimizer.optimizer.param_groups[0]["params"] if param.numel() >= 4096)
    for number in range(2):
        optimizer.zero_grad()
        copied.clear()
        offload.set_gradients(model, torch.full((2, TINY.context + 1), number), place)
        assert sum(copied) == early * large
        optimizer.step()
        # All gradients there, once, and all weights back.
        assert sum(copied) == 2 * large
