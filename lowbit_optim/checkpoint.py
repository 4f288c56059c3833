"""State dicts in and out: validation, and conversion between formats, weight modes and libraries.

Everything is read and checked before anything is changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .layout import Layout
from .rules import UpdateRule
from .sharding import like, local, region, shard_of
from .slots import is_own_group, ratio_slots, stored_as
from .state import QuantizedState
from .step import NoiseKeys
from .weights import WEIGHT_MODES, Draws, WeightMode, get_mode

_COUNTERS = ("step", "skipped")


class StateOwner(Protocol):
    """What this module needs of an optimizer."""

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """State of each parameter, by name of slot, extra tensor or counter."""

    def named_params(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield (name for messages, parameter, its group) in order."""

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return the rule that a group's options select."""

    def layout_for(self, param: Tensor, group: Mapping[str, Any]) -> Layout:
        """Return how a parameter is stored."""

    def init_param(self, param: Tensor, group: Mapping[str, Any]) -> None:
        """Create the state of one parameter."""

    def zero_slots(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return new slots for one parameter."""

    def place(self, param: Tensor) -> int:
        """Return the parameter's place among all parameters."""


def check_form(state_dict: Any) -> None:
    """Raise ValueError unless `state_dict` has the form of an optimizer's state dict."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"not an optimizer state dict: it is a {type(state_dict).__name__}")
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise ValueError(f"not an optimizer state dict: it has {list(state_dict)}, not 'state' and 'param_groups'")
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError(f"state must be a mapping, got {type(state_dict['state']).__name__}")
    groups = state_dict["param_groups"]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(f"param_groups must be a list of mappings, got {type(groups).__name__}")
    if not all("params" in group for group in groups):
        raise ValueError("param_groups: a group has no 'params'")


def merge_groups(
    current: list[dict[str, Any]], state_dict: Mapping[str, Any], storage_options: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the groups with the saved hyper-parameters and seed, and the current storage options and parameters.

    Raises:
        ValueError: groups of other sizes.
    """
    saved = state_dict["param_groups"]
    sizes, expected = ([len(group["params"]) for group in groups] for groups in (saved, current))
    if sizes != expected:
        raise ValueError(f"the state dict has parameter groups of sizes {sizes}, the optimizer of {expected}")
    kept = set(storage_options) - {"seed"} | {"params", "param_names"}
    return [
        {**mine, **{name: copy.deepcopy(value) for name, value in theirs.items() if name not in kept}}
        for mine, theirs in zip(current, saved, strict=True)
    ]


def read_state(
    optimizer: StateOwner, groups: list[dict[str, Any]], state_dict: Mapping[str, Any]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of each parameter, converted to the layouts of this optimizer.

    Raises:
        ValueError: an entry is missing, unknown, of the wrong shape or damaged; the message names it.
    """
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    known = [key for group in saved_groups for key in group["params"]]
    for key in saved_state:
        if isinstance(key, (int, str)) and key not in known:
            raise ValueError(f"the state dict has state for {key!r}, which no parameter group names")
    entries = {}
    for (name, param, _), key, group, saved_group in _align(optimizer, groups, saved_groups):
        entry = saved_state.get(key, {})
        if isinstance(entry, Mapping) and not entry:
            # Torch keeps no state of parameters that were never stepped; this package keeps all trainable ones.
            if saved_state and param.requires_grad and is_own_group(saved_group):
                raise ValueError(
                    f"{name}: the state dict has no state for it; if it was frozen then, freeze it while loading"
                )
            continue
        try:
            entries[param] = _read_entry(optimizer, param, group, entry, saved_group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return entries


def _align(optimizer: StateOwner, groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> Any:
    keys = [key for group in saved_groups for key in group["params"]]
    pairs = [(group, saved) for group, saved in zip(groups, saved_groups, strict=True) for _ in group["params"]]
    return [
        (named, key, group, saved)
        for named, key, (group, saved) in zip(optimizer.named_params(), keys, pairs, strict=True)
    ]


def _read_entry(
    optimizer: StateOwner,
    param: Tensor,
    group: dict[str, Any],
    entry: Mapping[str, Any],
    saved_group: Mapping[str, Any],
) -> dict[str, Tensor]:
    rule, layout = optimizer.rule_for(group), optimizer.layout_for(param, group)
    if not isinstance(entry, Mapping):
        raise ValueError(f"its state must be a mapping, got {type(entry).__name__}")
    entry = {name: value for name, value in entry.items() if value is not None}
    saved_mode = WEIGHT_MODES["nearest"]
    if is_own_group(saved_group):
        saved_mode = get_mode(saved_group["weights"], param.dtype)
    else:
        # Torch's SGD does not count steps; state without a count has seen one.
        entry.setdefault("step", 1)
    _check_names(entry, rule, saved_mode)
    result: dict[str, Tensor] = {"step": counter(entry["step"])}
    if group["skip_nonfinite"]:
        result["skipped"] = counter(entry.get("skipped", 0))
    slots = {slot: _read_slot(slot, entry[slot], param, rule) for slot in rule.slots}
    ratios = ratio_slots(rule, slots, saved_group, param.numel())
    stored = stored_as(rule, slots, ratios, layout.formats, local(param).device)
    result.update({slot: like(value, param) for slot, value in stored.items()})
    return {**result, **_read_extras(param, entry, saved_mode, layout.mode)}


def _check_names(entry: Mapping[str, Any], rule: UpdateRule, saved_mode: WeightMode) -> None:
    missing = [name for name in ("step", *rule.slots, *saved_mode.extras) if name not in entry]
    if missing:
        raise ValueError(f"the state dict lacks {', '.join(missing)}; it has {', '.join(entry)}")
    unknown = [name for name in entry if name not in (*_COUNTERS, *rule.slots, *saved_mode.extras)]
    if unknown:
        raise ValueError(
            f"the state dict has {', '.join(unknown)}, which {rule.name} does not use with {saved_mode.spec!r} weights "
            "(the saved mode for this parameter's dtype)"
        )


def counter(value: Any) -> Tensor:
    """Return a step count, of any type, as torch keeps it: a 0-d fp32 tensor.

    Raises:
        ValueError: not a whole number, or negative.
    """
    try:
        count = float(value)
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if not (math.isfinite(count) and count >= 0 and count == int(count)):
        raise ValueError(f"step must be a whole number, got {value!r}")
    return torch.tensor(count, dtype=torch.float32)


def _read_slot(slot: str, value: Any, param: Tensor, rule: UpdateRule) -> Tensor:
    _check_tensor(slot, value, param)
    shard: Tensor = shard_of(value, param)
    check_slot(slot, shard, rule.slots[slot].signed)
    return shard


def check_slot(name: str, value: Tensor, signed: bool) -> None:
    """Raise ValueError where a stored slot is damaged, or negative though it cannot be (`signed` is False)."""
    if isinstance(value, QuantizedState):
        check_scale(name, value.parts[-1])
        if value.format.signed and not signed:
            raise ValueError(f"{name}: it is stored as {value.spec!r}, but cannot be negative")
    elif not signed and value.device.type != "meta" and (value < 0).any():
        raise ValueError(f"{name}: it has negative values")


def check_scale(name: str, scale: Tensor) -> None:
    """Raise ValueError unless a block format's scales are finite and not negative."""
    if scale.device.type != "meta" and not (scale.isfinite().all() and (scale >= 0).all()):
        raise ValueError(f"{name}: the block scales are damaged: some are negative or not finite")


def _check_tensor(name: str, value: Any, param: Tensor) -> None:
    if not isinstance(value, Tensor) or value.is_complex():
        raise ValueError(f"{name}: expected a real tensor, got {type(value).__name__}")
    if value.shape != param.shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)} does not fit the parameter's {tuple(param.shape)}")


def _read_extras(
    param: Tensor, entry: Mapping[str, Any], saved_mode: WeightMode, mode: WeightMode
) -> dict[str, Tensor]:
    saved = []
    for name, dtype in saved_mode.extras.items():
        _check_tensor(name, entry[name], param)
        if entry[name].dtype != dtype:
            raise ValueError(f"{name}: dtype {entry[name].dtype} does not fit, it must be {dtype}")
        saved.append(shard_of(entry[name], param).to(local(param).device, copy=True).contiguous())
    weight = local(param).detach().contiguous()
    value = saved_mode.read(weight, tuple(saved))
    # A view is never a whole ulp of bf16, 2^-7, away from what it shows, or the least step of the dtype.
    info = torch.finfo(param.dtype)
    allowed = 2.0**-6 * weight.float().abs() + max(info.smallest_normal * info.eps, 1e-30)
    if weight.device.type != "meta" and ((value - weight.float()).abs() > allowed).any():
        raise ValueError(
            f"its {', '.join(saved_mode.extras)} belongs to other weights than the model has; "
            "load the model's state dict before the optimizer's"
        )
    extras = saved if saved_mode == mode else mode.extras_for(weight, value)
    return {name: like(extra, param) for name, extra in zip(mode.extras, extras, strict=True)}


# Full-precision weights --------------------------------------------------------------------------------------------


def full_precision(optimizer: StateOwner, model: torch.nn.Module) -> dict[str, Tensor]:
    """See `LowBitOptimizer.fp32_state_dict`."""
    groups = {param: group for _, param, group in optimizer.named_params()}
    result = dict(model.state_dict())
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in groups:
            mode, extras = _mode_and_extras(optimizer, param, groups[param])
            value = mode.read(local(param).detach().contiguous(), extras)
            # The modes without extras read their own storage, which must not leave with the state dict.
            result[name] = like(value.clone(), param)
    return result


def load_full_precision(optimizer: StateOwner, model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """See `LowBitOptimizer.load_fp32_state_dict`."""
    _check_fits(model, state_dict)
    groups = {param: group for _, param, group in optimizer.named_params()}
    weights = dict(state_dict)
    extras: list[tuple[Tensor, Tensor]] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if param not in groups:
            continue
        mode, stored = _mode_and_extras(optimizer, param, groups[param])
        shard = local(param)
        value = shard_of(state_dict[name], param).to(shard.device).float().contiguous()
        weight, fresh = mode.write(value, param.dtype, _nearest_draws(optimizer, param, groups[param]))
        weights[name] = like(weight, param)
        extras += zip(stored, fresh, strict=True)
    model.load_state_dict(weights)
    for old, new in extras:
        old.copy_(new)


def _check_fits(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Raise what `model.load_state_dict` would, which finds it out half way."""
    own = model.state_dict()
    problems = [f"Missing key {name!r}." for name in own if name not in state_dict]
    problems += [f"Unexpected key {name!r}." for name in state_dict if name not in own]
    for name in own.keys() & state_dict.keys():
        found, needed = tuple(state_dict[name].shape), tuple(own[name].shape)
        if found != needed:
            problems.append(f"size mismatch for {name}: {found} in the state dict, {needed} in the model.")
    if problems:
        raise RuntimeError("the state dict does not fit the model: " + " ".join(problems))


def _mode_and_extras(
    optimizer: StateOwner, param: Tensor, group: Mapping[str, Any]
) -> tuple[WeightMode, tuple[Tensor, ...]]:
    mode = optimizer.layout_for(param, group).mode
    if not mode.extras:
        return mode, ()
    if not optimizer.state.get(param):
        optimizer.init_param(param, group)
    return mode, tuple(local(optimizer.state[param][name]) for name in mode.extras)


def _nearest_draws(optimizer: StateOwner, param: Tensor, group: Mapping[str, Any]) -> Draws:
    keys = NoiseKeys(group["seed"], optimizer.place(param), region(param))
    return Draws(step=lambda: torch.tensor(0x8000, dtype=torch.int32), fixed=lambda: keys.view_draw(local(param)))
