"""What rounding takes from a momentum is given to the weight: `rules.Slot.carry` and formats that are `carried`."""

from __future__ import annotations

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
HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0}
#: So many steps that no bias correction is left, nor changes.
LATE = 10**7


def scalars(rule: UpdateRule, step: int, **changes: Any) -> dict[str, Tensor]:
    moment = Moment(rule, {**HYPER, **changes}, step)
    return dict(zip(moment.names, moment.on(torch.device("cpu"))[0].unbind(), strict=True))


def test_every_momentum_that_moves_weights_by_its_value_is_carried() -> None:
    rules = {name.split(",")[0] for name in CARRIED}
    # Of Lion's only the sign counts: what a part of it will do depends on the rest.
    assert set(UPDATES) - rules == {"lion", "sgd"}
    assert {slot for _, slot in CARRIED.values()} == {"exp_avg", "momentum_buffer"}
    carried = [fmt for pair in FORMATS.values() for fmt in pair if fmt.carried] + [
        f for f in RATIOS.values() if f.carried
    ]
    assert [fmt.spec for fmt in carried] == ["int4/b32/signed", "int4/b32/ratio"]


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.95])
@pytest.mark.parametrize("name", CARRIED)
def test_carry_is_what_the_slot_would_still_have_done(name: str, momentum: float) -> None:
    rule, slot = CARRIED[name]
    # So slow a second moment that it stays as it is for all the steps that the first one takes to fade.
    changes = {"betas": (momentum, 1 - 1e-9), "momentum": momentum}
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
        for _ in range(300):
            weight, slots = rule.update(weight, torch.zeros(64), slots, h)
        ends.append(weight)
    torch.testing.assert_close(ends[0] - ends[1], expected, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("step", [1, 3, 10, 100])
def test_carry_of_adam_allows_for_the_bias_corrections_to_come(step: int) -> None:
    beta1 = 0.9
    exact = sum(beta1**k / (1 - beta1 ** (step + k)) for k in range(1, 2000)) * (1 - beta1**step)
    assert scalars(UPDATES["adamw"], step)["carry"].item() == pytest.approx(exact, rel=0.13 if step == 1 else 0.03)


def test_momentum_without_end_is_not_carried() -> None:
    assert scalars(UPDATES["sgd_momentum"], 1, momentum=1.0)["carry"] == 0


def _way(make: Any, steps: int) -> Tensor:
    """Weights after steps with noisy gradients of many sizes, at a constant learning rate."""
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = make([weight])
    size = torch.logspace(-1, 0, 32).repeat(128)
    for step in range(steps):
        weight.grad = size * (0.3 + values((4096,), step))
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("backend", ["eager", "cpp"])
@pytest.mark.parametrize("family", ["adamw", "sgd"])
def test_errors_of_a_carried_momentum_do_not_add_up(family: str, backend: str) -> None:
    def make(state: Any, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if family == "sgd":
            return SGD(params, lr=1e-3, momentum=0.9, state=state, backend=backend)
        # The second moment is exact: its errors are not what is carried.
        mixed = {"exp_avg": state, "exp_avg_sq": "fp32"}
        return AdamW(params, lr=1e-3, weight_decay=0.0, state=mixed, backend=backend)

    def error(steps: int) -> float:
        exact, coarse = (_way(lambda params, state=state: make(state, params), steps) for state in ("fp32", "int4"))
        return (coarse - exact).square().mean().sqrt().item()

    # Independent errors make three times the distance in nine times the steps.
    assert error(360) < 1.5 * error(40)


def test_the_weight_gets_what_the_format_stored_less(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [replace(fmt, name="plain", carried=False) for fmt in (*FORMATS["int4"], RATIOS["int4"])]  # type: ignore[type-var]
    monkeypatch.setitem(FORMATS, "plain", (plain[0], plain[1]))
    monkeypatch.setitem(RATIOS, "plain", plain[2])
    ways, slots = {}, {}
    for state in "int4", "plain":
        weight = nn.Parameter(torch.zeros(4096))
        optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0, state=state, backend="eager")
        for step in range(3):
            before = weight.detach().clone()
            old = {name: slot.dequantize() for name, slot in optimizer.state[weight].items() if name != "step"}
            weight.grad = values((4096,), step)
            optimizer.step()
        ways[state], slots[state] = weight.detach() - before, optimizer.state[weight]
    assert torch.equal(slots["int4"]["exp_avg"].parts[0], slots["plain"]["exp_avg"].parts[0])
    grad = values((4096,), 2).double()
    second = 0.999 * old["exp_avg_sq"] + 0.001 * grad.square()
    first = 0.9 * old["exp_avg"] * old["exp_avg_sq"].double().sqrt() + 0.1 * grad
    lost = first / second.sqrt() - slots["int4"]["exp_avg"].dequantize()
    # 1e-3 / (1 - 0.9^3) of the third step, 0.9 / 0.1 of it over those to come, and the second moment's correction.
    expected = -1e-3 * 9 * (1 - 0.9**3) ** -0.4 * (1 - 0.999**3) ** 0.5 * lost
    assert expected.abs().median() > 1e-5
    torch.testing.assert_close((ways["int4"] - ways["plain"]).double(), expected, rtol=1e-3, atol=2e-9)
