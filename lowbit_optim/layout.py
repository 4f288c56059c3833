"""Which options there are, and which format, weight mode and backend they give a parameter, and why.

The engine acts on a `Layout` and the planner prints it, so that what is printed is what happens. Presets are named
choices of format and mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor

from .dispatch import check_backend, choose_backend
from .formats import FORMATS, BlockFormat, StateFormat, get_format, near_miss
from .rules import UpdateRule, by_ratio
from .weights import WeightMode, check_mode, get_mode

#: dtypes that a parameter may have.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LowBitOptions(TypedDict, total=False):
    """Arguments that every optimizer takes beside its hyper-parameters, all by keyword.

    Attributes:
        state: format of every slot ("fp32", "bf16", "fp8", "int8", "int4", "int8-dynamic"), or a mapping of slot names
            to formats. Default: the class's, "int8" where its name does not say.
        weights: mode of 16-bit weights ("nearest", "stochastic", "kahan", "split8", "split16", "master"; with
            "/nearest" or "/dithered" for the view that is not the mode's own). Default: "auto", which is "stochastic".
        preset: name of a preset of `lowbit_optim.PRESETS`, in place of `state` and `weights`.
        seed: seed of the rounding noise. Default: 0. Nothing is drawn from torch's generators.
        backend: "auto" (default), "triton" (on GPU), "cpp" (generated C++, on CPU), "compile" or "eager".
        min_quantized_numel: parameters with fewer elements keep fp32 slots instead of quantized ones. Default: 4096.
        skip_nonfinite: leave a parameter and its state alone at steps where its gradient has a NaN or infinity;
            `state[p]["skipped"]` counts them. Decided on the device, without a wait. Default: False.
        foreach: accepted, as torch's optimizers do, and ignored.
        fused: accepted, as torch's optimizers do, and ignored.
    """

    state: str | Mapping[str, str] | None
    weights: str | None
    preset: str | None
    seed: int
    backend: str
    min_quantized_numel: int
    skip_nonfinite: bool
    foreach: bool | None
    fused: bool | None


#: The options that parameter groups carry, with their defaults.
STORAGE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "state": "int8",
        "weights": "auto",
        "seed": 0,
        "backend": "auto",
        "min_quantized_numel": 4096,
        "skip_nonfinite": False,
    }
)


#: How like the name of an option an unknown key of a group must be to be taken for a slip of the pen.
_SLIP = 0.85


def check_spelling(group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Refuse keys of a parameter group that are an option but for a letter or two.

    Other unknown keys are let through, as torch does: trainers and schedulers keep things of their own in groups.

    Raises:
        TypeError: such a key; the message names the option.
    """
    known = ("params", "param_names", "preset", *options)
    for name in group:
        if name not in known and (meant := near_miss(name, known, _SLIP)):
            raise TypeError(f"unexpected option {name!r} of a parameter group{meant}")


def storage_options(options: LowBitOptions, state: str, weights: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Return the storage options that arguments amount to.

    Args:
        options: what the user gave.
        state: the class's state format.
        weights: the class's weight mode.
        others: names of the class's other arguments, one of which may have been meant.

    Raises:
        TypeError: an unknown argument.
        ValueError: an unknown preset, or a preset together with what it sets.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in LowBitOptions.__annotations__:
            meant = (*LowBitOptions.__annotations__, *others)
            raise TypeError(f"unexpected argument {name!r}{near_miss(name, meant)}")
    preset = given.pop("preset", None)
    if preset is not None:
        if "state" in given or "weights" in given:
            raise ValueError(f"preset={preset!r} sets state and weights; give either the preset or those")
        state, weights = get_preset(preset).state, get_preset(preset).weights
    kept = {name: value for name, value in given.items() if name in STORAGE_DEFAULTS}
    return {**STORAGE_DEFAULTS, "state": state, "weights": weights, **kept}


@dataclass(frozen=True)
class Layout:
    """How one parameter is stored and stepped.

    Attributes:
        rule: the update rule, for slots as `formats` hold them.
        formats: format of each of the rule's slots.
        mode: weight mode.
        backend: step backend.
        reason: why not what was asked for, or an empty string.
    """

    rule: UpdateRule
    formats: Mapping[str, StateFormat]
    mode: WeightMode
    backend: str
    reason: str


def stored_rule(rule: UpdateRule, formats: Mapping[str, StateFormat]) -> UpdateRule:
    """Return the rule that works on slots as `formats` hold them."""
    ratios = tuple(name for name, fmt in formats.items() if fmt.ratio)
    return by_ratio(rule, ratios) if ratios else rule


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


def slot_formats(state: str | Mapping[str, str], rule: UpdateRule) -> dict[str, StateFormat]:
    """Return the format that each slot has in a parameter that is not too small for it.

    Raises:
        ValueError: as `slot_names` does.
    """
    return {
        slot: get_format(name, rule.slots[slot].signed, ratio=rule.slots[slot].over is not None)
        for slot, name in slot_names(state, rule).items()
    }


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
    formats = slot_formats(group["state"], rule)
    for slot, fmt in formats.items():
        if small and isinstance(fmt, BlockFormat):
            formats[slot] = get_format("fp32", rule.slots[slot].signed)
            reasons.append(f"fewer than min_quantized_numel={group['min_quantized_numel']} elements")
    mode = get_mode(group["weights"], param.dtype)
    if mode.spec != group["weights"] and group["weights"] != "auto":
        reasons.append("fp32 weights are exact")
    rule = stored_rule(rule, formats)
    backend, note = choose_backend(group["backend"], param.device.type, (rule, tuple(formats.values()), mode))
    reasons += [note] if note else []
    return Layout(rule, MappingProxyType(formats), mode, backend, "; ".join(dict.fromkeys(reasons)))


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
