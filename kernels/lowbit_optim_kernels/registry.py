"""Which device functions belong to which rule, format and weight mode.

The library's pieces are known by name; a piece of a user's own by the object itself, so that nobody gets another's
kernels by giving a rule the name of one that is here. Pieces are described by the attributes that `lowbit_optim`
gives them; this package does not import it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from . import formats, rules, weights
from .formats import Format
from .weights import Mode


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        function: its device function.
        scalars: names of the scalars that it reads, in their order.
        carry: device function of the first slot's `Slot.carry`, or None where no slot has one.
    """

    function: Any
    scalars: tuple[str, ...]
    carry: Any = None


@dataclass(frozen=True)
class Map:
    """Device functions of a block format's map, roots included: `round` where it draws between roots, else `floor`."""

    level: Any
    floor: Any = None
    round: Any = None


#: Triton's name of each dtype that values are stored in.
DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

#: Rules by name or by the object.
RULES: dict[Hashable, Rule] = {
    "adamw": Rule(rules.adamw, rules.ADAM_SCALARS, rules.adam_carry),
    "adamw_amsgrad": Rule(rules.adamw_amsgrad, rules.ADAM_SCALARS, rules.adam_amsgrad_carry),
    "adamw_ratio": Rule(rules.adamw_ratio, rules.ADAM_SCALARS, rules.adam_ratio_carry),
    "adamw_amsgrad_ratio": Rule(rules.adamw_amsgrad_ratio, rules.ADAM_SCALARS, rules.adam_amsgrad_ratio_carry),
    "adam_ratio": Rule(rules.adam_ratio, rules.ADAM_SCALARS, rules.adam_ratio_carry),
    "adam_amsgrad_ratio": Rule(rules.adam_amsgrad_ratio, rules.ADAM_SCALARS, rules.adam_amsgrad_ratio_carry),
    "adam": Rule(rules.adam, rules.ADAM_SCALARS, rules.adam_carry),
    "adam_amsgrad": Rule(rules.adam_amsgrad, rules.ADAM_SCALARS, rules.adam_amsgrad_carry),
    "lion": Rule(rules.lion, rules.LION_SCALARS),
    "sgd": Rule(rules.sgd, rules.SGD_SCALARS),
    "sgd_momentum": Rule(rules.sgd_momentum, rules.SGD_SCALARS),
    "sgd_nesterov": Rule(rules.sgd_nesterov, rules.SGD_SCALARS),
}

#: Maps of block formats by the format's spec or by the format itself.
MAPS: dict[Hashable, Map] = {
    "fp8/b32/signed": Map(formats.fp8_signed_level, formats.fp8_signed_floor),
    "fp8/b32/unsigned": Map(formats.fp8_unsigned_level, formats.fp8_unsigned_floor),
    "int8/b32/signed": Map(formats.int8_signed_level, formats.int8_signed_floor),
    "int8/b32/unsigned": Map(formats.int8_unsigned_level, round=formats.int8_unsigned_round),
    "int4/b32/signed": Map(formats.int4_signed_level, formats.int4_signed_floor),
    "int4/b32/unsigned": Map(formats.int4_unsigned_level, round=formats.int4_unsigned_round),
    "int4/b32/ratio": Map(formats.int4_ratio_level, round=formats.int4_ratio_round),
    "int8-dynamic/b256/signed": Map(formats.dynamic_signed_level, formats.dynamic_signed_floor),
    "int8-dynamic/b256/unsigned": Map(formats.dynamic_unsigned_level, formats.dynamic_unsigned_floor),
}

#: Weight modes by spec or by the object.
MODES: dict[Hashable, Mode] = {
    "nearest": Mode(weights.write_nearest),
    "stochastic": Mode(weights.write_stochastic),
    "kahan": Mode(weights.write_kahan, weights.read_kahan, tl.bfloat16),
    "kahan/dithered": Mode(weights.write_kahan_dithered, weights.read_kahan, tl.bfloat16),
    "split8": Mode(weights.write_split8, weights.read_split8, tl.int8),
    "split8/nearest": Mode(weights.write_split8_nearest, weights.read_split8_nearest, tl.int8),
    "split16": Mode(weights.write_split16, weights.read_split16, tl.int8, low=True),
    "split16/dithered": Mode(weights.write_split16_dithered, weights.read_split16_dithered, tl.int8, low=True),
    "master": Mode(weights.write_master, weights.read_master, tl.float32),
    "master/dithered": Mode(weights.write_master_dithered, weights.read_master, tl.float32),
}


def missing(
    rule: tuple[Hashable, str],
    slots: Sequence[tuple[Hashable, str]],
    mode: tuple[Hashable, str],
    carried: Sequence[float],
) -> str:
    """Return which pieces have no device function, in words, or an empty string.

    Args:
        rule: (key in `RULES`, name for messages).
        slots: (key in `MAPS`, name) of each slot with a block format.
        mode: (key in `MODES`, name).
        carried: share of what rounding takes from each slot that the weight is given; kernels do so for the first.
    """
    lacking = [] if rule[0] in RULES else [f"rule {rule[1]!r}"]
    if rule[0] in RULES and (any(carried[1:]) or (any(carried) and RULES[rule[0]].carry is None)):
        lacking.append(f"what rule {rule[1]!r} carries")
    lacking += [f"format {name!r}" for key, name in dict.fromkeys(slots) if key not in MAPS]
    lacking += [] if mode[0] in MODES else [f"weight mode {mode[1]!r}"]
    return ", ".join(lacking)


def plain_format(dtype: torch.dtype, rounding: str) -> Format:
    """Return the format of a slot that is stored as it is."""
    return Format(DTYPES[dtype], rounding)


def block_format(key: Hashable, fmt: Any, rounding: str, carried: float) -> Format:
    """Return the format of a slot in blocks.

    Args:
        key: key in `MAPS`.
        fmt: has the attributes of `lowbit_optim.formats.BlockFormat`.
        rounding: how this slot is rounded.
        carried: share of what rounding takes from this slot that the weight is given.
    """
    return Format(
        DTYPES[fmt.scale_dtype],
        rounding,
        fmt.block,
        fmt.bits,
        fmt.signed,
        -1 if fmt.center is None else fmt.center,
        fmt.keep_positive,
        fmt.map.last,
        MAPS[key].level,
        MAPS[key].floor,
        MAPS[key].round,
        carried,
    )
