"""What is saved at one number of ranks is there when loaded at another, and training goes on as if nothing happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .launch import run_ranks
from .reshard import RECIPES, SHAPES, STEP_SIZE, Saved, assemble, gather, load, save

pytestmark = pytest.mark.distributed

FULL = [pytest.param(recipe, (1, 2, 3, 4), id=f"{recipe} full", marks=pytest.mark.slow) for recipe in RECIPES]


@pytest.mark.parametrize(
    ("recipe", "worlds"), [("int8 split8", (1, 2, 3)), ("int4 stochastic", (1, 2)), *FULL], ids=str
)
def test_reshard(tmp_path: Path, recipe: str, worlds: tuple[int, ...]) -> None:  # C9, C12, C19, C23, D1, D10
    folders = [tmp_path / str(world) for world in worlds]
    saved = [
        gather(run_ranks(world, save, folder, recipe, timeout=250))
        for world, folder in zip(worlds, folders, strict=True)
    ]
    # A matrix in which every shard holds whole blocks, or none does, would show little.
    assert all(len(before.aligned) == len(SHAPES) and sum(before.aligned.values()) >= 6 for before in saved)
    assert [all(before.aligned.values()) for before in saved] == [world == 1 for world in worlds]
    for world in worlds:
        on_ranks = run_ranks(world, load, folders, recipe, timeout=250)
        for place, before in enumerate(saved):
            after = gather([rank[place] for rank in on_ranks])
            check(before, after, str(RECIPES[recipe]["state"]), worlds[place] == world)


def check(before: Saved, after: Saved, state: str, same_world: bool) -> None:
    for key in before.at_save[0]:
        param, slot = key.split(".")
        same_blocks = state == "bf16" or same_world or (before.aligned[param] and after.aligned[param])
        expected, found = assemble(before.at_save, key), assemble(after.at_save, key)
        if same_blocks or slot not in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found, expected), key
        else:  # Decoded and encoded again in other blocks: within one code step.
            if state == "int4" and slot == "exp_avg_sq":
                # Its levels are even in fourth roots; the lowest one takes all that is below.
                step = expected.max() ** 0.25 / 16
                assert ((found**0.25 - expected**0.25).abs() <= 1.01 * step).all(), key
                continue
            scale = expected.abs().max() if slot == "exp_avg" else expected.abs()
            assert ((found - expected).abs() <= STEP_SIZE[state] * scale).all(), key
        if same_blocks:
            later, found_later = assemble(before.one_later, key), assemble(after.one_later, key)
            assert torch.equal(found_later, later), f"{key} one step later"
