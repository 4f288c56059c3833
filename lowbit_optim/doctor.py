"""A look at an installation: versions, the backend that each device gets, and a few real steps of every preset."""

from __future__ import annotations

import importlib.metadata
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .dispatch import toolchain
from .layout import PRESETS
from .presets import from_preset

#: Share of weights that may be other than the eager reference's: backends differ in the last bits of fp32 results, and
#: where a draw falls between two of these, a weight goes to the other neighbour.
MAY_DIFFER = 1e-3
#: By preset, how far the exact weights may be from those of torch's AdamW in fp32, as a share of the distance that
#: these have moved. Half as much again as three seeds showed at most.
BOUNDS: Mapping[str, float] = {
    "reference": 1e-5,
    "bf16": 0.20,
    "balanced": 0.02,
    "light": 0.20,
    "compact": 0.17,
    "minimal": 0.28,
}
_STEPS, _LR = 8, 1e-2
#: A matrix that is quantized, and a vector that is not.
_SHAPES = ((128, 128), (1000,))


@dataclass(frozen=True)
class Check:
    """A preset stepped on a device.

    Attributes:
        device: device type.
        preset: preset, with AdamW and bf16 weights.
        backend: the backend that "auto" takes.
        note: why not the one meant for the device, what it warned of, or how it failed.
        differ: share of weights that are not those of the eager reference on the same device.
        error: distance of the exact weights from those of torch's AdamW in fp32, over the distance that these moved.
        seconds: time of all steps, the compiler's included.
        passed: whether both are within their bounds.
    """

    device: str
    preset: str
    backend: str
    note: str
    differ: float
    error: float
    seconds: float
    passed: bool


def versions() -> dict[str, str]:
    """Return the versions of all that takes part in a step, or in exchanging checkpoints."""
    own = {"lowbit-optim": _version("lowbit-optim"), "Python": platform.python_version(), "torch": torch.__version__}
    peers = {name: _version(name) for name in ("torchao", "bitsandbytes")}
    return {**own, **toolchain(), **peers, "platform": f"{platform.system()} {platform.machine()}"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def devices() -> dict[str, str]:
    """Return the device types that can be used here, with the name of each."""
    found = {"cpu": platform.processor() or platform.machine()}
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator()).partition(":")[0]
        name = getattr(getattr(torch, kind), "get_device_name", lambda: kind)()
        found[kind] = str(name)
    return found


def self_test(device: str) -> Iterator[Check]:
    """Step every preset on a device and compare it with the eager reference and with torch's AdamW in fp32."""
    start = [_values(shape, place) for place, shape in enumerate(_SHAPES)]
    exact = [nn.Parameter(weight.float()) for weight in start]
    _run(torch.optim.AdamW(exact, lr=_LR), exact)
    moved = _norm([after.detach() - before.float() for after, before in zip(exact, start, strict=True)])
    for preset in PRESETS:
        yield _check(device, preset, start, exact, moved)


def _check(device: str, preset: str, start: Sequence[Tensor], exact: Sequence[Tensor], moved: float) -> Check:
    stepped, reference = ([nn.Parameter(weight.to(device, copy=True)) for weight in start] for _ in range(2))
    optimizer = from_preset(stepped, preset, lr=_LR)
    layout = optimizer.layout_for(stepped[0], optimizer.param_groups[0])
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _run(optimizer, stepped)
        seconds = time.perf_counter() - began
        _run(from_preset(reference, preset, lr=_LR, backend="eager"), reference)
        full = optimizer.fp32_state_dict(nn.ParameterList(stepped)).values()
    except Exception as problem:  # whatever it is, it is the finding
        note = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        seconds, nan = time.perf_counter() - began, float("nan")
        return Check(device, preset, layout.backend, note, nan, nan, seconds, False)
    notes = [layout.reason, *(str(warning.message) for warning in caught)]
    other = sum(int((left != right).sum()) for left, right in zip(stepped, reference, strict=True))
    differ = other / sum(param.numel() for param in stepped)
    error = _norm([value.cpu() - right.detach() for value, right in zip(full, exact, strict=True)]) / moved
    passed = differ <= MAY_DIFFER and error <= BOUNDS[preset]
    return Check(device, preset, layout.backend, "; ".join(filter(None, notes)), differ, error, seconds, passed)


def _values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal values in bf16, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    for step in range(_STEPS):
        for place, param in enumerate(params):
            param.grad = _values(tuple(param.shape), 100 * (step + 1) + place).to(param.device, param.dtype)
        optimizer.step()


def _norm(parts: Sequence[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())
