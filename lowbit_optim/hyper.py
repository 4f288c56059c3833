"""Hyper-parameters: checked once at the edge, turned into the small tensors that a step reads.

`param_groups` keep exactly what the user put there. For each step the group's floats become one fp32 vector of the
rule's scalars and one int32 vector, the clock, that moves the noise on; a compiled step therefore never sees a
Python number change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .noise import GOLDEN16
from .rules import UpdateRule

_NON_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")
_FLAGS = ("amsgrad", "maximize", "nesterov", "skip_nonfinite")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def to_number(name: str, value: Any) -> float:
    """Return a hyper-parameter as a finite float; configs may give it as a string.

    Raises:
        ValueError: not a number, or NaN or infinite.
        TypeError: not a number, a string or a one-element tensor.
    """
    if isinstance(value, bool) or not isinstance(value, (Real, str, Tensor)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} as a tensor must have one element, got shape {tuple(value.shape)}")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def to_whole(name: str, value: Any) -> int:
    """Return an option as an integer; configs may give it as a string.

    Raises:
        ValueError: not a whole number.
        TypeError: see `to_number`.
    """
    number = to_number(name, value)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    # A large seed does not survive being a float.
    return int(value)


def to_flag(name: str, value: Any) -> bool:
    """Return an option as a bool; configs may give it as a string.

    Raises:
        ValueError: neither a bool nor a string such as "true".
    """
    if isinstance(value, bool):
        return value
    if str(value).lower() in _TRUE + _FALSE:
        return str(value).lower() in _TRUE
    raise ValueError(f"{name} must be true or false, got {value!r}")


def check_hyper(group: dict[str, Any]) -> None:
    """Validate a parameter group's hyper-parameters in place; strings become numbers, tensors stay tensors.

    Raises:
        ValueError: a value is out of range or not a number; the message names it.
    """
    for name in _NON_NEGATIVE:
        if name in group and not on_device(group[name]):
            number = to_number(name, group[name])
            if number < 0:
                raise ValueError(f"{name} must not be negative, got {group[name]!r}")
            if isinstance(group[name], str):
                group[name] = number
    if "dampening" in group:
        group["dampening"] = to_number("dampening", group["dampening"])
    if "betas" in group:
        group["betas"] = _check_betas(group["betas"])
    for name in _FLAGS:
        if name in group:
            group[name] = to_flag(name, group[name])
    if group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        raise ValueError("nesterov needs momentum above 0 and dampening 0")


def on_device(value: Any) -> bool:
    """Whether reading a value would make the host wait for a device; such tensors are taken as they are."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _check_betas(betas: Any) -> tuple[Any, Any]:
    if isinstance(betas, str) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
    for place, beta in enumerate(betas):
        if not on_device(beta) and not 0 <= to_number(f"betas[{place}]", beta) < 1:
            raise ValueError(f"betas[{place}] must be in [0, 1), got {beta!r}")
    first, second = (float(beta) if isinstance(beta, str) else beta for beta in betas)
    return first, second


class Moment:
    """The scalars and the clock of one parameter group at one step, as tensors on any device.

    Args:
        rule: gives the scalars.
        group: the parameter group, with floats or one-element tensors.
        step: the step about to be taken, counted from 1; a 0-d tensor where only the device knows it.
    """

    def __init__(self, rule: UpdateRule, group: Mapping[str, Any], step: int | Tensor) -> None:
        count = step.double() if isinstance(step, Tensor) else step
        exact = {name: _exact(value) for name, value in group.items() if name != "params"}
        scalars = {"grad_sign": -1.0 if group.get("maximize") else 1.0, **rule.scalars(exact, count)}
        self.names = tuple(scalars)
        self._values = list(scalars.values())
        self._step = step
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (scalars, clock): fp32 of `names`, and int32 of the dither's offset and a word of the step's own."""
        if device not in self._on:
            self._on[device] = _vector(self._values, device), self._clock(device)
        return self._on[device]

    def _clock(self, device: torch.device) -> Tensor:
        step = torch.as_tensor(self._step, dtype=torch.int64)
        # An odd multiplier and a xorshift: distinct steps have distinct words.
        word = step * 0x9E3779B1
        return torch.stack([step * GOLDEN16 & 0xFFFF, word ^ (word >> 15)]).to(device, torch.int32)


def _exact(value: Any) -> Any:
    """Hyper-parameters in double precision; a tensor stays on its device, since reading it there would wait."""
    if isinstance(value, Tensor):
        return value.double().view(()) if on_device(value) else value.item()
    if isinstance(value, tuple):
        return tuple(_exact(item) for item in value)
    return value


def _vector(values: list[Any], device: torch.device) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        values = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        return torch.stack(values).float()
    return torch.tensor(values, dtype=torch.float32, device=device)
