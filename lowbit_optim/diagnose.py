"""What the next step would lose to rounding: why a 16-bit run converges slowly, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import LowBitOptimizer
from .hyper import Moment
from .noise import float_bits, float_from_bits
from .sharding import local, local_grad
from .slots import absolute
from .state import decoded
from .step import CHUNK
from .tables import aligned

#: Share of lost updates from which on a weight mode that keeps them is advised.
_TOO_MANY = 0.05
#: Explicit significand bits of each dtype, and its smallest normal exponent: they give the unit in the last place.
_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


@dataclass(frozen=True)
class GroupReport:
    """One dtype of one parameter group.

    Attributes:
        group: the group's place.
        dtype: dtype of the weights.
        weights: their weight mode.
        numel: elements on this rank that the step would change, of the parameters that have gradients.
        update_in_ulps: median of |update| / ulp(weight) over the elements that would change.
        lost: share of those elements whose update nearest rounding would lose, from 0 to 1.
        advice: what to do about it.
    """

    group: int
    dtype: torch.dtype
    weights: str
    numel: int
    update_in_ulps: float
    lost: float
    advice: str


@dataclass(frozen=True)
class Report:
    """What `diagnose` found, a row for each group and dtype; printing it gives a table."""

    rows: tuple[GroupReport, ...]

    def __str__(self) -> str:
        table = [("group", "dtype", "weights", "elements", "|update|/ulp", "lost to nearest", "advice")]
        for row in self.rows:
            dtype, ulps = str(row.dtype).removeprefix("torch."), f"{row.update_in_ulps:.3g}"
            table.append((str(row.group), dtype, row.weights, f"{row.numel:,}", ulps, f"{row.lost:.1%}", row.advice))
        return aligned(table)


@torch.no_grad()
def diagnose(optimizer: LowBitOptimizer) -> Report:
    """Compare the step that `optimizer` would take with the spacing of its weights; nothing changes.

    Call it after a backward pass and before `step()`. An update below half a unit in the last place (ulp) of a 16-bit
    weight is rounded away by nearest rounding; this counts them, whatever the weight mode in use.

    Args:
        optimizer: an optimizer of this package whose parameters have gradients.

    Returns:
        A `Report`.

    Raises:
        TypeError: the optimizer is of another library.
        ValueError: no parameter has a gradient, or an option is not valid.
    """
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(f"diagnose: needs an optimizer of lowbit_optim, got {type(optimizer).__name__}")
    named = [named for named in optimizer.named_params() if named[1].grad is not None]
    if not named:
        raise ValueError("diagnose: no parameter has a gradient; call it after backward() and before step()")
    optimizer.check_params(named)
    places = {id(group): place for place, group in enumerate(optimizer.param_groups)}
    found: dict[tuple[int, torch.dtype, str], list[tuple[Tensor, Tensor]]] = {}
    for _, param, group in named:
        mode = optimizer.layout_for(param, group).mode.spec
        found.setdefault((places[id(group)], param.dtype, mode), []).append(_updates(optimizer, param, group))
    return Report(tuple(_row(*key, pieces) for key, pieces in found.items()))


def _updates(optimizer: LowBitOptimizer, param: Tensor, group: dict[str, object]) -> tuple[Tensor, Tensor]:
    """Return (|update| in ulps, whether nearest rounding loses it) of the elements that would change."""
    rule, mode, state = optimizer.rule_for(group), optimizer.layout_for(param, group).mode, optimizer.state.get(param)
    count = int(state["step"]) + 1 if state else 1
    moment = Moment(rule, group, count)
    weight, grad = local(param).detach().reshape(-1), local_grad(param).reshape(-1)
    h = dict(zip(moment.names, moment.on(weight.device)[0].unbind(), strict=True))
    stored = {name: local(state[name]) if state else torch.zeros(0) for name in rule.slots}
    slots = {name: decoded(slot).reshape(-1) for name, slot in absolute(rule, stored).items()}
    extras = tuple(local(state[name]).reshape(-1) for name in mode.extras) if state else ()
    in_ulps, lost = [], []
    for start in range(0, max(weight.numel(), 1), CHUNK):
        span = slice(start, start + CHUNK)
        seen = weight[span]
        exact = mode.read(seen, tuple(extra[span] for extra in extras)) if state else seen.float()
        old = {name: slot[span] if state else torch.zeros_like(exact) for name, slot in slots.items()}
        update = rule.update(exact, grad[span].float() * h["grad_sign"], old, h)[0] - exact
        moving = update != 0
        in_ulps.append((update.abs() / _ulp(seen))[moving])
        lost.append(((seen.float() + update).to(seen.dtype) == seen)[moving])
    return torch.cat(in_ulps), torch.cat(lost)


def _ulp(weight: Tensor) -> Tensor:
    """Return the distance between neighbouring values of the weight's dtype at each weight, in fp32."""
    tiny = torch.finfo(weight.dtype).smallest_normal
    exponent = float_bits(weight.float().abs().clamp_min(tiny)) & 0x7F800000
    return float_from_bits(exponent) * 2.0 ** -_MANTISSA[weight.dtype]


def _row(group: int, dtype: torch.dtype, weights: str, pieces: list[tuple[Tensor, Tensor]]) -> GroupReport:
    in_ulps, lost = (torch.cat(same) for same in zip(*pieces, strict=True))
    finite = in_ulps.isfinite()
    share = float(lost[finite].float().mean()) if finite.any() else 0.0
    median = float(in_ulps[finite].median()) if finite.any() else 0.0
    if not finite.all():
        advice = f"{int((~finite).sum()):,} updates are not finite: skip_nonfinite=True"
    elif not finite.numel():
        advice = "none: no weight would move"
    else:
        advice = _advise(dtype, weights, share)
    return GroupReport(group, dtype, weights, lost.numel(), median, share, advice)


def _advise(dtype: torch.dtype, weights: str, lost: float) -> str:
    if dtype == torch.float32:
        return "none: fp32 weights are exact"
    if lost < _TOO_MANY:
        return "none: nearest rounding would do" if weights == "nearest" else f"none: {weights} keeps them"
    if weights != "nearest":
        return f"none: {weights} keeps them"
    return 'weights="split8", or "stochastic" at no memory' if dtype == torch.bfloat16 else 'weights="stochastic"'
