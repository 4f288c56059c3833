"""What the GPU measurements share: recipes, clocks, launches, and where results go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowbit_optim

from ..harness import RESULTS, machine, write_csv

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
FP8 = "fp8 + stochastic"
#: The presets, and fp8 moments under stochastic rounding.
RECIPES = (*lowbit_optim.PRESETS, FP8)


def make_recipe(recipe: str, backend: str, lr: float = 1e-3) -> Make:
    """Return what makes the AdamW of a recipe."""

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if recipe == FP8:
            return lowbit_optim.AdamWFp8(params, lr=lr, backend=backend)
        return lowbit_optim.from_preset(params, recipe, lr=lr, backend=backend)

    return make


def wait(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str) -> float:
    """Return how long a call takes, until the device is done with it."""
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def launches(call: Callable[[], Any], device: str) -> int | None:
    """Return how many kernels a call launches, copies left out; None on CPU, where there are none."""
    if device == "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        wait(device)
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Return the most memory that a call allocates beyond what there is; None on CPU."""
    if device == "cpu":
        return None
    wait(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


def device_name(device: str) -> str:
    """Return the machine's name for a result's heading."""
    return machine() if device == "cpu" else f"{torch.cuda.get_device_name()}, {machine()}"


def write(name: str, title: str, rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Write rows as CSV and Markdown to `$OUT`, or to the committed results, and return the Markdown.

    Called after each row, so that what there is stays if the time runs out.
    """
    folder = Path(os.environ.get("OUT") or RESULTS / "gpu")
    write_csv(folder / f"{name}.csv", rows)
    header = list(rows[0])
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join('' if value is None else str(value) for value in row.values())} |" for row in rows]
    text = "\n".join([f"# {title}", "", device_name(device), "", *lines, ""])
    (folder / f"{name}.md").write_text(text)
    return text
