"""Which runs there are, which are still to be made, and the CSV that they end in.

Each run is a process of its own with one thread, so that its peak memory is its own and a crash is one broken row. The
CSV is the only record: a run whose row is there is not made again, so the suite can be stopped at any point. Broken
rows say more of the machine than of a recipe: the next start makes them anew.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import subprocess
import sys
import threading
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
#: Task, recipe, learning rate and seed, as the CSV has them.
Key = tuple[str, str, str, str]


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
    def key(self) -> Key:
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
    """Return the rows of a CSV, none if there is no file; a row that is cut off is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def done_keys(path: Path, settings: Settings) -> set[Key]:
    """Return the keys of the runs whose rows are there and not broken.

    Raises:
        ValueError: the file is another table, or its runs have another length, which keys do not tell apart.
    """
    rows = read_rows(path)
    if rows and tuple(rows[0]) != COLUMNS:
        raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}")
    done = [row for row in rows if row["status"] == "ok"]
    for row in done:
        task = TASKS.get(row["task"])
        if task and int(row["steps"]) != task.steps_in(settings):
            asked = f"{row['steps']} steps of {task.name}, these runs {task.steps_in(settings)}"
            raise ValueError(f"{path} has rows of {asked}; name another file with --out")
    return {_key(row) for row in done}


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the CSV, in place of a broken one of the same run; nothing if a good one is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        rows: dict[Key, dict[str, Any]] = {_key(old): old for old in read_rows(path)}
        if rows.get(_key(row), {}).get("status") == "ok":
            return
        rows[_key(row)] = row
        whole = path.with_suffix(".part")
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        whole.replace(path)


def _key(row: dict[str, Any]) -> Key:
    return str(row["task"]), str(row["recipe"]), str(row["lr"]), str(row["seed"])


# Processes ------------------------------------------------------------------------------------------------------------

_children: set[subprocess.Popen[str]] = set()
_stopping = threading.Event()


def run_in_process(run: Run, settings: Settings, timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Make one run in a fresh process, and return its row: a broken one if it failed or took too long."""
    mine = replace(settings, seed=run.seed)
    asked = {"task": run.task, "recipe": run.recipe, "lr": run.lr, "settings": asdict(mine)}
    command = [sys.executable, "-m", f"{__package__}.one", json.dumps(asked)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as child:
        _children.add(child)
        if _stopping.is_set():  # it came too late to be among those that were ended
            child.kill()
        try:
            printed, errors = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            return broken_row(run.task, run.recipe, run.lr, mine, f"no end within {timeout:g} s")
        finally:
            _children.discard(child)
    if child.returncode:
        last = (errors.strip().splitlines() or [""])[-1]
        return broken_row(run.task, run.recipe, run.lr, mine, f"exit {child.returncode}: {last}"[:200])
    row: dict[str, Any] = json.loads(printed.splitlines()[-1])
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
    done = done_keys(path, settings)
    missing = [run for run in runs if run.key not in done]
    missing = [*_lost_yardsticks(missing, settings), *missing]
    pending: dict[Future[dict[str, Any]], Run] = {}
    made = 0
    with ThreadPoolExecutor(jobs) as pool, _children_end():
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
                add_row(path, row)
                report(run, row)
                made += 1


@contextmanager
def _children_end() -> Iterator[None]:
    """End the runs that are under way when the suite is stopped; the pool would wait for them."""
    _stopping.clear()
    try:
        yield
    except BaseException:
        _stopping.set()
        for child in tuple(_children):
            child.kill()
        raise


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
