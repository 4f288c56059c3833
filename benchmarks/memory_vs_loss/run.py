"""One run: a task, a recipe, a learning rate and a seed become a row of the CSV."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..harness import median_ms, state_tensors, storage_bytes
from .recipes import RECIPES, Recipe, exact_weights, intended_updates
from .tasks import CACHE, TASKS, Problem, Settings, train

COLUMNS = (
    *("task", "recipe", "optimizer", "weights", "state", "lr", "seed", "steps"),
    *("bytes_per_param", "state_bytes", "val_loss", "gap_pct", "distance", "lost_pct", "peak_rss_mib", "step_ms"),
    *("start_loss", "decoded_loss", "status"),
)
#: Steps of a run at which the share of lost updates is measured, evenly spread.
SAMPLES = 8


def endpoint_path(task: str, optimizer: str, lr: float, settings: Settings, steps: int) -> Path:
    """Return where the yardstick's final weights and loss are kept."""
    return CACHE / f"end-{task}-{optimizer}-lr{lr:g}-x{settings.scale}-{steps}-seed{settings.seed}.pt"


def validate(problem: Problem) -> float:
    """Return the mean validation loss of the weights as they are stored."""
    with torch.no_grad():
        losses = [problem.loss_of(batch).item() for batch in problem.validation]
    return sum(losses) / len(losses)


def clock(device: str) -> float:
    """Return seconds: this process's own on a CPU, whatever else runs there; on a GPU those that it is done at."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_rss_mib() -> float:
    """Return the most memory that this process has had resident, in MiB; NaN where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    # Not getrusage, whose maximum a process inherits from the one that started it.
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def one_run(task_name: str, recipe_name: str, lr: float, settings: Settings) -> dict[str, Any]:
    """Train, and return the row.

    Args:
        task_name: a key of `TASKS`.
        recipe_name: a key of `RECIPES`.
        lr: learning rate.
        settings: of the run. The run of the recipe's yardstick with the same ones should have been made before.
    """
    task, recipe = TASKS[task_name], RECIPES[recipe_name]
    steps = task.steps_in(settings)
    problem = task.build(settings)
    model = problem.model.to(settings.device, recipe.dtype)
    params = list(model.parameters())
    start = [param.detach().float().clone() for param in params]
    optimizer = recipe.make(model.named_parameters(), lr, settings.seed)
    start_loss = validate(problem)
    sampled = {steps * (2 * place + 1) // (2 * SAMPLES) for place in range(SAMPLES)}
    seconds, kept, meant = [], 0.0, 0.0
    for number, step in enumerate(train(problem, optimizer, steps, task)):
        if number in sampled and number:
            before = exact_weights(model, optimizer)
            updates = intended_updates(recipe, optimizer, before)
        began = clock(settings.device)
        step()
        seconds.append(clock(settings.device) - began)
        if number in sampled and number:
            moved = [new - old for new, old in zip(exact_weights(model, optimizer), before, strict=True)]
            kept += dot(moved, updates)
            meant += dot(updates, updates)
    weights = exact_weights(model, optimizer)
    numel = sum(param.numel() for param in params)
    state_bytes = storage_bytes(state_tensors(optimizer))
    row: dict[str, Any] = {
        "task": task.name,
        "recipe": recipe.name,
        "optimizer": recipe.optimizer,
        "weights": recipe.weights,
        "state": recipe.state,
        "lr": f"{lr:g}",
        "seed": settings.seed,
        "steps": steps,
        "bytes_per_param": round((storage_bytes([p.detach() for p in params]) + state_bytes) / numel, 4),
        "state_bytes": state_bytes,
        "lost_pct": round(100 * (1 - kept / meant), 2) if meant else math.nan,
        "step_ms": round(median_ms(seconds), 3),
        "start_loss": round(start_loss, 6),
        "val_loss": round(validate(problem), 6),
        "peak_rss_mib": round(peak_rss_mib(), 1),
        "status": "ok",
    }
    row["decoded_loss"] = round(_decoded_loss(problem, weights), 6)
    row.update(_against_yardstick(recipe, row, start, weights, lr, settings))
    return {column: row[column] for column in COLUMNS}


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the sum of products over two lists of tensors, in double precision."""
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))


def distance(weights: Sequence[Tensor], exact: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Return how far weights end from the exact ones, as a share of the way that these went from the start."""
    apart = [mine - theirs for mine, theirs in zip(weights, exact, strict=True)]
    travelled = [theirs - old for theirs, old in zip(exact, start, strict=True)]
    return math.sqrt(dot(apart, apart) / dot(travelled, travelled))


def _decoded_loss(problem: Problem, weights: Sequence[Tensor]) -> float:
    """Return the validation loss of the exact weights; the model is left with those."""
    model = problem.model.float()
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
    return validate(problem)


def _against_yardstick(
    recipe: Recipe, row: dict[str, Any], start: list[Tensor], weights: list[Tensor], lr: float, settings: Settings
) -> dict[str, float]:
    """Return gap and distance; the yardstick's own run leaves what they need on disk."""
    path = endpoint_path(row["task"], recipe.optimizer, lr, settings, row["steps"])
    if recipe.name == recipe.yardstick:
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": weights, "loss": row["val_loss"]}, path)
        return {"gap_pct": 0.0, "distance": 0.0}
    if not path.exists():
        return {"gap_pct": math.nan, "distance": math.nan}
    end = torch.load(path, weights_only=True, map_location=settings.device)
    return {
        "gap_pct": round(100 * (row["val_loss"] / end["loss"] - 1), 4),
        "distance": round(distance(weights, end["weights"], start), 5),
    }


def broken_row(task_name: str, recipe_name: str, lr: float, settings: Settings, status: str) -> dict[str, Any]:
    """Return the row of a run that gave none: figures are NaN, and `status` says why."""
    recipe = RECIPES[recipe_name]
    row = dict.fromkeys(COLUMNS, math.nan)
    known = {"task": task_name, "recipe": recipe_name, "lr": f"{lr:g}", "seed": settings.seed, "status": status}
    kinds = {"optimizer": recipe.optimizer, "weights": recipe.weights, "state": recipe.state}
    return {**row, **known, **kinds, "steps": TASKS[task_name].steps_in(settings)}
