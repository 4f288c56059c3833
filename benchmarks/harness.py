"""What all benchmarks share: machine facts, measured bytes, CSV files and interleaved timing."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Return the processor, its cores, and the versions of Python and torch, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct storages behind plain tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every plain tensor in an optimizer's state, with the parts of quantized ones."""
    values = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [part for value in values for part in _parts(value)]


def _parts(value: Tensor) -> Sequence[Tensor]:
    """Return the plain tensors that a state of this library, of torchao, or a plain one is stored in."""
    if hasattr(value, "parts"):
        parts: Sequence[Tensor] = value.parts
        return parts
    if is_traceable_wrapper_subclass(value):
        return [part for name in value.__tensor_flatten__()[0] for part in _parts(getattr(value, name))]
    return (value,)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the keys of the first as header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table with the keys of the first as header."""
    # Not at hand on every machine that is measured.
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)


def warmed_up(optimizer: torch.optim.Optimizer, steps: int, final: float) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that rises over a twentieth of the steps, then falls in a straight line to `final` times lr."""
    warmup, fall = max(steps // 20, 1), 1 - final
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - fall * step / steps))


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time each call once per round, in turn, so that a drift of the machine's speed meets all of them.

    Returns:
        Seconds of every counted call, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return statistics.median(seconds) * 1e3
