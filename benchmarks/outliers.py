"""How far one large gradient in a block throws its neighbours off: `python -m benchmarks.outliers`.

In each run of 128 elements one gradient is 1.0 and the others are `small`; after 20 steps of AdamW at lr 1e-3 exact
neighbours have moved by 0.02. `spike` has one gradient of 100 at the first step and 0.01 ever after; exact neighbours
then move by 0.02 too. Ratios to the exact move, over the 31 elements that share a block with the outlier.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lowbit_optim
from lowbit_optim.formats import FORMATS

from .harness import RESULTS, write_csv

STRIDE, RUNS, STEPS, LR = 128, 64, 20, 1e-3
SCENARIOS = ("1e-2", "1e-3", "1e-4", "1e-5", "spike")


def gradient(scenario: str, step: int) -> Tensor:
    """Return the gradient of one step, of shape (RUNS * STRIDE,)."""
    small, large = (0.01, 100.0 if step == 0 else 0.01) if scenario == "spike" else (float(scenario), 1.0)
    grad = torch.full((RUNS, STRIDE), small)
    grad[:, 0] = large
    return grad.view(-1)


def neighbours_move(state: str, scenario: str) -> Tensor:
    """Return the moves of the outliers' neighbours as shares of the exact move."""
    param = torch.nn.Parameter(torch.zeros(RUNS * STRIDE))
    optimizer = lowbit_optim.AdamW([param], lr=LR, weight_decay=0.0, state=state, backend="eager")
    for step in range(STEPS):
        param.grad = gradient(scenario, step)
        optimizer.step()
    return -param.detach().view(RUNS, STRIDE)[:, 1:32] / (LR * STEPS)


def main() -> None:
    """Measure, print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "outliers.csv")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("format", *SCENARIOS, title="neighbours' move: mean (least to most)")
    for name in FORMATS:
        cells = []
        for scenario in SCENARIOS:
            move = neighbours_move(name, scenario)
            mean, least, most = (round(value.item(), 3) for value in (move.mean(), move.min(), move.max()))
            rows.append({"format": name, "small": scenario, "mean": mean, "least": least, "most": most})
            cells.append(f"{mean:.3f} ({least:.2f} to {most:.2f})")
        table.add_row(name, *cells)
    Console(width=140).print(table)
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
