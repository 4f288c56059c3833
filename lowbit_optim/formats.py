"""State formats: how a flat fp32 slot becomes stored parts and comes back.

A format knows nothing of optimizers. It is a frozen object, which a compiled step treats as a constant, and a spec
string such as `"int8/b32/signed"` names it; that string is what checkpoints record. Codes are plain `uint8`, which
gloo collectives and `torch.load` accept everywhere.

A block format is a `Map` (the magnitudes that codes stand for), a number of square roots taken before it, a block
length and a scale dtype. Encoding finds the level at or below a value and goes one up with the probability that
makes the result unbiased, so a new map is two short functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from .maps import Dynamic, Float8, Linear, Map, PowersOfTwo
from .noise import LARGEST, float_bits, float_from_bits, round_bits

Parts = tuple[Tensor, ...]
#: "dither": draws that walk evenly through [0, 1) over the steps; "independent": new draws at every step.
Rounding = Literal["nearest", "dither", "independent"]


class StateFormat(Protocol):
    """What the engine asks of a format: 1-D parts out of flat fp32 values, and back."""

    @property
    def name(self) -> str:
        """The name users give; slots of other signs have formats of the same name."""

    @property
    def spec(self) -> str:
        """The string that names the format in checkpoints."""

    @property
    def block(self) -> int:
        """Neighbouring elements that share a scale; `encode` and `decode` take whole blocks."""

    @property
    def rounding(self) -> Rounding:
        """How an exponential moving average is rounded into this format."""

    @property
    def ratio(self) -> bool:
        """Whether what is stored is a slot's ratio to the root of another (`rules.by_ratio`)."""

    @property
    def carried(self) -> float:
        """Share of what rounding takes from a slot that has a `rules.Slot.carry`, which the weight is given at once."""

    @property
    def parts(self) -> Mapping[str, torch.dtype]:
        """Name and dtype of each stored part, in order."""

    def part_sizes(self, numel: int) -> tuple[int, ...]:
        """Length of each part for `numel` elements; a short last block is stored whole."""

    def encode(self, values: Tensor, draw: Tensor | None) -> Parts:
        """Store fp32 values, flat or in rows of whole blocks, as flat parts or rows of them.

        `draw` has 16 random bits for each value; None rounds to nearest.
        """

    def decode(self, parts: Parts) -> Tensor:
        """Return the fp32 values that parts stand for, flat or in rows like the parts."""


@dataclass(frozen=True)
class FloatFormat:
    """fp32 or bf16 values as they are: no blocks, no scale."""

    name: str
    dtype: torch.dtype
    rounding: Rounding

    block: int = field(default=1, init=False)
    ratio: bool = field(default=False, init=False)
    carried: float = field(default=0.0, init=False)

    @property
    def spec(self) -> str:
        return self.name

    @property
    def parts(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({"values": self.dtype})

    def part_sizes(self, numel: int) -> tuple[int, ...]:
        return (numel,)

    def encode(self, values: Tensor, draw: Tensor | None) -> Parts:
        if draw is not None and self.dtype == torch.bfloat16:
            values = round_bits(values, 16, draw)
        return (values.to(self.dtype),)

    def decode(self, parts: Parts) -> Tensor:
        return parts[0].float()


@dataclass(frozen=True)
class BlockFormat:
    """Codes of 4 or 8 bits with one scale, the largest magnitude, for each block of the flattened tensor.

    The scale is rounded up, so that no value exceeds it. A block of zeros has scale zero and decodes to zeros.
    Values that are not finite take no part in the scale and are stored as zero: they harm no neighbour.

    `round_roots` draws between two levels by the roots that the map is of, not by their values. What matters of a
    second moment is 1 / sqrt(v), which rounding that is unbiased in v makes too large in the mean. To second order in
    the distance of levels, fourth roots make it right (docs/formats.md). It needs a map with a `round`.

    `keep_positive` keeps values above zero off a map's code for zero: a second moment that rounds to zero makes
    m / sqrt(v) explode (an update of 756 where fp32 peaks at 3.2; docs/formats.md).

    Signed codes hold the sign in the top bit, or count up from `center` where another library's order is kept.
    4-bit codes are packed by block: low nibbles are its first half, high nibbles its second.
    """

    name: str
    signed: bool
    bits: int
    block: int
    map: Map
    roots: int = 0
    scale_dtype: torch.dtype = torch.bfloat16
    center: int | None = None
    keep_positive: bool = False
    rounding: Rounding = "dither"
    ratio: bool = False
    round_roots: bool = False
    carried: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a map that cannot do what the format asks of it."""
        if self.round_roots and not isinstance(self.map, Linear):
            raise TypeError(f"format {self.name!r}: round_roots needs a Linear map, got {type(self.map).__name__}")

    @property
    def spec(self) -> str:
        kind = "ratio" if self.ratio else "signed" if self.signed else "unsigned"
        return f"{self.name}/b{self.block}/{kind}"

    @property
    def parts(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({"codes": torch.uint8, "scale": self.scale_dtype})

    def part_sizes(self, numel: int) -> tuple[int, ...]:
        blocks = -(-numel // self.block)
        return blocks * self.block * self.bits // 8, blocks

    def level(self, magnitude_code: Tensor) -> Tensor:
        """Magnitude of a code as a share of the scale."""
        value = self.map.level(magnitude_code)
        for _ in range(self.roots):
            value = value * value
        return value

    def _round(self, share: Tensor, chance: Tensor | float) -> Tensor:
        """Code of the level next to each share, below it or, by `chance` in [0, 1), above; it may pass the last one."""
        root = share
        for _ in range(self.roots):
            root = root.sqrt()
        if self.round_roots and isinstance(self.map, Linear):
            return self.map.round(root, chance)
        code = self.map.floor(root)
        below = self.level(code)
        return torch.where(chance * (self.level(code + 1.0) - below) < share - below, code + 1.0, code)

    def encode(self, values: Tensor, draw: Tensor | None, scale: Tensor | None = None) -> Parts:
        """See `StateFormat.encode`; `scale`, (blocks, 1) in fp32, replaces the one that the largest value gives."""
        blocks = values.view(-1, self.block)
        magnitude = blocks.abs() if self.signed else blocks
        magnitude = torch.where(magnitude <= LARGEST, magnitude, 0.0)
        if scale is None:
            scale = self._scale(magnitude.amax(dim=1, keepdim=True))
        # One division for the block: a value up to the scale, times the scale's reciprocal, rounds to 1 at most. Small
        # scales are lifted first, since a subnormal number has an infinite reciprocal.
        lift = torch.where(scale < 2.0**-64, 2.0**64, 1.0)
        share = magnitude * lift * torch.where(scale == 0, 1.0, scale * lift).reciprocal()
        chance = 0.5 if draw is None else draw.view(-1, self.block).float() * 2.0**-16
        code = self._round(share, chance).clamp_max(self.map.last)
        if self.keep_positive:
            code = torch.where(magnitude > 0, code.clamp_min(1.0), code)
        if self.signed:
            code = self._join_sign(code, (blocks < 0) & (code > 0))
        rows = values.shape[:-1]
        return self._pack(code).view(*rows, -1), scale.to(self.scale_dtype).view(*rows, -1)

    def decode(self, parts: Parts) -> Tensor:
        codes, scale = parts
        code = self._unpack(codes)
        scale = scale.float().view(-1, 1)
        if self.signed:
            code, negative = self._split_sign(code)
            scale = torch.where(negative, -scale, scale)
        return (self.level(code) * scale).view(*codes.shape[:-1], -1)

    def scale_above(self, values: Tensor) -> Tensor:
        """Return the scale, (blocks, 1) in fp32, that gives the largest value of each block the last code but one."""
        largest = values.view(-1, self.block).abs().amax(dim=1, keepdim=True)
        below_top = self.level(torch.tensor(self.map.last - 1.0, device=values.device))
        return (largest / below_top).to(self.scale_dtype).float()

    def _scale(self, largest: Tensor) -> Tensor:
        if self.scale_dtype == torch.float32:
            return largest
        # Up to the next bf16 value, but not to infinity.
        up = (float_bits(largest) + 0xFFFF) & -0x10000
        return float_from_bits(up.clamp_max(0x7F7F0000))

    def _join_sign(self, magnitude_code: Tensor, negative: Tensor) -> Tensor:
        if self.center is None:
            return torch.where(negative, magnitude_code + (1 << (self.bits - 1)), magnitude_code)
        # The lower half has one code less than the upper one.
        down = self.center - magnitude_code.clamp_max(self.center)
        return torch.where(negative, down, self.center + magnitude_code)

    def _split_sign(self, code: Tensor) -> tuple[Tensor, Tensor]:
        if self.center is None:
            sign_bit = 1 << (self.bits - 1)
            negative = code >= sign_bit
            return torch.where(negative, code - sign_bit, code), negative
        offset = code - self.center
        return offset.abs(), offset < 0

    def _pack(self, code: Tensor) -> Tensor:
        if self.bits == 8:
            return code.to(torch.uint8)
        halves = code.view(-1, 2, self.block // 2)
        return (halves[:, 0] + halves[:, 1] * 16.0).to(torch.uint8)

    def _unpack(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(-1, self.block).float()
        packed = codes.view(-1, self.block // 2).float()
        high = (packed * (1.0 / 16.0)).floor()
        return torch.cat([packed - 16.0 * high, high], dim=1)


#: Name -> (format of a signed slot, format of a slot that is never negative).
FORMATS: dict[str, tuple[StateFormat, StateFormat]] = {}
#: Name -> format of a signed slot that a rule can hold as a ratio, where the name has one of its own for that.
RATIOS: dict[str, StateFormat] = {}
_BY_SPEC: dict[str, StateFormat] = {}


def register_format(signed: StateFormat, unsigned: StateFormat, ratio: StateFormat | None = None) -> None:
    """Make a format known under its name to optimizers, and under its specs to checkpoints.

    Args:
        signed: for slots such as a first moment.
        unsigned: for slots that are never negative, such as a second moment; of the same name.
        ratio: in place of `signed` for slots that a rule can hold as a ratio, such as Adam's first moment.

    Raises:
        ValueError: the names differ, or another format has the name or a spec.
    """
    formats = [signed, unsigned, *([ratio] if ratio else [])]
    if len({fmt.name for fmt in formats}) > 1:
        raise ValueError(f"a format's kinds need one name, got {', '.join(repr(fmt.name) for fmt in formats)}")
    if signed.name in FORMATS or any(fmt.spec in _BY_SPEC for fmt in formats):
        raise ValueError(f"a format {signed.name!r} exists already")
    FORMATS[signed.name] = signed, unsigned
    if ratio:
        RATIOS[ratio.name] = ratio
    _BY_SPEC.update({fmt.spec: fmt for fmt in formats})


# Roundings are those of benchmarks/results/rounding.csv: the dither, with 10 to 50 % less error, except where it locks
# in with the state that it rounds. Slow averages of coarse levels do so: second moments of 8-bit formats (int8: error
# 0.79 against 0.25; int8-dynamic: 5 to 9 % short), and both moments of int4 (small first moments 5 to 11 % short).
register_format(*[FloatFormat("fp32", torch.float32, rounding="nearest")] * 2)
register_format(*[FloatFormat("bf16", torch.bfloat16, rounding="dither")] * 2)
register_format(
    BlockFormat("fp8", True, 8, 32, Float8()),
    BlockFormat("fp8", False, 8, 32, Float8(first=1), roots=1, rounding="independent"),
)
register_format(
    BlockFormat("int8", True, 8, 32, Linear(127), roots=2),
    BlockFormat("int8", False, 8, 32, Linear(256, first=1), roots=3, rounding="independent", round_roots=True),
)
register_format(
    BlockFormat("int4", True, 4, 32, PowersOfTwo(7, zero=True), rounding="independent"),
    BlockFormat("int4", False, 4, 32, Linear(16, first=1), roots=2, rounding="independent", round_roots=True),
    BlockFormat("int4", True, 4, 32, Linear(7), rounding="independent", ratio=True, round_roots=True, carried=0.75),
)
register_format(
    BlockFormat("int8-dynamic", True, 8, 256, Dynamic(0), scale_dtype=torch.float32, center=127),
    BlockFormat(
        "int8-dynamic",
        False,
        8,
        256,
        Dynamic(1),
        scale_dtype=torch.float32,
        keep_positive=True,
        rounding="independent",
    ),
)


def get_format(name: str, signed: bool, ratio: bool = False) -> StateFormat:
    """Return the format that `name` gives a slot of this sign.

    Args:
        name: a key of `FORMATS`.
        signed: whether the slot can be negative.
        ratio: whether its rule can hold it as a ratio.

    Raises:
        ValueError: unknown name; the message lists the names and the nearest one.
    """
    if name not in FORMATS:
        raise ValueError(
            f"state: unknown format {name!r}; choose one of {', '.join(FORMATS)}{near_miss(name, FORMATS)}"
        )
    if ratio and name in RATIOS:
        return RATIOS[name]
    return FORMATS[name][0 if signed else 1]


def parse_spec(spec: str) -> StateFormat:
    """Return the format a checkpoint's spec string names.

    Raises:
        ValueError: the spec is not one that this version can read.
    """
    if spec not in _BY_SPEC:
        raise ValueError(
            f"unknown state format spec {spec!r}; known are {', '.join(_BY_SPEC)}{near_miss(spec, _BY_SPEC)}"
        )
    return _BY_SPEC[spec]


def near_miss(given: object, allowed: Mapping[str, object] | tuple[str, ...], likeness: float = 0.6) -> str:
    """Return `"; did you mean 'x'?"`, or nothing where no allowed name is close: at least `likeness` of 1."""
    close = difflib.get_close_matches(str(given), list(allowed), n=1, cutoff=likeness)
    return f"; did you mean {close[0]!r}?" if close else ""
