"""What rounding takes from a momentum is given to the weight: `rules.Slot.carry` and formats that are `carried`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit_optim import SGD, AdamW
from lowbit_optim.formats import FORMATS, RATIOS
from lowbit_optim.hyper import Moment
from lowbit_optim.rules import Slots, UpdateRule

from .kernel_checks import UPDATES
from .runs import values

CARRIED = {
    f"{name}, {slot}": (rule, slot)
    for name, rule in UPDATES.items()
    for slot, kind in rule.slots.items()
    if kind.carry is not None
}
HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
#: So many steps that no bias correction is left, nor changes.
LATE = 10**7


def scalars(rule: UpdateRule, step: int, **changes: Any) -> dict[str, Tensor]:
    moment = Moment(rule, {**HYPER, **changes}, step)
    return dict(zip(moment.names, moment.on(torch.device("cpu"))[0].unbind(), strict=True))


def test_adams_first_moment_is_carried_and_nothing_else() -> None:
    assert {name.split(",")[0] for name in CARRIED} == {name for name in UPDATES if "adam" in name}
    assert {slot for _, slot in CARRIED.values()} == {"exp_avg"}
    formats = (*itertools.chain(*FORMATS.values()), *RATIOS.values())
    assert [fmt.spec for fmt in formats if fmt.carried] == ["int4/b32/ratio"]


@pytest.mark.parametrize(("momentum", "share"), [(0.0, 0.0), (0.9, 1.0), (0.98, 0.513)])
@pytest.mark.parametrize("name", CARRIED)
def test_carry_is_a_share_of_what_the_slot_would_still_have_done(name: str, momentum: float, share: float) -> None:
    rule, slot = CARRIED[name]
    # So slow a second moment that it stays as it is for all the steps that the first one takes to fade.
    changes = {"betas": (momentum, 1 - 1e-9)}
    full: Slots = {other: values((64,), place).abs() + 0.1 for place, other in enumerate(rule.slots)}
    if "max_exp_avg_sq" in full:
        full["max_exp_avg_sq"] = full["exp_avg_sq"] + 1
    full[slot] = values((64,), 9)
    lost = 0.1 * values((64,), 10)
    less = {**full, slot: full[slot] - lost}
    carry = rule.slots[slot].carry
    assert carry is not None
    h = scalars(rule, LATE, **changes)
    expected = carry(lost, full, h)
    ends = []
    for slots in full, less:
        weight = torch.zeros(64)
        for _ in range(700):
            weight, slots = rule.update(weight, torch.zeros(64), slots, h)
        ends.append(weight)
    torch.testing.assert_close(share * (ends[0] - ends[1]), expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("step", [1, 3, 10, 100])
def test_carry_of_adam_allows_for_the_bias_corrections_to_come(step: int) -> None:
    beta1 = 0.9
    exact = sum(beta1**k / (1 - beta1 ** (step + k)) for k in range(1, 2000)) * (1 - beta1**step)
    assert scalars(UPDATES["adamw"], step)["carry"].item() == pytest.approx(exact, rel=0.13 if step == 1 else 0.03)


def test_sgd_follows_a_slope_as_steep_as_momentum_allows() -> None:
    # Levels an octave apart lose a share of the momentum; given to the weight, that shakes it out of a steep valley.
    weight = nn.Parameter(values((4096,), 0))
    optimizer = SGD([weight], lr=0.5, momentum=0.9, state="int4", backend="eager")
    for _ in range(200):
        weight.grad = weight.detach().clone()
        optimizer.step()
    assert weight.abs().max() < 1e-2


@pytest.mark.parametrize("beta1", [0.9, 0.98, 0.999])
def test_carrying_does_no_harm_at_any_beta1(beta1: float, other: str) -> None:
    target = values((64, 64), 0)

    def loss(state: str) -> float:
        weight = nn.Parameter(torch.zeros(64, 64))
        mixed = {"exp_avg": state, "exp_avg_sq": "int8"}
        optimizer = AdamW([weight], lr=1e-3, betas=(beta1, 0.999), weight_decay=0.0, state=mixed, backend="eager")
        for step in range(400):
            weight.grad = weight.detach() - target + 0.5 * values((64, 64), step)
            optimizer.step()
        return (weight.detach() - target).square().mean().item()

    assert loss("int4") < 1.1 * loss(other)


def _way(make: Any, steps: int) -> Tensor:
    """Weights after steps with noisy gradients of many sizes, at a constant learning rate."""
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = make([weight])
    size = torch.logspace(-1, 0, 32).repeat(128)
    for step in range(steps):
        weight.grad = size * (0.3 + values((4096,), step))
        optimizer.step()
    return weight.detach()


@pytest.fixture(params=[0.0, 1.0], ids=["nothing", "all"], scope="module")
def other(request: pytest.FixtureRequest) -> Iterator[str]:
    """int4 that carries nothing, or all."""
    name = f"int4-carries-{request.param:g}"
    first, second, ratio = (
        replace(fmt, name=name, carried=request.param) for fmt in (*FORMATS["int4"], RATIOS["int4"])
    )  # type: ignore[type-var]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, name, (first, second))
        patch.setitem(RATIOS, name, ratio)
        yield name


def _error(state: str, backend: str, steps: int) -> float:
    """Distance from the weights that exact state ends at; the second moment's errors are not what is carried."""

    def make(state: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        mixed = {"exp_avg": state, "exp_avg_sq": "fp32"}
        return AdamW(params, lr=1e-3, weight_decay=0.0, state=mixed, backend=backend)

    exact, coarse = (_way(lambda params, name=name: make(name, params), steps) for name in ("fp32", state))
    return (coarse - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_errors_add_up_as_far_as_they_are_not_carried(backend: str, other: str) -> None:
    if other.endswith("1"):
        # Independent errors make three times the distance in nine times the steps.
        assert _error(other, backend, 360) < 1.5 * _error(other, backend, 40)
    else:
        assert _error("int4", backend, 360) < 0.5 * _error(other, backend, 360)


@pytest.mark.parametrize("other", [0.0], ids=["nothing"], indirect=True)
def test_the_weight_gets_its_share_of_what_the_format_stored_less(other: str) -> None:
    ways, slots = {}, {}
    for state in "int4", other:
        weight = nn.Parameter(torch.zeros(4096))
        optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0, state=state, backend="eager")
        for step in range(3):
            before = weight.detach().clone()
            old = {name: slot.dequantize() for name, slot in optimizer.state[weight].items() if name != "step"}
            weight.grad = values((4096,), step)
            optimizer.step()
        ways[state], slots[state] = weight.detach() - before, optimizer.state[weight]
    assert torch.equal(slots["int4"]["exp_avg"].parts[0], slots[other]["exp_avg"].parts[0])
    grad = values((4096,), 2).double()
    second = 0.999 * old["exp_avg_sq"] + 0.001 * grad.square()
    first = 0.9 * old["exp_avg"] * old["exp_avg_sq"].double().sqrt() + 0.1 * grad
    lost = first / second.sqrt() - slots["int4"]["exp_avg"].dequantize()
    # Three quarters of what it would still do: 1e-3 / (1 - 0.9^3) of the third step, 0.9 / 0.1 of it in those to come,
    # and the second moment's correction.
    expected = -0.75e-3 * 9 * (1 - 0.9**3) ** -0.4 * (1 - 0.999**3) ** 0.5 * lost
    assert expected.abs().median() > 1e-5
    torch.testing.assert_close((ways["int4"] - ways[other]).double(), expected, rtol=1e-3, atol=2e-9)
