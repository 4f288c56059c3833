"""Triton kernels on a GPU: the interpreter's matrix again, CUDA graphs, and launches counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import lowbit_optim
from lowbit_optim.dispatch import step_fn
from lowbit_optim.noise import Region
from lowbit_optim.state import stored_parts
from lowbit_optim.step import Timing

from .cases import BF16, FORMAT_NAMES
from .kernel_checks import check, differences, moved, stored_bits, timing_of
from .runs import parameters
from .test_triton import COVERING, NAMES, ONE, REST, case_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]


def captured(step: Any) -> torch.cuda.CUDAGraph:
    """A graph of one call; its warm-up is for the caller to have made."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_captured_step_can_be_replayed() -> None:
    case = case_of("adamw", "int8", "split8")
    start = case.items()
    eager, replayed = moved(start, "cuda"), moved(start, "cuda")
    step = step_fn(case.signature("cuda"), "triton")
    timing = timing_of(case, 1, "cuda")
    scalars, clock = timing.scalars.clone(), timing.clock.clone()
    step(eager, timing)
    step(replayed, timing)
    # Gradients of a captured step lie in the graph's own memory.
    graph_items = [(dataclasses.replace(o, grad=o.grad.clone()), keys) for o, keys in replayed]
    graph = captured(lambda: step(graph_items, Timing(scalars, clock)))
    for count in 2, 3, 4:
        timing = timing_of(case, count, "cuda")
        scalars.copy_(timing.scalars)
        clock.copy_(timing.clock)
        graph.replay()
        step(eager, timing)
    torch.cuda.synchronize()
    assert differences(graph_items, eager) == (0, 0)
    # Later eager steps, with gradients elsewhere, neither use nor disturb what the graph reads.
    timing = timing_of(case, 5, "cuda")
    step([(dataclasses.replace(o, grad=o.grad.clone()), keys) for o, keys in graph_items], timing)
    step(eager, timing)
    timing = timing_of(case, 6, "cuda")
    scalars.copy_(timing.scalars)
    clock.copy_(timing.clock)
    graph.replay()
    step(eager, timing)
    torch.cuda.synchronize()
    assert differences(graph_items, eager) == (0, 0)


@pytest.mark.parametrize("count", [1, 200])
def test_launches_of_a_step_do_not_grow_with_parameters(count: int) -> None:
    case = case_of("adamw", "int8", "split8", sizes=(4096, 100) * count, regions=(Region(),) * (2 * count))
    items = moved(case.items(), "cuda")
    step = step_fn(case.signature("cuda"), "triton")
    step(items, timing_of(case, 1, "cuda"))
    timing = timing_of(case, 2, "cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(items, timing)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["step_2", "step_2"]


@pytest.mark.parametrize("preset", list(lowbit_optim.PRESETS))
def test_optimizers_take_kernels_and_agree_with_the_cpu(preset: str) -> None:
    found = []
    for device, backend in ("cpu", "eager"), ("cuda", "auto"):
        params = [torch.nn.Parameter(param.detach().to(device)) for param in parameters((64, 65), (5,), dtype=BF16)]
        optimizer = lowbit_optim.from_preset(params, preset, lr=1e-2, backend=backend)
        if device == "cuda":
            assert optimizer.layout_for(params[0], optimizer.param_groups[0]).backend == "triton"
        for step in range(2):
            gradients = parameters((64, 65), (5,), dtype=BF16, seed=step + 1)
            for param, grad in zip(params, gradients, strict=True):
                param.grad = grad.detach().to(device)
            optimizer.step()
        found.append(torch.cat([stored_bits(part).int() for param in params for part in everything(optimizer, param)]))
    # Codes that moved in the first step move some weights in the second.
    assert (found[0] != found[1]).float().mean() <= 1e-3


def everything(optimizer: lowbit_optim.LowBitOptimizer, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state[param].values()
    return [param.detach().view(-1), *(part.view(-1) for value in state for part in stored_parts(value))]


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("mode", ["kahan", "split8", "split16", "master"])
def test_nan_and_infinite_gradients(fmt: str, mode: str) -> None:
    check(case_of("adamw_amsgrad", fmt, mode), "cuda", steps=1, special=True)


@pytest.mark.parametrize("grad", NAMES)
@pytest.mark.parametrize("weight", NAMES)
def test_weights_and_gradients_of_every_dtype(weight: str, grad: str) -> None:
    mode = "nearest" if weight == "fp32" else "stochastic"
    check(case_of("adamw", "int8", mode, weight_dtype=NAMES[weight], grad_dtype=NAMES[grad], **ONE), "cuda", steps=1)


@pytest.mark.parametrize("offset", [2**31 - 512, 2**32 - 512, 2**33 + 2**31])
def test_element_counters_around_powers_of_two(offset: int) -> None:
    check(case_of("adamw", "int8", "split8", sizes=(1504,), regions=(Region(offset),)), "cuda", steps=1)


def test_shards_with_gaps() -> None:
    region = Region.of_box((40, 200), (3, 60), (30, 50))
    check(case_of("adamw", "bf16", "kahan/dithered", sizes=(1500,), regions=(region,)), "cuda", steps=1)


@pytest.mark.parametrize(("rule", "fmt", "mode"), COVERING, ids=map("-".join, COVERING))
def test_kernels_store_what_the_reference_stores(rule: str, fmt: str, mode: str) -> None:
    check(case_of(rule, fmt, mode), "cuda", steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fmt", "mode"), REST, ids=map("-".join, REST))
def test_kernels_store_what_the_reference_stores_in_full(rule: str, fmt: str, mode: str) -> None:
    check(case_of(rule, fmt, mode), "cuda", steps=1)
