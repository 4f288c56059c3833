"""Write docs/benchmarks.md and its plot from the committed CSV files: `python -m benchmarks.report`.

The table in docs/why-bf16-stalls.md is made anew too.

Every sentence with a figure in it is made from the rows; what has not been run is said to be missing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import lowbit_optim

from .harness import RESULTS
from .memory_vs_loss.plot import LINEAR, LINEAR_FINETUNE, draw
from .memory_vs_loss.recipes import RECIPES
from .memory_vs_loss.run import SAMPLES
from .memory_vs_loss.suite import read_rows, schedule
from .memory_vs_loss.summary import Cell, Mean, Results, gap_at_best
from .memory_vs_loss.tasks import TASKS

DOCS = Path(__file__).parents[1] / "docs"
FINETUNE = "finetune-small-lr"
SEEDS = (0, 1, 2)
#: Gaps that count as none, in percent.
NONE_PCT = 0.1

TASK_NOTES = {
    "pretrain": "A byte-level transformer of 137,000 parameters learns Python's manual.",
    "pretrain-large-batch": "The same with batches four times as large: rounding noise regularises small batches, so "
    "a gap below zero has to show here as well before it means anything.",
    FINETUNE: "The model of `pretrain`, trained in fp32 and rounded to bf16, goes on with Python source code. "
    "*Visible* is the share of the improvement of `torch fp32` that the bf16 forward pass sees; *decoded* is what "
    "the exact weights have, with what the optimizer keeps beside them.",
    "spiky": "A network learns a random one's labels. Four of 64 input channels are ten times as large as the others, "
    "examples' weights in the loss are drawn from a Pareto distribution with exponent 1.5, gradients are not "
    "clipped, and the learning rate is above the best one.",
    "vision": "A ViT learns the digits that come with scikit-learn. Labels are smoothed by 0.1, in the reported loss "
    "too.",
    "sparse-embedding": "A model over 8,192 words, nearly all of it embeddings: each batch touches few rows.",
    "long-horizon": "10,000 steps with a learning rate that falls to zero: a network learns a random one's labels, new "
    "ones in every batch.",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table; columns after the first `words` are aligned to the right."""
    lines = [
        f"| {' | '.join(header)} |",
        "|" + "|".join("---" if i < words else "--:" for i in range(len(header))) + "|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def number(value: Mean, spec: str) -> str:
    """Return a mean without its error."""
    return format(value.value, spec) if value.known else "-"


# Sections -------------------------------------------------------------------------------------------------------------


def task_section(results: Results, task: str) -> str:
    """Return heading, description and table of one task."""
    cells = results.cells(task)
    parts = [f"## {task}", TASK_NOTES[task], f"{steps_told(results, task)}."]
    if not cells:
        return "\n\n".join([*parts, "No run yet."])
    fine, swept = task == FINETUNE, TASKS[task].sweep
    header = ["recipe", *(["lr"] if len({cell.lr for cell in cells}) > 1 else []), "bytes", "loss"]
    header += ["visible, %", "decoded, %"] if fine else ["gap, %"]
    header += ["gap at best lr, %"] if swept else []
    header += ["distance", "lost, %", "step, ms", "peak, MiB", "seeds"]
    lines = []
    for cell in cells:
        line = [cell.recipe, *([cell.lr] if "lr" in header else [])]
        line += [number(cell.over("bytes_per_param"), ".3f"), number(cell.over("val_loss"), ".5f" if fine else ".4f")]
        line += [cell.visible.text(".1f"), cell.decoded.text(".1f")] if fine else [cell.gap.text("+.3f")]
        if swept:
            best = results.best(task, cell.recipe)
            gap = gap_at_best(results, task, cell.recipe)
            line.append(f"{gap.text('+.3f')} ({best.lr})" if best and gap.known else "-")
        line += [number(cell.over("distance"), ".3f"), number(cell.over("lost_pct"), ".1f")]
        line += [number(cell.over("step_ms"), ".2f"), number(cell.over("peak_rss_mib"), ".0f")]
        line.append(str(len(cell.rows)) + (f", {cell.broken} without a loss" if cell.broken else ""))
        lines.append(line)
    return "\n\n".join([*parts, table(header, lines), missing_in(results, task)])


def steps_told(results: Results, task: str) -> str:
    """Return how many steps the runs of a task had, and how many the full suite's have where that is another number."""
    full = TASKS[task].steps
    made = sorted({int(row["steps"]) for key, row in results.rows.items() if key[0] == task} or {full})
    told = f"{' and '.join(f'{steps:,}' for steps in made)} steps"
    return told if made == [full] else f"{told}, in place of {full:,}"


def missing_in(results: Results, task: str) -> str:
    """Return a sentence about the runs of a task that are not there."""
    runs = [run for run in schedule(SEEDS) if run.task == task]
    absent = [run for run in runs if run.key not in results.rows]
    if not absent:
        return f"All {len(runs)} runs are there."
    present = {run.recipe for run in runs if run.key in results.rows}
    without = [name for name in dict.fromkeys(run.recipe for run in absent) if name not in present]
    names = f" Without any: {', '.join(without)}." if without else ""
    return f"Missing: {len(absent)} of {len(runs)} runs.{names}"


def preset_gaps(results: Results, recipe: str) -> dict[str, Cell]:
    """Return a recipe's cells on the tasks that compare final losses, by task."""
    cells = (results.cell(task.name, recipe, f"{task.lrs['adamw'][0]:g}") for task in TASKS.values())
    return {cell.task: cell for cell in cells if cell and cell.gap.known and cell.task != FINETUNE}


def recovered(results: Results, recipe: str) -> Mean:
    """Return the smaller visible share over fine-tuning's learning rates."""
    cells = [results.cell(FINETUNE, recipe, f"{lr:g}") for lr in TASKS[FINETUNE].lrs["adamw"]]
    shares = [cell.visible for cell in cells if cell and cell.visible.known]
    return min(shares, key=lambda share: share.value, default=Mean(math.nan, math.nan))


def choice_section(results: Results) -> str:
    """Return what the figures say about choosing a preset."""
    names = [*lowbit_optim.PRESETS, "torch bf16", "torchao AdamW8bit SR", "torchao AdamW4bit SR"]
    lines, good = [], []
    for name in names:
        cells = preset_gaps(results, name)
        share, broken = recovered(results, name), broken_tasks(results, name)
        if not cells and not share.known and not broken:
            lines.append([name, "no run yet", "-", "-", "-", "-"])
            continue
        sizes = [cell.over("bytes_per_param").value for cell in cells.values()]
        size = f"{min(sizes):.2f} to {max(sizes):.2f}" if sizes else "-"
        worst = max(cells.values(), key=lambda cell: cell.gap.value, default=None)
        clean = sum(cell.gap.within(NONE_PCT) for cell in cells.values())
        if name in lowbit_optim.PRESETS and name != "reference" and cells and clean == len(cells) and not broken:
            good.append((max(sizes), name))
        told = f"{worst.gap.text('+.3f')} ({worst.task})" if worst else "-"
        told = f"no loss ({', '.join(broken)})" if broken else told
        average = f"{sum(cell.gap.value for cell in cells.values()) / len(cells):+.3f}" if cells else "-"
        lines.append([name, size, told, average, f"{clean} of {len(cells.keys() | set(broken))}", share.text(".1f")])
    header = ["recipe", "bytes", "largest gap, %", "mean gap, %", "tasks without a gap", "fine-tuning seen, %"]
    parts = [
        "## How to choose",
        f"A task is *without a gap* where the gap to `reference` is at most {NONE_PCT} % or at most its standard "
        "error. *Fine-tuning seen* is the smaller visible share over both learning rates; 100 is training in fp32.",
        table(header, lines),
        *_advice(results, good),
    ]
    return "\n\n".join(parts)


def _advice(results: Results, good: list[tuple[float, str]]) -> list[str]:
    lines = []
    ranked = sorted(good)
    tasks = [task for task in TASKS if task != FINETUNE]
    if ranked:
        names = ", ".join(f"`{name}`" for _, name in ranked)
        lines.append(f"- Without a gap on every task that has been run, smallest first: {names}.")
    elif any(preset_gaps(results, name) for name in lowbit_optim.PRESETS if name != "reference"):
        lines.append("- No preset but `reference` is without a gap on every task that has been run.")
    shares = {name: recovered(results, name) for name in lowbit_optim.PRESETS}
    seen = [f"`{name}`" for name, share in shares.items() if share.known and share.value >= 98]
    lags = [f"`{name}` ({share.value:.0f} %)" for name, share in shares.items() if share.known and share.value < 98]
    if seen:
        lines.append(f"- At a small learning rate, at least 98 % of fp32's progress is seen with: {', '.join(seen)}.")
    if lags:
        lines.append(f"- At a small learning rate, less than 98 % of fp32's progress is seen with: {', '.join(lags)}.")
    behind = {
        name: [f"{task} ({gaps[task].gap.text('+.3f')} %)" for task in tasks if task in gaps and above(gaps[task])]
        for name in lowbit_optim.PRESETS
        if (gaps := preset_gaps(results, name))
    }
    lines += [f"- `{name}` has a gap on: {', '.join(where)}." for name, where in behind.items() if where]
    lost = {name: broken_tasks(results, name) for name in lowbit_optim.PRESETS}
    lines += [f"- `{name}` ended without a loss on: {', '.join(where)}." for name, where in lost.items() if where]
    return ["\n".join(lines)] if lines else []


def above(cell: Cell) -> bool:
    """Whether a cell's gap is more than none."""
    return not cell.gap.within(NONE_PCT)


def broken_tasks(results: Results, recipe: str) -> list[str]:
    """Return the tasks on which a run of a recipe gave no loss, at AdamW's own learning rates."""
    cells = [results.cell(task.name, recipe, f"{lr:g}") for task in TASKS.values() for lr in task.lrs["adamw"]]
    return list(dict.fromkeys(cell.task for cell in cells if cell and cell.broken))


# Fine-tuning ----------------------------------------------------------------------------------------------------------

#: Around the table that the page on lost updates shows.
MARKS = ("<!-- rows of memory_vs_loss.csv, written by python -m benchmarks.report -->\n", "<!-- end of rows -->")
_SHOWN = ("torch fp32", "torch bf16", "optimi AdamW Kahan", "master/dithered + fp32", *lowbit_optim.PRESETS)


def stalls_table(results: Results) -> str:
    """Return what fine-tuning lost and showed: a row for each recipe and learning rate that has been run."""
    rows = []
    for lr in TASKS[FINETUNE].lrs["adamw"]:
        for name in _SHOWN:
            cell = results.cell(FINETUNE, name, f"{lr:g}")
            if cell and cell.visible.known:
                shares = [number(cell.over("lost_pct"), ".1f"), cell.visible.text(".1f"), cell.decoded.text(".1f")]
                rows.append([f"{lr:g}", name, RECIPES[name].weights, RECIPES[name].state, *shares])
    if not rows:
        return "Not measured yet."
    return table(["lr", "recipe", "weights", "state", "lost, %", "visible, %", "decoded, %"], rows, words=4)


def with_rows(text: str, results: Results) -> str:
    """Return the page on lost updates with its table made anew."""
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + f"\n{stalls_table(results)}\n\n" + MARKS[1] + rest.split(MARKS[1])[1]


# Goals ----------------------------------------------------------------------------------------------------------------


def goals_section(results: Results) -> str:
    """Return the goals that were set before the measurement, each with what was measured."""
    rows: list[Sequence[str]] = []
    for name in "balanced", "compact":
        cells = preset_gaps(results, name)
        missed = [f"{cell.task} {cell.gap.text('+.3f')}" for cell in cells.values() if above(cell)]
        missed += without_loss(results, name)
        rows.append([f"`{name}`: no gap on every task", verdict(cells or missed, not missed), "; ".join(missed) or "-"])
    for name, peer in (("light", "8bit"), ("minimal", "4bit")):
        rows.append(_against_torchao(results, name, f"torchao AdamW{peer} SR", 1.0))
    rows.append(_against_torchao(results, "minimal", "torchao AdamW4bit SR", 0.5))
    cells = preset_gaps(results, "minimal")
    missed = [f"{cell.task} {cell.gap.text('+.3f')}" for cell in cells.values() if cell.gap.value > 1]
    missed += without_loss(results, "minimal")
    rows.append(["`minimal`: gap never above 1 %", verdict(cells or missed, not missed), "; ".join(missed) or "-"])
    nearest = recovered(results, "torch bf16")
    rows.append(
        ["nearest bf16 recovers less than half", verdict(nearest.known, nearest.value < 50), nearest.text(".1f")]
    )
    for name in "light", "compact", "balanced":
        share = recovered(results, name)
        rows.append([f"`{name}` recovers at least 98 %", verdict(share.known, share.value >= 98), share.text(".1f")])
    intro = (
        "Goals were set before anything was measured. Gaps are in percent. A goal that holds on the tasks run so far "
        "is not met before all of them have been run."
    )
    return "\n\n".join(["## Goals", intro, table(["goal", "so far", "where not, or how much"], rows, words=3)])


def without_loss(results: Results, recipe: str) -> list[str]:
    """Return the tasks on which a recipe fails whatever its other seeds did: a run of it gave no loss."""
    return [f"{task} without a loss" for task in broken_tasks(results, recipe)]


def _against_torchao(results: Results, name: str, peer: str, share: float) -> Sequence[str]:
    mine, theirs = preset_gaps(results, name), preset_gaps(results, peer)
    shared = [task for task in mine if task in theirs and above(theirs[task])]
    missed = [
        f"{task} {mine[task].gap.text('+.3f')} against {theirs[task].gap.text('+.3f')}"
        for task in shared
        if mine[task].gap.value > share * theirs[task].gap.value
    ]
    missed += without_loss(results, name)
    what = "gap at most half of" if share < 1 else "beats"
    goal = f"`{name}` {what} {peer} wherever that has a gap"
    if mine.keys() & theirs.keys() and not shared:
        return goal, "holds", f"{peer} has no gap"
    return goal, verdict(shared, not missed), "; ".join(missed) or "-"


def verdict(known: object, met: bool) -> str:
    """Return a goal's state in a word."""
    return "no run yet" if not known else "holds" if met else "does not hold"


# Other benchmarks -----------------------------------------------------------------------------------------------------


def csv_section(title: str, text: str, path: Path, words: int) -> str:
    """Return a section that shows a CSV as it is."""
    rows = read_rows(path)
    if not rows:
        return f"## {title}\n\n{text}\n\nNot measured yet."
    return f"## {title}\n\n{text}\n\n{table(list(rows[0]), [list(row.values()) for row in rows], words)}"


def page(folder: Path, plot: str | None) -> str:
    """Return the whole page.

    Args:
        folder: where the CSV files are.
        plot: path of the plot as the page refers to it, or None to leave it out.
    """
    results = Results(read_rows(folder / "memory_vs_loss.csv"))
    runs = schedule(SEEDS)
    done = sum(run.key in results.rows for run in runs)
    where = folder / "memory_vs_loss.machine"
    machine = where.read_text().strip() if where.exists() else "not recorded"
    intro = f"""# Benchmarks

This page is written by `python -m benchmarks.report` from the CSV files in `benchmarks/results`; do not edit it.

{done} of {len(runs)} runs of the full suite are there. A figure after ± is the standard error over seeds; without one,
there is one seed so far. Machine: {machine}; runs share it, and times are those of the
process. Command: `make memory-vs-loss`, which can be stopped and continued at any time.

- *bytes*: weight and optimizer state per parameter, without gradient, measured from storages. Parameters with fewer
  than 4,096 elements keep fp32 moments, which shows in models as small as these.
- *gap*: validation loss against the same optimizer with fp32 masters and fp32 moments (`reference` for AdamW), same
  seed. *At best lr*: both at the best of three learning rates.
- *distance*: of the exact weights from the end of that run, as a share of the way from start to end. A gap below zero
  far from it is not a better format but another effective step.
- *lost*: share of the updates, at {SAMPLES} steps of a run, that reached neither the stored weight nor what is kept
  beside it: one minus the projection of the move on what fp32 arithmetic would have added. Rounding noise averages out.
- *step*: median CPU time of the optimizer's step. *peak*: most resident memory of the run's process, Python and torch
  included.

Weights are stored as the recipe says and computed with in fp32; gradients have the weights' dtype. For a seed, every
run starts from the same values, which bf16 can hold. Peers run as they are on a CPU. flashoptim is not among them: it
needs a GPU, and its corrections and moments, rounded to nearest, have no equivalent among the formats here. Lion and
SGD are compared with themselves under fp32 masters and moments."""
    picture = [
        f"![Bytes per parameter against gap]({plot})",
        f"The scale is linear in the grey band, up to ±{LINEAR} % (±{LINEAR_FINETUNE:g} % in fine-tuning), and "
        "logarithmic beyond. AdamW only. For fine-tuning the height is what the bf16 forward pass lacks of fp32's "
        "improvement.",
    ]
    outliers = csv_section(
        "Outliers",
        "How far one large gradient in a block throws its neighbours off, as a share of the exact move: "
        "`python -m benchmarks.outliers`.",
        folder / "outliers.csv",
        words=2,
    )
    latency = csv_section(
        "Step latency",
        "One step of 8 matrices of 2048x2048 on two cores: `python -m benchmarks.step_latency`.",
        folder / "step_latency.csv",
        words=3,
    )
    sections = [
        intro,
        *(picture if plot else []),
        choice_section(results),
        goals_section(results),
        *(task_section(results, task) for task in TASKS),
        outliers,
        latency,
    ]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    """Write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder for benchmarks.md and its plot")
    options = parser.parse_args()
    if not options.results.is_dir():
        parser.error(f"--results: no folder {options.results}")
    rows = read_rows(options.results / "memory_vs_loss.csv")
    options.docs.mkdir(parents=True, exist_ok=True)
    picture = "memory_vs_loss.png"
    if rows:
        draw(Results(rows), options.docs / picture)
    (options.docs / "benchmarks.md").write_text(page(options.results, picture if rows else None))
    stalls = options.docs / "why-bf16-stalls.md"
    if stalls.exists():
        stalls.write_text(with_rows(stalls.read_text(), Results(rows)))
    print(f"Wrote {options.docs / 'benchmarks.md'}: {len(rows)} rows of {len(RECIPES)} recipes.")


if __name__ == "__main__":
    main()
