"""Update rules against torch's optimizers and against fp64 references, with fp32 state and fp32 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_optim import AdamW, Lion
from lowbit_optim.state import decoded

from .cases import RULES
from .references import run_rule
from .runs import values

#: Options on top of a rule's own; each must be one that the rule's class takes.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.3},
    "no decay": {"weight_decay": 0.0},
    "decay maximize": {"weight_decay": 0.3, "maximize": True},
    "betas": {"betas": (0.8, 0.95)},
    "betas 0": {"betas": (0.0, 0.0)},
    "eps": {"eps": 1e-3},
    "amsgrad": {"amsgrad": True, "betas": (0.9, 0.9)},
    "momentum": {"momentum": 0.99, "dampening": 0.5, "nesterov": False},
}
LR = {"adam": 3e-3, "adamw": 3e-3, "lion": 1e-3, "sgd": 1e-3}


def _takes(name: str, option: str) -> bool:
    family, given = name.split("-")[0], OPTIONS[option]
    known = {"adam": {"betas", "eps", "amsgrad"}, "lion": {"betas"}, "sgd": {"momentum", "dampening", "nesterov"}}
    return set(given) <= known[family.replace("adamw", "adam")] | {"weight_decay", "maximize"}


CASES = [(name, option) for name in RULES for option in OPTIONS if _takes(name, option)]
SHAPES = ((16, 32), ())


def gradients(steps: int, shape: tuple[int, ...] = (512,), seed: int = 50) -> list[Tensor]:
    """Gradients whose size changes from step to step, and by a thousand from element to element."""
    scale = 10 ** (1.5 * values(shape, seed + 1).tanh())
    return [scale * values(shape, seed + 2 + step) * (1 + 4 * (step % 17 == 3)) for step in range(steps)]


def close(actual: Tensor, expected: Tensor, rtol: float) -> None:
    # Relative to the value, or to the typical one for values that happen to be near zero.
    expected = expected.double()
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * expected.square().mean().sqrt().item())


@pytest.mark.parametrize(("name", "option"), CASES)
def test_rule_equals_torch_and_the_fp64_reference(name: str, option: str) -> None:
    rule, options, steps = RULES[name], OPTIONS[option], 100
    hyper = {"lr": LR[name.split("-")[0]], **rule.options, **options}
    starts = [values(shape, place) for place, shape in enumerate(SHAPES)]
    grads = [gradients(steps, shape, 100 * place) for place, shape in enumerate(SHAPES)]

    def train(make: Any, **extra: Any) -> tuple[list[Tensor], Any]:
        params = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = make(params, **hyper, **extra)
        for step in range(steps):
            for param, of_param in zip(params, grads, strict=True):
                param.grad = of_param[step].clone()
            optimizer.step()
        return [param.detach() for param in params], [optimizer.state[param] for param in params]

    ours, states = train(rule.cls, state="fp32", backend="eager")
    # torch's default decay of AdamW is ours too, and Lion's is its paper's 0.
    reference_hyper = {**({"weight_decay": 0.01} if rule.cls is AdamW else {}), **hyper}
    references = [
        run_rule(name, start, of_param, **reference_hyper) for start, of_param in zip(starts, grads, strict=True)
    ]
    for weight, state, (expected, expected_state) in zip(ours, states, references, strict=True):
        close(weight, expected, 1e-5)
        assert set(state) - {"step"} == set(expected_state)
        for slot, value in expected_state.items():
            close(decoded(state[slot]), value, 1e-5)
    if rule.torch_cls is not None:
        theirs, _ = train(rule.torch_cls)
        for weight, expected in zip(ours, theirs, strict=True):
            close(weight, expected, 1e-5)


def test_defaults_are_those_of_torch() -> None:
    weight, grads = values((512,), 0), gradients(5)
    for name, rule in RULES.items():
        if rule.torch_cls is None or rule.options:
            continue
        pair = [torch.nn.Parameter(weight.clone()) for _ in range(2)]
        ours, theirs = rule.cls(pair[:1], state="fp32", backend="eager"), rule.torch_cls(pair[1:])
        for grad in grads:
            for param, optimizer in zip(pair, (ours, theirs), strict=True):
                param.grad = grad.clone()
                optimizer.step()
        close(pair[0].detach(), pair[1].detach(), 1e-6)
        shared = ours.defaults.keys() & theirs.defaults.keys() - {"foreach", "fused"}
        assert {key: ours.defaults[key] for key in shared} == {key: theirs.defaults[key] for key in shared}, name


def test_lion_moves_every_weight_by_the_learning_rate() -> None:
    weight = torch.nn.Parameter(values((512,), 0))
    optimizer = Lion([weight], lr=1e-3, state="fp32", backend="eager")
    for grad in gradients(10):
        before = weight.detach().clone()
        weight.grad = grad
        optimizer.step()
        torch.testing.assert_close((weight.detach() - before).abs(), torch.full((512,), 1e-3), rtol=1e-3, atol=1e-7)
    weight.grad = torch.zeros(512)
    optimizer.state[weight]["exp_avg"].zero_()
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight.detach(), before), "no direction, no move"


# N4
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_betas_are_not_rounded_to_the_weight_dtype(state: str) -> None:
    found = {}
    grads = gradients(10, (4096,))
    for beta2 in (0.999, 0.9999):
        weight = torch.nn.Parameter(values((4096,), 0).bfloat16())
        optimizer = AdamW([weight], lr=1e-2, betas=(0.9, beta2), eps=0.0, state=state, backend="eager")
        for grad in grads:
            weight.grad = grad.bfloat16()
            optimizer.step()
        found[beta2] = weight.detach().clone()
        moments = run_rule("adamw", weight, [grad.bfloat16() for grad in grads], lr=1e-2, betas=(0.9, beta2))[1]
        for slot, expected in moments.items():
            actual = decoded(optimizer.state[weight][slot]).double()
            if state == "fp32":
                close(actual, expected, 1e-5)
            else:
                # Single values are rounded; a beta2 of 0.99609 would be four times off in all of them.
                assert actual.abs().sum().item() == pytest.approx(expected.abs().sum().item(), rel=1e-2)
    assert not torch.equal(found[0.999], found[0.9999])


# N4
def test_scalars_are_formed_in_double_precision() -> None:
    # In fp32, 1 - 0.99999 is off by 0.14 %, and the bias correction of the first steps with it.
    grads, hyper = gradients(3), {"lr": 1e-2, "betas": (0.9999, 0.99999), "weight_decay": 1e-3}
    weight = torch.nn.Parameter(torch.zeros(512))
    optimizer = AdamW([weight], state="fp32", backend="eager", **hyper)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    expected, moments = run_rule("adamw", torch.zeros(512), grads, **hyper)
    close(weight.detach(), expected, 1e-5)
    for slot, moment in moments.items():
        close(optimizer.state[weight][slot], moment, 1e-5)
