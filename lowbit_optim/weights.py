"""Weight modes: how an fp32 result becomes a stored weight, and which extra tensors that takes.

`read` gives the fp32 value that a stored weight and its extras stand for; `write` takes an fp32 value apart again.
Both are pure and work on flat tensors. In every mode `write(read(...))` returns the same weight, bit for bit, so
that a step that changes nothing changes no bit.

A *view* is the 16-bit weight that the forward pass sees where more precision is kept elsewhere. The nearest view
lags: at a small learning rate a weight that starts on the bf16 grid stays there until its exact value has moved half
a unit in the last place (ulp). The dithered view rounds with a fixed offset per element, so that the weights taken
together are where the exact ones are (docs/techniques/dithered-view.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from .formats import near_miss
from .noise import LARGEST, float_bits, float_from_bits, round_bits, stochastic_round_fp16

Extras = tuple[Tensor, ...]

_BF16_ONLY = (torch.bfloat16,)
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_HALF_BF16_ULP = 0x8000


@dataclass(frozen=True)
class Draws:
    """Random 16-bit integers (int32) for one write: `step()` is new at every step, `fixed()` stays with its element."""

    step: Callable[[], Tensor]
    fixed: Callable[[], Tensor]


class WeightMode(Protocol):
    """How weights of `dtypes` are stored."""

    @property
    def spec(self) -> str:
        """The mode's name, with its view where that is not the default."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Weight dtypes that the mode can store."""

    @property
    def extras(self) -> Mapping[str, torch.dtype]:
        """Name and dtype of the extra tensors, each of the weight's shape."""

    def read(self, weight: Tensor, extras: Extras) -> Tensor:
        """Return the fp32 value of a stored weight."""

    def write(self, value: Tensor, dtype: torch.dtype, draws: Draws) -> tuple[Tensor, Extras]:
        """Return the weight in `dtype` and the extras that store an fp32 value."""

    def extras_for(self, weight: Tensor, value: Tensor) -> Extras:
        """Return the extras with which the given weight, left as it is, comes closest to `value`."""


@dataclass(frozen=True)
class Nearest:
    """A plain cast. Exact for fp32 weights; 16-bit weights lose updates below half an ulp."""

    spec: str = "nearest"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *_SIXTEEN_BIT)

    @property
    def extras(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({})

    def read(self, weight: Tensor, extras: Extras) -> Tensor:
        return weight.float()

    def write(self, value: Tensor, dtype: torch.dtype, draws: Draws) -> tuple[Tensor, Extras]:
        return value.to(dtype), ()

    def extras_for(self, weight: Tensor, value: Tensor) -> Extras:
        return ()


@dataclass(frozen=True)
class Stochastic(Nearest):
    """Stochastic rounding: the expected weight is exact, at no memory; the noise does not shrink with the lr."""

    spec: str = "stochastic"
    dtypes: tuple[torch.dtype, ...] = _SIXTEEN_BIT

    def write(self, value: Tensor, dtype: torch.dtype, draws: Draws) -> tuple[Tensor, Extras]:
        if dtype == torch.float16:
            return stochastic_round_fp16(value, draws.step()).to(dtype), ()
        return round_bits(value, 16, draws.step()).to(dtype), ()


@dataclass(frozen=True)
class _Viewed:
    """A mode that keeps more precision than the weight shows, under a nearest or a dithered view."""

    dithered: bool

    def view_offset(self, draws: Draws) -> Tensor | int:
        return draws.fixed() if self.dithered else _HALF_BF16_ULP


@dataclass(frozen=True)
class Kahan(_Viewed):
    """Compensated summation (arXiv 2010.06192): a bf16 tensor holds what the bf16 weight does not.

    The sum is rounded stochastically. Rounded to nearest it stalls too, at 2^-8 of the lr that stalls bf16 weights.
    """

    dithered: bool = False
    dtypes: tuple[torch.dtype, ...] = _BF16_ONLY

    @property
    def spec(self) -> str:
        return "kahan/dithered" if self.dithered else "kahan"

    @property
    def extras(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({"compensation": torch.bfloat16})

    def read(self, weight: Tensor, extras: Extras) -> Tensor:
        return self._sum(weight.float(), extras[0].float())

    def write(self, value: Tensor, dtype: torch.dtype, draws: Draws) -> tuple[Tensor, Extras]:
        # Rounded once, to what weight and compensation hold together, and then split exactly: a compensation rounded
        # on its own can reach the point where the view flips.
        dropped = 8 if self.dithered else 7
        value = round_bits(value, dropped, draws.step() >> (16 - dropped))
        weight = round_bits(value, 16, self.view_offset(draws))
        return weight.to(dtype), (self._rest(value, weight, 0).to(torch.bfloat16),)

    def extras_for(self, weight: Tensor, value: Tensor) -> Extras:
        return (self._rest(value, weight.float(), 0x8000).to(torch.bfloat16),)

    @staticmethod
    def _sum(weight: Tensor, compensation: Tensor) -> Tensor:
        # Adding 0.0 would turn -0.0 into 0.0.
        return torch.where(compensation == 0, weight, weight + compensation)

    @staticmethod
    def _rest(value: Tensor, weight: Tensor, draw: Tensor | int) -> Tensor:
        """What the weight lacks, in bf16; infinities lack nothing."""
        return torch.where(weight.abs() <= LARGEST, round_bits(value - weight, 16, draw), 0.0)


@dataclass(frozen=True)
class Split(_Viewed):
    """Correction bits: an integer that counts fractions of a bf16 ulp, so that weight and correction are one number.

    The fp32 bit pattern loses its lowest bits by stochastic rounding, and what is left is divided exactly between
    the weight and the signed correction. Under the nearest view `bits` correction bits extend the mantissa by as
    many: 16 make exact fp32 (of 2^32 patterns some share a weight of both their neighbours, so an exact tie rounds
    away from zero, not to even). The dithered view needs corrections of up to a whole ulp, which costs one bit.
    """

    bits: int
    dithered: bool
    dtypes: tuple[torch.dtype, ...] = _BF16_ONLY

    @property
    def spec(self) -> str:
        default = self.bits == 8
        view = "" if self.dithered == default else "/dithered" if self.dithered else "/nearest"
        return f"split{self.bits}{view}"

    @property
    def extras(self) -> Mapping[str, torch.dtype]:
        # Neither gloo nor NCCL can send 16-bit integers, so gathering a state dict would fail.
        low = {} if self.bits == 8 else {"correction_low": torch.uint8}
        return MappingProxyType({"correction": torch.int8, **low})

    def _stored(self, correction: Tensor) -> Extras:
        """Split int32 corrections over the extras."""
        if self.bits == 8:
            return (correction.to(torch.int8),)
        return (correction >> 8).to(torch.int8), (correction & 0xFF).to(torch.uint8)

    @property
    def _kept(self) -> int:
        """Mantissa bits kept below the bf16 weight's last."""
        return self.bits - self.dithered

    def read(self, weight: Tensor, extras: Extras) -> Tensor:
        pattern = float_bits(weight.float())
        upper = (pattern >> 16) & 0x7FFF
        correction = extras[0].to(torch.int32)
        if self.bits == 16:
            correction = (correction << 8) + extras[1].to(torch.int32)
        # A weight that somebody else overwrote may be smaller than its stale correction.
        magnitude = ((upper << self._kept) + correction).clamp_min(0)
        return float_from_bits((magnitude << (16 - self._kept)) | (pattern & -0x80000000))

    def write(self, value: Tensor, dtype: torch.dtype, draws: Draws) -> tuple[Tensor, Extras]:
        kept, dropped = self._kept, 16 - self._kept
        pattern = float_bits(round_bits(value, dropped, draws.step() >> kept) if dropped else value)
        magnitude = pattern & 0x7FFFFFFF
        magnitude = torch.where(magnitude > 0x7F800000, 0x7FC00000, magnitude) >> dropped
        upper = (magnitude + (self.view_offset(draws) >> dropped)) >> kept
        weight = float_from_bits((upper << 16) | (pattern & -0x80000000))
        correction = magnitude - (upper << kept)
        return weight.to(dtype), self._stored(correction)

    def extras_for(self, weight: Tensor, value: Tensor) -> Extras:
        kept, dropped = self._kept, 16 - self._kept
        nearest = float_bits(value) & 0x7FFFFFFF
        nearest = (nearest + ((1 << dropped) >> 1)) >> dropped
        upper = (float_bits(weight.float()) >> 16) & 0x7FFF
        limit = (1 << (self.bits - 1)) - 1
        correction = (nearest - (upper << kept)).clamp(-limit - 1, limit)
        return self._stored(correction)


@dataclass(frozen=True)
class Master(_Viewed):
    """An fp32 copy beside the 16-bit weight, as in mixed precision."""

    dithered: bool = False
    dtypes: tuple[torch.dtype, ...] = _SIXTEEN_BIT

    @property
    def spec(self) -> str:
        return "master/dithered" if self.dithered else "master"

    @property
    def extras(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({"master": torch.float32})

    def read(self, weight: Tensor, extras: Extras) -> Tensor:
        return extras[0]

    def write(self, value: Tensor, dtype: torch.dtype, draws: Draws) -> tuple[Tensor, Extras]:
        view = round_bits(value, 16, draws.fixed()) if self.dithered else value
        return view.to(dtype), (value,)

    def extras_for(self, weight: Tensor, value: Tensor) -> Extras:
        return (value.clone(),)


_MODES: tuple[WeightMode, ...] = (
    Nearest(),
    Stochastic(),
    Kahan(),
    Kahan(dithered=True),
    Split(bits=8, dithered=True),
    Split(bits=8, dithered=False),
    Split(bits=16, dithered=False),
    Split(bits=16, dithered=True),
    Master(),
    Master(dithered=True, dtypes=_BF16_ONLY),
)

#: Every weight mode by its spec string.
WEIGHT_MODES: Mapping[str, WeightMode] = MappingProxyType({mode.spec: mode for mode in _MODES})


def check_mode(name: str) -> None:
    """Raise ValueError, with the nearest allowed name, unless `name` is "auto" or a weight mode."""
    allowed = ("auto", *WEIGHT_MODES)
    if name not in allowed:
        raise ValueError(
            f"weights: unknown mode {name!r}; choose one of {', '.join(allowed)}{near_miss(name, allowed)}"
        )


def get_mode(name: str, dtype: torch.dtype) -> WeightMode:
    """Return the mode that `name` means for weights of `dtype`.

    fp32 weights are exact as they are, so every mode is `nearest` for them; `"auto"` is `stochastic` for 16-bit ones.

    Raises:
        ValueError: unknown name, or a mode that cannot store `dtype`.
    """
    check_mode(name)
    if dtype == torch.float32:
        return WEIGHT_MODES["nearest"]
    mode = WEIGHT_MODES["stochastic" if name == "auto" else name]
    if dtype not in mode.dtypes:
        fitting = [other.spec for other in _MODES if dtype in other.dtypes]
        raise ValueError(
            f"weights={name!r} stores {' or '.join(map(str, mode.dtypes))} weights, not {dtype}; "
            f"for {dtype} choose one of {', '.join(fitting)}"
        )
    return mode
