"""`QuantizedState`: operations that only move data keep the codes, others read decoded values or are refused."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_optim import QuantizedState
from lowbit_optim.formats import FORMATS, BlockFormat, get_format, parse_spec
from lowbit_optim.state import rebuild_state, stored_parts, zeros_state

from .references import drawn_root
from .runs import bits, values

CPU = torch.device("cpu")
BLOCK_FORMATS = [fmt for pair in FORMATS.values() for fmt in pair if isinstance(fmt, BlockFormat)]
each_format = pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=lambda fmt: fmt.spec)


def filled(fmt: BlockFormat, shape: tuple[int, ...] | None = None, seed: int = 0) -> QuantizedState:
    """A state of random values of the format's sign; four rows of two blocks unless told."""
    shape = (4, 2 * fmt.block) if shape is None else shape
    state = zeros_state(fmt, shape, CPU)
    content = values(shape, seed)
    assert isinstance(state, QuantizedState)
    state.copy_(content if fmt.signed else content.square())
    return state


def assert_codes(actual: Tensor, expected: QuantizedState, shape: tuple[int, ...] | None = None) -> None:
    """The same stored bits under the given shape."""
    assert isinstance(actual, QuantizedState)
    assert actual.spec == expected.spec
    assert tuple(actual.shape) == (tuple(expected.shape) if shape is None else shape)
    for mine, theirs in zip(actual.parts, expected.parts, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(bits(mine), bits(theirs))


# Operations that keep the codes ------------------------------------------------------------------------------------

SHARING: dict[str, Callable[[QuantizedState], Tensor]] = {
    "detach": lambda s: s.detach(),
    "data": lambda s: s.data,
    "cpu": lambda s: s.cpu(),
    "to-same-device": lambda s: s.to("cpu"),
    "contiguous": lambda s: s.contiguous(),
    "copy.copy": copy.copy,
    "full-slice": lambda s: s[:],
    "view": lambda s: s.view(s.shape),
    "view-as": lambda s: s.view_as(s),
}
COPYING: dict[str, Callable[[QuantizedState], Tensor]] = {
    "clone": lambda s: s.clone(),
    "clone-preserve": lambda s: s.clone(memory_format=torch.preserve_format),
    "to-copy": lambda s: s.to("cpu", copy=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "flatten-unflatten": lambda s: QuantizedState.__tensor_unflatten__(
        {name: getattr(s, name).clone() for name in s.__tensor_flatten__()[0]}, s.__tensor_flatten__()[1], None, None
    ),
}


@pytest.mark.parametrize("op", [*SHARING, *COPYING])
def test_state_moves_keep_codes_and_dtype(op: str) -> None:  # C7, C22, A14
    for state in [filled(fmt).to(dtype) for fmt in BLOCK_FORMATS for dtype in (torch.float32, torch.bfloat16)]:
        before = copy.deepcopy(state)
        moved = {**SHARING, **COPYING}[op](state)
        assert_codes(moved, before)
        assert moved.dtype == before.dtype
        shares = [
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            for a, b in zip(moved.parts, state.parts, strict=True)
        ]
        assert shares == [op in SHARING] * len(shares)
        if op in COPYING:
            state.zero_()
            assert_codes(moved, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32], ids=str)
def test_state_dtype_change_keeps_codes(dtype: torch.dtype) -> None:  # A14, D4
    for fmt in BLOCK_FORMATS:
        state = filled(fmt)
        for cast in (
            state.to(dtype),
            state.type(dtype),
            state.to("cpu", dtype),
            state.view(dtype),
            torch.clone(state).to(dtype),
        ):
            assert_codes(cast, state)
            assert cast.dtype == dtype
            assert cast.dequantize().dtype == dtype
            assert torch.equal(cast.dequantize(), state.dequantize().to(dtype))
            # What is made of the cast state decodes to its dtype too.
            for derived in cast.clone(), cast.detach(), cast[:2], cast.view(-1), copy.deepcopy(cast), cast.cpu():
                assert derived.dtype == dtype


@each_format
def test_state_is_not_pinned_on_a_plain_host(fmt: BlockFormat) -> None:  # C7
    assert filled(fmt).is_pinned() is False


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda s: s.view(-1), lambda b: (8 * b,)),
        (lambda s: s.view(2, -1), lambda b: (2, 4 * b)),
        (lambda s: s.reshape(8, s.shape[1] // 2), lambda b: (8, b)),
        (lambda s: s.flatten(), lambda b: (8 * b,)),
        (lambda s: s.view(2, 2, -1).flatten(1), lambda b: (2, 4 * b)),
        (lambda s: s.view_as(torch.empty(1, 4, s.shape[1])), lambda b: (1, 4, 2 * b)),
    ],
    ids=["flat", "minus-one", "reshape", "flatten", "flatten-some", "view-as"],
)
def test_state_view_keeps_codes(op: Callable[..., Tensor], shape: Callable[[int], Any]) -> None:  # C7
    for fmt in BLOCK_FORMATS:
        state = filled(fmt)
        viewed = op(state)
        assert_codes(viewed, state, shape(fmt.block))
        assert torch.equal(viewed.dequantize(), state.dequantize().view(shape(fmt.block)))


@pytest.mark.parametrize("shape", [(3, -1), (5,), (-1, 7)], ids=str)
def test_state_view_refuses_other_sizes(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="invalid"):
        filled(BLOCK_FORMATS[0]).view(shape)


@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (1,), (5,), (3, 11)], ids=str)
def test_state_of_odd_shapes_survives(shape: tuple[int, ...]) -> None:  # C23, D10
    for fmt in BLOCK_FORMATS:
        state = filled(fmt, shape)
        for moved in (
            copy.deepcopy(state),
            pickle.loads(pickle.dumps(state)),
            state.detach(),
            state.to("cpu", copy=True),
        ):
            assert_codes(moved, state, shape)
        assert_codes(state.view(-1), state, (state.numel(),))
        assert state.dequantize().shape == shape
        assert torch.equal(torch.zeros(shape).copy_(state), state.dequantize())


# Slices --------------------------------------------------------------------------------------------------------------


def holds_whole_blocks(shape: tuple[int, ...], index: tuple[slice, ...], block: int) -> bool:
    """Whether what is cut out is made of the source's whole blocks, in any order; found element by element."""
    source = torch.arange(torch.Size(shape).numel())
    cut = source.view(shape)[index].reshape(-1)
    return all(
        torch.equal(run, source[run[0] : run[0] + block]) and run[0] % block == 0
        for run in cut.split(block)
        if len(run)
    )


# (shape in blocks for the last dimension, dimension, start and end in elements or blocks "b"), and whether it is exact.
SLICES = {
    "rows": (lambda b: (6, 2 * b), lambda b: (slice(1, 4),), True),
    "last-rows": (lambda b: (6, 2 * b), lambda b: (slice(-2, None),), True),
    "no-rows": (lambda b: (6, 2 * b), lambda b: (slice(3, 3),), True),
    "columns": (lambda b: (6, 3 * b), lambda b: (slice(None), slice(b, 3 * b)), True),
    "rows-and-columns": (lambda b: (6, 3 * b), lambda b: (slice(2, 5), slice(0, b)), True),
    "middle-dim": (lambda b: (3, 4, b), lambda b: (slice(None), slice(1, 3)), True),
    "narrow-rows": (lambda b: (8, b // 4), lambda b: (slice(4, 8),), True),
    "narrow-rows-cut-block": (lambda b: (8, b // 4), lambda b: (slice(2, 6),), False),
    "ragged-end": (lambda b: (3 * b + 7,), lambda b: (slice(2 * b, None),), True),
    "ragged-start": (lambda b: (3 * b + 7,), lambda b: (slice(7, None),), False),
    "ragged-rows": (lambda b: (5, b + 1), lambda b: (slice(0, 2),), False),
    "all-ragged-rows": (lambda b: (5, b + 1), lambda b: (slice(0, 5),), True),
    "part-of-a-block": (lambda b: (6, 2 * b), lambda b: (slice(None), slice(1, b)), False),
    "every-second-row": (lambda b: (6, 2 * b), lambda b: (slice(None, None, 2),), False),
}


@pytest.mark.parametrize("case", SLICES)
def test_state_slice_is_exact_when_aligned_else_decoded(case: str) -> None:  # C7, C12
    for fmt in BLOCK_FORMATS:
        shape, index, exact = SLICES[case][0](fmt.block), SLICES[case][1](fmt.block), SLICES[case][2]
        state = filled(fmt, shape)
        cut = state[index]
        expected = state.dequantize()[index]
        assert cut.shape == expected.shape
        assert isinstance(cut, QuantizedState) == exact
        if isinstance(cut, QuantizedState):
            assert holds_whole_blocks(shape, index, fmt.block)
            assert cut.spec == state.spec
            assert [part.numel() for part in cut.parts] == list(fmt.part_sizes(cut.numel()))
            assert torch.equal(rebuild_state(cut.spec, cut.parts, tuple(cut.shape), cut.dtype).dequantize(), expected)
        else:
            assert torch.equal(cut, expected)


PIECES: dict[str, Callable[[Tensor, int], Any]] = {
    "split-1": lambda t, b: t.split(1),
    "split-uneven": lambda t, b: t.split(3),
    "split-sizes": lambda t, b: torch.split(t, [1, 2, 1]),
    "split-columns": lambda t, b: t.split(b, dim=1),
    "split-columns-ragged": lambda t, b: t.split(b - 3, dim=-1),
    "chunk": lambda t, b: t.chunk(2),
    "chunk-uneven": lambda t, b: t.chunk(3),
    "chunk-columns": lambda t, b: t.chunk(2, dim=1),
    "tensor-split": lambda t, b: t.tensor_split(3),
    "narrow": lambda t, b: [t.narrow(0, 1, 2)],
    "narrow-columns": lambda t, b: [t.narrow(1, b, b)],
    "narrow-ragged": lambda t, b: [t.narrow(1, 1, 5)],
    "unbind": lambda t, b: t.unbind(),
    "select": lambda t, b: [t[2], t[-1]],
    "index": lambda t, b: [t[torch.tensor([2, 0])]],
    "cat": lambda t, b: [torch.cat([t, t])],
    "cat-with-plain": lambda t, b: [torch.cat([t, torch.ones(2, t.shape[1])])],
    "stack": lambda t, b: [torch.stack([t, t])],
    "transpose": lambda t, b: [t.t()],
}


@pytest.mark.parametrize("op", PIECES)
def test_state_pieces_hold_the_values_of_the_whole(op: str) -> None:  # C7
    for fmt in BLOCK_FORMATS:
        state = filled(fmt)
        pieces, expected = PIECES[op](state, fmt.block), PIECES[op](state.dequantize(), fmt.block)
        assert len(pieces) == len(expected)
        for piece, value in zip(pieces, expected, strict=True):
            plain = piece.dequantize() if isinstance(piece, QuantizedState) else piece
            assert torch.equal(plain, value)


@each_format
def test_state_aligned_pieces_keep_codes(fmt: BlockFormat) -> None:  # C12
    for op in "split-1", "split-uneven", "split-sizes", "split-columns", "chunk", "chunk-columns", "narrow":
        assert all(isinstance(piece, QuantizedState) for piece in PIECES[op](filled(fmt), fmt.block)), op


# New states and writes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_new_states_are_zero_and_alike(dtype: torch.dtype) -> None:  # C7
    for fmt in BLOCK_FORMATS:
        state = filled(fmt).to(dtype)
        fresh = {
            "zeros_like": (torch.zeros_like(state), state.shape),
            "new_zeros": (state.new_zeros((3, 5)), (3, 5)),
            "empty_like": (torch.empty_like(state), state.shape),
        }
        for name, (new, shape) in fresh.items():
            assert isinstance(new, QuantizedState), name
            assert (new.spec, tuple(new.shape), new.dtype) == (state.spec, tuple(shape), dtype), name
            if name != "empty_like":
                assert new.dequantize().eq(0).all(), name
        assert torch.zeros_like(state, device="meta").parts[0].device.type == "meta"
        assert state.dequantize().ne(0).any(), "the source is untouched"


def test_state_zeros_like_of_a_mask_is_a_mask() -> None:
    mask = torch.zeros_like(filled(BLOCK_FORMATS[0]), dtype=torch.bool)
    assert mask.dtype == torch.bool
    assert not mask.any()


@each_format
def test_state_copy_between_states_and_plain_tensors(fmt: BlockFormat) -> None:  # C7
    state = filled(fmt)
    plain = torch.empty(state.shape)
    assert plain.copy_(state) is plain
    assert torch.equal(plain, state.dequantize())
    assert torch.equal(torch.empty(state.shape, dtype=torch.bfloat16).copy_(state), plain.bfloat16())

    same = torch.zeros_like(state)
    pointers = [part.data_ptr() for part in same.parts]
    assert_codes(same.copy_(state), state)
    assert pointers == [part.data_ptr() for part in same.parts], "written in place"

    # What a format decodes to is what it stores exactly, but for the map that has no code for -1.
    again = torch.zeros_like(state).copy_(plain)
    torch.testing.assert_close(again.dequantize(), plain, rtol=0 if fmt.center is None else 0.01, atol=0)
    transposed = torch.zeros_like(state).copy_(plain.t().contiguous().t())
    assert_codes(transposed, again)

    other = zeros_state(get_format("int8" if fmt.name != "int8" else "fp8", fmt.signed), state.shape, CPU)
    expected = copy.deepcopy(other).copy_(state.dequantize())
    assert torch.equal(other.copy_(state).dequantize(), expected.dequantize())


@each_format
def test_state_copy_encodes_to_the_nearest_stored_value(fmt: BlockFormat) -> None:
    content = values((3, fmt.block), 5)
    content = content if fmt.signed else content.square()
    state = torch.zeros_like(filled(fmt, (3, fmt.block))).copy_(content)
    decoded = state.dequantize().view(3, fmt.block)
    # Every value of the block that another code could have stored is at least as far away.
    codes = torch.arange(256, dtype=torch.uint8)
    for row in range(3):
        size = fmt.part_sizes(fmt.block)[0]
        table = torch.cat([fmt.decode((code.expand(size), state.parts[1][row : row + 1]))[:1] for code in codes])
        # Nearest by the roots that the format rounds by; signed formats round by values.
        root = 1 / drawn_root(fmt.name, fmt.signed)
        exact, stored, table = (x if root == 1 else x**root for x in (content[row], decoded[row], table))
        nearest = (exact[:, None] - table).abs().amin(1)
        if fmt.keep_positive:  # a positive value may not take the code of zero
            nearest = (exact[:, None] - table[table != 0]).abs().amin(1)
        assert ((stored - exact).abs() <= nearest + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("source", [(4, 63), (64, 4), (1,), ()], ids=str)
def test_state_copy_refuses_other_shapes(source: tuple[int, ...]) -> None:
    state = filled(BLOCK_FORMATS[0])
    before = copy.deepcopy(state)
    with pytest.raises(RuntimeError, match=r"cannot copy .* into a state of \(4, 64\)"):
        state.copy_(torch.ones(source))
    assert_codes(state, before)


@each_format
def test_state_zero_and_fill_write_in_place(fmt: BlockFormat) -> None:
    state = filled(fmt)
    pointers = [part.data_ptr() for part in state.parts]
    for value in (2.0, 0.15625, torch.tensor(3.0), -2.0 if fmt.signed else 8.0, 0.0):
        assert state.fill_(value) is state
        below = 0.0 if value >= 0 or fmt.center is None else 0.01 * abs(value)
        assert (state.dequantize() - value).abs().max() <= below
    state.fill_(1.0)
    assert state.zero_() is state
    assert state.dequantize().eq(0).all()
    assert not any(part.any() for part in state.parts) or fmt.center is not None
    assert [part.data_ptr() for part in state.parts] == pointers


# Reads ---------------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "sum-dim": lambda t: t.sum(1),
    "mean": lambda t: t.mean(),
    "norm": lambda t: t.norm(),
    "vector-norm": torch.linalg.vector_norm,
    "abs": lambda t: t.abs(),
    "max": lambda t: t.max(),
    "sqrt": lambda t: t.abs().sqrt(),
    "arithmetic": lambda t: 2 * t + t * t - 1,
    "compare": lambda t: t > 0.5,
    "isfinite": lambda t: t.isfinite().all(),
    "item": lambda t: t.sum().item(),
    "index-item": lambda t: t[1, 3].item(),
    "foreach-norm": lambda t: torch._foreach_norm([t])[0],
    "matmul": lambda t: t @ torch.ones(t.shape[1]),
    "add-to-plain": lambda t: torch.ones(t.shape).add_(t),
    "lerp-plain": lambda t: torch.ones(t.shape).lerp_(t, 0.25),
    "out": lambda t: torch.add(t, 1, out=torch.empty(t.shape)),
}


@pytest.mark.parametrize("op", READS)
def test_state_reads_decoded_values(op: str) -> None:  # C7, C22
    for fmt in BLOCK_FORMATS:
        state = filled(fmt)
        actual, expected = READS[op](state), READS[op](state.dequantize())
        assert type(actual) is type(expected)
        assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected


@each_format
def test_state_equality_sees_every_difference(fmt: BlockFormat) -> None:  # C7, C22
    state, same, other = filled(fmt), filled(fmt), filled(fmt, seed=1)
    assert torch.equal(state, same)
    assert torch.equal(state, state.dequantize())
    assert torch.equal(state.dequantize(), state)
    assert not torch.equal(state, other)
    assert not torch.equal(state, other.dequantize())
    assert not torch.equal(state, state.view(-1))
    assert torch.allclose(state, same)
    assert torch.allclose(state, state.dequantize() + 1e-9)
    assert not torch.allclose(state, state.dequantize() + 0.1)
    torch.testing.assert_close(state.dequantize(), same.dequantize(), rtol=0, atol=0)


@each_format
def test_state_repr_tells_format_shape_device_and_values(fmt: BlockFormat) -> None:
    state = torch.zeros_like(filled(fmt, (2, 3))).fill_(2.0)
    shown = repr(state)
    for part in "QuantizedState", fmt.spec, "(2, 3)", "cpu", "2.":
        assert part in shown
    assert "meta" in repr(state.to("meta"))


def test_state_lacks_attributes_that_it_lacks() -> None:
    state = filled(BLOCK_FORMATS[0])
    assert not hasattr(state, "qmap")
    assert not hasattr(state, "party")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = state.no_such_thing


MUTATIONS: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(2),
    "iadd": lambda t: t.__iadd__(1),
    "lerp_": lambda t: t.lerp_(torch.ones(t.shape), 0.1),
    "addcmul_": lambda t: t.addcmul_(torch.ones(t.shape), torch.ones(t.shape)),
    "clamp_": lambda t: t.clamp_(0, 1),
    "normal_": lambda t: t.normal_(),
    "out": lambda t: torch.add(torch.ones(t.shape), 1, out=t),
    "foreach-add": lambda t: torch._foreach_add_([t], 1.0),
    "masked-fill": lambda t: t.masked_fill_(torch.ones(t.shape, dtype=torch.bool), 1.0),
    "index-put": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "assign-row": lambda t: t.__setitem__(0, 1.0),
    "assign-mask": lambda t: t.__setitem__(torch.ones(t.shape, dtype=torch.bool), 1.0),
    "assign-element": lambda t: t.__setitem__((0, 1), 1.0),
}


@pytest.mark.parametrize("op", MUTATIONS)
def test_state_refuses_other_mutations(op: str) -> None:
    state = filled(BLOCK_FORMATS[0])
    before = copy.deepcopy(state)
    with pytest.raises(NotImplementedError, match=r"QuantizedState cannot be changed by .*copy_"):
        MUTATIONS[op](state)
    assert_codes(state, before)


# Files ---------------------------------------------------------------------------------------------------------------

MAP_LOCATIONS: dict[str, Any] = {
    "none": None,
    "cpu": "cpu",
    "device": CPU,
    "callable": lambda storage, location: storage,
    "dict": {"cpu": "cpu"},
    "meta": "meta",
}


@pytest.mark.parametrize("map_location", MAP_LOCATIONS)
@pytest.mark.parametrize("weights_only", [True, False], ids=["weights-only", "pickle"])
def test_state_file_loads_bit_for_bit(weights_only: bool, map_location: str) -> None:  # C6
    for fmt in BLOCK_FORMATS:
        state = filled(fmt, (3, 50)).to(torch.bfloat16)
        file = io.BytesIO()
        torch.save({"state": {0: {"exp_avg": state, "step": torch.tensor(3.0)}}}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only, map_location=MAP_LOCATIONS[map_location])["state"][0][
            "exp_avg"
        ]
        assert (type(loaded), loaded.dtype, loaded.spec) == (QuantizedState, torch.bfloat16, fmt.spec)
        if map_location == "meta":
            assert loaded.shape == state.shape
            assert {part.device.type for part in loaded.parts} == {"meta"}
        else:
            assert_codes(loaded, state)


def test_state_file_loads_from_a_memory_map(tmp_path: Path) -> None:
    states = {fmt.spec: filled(fmt) for fmt in BLOCK_FORMATS}
    torch.save(states, tmp_path / "states.pt")
    for spec, loaded in torch.load(tmp_path / "states.pt", weights_only=True, mmap=True).items():
        assert_codes(loaded, states[spec])


def test_state_file_loads_in_a_fresh_process(tmp_path: Path) -> None:  # C6
    states = {fmt.spec: filled(fmt) for fmt in BLOCK_FORMATS}
    torch.save(states, tmp_path / "states.pt")
    code = (
        "import sys, torch, lowbit_optim\n"
        "for spec, state in torch.load(sys.argv[1]).items():\n"
        "    print(spec, state.spec, tuple(state.shape), state.double().dequantize().sum().item().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "states.pt")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [
        f"{spec} {spec} {tuple(state.shape)} {state.double().dequantize().sum().item().hex()}"
        for spec, state in states.items()
    ]
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


@each_format
def test_state_file_is_as_small_as_the_state(fmt: BlockFormat) -> None:
    file, numel = io.BytesIO(), 1 << 16
    torch.save(filled(fmt, (numel,)), file)
    expected = numel * fmt.bits / 8 + numel / fmt.block * fmt.scale_dtype.itemsize
    assert expected < len(file.getvalue()) < expected + 4096


# Rebuilding ----------------------------------------------------------------------------------------------------------


def test_state_rebuild_refuses_an_unknown_spec() -> None:
    parts = filled(parse_spec("int8/b32/signed")).parts  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"unknown state format spec 'int8/b64/signed'.*did you mean 'int8/b32/signed'"
    ):
        rebuild_state("int8/b64/signed", parts, (4, 64), torch.float32)


@pytest.mark.parametrize("spec", ["fp32", "bf16"])
def test_state_rebuild_refuses_formats_without_blocks(spec: str) -> None:
    with pytest.raises(ValueError, match=f"'{spec}' has no quantized state"):
        rebuild_state(spec, (torch.zeros(4),), (4,), torch.float32)


DAMAGE: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "no-parts": lambda codes, scale: (),
    "no-scale": lambda codes, scale: (codes,),
    "one-more": lambda codes, scale: (codes, scale, scale),
    "swapped": lambda codes, scale: (scale, codes),
    "short-codes": lambda codes, scale: (codes[:-1], scale),
    "long-scale": lambda codes, scale: (codes, torch.cat([scale, scale])),
    "code-dtype": lambda codes, scale: (codes.float(), scale),
    "scale-dtype": lambda codes, scale: (codes, scale.half()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_state_rebuild_refuses_parts_that_do_not_fit(damage: str) -> None:
    for fmt in BLOCK_FORMATS:
        state = filled(fmt)
        with pytest.raises(ValueError, match=f"state '{fmt.spec}' of shape .* needs parts"):
            rebuild_state(state.spec, DAMAGE[damage](*state.parts), tuple(state.shape), state.dtype)
        assert_codes(rebuild_state(state.spec, state.parts, tuple(state.shape), state.dtype), state)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_state_of_unblocked_formats_is_a_plain_tensor(name: str) -> None:
    state = zeros_state(get_format(name, True), (3, 5), CPU)
    assert type(state) is Tensor
    assert state.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    assert stored_parts(state)[0].shape == (15,)
