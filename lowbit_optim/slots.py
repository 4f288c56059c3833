"""The slots of one parameter taken together: a slot held as a ratio means something only beside the one it is over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .formats import FORMATS, RATIOS, BlockFormat, StateFormat
from .rules import UpdateRule, from_ratios, to_ratios
from .state import QuantizedState, decoded, encode_flat, zeros_state


def is_own_group(group: Mapping[str, Any]) -> bool:
    """Return whether a saved parameter group is of this package: it says how its slots were stored."""
    return "weights" in group and "state" in group


def ratio_slots(
    rule: UpdateRule, slots: Mapping[str, Tensor], group: Mapping[str, Any] | None = None, numel: int = 0
) -> tuple[str, ...]:
    """Return the slots whose values are ratios (`rules.by_ratio`).

    Args:
        rule: the rule.
        slots: its slots, plain or stored in any format.
        group: where the slots come from a checkpoint, the options that they were saved with: of decoded values nothing
            else tells.
        numel: elements of the whole parameter.
    """
    return tuple(name for name, slot in slots.items() if _is_ratio(rule, name, slot, group or {}, numel))


def _is_ratio(rule: UpdateRule, name: str, slot: Tensor, group: Mapping[str, Any], numel: int) -> bool:
    state = group["state"] if is_own_group(group) else None
    saved = state if isinstance(state, str) or state is None else state[name]
    if isinstance(slot, QuantizedState) and slot.format.name in RATIOS:
        # Plain values that a loader copied in left no mark.
        saved_plain = saved in FORMATS and not isinstance(FORMATS[saved][0], BlockFormat)
        return slot.format.ratio and not saved_plain
    return rule.slots[name].over is not None and saved in RATIOS and numel >= group.get("min_quantized_numel", math.inf)


def absolute(rule: UpdateRule, slots: Mapping[str, Tensor], ratios: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Return slots with those that are held as ratios (default: as their formats say) as fp32 values."""
    names = ratio_slots(rule, slots) if ratios is None else ratios
    needed = {name: slots[name] for ratio in names for name in (ratio, str(rule.slots[ratio].over))}
    return {**slots, **from_ratios(rule, names, {name: decoded(slot) for name, slot in needed.items()})}


def stored_as(
    rule: UpdateRule,
    slots: Mapping[str, Tensor],
    ratios: tuple[str, ...],
    formats: Mapping[str, StateFormat],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return copies of slots, plain or stored in any format, in these formats; what has its format keeps its codes.

    A ratio is taken to the stored value of the slot that it is over, so that both decode to what was given.
    """
    result: dict[str, Tensor] = {}
    values = absolute(rule, slots, ratios)
    for name in sorted(formats, key=lambda name: formats[name].ratio):
        fmt, over, value = formats[name], str(rule.slots[name].over), values[name]
        if not fmt.ratio:
            result[name] = zeros_state(fmt, value.shape, device).copy_(value)
        elif name in ratios and all(_has(slots[each], formats[each]) for each in (name, over)):
            result[name] = zeros_state(fmt, value.shape, device).copy_(slots[name])
        else:
            assert isinstance(fmt, BlockFormat)
            ratio = _ratio(rule, name, {name: value.to(device), over: result[over]})
            result[name] = QuantizedState(fmt, encode_flat(fmt, ratio), value.shape)
    return {name: result[name] for name in formats}


def _has(slot: Tensor, fmt: StateFormat) -> bool:
    return slot.format == fmt if isinstance(slot, QuantizedState) else slot.dtype == fmt.parts.get("values")


def _ratio(rule: UpdateRule, name: str, slots: Mapping[str, Tensor]) -> Tensor:
    ratio = to_ratios(rule, (name,), {each: decoded(slot) for each, slot in slots.items()})[name]
    # Down by more than the rounding of a root, a product and a quotient: a block's largest ratio, if it was a scale
    # once, would else give the next larger scale.
    return ratio * (1 - 2.0**-21)
