"""State formats against maps built from the papers: levels, error bounds, rounding, and odd blocks."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from lowbit_optim.formats import BlockFormat, FloatFormat, get_format, parse_spec
from lowbit_optim.hyper import Moment
from lowbit_optim.noise import hash16, make_key
from lowbit_optim.rules import sgd

from .cases import FORMAT_NAMES
from .references import dynamic_map, drawn_root, levels, neighbours
from .runs import values

ALL = list(dict.fromkeys([get_format(*kind) for kind in itertools.product(FORMAT_NAMES, (True, False), (True, False))]))
BLOCKS = [fmt for fmt in ALL if isinstance(fmt, BlockFormat)]
each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.spec)
each_block_format = pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.spec)

#: Spec -> number of distinct values. Sign-magnitude codes have two zeros, e4m3 also codes that are not numbers.
CARDINALITY = {
    "fp8/b32/signed": 253,
    "fp8/b32/unsigned": 126,
    "int8/b32/signed": 255,
    "int8/b32/unsigned": 256,
    "int4/b32/signed": 15,
    "int4/b32/unsigned": 16,
    "int4/b32/ratio": 15,
    "int8-dynamic/b256/signed": 256,
    "int8-dynamic/b256/unsigned": 256,
}

#: Spec -> CRC-32 of the fp32 values of all codes at scale 1. Stored checkpoints depend on them: never edit a line.
CODE_MAPS = {
    "fp8/b32/signed": "8d9270a9",
    "fp8/b32/unsigned": "e2d27806",
    "int8/b32/signed": "7b427a91",
    "int8/b32/unsigned": "ad8c4240",
    "int4/b32/signed": "d88504c6",
    "int4/b32/unsigned": "8f94f5f7",
    "int4/b32/ratio": "ffdcc3c5",
    "int8-dynamic/b256/signed": "770895b1",
    "int8-dynamic/b256/unsigned": "da38a353",
}

NAN, INF = float("nan"), float("inf")


def draws(numel: int, seed: int = 0) -> Tensor:
    return hash16(torch.arange(numel, dtype=torch.int32), make_key(seed))


def round_trip(fmt: Any, x: Tensor, draw: Tensor | None = None) -> Tensor:
    return fmt.decode(fmt.encode(x, draw))


def for_sign(fmt: Any, x: Tensor) -> Tensor:
    """Values of the sign that a block format stores."""
    return x if getattr(fmt, "signed", True) else x.abs()


def wild(fmt: Any, blocks: int = 64, seed: int = 0) -> Tensor:
    """Blocks of values whose magnitudes span many octaves, within a block and from block to block."""
    size = max(fmt.block, 32)
    spread = torch.exp(3 * values((blocks, 1), seed + 1).abs() * values((blocks, size), seed + 2))
    return for_sign(fmt, (values((blocks, size), seed) * spread * 10 ** (5 * values((blocks, 1), seed + 3))).flatten())


def all_codes(fmt: BlockFormat) -> Tensor:
    """The values of all codes at scale 1, in order of the codes; 4-bit ones are the low nibbles."""
    count = 1 << fmt.bits
    width = fmt.part_sizes(fmt.block)[0]
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, width).contiguous().flatten()
    return fmt.decode((codes, torch.ones(count, dtype=fmt.scale_dtype))).view(count, fmt.block)[:, 0]


def signed_levels(fmt: BlockFormat) -> Tensor:
    """All reference levels of a format, sorted."""
    if fmt.name == "int8-dynamic":
        return dynamic_map(fmt.signed)
    magnitudes = levels(fmt.name, fmt.signed, fmt.ratio)
    return torch.cat([-magnitudes, magnitudes]).unique() if fmt.signed else magnitudes


def drawn(fmt: BlockFormat, x: Tensor) -> Tensor:
    """Non-negative values on the scale on which the draw between two levels has no bias."""
    return x.double() ** (1 / drawn_root(fmt.name, fmt.signed, fmt.ratio))


def drawn_gaps(fmt: BlockFormat, share: Tensor) -> Tensor:
    """Distance on that scale between the reference levels around each share; below the lowest, that level."""
    return _gaps(drawn(fmt, levels(fmt.name, fmt.signed, fmt.ratio)), drawn(fmt, share))


def gaps(fmt: BlockFormat, share: Tensor) -> Tensor:
    """Distance between the reference levels around each share of the scale; below the lowest, that level."""
    return _gaps(levels(fmt.name, fmt.signed, fmt.ratio), share)


def _gaps(table: Tensor, share: Tensor) -> Tensor:
    place = torch.searchsorted(table, share.double().clamp_max(1.0), right=True).clamp(1, len(table) - 1)
    gap = table[place] - table[place - 1]
    return torch.where(share < table[0], table[0], gap)


# Specs and parts -------------------------------------------------------------------------------------------------


@each_format
def test_spec_names_the_format(fmt: Any) -> None:
    assert parse_spec(fmt.spec) is fmt
    assert get_format(fmt.name, getattr(fmt, "signed", True), fmt.ratio) is fmt
    assert [other.spec for other in BLOCKS].count(fmt.spec) == isinstance(fmt, BlockFormat)


@each_format
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 256, 1000])
def test_part_sizes_are_those_of_whole_blocks(fmt: Any, numel: int) -> None:
    sizes = fmt.part_sizes(numel)
    blocks = -(-numel // fmt.block)
    padded = blocks * fmt.block
    parts = fmt.encode(torch.ones(padded), None)
    if isinstance(fmt, FloatFormat):
        assert sizes == (numel,)
    else:
        assert sizes == (padded * fmt.bits // 8, blocks)
    assert tuple(part.numel() for part in parts) == sizes
    assert {name: part.dtype for name, part in zip(fmt.parts, parts, strict=True)} == dict(fmt.parts)
    assert torch.equal(fmt.decode(parts), torch.ones(padded))


@each_format
def test_rows_of_blocks_are_coded_like_flat_values(fmt: Any) -> None:
    x = wild(fmt)
    draw = draws(x.numel())
    rows = x.view(-1, max(fmt.block, 32))
    flat = fmt.encode(x, draw)
    in_rows = fmt.encode(rows, draw.view(rows.shape))
    assert all(torch.equal(a, b.flatten()) for a, b in zip(flat, in_rows, strict=True))
    assert torch.equal(fmt.decode(in_rows), fmt.decode(flat).view(rows.shape))


# Maps ------------------------------------------------------------------------------------------------------------


# N10
@each_block_format
def test_codes_are_the_reference_levels(fmt: BlockFormat) -> None:
    expected = signed_levels(fmt)
    assert len(expected) == CARDINALITY[fmt.spec]
    table = all_codes(fmt)
    # e4m3 has no number for its last code of each sign, which `encode` never returns.
    found = table[table.abs() <= 1].unique()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert (table == 1).sum() == 1
    assert (found == 0).any() == (fmt.signed or fmt.keep_positive)
    if fmt.center is None:
        rising = table[: fmt.map.last + 1]
        assert (rising.diff() > 0).all()
        if fmt.signed:
            sign_bit = 1 << (fmt.bits - 1)
            assert torch.equal(table[sign_bit : sign_bit + len(rising)], -rising)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_nibbles_are_the_halves_of_a_block(signed: bool) -> None:
    # The layout of stored checkpoints: byte i holds element i low and element i + 16 high, the sign in bit 3.
    fmt = get_format("int4", signed)
    magnitudes = levels("int4", signed)
    code = torch.arange(32) % len(magnitudes)
    negative = torch.arange(32) % 3 == 0 if signed else torch.zeros(32, dtype=torch.bool)
    x = torch.where(negative, -magnitudes[code], magnitudes[code]).float()
    nibble = code + 8 * (negative & (code > 0))
    assert torch.equal(fmt.encode(x, None)[0].long(), nibble[:16] + 16 * nibble[16:])


# N22
@each_block_format
def test_second_moments_cannot_become_zero(fmt: BlockFormat) -> None:
    if fmt.signed:
        assert (levels(fmt.name, True)[:1] == 0).all()
        return
    x = torch.full((fmt.block,), 1e-30)
    x[0] = 1.0
    for draw in (None, torch.zeros(fmt.block, dtype=torch.int32), torch.full((fmt.block,), 65535, dtype=torch.int32)):
        assert (round_trip(fmt, x, draw) > 0).all()


# N10
def test_dynamic_map_is_the_published_one() -> None:
    for signed in (True, False):
        published = dynamic_map(signed)
        assert len(published.unique()) == 256
        torch.testing.assert_close(all_codes(get_format("int8-dynamic", signed)).double(), published, rtol=1e-6, atol=0)
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    # What the paper's library has, to the digits printed of it.
    assert signed[signed > 0].min().item() == pytest.approx(5.5e-7)
    assert signed.min().item() == pytest.approx(-0.99297, abs=1e-5)
    assert unsigned[1].item() == pytest.approx(3.25e-7)
    assert unsigned[0] == 0
    assert unsigned[-1] == signed[-1] == 1


# N10
@each_block_format
def test_code_map_is_frozen(fmt: BlockFormat) -> None:
    assert f"{zlib.crc32(all_codes(fmt).numpy().tobytes()):08x}" == CODE_MAPS[fmt.spec]


# N10
@each_block_format
@pytest.mark.parametrize("scale", [1.0, 2.0**-80, 1.5 * 2.0**100, 0.75])
def test_each_code_comes_back(fmt: BlockFormat, scale: float) -> None:
    table = all_codes(fmt)
    table = table[table.abs() <= 1]
    blocks = torch.zeros(len(table), fmt.block)
    blocks[:, 0], blocks[:, 1] = scale, table * scale
    for draw in (None, draws(blocks.numel())):
        decoded = round_trip(fmt, blocks.flatten(), draw).view(blocks.shape)[:, 1]
        assert torch.equal(decoded, table * scale)


# Blocks that are not ordinary ------------------------------------------------------------------------------------


# N14
@each_format
def test_zeros_stay_zero(fmt: Any) -> None:
    size = 4 * fmt.block
    for draw in (None, draws(size), torch.full((size,), 65535, dtype=torch.int32)):
        for zero in (0.0, -0.0):
            parts = fmt.encode(torch.full((size,), zero), draw)
            decoded = fmt.decode(parts)
            assert (decoded == 0).all()
            assert all((part == 0).all() for part in parts[1:]), "the scale of a zero block is zero"


# N14
@each_block_format
@pytest.mark.parametrize("value", [1.0, -1.0, 1e-40, 2.0**-149, 3e38, 1e-30], ids=str)
def test_a_single_value_leaves_its_neighbours_alone(fmt: BlockFormat, value: float) -> None:
    lowest = float(levels(fmt.name, fmt.signed, fmt.ratio)[0])
    for place in (0, 7, fmt.block - 1):
        x = for_sign(fmt, torch.zeros(3 * fmt.block).index_fill(0, torch.tensor(fmt.block + place), value))
        decoded = round_trip(fmt, x, draws(x.numel()))
        alone = decoded[fmt.block + place].clone()
        decoded[fmt.block + place] = 0
        if fmt.signed or fmt.keep_positive:
            assert (decoded == 0).all()
        else:
            assert (decoded <= lowest * abs(value) * 1.01 + 2 * 2.0**-133).all()
        # bf16 scales are rounded up by 2^-7 at most, and by 2^-133 below 2^-126; the value then by one gap.
        gap = float(gaps(fmt, torch.tensor([0.999]))[0])
        assert alone.item() == pytest.approx(float(x[fmt.block + place]), rel=gap + 2.0**-7, abs=2.0**-133)


# N14
@each_block_format
def test_subnormal_blocks_stay_finite_and_in_range(fmt: BlockFormat) -> None:
    size = 64 * fmt.block
    x = for_sign(fmt, values((size,), 0) * 1e-40)
    x[: fmt.block], x[fmt.block : 2 * fmt.block] = 1e-40, 2.0**-149
    decoded = round_trip(fmt, x, draws(size))
    largest = x.view(-1, fmt.block).abs().amax(dim=1, keepdim=True).expand(-1, fmt.block).flatten()
    assert (decoded.abs() <= largest.double() + 2.0**-133).all()
    assert not fmt.signed or (decoded * x >= 0).all()
    assert (decoded[: fmt.block] > 0).any()


# N15
@each_format
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_a_bad_value_harms_no_neighbour(fmt: Any, bad: float) -> None:
    x = wild(fmt)
    place = x.numel() // 2 + 5
    clean = x.clone()
    clean[place] = 0
    bad = bad if getattr(fmt, "signed", True) else abs(bad)
    x[place] = bad
    for draw in (None, draws(x.numel())):
        found, expected = round_trip(fmt, x, draw), round_trip(fmt, clean, draw)
        if isinstance(fmt, BlockFormat):
            assert torch.equal(found, expected)
            assert found.isfinite().all()
        else:
            assert torch.equal(
                torch.cat([found[:place], found[place + 1 :]]), torch.cat([expected[:place], expected[place + 1 :]])
            )
            assert found[place].isnan() if bad != bad else found[place] == bad


# N15
@each_block_format
def test_a_block_of_bad_values_stays_alone(fmt: BlockFormat) -> None:
    x = wild(fmt)
    decoded = round_trip(fmt, x)
    x[: fmt.block] = torch.tensor([NAN, INF, -INF, NAN]).repeat(fmt.block // 4)
    found = round_trip(fmt, x)
    assert (found[: fmt.block] == 0).all()
    assert torch.equal(found[fmt.block :], decoded[fmt.block :])


# Error bounds ----------------------------------------------------------------------------------------------------


@each_block_format
def test_scale_is_the_largest_magnitude_rounded_up(fmt: BlockFormat) -> None:
    x = wild(fmt, 256)
    scale = fmt.encode(x, None)[1].double()
    largest = x.view(-1, fmt.block).abs().amax(dim=1)
    expected = largest.double() if fmt.scale_dtype == torch.float32 else neighbours(largest, torch.bfloat16)[1]
    assert torch.equal(scale, expected)


@each_format
@pytest.mark.parametrize("how", ["nearest", "stochastic"])
def test_error_is_bounded_by_the_gap_of_levels(fmt: Any, how: str) -> None:
    x = wild(fmt, 256)
    draw = None if how == "nearest" else draws(x.numel())
    parts = fmt.encode(x, draw)
    decoded = fmt.decode(parts).double()
    error = (decoded - x.double()).abs()
    share_of_gap = 0.5 if how == "nearest" else 1.0
    if isinstance(fmt, FloatFormat):
        low, high = neighbours(x, torch.bfloat16)
        bound = (high - low) * share_of_gap if fmt.name == "bf16" else torch.zeros_like(low)
        assert (error <= bound).all()
        return
    scale = parts[1].double().view(-1, 1).expand(-1, fmt.block).flatten()
    share = x.double().abs() / scale
    gap = drawn_gaps(fmt, share)
    error = (drawn(fmt, decoded.abs() / scale) - drawn(fmt, share)).abs()
    lowest = float(levels(fmt.name, fmt.signed, fmt.ratio)[int(fmt.keep_positive)])
    # Below the lowest level of a second moment there is nothing, and its error is that level itself.
    below = (share < lowest) & (not fmt.signed)
    bound = torch.where(below, drawn(fmt, torch.tensor(lowest)), gap * share_of_gap)
    if fmt.name == "int8-dynamic" and fmt.signed:
        # Its map has no -1.
        bound = torch.where((x < 0) & (share > 0.9929), 1 - 0.99296, bound)
    assert (decoded * x >= 0).all()
    assert (error <= bound * (1 + 1e-4) + 2e-7 * drawn(fmt, share)).all()


@each_format
def test_nearest_rounding_is_idempotent(fmt: Any) -> None:
    x = wild(fmt, 256)
    if fmt.name == "int8-dynamic" and fmt.signed:
        # Its map has no -1, so the largest value of a block has to be positive.
        x.view(-1, fmt.block)[:, 3] = x.abs().view(-1, fmt.block).amax(dim=1)
    once = fmt.encode(x, None)
    twice = fmt.encode(fmt.decode(once), None)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@each_format
def test_coding_is_monotone(fmt: Any) -> None:
    size = max(fmt.block, 32)
    rows = wild(fmt).view(-1, size).sort(dim=1).values
    for draw in (None, draws(rows.shape[0])[:, None].expand(-1, size).contiguous()):
        decoded = round_trip(fmt, rows, draw)
        assert (decoded[:, 1:] >= decoded[:, :-1]).all()


@each_block_format
@pytest.mark.parametrize("exponent", [-60, -1, 3, 50])
def test_codes_do_not_depend_on_powers_of_two(fmt: BlockFormat, exponent: int) -> None:
    # No floor under small gradients: the whole range of fp32 is served alike.
    x = for_sign(fmt, values((64 * fmt.block,), 4))
    draw = draws(x.numel())
    codes, scale = fmt.encode(x, draw)
    scaled_codes, scaled_scale = fmt.encode(x * 2.0**exponent, draw)
    assert torch.equal(codes, scaled_codes)
    assert torch.equal(scale.float() * 2.0**exponent, scaled_scale.float())


# Rounding --------------------------------------------------------------------------------------------------------


def _in_each_interval(fmt: BlockFormat, fractions: tuple[float, ...]) -> Tensor:
    """Shares of the scale between each two neighbouring levels, of both signs where there are two."""
    table = drawn(fmt, levels(fmt.name, fmt.signed, fmt.ratio)[int(fmt.keep_positive) :])
    share = (table[:-1, None] + torch.tensor(fractions, dtype=torch.float64) * table.diff()[:, None]).flatten()
    share = share ** drawn_root(fmt.name, fmt.signed, fmt.ratio)
    return (torch.cat([share, -share]) if fmt.signed else share).float()


@each_block_format
def test_rounding_is_exact_in_the_mean_over_all_draws(fmt: BlockFormat) -> None:
    x = _in_each_interval(fmt, (0.02, 0.3, 0.5, 0.9))
    x = x[x > -0.99] if fmt.name == "int8-dynamic" else x
    count = 1024
    # Each row: a value 1 that fixes the scale, and `block - 1` draws of one value.
    per_row = fmt.block - 1
    rows = -(-count // per_row)
    draw = torch.zeros(rows, fmt.block, dtype=torch.int32)
    draw[:, 1:] = (torch.arange(rows * per_row) * (65536 / (rows * per_row))).int().view(rows, per_row)
    block = torch.ones(len(x), rows, fmt.block)
    block[:, :, 1:] = x[:, None, None]
    decoded = round_trip(fmt, block.flatten(), draw.expand(len(x), -1, -1).flatten()).view(block.shape)[:, :, 1:]
    error = (drawn(fmt, decoded.abs()).mean(dim=(1, 2)) - drawn(fmt, x.abs())).abs()
    assert (error <= drawn_gaps(fmt, x.abs()) * 2 / count + 2e-7 * drawn(fmt, x.abs())).all()


@each_block_format
@pytest.mark.parametrize("rounding", ["dither", "independent"])
def test_rounding_has_no_bias_with_the_draws_of_a_step(fmt: BlockFormat, rounding: str) -> None:
    x = _in_each_interval(fmt, (0.1, 0.5, 0.8))
    x = x[x > -0.99] if fmt.name == "int8-dynamic" else x
    rows = -(-1000 // (fmt.block - 1))
    block = torch.ones(len(x), rows, fmt.block)
    block[:, :, 1:] = x[:, None, None]
    low, high = make_key(0, 3, 1)
    offset, word = Moment(sgd, _SGD, 12).on(torch.device("cpu"))[1]
    index = torch.arange(block.numel(), dtype=torch.int32)
    dither, independent = (hash16(index, (low, high)) + offset) & 0xFFFF, hash16(index, (low, high ^ word))
    draw = dither if rounding == "dither" else independent
    decoded = round_trip(fmt, block.flatten(), draw).view(block.shape)[:, :, 1:]
    up = (decoded.abs().double() > x.abs()[:, None, None]).double().mean(dim=(1, 2))
    table, x = drawn(fmt, levels(fmt.name, fmt.signed, fmt.ratio)), drawn(fmt, x.abs())
    place = torch.searchsorted(table, x, right=True)
    expected = (x - table[place - 1]) / (table[place] - table[place - 1])
    z = (up - expected) / (expected * (1 - expected) / (rows * (fmt.block - 1))).sqrt()
    assert z.abs().max() < 4.7
    assert abs((z**2).sum().item() - len(z)) / (2 * len(z)) ** 0.5 < 4.5


_SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


# Properties ------------------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
blocks_of_floats = st.lists(floats, min_size=1, max_size=32)
few = hypothesis.settings(max_examples=40, derandomize=True, deadline=None, database=None)


def _padded(fmt: Any, numbers: list[float]) -> Tensor:
    return for_sign(fmt, torch.tensor(numbers + [0.0] * (-len(numbers) % max(fmt.block, 1))))


@each_format
@few
@hypothesis.given(numbers=blocks_of_floats, seed=st.integers(0, 1000))
def test_any_block_decodes_to_its_range(fmt: Any, numbers: list[float], seed: int) -> None:
    x = _padded(fmt, numbers)
    decoded = round_trip(fmt, x, draws(x.numel(), seed))
    assert decoded.shape == x.shape
    if isinstance(fmt, FloatFormat):
        finite = x.abs() <= 3.38e38
        assert torch.equal(decoded.isnan(), x.isnan())
        assert ((decoded - x).abs()[finite] <= x.abs()[finite] * 2.0**-7 + 2.0**-133).all()
        return
    largest = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
    assert decoded.isfinite().all()
    assert (decoded.abs().double() <= largest * (1 + 2.0**-7) + 2.0**-133).all()
    assert not fmt.signed or (decoded * x.nan_to_num(0, 0, 0) >= 0).all()
    assert fmt.signed or (decoded >= 0).all()


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL if getattr(fmt, "signed", True)], ids=lambda fmt: fmt.spec)
@few
@hypothesis.given(numbers=blocks_of_floats, seed=st.integers(0, 1000))
def test_any_block_is_coded_like_its_negative(fmt: Any, numbers: list[float], seed: int) -> None:
    x = _padded(fmt, numbers)
    if getattr(fmt, "center", None) is not None:
        # The dynamic map has no -1: leave a positive value that nothing exceeds in each block.
        x = torch.cat([x[: fmt.block // 2].nan_to_num(0, 0, 0) / 2, torch.full((fmt.block // 2,), 3e38)])
        expected = -round_trip(fmt, x, draws(x.numel(), seed))[: fmt.block // 2]
        x[: fmt.block // 2] *= -1
        assert torch.equal(round_trip(fmt, x, draws(x.numel(), seed))[: fmt.block // 2], expected)
        return
    draw = draws(x.numel(), seed)
    positive, negative = round_trip(fmt, x, draw), round_trip(fmt, -x, draw)
    assert torch.equal(negative.nan_to_num(1.0), (-positive).nan_to_num(1.0))
