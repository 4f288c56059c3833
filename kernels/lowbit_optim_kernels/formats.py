"""State formats: loading a tile of a slot as fp32, and storing one; the device side of `lowbit_optim.formats`.

A block format is two device functions, the `level` and the `floor` or `round` of its map with its roots. Blocks,
scales, signs, packing and rounding are here, once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from . import maps
from .memory import load_float, pointer, store_float
from .noise import LARGEST, draw16, float_bits, float_from_bits, round_bits, round_nearest_bf16
from .table import CODES, KEY, SCALE


@dataclass(frozen=True)
class Format:
    """What a kernel must know of a slot's format, as a constant.

    Attributes:
        dtype: Triton dtype of the values of a plain format, of the scales of a block format.
        rounding: "nearest", "dither" or "independent".
        block: elements that share a scale; 1 is a plain format.
        bits: bits of a code.
        signed: whether codes have a sign.
        center: the code of zero where codes count up from it, -1 where the top bit is the sign.
        keep_positive: whether values above zero stay off code 0.
        last: the highest magnitude code.
        level: device function of the map's levels.
        floor: device function of the level below, or None where there is `round`.
        round: device function that draws between the roots of levels, or None to draw between levels.
        carried: share of what rounding takes from the slot that the weight is given.
    """

    dtype: Any
    rounding: str
    block: int = 1
    bits: int = 0
    signed: bool = True
    center: int = -1
    keep_positive: bool = False
    last: int = 0
    level: Any = None
    floor: Any = None
    round: Any = None
    carried: float = 0.0

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk knows the format by: a changed device function is another format."""
        functions = [getattr(function, "cache_key", "") for function in (self.level, self.floor, self.round)]
        facts = (self.dtype, self.rounding, self.block, self.bits, self.signed, self.center, self.keep_positive)
        return "/".join(map(str, [*facts, self.last, self.carried, *functions]))

    def __str__(self) -> str:
        return self.cache_key


@triton.jit
def load_slot(row, slot, start, n, FORMAT: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a tile of a slot as fp32."""
    if FORMAT.block == 1:
        offsets = start + tl.arange(0, TILE)
        values = load_float(row + slot + CODES, offsets, offsets < n, FORMAT.dtype, ALIGNED)
    else:
        code = _load_codes(row + slot + CODES, start, n, FORMAT, TILE, ALIGNED)
        blocks = start // FORMAT.block + tl.arange(0, TILE // FORMAT.block)
        mask = blocks < tl.cdiv(n, FORMAT.block)
        values = _decode(code, load_float(row + slot + SCALE, blocks, mask, FORMAT.dtype, False), FORMAT, TILE)
    return values


@triton.jit
def store_slot(
    row, slot, start, n, values, index, clock, FORMAT: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store a tile of fp32 values of a slot; return what rounding took from them, where the format is carried."""
    lost = 0.0
    offsets = start + tl.arange(0, TILE)
    low = tl.load(row + slot + KEY).to(tl.int32)
    high = tl.load(row + slot + KEY + 1).to(tl.int32)
    draw = draw16(index, low, high, clock, FORMAT.rounding == "independent")
    if FORMAT.block == 1:
        if FORMAT.dtype == tl.bfloat16:
            values = round_nearest_bf16(values) if FORMAT.rounding == "nearest" else round_bits(values, 16, draw)
        store_float(row + slot + CODES, offsets, offsets < n, values, FORMAT.dtype, ALIGNED)
    else:
        code, scale = _encode(values, draw, FORMAT, TILE)
        _store_codes(row + slot + CODES, start, n, code, FORMAT, TILE, ALIGNED)
        blocks = start // FORMAT.block + tl.arange(0, TILE // FORMAT.block)
        store_float(row + slot + SCALE, blocks, blocks < tl.cdiv(n, FORMAT.block), scale, FORMAT.dtype, False)
        if FORMAT.carried > 0:
            lost = values - _decode(code, scale, FORMAT, TILE)
    return lost


@triton.jit
def _decode(code, scale, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Return a tile of fp32 values from int32 codes in rows of a block and the fp32 scale of each block."""
    scale = scale[:, None]
    if FORMAT.signed:
        if FORMAT.center < 0:
            sign_bit: tl.constexpr = 1 << (FORMAT.bits - 1)
            scale = tl.where(code >= sign_bit, -scale, scale)
            code = code & (sign_bit - 1)
        else:
            scale = tl.where(code < FORMAT.center, -scale, scale)
            code = tl.abs(code - FORMAT.center)
    return tl.reshape(FORMAT.level(code) * scale, [TILE])


@triton.jit
def _encode(values, draw, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Return int32 codes in rows of a block, with their signs, and the fp32 scale of each block."""
    rows: tl.constexpr = TILE // FORMAT.block
    values = tl.reshape(values, [rows, FORMAT.block])
    magnitude = tl.abs(values) if FORMAT.signed else values
    magnitude = tl.where(magnitude <= LARGEST, magnitude, 0.0)
    scale = tl.max(magnitude, axis=1)
    if FORMAT.dtype == tl.bfloat16:
        # Up to the next bf16 value, but not to infinity.
        scale = float_from_bits(tl.minimum((float_bits(scale) + 0xFFFF) & -0x10000, 0x7F7F0000))
    # One division for the block, as the reference has it. Small scales are lifted first: the reciprocal of a subnormal
    # number is infinite.
    lift = tl.where(scale < 5.421010862427522e-20, 18446744073709551616.0, 1.0)
    share = magnitude * lift[:, None] * tl.div_rn(1.0, tl.where(scale == 0, 1.0, scale * lift))[:, None]
    if FORMAT.rounding == "nearest":
        chance = 0.5
    else:
        chance = tl.reshape(draw, [rows, FORMAT.block]).to(tl.float32) * 0.0000152587890625
    if FORMAT.round is None:
        code = FORMAT.floor(share)
        below = FORMAT.level(code)
        up = chance * (FORMAT.level(code + 1) - below) < share - below
        code = tl.where(up, code + 1, code)
    else:
        code = FORMAT.round(share, chance)
    code = tl.minimum(code.to(tl.int32), FORMAT.last)
    if FORMAT.keep_positive:
        code = tl.where(magnitude > 0, tl.maximum(code, 1), code)
    if FORMAT.signed:
        negative = (values < 0) & (code > 0)
        if FORMAT.center < 0:
            code = tl.where(negative, code | (1 << (FORMAT.bits - 1)), code)
        else:
            # The lower half has one code less than the upper one.
            code = FORMAT.center + tl.where(negative, -tl.minimum(code, FORMAT.center), code)
    return code, scale


@triton.jit
def _code_offsets(start, n, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Return the offsets of a tile's bytes of codes and their mask; a short last block is stored whole."""
    offsets = start * FORMAT.bits // 8 + tl.arange(0, TILE * FORMAT.bits // 8)
    return offsets, offsets < tl.cdiv(n, FORMAT.block) * (FORMAT.block * FORMAT.bits // 8)


@triton.jit
def _load_codes(place, start, n, FORMAT: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return int32 codes in rows of a block."""
    offsets, mask = _code_offsets(start, n, FORMAT, TILE)
    code = tl.load(pointer(place, tl.uint8, ALIGNED) + offsets, mask, other=0).to(tl.int32)
    if FORMAT.bits == 4:
        # Low nibbles are the first half of a block, high nibbles the second.
        halves = tl.reshape(tl.join(code & 15, code >> 4), [TILE // FORMAT.block, FORMAT.block // 2, 2])
        code = tl.permute(halves, [0, 2, 1])
    return tl.reshape(code, [TILE // FORMAT.block, FORMAT.block])


@triton.jit
def _store_codes(place, start, n, code, FORMAT: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store int32 codes, given in rows of a block."""
    offsets, mask = _code_offsets(start, n, FORMAT, TILE)
    if FORMAT.bits == 4:
        halves = tl.reshape(code, [TILE // FORMAT.block, 2, FORMAT.block // 2])
        low, high = tl.split(tl.permute(halves, [0, 2, 1]))
        code = low | (high << 4)
    code = tl.reshape(code, [TILE * FORMAT.bits // 8])
    tl.store(pointer(place, tl.uint8, ALIGNED) + offsets, code.to(tl.uint8), mask)


# The library's maps, with the square roots that are taken before them ------------------------------------------------


@triton.jit
def fp8_signed_level(code):
    """Level of `fp8` for signed slots."""
    return maps.float8_level(code, 0)


@triton.jit
def fp8_signed_floor(share):
    """Floor of `fp8` for signed slots."""
    return maps.float8_floor(share, 0)


@triton.jit
def fp8_unsigned_level(code):
    """Level of `fp8` for second moments."""
    root = maps.float8_level(code, 1)
    return root * root


@triton.jit
def fp8_unsigned_floor(share):
    """Floor of `fp8` for second moments."""
    return maps.float8_floor(tl.sqrt(share), 1)


@triton.jit
def int8_signed_level(code):
    """Level of `int8` for signed slots."""
    root = maps.linear_level(code, 127, 0)
    root = root * root
    return root * root


@triton.jit
def int8_signed_floor(share):
    """Floor of `int8` for signed slots."""
    return maps.linear_floor(tl.sqrt(tl.sqrt(share)), 127, 0)


@triton.jit
def int8_unsigned_level(code):
    """Level of `int8` for second moments."""
    root = maps.linear_level(code, 256, 1)
    root = root * root
    root = root * root
    return root * root


@triton.jit
def int8_unsigned_round(share, chance):
    """Rounding of `int8` for second moments."""
    return maps.linear_round(tl.sqrt(tl.sqrt(tl.sqrt(share))), chance, 256, 1)


@triton.jit
def int4_signed_level(code):
    """Level of `int4` for signed slots."""
    return maps.power_level(code, 7, True)


@triton.jit
def int4_signed_floor(share):
    """Floor of `int4` for signed slots."""
    return maps.power_floor(share, 7)


@triton.jit
def int4_unsigned_level(code):
    """Level of `int4` for second moments."""
    root = maps.linear_level(code, 16, 1)
    root = root * root
    return root * root


@triton.jit
def int4_unsigned_round(share, chance):
    """Rounding of `int4` for second moments."""
    return maps.linear_round(tl.sqrt(tl.sqrt(share)), chance, 16, 1)


@triton.jit
def int4_ratio_level(code):
    """Level of `int4` for ratios."""
    return maps.linear_level(code, 7, 0)


@triton.jit
def int4_ratio_round(share, chance):
    """Rounding of `int4` for ratios."""
    return maps.linear_round(share, chance, 7, 0)


@triton.jit
def dynamic_signed_level(code):
    """Level of `int8-dynamic` for signed slots."""
    return maps.dynamic_level(code, 0)


@triton.jit
def dynamic_signed_floor(share):
    """Floor of `int8-dynamic` for signed slots."""
    return maps.dynamic_floor(share, 0)


@triton.jit
def dynamic_unsigned_level(code):
    """Level of `int8-dynamic` for second moments."""
    return maps.dynamic_level(code, 1)


@triton.jit
def dynamic_unsigned_floor(share):
    """Floor of `int8-dynamic` for second moments."""
    return maps.dynamic_floor(share, 1)
