"""Independent references in fp64 and NumPy, written from the papers and torch's documentation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

State = dict[str, Tensor]


@contextlib.contextmanager
def exact_roots() -> Iterator[None]:
    """Make eager square roots correctly rounded, as compiled ones are: they are off by an ulp in a fifth of cases.

    All other arithmetic of a step is exact in every backend, so their results are then the same to the bit.
    """

    def sqrt(x: Tensor) -> Tensor:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.sqrt(x.numpy()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "sqrt", sqrt)
        yield


# Update rules ----------------------------------------------------------------------------------------------------


def _adam(w: Tensor, g: Tensor, state: State, t: int, h: dict[str, Any], *, decoupled: bool) -> Tensor:
    """Adam (arXiv 1412.6980), AdamW (1711.05101) and their AMSGrad forms (1904.09237), as torch documents them."""
    beta1, beta2 = h.get("betas", (0.9, 0.999))
    lr, eps, decay = h["lr"], h.get("eps", 1e-8), h.get("weight_decay", 0.0)
    g = -g if h.get("maximize") else g
    w, g = (w * (1 - lr * decay), g) if decoupled else (w, g + decay * w)
    m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(w)) + (1 - beta1) * g
    v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(w)) + (1 - beta2) * g**2
    if h.get("amsgrad"):
        v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(w)), v)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    return w - lr * m_hat / (v_hat.sqrt() + eps)


def _lion(w: Tensor, g: Tensor, state: State, t: int, h: dict[str, Any]) -> Tensor:
    """Lion (arXiv 2302.06675), algorithm 2."""
    beta1, beta2 = h.get("betas", (0.9, 0.99))
    g = -g if h.get("maximize") else g
    m = state.get("exp_avg", torch.zeros_like(w))
    direction = torch.sign(beta1 * m + (1 - beta1) * g)
    state["exp_avg"] = beta2 * m + (1 - beta2) * g
    return w - h["lr"] * (direction + h.get("weight_decay", 0.0) * w)


def _sgd(w: Tensor, g: Tensor, state: State, t: int, h: dict[str, Any]) -> Tensor:
    """SGD as in the documentation of torch.optim.SGD: the first step takes the gradient undampened."""
    g = -g if h.get("maximize") else g
    g = g + h.get("weight_decay", 0.0) * w
    momentum = h.get("momentum", 0.0)
    if momentum:
        b = momentum * state["momentum_buffer"] + (1 - h.get("dampening", 0.0)) * g if t > 1 else g
        state["momentum_buffer"] = b
        g = g + momentum * b if h.get("nesterov") else b
    return w - h["lr"] * g


def run_rule(rule: str, weight: Tensor, grads: Iterable[Tensor], **hyper: Any) -> tuple[Tensor, State]:
    """Run a rule of `cases.RULES`, named up to its first dash, in fp64; return the weight and the state."""
    family = rule.split("-")[0]
    w, state = weight.double(), State()
    for t, grad in enumerate(grads, start=1):
        g = grad.double()
        if family in ("adam", "adamw"):
            w = _adam(w, g, state, t, hyper, decoupled=family == "adamw")
        else:
            w = {"lion": _lion, "sgd": _sgd}[family](w, g, state, t, hyper)
    return w, state


# Levels of the formats -------------------------------------------------------------------------------------------


def dynamic_map(signed: bool) -> Tensor:
    """The 8-bit dynamic map of Dettmers et al. (arXiv 2110.02861), sorted: mid-points of even grids on each decade."""
    values = [0.0, 1.0]
    for i in range(7):
        grid = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        magnitudes = (grid[:-1] + grid[1:]) / 2 * 10.0 ** (i - 6)
        values += magnitudes.tolist()
        if signed:
            values += (-magnitudes).tolist()
    return torch.tensor(sorted(values), dtype=torch.float64)


def levels(name: str, signed: bool, ratio: bool = False) -> Tensor:
    """Magnitudes that a block format's codes stand for, as shares of the scale, rising."""
    whole = torch.arange(257, dtype=torch.float64)
    if name == "int8":
        return (whole[:128] / 127) ** 4 if signed else (whole[1:] / 256) ** 8
    if name == "fp8":
        e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / 448
        return e4m3 if signed else e4m3[1:] ** 2
    if name == "int4":
        if ratio:
            return whole[:8] / 7
        return torch.cat([whole[:1], 2.0 ** (whole[1:8] - 7)]) if signed else (whole[1:17] / 16) ** 4
    assert name == "int8-dynamic", f"no reference for {name!r}: write one"
    table = dynamic_map(signed)
    return table[table >= 0]


def drawn_root(name: str, signed: bool, ratio: bool = False) -> int:
    """The root of values in which the draw between two levels has no bias: 1 where it is in the values themselves."""
    return {("int8", False): 8, ("int4", False): 4}.get((name, signed), 1)


# Rounding --------------------------------------------------------------------------------------------------------

#: dtype -> (mantissa bits, exponent of the smallest normal number)
_GRIDS = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbouring values of a 16-bit dtype around finite `x` (one ulp), in fp64."""
    bits, smallest = _GRIDS[dtype]
    exponent = torch.frexp(x.double()).exponent - 1
    exponent = torch.where(x == 0, smallest, exponent).clamp_min(smallest)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - bits)


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of a 16-bit dtype at or below and at or above finite `x`, in fp64."""
    ulp = spacing(x, dtype)
    return (x.double() / ulp).floor() * ulp, (x.double() / ulp).ceil() * ulp


# Noise -----------------------------------------------------------------------------------------------------------


def lowbias32(x: np.ndarray) -> np.ndarray:
    """The 32-bit finalizer of C. Wellons' Hash Function Prospector."""
    x = x.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson correlation of two samples."""
    return torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1].item()


def chi_square_z(counts: Tensor, expected: Tensor | float) -> float:
    """Chi-square statistic of counts as a standard normal deviate; large bins count assumed."""
    freedom = counts.numel() - 1
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / (2 * freedom) ** 0.5
