"""Optimizer state dicts of any known library, read into one neutral form.

In the neutral form slots and hyper-parameters have torch's names, a step is a whole number, and a slot is plain fp32
or a `QuantizedState`: codes that two libraries share are never decoded on the way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import rules
from .checkpoint import check_slot, counter
from .hyper import check_hyper
from .layout import STORAGE_DEFAULTS
from .peers import WRAPPED, is_torchao, read_bitsandbytes, read_torchao, unwrap_bitsandbytes
from .rules import UpdateRule
from .slots import absolute, is_own_group, ratio_slots
from .state import QuantizedState
from .weights import WEIGHT_MODES

#: Tensors of this package that belong to weights.
EXTRAS = {name for mode in WEIGHT_MODES.values() for name in mode.extras}


@dataclass(frozen=True, eq=False)
class Kind:
    """A family of optimizers whose state means the same in every library.

    Attributes:
        name: name for messages.
        rule: a rule that has all the slots that a member may have.
        needed: hyper-parameters that every group has.
        optional: hyper-parameters that a group may lack, with what they are then.
        torch_only: further group keys of torch's class, with their defaults.
    """

    name: str
    rule: UpdateRule
    needed: tuple[str, ...]
    optional: Mapping[str, Any]
    torch_only: Mapping[str, Any]

    @property
    def hyper(self) -> tuple[str, ...]:
        """Names of all hyper-parameters."""
        return (*self.needed, *self.optional)

    def slots(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """Return name and signedness of the slots that a neutral group's parameters have."""
        signs = {name: slot.signed for name, slot in self.rule.slots.items()}
        return {name: sign for name, sign in signs.items() if name != "max_exp_avg_sq" or group["amsgrad"]}


_SWITCHES = {"foreach": None, "differentiable": False, "fused": None}
ADAM = Kind(
    "Adam",
    rules.adamw_amsgrad,
    ("lr", "betas", "eps", "weight_decay"),
    {"amsgrad": False, "maximize": False},
    {**_SWITCHES, "capturable": False},
)
LION = Kind("Lion", rules.lion, ("lr", "betas", "weight_decay"), {"maximize": False}, {})
SGD = Kind(
    "SGD",
    rules.sgd_momentum,
    ("lr", "momentum", "weight_decay"),
    {"dampening": 0.0, "nesterov": False, "maximize": False},
    _SWITCHES,
)
#: Group keys that are no user's own: hyper-parameters, and what means something to one library alone.
_RESERVED = {
    *(name for kind in (ADAM, LION, SGD) for name in (*kind.hyper, *kind.torch_only)),
    *STORAGE_DEFAULTS,
    *("decoupled_weight_decay", "alpha", "t_alpha", "t_beta3"),
}


@dataclass(frozen=True)
class Neutral:
    """A state dict in no library's form.

    Attributes:
        kind: what its optimizer is.
        state: "step" and slots by parameter key; parameters without slots are left out.
        groups: all hyper-parameters of the kind, "params", and the user's own keys.
    """

    kind: Kind
    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]

    def group_of(self) -> dict[Any, dict[str, Any]]:
        """Return each parameter key's group."""
        return {key: group for group in self.groups for key in group["params"]}


# Recognising ---------------------------------------------------------------------------------------------------------


def recognise(sd: Mapping[str, Any]) -> str:
    """Return the library that a state dict comes from; a fresh optimizer's is told by its groups alone."""
    groups = sd["param_groups"]
    entries = [entry for entry in sd["state"].values() if isinstance(entry, Mapping)]
    names = {name for entry in entries for name in entry}
    if any(map(is_own_group, groups)):
        return "lowbit"
    if names & {WRAPPED, "state1"} or (not names and _lacks(groups, "amsgrad")):
        return "bitsandbytes"
    if any(is_torchao(value) for entry in entries for value in entry.values()):
        return "torchao"
    # A model of small parameters: torch's groups say whether to maximize, torchao's do not.
    tensors = all(isinstance(group.get("lr"), Tensor) for group in groups)
    return "torchao" if tensors and _lacks(groups, "maximize") else "torch"


def _lacks(groups: list[Mapping[str, Any]], name: str) -> bool:
    """Whether these are groups of an Adam without a hyper-parameter that torch's has."""
    return bool(groups) and all("betas" in group and "eps" in group and name not in group for group in groups)


def _kind(sd: Mapping[str, Any], source: str) -> Kind:
    entries = [unwrap_bitsandbytes(entry) for entry in sd["state"].values() if isinstance(entry, Mapping)]
    kinds = {}
    for place, group in enumerate(sd["param_groups"]):
        kind = _bitsandbytes_kind(group, entries) if source == "bitsandbytes" else _named_kind(group)
        if kind is None:
            raise ValueError(f"param_groups[{place}] is of no known optimizer: {_told(group)}")
        kinds[kind] = kind.name
    if len(kinds) > 1:
        raise ValueError(f"param_groups are of several optimizers: {', '.join(kinds.values())}")
    return next(iter(kinds), ADAM)


def _told(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in group.items() if name not in ("params", "param_names"))


def _named_kind(group: Mapping[str, Any]) -> Kind | None:
    if "betas" in group:
        return ADAM if "eps" in group else LION
    return SGD if "momentum" in group else None


def _bitsandbytes_kind(group: Mapping[str, Any], entries: list[dict[str, Any]]) -> Kind | None:
    """Tell its optimizers apart, whose groups all have two betas and an eps, by slots and values."""
    betas, eps = group.get("betas"), group.get("eps")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not isinstance(eps, (int, float)):
        return None
    if any("state2" in entry for entry in entries):
        return ADAM
    if eps > 0:
        # RMSprop and Adagrad have one slot and an eps.
        return None if any(entries) else ADAM
    # SGD's betas are its momentum and a dampening that it ignores; between the two it could be either.
    return SGD if betas[1] == 0 else LION if betas[1] >= 0.5 else None


# Reading -------------------------------------------------------------------------------------------------------------


def read(sd: Mapping[str, Any], source: str) -> Neutral:
    """Return a state dict of `source` in the neutral form; nothing is shared with it.

    Raises:
        ValueError: it is of no known optimizer, incomplete or damaged; the message names the entry.
    """
    kind = _kind(sd, source)
    groups = [_read_group(group, place, kind, source) for place, group in enumerate(sd["param_groups"])]
    neutral = Neutral(kind, {}, groups)
    group_of = neutral.group_of()
    saved_group = {key: group for group in sd["param_groups"] for key in group["params"]}
    for key, entry in sd["state"].items():
        if key not in group_of:
            raise ValueError(f"the state dict has state for {key!r}, which no parameter group names")
        try:
            found = _read_entry(entry, kind, kind.slots(group_of[key]), source)
        except ValueError as error:
            raise ValueError(f"state[{key!r}]: {error}") from None
        if found:
            neutral.state[key] = {**found, **_moments(found, kind, saved_group[key])}
    return neutral


def _moments(entry: Mapping[str, Any], kind: Kind, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the slots of an entry with ratios turned into the moments themselves."""
    slots = {name: value for name, value in entry.items() if name != "step"}
    numel = max((slot.numel() for slot in slots.values()), default=0)
    return absolute(kind.rule, slots, ratio_slots(kind.rule, slots, group, numel))


def map_lr(group: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a group with its learning rates changed."""
    return {**group, **{name: change(group[name]) for name in ("lr", "initial_lr") if name in group}}


def _read_group(saved: Mapping[str, Any], place: int, kind: Kind, source: str) -> dict[str, Any]:
    group = copy.deepcopy(dict(saved))
    if source == "bitsandbytes" and kind is SGD:
        group["momentum"] = group.pop("betas")[0]
    if source == "torchao":
        # It keeps every lr as a tensor, whatever the user gave.
        group = map_lr(group, float)
    missing = [name for name in kind.needed if name not in group]
    if missing:
        raise ValueError(f"param_groups[{place}] lacks {', '.join(missing)}: {_told(group)}")
    hyper = {name: group[name] for name in kind.needed} | {
        name: group.get(name, default) for name, default in kind.optional.items()
    }
    try:
        check_hyper(hyper)
    except (TypeError, ValueError) as error:
        raise ValueError(f"param_groups[{place}]: {error}") from None
    return {**hyper, **{name: value for name, value in group.items() if name not in _RESERVED}}


def _read_entry(entry: Any, kind: Kind, slots: Mapping[str, bool], source: str) -> dict[str, Any]:
    """Return step and slots of one parameter; nothing for one that was never stepped, or that needs no slots."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"it must be a mapping, got {type(entry).__name__}")
    if source == "bitsandbytes":
        entry = unwrap_bitsandbytes(entry)
        parts = {f"{part}{place}" for place in range(1, len(slots) + 1) for part in ("state", "qmap", "absmax")}
        _refuse_unknown(entry, kind, {*parts, "unorm_vec"})
        places = {name: place for place, name in enumerate(slots, 1) if f"state{place}" in entry}
        found = {name: read_bitsandbytes(entry, place, slots[name]) for name, place in places.items()}
    else:
        entry = {name: value for name, value in entry.items() if value is not None}
        _refuse_unknown(entry, kind, {*slots, *({"skipped", *EXTRAS} if source == "lowbit" else ())})
        found = {name: _read_slot(name, entry[name], signed) for name, signed in slots.items() if name in entry}
    if not found and (kind is SGD or not entry):
        return {}
    _check_slots(found, slots, entry)
    # Torch's SGD does not count steps; state without a count has seen one.
    return {"step": int(counter(entry.get("step", 1 if kind is SGD else None))), **found}


def _refuse_unknown(entry: Mapping[str, Any], kind: Kind, known: set[str]) -> None:
    unknown = [str(name) for name in entry if name not in known and name != "step"]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} is no state of {kind.name} with these hyper-parameters in any known library; it "
            f"has {', '.join(map(str, entry))}"
        )


def _check_slots(found: Mapping[str, Tensor], slots: Mapping[str, bool], entry: Mapping[str, Any]) -> None:
    missing = [name for name in slots if name not in found]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}; it has {', '.join(entry)}")
    for name, value in found.items():
        check_slot(name, value, slots[name])
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"its slots differ in shape: {shapes}")


def _read_slot(name: str, value: Any, signed: bool) -> Tensor:
    if not isinstance(value, Tensor) or value.is_complex():
        raise ValueError(f"{name}: expected a real tensor, got {type(value).__name__}")
    if is_torchao(value):
        return read_torchao(name, value, signed)
    if isinstance(value, QuantizedState):
        # A loader may have changed the dtype that decoding rounds to.
        return QuantizedState(value.format, tuple(part.clone() for part in value.parts), value.shape)
    return value.detach().to(torch.float32, copy=True).contiguous()
