"""How many correction bits, how they are rounded, and which view: `python -m benchmarks.weight_study`.

The suite's `finetune-small-lr` with exact moments, so that the weights are all that differs. After every step of fp32
AdamW each weight is taken apart into a bf16 view, which the next forward pass sees, and a correction, from which the
next step starts. `visible_pct` is the share of fp32's improvement that the views make, `decoded_pct` that of views with
corrections; `distance` is how far the latter end from fp32, as a share of the way that fp32 went.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from lowbit_optim.weights import WEIGHT_MODES, Draws, Extras, Split, WeightMode

from .harness import RESULTS, show, write_csv
from .memory_vs_loss.recipes import HYPER
from .memory_vs_loss.run import distance, validate
from .memory_vs_loss.tasks import TASKS, Settings, train

TASK = TASKS["finetune-small-lr"]
#: A draw of one half: what is rounded with it goes to the nearest.
HALF = torch.tensor(0x8000, dtype=torch.int32)


@dataclass(frozen=True)
class Narrow(Split):
    """Correction bits of any number up to 8; stored they would be packed."""

    def _stored(self, correction: Tensor) -> Extras:
        return (correction.to(torch.int8),)


@dataclass(frozen=True)
class Candidate:
    """A way to keep weights: `bits` beside bf16, and whether what is cut off is drawn or rounded to nearest."""

    view: str
    bits: int
    drawn: bool
    mode: WeightMode


def candidates() -> list[Candidate]:
    """Return all of them, by view and bits."""
    found = [Candidate("none", 0, drawn, WEIGHT_MODES["stochastic"]) for drawn in (True, False)]
    for view in "dithered", "nearest":
        for bits in 4, 6, 8:
            found += [
                Candidate(view, bits, drawn, Narrow(bits=bits, dithered=view == "dithered")) for drawn in (True, False)
            ]
        found.append(Candidate(view, 16, True, WEIGHT_MODES["split16" if view == "nearest" else "split16/dithered"]))
    return found


@dataclass(frozen=True)
class End:
    """Validation losses and weights of a run."""

    start_loss: float
    visible: float
    decoded: float
    start: list[Tensor]
    weights: list[Tensor]


def finetune(candidate: Candidate | None, lr: float, settings: Settings) -> End:
    """Fine-tune; None keeps weights in fp32."""
    problem = TASK.build(settings)
    params = list(problem.model.parameters())
    exact = start = [param.detach().clone() for param in params]
    generator = torch.Generator().manual_seed(settings.seed)

    def draw(param: Tensor) -> Tensor:
        return torch.randint(1 << 16, param.shape, generator=generator, dtype=torch.int32)

    fixed = [draw(param) for param in params]
    optimizer = torch.optim.AdamW(params, lr=lr, fused=True, **HYPER["adamw"])
    start_loss = validate(problem)
    for step in train(problem, optimizer, TASK.steps_in(settings), TASK):
        with torch.no_grad():
            torch._foreach_copy_(params, exact)
            step()
            exact = [param.detach().clone() for param in params]
            if candidate is None:
                continue
            for place, param in enumerate(params):
                step_draw = draw(param) if candidate.drawn else HALF
                draws = Draws(lambda drawn=step_draw: drawn, lambda drawn=fixed[place]: drawn)
                weight, extras = candidate.mode.write(param.detach(), torch.bfloat16, draws)
                exact[place] = candidate.mode.read(weight, extras)
                param.copy_(weight)
    visible = validate(problem)
    with torch.no_grad():
        torch._foreach_copy_(params, exact)
    return End(start_loss, visible, validate(problem), start, exact)


def rows(lrs: list[float], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each learning rate and candidate."""
    for lr in lrs:
        exact = finetune(None, lr, settings)
        for candidate in track(candidates(), f"lr {lr:g}"):
            end = finetune(candidate, lr, settings)
            gained = exact.start_loss - exact.visible
            yield {
                "view": candidate.view,
                "bits": candidate.bits,
                "rounding": "drawn" if candidate.drawn else "nearest",
                "bytes_per_param": 2 + candidate.bits / 8,
                "lr": lr,
                "seed": settings.seed,
                "steps": TASK.steps_in(settings),
                "visible_pct": round(100 * (end.start_loss - end.visible) / gained, 2),
                "decoded_pct": round(100 * (end.start_loss - end.decoded) / gained, 2),
                "distance": round(distance(end.weights, exact.weights, exact.start), 4),
            }


def main() -> None:
    """Measure, print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_study.csv")
    parser.add_argument("--lrs", type=float, nargs="+", default=[*TASK.lrs["adamw"]])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=1, help="divisor of the number of steps")
    options = parser.parse_args()
    measured = list(rows(options.lrs, Settings(options.seed, shrink=options.shrink)))
    show(measured)
    write_csv(options.out, measured)


if __name__ == "__main__":
    main()
