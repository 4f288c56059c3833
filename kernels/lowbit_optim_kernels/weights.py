"""Weight modes: the device side of `lowbit_optim.weights`, with the same bits.

A `read` takes the stored weight as fp32 and the extra tensor, fp32 or int32, and returns the fp32 value. A `write`
takes a value and two draws, one new at each step and one that stays with its element, and returns the weight, as fp32
that the weight's dtype holds exactly unless that is fp16, and the extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from .memory import load_float, pointer, store_float
from .noise import (
    LARGEST,
    draw16,
    float_bits,
    float_from_bits,
    hash16,
    round_bits,
    round_nearest_bf16,
    stochastic_round_fp16,
)
from .table import EXTRA, EXTRA_LOW, VIEW_KEY, WEIGHT, WEIGHT_KEY


@dataclass(frozen=True)
class Mode:
    """What a kernel must know of a weight mode, as a constant.

    Attributes:
        write: device function.
        read: device function, or None where there is no extra tensor.
        extra: Triton dtype of the extra tensor, or None.
        low: whether a second extra tensor, of uint8, holds the lowest 8 bits of an int32.
    """

    write: Any
    read: Any = None
    extra: Any = None
    low: bool = False

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk knows the mode by."""
        functions = [function.cache_key for function in (self.write, self.read) if function is not None]
        return "/".join([*functions, str(self.extra), str(self.low)])

    def __str__(self) -> str:
        return self.cache_key


@triton.jit
def load_weight(row, offsets, mask, MODE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a tile of fp32 values of the weight."""
    weight = load_float(row + WEIGHT, offsets, mask, DTYPE, ALIGNED)
    if MODE.extra is not None:
        if MODE.extra.is_floating():
            extra = load_float(row + EXTRA, offsets, mask, MODE.extra, ALIGNED)
        else:
            extra = tl.load(pointer(row + EXTRA, MODE.extra, ALIGNED) + offsets, mask, other=0).to(tl.int32)
            if MODE.low:
                low = tl.load(pointer(row + EXTRA_LOW, tl.uint8, ALIGNED) + offsets, mask, other=0)
                extra = (extra << 8) + low.to(tl.int32)
        weight = MODE.read(weight, extra)
    return weight


@triton.jit
def store_weight(
    row, offsets, mask, value, index, clock, MODE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store a tile of fp32 values as weights, and what they lack as extra tensors."""
    low = tl.load(row + WEIGHT_KEY).to(tl.int32)
    high = tl.load(row + WEIGHT_KEY + 1).to(tl.int32)
    step_draw = draw16(index, low, high, clock, False)
    low = tl.load(row + VIEW_KEY).to(tl.int32)
    high = tl.load(row + VIEW_KEY + 1).to(tl.int32)
    weight, extra = MODE.write(value, step_draw, hash16(index, low, high), DTYPE)
    store_float(row + WEIGHT, offsets, mask, weight, DTYPE, ALIGNED)
    if MODE.extra is not None:
        if MODE.extra.is_floating():
            store_float(row + EXTRA, offsets, mask, extra, MODE.extra, ALIGNED)
        else:
            if MODE.low:
                tl.store(pointer(row + EXTRA_LOW, tl.uint8, ALIGNED) + offsets, (extra & 0xFF).to(tl.uint8), mask)
                extra = extra >> 8
            tl.store(pointer(row + EXTRA, MODE.extra, ALIGNED) + offsets, extra.to(MODE.extra), mask)


@triton.jit
def _nearest(value, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        value = round_nearest_bf16(value)
    return value


@triton.jit
def write_nearest(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Nearest.write`."""
    return _nearest(value, DTYPE), value


@triton.jit
def write_stochastic(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Stochastic.write`."""
    if DTYPE == tl.float16:
        weight = stochastic_round_fp16(value, step_draw)
    else:
        weight = round_bits(value, 16, step_draw)
    return weight, value


@triton.jit
def read_kahan(weight, compensation):
    """`Kahan.read`."""
    # Adding 0.0 would turn -0.0 into 0.0.
    return tl.where(compensation == 0, weight, weight + compensation)


@triton.jit
def _split_sum(value, weight):
    rest = tl.where(tl.abs(weight) <= LARGEST, round_bits(value - weight, 16, 0), 0.0)
    return weight, rest


@triton.jit
def write_kahan(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Kahan.write` under the nearest view."""
    value = round_bits(value, 7, step_draw >> 9)
    return _split_sum(value, round_bits(value, 16, 0x8000))


@triton.jit
def write_kahan_dithered(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Kahan.write` under the dithered view."""
    value = round_bits(value, 8, step_draw >> 8)
    return _split_sum(value, round_bits(value, 16, fixed_draw))


@triton.jit
def _read_split(weight, correction, KEPT: tl.constexpr):
    pattern = float_bits(weight)
    upper = (pattern >> 16) & 0x7FFF
    # A weight that somebody else overwrote may be smaller than its stale correction.
    magnitude = tl.maximum((upper << KEPT) + correction, 0)
    return float_from_bits((magnitude << (16 - KEPT)) | (pattern & -0x80000000))


@triton.jit
def _write_split(value, step_draw, view_offset, KEPT: tl.constexpr):
    dropped: tl.constexpr = 16 - KEPT
    if dropped > 0:
        value = round_bits(value, dropped, step_draw >> KEPT)
    pattern = float_bits(value)
    magnitude = pattern & 0x7FFFFFFF
    magnitude = tl.where(magnitude > 0x7F800000, 0x7FC00000, magnitude) >> dropped
    upper = (magnitude + (view_offset >> dropped)) >> KEPT
    weight = float_from_bits((upper << 16) | (pattern & -0x80000000))
    return weight, magnitude - (upper << KEPT)


@triton.jit
def read_split8(weight, correction):
    """`Split.read`, 8 bits, dithered view."""
    return _read_split(weight, correction, 7)


@triton.jit
def write_split8(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Split.write`, 8 bits, dithered view."""
    return _write_split(value, step_draw, fixed_draw, 7)


@triton.jit
def read_split8_nearest(weight, correction):
    """`Split.read`, 8 bits, nearest view."""
    return _read_split(weight, correction, 8)


@triton.jit
def write_split8_nearest(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Split.write`, 8 bits, nearest view."""
    return _write_split(value, step_draw, 0x8000, 8)


@triton.jit
def read_split16(weight, correction):
    """`Split.read`, 16 bits, nearest view."""
    return _read_split(weight, correction, 16)


@triton.jit
def write_split16(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Split.write`, 16 bits, nearest view."""
    return _write_split(value, step_draw, 0x8000, 16)


@triton.jit
def read_split16_dithered(weight, correction):
    """`Split.read`, 16 bits, dithered view."""
    return _read_split(weight, correction, 15)


@triton.jit
def write_split16_dithered(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Split.write`, 16 bits, dithered view."""
    return _write_split(value, step_draw, fixed_draw, 15)


@triton.jit
def read_master(weight, master):
    """`Master.read`."""
    return master


@triton.jit
def write_master(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Master.write` under the nearest view."""
    return _nearest(value, DTYPE), value


@triton.jit
def write_master_dithered(value, step_draw, fixed_draw, DTYPE: tl.constexpr):
    """`Master.write` under the dithered view."""
    return round_bits(value, 16, fixed_draw), value
