"""What the GPU measurements share: recipes, clocks, launches, and where results go."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit_optim

from ..harness import RESULTS, machine, write_csv

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
FP8 = "fp8 + stochastic"
#: The presets, and fp8 moments under stochastic rounding.
RECIPES = (*lowbit_optim.PRESETS, FP8)
ROUNDS = 15


def arguments(about: str | None) -> argparse.Namespace:
    """Return the options of a measurement, from the command line; `about` is its module's docstring."""
    parser = argparse.ArgumentParser(description=str(about).split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto", help="what makes the steps on the device")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few steps, to rehearse")
    return parser.parse_args()


def make_recipe(recipe: str, backend: str, lr: float = 1e-3) -> Make:
    """Return what makes the AdamW of a recipe."""

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if recipe == FP8:
            return lowbit_optim.AdamWFp8(params, lr=lr, backend=backend)
        return lowbit_optim.from_preset(params, recipe, lr=lr, backend=backend)

    return make


def imported(name: str, module: str, cls: str) -> Any:
    """Return a class of another library, or None, with a line that says why, if it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        print(f"Without {name} {cls}: {error}", flush=True)
        return None


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


def copy_seconds(source: Tensor, target: Tensor, device: str) -> float:
    """Return how long a copy takes, the median of some."""
    return statistics.median(seconds(lambda: target.copy_(source, non_blocking=True), device) for _ in range(ROUNDS))


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


def add_row(
    rows: list[dict[str, Any]], about: dict[str, Any], measure: Callable[[], dict[str, Any]], device: str
) -> None:
    """Append what there is to say about an optimizer and what `measure` finds; one of another library may fail."""
    try:
        rows.append(about | measure())
    except Exception as error:
        if about["impl"] == "lowbit_optim":
            raise
        print(f"{about['impl']} {about['recipe']} failed: {type(error).__name__}: {error}", flush=True)
    # The next one must find the device's memory empty.
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


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
