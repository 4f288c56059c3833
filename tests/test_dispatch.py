"""Backends: how many graphs they make, that they agree, and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor

import lowbit_optim
from lowbit_optim import LowBitOptimizer
from lowbit_optim.state import stored_parts
from lowbit_optim.step import CHUNK

from .cases import BF16, FORMAT_NAMES, RULES, modes_for
from .references import exact_roots

# Every rule, format and mode is compiled at least once; the full product is `slow`.
COMPILED = [
    ("adamw", "int8", "stochastic"),
    ("adamw", "int4", "split8"),
    ("adamw", "bf16", "kahan/dithered"),
    ("adamw", "fp32", "master"),
    ("adamw-amsgrad", "int8", "split16"),
    ("adam", "fp8", "split8/nearest"),
    ("lion", "int8-dynamic", "kahan"),
    ("sgd-nesterov", "int4", "nearest"),
    ("sgd", "fp32", "master/dithered"),
]
REST = [
    case
    for rule in RULES
    for fmt in FORMAT_NAMES
    for mode in modes_for(BF16)
    if (case := (rule, fmt, mode)) not in COMPILED
]


def params_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in shapes]


def set_grads(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def stored(optimizer: LowBitOptimizer, params: list[torch.nn.Parameter]) -> list[Tensor]:
    values = [value for param in params for value in optimizer.state[param].values()]
    return [param.detach() for param in params] + [part for value in values for part in stored_parts(value)]


class GraphCount:
    """Counts the graphs that Dynamo compiles."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @property
    def new(self) -> int:
        return self._now() - self._start


def test_one_graph_per_signature_whatever_the_shapes_and_scalars() -> None:  # P1, P2, P3
    before = torch._dynamo.config.get_config_copy()
    shapes = [(64 + 3 * k, 65 + k) for k in range(40)] + [(k,) for k in range(1, 9)] + [(), (0, 4)]
    params = params_of(shapes)
    optimizer = lowbit_optim.AdamW(params, lr=1e-3, state="int8", weights="stochastic", backend="compile")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    graphs = GraphCount()
    for step in range(4):
        set_grads(params, step)
        optimizer.param_groups[0].update(weight_decay=0.01 * step, betas=(0.9 - 0.01 * step, 0.99))
        optimizer.step()
        schedule.step()
    # Quantized matrices make one signature, small fp32-state tensors another.
    assert graphs.new <= 2
    assert torch._dynamo.config.get_config_copy() == before


@pytest.mark.parametrize(("rule", "fmt", "mode"), COMPILED, ids=map("-".join, COMPILED))
def test_compiled_step_stores_what_the_eager_step_stores(rule: str, fmt: str, mode: str) -> None:  # N6, P6
    check_backends_agree(rule, fmt, mode, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fmt", "mode"), REST, ids=map("-".join, REST))
def test_compiled_step_stores_what_the_eager_step_stores_in_full(rule: str, fmt: str, mode: str) -> None:
    check_backends_agree(rule, fmt, mode, steps=3)


def run_steps(rule: str, fmt: str, mode: str, backend: str, steps: int) -> list[Tensor]:
    params = params_of([(130, 64), (CHUNK // 32 + 1, 33), (5000,)])
    optimizer = RULES[rule].make(params, lr=1e-3, state=fmt, weights=mode, backend=backend)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return stored(optimizer, params)


def check_backends_agree(rule: str, fmt: str, mode: str, steps: int) -> None:
    # With plain eager roots no tolerance would do: where a draw falls between a root and its neighbour, a code or a
    # weight goes to the other level, and how often depends on how many bits a mode keeps (kahan: 1 in 1,000 a step).
    with exact_roots():
        expected = run_steps(rule, fmt, mode, "eager", steps)
    for backend in "compile", "cpp":
        found = run_steps(rule, fmt, mode, backend, steps)
        differ = [int((left != right).sum()) for left, right in zip(expected, found, strict=True)]
        assert differ == [0] * len(differ), backend


def test_plain_eager_steps_differ_in_few_codes() -> None:  # docs/faq.md says how many
    eager, cpp = (run_steps("adamw", "int8", "stochastic", backend, steps=5) for backend in ("eager", "cpp"))
    differ = sum(int((left != right).sum()) for left, right in zip(eager, cpp, strict=True))
    assert differ <= 2e-4 * sum(tensor.numel() for tensor in eager)


@pytest.mark.parametrize(("rule", "fmt", "mode"), COMPILED[:3], ids=map("-".join, COMPILED[:3]))
def test_compiled_run_resumes_bit_identically(rule: str, fmt: str, mode: str) -> None:  # C19
    def run(interrupted: bool) -> list[Tensor]:
        params = params_of([(130, 64), (77,)])
        optimizer = RULES[rule].make(params, lr=1e-2, state=fmt, weights=mode, backend="compile")
        for step in range(6):
            if interrupted and step == 3:
                saved = optimizer.state_dict()
                params = [torch.nn.Parameter(param.detach().clone()) for param in params]
                optimizer = RULES[rule].make(params, lr=1.0, state=fmt, weights=mode, backend="compile")
                optimizer.load_state_dict(saved)
            set_grads(params, step)
            optimizer.step()
        return stored(optimizer, params)

    for straight, resumed in zip(run(False), run(True), strict=True):
        assert torch.equal(straight, resumed)


@pytest.mark.parametrize("scheduler", ["StepLR", "ReduceLROnPlateau", "OneCycleLR"])
def test_user_compiled_step_does_not_recompile(scheduler: str) -> None:  # P4
    params = params_of([(64, 65)])
    optimizer = lowbit_optim.AdamW(params, lr=1e-3, backend="eager")
    options = {"StepLR": {"step_size": 1}, "ReduceLROnPlateau": {}, "OneCycleLR": {"max_lr": 1e-2, "total_steps": 10}}
    schedule = getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **options[scheduler])
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(5):
        set_grads(params, step)
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            compiled()
        schedule.step(1.0) if scheduler == "ReduceLROnPlateau" else schedule.step()
    assert optimizer.state[params[0]]["step"] == 5


def run_without_compiler(code: str) -> str:
    environment = {**os.environ, "CXX": "/nonexistent/c++"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_auto_backend_without_a_compiler_is_eager_with_one_warning() -> None:  # P10
    out = run_without_compiler(
        """
        import warnings, torch, lowbit_optim
        params = [torch.nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(3))]
        for param in params:
            param.grad = torch.ones_like(param)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = lowbit_optim.AdamW8bit(params, lr=1e-1)
            optimizer.step()
        print(len(caught), "C++ compiler" in str(caught[0].message), params[0].float().mean().item() < 0.95)
        """
    )
    assert out.split() == ["1", "True", "True"]


def test_named_backend_without_a_compiler_is_refused_at_construction() -> None:
    out = run_without_compiler(
        """
        import torch, lowbit_optim
        try:
            lowbit_optim.AdamW8bit([torch.nn.Parameter(torch.ones(3))], backend="compile")
        except ValueError as error:
            print(error)
        """
    )
    assert "C++ compiler" in out
    assert "backend='compile'" in out
