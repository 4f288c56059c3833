"""Nearest, dithered or independent rounding, by format and slot: `python -m benchmarks.rounding`.

Moments: exponential moving averages are kept in each format for hundreds or thousands of steps and compared with the
exact ones. Weights: bf16 weights take a thousand small steps. `bias` is the mean error (of the logarithm of sqrt(v)
for second moments, of the gain for first ones, of the distance moved for weights); `error` is the root mean square;
`step` is the mean of 1 / sqrt(v), which steps are in proportion to, relative to exact. The choices in
`lowbit_optim/formats.py` and `dispatch.py` rest on the CSV that this writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lowbit_optim.formats import FORMATS, RATIOS, StateFormat
from lowbit_optim.noise import GOLDEN16, element_index, hash16, make_key, round_bits

from .harness import RESULTS, write_csv

ELEMENTS = 1 << 12
ROUNDINGS = ("nearest", "dither", "independent")


def draw(rounding: str, step: int, index: Tensor) -> Tensor | None:
    """Return the 16-bit draws of one step, or None for nearest rounding."""
    if rounding == "nearest":
        return None
    if rounding == "independent":
        return hash16(index, make_key(1, step))
    return (hash16(index, make_key(1)) + GOLDEN16 * step) & 0xFFFF


def _signals(spread: Tensor, generator: torch.Generator) -> dict[str, Callable[[int], Tensor]]:
    def noise() -> Tensor:
        return torch.randn(ELEMENTS, generator=generator)

    return {
        "noise": lambda step: noise() * spread,
        "drift": lambda step: (1 + noise()) * spread,
        "alternating": lambda step: spread if step % 2 else -spread,
    }


def first_moment(fmt: StateFormat, beta: float, signal: str, rounding: str) -> tuple[float, float]:
    """Return (gain - 1, noise relative to the moment's size) after 300 steps; ratios are to an exact second moment."""
    index, generator = element_index((0,), ELEMENTS, torch.device("cpu")), torch.Generator().manual_seed(0)
    spread = 10 ** (0.25 * torch.randn(ELEMENTS, generator=generator))
    gradient = _signals(spread, generator)[signal]
    stored, exact, second = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(1, 301):
        new = gradient(step)
        exact = exact * beta + new * (1 - beta)
        second = second * 0.999 + new * new * 0.001
        unit = second.sqrt() if fmt.ratio else torch.ones(ELEMENTS)
        stored = unit * fmt.decode(fmt.encode((stored * beta + new * (1 - beta)) / unit, draw(rounding, step, index)))
    power = exact.square().mean()
    gain = (stored * exact).mean() / power
    return gain.item() - 1, ((stored - exact).square().mean() / power).sqrt().item()


def second_moment(fmt: StateFormat, signal: str, rounding: str) -> tuple[float, float, float]:
    """Return mean and rms of ln sqrt(v / exact), and mean sqrt(exact / v), after half of the gradients shrank tenfold.

    1500 steps after, over the elements whose gradients shrank: rounding to nearest leaves them where they were.
    """
    index, generator = element_index((0,), ELEMENTS, torch.device("cpu")), torch.Generator().manual_seed(0)
    spread = 10 ** (0.25 * torch.randn(ELEMENTS, generator=generator))
    stored, exact, shrunk = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), index % 2 == 0
    for step in range(1, 3001):
        new = spread * torch.randn(ELEMENTS, generator=generator) if signal == "noise" else spread
        new = torch.where(shrunk & (step > 1500), 0.1 * new, new).square()
        exact = exact * 0.999 + new * 0.001
        stored = fmt.decode(fmt.encode(stored * 0.999 + new * 0.001, draw(rounding, step, index)))
    error = (stored.clamp_min(1e-30) / exact).sqrt().log()[shrunk]
    return error.mean().item(), error.square().mean().sqrt().item(), (-error).exp().mean().item()


def weight(relative_step: float, signal: str, rounding: str) -> tuple[float, float]:
    """Return bias and rms error of bf16 weights after 1000 steps, relative to the weight."""
    index, generator = element_index((0,), ELEMENTS, torch.device("cpu")), torch.Generator().manual_seed(0)
    start = (1 + torch.rand(ELEMENTS, generator=generator)).bfloat16().float()
    change = _signals(relative_step * start, generator)[signal]
    stored, exact = start, start.double()
    for step in range(1, 1001):
        new = change(step) if signal != "drift" else relative_step * start
        exact = exact + new
        chance = draw(rounding, step, index)
        stored = round_bits(stored + new, 16, 0x8000 if chance is None else chance)
    error = (stored - exact) / start
    return error.mean().item(), error.square().mean().sqrt().item()


def rows() -> Iterator[dict[str, Any]]:
    """Yield one row per format, slot, signal and rounding."""
    for rounding in ROUNDINGS:
        for relative in 1e-3, 1e-4, 3e-5:
            for signal in "drift", "noise", "alternating":
                yield _row("bf16", "weight", f"{signal} {relative:g}", rounding, weight(relative, signal, rounding))
        for name, (signed, unsigned) in FORMATS.items():
            if name == "fp32":
                continue
            for beta in 0.9, 0.98:
                for signal in "noise", "drift", "alternating":
                    result = first_moment(signed, beta, signal, rounding)
                    yield _row(name, "first moment", f"{signal} beta {beta}", rounding, result)
                    if name in RATIOS:
                        result = first_moment(RATIOS[name], beta, signal, rounding)
                        yield _row(name, "first moment as ratio", f"{signal} beta {beta}", rounding, result)
            for signal in "noise", "constant":
                yield _row(name, "second moment", signal, rounding, second_moment(unsigned, signal, rounding))


def _row(name: str, slot: str, signal: str, rounding: str, result: tuple[float, ...]) -> dict[str, Any]:
    bias, error, *step = result
    return {
        "format": name,
        "slot": slot,
        "signal": signal,
        "rounding": rounding,
        "bias": f"{bias:.2e}",
        "error": f"{error:.2e}",
        "step": "".join(f"{value:.3f}" for value in step),
    }


def main() -> None:
    """Measure, print the errors side by side and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "rounding.csv")
    options = parser.parse_args()
    measured = sorted(rows(), key=lambda row: (row["slot"], row["format"], row["signal"]))
    table = Table("slot", "format", "signal", *(f"{rounding} bias / error" for rounding in ROUNDINGS))
    for place in range(0, len(measured), len(ROUNDINGS)):
        same = {row["rounding"]: row for row in measured[place : place + len(ROUNDINGS)]}
        first = measured[place]
        cells = (f"{same[rounding]['bias']} / {same[rounding]['error']}" for rounding in ROUNDINGS)
        table.add_row(first["slot"], first["format"], first["signal"], *cells)
    Console(width=140).print(table)
    write_csv(options.out, measured)


if __name__ == "__main__":
    main()
