"""Train every task with every recipe and append the rows to a CSV; stopped, it goes on where it was."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness import RESULTS, machine
from .recipes import RECIPES
from .suite import Run, cost_s, done_keys, run_all, schedule
from .tasks import TASKS, Settings

QUICK_SHRINK = 25


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; choose from {', '.join(known)}")
        return names

    return parse


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between them, got {text!r}") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a whole number above 0, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_vs_loss", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"main recipes, one seed, 1/{QUICK_SHRINK} of the steps: some minutes"
    )
    parser.add_argument("--scale", type=_positive, default=1, help="factor on widths and batches; above 1, for a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=_positive, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--tasks", type=_names(tuple(TASKS)), help="comma-separated")
    parser.add_argument("--recipes", type=_names(tuple(RECIPES)), help="comma-separated")
    parser.add_argument("--seeds", type=_seeds, help="comma-separated; by default 0,1,2, and 0 with --quick")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="start no run after that")
    parser.add_argument("--out", type=Path, help="CSV; by default in benchmarks/results, quick and scaled apart")
    parser.add_argument("--dry-run", action="store_true", help="only say what there is to do")
    return parser


def chosen_runs(options: argparse.Namespace) -> list[Run]:
    """Return the runs that the options ask for, in the suite's order."""
    runs = schedule(options.seeds or ([0] if options.quick else [0, 1, 2]))
    if options.quick:
        own = {(task.name, f"{lr:g}") for task in TASKS.values() for lrs in task.lrs.values() for lr in lrs}
        runs = [run for run in runs if RECIPES[run.recipe].part == "main" and (run.task, f"{run.lr:g}") in own]
    return [
        run
        for run in runs
        if (options.tasks is None or run.task in options.tasks)
        and (options.recipes is None or run.recipe in options.recipes)
    ]


def default_path(options: argparse.Namespace) -> Path:
    """Return where rows go unless told: quick and scaled runs are not those of the committed file."""
    suffix = ("_quick" if options.quick else "") + (f"_x{options.scale}" if options.scale > 1 else "")
    return RESULTS / f"memory_vs_loss{suffix}.csv"


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing; `words` are the command line's unless given."""
    arguments = parser()
    options = arguments.parse_args(words)
    shrink = QUICK_SHRINK if options.quick else 1
    path = options.out or default_path(options)
    runs = chosen_runs(options)
    settings = Settings(scale=options.scale, shrink=shrink, device=options.device)
    try:
        done = done_keys(path, settings)
    except ValueError as error:
        arguments.error(str(error))
    missing = [run for run in runs if run.key not in done]
    hours = sum(cost_s(run, shrink) for run in missing) / 3600
    here = f"{machine()}, {options.device}" if options.device != "cpu" else machine()
    print(f"{here}\n{path}: {len(runs) - len(missing)} of {len(runs)} runs are there.")
    if options.scale == 1:
        print(f"The other {len(missing)} take about {hours:.1f} core-hours.", flush=True)
    if options.dry_run:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if missing:  # or the rows are another machine's
        path.with_suffix(".machine").write_text(f"{here}\n")
    began, count, broken = time.monotonic(), 0, 0

    def report(run: Run, row: dict[str, Any]) -> None:
        nonlocal count, broken
        count += 1
        broken += row["status"] != "ok"
        minutes = (time.monotonic() - began) / 60
        figures = f"loss {row['val_loss']:.5f}  gap {row['gap_pct']:+.3f} %  {row['status']}"
        place = f"[{count}/{len(missing)}, {minutes:.0f} min]"
        print(f"{place} {run.task}, {run.recipe}, lr {run.lr:g}, seed {run.seed}: {figures}", flush=True)

    deadline = began + 60 * options.budget_minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made = run_all(runs, settings, path, options.jobs, deadline, report=report)
    except KeyboardInterrupt:
        raise SystemExit("Stopped; the same command goes on from here.") from None
    print(f"{made} runs made.")
    if broken:
        raise SystemExit(f"{broken} of them gave no result; the column status says why.")


if __name__ == "__main__":
    main()
