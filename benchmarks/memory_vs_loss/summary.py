"""What the rows of the CSV say: means and standard errors over seeds, paired with the yardstick's rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .recipes import RECIPES
from .tasks import TASKS

Row = Mapping[str, str]


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error, NaN where there are fewer than two."""

    value: float
    error: float

    @property
    def known(self) -> bool:
        """Whether there is anything to say."""
        return not math.isnan(self.value)

    def within(self, limit: float) -> bool:
        """Whether the mean is at most `limit`, or no more above zero than its own standard error."""
        return self.value <= limit or self.value <= self.error

    def text(self, spec: str) -> str:
        """Return the mean, with its standard error if there is one, each in the format `spec`."""
        if not self.known:
            return "-"
        if math.isnan(self.error):
            return format(self.value, spec)
        return f"{self.value:{spec}} ± {self.error:{spec.lstrip('+')}}"


def mean(values: Iterable[float]) -> Mean:
    """Return the mean of the values that are numbers."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Mean(math.nan, math.nan)
    error = statistics.stdev(finite) / math.sqrt(len(finite)) if len(finite) > 1 else math.nan
    return Mean(statistics.fmean(finite), error)


@dataclass(frozen=True)
class Cell:
    """One recipe on one task at one learning rate, over its seeds.

    Attributes:
        task: name of the task.
        recipe: name of the recipe.
        lr: learning rate, as the CSV writes it.
        rows: by seed.
        gap: of the loss to that of the yardstick, in percent, seed by seed.
        visible: share of the improvement of training wholly in fp32 that the stored weights make, in percent.
        decoded: the same for the exact weights.
    """

    task: str
    recipe: str
    lr: str
    rows: Mapping[str, Row]
    gap: Mean
    visible: Mean
    decoded: Mean

    def over(self, column: str) -> Mean:
        """Return the mean of a column over seeds."""
        return mean(float(row[column]) for row in self.rows.values())

    @property
    def broken(self) -> int:
        """How many runs gave no finite loss."""
        return sum(not math.isfinite(float(row["val_loss"])) for row in self.rows.values())


class Results:
    """All rows of a CSV, by task, recipe, learning rate and seed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {(row["task"], row["recipe"], row["lr"], row["seed"]): row for row in rows}

    def cell(self, task: str, recipe: str, lr: str) -> Cell | None:
        """Return a recipe's runs on a task at a learning rate, None if there are none."""
        mine = {key[3]: row for key, row in self.rows.items() if key[:3] == (task, recipe, lr)}
        if not mine:
            return None
        gaps, visible, decoded = [], [], []
        for seed, row in mine.items():
            yardstick = self.rows.get((task, RECIPES[recipe].yardstick, lr, seed))
            if yardstick:
                gaps.append(100 * (float(row["val_loss"]) / float(yardstick["val_loss"]) - 1))
            exact = self.rows.get((task, "torch fp32", lr, seed))
            if exact:
                gained = float(exact["start_loss"]) - float(exact["val_loss"])
                visible.append(100 * (float(row["start_loss"]) - float(row["val_loss"])) / gained)
                decoded.append(100 * (float(row["start_loss"]) - float(row["decoded_loss"])) / gained)
        return Cell(task, recipe, lr, mine, mean(gaps), mean(visible), mean(decoded))

    def cells(self, task: str, lr: str | None = None) -> list[Cell]:
        """Return the cells of a task, at each optimizer's own learning rate or at a given one, in recipes' order."""
        found = []
        for recipe in RECIPES.values():
            own = [f"{rate:g}" for rate in TASKS[task].lrs.get(recipe.optimizer, ())]
            for rate in own if lr is None else [lr]:
                cell = self.cell(task, recipe.name, rate)
                found += [cell] if cell else []
        return found

    def best(self, task: str, recipe: str) -> Cell | None:
        """Return the cell with the lowest loss of all learning rates, None if fewer than three were run."""
        rates = {key[2] for key in self.rows if key[:2] == (task, recipe)}
        cells = [cell for rate in rates if (cell := self.cell(task, recipe, rate)) and cell.over("val_loss").known]
        return min(cells, key=lambda cell: cell.over("val_loss").value) if len(cells) >= 3 else None


def gap_at_best(results: Results, task: str, recipe: str) -> Mean:
    """Return the gap with recipe and yardstick each at its own best learning rate, in percent."""
    mine, theirs = results.best(task, recipe), results.best(task, RECIPES[recipe].yardstick)
    if mine is None or theirs is None:
        return Mean(math.nan, math.nan)
    shared = mine.rows.keys() & theirs.rows.keys()
    pairs = [(float(mine.rows[seed]["val_loss"]), float(theirs.rows[seed]["val_loss"])) for seed in shared]
    return mean(100 * (ours / reference - 1) for ours, reference in pairs)
