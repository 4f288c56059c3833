"""A slot held as a ratio to the root of another: the same rule, and the way to other formats and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lowbit_optim import AdamW, AdamW4bit, Lion, convert_state_dict
from lowbit_optim.formats import FORMATS, RATIOS
from lowbit_optim.hyper import Moment
from lowbit_optim.rules import UpdateRule, adam, adam_amsgrad, adamw, adamw_amsgrad, by_ratio, to_ratios
from lowbit_optim.slots import absolute, stored_as
from lowbit_optim.state import decoded, stored_parts, zeros_state

from .runs import parameters, run, stored_bytes, values

BF16 = torch.bfloat16
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}


def trained(**options: Any) -> tuple[AdamW, list[nn.Parameter]]:
    params = parameters((70, 96), (64, 64), dtype=BF16)
    optimizer = AdamW(params, **{"state": "int4", "backend": "eager", **options})
    run(optimizer, params, range(5))
    return optimizer, params


@pytest.mark.parametrize("rule", [adamw, adamw_amsgrad, adam, adam_amsgrad], ids=lambda rule: rule.name)
def test_ratio_is_another_way_to_hold_the_same_moment(rule: UpdateRule) -> None:
    ratio = by_ratio(rule, ("exp_avg",))
    assert ratio is by_ratio(rule, ("exp_avg",)), "a signature is told from another by its rule"
    weights = [values((4096,), 0)] * 2
    held: list[dict[str, torch.Tensor]] = [{name: torch.zeros(4096) for name in rule.slots}] * 2
    for step in range(1, 21):
        moment = Moment(rule, HYPER, step)
        h = dict(zip(moment.names, moment.on(torch.device("cpu"))[0].unbind(), strict=True))
        grad = values((4096,), step) * torch.logspace(-12, 3, 4096)
        for place, each in enumerate((rule, ratio)):
            weights[place], held[place] = each.update(weights[place], grad, held[place], h)
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        held[1]["exp_avg"], to_ratios(rule, ("exp_avg",), held[0])["exp_avg"], rtol=1e-4, atol=1e-6
    )


def test_ratio_of_moments_that_vanished_is_zero() -> None:
    # The square of 1e-30 is no fp32 number; without the test for it the ratio would be infinite.
    moments = {"exp_avg": torch.tensor([1e-30, 0.0, 2.0]), "exp_avg_sq": torch.tensor([0.0, 0.0, 4.0])}
    assert to_ratios(adamw, ("exp_avg",), moments)["exp_avg"].tolist() == [0.0, 0.0, 1.0]


def test_only_rules_with_a_second_moment_hold_ratios() -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    specs = {}
    for optimizer in AdamW4bit([param], backend="eager"), Lion([param], state="int4", backend="eager"):
        optimizer.init_state()
        specs[type(optimizer).__name__] = optimizer.state[param]["exp_avg"].spec
    assert specs == {"AdamW4bit": "int4/b32/ratio", "Lion": "int4/b32/signed"}
    assert set(RATIOS) == {"int4"}


def test_ratio_comes_back_from_fp32_bit_for_bit() -> None:  # promise 4
    optimizer, params = trained()
    through_torch = convert_state_dict(optimizer.state_dict(), to="torch")
    others = [nn.Parameter(param.detach().clone()) for param in params]
    loaded = AdamW(others, state="int4", backend="eager")
    loaded.load_state_dict(through_torch)
    for mine, theirs in zip(others, params, strict=True):
        for slot in "exp_avg", "exp_avg_sq":
            pairs = zip(
                stored_parts(loaded.state[mine][slot]), stored_parts(optimizer.state[theirs][slot]), strict=True
            )
            assert all(torch.equal(*pair) for pair in pairs), slot


@pytest.mark.parametrize("other", [name for name in FORMATS if name != "int4"])
def test_moment_keeps_its_value_where_the_second_moment_is_rounded(other: str) -> None:
    first, second = values((64, 64), 0), values((64, 64), 1).square() * torch.logspace(-6, 0, 64)
    formats = {"exp_avg": RATIOS["int4"], "exp_avg_sq": FORMATS[other][1]}
    stored = stored_as(adamw, {"exp_avg": first, "exp_avg_sq": second}, (), formats, torch.device("cpu"))
    root = decoded(stored["exp_avg_sq"]).sqrt()
    found, largest = absolute(adamw, stored)["exp_avg"], (first / root).view(-1, 32).abs().amax(1, keepdim=True)
    error = ((found - first) / root).view(-1, 32).abs()
    assert (error <= largest * (0.5 / 7 + 2**-7)).all()


def test_state_becomes_what_is_copied_into_it() -> None:
    optimizer, params = trained()
    state, ratios = optimizer.state[params[0]]["exp_avg"], copy.deepcopy(optimizer.state[params[0]]["exp_avg"])
    moments = zeros_state(FORMATS["int8"][0], (70, 96), torch.device("cpu")).copy_(values((70, 96), 3))
    alias = state.detach()
    alias.copy_(moments)
    assert state.spec == alias.spec == "int4/b32/signed"
    assert absolute(adamw, slots_of(optimizer, params[0]))["exp_avg"] is state
    # A step takes it as what it is, and a copy of a ratio makes it one again.
    run(optimizer, params, range(1))
    assert state.spec == "int4/b32/signed"
    state.copy_(ratios)
    assert state.spec == "int4/b32/ratio"
    # So do parts of it, whether they share its storage or write through a window.
    state[:35].copy_(moments[:35])
    assert state.spec == "int4/b32/signed"
    state[:, 5:9].copy_(ratios[:, 5:9])
    assert state.spec == "int4/b32/ratio"


@pytest.mark.parametrize("saved_as", ["fp32", "int8", "int4"])
def test_values_that_a_loader_copied_into_state_are_read_as_they_were_saved(saved_as: str) -> None:
    # What DCP does: values go into the state of the optimizer that loads, in place, and options come from the file.
    source, params = trained(state=saved_as)
    others = [nn.Parameter(param.detach().clone()) for param in params]
    expected = absolute(adamw, slots_of(source, params[0]))["exp_avg"]
    for into in ("fp32", "int8", "int4"):
        loading = AdamW(others, state=into, backend="eager")
        loading.init_state()
        filled = loading.state_dict()
        for place, param in enumerate(params):
            for slot, value in slots_of(source, param).items():
                filled["state"][place][slot].copy_(value)
            filled["state"][place]["step"].fill_(5)
        filled["param_groups"] = copy.deepcopy(source.state_dict()["param_groups"])
        loading.load_state_dict(filled)
        found = absolute(adamw, slots_of(loading, others[0]))["exp_avg"]
        error = (decoded(found) - decoded(expected)).norm() / decoded(expected).norm()
        assert error < (0.45 if into == "int4" and saved_as != "int4" else 0.12), (into, error)


def slots_of(optimizer: AdamW, param: nn.Parameter) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")}


def test_ratio_takes_no_more_bytes() -> None:
    optimizer, params = trained()
    assert stored_bytes(optimizer) == 2 * sum(-(-param.numel() // 32) * (16 + 2) for param in params)
