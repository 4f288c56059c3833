"""What one call of `step` does: check every parameter, bring each together with its state, and step them in batches.

What a step needs of a parameter hardly changes between steps, so it is prepared once and kept for as long as nothing
that it was made from has changed. With hundreds of small parameters this bookkeeping, not the arithmetic, is the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint import StateOwner
from .dispatch import step_fn
from .hyper import Moment, on_device
from .layout import WEIGHT_DTYPES, stored_rule
from .sharding import check_grad, everywhere, layout_name, like, local, local_grad, region, same_layout
from .state import has_format, stored_format, stored_parts
from .step import Item, NoiseKeys, Operands, Signature, StepFn, Timing
from .weights import get_mode

Named = tuple[str, Tensor, dict[str, Any]]
_OPTIONS = ("weights", "backend", "seed", "skip_nonfinite")


@dataclass(slots=True)
class Prepared:
    """One parameter, ready to be stepped.

    Attributes:
        options: what its step function was chosen by, other than its tensors.
        place: where its weight lies, and its strides.
        grad_dtype: dtype of the gradients that the step function takes.
        values: the state's tensors.
        step: its step function.
        keys: its noise keys.
        weight: its local weight, not flat.
        parts, extras: as in `Operands`.
        count: steps taken, where `counter` has this `version`.
        version: of the counter, as autograd counts changes.
    """

    options: tuple[Any, ...]
    place: tuple[int, tuple[int, ...]]
    grad_dtype: torch.dtype
    values: list[Tensor]
    step: StepFn
    keys: NoiseKeys
    weight: Tensor
    parts: tuple[tuple[Tensor, ...], ...]
    extras: tuple[Tensor, ...]
    count: int
    version: int

    def fits(self, options: tuple[Any, ...], weight: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Whether nothing has changed that this was made from."""
        return (
            self.options == options
            and self.place == (weight.data_ptr(), weight.stride())
            and self.grad_dtype is grad.dtype
            and grad.layout is torch.strided
            and len(state) == len(self.values)
            and all(mine is theirs for mine, theirs in zip(self.values, state.values(), strict=True))
        )


class Stepper:
    """Steps the parameters of one optimizer.

    Args:
        optimizer: gives rules and layouts, and holds the state.
    """

    def __init__(self, optimizer: StateOwner) -> None:
        self._optimizer = optimizer
        self._prepared: dict[Tensor, Prepared] = {}

    def check(self, params: Iterable[Named]) -> None:
        """Raise ValueError or TypeError if a gradient or a state is not fit for the step."""
        for name, param, group in params:
            if param.grad is not None and self._still_prepared(param, group) is None:
                self._prepared.pop(param, None)
                self._check_grad(name, param)
                self._check_state(name, param, group)

    def step(self, params: Iterable[Named]) -> None:
        """Update every parameter that has a gradient, after `check`."""
        batches: dict[tuple[StepFn, int, int], list[tuple[Tensor, Prepared]]] = {}
        groups = {}
        for _, param, group in params:
            if param.grad is None:
                continue
            only_state = self._asks_for_state(param, group)
            if not self._optimizer.state.get(param):
                self._optimizer.init_param(param, group)
            if only_state:
                continue
            prepared = self._prepared.get(param) or self._prepare(param, group)
            if group["skip_nonfinite"]:
                self._step_if_finite(param, group, prepared)
                continue
            groups[id(group)] = group
            count = self._count(param, prepared) + 1
            batches.setdefault((prepared.step, id(group), count), []).append((param, prepared))
        self._advance([param for batch in batches.values() for param, _ in batch])
        for (step, group_id, count), batch in batches.items():
            moment = Moment(self._optimizer.rule_for(groups[group_id]), groups[group_id], count)
            self._run(step, batch, moment, None)

    # Before the step -------------------------------------------------------------------------------------------------

    def _still_prepared(self, param: Tensor, group: Mapping[str, Any]) -> Prepared | None:
        prepared = self._prepared.get(param)
        if prepared is None:
            return None
        assert param.grad is not None
        state = self._optimizer.state.get(param) or {}
        fits = prepared.fits(self._options(param, group), local(param), param.grad, state)
        return prepared if fits and same_layout(param.grad, param) else None

    def _options(self, param: Tensor, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return self._optimizer.rule_for(group), *[group[name] for name in _OPTIONS]

    def _check_grad(self, name: str, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise TypeError(f"{name}: sparse gradients are not supported; use a dense embedding (sparse=False)")
        if grad.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"{name}: gradient dtype {grad.dtype} is not supported; it must be fp32, bf16 or fp16")
        try:
            check_grad(param)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _check_state(self, name: str, param: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse state that somebody, or an option changed since, made unfit for the step."""
        state = self._optimizer.state.get(param)
        if not state:
            return
        rule = self._optimizer.rule_for(group)
        if not any(slot in state for slot in rule.slots):
            # SGD's momentum was turned on after steps without.
            state.update(self._optimizer.zero_slots(param, group))
        extras = get_mode(group["weights"], param.dtype).extras
        for needed in ("step", *rule.slots, *extras):
            if needed not in state:
                raise ValueError(
                    f"{name}: its state has no {needed!r}, which {rule.name} with weights={group['weights']!r} needs; "
                    "options that change the state must be set before the first step"
                )
        for kept in (*rule.slots, *extras):
            value = state[kept]
            if not isinstance(value, Tensor) or value.shape != param.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{name}: {kept} has shape {shape}, the parameter {tuple(param.shape)}")
            if not same_layout(value, param):
                raise ValueError(f"{name}: {kept} is {layout_name(value)}, the parameter {layout_name(param)}")
            fits = value.dtype == extras[kept] if kept in extras else has_format(local(value))
            if not fits:
                raise ValueError(f"{name}: {kept} has dtype {value.dtype}, in which it cannot be stored")

    def _asks_for_state(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether a first step has lr 0 and a zero gradient: how DCP and torchtitan ask an optimizer for its state."""
        lr = group["lr"]
        if on_device(lr) or lr != 0:
            return False
        state = self._optimizer.state.get(param)
        if state and state["step"] != 0:
            return False
        # Ranks must agree: a shard may be zero, or empty, where the whole gradient is not.
        return bool(everywhere(~local_grad(param).any(), param))

    def _prepare(self, param: Tensor, group: Mapping[str, Any]) -> Prepared:
        rule, state, shard = self._optimizer.rule_for(group), self._optimizer.state[param], local(param)
        for name, value in state.items():
            if name not in ("step", "skipped") and local(value).device != shard.device:
                state[name] = like(local(value).to(shard.device), param)
        slots = {name: local(state[name]) for name in rule.slots}
        formats = {name: stored_format(slot, rule.slots[name].signed) for name, slot in slots.items()}
        mode = self._optimizer.layout_for(param, group).mode
        keys = NoiseKeys(group["seed"], self._optimizer.place(param), region(param))
        assert param.grad is not None
        signature = Signature(
            stored_rule(rule, formats),
            tuple(formats.values()),
            mode,
            Moment(rule, group, 1).names,
            param.dtype,
            param.grad.dtype,
            shard.device.type,
            group["skip_nonfinite"],
            keys.region.strided,
        )
        prepared = Prepared(
            options=self._options(param, group),
            place=(shard.data_ptr(), shard.stride()),
            grad_dtype=param.grad.dtype,
            values=list(state.values()),
            step=step_fn(signature, group["backend"]),
            keys=keys,
            weight=shard.detach(),
            parts=tuple(stored_parts(slot) for slot in slots.values()),
            extras=tuple(local(state[extra]).view(-1) for extra in mode.extras),
            count=0,
            version=-1,
        )
        self._prepared[param] = prepared
        return prepared

    # The step --------------------------------------------------------------------------------------------------------

    def _count(self, param: Tensor, prepared: Prepared) -> int:
        """Return how many steps a parameter has taken; reading its counter costs more than all else here."""
        counter = self._optimizer.state[param]["step"]
        if counter._version != prepared.version:
            prepared.count, prepared.version = int(counter), counter._version
        return prepared.count

    def _advance(self, params: list[Tensor]) -> None:
        counters = [self._optimizer.state[param]["step"] for param in params]
        if not counters:
            return
        torch._foreach_add_(counters, 1)
        for param, counter in zip(params, counters, strict=True):
            prepared = self._prepared[param]
            prepared.count, prepared.version = prepared.count + 1, counter._version

    def _step_if_finite(self, param: Tensor, group: Mapping[str, Any], prepared: Prepared) -> None:
        """Step one parameter unless its gradient has a NaN or infinity; only the device knows."""
        state, grad = self._optimizer.state[param], local_grad(param)
        proceed = everywhere(grad.isfinite().all(), param)
        step = state["step"].to(grad.device) + 1
        for name, change in ("step", proceed), ("skipped", ~proceed):
            state[name] = state[name].to(grad.device) + change
        prepared.values = list(state.values())
        moment = Moment(self._optimizer.rule_for(group), group, step)
        self._run(prepared.step, [(param, prepared)], moment, proceed)

    @staticmethod
    def _run(step: StepFn, batch: list[tuple[Tensor, Prepared]], moment: Moment, proceed: Tensor | None) -> None:
        items: list[Item] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for param, prepared in batch:
            weight = prepared.weight
            if not weight.is_contiguous():
                weight = weight.contiguous()
                copied.append((prepared.weight, weight))
            grad = local_grad(param).contiguous()
            items.append((Operands(weight.view(-1), grad.view(-1), prepared.parts, prepared.extras), prepared.keys))
        # One call for each device; parameters of one signature nearly always share it.
        for device in dict.fromkeys(operands.weight.device for operands, _ in items):
            here = [item for item in items if item[0].weight.device == device]
            step(here, Timing(*moment.on(device), proceed))
        for weight, stepped in copied:
            weight.copy_(stepped)
