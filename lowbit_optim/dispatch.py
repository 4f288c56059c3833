"""Which backend serves a signature: C++ made from a trace, compiled by Inductor, or eager.

This is the one file that knows that Triton exists.
"""

from __future__ import annotations

import itertools
import shutil
import types
import warnings
from collections.abc import Callable
from functools import cache, partial

import torch

from .formats import near_miss
from .native import NativeStep, compiler
from .step import CHUNK, Kernel, KernelStep, Signature, StepFn, reference_step


def _refuse_triton(device: str) -> str | None:
    return "this release has no Triton kernels"


def _refuse_cpp(device: str) -> str | None:
    return _refuse_compile(device) if device == "cpu" else "the generated C++ runs on CPU"


def _refuse_compile(device: str) -> str | None:
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


#: Name -> (reason why a device type cannot have it or None, builder), best first.
_BACKENDS: dict[str, tuple[Callable[[str], str | None], Callable[[Signature], StepFn] | None]] = {
    "triton": (_refuse_triton, None),
    "cpp": (_refuse_cpp, NativeStep),
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

    With `"auto"`, a backend that cannot make this signature, or whose compiler turns out not to work, gives way to the
    next; where that leaves eager steps there is one warning.

    Raises:
        UnsupportedOp: `backend="cpp"` cannot make this signature; the message names the operation.
        BuildError: `backend="cpp"` finds no compiler that works.
    """
    if backend != "auto":
        return _build(choose_backend(backend, sig.device), sig)
    reason = _refuse_compile(sig.device)
    for name in _BACKENDS:
        if name == "eager":
            _warn_eager(str(reason))
        if _BACKENDS[name][0](sig.device) is None:
            try:
                return _build(name, sig)
            except Exception as error:
                if name == "eager":
                    raise
                reason = f"compiling failed with {type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError("the eager backend serves every device")


def _build(name: str, sig: Signature) -> StepFn:
    build = _BACKENDS[name][1]
    assert build is not None, name
    return build(sig)


@cache
def _warn_eager(reason: str) -> None:
    warnings.warn(f"lowbit_optim steps run in eager mode, slower: {reason}", RuntimeWarning, stacklevel=2)
