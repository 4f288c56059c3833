"""Steps by kernels against the reference step, tensor by tensor: what the interpreter's and the GPU's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowbit_optim import rules
from lowbit_optim.dispatch import step_fn
from lowbit_optim.formats import BlockFormat, StateFormat, get_format
from lowbit_optim.hyper import Moment
from lowbit_optim.noise import WHOLE, Region
from lowbit_optim.rules import UpdateRule
from lowbit_optim.step import Item, KernelStep, NoiseKeys, Operands, Signature, Timing, reference_step
from lowbit_optim.weights import WEIGHT_MODES, Draws

from .cases import BF16

#: Update rules by name.
UPDATES = {rule.name: rule for rule in vars(rules).values() if isinstance(rule, UpdateRule)}
HYPER = {
    "lr": 1e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.1,
    "maximize": True,
}
NAN, INF = float("nan"), float("inf")
#: More than a tile of 8-bit codes, ragged, less than a block, nothing.
SIZES = (2048 + 256, 333, 7, 0)


class ExactRoots(TorchFunctionMode):
    """Square roots rounded correctly, as the interpreter and GPUs do; torch's on CPU are off by an ulp at times."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sqrt:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    """A signature by names, and the parameters to step."""

    rule: str
    formats: tuple[str, ...]
    mode: str
    weight_dtype: torch.dtype = BF16
    grad_dtype: torch.dtype = BF16
    guarded: bool = False
    regions: tuple[Region, ...] = (WHOLE,) * len(SIZES)
    sizes: tuple[int, ...] = SIZES

    def signature(self, device: str) -> Signature:
        rule = UPDATES[self.rule]
        formats = tuple(
            get_format(name, slot.signed, ratio=rule.name.endswith("_ratio") and slot.over is not None)
            for name, slot in zip(self.formats, rule.slots.values(), strict=True)
        )
        names = Moment(rule, HYPER, 1).names
        dtypes = self.weight_dtype, self.grad_dtype
        strided = any(region.strided for region in self.regions)
        return Signature(rule, formats, WEIGHT_MODES[self.mode], names, *dtypes, device, self.guarded, strided)

    def items(self, special: bool = False) -> list[Item]:
        """Parameters with random weights, gradients and state, the same ones at each call, on CPU."""
        generator = torch.Generator().manual_seed(0)
        items = []
        for place, (size, region) in enumerate(zip(self.sizes, self.regions, strict=True)):
            operands = random_operands(self.signature("cpu"), size, generator)
            if special and size:
                for offset, value in enumerate((NAN, INF, -INF, 1e30, 0.0)):
                    operands.grad[offset * size // 5] = value
            items.append((operands, NoiseKeys(5, place, region)))
        return items


def random_operands(sig: Signature, size: int, generator: torch.Generator) -> Operands:
    """Operands whose values spread over some decades, with a block of zeros."""

    def spread(length: int) -> Tensor:
        values = torch.randn(length, generator=generator) * 10.0 ** torch.randn(length, generator=generator)
        values[64:96] = 0.0
        return values

    def draw() -> Tensor:
        return torch.randint(1 << 16, (size,), generator=generator, dtype=torch.int32)

    weight, extras = sig.mode.write(spread(size) * 0.01, sig.weight_dtype, Draws(draw, draw))
    parts = []
    for fmt, slot in zip(sig.formats, sig.rule.slots.values(), strict=True):
        values = spread(-(-size // fmt.block) * fmt.block) * 0.1
        values[size:] = 0.0
        parts.append(fmt.encode(values if slot.signed else values.square(), None))
    grad = spread(size).to(sig.grad_dtype)
    return Operands(weight.contiguous(), grad, tuple(parts), tuple(extra.contiguous() for extra in extras))


def moved(items: Sequence[Item], device: str) -> list[Item]:
    """The same parameters, with keys of their own, on a device; copied there and back, never shared."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.clone().to(device)

    return [
        (
            Operands(
                there(operands.weight),
                there(operands.grad),
                tuple(tuple(map(there, stored)) for stored in operands.parts),
                tuple(map(there, operands.extras)),
            ),
            NoiseKeys(*keys._identity, keys.region),
        )
        for operands, keys in items
    ]


def timing_of(case: Case, step: int, device: str, proceed: bool = True) -> Timing:
    moment = Moment(UPDATES[case.rule], HYPER, step)
    return Timing(*moment.on(torch.device(device)), torch.tensor(proceed, device=device) if case.guarded else None)


def reference(case: Case) -> KernelStep:
    sig = case.signature("cpu")
    return KernelStep(sig, "eager", partial(reference_step, sig))


def stored_bits(tensor: Tensor) -> Tensor:
    """Bits of a tensor on CPU, every NaN the same."""
    tensor = tensor.cpu()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(whole)


def differences(kernel: Sequence[Item], expected: Sequence[Item]) -> tuple[int, int]:
    """Return (bytes of codes that differ, other tensors' elements that differ)."""
    codes = others = 0
    for (ours, _), (theirs, _) in zip(kernel, expected, strict=True):
        in_blocks = {part.data_ptr() for stored in ours.parts for part in stored[:1] if part.dtype == torch.uint8}
        for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True):
            differ = int((stored_bits(mine) != stored_bits(other)).sum())
            if mine.data_ptr() in in_blocks:
                codes += differ
            else:
                others += differ
    return codes, others


def largest_move(sig: Signature, kernel: Sequence[Item], expected: Sequence[Item]) -> int:
    """Return by how many levels codes of the two differ at most; from one sign to the other is through zero."""

    def levels(fmt: StateFormat, codes: Tensor) -> Tensor:
        assert isinstance(fmt, BlockFormat)
        code = fmt._unpack(codes.cpu())
        if not fmt.signed:
            return code
        magnitude, negative = fmt._split_sign(code)
        return torch.where(negative, -magnitude, magnitude)

    moves = [
        (levels(fmt, mine[0]) - levels(fmt, other[0])).abs().max()
        for (ours, _), (theirs, _) in zip(kernel, expected, strict=True)
        for fmt, mine, other in zip(sig.formats, ours.parts, theirs.parts, strict=True)
        if fmt.block > 1 and mine[0].numel()
    ]
    return int(max(moves, default=torch.tensor(0)))


def check(case: Case, device: str, steps: int = 2, special: bool = False) -> None:
    """Step by kernels and by the reference, and compare every stored bit.

    Args:
        case: what to step.
        device: "cpu" in the interpreter, or "cuda".
        steps: number of steps.
        special: with gradients that are NaN, infinite and very large.
    """
    expected = case.items(special)
    ours = moved(expected, device)
    kernel, by_reference = step_fn(case.signature(device), "triton"), reference(case)
    for step in range(1, steps + 1):
        kernel(ours, timing_of(case, step, device))
        with ExactRoots():
            by_reference(expected, timing_of(case, step, "cpu"))
        for (mine, _), (other, _) in zip(ours, expected, strict=True):
            changed = other.grad.roll(1) * (0.5 if special else 1.0)
            other.grad.copy_(changed)
            mine.grad.copy_(changed)
    codes, others = differences(ours, expected)
    if device == "cpu":
        assert (codes, others) == (0, 0), f"{codes} codes and {others} other elements differ"
    else:
        # Roots are approximate on a GPU: a value at a level may be taken for its neighbour's.
        total = sum(part.numel() for operands, _ in ours for stored in operands.parts for part in stored)
        assert others == 0, f"{others} elements differ"
        assert codes <= 2e-4 * total + 2, f"{codes} of {total} codes differ"
        assert largest_move(case.signature("cpu"), ours, expected) <= 1
