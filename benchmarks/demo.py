"""What each preset costs in memory and in loss, on real text: `python -m benchmarks.demo`.

A byte-level transformer learns Python's manual, once per recipe, from the same start and on the same batches. Then
every recipe fine-tunes the same pretrained bf16 model on Python source code at lr 1e-6, where bf16 weights that are
rounded to nearest stand still. Losses are those of the model as its forward pass sees it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import lowbit_optim

from .byte_lm import ByteTransformer, Corpus, loss_of, manual_text, source_text
from .harness import RESULTS, machine, median_ms, state_tensors, storage_bytes, warmed_up, write_csv

PRETRAIN_LR, FINETUNE_LR = 2e-3, 1e-6
CONTEXT, BATCH = 64, 16
VALIDATE_EVERY = 25


@dataclass(frozen=True)
class Recipe:
    """A name, the dtype of the weights, and how to make the optimizer."""

    name: str
    dtype: torch.dtype
    make: Callable[..., torch.optim.Optimizer]


def _preset(name: str) -> Recipe:
    return Recipe(name, torch.bfloat16, lambda params, lr: lowbit_optim.from_preset(params, preset=name, lr=lr))


def _torch_adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("torch fp32", torch.float32, _torch_adamw),
        Recipe("torch bf16", torch.bfloat16, _torch_adamw),
        *map(_preset, lowbit_optim.PRESETS),
    )
}
YARDSTICK, EXACT = "reference", "torch fp32"


@dataclass(frozen=True)
class Sizes:
    """Steps of the two phases, and the model's width."""

    pretrain: int
    finetune: int
    width: int


@dataclass
class Curve:
    """What one phase of one recipe gave: validation losses by step, measured bytes, median step time, weights."""

    recipe: str
    losses: list[tuple[int, float]]
    bytes_per_param: float
    step_ms: float
    weights: dict[str, torch.Tensor]

    @property
    def start(self) -> float:
        """Validation loss before the first step."""
        return self.losses[0][1]

    @property
    def final(self) -> float:
        """Validation loss after the last step."""
        return self.losses[-1][1]


def run_phase(
    recipe_name: str, phase: str, sizes: Sizes, start: dict[str, torch.Tensor] | None, report: Callable[[int], None]
) -> Curve:
    """Train one recipe for one phase.

    Args:
        recipe_name: a key of `RECIPES`.
        phase: "pretrain" or "finetune".
        sizes: of the run.
        start: weights to start from; None makes the seeded start.
        report: called with the number of steps done since the last call.
    """
    recipe, pretrain = RECIPES[recipe_name], phase == "pretrain"
    steps, peak = (sizes.pretrain, PRETRAIN_LR) if pretrain else (sizes.finetune, FINETUNE_LR)
    corpus = Corpus(manual_text() if pretrain else source_text(), CONTEXT, BATCH)
    torch.manual_seed(0)
    model = ByteTransformer(sizes.width, context=CONTEXT)
    if start is not None:
        model.load_state_dict(start)
    model.to(recipe.dtype)
    optimizer = recipe.make(model.named_parameters(), lr=peak)
    schedule = warmed_up(optimizer, steps, final=0.1)
    validation = corpus.validation(64)

    def validate() -> float:
        with torch.no_grad():
            return loss_of(model, validation).item()

    losses, step_seconds = [(0, validate())], []
    for step, tokens in enumerate(itertools.islice(corpus.batches(seed=1), steps), start=1):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        began = time.perf_counter()
        optimizer.step()
        step_seconds.append(time.perf_counter() - began)
        schedule.step()
        optimizer.zero_grad()
        report(1)
        if step % VALIDATE_EVERY == 0 or step == steps:
            losses.append((step, validate()))
    params = list(model.parameters())
    measured = storage_bytes([param.detach() for param in params]) + storage_bytes(state_tensors(optimizer))
    return Curve(
        recipe.name,
        losses,
        measured / sum(param.numel() for param in params),
        median_ms(step_seconds),
        {name: value.float() for name, value in model.state_dict().items()},
    )


# Two processes of one thread each are faster than one of two, and the same for every recipe.


def _worker(queue: Any, job: tuple[str, str, Sizes, dict[str, torch.Tensor] | None]) -> Curve:
    torch.set_num_threads(1)
    return run_phase(*job, report=queue.put)


def run_all(phase: str, sizes: Sizes, start: dict[str, torch.Tensor] | None, pool: Any, queue: Any) -> list[Curve]:
    """Run one phase of every recipe, with a progress bar."""
    steps = sizes.pretrain if phase == "pretrain" else sizes.finetune
    with Progress(TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(phase, total=steps * len(RECIPES))
        futures = [pool.submit(_worker, queue, (name, phase, sizes, start)) for name in RECIPES]
        while not bar.finished:
            try:
                bar.advance(task, queue.get(timeout=1.0))
            except Empty:
                if any(future.done() and future.exception() for future in futures):
                    break
        return [future.result() for future in futures]


def summarize(pretrain: list[Curve], finetune: list[Curve]) -> list[dict[str, Any]]:
    """Return one row per recipe, with gaps relative to the `reference` preset."""
    yardstick = next(curve for curve in pretrain if curve.recipe == YARDSTICK).final
    exact = next(curve for curve in finetune if curve.recipe == EXACT)
    rows = []
    for first, second in zip(pretrain, finetune, strict=True):
        rows.append(
            {
                "recipe": first.recipe,
                "bytes_per_param": round(first.bytes_per_param, 3),
                "pretrain_loss": round(first.final, 4),
                "gap_pct": round(100 * (first.final / yardstick - 1), 2),
                "finetune_start": round(second.start, 5),
                "finetune_loss": round(second.final, 5),
                "finetune_gain_pct": round(100 * (second.start - second.final) / (exact.start - exact.final), 1),
                "step_ms": round(first.step_ms, 2),
            }
        )
    return rows


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table that the README shows, from rows or lines of the CSV."""
    lines = ["| recipe | bytes per parameter | pretraining loss | gap | fine-tuning gain |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        gap, gain = float(row["gap_pct"]), float(row["finetune_gain_pct"])
        size, loss = float(row["bytes_per_param"]), float(row["pretrain_loss"])
        lines.append(f"| {row['recipe']} | {size:.3f} | {loss:.4f} | {gap:+.2f} % | {gain:.1f} % |")
    return "\n".join(lines)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    table = Table(title="Memory against loss", caption="weight + state bytes as measured; gain as a share of fp32's")
    for heading in (
        "recipe",
        "B/param",
        "pretrain loss",
        "gap to reference",
        "fine-tune loss",
        "fine-tune gain",
        "step",
    ):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for row in rows:
        table.add_row(
            row["recipe"],
            f"{row['bytes_per_param']:.3f}",
            f"{row['pretrain_loss']:.4f}",
            f"{row['gap_pct']:+.2f} %",
            f"{row['finetune_loss']:.5f}",
            f"{row['finetune_gain_pct']:.1f} %",
            f"{row['step_ms']:.2f} ms",
        )
    console.print(table)


def plot(pretrain: list[Curve], finetune: list[Curve], path: Path) -> None:
    """Draw both phases, loss against step, one line per recipe."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    titles = (
        f"Pretraining on Python's manual, lr {PRETRAIN_LR:g}",
        f"Fine-tuning on Python sources, lr {FINETUNE_LR:g}",
    )
    for axis, curves, title in zip(axes, (pretrain, finetune), titles, strict=True):
        for curve in curves:
            plain = curve.recipe.startswith("torch")
            axis.plot(*zip(*curve.losses, strict=True), label=curve.recipe, linestyle="--" if plain else "-")
        axis.set(title=title, xlabel="step", ylabel="validation loss (nats per byte)")
    axes[0].set_yscale("log")
    axes[1].ticklabel_format(axis="y", useOffset=False)
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the demo and write its table, CSV and plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pretrain-steps", type=int, default=250)
    parser.add_argument("--finetune-steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=96, help="model dimension, a multiple of 4")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for demo.csv and demo.png")
    options = parser.parse_args()
    sizes = Sizes(options.pretrain_steps, options.finetune_steps, options.width)
    console = Console()
    console.print(f"{len(RECIPES)} recipes on {machine()}")
    context = mp.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(2, mp_context=context) as pool:
        queue = manager.Queue()
        pretrain = run_all("pretrain", sizes, None, pool, queue)
        trained = next(curve for curve in pretrain if curve.recipe == YARDSTICK).weights
        finetune = run_all("finetune", sizes, trained, pool, queue)
    rows = summarize(pretrain, finetune)
    show(rows, console)
    write_csv(options.out / "demo.csv", rows)
    plot(pretrain, finetune, options.out / "demo.png")
    console.print(f"Wrote {options.out / 'demo.csv'} and {options.out / 'demo.png'}")


if __name__ == "__main__":
    main()
