"""Which step function serves a parameter, and the reference step that defines them all.

A `Signature` is everything a step function depends on but the data. `step_fn` gives the function for it: eager, or
compiled once by Inductor for every shape. This is the one file that knows that Triton exists.
"""

from __future__ import annotations

import itertools
import os
import shutil
import types
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .formats import Parts, Rounding, StateFormat, near_miss
from .noise import element_index, hash16, make_key, start_words
from .rules import UpdateRule
from .weights import Draws, Extras, WeightMode

#: Elements per call. The eager step's temporaries, some 30 fp32 tensors, then take 30 MB whatever the parameter; the
#: compiled step's few stay in the cache.
CHUNK = 1 << 18


@dataclass(frozen=True)
class Signature:
    """What one step function is made for.

    Attributes:
        rule: the update rule.
        formats: the format of each of the rule's slots, in order.
        mode: the weight mode.
        scalars: names of the entries of the scalars vector.
        weight_dtype: dtype of the stored weight.
        grad_dtype: dtype of the gradient.
        device: device type, such as "cpu".
        guarded: whether a 0-d bool tensor decides that the step is taken at all.
    """

    rule: UpdateRule
    formats: tuple[StateFormat, ...]
    mode: WeightMode
    scalars: tuple[str, ...]
    weight_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: str
    guarded: bool = False

    @property
    def block(self) -> int:
        """Length that flat tensors are a multiple of."""
        return max((fmt.block for fmt in self.formats), default=1)

    def in_rows(self, operands: Operands) -> tuple[Tensor, Tensor, tuple[Parts, ...], Extras]:
        """View flat operands as rows of one block, so that every loop over them has the same two bounds."""
        if self.block == 1:
            return operands.weight, operands.grad, operands.parts, operands.extras
        parts = tuple(
            tuple(part.view(-1, size) for part, size in zip(stored, fmt.part_sizes(self.block), strict=True))
            for fmt, stored in zip(self.formats, operands.parts, strict=True)
        )
        weight, grad = operands.weight.view(-1, self.block), operands.grad.view(-1, self.block)
        return weight, grad, parts, tuple(extra.view(-1, self.block) for extra in operands.extras)

    def __str__(self) -> str:
        formats = ",".join(fmt.spec for fmt in self.formats)
        dtypes = f"{self.weight_dtype},{self.grad_dtype}".replace("torch.", "")
        return f"{self.rule.name}[{formats}] {self.mode.spec} {dtypes} {self.device}{' guarded' * self.guarded}"


@dataclass(frozen=True)
class Operands:
    """The flat tensors of one parameter, or of a span of it; all but `grad` are updated in place.

    Attributes:
        weight: (n,) of the signature's weight dtype.
        grad: (n,) of its gradient dtype.
        parts: the stored parts of each slot, for n elements or up to a whole last block.
        extras: the weight mode's extra tensors, (n,) each.
    """

    weight: Tensor
    grad: Tensor
    parts: tuple[Parts, ...]
    extras: Extras

    def tensors(self) -> list[Tensor]:
        """All tensors in a fixed order."""
        return [self.weight, self.grad, *(part for stored in self.parts for part in stored), *self.extras]


@dataclass(frozen=True)
class Timing:
    """What is new at each step.

    Attributes:
        scalars, clock: from `hyper.Moment.on`.
        proceed: 0-d bool tensor, False to leave everything as it is; None where the signature is not guarded.
    """

    scalars: Tensor
    clock: Tensor
    proceed: Tensor | None = None


class NoiseKeys:
    """Keys of one parameter's noise.

    Args:
        seed: the optimizer's seed.
        parameter: the parameter's place in the optimizer.
        offset: global index of its first local element.
    """

    def __init__(self, seed: int, parameter: int, offset: int = 0) -> None:
        self._identity = seed, parameter
        self._offset = offset
        self._cache: dict[tuple[int, Signature], Tensor] = {}

    def at(self, start: int, sig: Signature, device: torch.device) -> Tensor:
        """Return int32 [counter of element `start`, then two words per purpose], as `reference_step` reads them."""
        if (start, sig) not in self._cache:
            words = [start_words(self._offset + start)[0]]
            for purpose in ("weight", "view", *sig.rule.slots):
                words += self._key(purpose, start)
            self._cache[start, sig] = torch.tensor(words, dtype=torch.int32, device=device)
        return self._cache[start, sig]

    def _key(self, purpose: str, start: int) -> tuple[int, int]:
        high = start_words(self._offset + start)[1]
        return make_key(*self._identity, zlib.crc32(purpose.encode()), high)

    def view_draw(self, param: Tensor) -> Tensor:
        """Return the fixed draws that dithered views use, in the shape of `param`."""
        low = start_words(self._offset)[0]
        index = element_index(low, param.numel(), param.device).view(param.shape)
        return hash16(index, self._key("view", 0))


def reference_step(
    sig: Signature,
    weight: Tensor,
    grad: Tensor,
    parts: tuple[Parts, ...],
    extras: Extras,
    scalars: Tensor,
    clock: Tensor,
    keys: Tensor,
    proceed: Tensor | None,
) -> None:
    """Take one step in place: decode, apply the rule, encode, write. Every backend is held to this function."""
    h = dict(zip(sig.scalars, scalars.unbind(), strict=True))
    index = element_index(keys[0], weight.numel(), weight.device).view(weight.shape)

    def draw(purpose: int, rounding: Rounding) -> Tensor:
        key = keys[1 + 2 * purpose], keys[2 + 2 * purpose]
        if rounding == "independent":
            return hash16(index, (key[0], key[1] ^ clock[1]))
        return (hash16(index, key) + clock[0]) & 0xFFFF

    names = tuple(sig.rule.slots)
    slots = {name: fmt.decode(stored) for name, fmt, stored in zip(names, sig.formats, parts, strict=True)}
    value, slots = sig.rule.update(sig.mode.read(weight, extras), grad.float() * h["grad_sign"], slots, h)

    draws = Draws(step=lambda: draw(0, "dither"), fixed=lambda: hash16(index, (keys[3], keys[4])))
    fresh_weight, fresh_extras = sig.mode.write(value, weight.dtype, draws)
    results = [(weight, fresh_weight), *zip(extras, fresh_extras, strict=True)]
    for purpose, (name, fmt, stored) in enumerate(zip(names, sig.formats, parts, strict=True), start=2):
        rounding = fmt.rounding if sig.rule.slots[name].average else "nearest"
        fresh = fmt.encode(slots[name], None if rounding == "nearest" else draw(purpose, rounding))
        results += zip(stored, fresh, strict=True)
    for old, new in results:
        old.copy_(new if proceed is None else torch.where(proceed, new, old))


Kernel = Callable[[Tensor, Tensor, tuple[Parts, ...], Extras, Tensor, Tensor, Tensor, "Tensor | None"], None]


class StepFn:
    """Steps parameters of one signature, span by span.

    A kernel is given at least two whole blocks: a ragged end is padded into scratch first. So no backend deals with
    ragged sizes, and no dimension of 0 or 1 forces a compiler to specialize.
    """

    def __init__(self, sig: Signature, backend: str, kernel: Kernel) -> None:
        self.sig = sig
        self.backend = backend
        self._kernel = kernel

    def __call__(self, operands: Operands, timing: Timing, keys: NoiseKeys) -> None:
        """Update one parameter in place."""
        numel, block = operands.weight.numel(), self.sig.block
        whole = numel // block * block
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, whole)
            if stop > start:
                self._run(operands, start, stop, timing, keys)
        if whole < numel:
            self._run(operands, whole, numel, timing, keys)

    def _run(self, operands: Operands, start: int, stop: int, timing: Timing, keys: NoiseKeys) -> None:
        span = self._slice(operands, start, stop)
        least = 2 * self.sig.block
        padded = span if stop - start >= least else self._pad(span, least)
        words = keys.at(start, self.sig, span.weight.device)
        self._kernel(*self.sig.in_rows(padded), timing.scalars, timing.clock, words, timing.proceed)
        if padded is not span:
            for old, new in zip(span.tensors(), padded.tensors(), strict=True):
                if old is not span.grad:
                    old.copy_(new[: old.numel()])

    def _slice(self, operands: Operands, start: int, stop: int) -> Operands:
        if start == 0 and stop == operands.weight.numel():
            return operands
        return Operands(
            operands.weight[start:stop],
            operands.grad[start:stop],
            tuple(
                tuple(part[a:b] for part, a, b in zip(stored, fmt.part_sizes(start), fmt.part_sizes(stop), strict=True))
                for fmt, stored in zip(self.sig.formats, operands.parts, strict=True)
            ),
            tuple(extra[start:stop] for extra in operands.extras),
        )

    def _pad(self, span: Operands, numel: int) -> Operands:
        def pad(tensor: Tensor, size: int) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, size - tensor.numel()))

        return Operands(
            pad(span.weight, numel),
            pad(span.grad, numel),
            tuple(
                tuple(pad(part, size) for part, size in zip(stored, fmt.part_sizes(numel), strict=True))
                for fmt, stored in zip(self.sig.formats, span.parts, strict=True)
            ),
            tuple(pad(extra, numel) for extra in span.extras),
        )


# Backends --------------------------------------------------------------------------------------------------------


def _refuse_triton(device: str) -> str | None:
    return "this release has no Triton kernels"


def _refuse_compile(device: str) -> str | None:
    if device != "cpu":
        return None
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"Inductor needs a C++ compiler and {compiler!r} was not found"


def _own_code(sig: Signature) -> Kernel:
    """Return a function whose code object is its own: Dynamo caches and limits compilations by code object."""

    def step(weight, grad, parts, extras, scalars, clock, keys, proceed):  # type: ignore[no-untyped-def]
        reference_step(sig, weight, grad, parts, extras, scalars, clock, keys, proceed)

    code = step.__code__.replace(co_name=f"{sig.rule.name}_step")
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def _example(sig: Signature, numel: int) -> tuple[Any, ...]:
    """Arguments of a kernel, all zero, for `numel` elements."""

    def zeros(size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=sig.device)

    parts = tuple(
        tuple(zeros(size, dtype) for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True))
        for fmt in sig.formats
    )
    extras = tuple(zeros(numel, dtype) for dtype in sig.mode.extras.values())
    return (
        *sig.in_rows(Operands(zeros(numel, sig.weight_dtype), zeros(numel, sig.grad_dtype), parts, extras)),
        zeros(len(sig.scalars), torch.float32),
        zeros(2, torch.int32),
        zeros(5 + 2 * len(parts), torch.int32),
        torch.ones((), dtype=torch.bool, device=sig.device) if sig.guarded else None,
    )


def _build_compiled(sig: Signature) -> StepFn:
    kernel = torch.compile(_own_code(sig), fullgraph=True)
    weight, grad, parts, extras, *rest = _example(sig, CHUNK)
    # Only the number of rows varies. `dynamic=True` would make variables of block lengths and code widths too.
    for tensor in (weight, grad, *itertools.chain(*parts), *extras):
        torch._dynamo.mark_dynamic(tensor, 0)
    # Compiled on an example of its own: Inductor decides on threads by the first size it sees, and a compiler that
    # fails must fail before it has a user's weights in hand.
    kernel(weight, grad, parts, extras, *rest)
    return StepFn(sig, "compile", kernel)


def _build_eager(sig: Signature) -> StepFn:
    return StepFn(sig, "eager", partial(reference_step, sig))


#: Name -> (reason why a device type cannot have it or None, builder), best first.
_BACKENDS: dict[str, tuple[Callable[[str], str | None], Callable[[Signature], StepFn] | None]] = {
    "triton": (_refuse_triton, None),
    "compile": (_refuse_compile, _build_compiled),
    "eager": (lambda device: None, _build_eager),
}
BACKENDS = ("auto", *_BACKENDS)


def check_backend(backend: str) -> None:
    """Raise ValueError, with the nearest allowed name, unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend: unknown {backend!r}; choose one of {', '.join(BACKENDS)}{near_miss(backend, BACKENDS)}"
        )


def choose_backend(backend: str, device: str) -> str:
    """Return the backend that serves a device type; `"auto"` takes the first that can.

    Raises:
        ValueError: unknown name, or a named backend cannot serve the device; the message says why.
    """
    check_backend(backend)
    if backend == "auto":
        return next(name for name, (refuse, _) in _BACKENDS.items() if refuse(device) is None)
    reason = _BACKENDS[backend][0](device)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot serve {device!r} parameters: {reason}")
    return backend


@cache
def step_fn(sig: Signature, backend: str) -> StepFn:
    """Return the step function of a signature, building it once per process.

    With `"auto"`, a compiler that turns out not to work is replaced by the eager step, with one warning.
    """
    chosen = choose_backend(backend, sig.device)
    if backend == "auto" and chosen == "eager":
        _warn_eager(str(_refuse_compile(sig.device)))
    if chosen == "compile" and backend == "auto":
        try:
            return _build_compiled(sig)
        except Exception as error:
            _warn_eager(f"compiling failed with {type(error).__name__}: {str(error).splitlines()[0]}")
            chosen = "eager"
    build = _BACKENDS[chosen][1]
    assert build is not None, chosen
    return build(sig)


@cache
def _warn_eager(reason: str) -> None:
    warnings.warn(f"lowbit_optim steps run in eager mode, slower: {reason}", RuntimeWarning, stacklevel=2)
