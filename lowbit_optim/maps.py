"""Maps: which magnitudes in [0, 1] the codes of a block format stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .noise import float_bits, float_from_bits


class Map(Protocol):
    """Magnitudes in [0, 1] by code, rising. Codes are whole numbers held in fp32.

    Arithmetic only, and in floats: on CPU a table search costs fifteen times as much, and conversions between
    8-bit and 32-bit integers three times as much as those between 8-bit integers and floats.
    """

    @property
    def last(self) -> int:
        """The highest code; its level is 1."""

    def level(self, code: Tensor) -> Tensor:
        """Magnitude of a code; defined one past the last code too."""

    def floor(self, magnitude: Tensor) -> Tensor:
        """Largest code whose level does not exceed `magnitude`; code 0 where there is none."""


@dataclass(frozen=True)
class Linear:
    """Evenly spaced levels `(code + first) / top`; `first=1` leaves zero out."""

    top: int
    first: int = 0

    @property
    def last(self) -> int:
        return self.top - self.first

    def level(self, code: Tensor) -> Tensor:
        return (code + self.first if self.first else code) * (1.0 / self.top)

    def floor(self, magnitude: Tensor) -> Tensor:
        return self._code(magnitude * self.top)

    def round(self, magnitude: Tensor, chance: Tensor | float) -> Tensor:
        """Code of the level at or below, or of the next one where the place between the two plus `chance` reaches 1."""
        return self._code(magnitude * self.top + chance)

    def _code(self, place: Tensor) -> Tensor:
        code = place.floor()
        return (code - self.first).clamp_min(0.0) if self.first else code


@dataclass(frozen=True)
class PowersOfTwo:
    """Levels `2 ** (code - last)`, one octave apart; with `zero`, code 0 stands for zero instead."""

    last: int
    zero: bool = False

    def level(self, code: Tensor) -> Tensor:
        value = float_from_bits((code.to(torch.int32) + (127 - self.last)) << 23)
        return torch.where(code == 0, 0.0, value) if self.zero else value

    def floor(self, magnitude: Tensor) -> Tensor:
        return ((float_bits(magnitude) >> 23) - (127 - self.last)).float().clamp_min(0.0)


@dataclass(frozen=True)
class Float8:
    """Magnitudes of float8 e4m3 over its largest, 448; with `first=0` codes are the type's own bit patterns."""

    first: int = 0

    @property
    def last(self) -> int:
        return 126 - self.first

    def level(self, code: Tensor) -> Tensor:
        pattern = code + self.first
        normal = float_from_bits((pattern.to(torch.int32) << 20) + (120 << 23))
        return torch.where(pattern < 8, pattern * 2.0**-9, normal) * (1.0 / 448.0)

    def floor(self, magnitude: Tensor) -> Tensor:
        value = magnitude * 448.0
        normal = ((float_bits(value) >> 20) - (120 << 3)).float()
        pattern = torch.where(value < 2.0**-6, (value * 2.0**9).floor(), normal)
        return (pattern - self.first).clamp_min(0.0)


@dataclass(frozen=True)
class Dynamic:
    """The dynamic tree map of Dettmers et al. (arXiv 2110.02861): decades of 1, 2, 4 ... evenly spaced levels.

    Decade `i` of seven holds `2 ** (i + octave)` midpoints of an even grid on [0.1, 1], times `10 ** (i - 6)`; codes
    0 and `last` are exactly 0 and 1. `octave` is 0 for the signed map and 1 for the unsigned one.
    """

    octave: int

    @property
    def last(self) -> int:
        return (128 << self.octave) - self.octave

    def _decades(self) -> list[tuple[int, int, int]]:
        """(exponent of ten, number of levels, first code) of each decade."""
        return [(i - 6, 1 << (i + self.octave), (1 << (i + self.octave)) - self.octave) for i in range(7)]

    def level(self, code: Tensor) -> Tensor:
        value = torch.zeros_like(code)
        for exponent, count, first in self._decades():
            midpoint = 0.1 + (code - first + 0.5) * (0.9 / count)
            value = torch.where(code >= first, midpoint * 10.0**exponent, value)
        # One past the last code is out of the table; anything above 1 serves.
        return torch.where(code >= self.last, 1.0 + (code - self.last), value)

    def floor(self, magnitude: Tensor) -> Tensor:
        code = torch.zeros_like(magnitude)
        for exponent, count, first in self._decades():
            place = (magnitude * 10.0**-exponent - 0.1) * (count / 0.9) - 0.5
            code = torch.where(place >= 0, first + place.floor().clamp_max(count - 1), code)
        return torch.where(magnitude >= 1.0, float(self.last), code)
