"""Which runs there are, which are still to be made, and the CSV that they end in.

Each run is a process of its own with one thread, so that its peak memory is its own and a crash is one broken row. The
CSV is the only record: a run whose row is there is not made again, so the suite can be stopped at any point.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .recipes import RECIPES, Recipe
from .run import COLUMNS, broken_row, endpoint_path
from .tasks import TASKS, Settings, Task

#: A run that takes longer is ended and gives a broken row. The first of its kind may compile and pretrain.
TIMEOUT_S = 3600.0
#: CPU seconds of a run in full, and of one with torchao beyond that; as measured, for estimates only.
TRAIN_S = {
    "pretrain": (37, 87),
    "pretrain-large-batch": (53, 35),
    "finetune-small-lr": (27, 46),
    "long-horizon": (30, 100),
    "sparse-embedding": (32, 54),
    "vision": (26, 77),
    "spiky": (14, 30),
}
#: Of starting a process, and of torchao's compilations.
START_S, COMPILE_S = 8, 20


@dataclass(frozen=True)
class Run:
    """What one row is about.

    Attributes:
        task: a key of `TASKS`.
        recipe: a key of `RECIPES`.
        lr: learning rate.
        seed: of start, batches and rounding.
    """

    task: str
    recipe: str
    lr: float
    seed: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The CSV's columns that tell runs apart."""
        return self.task, self.recipe, f"{self.lr:g}", str(self.seed)

    @property
    def yardstick(self) -> Run:
        """The run that this one's gap and distance are relative to."""
        return replace(self, recipe=RECIPES[self.recipe].yardstick)


# The schedule ---------------------------------------------------------------------------------------------------------


def schedule(seeds: Sequence[int]) -> list[Run]:
    """Return all runs, the most telling first, and every yardstick before what is measured against it.

    Presets, torch and torchao with stochastic rounding on every task, seed by seed, since a gap is nothing without its
    error; then what isolates a cause, peers and other optimizers; then half and twice the learning rate.
    """
    main = [recipe for recipe in RECIPES.values() if recipe.part == "main"]
    rest = [recipe for recipe in RECIPES.values() if recipe.part != "main"]
    runs: list[Run] = []
    for recipes in main, rest:
        runs += [run for seed in seeds for run in _runs(recipes, seed, _own_rates)]
    runs += [run for seed in seeds for run in _runs(main, seed, _swept_rates)]
    return runs


def _runs(recipes: Iterable[Recipe], seed: int, rates: Callable[[Task, Recipe], Iterable[float]]) -> Iterator[Run]:
    for recipe in recipes:
        for task in TASKS.values():
            if recipe.part in task.parts:
                yield from (Run(task.name, recipe.name, lr, seed) for lr in rates(task, recipe))


def _own_rates(task: Task, recipe: Recipe) -> tuple[float, ...]:
    return task.lrs.get(recipe.optimizer, ())


def _swept_rates(task: Task, recipe: Recipe) -> tuple[float, ...]:
    if not (task.sweep and recipe.sweep):
        return ()
    return tuple(factor * lr for lr in _own_rates(task, recipe) for factor in (0.5, 2.0))


def cost_s(run: Run, shrink: int) -> float:
    """Return about how many CPU seconds a run takes."""
    train, more = TRAIN_S[run.task]
    if RECIPES[run.recipe].library == "torchao":
        return START_S + COMPILE_S + (train + more) / shrink
    return START_S + train / shrink


# The CSV --------------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def done_keys(path: Path) -> set[tuple[str, ...]]:
    """Return the keys of the runs whose rows are there."""
    return {(row["task"], row["recipe"], row["lr"], row["seed"]) for row in read_rows(path)}


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row, and the header before the first; nothing if the same run's row is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if tuple(str(row[name]) for name in ("task", "recipe", "lr", "seed")) in done_keys(path):
            return
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)


# Processes ------------------------------------------------------------------------------------------------------------


def run_in_process(run: Run, settings: Settings, timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Make one run in a fresh process, and return its row: a broken one if it failed or took too long."""
    mine = replace(settings, seed=run.seed)
    asked = {"task": run.task, "recipe": run.recipe, "lr": run.lr, "settings": asdict(mine)}
    command = [sys.executable, "-m", f"{__package__}.one", json.dumps(asked)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return broken_row(run.task, run.recipe, run.lr, mine, f"no end within {timeout:g} s")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [""])[-1]
        return broken_row(run.task, run.recipe, run.lr, mine, f"exit {result.returncode}: {last}"[:200])
    row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return row


def run_all(
    runs: Sequence[Run],
    settings: Settings,
    path: Path,
    jobs: int,
    deadline: float = float("inf"),
    make: Callable[[Run, Settings], dict[str, Any]] = run_in_process,
    report: Callable[[Run, dict[str, Any]], None] = lambda run, row: None,
) -> int:
    """Make the runs whose rows are missing, `jobs` at a time, and append each row as it comes.

    Args:
        runs: in the order to make them in.
        settings: scale and shrinking of all of them.
        path: the CSV.
        jobs: processes at a time.
        deadline: `time.monotonic()` from which on no run is started.
        make: makes one run.
        report: called with each run and its row.

    Returns:
        How many runs were made.
    """
    done = done_keys(path)
    missing = [run for run in runs if run.key not in done]
    missing = [*_lost_yardsticks(missing, settings), *missing]
    pending: dict[Future[dict[str, Any]], Run] = {}
    made = 0
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(pending) < jobs and time.monotonic() < deadline:
                run = _next_ready(missing, pending.values())
                if run is None:
                    break
                pending[pool.submit(make, run, settings)] = run
            if not pending:
                return made
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                run = pending.pop(future)
                row = future.result()
                append_row(path, row)
                report(run, row)
                made += 1


def _lost_yardsticks(missing: Sequence[Run], settings: Settings) -> list[Run]:
    """Return yardsticks to make again, since where they ended is not on this machine: distances are relative to it."""
    yardsticks = dict.fromkeys(run.yardstick for run in missing)
    return [run for run in yardsticks if run not in missing and not _endpoint(run, settings).exists()]


def _endpoint(run: Run, settings: Settings) -> Path:
    mine = replace(settings, seed=run.seed)
    return endpoint_path(run.task, RECIPES[run.recipe].optimizer, run.lr, mine, TASKS[run.task].steps_in(mine))


def _next_ready(missing: list[Run], running: Iterable[Run]) -> Run | None:
    """Take the first run whose yardstick is not being made at the moment."""
    busy = {run.key for run in running}
    for place, run in enumerate(missing):
        if run.yardstick.key not in busy:
            return missing.pop(place)
    return None
