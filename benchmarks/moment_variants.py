"""Ways to keep Adam's moments that no format of the library is, for `format_study`.

Each takes both moments as a step leaves them and returns what would be read at the next one. `format_study` lets AdamW
run in fp32 and puts the moments through one of these after every step, which is what storing them does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from lowbit_optim.formats import FORMATS, RATIOS, StateFormat
from lowbit_optim.maps import Linear

Keep = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
#: One moment alone.
KeepOne = Callable[[Tensor, torch.Generator], Tensor]


def through(fmt: Any, **changes: Any) -> KeepOne:
    """Return what storing values in a format makes of them, with independent draws."""

    def keep(values: Tensor, generator: torch.Generator, scale: Tensor | None = None) -> Tensor:
        stored: StateFormat = replace(fmt, **changes)
        draw = torch.randint(1 << 16, values.shape, generator=generator, dtype=torch.int32).flatten()
        given = () if scale is None else (scale,)
        return stored.decode(stored.encode(values.flatten(), draw, *given)).view_as(values)

    return keep


_ratio, _second = through(RATIOS["int4"]), through(FORMATS["int4"][1])


def _as_ratio(keep_ratio: KeepOne, keep_second: KeepOne) -> Keep:
    """Keep the first moment as its ratio to the root of the second, as it is before that is rounded."""

    def keep(m: Tensor, v: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        kept = keep_second(v, generator)
        ratio = torch.where(v > 0, m / v.sqrt(), 0.0)
        return keep_ratio(ratio, generator) * kept.sqrt(), kept

    return keep


def _exact(values: Tensor, generator: torch.Generator) -> Tensor:
    return values


def _by_block(values: Tensor, block: int) -> Tensor:
    return values.reshape(-1, block)


def bf16(drawn: bool) -> Keep:
    """Both moments in bf16, drawn or to nearest. A step of the library takes plain bf16 for its own format."""
    draw = through(FORMATS["bf16"][0])

    def keep_one(values: Tensor, generator: torch.Generator) -> Tensor:
        return draw(values, generator) if drawn else values.bfloat16().float()

    return lambda m, v, generator: (keep_one(m, generator), keep_one(v, generator))


# Scales ---------------------------------------------------------------------------------------------------------------


def narrow_scales(block: int) -> Keep:
    """Scales of 8 bits: sixths of an octave below the tensor's largest value, rounded up, over 42 octaves."""

    def keep_one(fmt: Any) -> KeepOne:
        store = through(fmt, block=block, scale_dtype=torch.float32)

        def keep(values: Tensor, generator: torch.Generator) -> Tensor:
            largest = _by_block(values.abs(), block).amax(1, keepdim=True)
            top = largest.max()
            code = (6 * (top / largest).log2()).floor().clamp(0, 255)
            return store(values, generator, scale=top * torch.exp2(-code / 6))

        return keep

    return _as_ratio(keep_one(RATIOS["int4"]), keep_one(FORMATS["int4"][1]))


def one_scale(bound: float) -> Keep:
    """Ratios on a fixed grid from -bound to bound, so that only the second moment has scales; larger ones are cut."""
    store = through(RATIOS["int4"], scale_dtype=torch.float32)

    def keep(ratio: Tensor, generator: torch.Generator) -> Tensor:
        return store(ratio, generator, scale=torch.full((ratio.numel() // 32, 1), bound))

    return _as_ratio(keep, _second)


# Published maps -------------------------------------------------------------------------------------------------------


def _on_levels(levels: Tensor, block: int, drawn: bool) -> KeepOne:
    """Keep values at levels relative to their block's largest magnitude, drawn between two of them or the nearest."""

    def keep(values: Tensor, generator: torch.Generator) -> Tensor:
        rows = _by_block(values, block)
        scale = rows.abs().amax(1, keepdim=True)
        share = torch.where(scale > 0, rows / scale, 0.0).clamp(levels[0], levels[-1])
        above = torch.searchsorted(levels, share).clamp(1, len(levels) - 1)
        low, high = levels[above - 1], levels[above]
        chance = torch.rand(share.shape, generator=generator) if drawn else 0.5
        return (torch.where((share - low) / (high - low) > chance, high, low) * scale).view_as(values)

    return keep


def _normal_float() -> Tensor:
    """Levels of NF4 (arXiv 2305.14314, appendix E): quantiles of the normal distribution with an exact zero."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    positive = stats.norm.ppf([offset + (0.5 - offset) * k / 8 for k in range(8)])
    negative = stats.norm.ppf([offset + (0.5 - offset) * k / 7 for k in range(7)])
    levels = torch.tensor([*-negative, 0.0, *positive[::-1]], dtype=torch.float32)
    return levels / levels.max()


def _dynamic() -> Tensor:
    """Levels of the signed dynamic map of arXiv 2110.02861 with 4 bits, as 4-bit Adam (arXiv 2309.01507) has them."""
    magnitudes = [
        (0.1 + 0.9 * (k + 0.5) / 2**decade) * 10.0 ** (decade - 2) for decade in range(3) for k in range(2**decade)
    ]
    return torch.tensor(sorted([*magnitudes, *(-level for level in magnitudes), 0.0, 1.0]))


def lpmm() -> Keep:
    """4-bit Adam as torchao has it: the dynamic map, even levels without zero, nearest, blocks of 128."""
    first = _on_levels(_dynamic(), 128, drawn=False)
    second = _on_levels(torch.arange(1, 17) / 16, 128, drawn=False)
    return lambda m, v, generator: (first(m, generator), second(v, generator))


def normal_float(ratio: bool) -> Keep:
    """NF4 of the first moment or of its ratio, drawn; the second is exact."""
    store = _on_levels(_normal_float(), 32, drawn=True)
    return _as_ratio(store, _exact) if ratio else lambda m, v, generator: (store(m, generator), v)


def dynamic() -> Keep:
    """The 4-bit dynamic map of the first moment, drawn; the second is exact."""
    store = _on_levels(_dynamic(), 32, drawn=True)
    return lambda m, v, generator: (store(m, generator), v)


def logarithmic() -> Keep:
    """The second moment as in SOLO (arXiv 2505.00347): logarithmic levels from a block's tenth quantile to its top."""

    def store(v: Tensor, generator: torch.Generator) -> Tensor:
        rows = _by_block(v, 128).clamp_min(1e-38)
        top = rows.amax(1, keepdim=True)
        step = (rows.quantile(0.1, dim=1, keepdim=True) / top).log().clamp_max(-1e-3) / 15
        chance = torch.rand(rows.shape, generator=generator)
        code = ((rows / top).log() / step + chance).floor().clamp(0, 15)
        return (top * (code * step).exp()).view_as(v)

    return lambda m, v, generator: (m, store(v, generator))


# Fewer second moments than weights ------------------------------------------------------------------------------------


def _factored(v: Tensor, generator: torch.Generator) -> Tensor:
    """Means of rows times means of columns (Adafactor, arXiv 1804.04235)."""
    rows, columns = v.mean(1, keepdim=True), v.mean(0, keepdim=True)
    return rows * columns / rows.mean().clamp_min(1e-38)


def factored(levels: int) -> Keep:
    """Ratios at so many even levels each way, and a factored second moment."""
    return _as_ratio(through(RATIOS["int4"], map=Linear(levels)), _factored)


def averaged(count: int, stored: KeepOne = _exact) -> Keep:
    """4-bit ratios and one second moment for every `count` neighbours."""

    def keep(v: Tensor, generator: torch.Generator) -> Tensor:
        means = _by_block(v, count).mean(1)
        return stored(means, generator).repeat_interleave(count).view_as(v)

    return _as_ratio(_ratio, keep)
