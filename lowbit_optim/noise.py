"""Counter-based random bits: a hash of (seed, purpose, parameter, step, element index).

Nothing is drawn from torch's generators, so replicas agree, a resumed run repeats the bits of one that never
stopped, and the layout of shards does not matter. Everything is 32-bit integer arithmetic that wraps, which eager
torch, Inductor's C++ and Triton compute alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Multipliers and shifts of the "lowbias32" finalizer (C. Wellons, Hash Function Prospector).
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
_MASK32 = 0xFFFFFFFF
# Rows of a shard that are longer are taken one by one, so that 32-bit words hold all there is to say of a span.
_LONGEST_RUN = 1 << 30
# 2^16 divided by the golden ratio, made odd: a Weyl sequence with the lowest discrepancy that 16 bits allow.
GOLDEN16 = 40503
#: The largest finite fp32. `abs(x) <= LARGEST` is false for infinities and for NaN.
LARGEST = torch.finfo(torch.float32).max


def signed32(value: int) -> int:
    """Return the low 32 bits of `value` as the signed integer an int32 tensor holds."""
    value &= _MASK32
    return value - (1 << 32) if value >> 31 else value


def _mix32(value: int) -> int:
    value &= _MASK32
    value = ((value ^ (value >> 16)) * _MULTIPLIER_1) & _MASK32
    value = ((value ^ (value >> 15)) * _MULTIPLIER_2) & _MASK32
    return value ^ (value >> 16)


def make_key(*words: int) -> tuple[int, int]:
    """Hash integers of any size into the two signed 32-bit words that key `hash16`."""
    low, high = 0x243F6A88, 0x85A308D3  # first digits of pi: an arbitrary start
    for word in words:
        while True:
            low = _mix32(low ^ (word & _MASK32))
            high = _mix32(high + low)
            word >>= 32
            if word in (0, -1):
                break
        if word == -1:
            low = _mix32(~low)
    return signed32(low), signed32(high)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int32 shifts are arithmetic; the mask makes them logical.
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def hash16(index: Tensor, key: tuple[Tensor | int, Tensor | int]) -> Tensor:
    """Hash element indices to 16 bits.

    Args:
        index: int32 element counters, any shape.
        key: two int32 words, as Python integers or 0-d tensors.

    Returns:
        int32 tensor of the shape of `index`, uniform on [0, 65536).
    """
    # The key comes first: a compiler that knows an index is not negative must not reason about the product's sign.
    x = index ^ key[0]
    x = (x ^ _shift_right(x, 16)) * signed32(_MULTIPLIER_1)
    x = x ^ key[1]
    x = (x ^ _shift_right(x, 15)) * signed32(_MULTIPLIER_2)
    return _shift_right(x, 16)


@dataclass(frozen=True)
class Region:
    """Where the elements of a flat shard lie in the whole flattened tensor.

    Attributes:
        offset: global index of the first element.
        levels: (size, stride) of each loop over the elements, outermost first; the last has stride 1. Empty where the
            shard is one run of the whole.
    """

    offset: int = 0
    levels: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_box(cls, shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Region:
        """Return the region of the box of `sizes` at `starts` in a contiguous tensor of `shape`."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        levels = [(1, 1)]
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            inner_size, inner_stride = levels[0]
            if stride == inner_size * inner_stride:
                levels[0] = size * inner_size, inner_stride
            elif size != 1:
                levels.insert(0, (size, stride))
        offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        return cls(offset, tuple(levels) if len(levels) > 1 else ())

    @property
    def strided(self) -> bool:
        """Whether there are gaps between the elements."""
        return bool(self.levels)

    def index(self, start: int) -> int:
        """Return the global index of local element `start`."""
        index = self.offset
        for size, stride in reversed(self.levels):
            start, place = divmod(start, size)
            index += place * stride
        return index + start

    def span(self, start: int) -> tuple[int, int]:
        """Return (elements from local element `start` on that one `words` serves, high word of their index)."""
        first = self.index(start)
        left, high = (1 << 32) - (first & _MASK32), first >> 32
        if not self.levels:
            return left, high
        (count, stride), (run, _) = self.levels[-2:]
        row, column = divmod(start % (count * run), run)
        if run >= _LONGEST_RUN:
            return min(left, run - column), high
        rows, rest = divmod(column + left, stride)
        return min(rows * run + min(rest, run), (count - row) * run) - column, high

    def words(self, start: int) -> tuple[int, int, int, int]:
        """Return the four int32 words from which `element_index` counts from local element `start` on."""
        first = self.index(start)
        (_, stride), (run, _) = self.levels[-2:] or ((1, 0), (_LONGEST_RUN, 1))
        if run >= _LONGEST_RUN:
            return signed32(first), 0, _LONGEST_RUN, 0
        column = start % run
        return signed32(first - column), column, run, signed32(stride)


#: The region of a tensor that is not sharded.
WHOLE = Region()


def element_index(words: Tensor | Sequence[int], numel: int, device: torch.device, strided: bool = False) -> Tensor:
    """Return int32 counters of `numel` elements, wrapped to 32 bits.

    Args:
        words: what `Region.words` returns: counter of column 0, first column, elements of a row, spacing of rows.
        numel: number of elements.
        device: where to.
        strided: whether the region has gaps; without, only the first word counts.
    """
    place = torch.arange(numel, dtype=torch.int32, device=device)
    if not strided:
        return place + words[0]
    place = place + words[1]
    row = place // words[2]
    return row * words[3] + (place - row * words[2]) + words[0]


def draws16(identity: tuple[int, ...], region: Region, numel: int, device: torch.device) -> Tensor:
    """Return the 16-bit draws of the `numel` elements of a region, flat, for a key made of `identity`."""
    pieces, start = [], 0
    while start < numel:
        left, high = region.span(start)
        count = min(numel - start, left)
        index = element_index(region.words(start), count, device, region.strided)
        pieces.append(hash16(index, make_key(*identity, high)))
        start += count
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32, device=device)


def float_bits(x: Tensor) -> Tensor:
    """View fp32 as int32 bit patterns."""
    return x.view(torch.int32)


def float_from_bits(bits: Tensor) -> Tensor:
    """View int32 bit patterns as fp32."""
    return bits.view(torch.float32)


def round_bits(x: Tensor, dropped: int, draw: Tensor | int) -> Tensor:
    """Round fp32 values to `23 - dropped` mantissa bits: add `draw` (below 2^dropped) and truncate.

    A uniform draw rounds stochastically without bias; half a unit rounds to nearest, ties away from zero. Works on
    bit patterns so that no compiler can fold the rounding away. Values that need no rounding, infinities and NaN
    come back as they were.
    """
    rounded = float_from_bits((float_bits(x) + draw) & -(1 << dropped))
    return torch.where(x.abs() <= LARGEST, rounded, x)


def stochastic_round_bf16(x: Tensor, draw: Tensor) -> Tensor:
    """Round fp32 to values that bf16 holds exactly; `draw` is uniform on [0, 65536)."""
    return round_bits(x, 16, draw)


def stochastic_round_fp16(x: Tensor, draw: Tensor) -> Tensor:
    """Round fp32 to values that fp16 holds exactly; `draw` is uniform on [0, 65536)."""
    normal = round_bits(x, 13, draw >> 3)
    # Below 2^-14 fp16 has a fixed spacing of 2^-24.
    units = x * 2.0**24
    below = units.floor()
    subnormal = ((below + (draw * 2.0**-16 < units - below)) * 2.0**-24).copysign(x)
    return torch.where(x.abs() < 2.0**-14, subnormal, normal)


def stochastic_round(x: Tensor, seed: int, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Round a tensor to a 16-bit dtype stochastically, without bias and without touching torch's generators.

    Args:
        x: floating-point tensor of any shape, computed in fp32.
        seed: any integer; the same seed and offset give the same result on every device and backend.
        offset: index of the first element, so that shards of one tensor draw the bits of the whole.
        dtype: `torch.bfloat16` or `torch.float16`.

    Returns:
        Tensor of `dtype` and the shape of `x`. Values that `dtype` holds exactly are unchanged; the expected value
        of every other finite one is itself (see arXiv 2010.06192 for its use on weights).

    Raises:
        ValueError: `dtype` is not a 16-bit floating-point type.
    """
    rounders = {torch.bfloat16: stochastic_round_bf16, torch.float16: stochastic_round_fp16}
    if dtype not in rounders:
        raise ValueError(f"stochastic_round: dtype must be torch.bfloat16 or torch.float16, got {dtype}")
    draw = draws16((seed,), Region(offset), x.numel(), x.device).view(x.shape)
    return rounders[dtype](x.float(), draw).to(dtype)
