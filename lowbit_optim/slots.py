"""The slots of one parameter taken together: a slot held as a ratio means something only beside the one it is over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .formats import StateFormat
from .rules import UpdateRule, from_ratios, to_ratios
from .state import QuantizedState, decoded, zeros_state


def absolute(rule: UpdateRule, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return slots with those that are held as ratios decoded to fp32 values; the others as they are."""
    names = tuple(name for name, slot in slots.items() if isinstance(slot, QuantizedState) and slot.format.ratio)
    needed = {name: slots[name] for ratio in names for name in (ratio, str(rule.slots[ratio].over))}
    return {**slots, **from_ratios(rule, names, {name: decoded(slot) for name, slot in needed.items()})}


def stored_as(
    rule: UpdateRule, slots: Mapping[str, Tensor], formats: Mapping[str, StateFormat], device: torch.device
) -> dict[str, Tensor]:
    """Return copies of slots, plain or stored in any format, in these formats; what has its format keeps its codes.

    A ratio is taken to the stored value of the slot that it is over, so that both decode to what was given.
    """
    result: dict[str, Tensor] = {}
    values = absolute(rule, slots)
    for name in sorted(formats, key=lambda name: formats[name].ratio):
        fmt, over, value = formats[name], rule.slots[name].over, values[name]
        if fmt.ratio:
            kept = all(_has(slots[each], formats[each]) for each in (name, str(over)))
            value = slots[name] if kept else _ratio(rule, name, {name: value, str(over): result[str(over)]})
        result[name] = zeros_state(fmt, value.shape, device).copy_(value)
    return {name: result[name] for name in formats}


def _has(slot: Tensor, fmt: StateFormat) -> bool:
    return slot.format == fmt if isinstance(slot, QuantizedState) else slot.dtype == fmt.parts.get("values")


def _ratio(rule: UpdateRule, name: str, slots: Mapping[str, Tensor]) -> Tensor:
    ratio = to_ratios(rule, (name,), {each: decoded(slot) for each, slot in slots.items()})[name]
    # Down by more than the rounding of a root, a product and a quotient: a block's largest ratio, if it was a scale
    # once, would else give the next larger scale.
    return ratio * (1 - 2.0**-21)
