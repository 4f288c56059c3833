"""Which backend serves a signature: Triton kernels, C++ made from a trace, a graph compiled by Inductor, or eager.

This is the one file that knows that Triton exists.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import shutil
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from . import rules
from .formats import _BY_SPEC, BlockFormat, StateFormat, near_miss
from .native import NativeStep, compiler, compiler_version
from .rules import UpdateRule
from .step import CHUNK, Item, Kernel, KernelStep, NoiseKeys, Operands, Signature, StepFn, Timing, reference_step
from .weights import WEIGHT_MODES, WeightMode

#: What a step is made of: the rule, the format of each slot, the weight mode.
Pieces = tuple[UpdateRule, tuple[StateFormat, ...], WeightMode]
#: Device types that Triton kernels are meant for; ROCm is "cuda" in torch.
_TRITON_DEVICES = ("cuda", "xpu")


def _kernels() -> Any:
    """The kernels, imported when a device asks for them: Triton takes a second to import."""
    return importlib.import_module("lowbit_optim_kernels")


def _refuse_triton(device: str, pieces: Pieces) -> str | None:
    for package in "triton", "lowbit_optim_kernels":
        if importlib.util.find_spec(package) is None:
            return f"the package {package!r} is not installed"
    version = importlib.import_module("triton").__version__
    if tuple(map(int, version.split(".")[:2])) < (3, 4):
        return f"the kernels need Triton 3.4 or newer, {version} is installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on CPU only Triton's interpreter can run, which TRITON_INTERPRET=1 turns on"
    if device not in (*_TRITON_DEVICES, "cpu"):
        return f"there are no Triton kernels for {device!r}"
    if device == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < (8, 0):
            return f"the Triton kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    lacking = _kernels().missing(*_device_keys(pieces), _carried(pieces))
    return f"no Triton device function for {lacking}" if lacking else None


def _device_keys(pieces: Pieces) -> tuple[Any, ...]:
    """What the kernels know the pieces by: the library's by name, a user's by the object itself."""
    rule, formats, mode = pieces
    blocks = [fmt for fmt in formats if isinstance(fmt, BlockFormat)]
    return (
        (rule.name if vars(rules).get(rule.name) is rule else rule, rule.name),
        [(fmt.spec if _BY_SPEC.get(fmt.spec) == fmt else fmt, fmt.spec) for fmt in blocks],
        (mode.spec if WEIGHT_MODES.get(mode.spec) == mode else mode, mode.spec),
    )


def _carried(pieces: Pieces) -> list[float]:
    """The share of what rounding takes from each slot that the weight is given."""
    rule, formats, _ = pieces
    return [fmt.carried if slot.carry else 0.0 for fmt, slot in zip(formats, rule.slots.values(), strict=True)]


def kernel_variant(sig: Signature) -> Any:
    """Return what the kernels' compiler must know of a signature whose pieces all have device functions."""
    kernels = _kernels()
    pieces = sig.rule, sig.formats, sig.mode
    (rule, _), blocks, (mode, _) = _device_keys(pieces)
    keys = iter(blocks)
    formats = []
    for fmt, slot, carried in zip(sig.formats, sig.rule.slots.values(), _carried(pieces), strict=True):
        rounding = fmt.rounding if slot.average else "nearest"
        if isinstance(fmt, BlockFormat):
            formats.append(kernels.block_format(next(keys)[0], fmt, rounding, carried))
        else:
            formats.append(kernels.plain_format(fmt.parts["values"], rounding))
    known = kernels.RULES[rule]
    assert sig.scalars == known.scalars, f"{sig}: the device function reads other scalars, {known.scalars}"
    dtypes = kernels.dtype_of(sig.weight_dtype), kernels.dtype_of(sig.grad_dtype)
    return kernels.Variant(known.function, known.carry, kernels.MODES[mode], tuple(formats), *dtypes, sig.strided)


class _TritonStep(StepFn):
    """Steps all parameters of a signature with one launch, or two where some are ragged or not aligned."""

    def __init__(self, sig: Signature) -> None:
        super().__init__(sig, "triton")
        kernels = _kernels()
        self._granule, self._longest = max(kernels.GRANULE, sig.block), kernels.LONGEST_SPAN
        self._launch = kernels.Launcher(kernel_variant(sig))
        # A compiler that fails must fail before it has a user's weights in hand.
        self._launch.compile(sig.guarded)

    def __call__(self, items: Sequence[Item], timing: Timing) -> None:
        """Update parameters in place."""
        self._launch(items, self._cut, timing.scalars, timing.clock, timing.proceed)

    def _cut(self, operands: Operands, keys: NoiseKeys) -> Iterator[tuple[int, Operands, list[int]]]:
        """Yield (first element, span, noise words), with ragged ends as spans of their own."""
        for start, stop in keys.spans(operands.weight.numel(), self.sig.block, self._longest):
            whole = start + (stop - start) // self._granule * self._granule
            for first, last in (start, whole), (whole, stop):
                if first < last:
                    yield first, self.sig.cut(operands, first, last), keys.words(first, self.sig)


def _refuse_cpp(device: str, pieces: Pieces) -> str | None:
    return _refuse_compile(device, pieces) if device == "cpu" else "the generated C++ runs on CPU"


def _refuse_compile(device: str, pieces: Pieces) -> str | None:
    if device != "cpu" or shutil.which(compiler()):
        return None
    return f"a C++ compiler is needed, and {compiler()!r} was not found"


def _own_code(sig: Signature) -> Kernel:
    """Return a function whose code object is its own: Dynamo caches and limits compilations by code object."""

    def step(weight, grad, parts, extras, scalars, clock, keys, proceed):  # type: ignore[no-untyped-def]
        reference_step(sig, weight, grad, parts, extras, scalars, clock, keys, proceed)

    code = step.__code__.replace(co_name=f"{sig.rule.name}_step")
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def _build_compiled(sig: Signature) -> StepFn:
    kernel = torch.compile(_own_code(sig), fullgraph=True)
    weight, grad, parts, extras, *rest = sig.example(CHUNK)
    # Only the number of rows varies. `dynamic=True` would make variables of block lengths and code widths too.
    for tensor in (weight, grad, *itertools.chain(*parts), *extras):
        torch._dynamo.mark_dynamic(tensor, 0)
    # Compiled on an example of its own: Inductor decides on threads by the first size it sees, and a compiler that
    # fails must fail before it has a user's weights in hand.
    kernel(weight, grad, parts, extras, *rest)
    return KernelStep(sig, "compile", kernel)


def _build_eager(sig: Signature) -> StepFn:
    return KernelStep(sig, "eager", partial(reference_step, sig))


#: Name -> (reason why a device type cannot have it for these pieces or None, builder), best first.
_BACKENDS: dict[str, tuple[Callable[[str, Pieces], str | None], Callable[[Signature], StepFn]]] = {
    "triton": (_refuse_triton, _TritonStep),
    "cpp": (_refuse_cpp, NativeStep),
    "compile": (_refuse_compile, _build_compiled),
    "eager": (lambda device, pieces: None, _build_eager),
}
BACKENDS = ("auto", *_BACKENDS)


def toolchain() -> dict[str, str]:
    """Return versions of what backends are built with, by name."""
    found = importlib.util.find_spec("triton")
    triton = "not installed" if found is None else str(importlib.import_module("triton").__version__)
    return {"C++ compiler": compiler_version(), "Triton": triton}


def check_backend(backend: str) -> None:
    """Raise ValueError, with the nearest allowed name, unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend: unknown {backend!r}; choose one of {', '.join(BACKENDS)}{near_miss(backend, BACKENDS)}"
        )


def choose_backend(backend: str, device: str, pieces: Pieces) -> tuple[str, str]:
    """Return (the backend that serves these pieces on a device type, why not the one meant for it or "").

    `"auto"` takes the first that can.

    Raises:
        ValueError: unknown name, or a named backend cannot serve the device or the pieces; the message says why.
    """
    check_backend(backend)
    if backend == "auto":
        return _choices(device, pieces)[0]
    reason = _BACKENDS[backend][0](device, pieces)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot serve {device!r} parameters: {reason}")
    return backend, ""


def _choices(device: str, pieces: Pieces) -> list[tuple[str, str]]:
    """(name, note) of the backends that `"auto"` may take, best first."""
    found, note = [], ""
    for name, (refuse, _) in _BACKENDS.items():
        if name == "triton" and device not in _TRITON_DEVICES:
            continue  # Triton's interpreter is for tests.
        reason = refuse(device, pieces)
        if reason is None:
            found.append((name, note))
        elif name == "triton":
            note = reason
    return found


@cache
def step_fn(sig: Signature, backend: str) -> StepFn:
    """Return the step function of a signature, building it once per process.

    With `"auto"`, a backend that cannot make this signature, or whose compiler turns out not to work, gives way to the
    next; there is one warning where that leaves a GPU without Triton, or eager steps.

    Raises:
        UnsupportedOp: `backend="cpp"` cannot make this signature; the message names the operation.
        BuildError: `backend="cpp"` finds no compiler that works.
    """
    pieces = sig.rule, sig.formats, sig.mode
    if backend != "auto":
        return _BACKENDS[choose_backend(backend, sig.device, pieces)[0]][1](sig)
    names = [name for name, _ in _choices(sig.device, pieces)]
    reason = str(_refuse_compile(sig.device, pieces))
    for name, following in itertools.pairwise(names):
        try:
            return _BACKENDS[name][1](sig)
        except Exception as error:
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            reason = f"building the {name} step failed with {message}"
            if name == "triton":
                _warn_slower(following, reason)
    _warn_slower("eager", reason)
    return _BACKENDS["eager"][1](sig)


@cache
def _warn_slower(backend: str, reason: str) -> None:
    warnings.warn(f"lowbit_optim steps run in {backend} mode, slower: {reason}", RuntimeWarning, stacklevel=2)
