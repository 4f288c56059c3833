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
from .formats import RATIOS, StateFormat
from .hyper import Moment, on_device
from .layout import WEIGHT_DTYPES, stored_rule
from .sharding import are_plain, check_grad, everywhere, layout_name, like, local, local_grad, region, same_layout
from .state import QuantizedState, has_format, stored_format, stored_parts
from .step import Item, NoiseKeys, Operands, Signature, StepFn, Timing
from .weights import get_mode

Named = tuple[str, Tensor, dict[str, Any]]
_OPTIONS = ("weights", "backend", "seed", "skip_nonfinite")


@dataclass(slots=True)
class Prepared:
    """One parameter, ready to be stepped.

    Attributes:
        param: the parameter; while it is kept here, no other object has its id.
        options: what its step function was chosen by, other than its tensors.
        place: where its weight lies, and its strides.
        grad_dtype: dtype of the gradients that the step function takes.
        numel: number of elements, of the whole parameter where it is sharded.
        values: the state's tensors.
        ids: their ids.
        step: its step function.
        keys: its noise keys.
        weight: its local weight, not flat.
        flat: the same, flat, on the same storage; None where that cannot be.
        parts, extras: as in `Operands`.
        counter: its step counter.
        count: steps taken, where `counter` has this `version`.
        version: of the counter, as autograd counts changes.
        kinds: the slots of formats that a copy into them may change (`QuantizedState.become`), each with its format.
    """

    param: Tensor
    options: tuple[Any, ...]
    place: tuple[int, tuple[int, ...]]
    grad_dtype: torch.dtype
    numel: int
    values: list[Tensor]
    ids: tuple[int, ...]
    step: StepFn
    keys: NoiseKeys
    weight: Tensor
    flat: Tensor | None
    parts: tuple[tuple[Tensor, ...], ...]
    extras: tuple[Tensor, ...]
    counter: Tensor
    count: int
    version: int
    kinds: tuple[tuple[QuantizedState, StateFormat], ...]

    def fits(self, options: tuple[Any, ...], weight: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Whether nothing has changed that this was made from."""
        return (
            self.ids == tuple(map(id, state.values()))
            and self.place == (weight.data_ptr(), weight.stride())
            and self.grad_dtype is grad.dtype
            and self.numel == grad.numel()
            and grad.layout is torch.strided
            and self.options == options
            and all(state.format is fmt for state, fmt in self.kinds)
        )


#: A parameter with a gradient, the gradient, its group, and what was prepared for it before and still fits, if any.
Due = tuple[Tensor, Tensor, dict[str, Any], "Prepared | None"]
#: What is stepped together, each with its gradient.
Batch = list[tuple[Prepared, Tensor]]


class Stepper:
    """Steps the parameters of one optimizer.

    Args:
        optimizer: gives rules and layouts, and holds the state.
    """

    def __init__(self, optimizer: StateOwner) -> None:
        self._optimizer = optimizer
        self._prepared: dict[int, Prepared] = {}

    def check(self, params: Iterable[Named]) -> list[Due]:
        """Return the parameters that have a gradient.

        Raises:
            ValueError, TypeError: a gradient or a state is not fit for the step.
        """
        due: list[Due] = []
        options: dict[int, tuple[Any, ...]] = {}
        states = self._optimizer.state
        for name, param, group in params:
            grad = param.grad
            if grad is None:
                continue
            if id(group) not in options:
                options[id(group)] = self._options(group)
            prepared = self._prepared.get(id(param))
            if prepared is not None:
                plain = are_plain(param, grad)
                weight = param if plain else local(param)
                if not (
                    prepared.fits(options[id(group)], weight, grad, states.get(param) or {})
                    and (plain or same_layout(grad, param))
                ):
                    prepared = None
            if prepared is None:
                self._prepared.pop(id(param), None)
                self._check_grad(name, param)
                self._check_state(name, param, group)
            due.append((param, grad, group, prepared))
        return due

    def step(self, params: Iterable[Named]) -> None:
        """Update every parameter that has a gradient.

        Raises:
            ValueError, TypeError: as `check` does; nothing has changed then.
        """
        batches: dict[tuple[StepFn, int, int], Batch] = {}
        groups = {}
        checked = self.check(params)
        only_state = self._asks_for_state(checked)
        for param, grad, group, known in checked:
            if known is None and not self._optimizer.state.get(param):
                self._optimizer.init_param(param, group)
            if only_state:
                continue
            prepared = known or self._prepare(param, group)
            if group["skip_nonfinite"]:
                self._step_if_finite(param, group, prepared)
                continue
            groups[id(group)] = group
            batches.setdefault((prepared.step, id(group), self._count(prepared) + 1), []).append((prepared, grad))
        for (step, _, _), batch in batches.items():
            self._advance(step, batch)
        for (step, group_id, count), batch in batches.items():
            moment = Moment(self._optimizer.rule_for(groups[group_id]), groups[group_id], count)
            self._run(step, batch, moment, None)

    # Before the step -------------------------------------------------------------------------------------------------

    def _options(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return self._optimizer.rule_for(group), *[group[name] for name in _OPTIONS]

    def _check_grad(self, name: str, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise TypeError(f"{name}: sparse gradients are not supported; use a dense embedding (sparse=False)")
        if grad.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"{name}: gradient dtype {grad.dtype} is not supported; it must be fp32, bf16 or fp16")
        if grad.shape != param.shape:
            # Torch lets nobody set such a gradient, but its `data` can be replaced.
            raise ValueError(f"{name}: its gradient has shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}")
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

    def _asks_for_state(self, due: list[Due]) -> bool:
        """Whether this is a first step with every lr and every gradient zero.

        That is how DCP and torchtitan ask an optimizer for its state. One gradient that is not zero makes it a step
        for all: half of a LoRA adapter has zero gradients in the first step, which many schedules take at lr 0.
        """
        for param, _, group, _ in due:
            state = self._optimizer.state.get(param)
            if on_device(group["lr"]) or group["lr"] != 0 or (state and state["step"] != 0):
                return False
        # Ranks must agree: a shard may be zero, or empty, where the whole gradient is not. Each of them asks about all.
        zero = [bool(everywhere(~local_grad(param).any(), param)) for param, *_ in due]
        return all(zero)

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
        values = list(state.values())
        prepared = Prepared(
            param=param,
            options=self._options(group),
            place=(shard.data_ptr(), shard.stride()),
            grad_dtype=param.grad.dtype,
            numel=param.numel(),
            values=values,
            ids=tuple(map(id, values)),
            step=step_fn(signature, group["backend"]),
            keys=keys,
            weight=shard.detach(),
            flat=shard.detach().view(-1) if shard.is_contiguous() else None,
            parts=tuple(stored_parts(slot) for slot in slots.values()),
            extras=tuple(local(state[extra]).view(-1) for extra in mode.extras),
            counter=state["step"],
            count=0,
            version=-1,
            kinds=tuple(
                (slot, slot.format)
                for slot in slots.values()
                if isinstance(slot, QuantizedState) and slot.format.name in RATIOS
            ),
        )
        self._prepared[id(param)] = prepared
        return prepared

    # The step --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _count(prepared: Prepared) -> int:
        """Return how many steps a parameter has taken; reading its counter costs more than all else here."""
        version = prepared.counter._version
        if version != prepared.version:
            prepared.count, prepared.version = int(prepared.counter), version
        return prepared.count

    @staticmethod
    def _advance(step: StepFn, batch: Batch) -> None:
        moved = step.advance([prepared.counter for prepared, _ in batch])
        for prepared, _ in batch:
            prepared.count += 1
            prepared.version += moved

    def _step_if_finite(self, param: Tensor, group: Mapping[str, Any], prepared: Prepared) -> None:
        """Step one parameter unless its gradient has a NaN or infinity; only the device knows."""
        state, grad = self._optimizer.state[param], local_grad(param)
        proceed = everywhere(grad.isfinite().all(), param)
        step = state["step"].to(grad.device) + 1
        for name, change in ("step", proceed), ("skipped", ~proceed):
            state[name] = state[name].to(grad.device) + change
        prepared.values = list(state.values())
        prepared.ids, prepared.counter = tuple(map(id, prepared.values)), state["step"]
        moment = Moment(self._optimizer.rule_for(group), group, step)
        self._run(prepared.step, [(prepared, grad)], moment, proceed)

    @staticmethod
    def _run(step: StepFn, batch: Batch, moment: Moment, proceed: Tensor | None) -> None:
        items: list[Item] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for prepared, grad in batch:
            weight = prepared.flat
            if weight is None:
                weight = prepared.weight.contiguous().view(-1)
                copied.append((prepared.weight, weight))
            if not are_plain(prepared.param, grad):
                grad = local_grad(prepared.param)
            if grad.dim() != 1 or not grad.is_contiguous():
                grad = grad.contiguous().view(-1)
            items.append((Operands(weight, grad, prepared.parts, prepared.extras), prepared.keys))
        # One call for each device; parameters of one signature nearly always share it.
        devices = dict.fromkeys(operands.weight.device for operands, _ in items)
        for device in devices:
            here = items if len(devices) == 1 else [item for item in items if item[0].weight.device == device]
            step(here, Timing(*moment.on(device), proceed))
        for weight, stepped in copied:
            weight.copy_(stepped.view(weight.shape))
