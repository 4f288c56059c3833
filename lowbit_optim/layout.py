"""Which format, weight mode and backend a parameter gets, and why.

The engine acts on a `Layout` and the planner prints it, so that what is printed is what happens. Presets are named
choices of format and mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .dispatch import check_backend, choose_backend
from .formats import FORMATS, BlockFormat, StateFormat, get_format, near_miss
from .rules import UpdateRule
from .weights import WeightMode, check_mode, get_mode

#: dtypes that a parameter may have.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layout:
    """How one parameter is stored and stepped.

    Attributes:
        formats: format of each of the rule's slots.
        mode: weight mode.
        backend: step backend.
        reason: why not what was asked for, or an empty string.
    """

    formats: Mapping[str, StateFormat]
    mode: WeightMode
    backend: str
    reason: str


def slot_names(state: str | Mapping[str, str], rule: UpdateRule) -> dict[str, str]:
    """Return the format name that each slot is asked to have, from one name for all or a mapping.

    Raises:
        ValueError: a name or a slot is unknown, or a slot is not named; the message lists what is allowed.
    """
    if isinstance(state, str):
        get_format(state, signed=True)
        return dict.fromkeys(rule.slots, state)
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be a format name or a mapping of slots to names, got {state!r}")
    for slot, name in state.items():
        if slot not in rule.slots:
            raise ValueError(
                f"state: {rule.name} has no slot {slot!r}; its slots are {', '.join(rule.slots) or 'none'}"
                f"{near_miss(slot, tuple(rule.slots))}"
            )
        get_format(name, signed=True)
    for slot in rule.slots:
        if slot not in state:
            raise ValueError(f"state: slot {slot!r} of {rule.name} needs a format too, one of {', '.join(FORMATS)}")
    return dict(state)


def check_names(group: Mapping[str, Any], rule: UpdateRule) -> None:
    """Check the names in a group's storage options without looking at its parameters.

    Raises:
        ValueError: an unknown name, with the nearest allowed one.
    """
    slot_names(group["state"], rule)
    check_mode(group["weights"])
    check_backend(group["backend"])


def layout_of(param: Tensor, group: Mapping[str, Any], rule: UpdateRule) -> Layout:
    """Decide a parameter's layout from its global size, dtype and device and its group's options.

    Raises:
        ValueError: an unknown name, a weight mode that cannot store the dtype, or a backend that cannot serve the
            device.
    """
    reasons = []
    small = param.numel() < group["min_quantized_numel"]
    formats: dict[str, StateFormat] = {}
    for slot, name in slot_names(group["state"], rule).items():
        formats[slot] = get_format(name, rule.slots[slot].signed)
        if small and isinstance(formats[slot], BlockFormat):
            formats[slot] = get_format("fp32", rule.slots[slot].signed)
            reasons.append(f"fewer than min_quantized_numel={group['min_quantized_numel']} elements")
    mode = get_mode(group["weights"], param.dtype)
    if mode.spec != group["weights"] and group["weights"] != "auto":
        reasons.append("fp32 weights are exact")
    backend = choose_backend(group["backend"], param.device.type)
    return Layout(MappingProxyType(formats), mode, backend, "; ".join(dict.fromkeys(reasons)))


# Presets -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A state format and a weight mode that go well together.

    Attributes:
        name: the name users give.
        state: format of every slot.
        weights: mode of 16-bit weights.
        summary: what it is for, in a line.
    """

    name: str
    state: str
    weights: str
    summary: str


_PRESETS = (
    Preset("reference", "fp32", "master", "mirrors mixed-precision training; the yardstick"),
    Preset("bf16", "bf16", "stochastic", "no blocks, no scales: the simplest"),
    Preset("balanced", "int8", "split8", "recommended: exact weights, 8-bit moments"),
    Preset("light", "int8", "stochastic", "8-bit moments on plain bf16 weights"),
    Preset("compact", "int4", "split8", "4-bit moments, exact weights: small lr, little memory"),
    Preset("minimal", "int4", "stochastic", "the smallest"),
)

#: Every preset by name.
PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _PRESETS})


def get_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ValueError: unknown name; the message lists the names and the nearest one.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: unknown {name!r}; choose one of {', '.join(PRESETS)}{near_miss(name, PRESETS)}")
    return PRESETS[name]
