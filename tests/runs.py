"""Short training runs, and what is left of them in bits: what the tests of engine, state and checkpoints share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_optim import LowBitOptimizer, QuantizedState
from lowbit_optim.state import stored_parts

#: As many elements as `min_quantized_numel`: the smallest matrix that is quantized by default.
SHAPE = (64, 64)


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Normal fp32 values that no other use of torch's generators can change."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def parameters(*shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(values(shape, 1000 * seed + place).to(dtype)) for place, shape in enumerate(shapes)]


def set_gradients(params: Iterable[Tensor], step: int, scale: float = 1.0) -> None:
    """Gradients that depend on the step and on the place of the parameter alone."""
    for place, param in enumerate(params):
        param.grad = (scale * values(param.shape, 1 + 7919 * step + place)).to(param.dtype)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int], scale: float = 1.0) -> None:
    for step in steps:
        set_gradients(params, step, scale)
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """Stored bits, so that NaN equals itself and -0.0 does not equal 0.0."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().clone().contiguous().view(-1).view(whole)


def fingerprint(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every bit that a step may change: weights, stored state by name, and the options of the groups."""
    found: dict[str, Any] = {}
    for place, group in enumerate(optimizer.param_groups):
        for name, option in group.items():
            if name != "params":
                found[f"group {place} {name}"] = option.item() if isinstance(option, Tensor) else option
        for index, param in enumerate(group["params"]):
            key = f"group {place} param {index}"
            found[key] = bits(param)
            for name, value in optimizer.state.get(param, {}).items():
                kind = value.spec if isinstance(value, QuantizedState) else str(value.dtype)
                found[f"{key} {name}"] = (kind, tuple(value.shape))
                for number, part in enumerate(stored_parts(value)):
                    found[f"{key} {name} part {number}"] = bits(part)
    return found


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two fingerprints bit for bit."""
    assert sorted(actual) == sorted(expected), f"only in one: {sorted(actual.keys() ^ expected.keys())}"
    for name, value in expected.items():
        same = torch.equal(actual[name], value) if isinstance(value, Tensor) else actual[name] == value
        assert same, f"{name} differs: {actual[name]} != {value}"


def assert_same_optimizers(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    assert_same(fingerprint(actual), fingerprint(expected))


def assert_same_weights(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for place, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(bits(left), bits(right)), f"parameter {place}"


def stored_bytes(optimizer: LowBitOptimizer) -> int:
    """Bytes of all slots and extras, counters left out, from shapes and dtypes."""
    return sum(
        math.prod(part.shape) * part.element_size()
        for entry in optimizer.state.values()
        for name, value in entry.items()
        if name not in ("step", "skipped")
        for part in stored_parts(value)
    )
