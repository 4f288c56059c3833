"""How far one large gradient in a block throws its neighbours off: `python -m benchmarks.outliers`.

In each run of 128 elements one gradient is 1.0 and the others are `small`; after 20 or 1,000 steps of AdamW at lr 1e-3
exact neighbours have moved by lr at each. `spike` has one gradient of 100 at the first step and 0.01 ever after. Ratios
to the move of exact AdamW, over the 31 elements that share a block of 32 with the outlier. Peers run where they can be
imported; they share a scale over 128 to 256 elements.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lowbit_optim
from lowbit_optim.formats import FORMATS

from .harness import RESULTS, write_csv

STRIDE, RUNS, LR = 128, 64, 1e-3
STEPS = 20, 1000
SCENARIOS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "spike")
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def gradient(scenario: str, step: int) -> Tensor:
    """Return the gradient of one step, of shape (RUNS, STRIDE)."""
    small, large = (0.01, 100.0 if step == 0 else 0.01) if scenario == "spike" else (float(scenario), 1.0)
    grad = torch.full((RUNS, STRIDE), small)
    grad[:, 0] = large
    return grad


def optimizers() -> Iterator[tuple[str, Make]]:
    """Yield (name, constructor) of every format and of the peers that are installed."""
    for state in FORMATS:
        yield state, partial(lowbit_optim.AdamW, lr=LR, weight_decay=0.0, state=state)
    peers = {
        "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
        "torchao AdamWFp8": ("torchao.optim", "AdamWFp8"),
        "torchao AdamW4bit": ("torchao.optim", "AdamW4bit"),
        "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
    }
    for name, (module, cls) in peers.items():
        try:
            yield name, partial(getattr(importlib.import_module(module), cls), lr=LR, weight_decay=0.0)
        except ImportError as error:
            print(f"{name} is left out: {error}")


def moves(make: Make, scenario: str) -> dict[int, Tensor]:
    """Return the neighbours' moves after each number of `STEPS`."""
    param = torch.nn.Parameter(torch.zeros(RUNS, STRIDE))
    optimizer = make([param])
    found = {}
    for step in range(STEPS[-1]):
        param.grad = gradient(scenario, step)
        optimizer.step()
        if step + 1 in STEPS:
            found[step + 1] = -param.detach()[:, 1:32].double()
    return found


def main() -> None:
    """Measure, print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "outliers.csv")
    options = parser.parse_args()
    # Torchao compiles its step once for each number of steps that it has seen; eager is the same arithmetic.
    torch.compiler.set_stance("force_eager")
    exact = {scenario: moves(partial(torch.optim.AdamW, lr=LR, weight_decay=0.0), scenario) for scenario in SCENARIOS}
    rows: list[dict[str, Any]] = []
    table = Table("format", "steps", *SCENARIOS, title="neighbours' move: mean (least to most)")
    for name, make in track(list(optimizers())):
        found = {scenario: moves(make, scenario) for scenario in SCENARIOS}
        for steps in STEPS:
            cells = []
            for scenario in SCENARIOS:
                move = found[scenario][steps] / exact[scenario][steps]
                mean, least, most = (round(value.item(), 3) for value in (move.mean(), move.min(), move.max()))
                rows.append(
                    {"format": name, "steps": steps, "small": scenario, "mean": mean, "least": least, "most": most}
                )
                cells.append(f"{mean:.3f} ({least:.2f} to {most:.2f})")
            table.add_row(name, str(steps), *cells)
    Console(width=180).print(table)
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
