"""Update rules: pure functions on fp32 tensors that read like their papers.

A rule takes `(weight, grad, slots, h)` and returns `(new_weight, new_slots)`. `h` holds the step's scalars, which the
rule's `scalars` function derives from the group's hyper-parameters in double precision, so that `1 - beta2` and the
bias corrections are as exact as in torch. Rules know nothing of formats, rounding, devices or sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

Slots = dict[str, Tensor]
Scalars = Mapping[str, Tensor]
UpdateFn = Callable[[Tensor, Tensor, Slots, Scalars], tuple[Tensor, Slots]]
#: (what a stored slot lacks, the step's fresh slots, scalars) -> the change of weight that it would have made.
CarryFn = Callable[[Tensor, Slots, Scalars], Tensor]
#: (hyper-parameters, step counted from 1) -> named scalars. Values may be floats or 0-d fp64 tensors.
ScalarsFn = Callable[[Mapping[str, Any], Any], dict[str, Any]]


@dataclass(frozen=True)
class Slot:
    """One state tensor of a rule.

    Attributes:
        signed: whether it can be negative.
        average: whether it is an average, which biased rounding would freeze.
        over: the slot whose square root goes with its size, so that it may be stored as their ratio; see `by_ratio`.
        carry: the change of weight that a part of the slot makes over all steps to come, for a slot whose effect on
            the weight is linear. Of what rounding takes from the slot most can be given to the weight at once, so that
            it is late or early by some steps, but not lost; see docs/techniques/carried-rounding.md.
    """

    signed: bool = True
    average: bool = True
    over: str | None = None
    carry: CarryFn | None = None


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """A named update rule, its slots in order and its scalars."""

    name: str
    slots: Mapping[str, Slot]
    scalars: ScalarsFn
    update: UpdateFn


def update_rule(slots: Mapping[str, Slot], scalars: ScalarsFn) -> Callable[[UpdateFn], UpdateRule]:
    """Make an `UpdateRule` of the decorated update function."""
    return lambda update: UpdateRule(update.__name__, slots, scalars, update)


@cache
def by_ratio(rule: UpdateRule, names: tuple[str, ...]) -> UpdateRule:
    """Return a rule that holds some of its slots as the ratio to the root of the slot that each is `over`.

    A first moment spans as many orders of magnitude as the gradients of its block, m / sqrt(v) hardly one. The ratio is
    to the second moment of the same step before that is rounded, so that a step is as large as it should be whatever
    the rounding does.
    """

    def update(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
        weight, fresh = rule.update(weight, grad, {**slots, **from_ratios(rule, names, slots)}, h)
        return weight, {**fresh, **to_ratios(rule, names, fresh)}

    slots = {name: _carried_as_ratio(slot) if name in names else slot for name, slot in rule.slots.items()}
    return UpdateRule(f"{rule.name}_ratio", slots, rule.scalars, update)


def _carried_as_ratio(slot: Slot) -> Slot:
    carry, over = slot.carry, str(slot.over)
    return replace(slot, carry=lambda lost, slots, h: carry(lost * _root(slots[over]), slots, h)) if carry else slot


def _root(square: Tensor) -> Tensor:
    # Bounded above any finite root: the ratio to an overflowed square is zero, and 0 * inf would be NaN.
    return square.sqrt().clamp(max=2e19)


def from_ratios(rule: UpdateRule, names: tuple[str, ...], slots: Mapping[str, Tensor]) -> Slots:
    """Return the values of slots that are held as ratios, from decoded slots."""
    return {name: slots[name] * _root(slots[str(rule.slots[name].over)]) for name in names}


def to_ratios(rule: UpdateRule, names: tuple[str, ...], slots: Mapping[str, Tensor]) -> Slots:
    """Return slots as ratios; over a root of zero, where a moment has vanished, the ratio is zero."""
    roots = {name: slots[str(rule.slots[name].over)].sqrt() for name in names}
    return {name: torch.where(root > 0, slots[name] / root, 0.0) for name, root in roots.items()}


SECOND_MOMENT = Slot(signed=False)
# A running maximum, not an average: rounded up at random it would only ever grow.
MAXIMUM = Slot(signed=False, average=False)


def adam_scalars(h: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """Scalars of Adam's variants: decays and bias corrections at `step`."""
    beta1, beta2 = h["betas"]
    return {
        "beta1_rest": 1 - beta1,
        "beta2": beta2,
        "beta2_rest": 1 - beta2,
        "step_size": h["lr"] / (1 - beta1**step),
        "bias2_rsqrt": (1 - beta2**step) ** -0.5,
        "eps": h["eps"],
        "weight_decay": h["weight_decay"],
        "keep": 1 - h["lr"] * h["weight_decay"],
        # In place of the sum of beta1^k / (1 - beta1^(step + k)) over k from 1 on, times 1 - beta1^step: exact in the
        # long run, some percent off before. The last factor is 1 at beta1 = 0.9, less beyond: the longer errors last,
        # the more of them shake the weight at a time.
        "carry": beta1 / (1 - beta1) * (1 - beta1**step) ** 0.6 * 4 / (3 + 0.19 / (1 - beta1**2)),
    }


def _moments(grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Tensor]:
    exp_avg = slots["exp_avg"] + (grad - slots["exp_avg"]) * h["beta1_rest"]
    exp_avg_sq = slots["exp_avg_sq"] * h["beta2"] + grad * grad * h["beta2_rest"]
    return exp_avg, exp_avg_sq


def _kept(exp_avg: Tensor, exp_avg_sq: Tensor) -> Slots:
    """The moments to keep. Where a gradient's square overflowed, formats can store nothing fit to divide by."""
    return {"exp_avg": torch.where(exp_avg_sq == math.inf, 0.0, exp_avg), "exp_avg_sq": exp_avg_sq}


def _adam_direction(exp_avg: Tensor, exp_avg_sq: Tensor, h: Scalars) -> Tensor:
    return h["step_size"] * (exp_avg / (exp_avg_sq.sqrt() * h["bias2_rsqrt"] + h["eps"]))


def _adam_carry(lost: Tensor, slots: Slots, h: Scalars) -> Tensor:
    return -_adam_direction(lost * h["carry"], slots["exp_avg_sq"], h)


def _amsgrad_carry(lost: Tensor, slots: Slots, h: Scalars) -> Tensor:
    return -_adam_direction(lost * h["carry"], slots["max_exp_avg_sq"], h)


ADAM_SLOTS = {"exp_avg": Slot(over="exp_avg_sq", carry=_adam_carry), "exp_avg_sq": SECOND_MOMENT}
AMSGRAD_SLOTS = {
    "exp_avg": Slot(over="exp_avg_sq", carry=_amsgrad_carry),
    "exp_avg_sq": SECOND_MOMENT,
    "max_exp_avg_sq": MAXIMUM,
}


@update_rule(ADAM_SLOTS, adam_scalars)
def adamw(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """AdamW (arXiv 1711.05101): Adam with decoupled weight decay."""
    exp_avg, exp_avg_sq = _moments(grad, slots, h)
    weight = weight * h["keep"] - _adam_direction(exp_avg, exp_avg_sq, h)
    return weight, _kept(exp_avg, exp_avg_sq)


@update_rule(AMSGRAD_SLOTS, adam_scalars)
def adamw_amsgrad(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """AdamW dividing by the largest second moment so far (arXiv 1904.09237)."""
    exp_avg, exp_avg_sq = _moments(grad, slots, h)
    largest = slots["max_exp_avg_sq"].maximum(exp_avg_sq)
    weight = weight * h["keep"] - _adam_direction(exp_avg, largest, h)
    return weight, {**_kept(exp_avg, exp_avg_sq), "max_exp_avg_sq": largest}


@update_rule(ADAM_SLOTS, adam_scalars)
def adam(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """Adam (arXiv 1412.6980): weight decay is part of the gradient."""
    exp_avg, exp_avg_sq = _moments(grad + h["weight_decay"] * weight, slots, h)
    weight = weight - _adam_direction(exp_avg, exp_avg_sq, h)
    return weight, _kept(exp_avg, exp_avg_sq)


@update_rule(AMSGRAD_SLOTS, adam_scalars)
def adam_amsgrad(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """Adam dividing by the largest second moment so far (arXiv 1904.09237)."""
    exp_avg, exp_avg_sq = _moments(grad + h["weight_decay"] * weight, slots, h)
    largest = slots["max_exp_avg_sq"].maximum(exp_avg_sq)
    weight = weight - _adam_direction(exp_avg, largest, h)
    return weight, {**_kept(exp_avg, exp_avg_sq), "max_exp_avg_sq": largest}


adamw_ratio, adamw_amsgrad_ratio, adam_ratio, adam_amsgrad_ratio = (
    by_ratio(rule, ("exp_avg",)) for rule in (adamw, adamw_amsgrad, adam, adam_amsgrad)
)


def lion_scalars(h: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """Scalars of Lion; none depends on the step."""
    beta1, beta2 = h["betas"]
    return {
        "beta1_rest": 1 - beta1,
        "beta2_rest": 1 - beta2,
        "lr": h["lr"],
        "keep": 1 - h["lr"] * h["weight_decay"],
    }


@update_rule({"exp_avg": Slot()}, lion_scalars)
def lion(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum, with decoupled weight decay."""
    exp_avg = slots["exp_avg"]
    direction = (exp_avg + (grad - exp_avg) * h["beta1_rest"]).sign()
    weight = weight * h["keep"] - h["lr"] * direction
    return weight, {"exp_avg": exp_avg + (grad - exp_avg) * h["beta2_rest"]}


def sgd_scalars(h: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """Scalars of SGD; dampening does not apply to the first step, as in torch."""
    first = (step == 1) * 1.0
    return {
        "momentum": h["momentum"],
        "grad_share": 1 - h["dampening"] * (1 - first),
        "lr": h["lr"],
        "weight_decay": h["weight_decay"],
    }


@update_rule({}, sgd_scalars)
def sgd(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """Stochastic gradient descent without momentum."""
    return weight - h["lr"] * (grad + h["weight_decay"] * weight), {}


def _momentum(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Tensor]:
    grad = grad + h["weight_decay"] * weight
    return grad, slots["momentum_buffer"] * h["momentum"] + grad * h["grad_share"]


@update_rule({"momentum_buffer": Slot()}, sgd_scalars)
def sgd_momentum(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """SGD with heavy-ball momentum, in torch's form."""
    _, buffer = _momentum(weight, grad, slots, h)
    return weight - h["lr"] * buffer, {"momentum_buffer": buffer}


@update_rule({"momentum_buffer": Slot()}, sgd_scalars)
def sgd_nesterov(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """SGD with Nesterov momentum, in torch's form."""
    grad, buffer = _momentum(weight, grad, slots, h)
    return weight - h["lr"] * (grad + h["momentum"] * buffer), {"momentum_buffer": buffer}
