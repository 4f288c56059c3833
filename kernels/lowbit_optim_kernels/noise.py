"""Random bits by hashing and rounding by bits: the device side of `lowbit_optim.noise`, with the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

_MULTIPLIER_1: tl.constexpr = tl.constexpr(0x7FEB352D)
_MULTIPLIER_2: tl.constexpr = tl.constexpr(0x846CA68B)
# The largest finite fp32. `abs(x) <= LARGEST` is false for infinities and for NaN.
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def float_bits(x):
    """View fp32 as int32 bit patterns."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_from_bits(bits):
    """View int32 bit patterns as fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def hash16(index, low, high):
    """Hash int32 element counters with a key of two int32 words to 16 bits, in int32."""
    x = (index ^ low).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _MULTIPLIER_1
    x = x ^ high.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * _MULTIPLIER_2
    return (x >> 16).to(tl.int32, bitcast=True)


@triton.jit
def element_index(place, first, column, run, stride, STRIDED: tl.constexpr):
    """Return int32 counters of the elements at `place` of a span, from the words of `lowbit_optim.noise.Region`."""
    if STRIDED:
        place += column
        row = place // run
        place = row * stride + (place - row * run)
    return place + first


@triton.jit
def draw16(index, low, high, clock, INDEPENDENT: tl.constexpr):
    """Return the 16-bit draws of elements: hashes that the clock moves on, or hashes that are new at each step."""
    if INDEPENDENT:
        draw = hash16(index, low, high ^ tl.load(clock + 1))
    else:
        draw = (hash16(index, low, high) + tl.load(clock)) & 0xFFFF
    return draw


@triton.jit
def keep_nonfinite(x, rounded):
    """Return `rounded`, but infinities and NaN as they were."""
    return tl.where(tl.abs(x) <= LARGEST, rounded, x)


@triton.jit
def round_bits(x, DROPPED: tl.constexpr, draw):
    """Round fp32 values to `23 - DROPPED` mantissa bits: add `draw` (below 2^DROPPED) and truncate."""
    return keep_nonfinite(x, float_from_bits((float_bits(x) + draw) & -(1 << DROPPED)))


@triton.jit
def round_nearest_bf16(x):
    """Round fp32 values to the nearest that bf16 holds, ties to even."""
    bits = float_bits(x)
    return keep_nonfinite(x, float_from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000))


@triton.jit
def stochastic_round_fp16(x, draw):
    """Round fp32 to values that fp16 holds exactly; `draw` is uniform on [0, 65536)."""
    normal = round_bits(x, 13, draw >> 3)
    # Below 2^-14 fp16 has a fixed spacing of 2^-24.
    units = x * 16777216.0
    below = tl.floor(units)
    up = draw.to(tl.float32) * 0.0000152587890625 < units - below
    subnormal = tl.where(up, below + 1.0, below) * 0.000000059604644775390625
    # The sign of x, for zeros too.
    subnormal = float_from_bits((float_bits(subnormal) & 0x7FFFFFFF) | (float_bits(x) & -0x80000000))
    return tl.where(tl.abs(x) < 0.00006103515625, subnormal, normal)
