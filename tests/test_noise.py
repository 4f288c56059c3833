"""The noise: uniform, uncorrelated wherever it must be, the same for shards as for the whole; rounding without bias."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit_optim import SGD, stochastic_round
from lowbit_optim import rules as update_rules
from lowbit_optim.dispatch import step_fn
from lowbit_optim.hyper import Moment
from lowbit_optim.noise import (
    GOLDEN16,
    Region,
    element_index,
    hash16,
    make_key,
    round_bits,
    stochastic_round_fp16,
)
from lowbit_optim.step import NoiseKeys, Operands, Signature, Timing

from .references import chi_square_z, correlation, lowbias32, neighbours, spacing
from .runs import bits, values

CPU = torch.device("cpu")
PURPOSES = ("weight", "view", "exp_avg", "exp_avg_sq")
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# All samples below are fixed by their seeds: a deviate beyond 4.5 is a fault, not bad luck.
LIMIT = 4.5


@dataclass(frozen=True)
class RecordingFormat:
    """A state format that stores the draws it is given."""

    rounding: Any
    name: str = "recorder"
    spec: str = "recorder"
    block: int = 1
    carried: float = 0.0

    @property
    def parts(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({"draws": torch.float32})

    def part_sizes(self, numel: int) -> tuple[int, ...]:
        return (numel,)

    def encode(self, values: Tensor, draw: Tensor | None) -> tuple[Tensor, ...]:
        assert draw is not None
        return (draw.float(),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return torch.zeros_like(parts[0])


@dataclass(frozen=True)
class RecordingMode:
    """A weight mode that stores the draws it is given."""

    spec: str = "recorder"

    @property
    def extras(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType({"view": torch.float32})

    def read(self, weight: Tensor, extras: tuple[Tensor, ...]) -> Tensor:
        return weight

    def write(self, value: Tensor, dtype: torch.dtype, draws: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return draws.step().float(), (draws.fixed().float(),)


def engine_draws(
    numel: int = 1 << 16,
    seed: int = 0,
    place: int = 0,
    step: int = 1,
    offset: int = 0,
    rounding: str = "independent",
    region: Region | None = None,
) -> dict[str, Tensor]:
    """What a step of AdamW draws for each of its roundings."""
    moment = Moment(update_rules.adamw, HYPER, step)
    fmt, fp32 = RecordingFormat(rounding), torch.float32
    sig: Any = Signature(update_rules.adamw, (fmt, fmt), RecordingMode(), moment.names, fp32, fp32, "cpu")  # type: ignore[arg-type]
    keys = NoiseKeys(seed, place, region or Region(offset))
    sig = replace(sig, strided=keys.region.strided)
    weight, grad, view, first, second = torch.zeros(5, numel)
    operands = Operands(weight, grad, ((first,), (second,)), (view,))
    step_fn(sig, "eager")([(operands, keys)], Timing(*moment.on(CPU)))
    return {name: drawn.int() for name, drawn in zip(PURPOSES, (weight, view, first, second), strict=True)}


def dependence(a: Tensor, b: Tensor) -> float:
    """How much one sample of 16-bit draws tells of another: 0 is nothing, 1 is all (Cramer's phi, 16 x 16 bins)."""
    counts = torch.bincount((a >> 12) * 16 + (b >> 12), minlength=256).double()
    expected = a.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    return max(chi_square - 255, 0.0) ** 0.5 / (a.numel() * 15) ** 0.5


# Hash ------------------------------------------------------------------------------------------------------------


def test_hash_equals_a_numpy_reference() -> None:
    # Host integers, wrapping int32 tensors and NumPy's unsigned ones agree; key words enter before either multiply.
    index = torch.randint(-(2**31), 2**31 - 1, (10_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index[:4] = torch.tensor([0, -1, 2**31 - 1, -(2**31)])
    plain = lowbias32(index.numpy().view(np.uint32)) >> np.uint32(16)
    assert np.array_equal(hash16(index, (0, 0)).numpy(), plain)
    low, high = make_key(7, 3)
    x = index.numpy().view(np.uint32) ^ np.uint32(low & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) ^ np.uint32(high & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    expected = x >> np.uint32(16)
    assert np.array_equal(hash16(index, (low, high)).numpy(), expected)
    words = torch.tensor([low, high], dtype=torch.int32)
    assert np.array_equal(hash16(index, (words[0], words[1])).numpy(), expected)


def test_keys_differ_for_all_words() -> None:
    seeds = [*range(64), -1, -2, 2**31, 2**32, 2**32 + 1, 2**63, -(2**40)]
    words = [(seed, place) for seed in seeds for place in range(256)] + [(place,) for place in range(256)]
    keys = {make_key(*word) for word in words}
    assert len(keys) == len(words)
    for side in range(2):
        # Each 32-bit half alone has about n^2 / 2^33 collisions.
        assert len({key[side] for key in keys}) > len(words) - 6
        assert all(-(2**31) <= key[side] < 2**31 for key in keys)


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("rounding", ["dither", "independent"])
def test_draws_are_uniform(purpose: str, rounding: str) -> None:
    draws = engine_draws(1 << 18, seed=5, place=2, step=3, rounding=rounding)[purpose]
    assert 0 <= draws.min() <= draws.max() < 1 << 16
    for used in (12, 8, 4):
        counts = torch.bincount(draws >> (16 - used), minlength=1 << used)
        assert abs(chi_square_z(counts, draws.numel() / (1 << used))) < LIMIT, used
    # Of the 65,536 single values, a two-round hash leaves up to 5 % more or less spread in the counts than chance.
    counts = torch.bincount(draws, minlength=1 << 16).double()
    assert counts.var().item() == pytest.approx(counts.mean().item(), rel=0.1)
    ones = torch.stack([(draws >> bit) & 1 for bit in range(16)]).double().mean(dim=1)
    assert ((ones - 0.5).abs() * 2 * draws.numel() ** 0.5 < LIMIT).all()


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 32, 256, 1024, 4096])
def test_draws_of_neighbouring_elements_are_uncorrelated(lag: int) -> None:
    # Chance alone gives a correlation of 0.002 here. At lags of powers of two some keys reach 0.008.
    for purpose, draws in engine_draws(1 << 18).items():
        assert abs(correlation(draws[:-lag], draws[lag:])) < 0.015, purpose
        assert dependence(draws[:-lag], draws[lag:]) < 0.025, purpose


# N7
@pytest.mark.parametrize(
    "other",
    [
        *({"place": 1}, {"place": 2}, {"place": 1 << 20}, {"seed": 1}, {"seed": -1}, {"seed": 1 << 32}),
        *({"step": 2}, {"step": 1001}, {"seed": 1, "place": 1}, {"offset": 1 << 18}, {"offset": 1 << 32}),
    ],
    ids=str,
)
def test_draws_of_other_keys_are_independent(other: dict[str, int]) -> None:
    ours, theirs = engine_draws(1 << 18), engine_draws(1 << 18, **other)
    for name, draws in ours.items():
        for other_name, others in theirs.items():
            # The weight's draws walk, and the view's stay, over steps: see the tests of the dither.
            if not (other.keys() == {"step"} and name == other_name and name in ("weight", "view")):
                assert dependence(draws, others) < 0.01, (name, other_name)


# N7
def test_draws_of_one_element_for_all_purposes_are_independent() -> None:
    draws = engine_draws(1 << 18, seed=9)
    for place, first in enumerate(PURPOSES):
        for second in PURPOSES[:place]:
            assert dependence(draws[first], draws[second]) < 0.01, (first, second)


def test_independent_draws_do_not_walk_over_steps() -> None:
    # The mean over time of independent uniform draws has variance 1 / (12 steps); correlation in time would change it.
    steps = 300
    drawn = torch.stack([engine_draws(4096, step=step)["exp_avg_sq"] for step in range(1, steps + 1)]) / 65536
    assert drawn.mean(dim=0).var().item() == pytest.approx(1 / (12 * steps), rel=0.1)
    for lag in (1, 2, 8):
        assert abs(correlation(drawn[:-lag], drawn[lag:])) * drawn.numel() ** 0.5 < LIMIT


def test_dither_is_equidistributed_over_steps() -> None:
    steps = 256
    drawn = torch.stack(
        [engine_draws(512, step=step, rounding="dither")["exp_avg"] for step in range(1000, 1000 + steps)]
    )
    assert torch.equal((drawn[1:] - drawn[:-1]) & 0xFFFF, torch.full_like(drawn[1:], GOLDEN16))
    # Discrepancy, against 1.36 / sqrt(256) = 0.085 that random draws reach in half of the cases.
    ordered = drawn.double().sort(dim=0).values / 65536
    ranks = torch.arange(steps, dtype=torch.float64)[:, None] / steps
    assert torch.maximum((ordered - ranks).abs(), (ordered - ranks - 1 / steps).abs()).max() < 0.02
    # It starts anywhere: at one step the draws of all elements are uniform, so each rounding alone has no bias.
    weight = [engine_draws(512, step=step)["weight"] for step in (1, 2)]
    assert torch.equal((weight[1] - weight[0]) & 0xFFFF, torch.full_like(weight[0], GOLDEN16))


def test_dithered_view_draws_stay_over_steps() -> None:
    first = engine_draws(4096, step=1)["view"]
    assert all(torch.equal(engine_draws(4096, step=step)["view"], first) for step in (2, 3, 1 << 20))


@pytest.mark.parametrize("rounding", ["dither", "independent"])
@pytest.mark.parametrize("offset", [1, 77, 4096, 2**31 - 100, 2**31 + 7, 2**32 - 100, 2**33 + 1], ids=hex)
def test_shards_draw_the_bits_of_the_whole(offset: int, rounding: str) -> None:
    # A shard that starts `cut` elements further; N21: counters beyond 2^31 and 2^32.
    cut = 150
    whole = engine_draws(1000, step=4, offset=offset, rounding=rounding)
    shard = engine_draws(1000 - cut, step=4, offset=offset + cut, rounding=rounding)
    for purpose in PURPOSES:
        assert torch.equal(whole[purpose][cut:], shard[purpose]), purpose


def test_chunks_draw_the_bits_of_the_whole() -> None:
    # The eager step walks in chunks of 2^18 elements.
    whole, tail = engine_draws((1 << 18) + 500), engine_draws(700, offset=(1 << 18) - 200)
    for purpose in PURPOSES:
        assert torch.equal(whole[purpose][(1 << 18) - 200 :], tail[purpose]), purpose


# N7
def test_equal_parameters_round_differently() -> None:
    params = [torch.nn.Parameter(torch.empty(1 << 14, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = SGD(params, lr=2.0**-8, weights="stochastic", backend="eager")
    masks = []
    for _ in range(2):
        for param in params:
            # From 1.0, half way to the next bf16 value.
            param.data.fill_(1.0)
            param.grad = -torch.ones_like(param)
        optimizer.step()
        masks.append([(param.detach() > 1).double() for param in params])
    for first, second in masks:
        assert first.mean().item() == pytest.approx(0.5, abs=0.02)
        assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.02)
        assert abs(correlation(first, second)) < 0.05
    for place in range(2):
        # Successive roundings of one element are not the same: the dither makes them oppose each other.
        assert -0.6 < correlation(masks[0][place], masks[1][place]) < 0.05


# stochastic_round ------------------------------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def _between(dtype: torch.dtype) -> Tensor:
    """fp32 values between neighbours of a 16-bit dtype: all binades, both signs, subnormals, many fractions."""
    tiny = -133 if dtype == torch.bfloat16 else -24
    exponents = [tiny + 1, tiny + 4, -14, -8, -1, 0, 1, 7, 14]
    base = torch.ldexp(torch.tensor([1.0, 1.25, 1.75]).repeat(len(exponents), 1), torch.tensor(exponents)[:, None])
    base = torch.cat([neighbours(base.flatten(), dtype)[0], torch.zeros(1, dtype=torch.float64)])
    fractions = torch.tensor([1 / 256, 0.1, 0.5, 0.75, 255 / 256], dtype=torch.float64)
    x = (base[:, None] + fractions * spacing(base, dtype)[:, None]).flatten().float()
    return torch.cat([x, -x])


@each_dtype
def test_stochastic_round_is_unbiased_for_each_value(dtype: torch.dtype) -> None:
    x = _between(dtype)
    draws = 8192
    rounded = stochastic_round(x[:, None].expand(-1, draws), seed=3, dtype=dtype)
    assert rounded.dtype == dtype
    low, high = neighbours(x, dtype)
    ups = rounded.double() == high[:, None]
    assert (ups | (rounded.double() == low[:, None])).all(), "only the two neighbours may come out"
    expected = (x.double() - low) / (high - low)
    z = (ups.double().mean(dim=1) - expected) / (expected * (1 - expected) / draws).sqrt()
    assert z.abs().max() < LIMIT
    # Nor are they closer to their means than independent draws: their squares sum to what chi-square says.
    assert abs((z**2).sum().item() - z.numel()) / (2 * z.numel()) ** 0.5 < LIMIT


@each_dtype
def test_rounding_is_exact_in_the_mean_over_all_draws(dtype: torch.dtype) -> None:
    x = _between(dtype)
    draws = torch.arange(1 << 16, dtype=torch.int32)
    round_one = stochastic_round_fp16 if dtype == torch.float16 else lambda x, draw: round_bits(x, 16, draw)
    low, high = neighbours(x, dtype)
    for value, below, above in zip(x, low, high, strict=True):
        mean = round_one(value.expand(1 << 16), draws).double().mean()
        # fp16 uses the upper 13 of 16 bits for its 13 dropped ones; below 2^-126 fp32 itself is coarse.
        assert abs(mean - value.double()) <= 2.0**-12 * (above - below), value


@each_dtype
def test_stochastic_round_keeps_what_the_dtype_holds(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    numbers = every[~every.isnan()]
    for seed in (0, 1, -5, 1 << 70):
        assert torch.equal(bits(stochastic_round(numbers.float(), seed, dtype=dtype)), bits(numbers))
    nan = torch.tensor([float("nan"), -float("nan")])
    assert stochastic_round(nan, 0, dtype=dtype).isnan().all()
    assert stochastic_round(every[every.isnan()].float(), 0, dtype=dtype).isnan().all()


@each_dtype
@pytest.mark.parametrize("start", [0, 2**31 - 500, 5 * 2**32 + 3, 2**32 - 500], ids=hex)
def test_stochastic_round_of_a_shard_is_part_of_the_whole(start: int, dtype: torch.dtype) -> None:
    x = values((40, 100), 0)
    whole = stochastic_round(x, 11, offset=start, dtype=dtype)
    shard = stochastic_round(x[7:], 11, offset=start + 700, dtype=dtype)
    assert torch.equal(whole[7:], shard)


def test_stochastic_round_takes_any_layout() -> None:
    x = values((40, 100), 0)
    assert torch.equal(stochastic_round(x.flatten(), 11), stochastic_round(x, 11).flatten())
    assert torch.equal(stochastic_round(x.t(), 11), stochastic_round(x.t().contiguous(), 11))


def test_stochastic_round_depends_on_seed_and_offset_alone() -> None:
    # Half way between neighbours, so that the draw alone decides.
    x = neighbours(values((1 << 16,), 1), torch.bfloat16)[0]
    x = (x + spacing(x, torch.bfloat16) / 2).float()
    before = torch.get_rng_state()
    first = stochastic_round(x, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(stochastic_round(x, 1), first)
    assert torch.equal(stochastic_round(x.double(), 1), first)
    up = (first.float() > x).double()
    for seed, offset in ((2, 0), (-1, 0), (1 + (1 << 32), 0), (1 + (1 << 64), 0), (1, 1), (1, 1 << 32)):
        other = (stochastic_round(x, seed, offset).float() > x).double()
        assert abs(correlation(up, other)) * x.numel() ** 0.5 < LIMIT, (seed, offset)


@each_dtype
def test_stochastic_round_never_makes_a_finite_value_infinite_below_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.full((1 << 14,), largest * (1 - 2.0**-12))
    assert stochastic_round(x, 0, dtype=dtype).isfinite().all()
    assert stochastic_round(-x, 0, dtype=dtype).isfinite().all()


def test_stochastic_round_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match=r"bfloat16 or torch\.float16"):
        stochastic_round(torch.ones(3), 0, dtype=torch.float32)


BOXES = [
    # shape, start and size of a shard: rows, columns, both, and experts split by rows, by columns and by both.
    ((12, 10), (3, 0), (4, 10)),
    ((12, 10), (0, 5), (12, 5)),
    ((12, 10), (4, 5), (3, 5)),
    ((12, 10), (0, 9), (12, 1)),
    ((12, 10), (5, 2), (1, 7)),
    ((4, 6, 10), (2, 0, 0), (2, 6, 10)),
    ((4, 6, 10), (0, 2, 0), (4, 3, 10)),
    ((4, 6, 10), (0, 0, 4), (4, 6, 3)),
    ((4, 6, 10), (1, 2, 4), (2, 3, 3)),
    ((4, 6, 10, 3), (1, 2, 4, 1), (2, 3, 3, 2)),
    ((50,), (13,), (20,)),
    ((), (), ()),
]


def box_indices(shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    whole = torch.arange(math.prod(shape)).view(shape)
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))].reshape(-1)


@pytest.mark.parametrize(("shape", "starts", "sizes"), BOXES, ids=str)
def test_region_knows_each_element_of_a_box(
    shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    region = Region.of_box(shape, starts, sizes)
    expected = box_indices(shape, starts, sizes)
    assert [region.index(place) for place in range(expected.numel())] == expected.tolist()
    for start in range(expected.numel()):
        count = min(region.span(start)[0], expected.numel() - start)
        assert torch.equal(
            element_index(region.words(start), count, CPU, region.strided).long(), expected[start : start + count]
        )


@pytest.mark.parametrize("rounding", ["dither", "independent"])
@pytest.mark.parametrize(("shape", "starts", "sizes"), BOXES, ids=str)
def test_boxes_draw_the_bits_of_the_whole(
    shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...], rounding: str
) -> None:
    whole = engine_draws(math.prod(shape), step=4, rounding=rounding)
    expected = box_indices(shape, starts, sizes)
    shard = engine_draws(expected.numel(), step=4, rounding=rounding, region=Region.of_box(shape, starts, sizes))
    for purpose in PURPOSES:
        assert torch.equal(whole[purpose][expected], shard[purpose]), purpose


@pytest.mark.parametrize(
    "box",
    [
        ((1 << 22, 1 << 12), (0, 512), (1 << 22, 1024)),  # rows on both sides of 2^32
        ((3, (1 << 32) + 64), (0, 32), (3, (1 << 32) - 9)),  # rows longer than 32-bit words can say
        ((1 << 20, 1 << 13), (7, 8191), (1 << 19, 1)),  # one column
    ],
    ids=str,
)
def test_region_is_exact_beyond_32_bits(box: tuple[tuple[int, ...], ...]) -> None:  # N21
    region, numel = Region.of_box(*box), math.prod(box[2])
    (_, columns), (row, column), (_, run) = box
    start, spans = 0, 0
    while start < numel and spans < 8:
        left, high = region.span(start)
        stop = min(start + left, numel)
        for first in (start, max(stop - 20, start)):
            words = region.words(start if first == start else first)
            index = element_index(words, min(20, stop - first), CPU, region.strided).long() % (1 << 32)
            places = range(first, min(first + 20, stop))
            expected = [(row + place // run) * columns + column + place % run for place in places]
            assert [value >> 32 for value in expected] == [high] * len(expected)
            assert index.tolist() == [value % (1 << 32) for value in expected]
        start, spans = stop, spans + 1
    assert spans > 1 or box[0][1] == 1 << 13
