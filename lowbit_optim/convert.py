"""Optimizer state dicts between libraries: torch, torchao, bitsandbytes and this one.

`sources` reads every library into one neutral form, and the writers below make every library's form of that, so that N
libraries take N readers and N writers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint import check_form
from .formats import near_miss
from .peers import write_bitsandbytes, write_torchao
from .sources import ADAM, EXTRAS, SGD, Neutral, map_lr, read, recognise
from .state import decoded

_Parts = tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]


def convert_state_dict(sd: Mapping[str, Any], to: str, *, format: str | None = None) -> dict[str, Any]:
    """Return an optimizer's state dict in the form of another library. Neither model nor optimizer is needed.

    Where `sd` comes from is seen from its entries: torch's Adam, AdamW and SGD, this package's optimizers, torchao's
    `Adam*` and `AdamW*`, or Adam, AdamW, Lion and SGD of bitsandbytes with block-wise 8-bit or with 32-bit state. 8-bit
    codes of torchao, bitsandbytes and `int8-dynamic` mean the same and are kept bit for bit. Other state is decoded,
    and where the target stores codes, encoded to nearest.

    Weights are no part of the result. What this package keeps beside them (`correction`, `compensation`, `master`)
    is left out except with `to="lowbit"`; save `optimizer.fp32_state_dict(model)` too. `Adam` and `AdamW` have the same
    state, so the class that loads it decides; bitsandbytes decouples weight decay in both.

    Args:
        sd: the state dict. It is not changed, and the result shares no tensor with it.
        to: "torch" (fp32 slots), "torchao", "bitsandbytes" or "lowbit" (what `load_state_dict` of this package reads).
        format: of quantized slots. torchao: "8bit" (default), "4bit" or "fp8"; bitsandbytes: "8bit" (default) or
            "32bit". As in those libraries, parameters with fewer than 4096 elements have fp32 slots, and in torchao
            also those that are no whole number of blocks.

    Returns:
        A dict of "state" and "param_groups" with the keys of `sd`. Hyper-parameters have the target's names and types;
        what users add to groups, such as `initial_lr`, stays.

    Raises:
        ValueError: `to` or `format` is unknown, `sd` is of no known optimizer or damaged, its tensors are sharded, or
            the target has no such optimizer or hyper-parameter. The message names the entry.
        ImportError: torchao is needed and not installed.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(64, 64))
        >>> source = torch.optim.AdamW([weight], lr=1e-3)
        >>> weight.grad = torch.ones(64, 64)
        >>> source.step()
        >>> converted = convert_state_dict(source.state_dict(), to="bitsandbytes")
        >>> sorted(converted["state"][0])
        ['absmax1', 'absmax2', 'qmap1', 'qmap2', 'state1', 'state2', 'step']
    """
    check_form(sd)
    chosen = check_target(to, format)
    _check_gathered(sd["state"])
    source = recognise(sd)
    if source == to and source in ("torch", "lowbit"):
        return copy.deepcopy(dict(sd))
    neutral = read(sd, source)
    if source == "lowbit":
        _warn_of_extras(sd["state"], to)
    state, groups = _TARGETS[to][0](neutral, chosen)
    return {"state": state, "param_groups": groups}


def from_peers(sd: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict of torchao or bitsandbytes in this package's form, and any other as it is."""
    return convert_state_dict(sd, to="lowbit") if recognise(sd) in ("torchao", "bitsandbytes") else sd


def check_target(to: str, format: str | None) -> str:
    """Return the format of `to` that `format` names, or the default one.

    Raises:
        ValueError: one of them is unknown; the message lists what is allowed.
    """
    if to not in _TARGETS:
        raise ValueError(f"to: unknown {to!r}; choose one of {', '.join(_TARGETS)}{near_miss(to, _TARGETS)}")
    formats = _TARGETS[to][1]
    if format is None:
        return formats[0]
    if format not in formats or not format:
        allowed = f"choose one of {', '.join(formats)}{near_miss(format, formats)}" if any(formats) else "leave it out"
        raise ValueError(f"format: to={to!r} has no {format!r}; {allowed}")
    return format


def _check_gathered(state: Mapping[Any, Any]) -> None:
    for key, entry in state.items():
        for name, value in entry.items() if isinstance(entry, Mapping) else ():
            if hasattr(value, "placements"):
                raise ValueError(
                    f"state[{key!r}]: {name} is sharded (DTensor); gather a full state dict first, with torch's "
                    "get_optimizer_state_dict and StateDictOptions(full_state_dict=True)"
                )


def _warn_of_extras(state: Mapping[Any, Mapping[str, Any]], to: str) -> None:
    dropped = {name for entry in state.values() for name in EXTRAS & entry.keys() if _says_more(name, entry[name])}
    if dropped:
        warnings.warn(
            f"convert_state_dict(to={to!r}) leaves out {', '.join(sorted(dropped))}, which is precision of the weights "
            "beyond their dtype; save optimizer.fp32_state_dict(model) to keep it",
            stacklevel=3,
        )


def _says_more(name: str, extra: Any) -> bool:
    """Whether an extra holds anything that a 16-bit weight cannot."""
    if not isinstance(extra, Tensor):
        return False
    if name == "master":
        return not any(torch.equal(extra.to(dtype).float(), extra) for dtype in (torch.bfloat16, torch.float16))
    return bool(extra.any())


# Writing -------------------------------------------------------------------------------------------------------------


def _refuse(neutral: Neutral, target: str, *switches: str) -> None:
    """Raise ValueError where a hyper-parameter asks for what the target would silently not do."""
    for place, group in enumerate(neutral.groups):
        for name in switches:
            if group.get(name):
                raise ValueError(f"param_groups[{place}]: {target} has no {name}, and here it is {group[name]!r}")


def _count(step: int) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float32)


def _to_torch(neutral: Neutral, _: str) -> _Parts:
    state = {
        key: {name: _count(value) if name == "step" else decoded(value) for name, value in entry.items()}
        for key, entry in neutral.state.items()
    }
    if neutral.kind is SGD:
        # Torch tells SGD's first step, which has no dampening, by the buffer that is not there, and counts none.
        state = {key: entry for key, entry in state.items() if entry.pop("step") > 0}
    return state, [{**neutral.kind.torch_only, **group} for group in neutral.groups]


def _to_lowbit(neutral: Neutral, _: str) -> _Parts:
    state = {key: {**entry, "step": _count(entry["step"])} for key, entry in neutral.state.items()}
    return state, neutral.groups


def _to_torchao(neutral: Neutral, bits: str) -> _Parts:
    if neutral.kind is not ADAM:
        raise ValueError(f"torchao has no {neutral.kind.name}; its optimizers are Adam and AdamW")
    _refuse(neutral, "torchao", "maximize")
    group_of = neutral.group_of()
    state = {
        key: {
            "step": _count(entry["step"]),
            **{name: write_torchao(entry[name], signed, bits) for name, signed in ADAM.slots(group_of[key]).items()},
        }
        for key, entry in neutral.state.items()
    }
    groups = []
    for group in neutral.groups:
        kept = {name: value for name, value in group.items() if name != "maximize"}
        kept["betas"] = tuple(map(float, group["betas"]))
        groups.append(map_lr(kept, lambda lr: torch.as_tensor(lr, dtype=torch.float32)))
    return state, groups


def _to_bitsandbytes(neutral: Neutral, bits: str) -> _Parts:
    _refuse(neutral, "bitsandbytes", "amsgrad", "maximize", "nesterov", "dampening")
    if neutral.kind is SGD and not all(group["momentum"] for group in neutral.groups):
        raise ValueError("bitsandbytes has no SGD without momentum")
    kind, group_of = neutral.kind, neutral.group_of()
    state = {}
    for key, entry in neutral.state.items():
        state[key] = {"step": entry["step"]}
        for place, (name, signed) in enumerate(kind.slots(group_of[key]).items(), 1):
            state[key].update(write_bitsandbytes(entry[name], place, signed, bits))
    groups = []
    for group in neutral.groups:
        betas = (group["momentum"], 0.0) if kind is SGD else group["betas"]
        hyper = {"betas": tuple(map(float, betas)), "eps": float(group.get("eps", 0.0))}
        hyper |= {"lr": group["lr"], "weight_decay": float(group["weight_decay"])}
        own = {name: value for name, value in group.items() if name not in kind.hyper}
        groups.append(map_lr({**hyper, **own}, float))
    return state, groups


#: Libraries, with what writes their form and the formats it knows; the first is the default.
_TARGETS: dict[str, tuple[Callable[[Neutral, str], _Parts], tuple[str, ...]]] = {
    "torch": (_to_torch, ("",)),
    "torchao": (_to_torchao, ("8bit", "4bit", "fp8")),
    "bitsandbytes": (_to_bitsandbytes, ("8bit", "32bit")),
    "lowbit": (_to_lowbit, ("",)),
}
