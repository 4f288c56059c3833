"""The step: what it is made for, what it works on, and the reference that every backend is held to."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .formats import Parts, Rounding, StateFormat
from .noise import WHOLE, Region, draws16, element_index, hash16, make_key
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
        strided: whether the weight is a shard with gaps between its elements, as `noise.Region` has them.
    """

    rule: UpdateRule
    formats: tuple[StateFormat, ...]
    mode: WeightMode
    scalars: tuple[str, ...]
    weight_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: str
    guarded: bool = False
    strided: bool = False

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

    def cut(self, operands: Operands, start: int, stop: int) -> Operands:
        """Return the span of a parameter from element `start`, which begins a block, to `stop`."""
        if start == 0 and stop == operands.weight.numel():
            return operands
        return Operands(
            operands.weight[start:stop],
            operands.grad[start:stop],
            tuple(
                tuple(part[a:b] for part, a, b in zip(stored, fmt.part_sizes(start), fmt.part_sizes(stop), strict=True))
                for fmt, stored in zip(self.formats, operands.parts, strict=True)
            ),
            tuple(extra[start:stop] for extra in operands.extras),
        )

    def example(self, numel: int) -> tuple[Any, ...]:
        """Return arguments of a kernel, all zero, for `numel` elements."""

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        parts = tuple(
            tuple(zeros(size, dtype) for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True))
            for fmt in self.formats
        )
        extras = tuple(zeros(numel, dtype) for dtype in self.mode.extras.values())
        return (
            *self.in_rows(Operands(zeros(numel, self.weight_dtype), zeros(numel, self.grad_dtype), parts, extras)),
            zeros(len(self.scalars), torch.float32),
            zeros(2, torch.int32),
            # Rows of one element: a length of 0 would be divided by.
            torch.ones(8 + 2 * len(parts), dtype=torch.int32, device=self.device),
            torch.ones((), dtype=torch.bool, device=self.device) if self.guarded else None,
        )

    def __str__(self) -> str:
        formats = ",".join(fmt.spec for fmt in self.formats)
        dtypes = f"{self.weight_dtype},{self.grad_dtype}".replace("torch.", "")
        flags = " guarded" * self.guarded + " strided" * self.strided
        return f"{self.rule.name}[{formats}] {self.mode.spec} {dtypes} {self.device}{flags}"


class Operands(NamedTuple):
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
        return [self.weight, self.grad, *itertools.chain.from_iterable(self.parts), *self.extras]


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
        region: where the local elements lie in the whole parameter.
    """

    _serials: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, seed: int, parameter: int, region: Region = WHOLE) -> None:
        self.region = region
        #: A number that no other keys of this process have.
        self.serial = next(self._serials)
        self._identity = seed, parameter
        self._cache: dict[tuple[int, Signature], Tensor] = {}

    def at(self, start: int, sig: Signature, device: torch.device) -> Tensor:
        """Return the int32 keys of a span that begins at local element `start`, as `reference_step` reads them.

        They are the `Region.words`, then two words for each purpose: the weight, its view, and the slots in order.
        """
        if (start, sig) not in self._cache:
            self._cache[start, sig] = torch.tensor(self.words(start, sig), dtype=torch.int32, device=device)
        return self._cache[start, sig]

    def words(self, start: int, sig: Signature) -> list[int]:
        """Return the keys of `at` as numbers."""
        words = list(self.region.words(start))
        high = self.region.span(start)[1]
        for purpose in ("weight", "view", *sig.rule.slots):
            words += make_key(*self._identity, zlib.crc32(purpose.encode()), high)
        return words

    def spans(self, numel: int, block: int, longest: int) -> Iterator[tuple[int, int]]:
        """Yield (first element, last + 1) of spans of whole blocks that one set of keys serves, then a ragged end."""
        start, whole = 0, numel // block * block
        while start < whole:
            # Keys change between two blocks wherever shards hold whole ones.
            same_keys = max(self.region.span(start)[0] // block, 1) * block
            stop = min(start + longest, start + same_keys, whole)
            yield start, stop
            start = stop
        if whole < numel:
            yield whole, numel

    def view_draw(self, param: Tensor) -> Tensor:
        """Return the fixed draws that dithered views use, in the shape of the local tensor `param`."""
        identity = (*self._identity, zlib.crc32(b"view"))
        return draws16(identity, self.region, param.numel(), param.device).view(param.shape)


#: A parameter's operands and its keys.
Item = tuple[Operands, NoiseKeys]


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
    index = element_index(keys, weight.numel(), weight.device, sig.strided).view(weight.shape)

    def key_of(purpose: int) -> tuple[Tensor, Tensor]:
        return keys[4 + 2 * purpose], keys[5 + 2 * purpose]

    def draw(purpose: int, rounding: Rounding) -> Tensor:
        key = key_of(purpose)
        if rounding == "independent":
            return hash16(index, (key[0], key[1] ^ clock[1]))
        return (hash16(index, key) + clock[0]) & 0xFFFF

    names = tuple(sig.rule.slots)
    slots = {name: fmt.decode(stored) for name, fmt, stored in zip(names, sig.formats, parts, strict=True)}
    value, slots = sig.rule.update(sig.mode.read(weight, extras), grad.float() * h["grad_sign"], slots, h)

    results: list[tuple[Tensor, Tensor]] = []
    for purpose, (name, fmt, stored) in enumerate(zip(names, sig.formats, parts, strict=True), start=2):
        slot = sig.rule.slots[name]
        rounding = fmt.rounding if slot.average else "nearest"
        fresh = fmt.encode(slots[name], None if rounding == "nearest" else draw(purpose, rounding))
        results += zip(stored, fresh, strict=True)
        if fmt.carried and slot.carry:
            value = value + fmt.carried * slot.carry(slots[name] - fmt.decode(fresh), slots, h)

    draws = Draws(step=lambda: draw(0, "dither"), fixed=lambda: hash16(index, key_of(1)))
    fresh_weight, fresh_extras = sig.mode.write(value, weight.dtype, draws)
    results += [(weight, fresh_weight), *zip(extras, fresh_extras, strict=True)]
    # A rule may return what it was given, which for fp32 is a stored tensor itself and must be read before any write.
    results = [(old, new.clone() if any(new is other for other, _ in results) else new) for old, new in results]
    for old, new in results:
        old.copy_(new if proceed is None else torch.where(proceed, new, old))


Kernel = Callable[[Tensor, Tensor, tuple[Parts, ...], Extras, Tensor, Tensor, Tensor, "Tensor | None"], None]


class StepFn:
    """Steps parameters of one signature, by one backend."""

    def __init__(self, sig: Signature, backend: str) -> None:
        self.sig = sig
        self.backend = backend

    def __call__(self, items: Sequence[Item], timing: Timing) -> None:
        """Update parameters in place."""
        raise NotImplementedError

    def advance(self, counters: list[Tensor]) -> int:
        """Add 1 to the step counters of parameters.

        Args:
            counters: 0-d fp32 tensors in CPU memory, unless somebody put others in their place.

        Returns:
            By how much that changed the tensors' version.
        """
        torch._foreach_add_(counters, 1)
        return 1


class KernelStep(StepFn):
    """Steps parameters span by span with a torch function.

    A kernel is given at least two whole blocks: a ragged end is padded into scratch first. So no backend deals with
    ragged sizes, and no dimension of 0 or 1 forces a compiler to specialize.
    """

    def __init__(self, sig: Signature, backend: str, kernel: Kernel) -> None:
        super().__init__(sig, backend)
        self._kernel = kernel

    def __call__(self, items: Sequence[Item], timing: Timing) -> None:
        """Update parameters in place."""
        for operands, keys in items:
            self._step(operands, timing, keys)

    def _step(self, operands: Operands, timing: Timing, keys: NoiseKeys) -> None:
        for start, stop in keys.spans(operands.weight.numel(), self.sig.block, CHUNK):
            self._run(operands, start, stop, timing, keys)

    def _run(self, operands: Operands, start: int, stop: int, timing: Timing, keys: NoiseKeys) -> None:
        span = self.sig.cut(operands, start, stop)
        least = 2 * self.sig.block
        padded = span if stop - start >= least else self._pad(span, least)
        words = keys.at(start, self.sig, span.weight.device)
        self._kernel(*self.sig.in_rows(padded), timing.scalars, timing.clock, words, timing.proceed)
        if padded is not span:
            for old, new in zip(span.tensors(), padded.tensors(), strict=True):
                if old is not span.grad:
                    old.copy_(new[: old.numel()])

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
