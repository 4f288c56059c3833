"""Bytes per parameter against the gap to the yardstick, a panel for each task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .recipes import RECIPES
from .summary import Cell, Mean, Results
from .tasks import TASKS

#: Recipes that stand out, with marker and colour; the others are small and grey.
NAMED = {
    "reference": ("*", "black"),
    "torch fp32": ("P", "black"),
    "torch bf16": ("X", "tab:red"),
    "bf16": ("o", "tab:olive"),
    "balanced": ("o", "tab:blue"),
    "light": ("o", "tab:cyan"),
    "compact": ("o", "tab:green"),
    "minimal": ("o", "tab:purple"),
    "torchao AdamW8bit SR": ("s", "tab:orange"),
    "torchao AdamW4bit SR": ("s", "tab:brown"),
    "torchao AdamWFp8 SR": ("s", "tab:pink"),
    "bitsandbytes AdamW8bit": ("D", "tab:orange"),
    "optimi AdamW Kahan": ("^", "tab:gray"),
}
#: Values below this, in percent, are drawn on a linear scale, so that zero and both signs have a place.
LINEAR, LINEAR_FINETUNE = 0.1, 1.0


@dataclass(frozen=True)
class Panel:
    """A task, or one of its learning rates.

    Attributes:
        title: heading.
        label: what the points' heights are.
        linear: end of the linear part of their scale.
        points: recipes with the heights of their points.
    """

    title: str
    label: str
    linear: float
    points: list[tuple[Cell, Mean]]


def panels(results: Results) -> list[Panel]:
    """Return what to draw: gaps of AdamW's final losses, and what fine-tuning lacks of fp32's improvement."""
    found = []
    for task in TASKS.values():
        rates = [f"{rate:g}" for rate in task.lrs["adamw"]]
        for rate in rates:
            cells = [cell for cell in results.cells(task.name, rate) if RECIPES[cell.recipe].optimizer == "adamw"]
            if len(rates) == 1:
                gaps = [(cell, cell.gap) for cell in cells]
                found.append(Panel(task.name, "gap to reference, %", LINEAR, gaps))
            else:
                lacks = [(cell, Mean(100 - cell.visible.value, cell.visible.error)) for cell in cells]
                label = "improvement not seen, %"
                found.append(Panel(f"{task.name}, lr {rate}", label, LINEAR_FINETUNE, lacks))
    return found


def draw(results: Results, path: Path) -> None:
    """Draw and save the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    all_panels = panels(results)
    rows = -(-len(all_panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 3.4 * rows), layout="constrained", squeeze=False)
    handles = {}
    for axis, panel in zip(axes.flat, all_panels, strict=False):
        for cell, height in panel.points:
            if not height.known:
                continue
            marker, colour = NAMED.get(cell.recipe, (".", "silver"))
            bars = axis.errorbar(
                cell.over("bytes_per_param").value,
                height.value,
                yerr=None if math.isnan(height.error) else height.error,
                fmt=marker,
                color=colour,
                markersize=8 if cell.recipe in NAMED else 5,
                zorder=3 if cell.recipe in NAMED else 2,
                capsize=2,
            )
            handles.setdefault(cell.recipe if cell.recipe in NAMED else "other modes and formats", bars)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.axhspan(-panel.linear, panel.linear, color="whitesmoke", zorder=0)
        axis.set_yscale("symlog", linthresh=panel.linear)
        axis.set_xscale("log")
        axis.set_xlim(2.8, 16)
        axis.set_xticks([3, 4, 5, 6, 8, 10, 12, 14])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
        axis.set_title(panel.title)
        axis.set_ylabel(panel.label)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(all_panels) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("bytes per parameter, weight + state")
    order = [name for name in (*NAMED, "other modes and formats") if name in handles]
    figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
