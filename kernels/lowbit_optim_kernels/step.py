"""The step: one kernel for each number of slots; rule, formats and weight mode are compile-time constants.

A program steps one tile of one span of a parameter: `tiles` says which, and a row of `rows` has the span's addresses,
length and noise words (see `table`). Everything is read once and written once, and every scalar is read on the device,
so a captured launch can be replayed.

The weight is stored before the slots, which frees its registers for their codes, unless the first slot is carried: what
rounding takes from it then belongs to the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import load_slot, store_slot
from .memory import load_float
from .noise import element_index
from .table import COLUMN, FIRST, NUMEL, RUN, SLOT_WIDTH, SLOTS, STRIDE
from .weights import load_weight, store_weight


@triton.jit
def _place(tiles, rows, grads, proceed, WIDTH: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return (row, place of the gradient's address, first element, number of elements) of this program."""
    program = tl.program_id(0).to(tl.int64)
    span = tl.load(tiles + 2 * program).to(tl.int64)
    start = tl.load(tiles + 2 * program + 1) * TILE
    row = rows + span * WIDTH
    n = tl.load(row + NUMEL).to(tl.int32)
    if proceed is not None:
        # Without elements nothing is read or written.
        n = tl.where(tl.load(proceed), n, 0)
    if ALIGNED:
        n = tl.multiple_of(n, 32)
    return row, grads + span, start, n


@triton.jit
def _load(
    row,
    grad,
    start,
    n,
    scalars,
    MODE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return (weight, gradient, element counters) of a tile."""
    offsets = start + tl.arange(0, TILE)
    weight = load_weight(row, offsets, offsets < n, MODE, WEIGHT, ALIGNED)
    gradient = load_float(grad, offsets, offsets < n, GRAD, ALIGNED) * tl.load(scalars)
    column, run = tl.load(row + COLUMN).to(tl.int32), tl.load(row + RUN).to(tl.int32)
    first, stride = tl.load(row + FIRST).to(tl.int32), tl.load(row + STRIDE).to(tl.int32)
    return weight, gradient, element_index(offsets, first, column, run, stride, STRIDED)


@triton.jit
def _store(
    row,
    start,
    n,
    value,
    index,
    clock,
    MODE: tl.constexpr,
    WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store the weight of a tile."""
    offsets = start + tl.arange(0, TILE)
    store_weight(row, offsets, offsets < n, value, index, clock, MODE, WEIGHT, ALIGNED)


@triton.jit
def step_0(
    tiles,
    rows,
    grads,
    scalars,
    clock,
    proceed,
    RULE: tl.constexpr,
    CARRY: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Step rules without slots."""
    row, grad, start, n = _place(tiles, rows, grads, proceed, SLOTS, TILE, ALIGNED)
    weight, grad, index = _load(row, grad, start, n, scalars, MODE, WEIGHT, GRAD, STRIDED, TILE, ALIGNED)
    weight = RULE(weight, grad, scalars)
    _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)


@triton.jit
def step_1(
    tiles,
    rows,
    grads,
    scalars,
    clock,
    proceed,
    RULE: tl.constexpr,
    CARRY: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FORMAT_0: tl.constexpr,
):
    """Step rules with one slot."""
    slot_0: tl.constexpr = SLOTS
    row, grad, start, n = _place(tiles, rows, grads, proceed, SLOTS + SLOT_WIDTH, TILE, ALIGNED)
    weight, grad, index = _load(row, grad, start, n, scalars, MODE, WEIGHT, GRAD, STRIDED, TILE, ALIGNED)
    value_0 = load_slot(row, slot_0, start, n, FORMAT_0, TILE, ALIGNED)
    weight, value_0 = RULE(weight, grad, value_0, scalars)
    if FORMAT_0.carried == 0:
        _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)
    lost = store_slot(row, slot_0, start, n, value_0, index, clock, FORMAT_0, TILE, ALIGNED)
    if FORMAT_0.carried > 0:
        weight += FORMAT_0.carried * CARRY(lost, scalars)
        _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)


@triton.jit
def step_2(
    tiles,
    rows,
    grads,
    scalars,
    clock,
    proceed,
    RULE: tl.constexpr,
    CARRY: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FORMAT_0: tl.constexpr,
    FORMAT_1: tl.constexpr,
):
    """Step rules with two slots."""
    slot_0: tl.constexpr = SLOTS
    slot_1: tl.constexpr = SLOTS + SLOT_WIDTH
    row, grad, start, n = _place(tiles, rows, grads, proceed, SLOTS + 2 * SLOT_WIDTH, TILE, ALIGNED)
    weight, grad, index = _load(row, grad, start, n, scalars, MODE, WEIGHT, GRAD, STRIDED, TILE, ALIGNED)
    value_0 = load_slot(row, slot_0, start, n, FORMAT_0, TILE, ALIGNED)
    value_1 = load_slot(row, slot_1, start, n, FORMAT_1, TILE, ALIGNED)
    weight, value_0, value_1 = RULE(weight, grad, value_0, value_1, scalars)
    if FORMAT_0.carried == 0:
        _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)
    lost = store_slot(row, slot_0, start, n, value_0, index, clock, FORMAT_0, TILE, ALIGNED)
    if FORMAT_0.carried > 0:
        weight += FORMAT_0.carried * CARRY(lost, value_1, scalars)
        _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)
    store_slot(row, slot_1, start, n, value_1, index, clock, FORMAT_1, TILE, ALIGNED)


@triton.jit
def step_3(
    tiles,
    rows,
    grads,
    scalars,
    clock,
    proceed,
    RULE: tl.constexpr,
    CARRY: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FORMAT_0: tl.constexpr,
    FORMAT_1: tl.constexpr,
    FORMAT_2: tl.constexpr,
):
    """Step rules with three slots."""
    slot_0: tl.constexpr = SLOTS
    slot_1: tl.constexpr = SLOTS + SLOT_WIDTH
    slot_2: tl.constexpr = SLOTS + 2 * SLOT_WIDTH
    row, grad, start, n = _place(tiles, rows, grads, proceed, SLOTS + 3 * SLOT_WIDTH, TILE, ALIGNED)
    weight, grad, index = _load(row, grad, start, n, scalars, MODE, WEIGHT, GRAD, STRIDED, TILE, ALIGNED)
    value_0 = load_slot(row, slot_0, start, n, FORMAT_0, TILE, ALIGNED)
    value_1 = load_slot(row, slot_1, start, n, FORMAT_1, TILE, ALIGNED)
    value_2 = load_slot(row, slot_2, start, n, FORMAT_2, TILE, ALIGNED)
    weight, value_0, value_1, value_2 = RULE(weight, grad, value_0, value_1, value_2, scalars)
    if FORMAT_0.carried == 0:
        _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)
    lost = store_slot(row, slot_0, start, n, value_0, index, clock, FORMAT_0, TILE, ALIGNED)
    if FORMAT_0.carried > 0:
        weight += FORMAT_0.carried * CARRY(lost, value_1, value_2, scalars)
        _store(row, start, n, weight, index, clock, MODE, WEIGHT, TILE, ALIGNED)
    store_slot(row, slot_1, start, n, value_1, index, clock, FORMAT_1, TILE, ALIGNED)
    store_slot(row, slot_2, start, n, value_2, index, clock, FORMAT_2, TILE, ALIGNED)
