"""Loads and stores of floating-point tiles.

bf16 is moved as 16-bit integers: the top half of the fp32 pattern. So nothing depends on how a compiler or an
interpreter casts, and rounding is done by those who know how.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import float_bits, float_from_bits


@triton.jit
def pointer(place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer that the table holds at `place`; `ALIGNED` promises multiples of 16 bytes."""
    address = tl.load(place).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def load_float(place, offsets, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return elements of a tensor of fp32, fp16 or bf16 as fp32; 0 where masked."""
    if DTYPE == tl.bfloat16:
        bits = tl.load(pointer(place, tl.int16, ALIGNED) + offsets, mask, other=0)
        values = float_from_bits(bits.to(tl.int32) << 16)
    else:
        values = tl.load(pointer(place, DTYPE, ALIGNED) + offsets, mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def store_float(place, offsets, mask, values, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store fp32 values in fp32, in fp16 rounded to nearest, or in bf16, which must hold them exactly."""
    if DTYPE == tl.bfloat16:
        bits = (float_bits(values) >> 16).to(tl.int16)
        tl.store(pointer(place, tl.int16, ALIGNED) + offsets, bits, mask)
    else:
        tl.store(pointer(place, DTYPE, ALIGNED) + offsets, values.to(DTYPE), mask)
