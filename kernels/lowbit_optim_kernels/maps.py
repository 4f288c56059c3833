"""Maps: the device side of `lowbit_optim.maps`, with the same arithmetic in the same order.

A `level` takes codes as int32 or fp32 and returns fp32 magnitudes. A `floor` returns codes in whichever of the two
its arithmetic ends with, so that no conversion is paid for twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import float_bits, float_from_bits


@triton.jit
def linear_level(code, TOP: tl.constexpr, FIRST: tl.constexpr):
    """Magnitude of a code among evenly spaced levels `(code + FIRST) / TOP`."""
    return (code.to(tl.float32) + FIRST) * (1.0 / TOP)


@triton.jit
def linear_floor(magnitude, TOP: tl.constexpr, FIRST: tl.constexpr):
    """Largest code of evenly spaced levels whose level does not exceed `magnitude`, or 0."""
    return tl.maximum(tl.floor(magnitude * TOP) - FIRST, 0.0)


@triton.jit
def linear_round(magnitude, chance, TOP: tl.constexpr, FIRST: tl.constexpr):
    """Code of the level at or below `magnitude`, or the next one where its place between the two and chance reach 1."""
    return tl.maximum(tl.floor(magnitude * TOP + chance) - FIRST, 0.0)


@triton.jit
def power_level(code, LAST: tl.constexpr, ZERO: tl.constexpr):
    """Magnitude of a code among powers of two; with `ZERO`, code 0 stands for zero."""
    value = float_from_bits((code + (127 - LAST)) << 23)
    if ZERO:
        value = tl.where(code == 0, 0.0, value)
    return value


@triton.jit
def power_floor(magnitude, LAST: tl.constexpr):
    """Largest code of powers of two whose level does not exceed `magnitude`, or 0."""
    return tl.maximum((float_bits(magnitude) >> 23) - (127 - LAST), 0)


@triton.jit
def float8_level(code, FIRST: tl.constexpr):
    """Magnitude of float8 e4m3 over its largest, 448; codes are bit patterns less `FIRST`."""
    pattern = code + FIRST
    normal = float_from_bits((pattern << 20) + (120 << 23))
    return tl.where(pattern < 8, pattern.to(tl.float32) * 0.001953125, normal) * (1.0 / 448.0)


@triton.jit
def float8_floor(magnitude, FIRST: tl.constexpr):
    """Largest code of float8 e4m3 whose level does not exceed `magnitude`, or 0."""
    value = magnitude * 448.0
    normal = (float_bits(value) >> 20) - (120 << 3)
    pattern = tl.where(value < 0.015625, (value * 512.0).to(tl.int32), normal)
    return tl.maximum(pattern - FIRST, 0)


@triton.jit
def dynamic_level(code, OCTAVE: tl.constexpr):
    """Magnitude of a code of the dynamic tree map: decades of evenly spaced midpoints."""
    last = (128 << OCTAVE) - OCTAVE
    code = code.to(tl.float32)
    value = tl.zeros_like(code)
    for i in tl.static_range(7):
        first = (1 << (i + OCTAVE)) - OCTAVE
        midpoint = 0.1 + (code - first + 0.5) * (0.9 / (1 << (i + OCTAVE)))
        value = tl.where(code >= first, midpoint * 10.0 ** (i - 6), value)
    # One past the last code is out of the table; anything above 1 serves.
    return tl.where(code >= last, 1.0 + (code - last), value)


@triton.jit
def dynamic_floor(magnitude, OCTAVE: tl.constexpr):
    """Largest code of the dynamic tree map whose level does not exceed `magnitude`, or 0."""
    last = (128 << OCTAVE) - OCTAVE
    code = tl.zeros_like(magnitude)
    for i in tl.static_range(7):
        count = 1 << (i + OCTAVE)
        place = (magnitude * 10.0 ** (6 - i) - 0.1) * (count / 0.9) - 0.5
        step = tl.minimum(tl.floor(place), count - 1.0)
        code = tl.where(place >= 0, (count - OCTAVE) + step, code)
    return tl.where(magnitude >= 1.0, last * 1.0, code)
