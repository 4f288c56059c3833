"""Writing quantized state in pieces, and the values that are encoded again without loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_optim import AdamW, QuantizedState
from lowbit_optim.formats import FORMATS, BlockFormat, get_format
from lowbit_optim.state import encode_flat, zeros_state
from lowbit_optim.window import StateWindow

from .runs import bits

BLOCK_FORMATS = [name for name, pair in FORMATS.items() if isinstance(pair[0], BlockFormat)]


def trained(state: str, shape: tuple[int, ...], slot: str = "exp_avg", size: float = 1.0) -> QuantizedState:
    """A slot as training leaves it: rounded at random, so that a block's largest value may lie below its scale."""
    param = torch.nn.Parameter(torch.zeros(shape))
    optimizer = AdamW([param], state=state, min_quantized_numel=0, backend="eager")
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        param.grad = torch.randn(shape, generator=generator) * size
        optimizer.step()
    found = optimizer.state[param][slot]
    assert isinstance(found, QuantizedState)
    return found


def copied(state: QuantizedState) -> QuantizedState:
    result = state.clone()
    assert isinstance(result, QuantizedState)
    return result


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6], ids=str)
@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_values_that_a_format_holds_are_encoded_without_loss(name: str, slot: str, size: float) -> None:
    state = trained(name, (64, 512), slot, size)
    values = state.dequantize()
    again = state.format.decode(encode_flat(state.format, values)).view_as(values)
    assert torch.equal(bits(again), bits(values))
    # Rounding the largest value to its own scale, as plain encoding does, is not enough.
    if name != "int4":
        plain = state.format.decode(state.format.encode(values.view(-1), None)).view_as(values)
        assert not torch.equal(plain, values)


def test_encoding_other_values_again_is_rounding_to_nearest() -> None:
    fmt = FORMATS["int8"][0]
    assert isinstance(fmt, BlockFormat)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(encode_flat(fmt, values), fmt.encode(values, None), strict=True):
        assert torch.equal(mine, theirs)


# Each cut falls inside a block of every format.
CUTS: dict[str, tuple[tuple[int, ...], int, list[int]]] = {
    "rows": ((10, 50), 0, [3, 4, 3]),
    "columns": ((10, 50), 1, [1, 20, 29]),
    "middle": ((4, 6, 50), 1, [1, 5]),
    "flat": ((700,), 0, [9, 300, 391]),
    "columns of blocks": ((4, 512), 1, [10, 300, 202]),
}


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_state_filled_in_pieces_is_the_state_filled_whole(name: str, cut: str, order: str) -> None:  # C12
    shape, dim, sizes = CUTS[cut]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values.view(-1)[::7] *= 100  # so that a block encoded from half of its values gets another scale
    whole, pieces = (zeros_state(get_format(name, True), shape, torch.device("cpu")) for _ in range(2))
    whole.copy_(values)
    # What was there before must not count either.
    pieces.copy_(torch.full(shape, 1e4))
    parts = list(zip(pieces.split(sizes, dim), values.split(sizes, dim), strict=True))
    assert any(isinstance(window, StateWindow) for window, _ in parts)
    for window, piece in parts if order == "forwards" else parts[::-1]:
        window.copy_(piece)
    assert isinstance(whole, QuantizedState)
    assert isinstance(pieces, QuantizedState)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole.parts, pieces.parts, strict=True))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_window_narrowed_twice_reaches_the_same_blocks(name: str) -> None:
    """As DCP reads a box: rows, then columns, each time from the state anew."""
    values = torch.randn(6, 500, generator=torch.Generator().manual_seed(3)) * 10
    whole, pieces = (zeros_state(get_format(name, True), (6, 500), torch.device("cpu")) for _ in range(2))
    whole.copy_(values)
    for rows in ((0, 1), (1, 3), (4, 2)):
        for columns in ((0, 130), (130, 370)):
            box: Any = pieces.detach()
            box.narrow(0, *rows).narrow(1, *columns).detach().copy_(values.narrow(0, *rows).narrow(1, *columns))
    assert torch.equal(whole, pieces)


def test_writing_part_of_a_block_leaves_the_rest() -> None:
    state = trained("int8", (4, 64))
    before = state.dequantize()
    state[1:2, 5:9].copy_(torch.full((1, 4), before.abs().max()))
    after = state.dequantize()
    assert torch.equal(after[1, 5:9], torch.full((4,), float(before.abs().max().bfloat16())))
    untouched = torch.ones(4, 64, dtype=torch.bool)
    untouched[1, :32] = False
    assert torch.equal(after[untouched], before[untouched])
    rest = torch.cat([before[1, :5], before[1, 9:32]]), torch.cat([after[1, :5], after[1, 9:32]])
    assert (rest[0] - rest[1]).abs().max() < 0.05 * before.abs().max()


def test_what_was_written_to_part_of_a_block_is_forgotten_once_the_block_is_stored_anew() -> None:
    state = trained("int8", (64,))
    state[:10].copy_(torch.full((10,), 7.0))
    state.copy_(torch.ones(64))
    state[10:20].copy_(torch.full((10,), 2.0))
    values = state.dequantize()
    assert torch.equal(values[10:20], torch.full((10,), 2.0))
    assert (values[:10] - 1.0).abs().max() < 0.1


def test_window_reads_as_the_values_and_fills() -> None:
    state = trained("int8", (6, 50))
    window = state[2:4]
    assert isinstance(window, StateWindow)
    values = state.dequantize()[2:4]
    assert torch.equal(window + 0, values)
    assert torch.equal(torch.zeros(2, 50).copy_(window), values)
    assert torch.equal(window[:, 3:7] + 0, values[:, 3:7])
    target = zeros_state(get_format("int8", True), (2, 50), torch.device("cpu"))
    assert torch.allclose(target.copy_(window) + 0, values, rtol=0.05, atol=1e-4)
    window.zero_()
    assert torch.equal(state.dequantize()[2:4], torch.zeros(2, 50))
    window.fill_(3.0)
    assert torch.equal(state.dequantize()[2:4], torch.full((2, 50), 3.0))
    with pytest.raises(NotImplementedError, match="use copy_"):
        window.mul_(2)
    with pytest.raises(RuntimeError, match="shape"):
        window.copy_(torch.zeros(3, 50))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_aligned_slices_share_the_storage(name: str, dim: int) -> None:
    state = trained(name, (4, 512))
    values = torch.randn(4, 512, generator=torch.Generator().manual_seed(5))
    for piece, new in zip(
        state.split(2 if dim == 0 else 256, dim), values.split(2 if dim == 0 else 256, dim), strict=True
    ):
        assert isinstance(piece, QuantizedState)
        piece.copy_(new)
    whole = zeros_state(state.format, (4, 512), torch.device("cpu")).copy_(values)
    assert torch.equal(state, whole)


# What gathering does -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_joining_whole_blocks_keeps_codes(name: str, dim: int) -> None:
    state = trained(name, (4, 6, 512))
    joined = torch.cat(state.split([2, 2] if dim == 0 else [2, 4] if dim == 1 else [256, 256], dim), dim)
    assert isinstance(joined, QuantizedState)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(joined.parts, state.parts, strict=True))


def test_joining_cut_blocks_or_other_formats_gives_values() -> None:
    state = trained("int8", (6, 50))
    values = state.dequantize()
    for pieces in ([copied(state), copied(state)], [copied(state), values], [trained("int4", (6, 50)), copied(state)]):
        joined = torch.cat(pieces, dim=0)
        assert type(joined) is Tensor
        assert torch.equal(joined[6:], values)
    empty = zeros_state(get_format("int8", True), (0, 50), torch.device("cpu"))
    joined = torch.cat([copied(state), empty], dim=0)
    assert isinstance(joined, QuantizedState)
    assert torch.equal(joined, state)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(5, 512), (5, 50), (0, 64)], ids=str)
def test_padding_rows_keeps_codes(name: str, shape: tuple[int, ...]) -> None:
    state = zeros_state(get_format(name, True), shape, torch.device("cpu"))
    state.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(6)))
    padded = torch.nn.functional.pad(state, (0, 0, 0, 3))
    assert isinstance(padded, QuantizedState)
    assert padded.shape == (shape[0] + 3, shape[1])
    expected = padded.format.part_sizes(math.prod(padded.shape))
    assert tuple(part.numel() for part in padded.parts) == expected
    assert torch.equal(padded[: shape[0]] + 0, state.dequantize())


def test_padding_otherwise_gives_values() -> None:
    state = trained("int8", (4, 64))
    for pad, value in (((1, 0), 0.0), ((0, 0, 1, 0), 0.0), ((0, 0, 0, 1), 2.0)):
        padded = torch.nn.functional.pad(state, pad, value=value)
        assert type(padded) is Tensor
        assert torch.equal(padded, torch.nn.functional.pad(state.dequantize(), pad, value=value))
