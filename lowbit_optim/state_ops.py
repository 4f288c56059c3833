"""Operations on quantized state that keep the codes: the one table of aten and collective operations.

Whatever is not here works on decoded values. A collective must do the same on every rank: it decides by what all ranks
have in common, and it has been waited for before its result is wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .formats import Parts
from .state import OPS, QuantizedState, decoded, encode_flat, zeros_state
from .window import StateWindow, holds_ratio

aten = torch.ops.aten

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def _op(*overloads: Any) -> Callable[[_Handler], _Handler]:
    """Make the decorated function the handler of operations, each an overload, its name or its namespace."""

    def register(handler: _Handler) -> _Handler:
        OPS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


@_op(aten.detach.default, aten.alias.default)
def _same(state: QuantizedState) -> QuantizedState:
    return state.sharing(state.shape)


@_op(aten.clone.default)
def _clone(state: QuantizedState, memory_format: Any = None) -> QuantizedState:
    return state.with_parts(torch.clone)


@_op(aten._to_copy.default)
def _to_copy(
    state: QuantizedState,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **ignored: Any,
) -> QuantizedState:
    # Loaders cast state to the parameter's dtype: that changes what decoding returns, never the codes.
    target = device or state.device
    return state.with_parts(lambda part: part.to(target, non_blocking=non_blocking, copy=True), dtype)


@_op(aten._pin_memory.default)
def _pin_memory(state: QuantizedState, device: Any = None) -> QuantizedState:
    return state.with_parts(lambda part: part.pin_memory())


@_op(aten.is_pinned.default)
def _is_pinned(state: QuantizedState, device: Any = None) -> bool:
    return all(part.is_pinned() for part in state.parts)


@_op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(state: QuantizedState, shape: list[int]) -> QuantizedState:
    known = -math.prod(shape) if -1 in shape else 1
    shape = [state.numel() // known if size == -1 else size for size in shape]
    if math.prod(shape) != state.numel():
        raise RuntimeError(f"shape {shape} is invalid for a state of {state.numel()} elements")
    return state.sharing(torch.Size(shape))


@_op(aten.view.dtype)
def _view_dtype(state: QuantizedState, dtype: torch.dtype) -> QuantizedState:
    return state.sharing(state.shape, dtype)


# Cutting and joining ---------------------------------------------------------------------------------------------


@_op(aten.slice.Tensor)
def _slice(
    state: QuantizedState, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Share the storage where the cut falls between blocks; elsewhere return a window."""
    dim = dim % state.dim()
    size = state.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    end = max(start, end)
    root, box = state.origin
    box = (*box[:dim], box[dim][start:end:step], *box[dim + 1 :])
    inner, outer = math.prod(state.shape[dim + 1 :]), math.prod(state.shape[:dim])
    block, run = state.format.block, size * inner
    first, last = start * inner, end * inner
    ragged_end = outer == 1 and last == run
    aligned = first % block == 0 and (last % block == 0 or ragged_end) and (run % block == 0 or outer == 1)
    if step != 1 or not aligned or any(part.dim() > 1 for part in state.parts):
        return StateWindow(root, box)
    blocks = [-(-count // block) for count in (run, first, last)]

    def cut(part: Tensor) -> Tensor:
        width = part.numel() // max(outer * blocks[0], 1)
        rows = part.view(outer, blocks[0] * width)[:, blocks[1] * width : blocks[2] * width]
        return rows.view(-1) if outer == 1 else rows

    shape = (*state.shape[:dim], end - start, *state.shape[dim + 1 :])
    return QuantizedState(state.format, tuple(map(cut, state.parts)), shape, state.dtype, (root, box))


@_op(aten.split.Tensor, aten.split_with_sizes.default)
def _split(state: QuantizedState, sizes: int | list[int], dim: int = 0) -> list[Tensor]:
    total = state.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, max(total, 1), sizes)]
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [_slice(state, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@_op(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join the codes of states of one format whose blocks do not cross the seams; else decoded values."""
    states = [tensor for tensor in tensors if isinstance(tensor, QuantizedState)]
    pieces = [tensor for tensor in tensors if tensor.numel()]
    first = states[0]
    dim = dim % first.dim()
    outer = math.prod(first.shape[:dim])
    runs = [math.prod(piece.shape[dim:]) for piece in pieces]
    whole = runs[:-1] if outer == 1 else runs
    if any(not isinstance(piece, QuantizedState) or piece.format != first.format for piece in pieces) or any(
        run % first.format.block for run in whole
    ):
        joined = torch.cat([decoded(tensor) for tensor in tensors], dim)
        return first.marked(joined) if all(map(holds_ratio, pieces)) else joined
    stored = [piece.flat_parts() for piece in pieces if isinstance(piece, QuantizedState)] or [first.flat_parts()]
    parts = tuple(
        torch.cat([part.view(outer, -1) for part in same], dim=1).view(-1) for same in zip(*stored, strict=True)
    )
    extent = sum(tensor.shape[dim] for tensor in tensors)
    return QuantizedState(first.format, parts, (*first.shape[:dim], extent, *first.shape[dim + 1 :]), first.dtype)


@_op(aten.constant_pad_nd.default)
def _constant_pad_nd(state: QuantizedState, pad: list[int], value: float = 0) -> Tensor:
    """Lengthen the first dimension, as gathering uneven shards does: the flattened tensor grows at its end."""
    grown = pad[-1] if len(pad) == 2 * state.dim() and not any(pad[:-1]) else -1
    if value != 0 or grown < 0:
        return torch.nn.functional.pad(state.dequantize(), pad, value=value)
    shape = (state.shape[0] + grown, *state.shape[1:])
    sizes = state.format.part_sizes(math.prod(shape))
    parts = tuple(
        torch.nn.functional.pad(part, (0, size - part.numel()))
        for part, size in zip(state.flat_parts(), sizes, strict=True)
    )
    return QuantizedState(state.format, parts, shape, state.dtype)


# Making and writing -----------------------------------------------------------------------------------------------


@_op(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(state: QuantizedState, size: list[int], **options: Any) -> Tensor:
    dtype, device = options.get("dtype") or state.dtype, options.get("device") or state.device
    if not dtype.is_floating_point:
        return torch.zeros(size, dtype=dtype, device=device)
    zeros = zeros_state(state.format, tuple(size), device)
    assert isinstance(zeros, QuantizedState)
    return zeros.sharing(zeros.shape, dtype)


@_op(aten.zeros_like.default, aten.empty_like.default)
def _zeros_like(state: QuantizedState, **options: Any) -> Tensor:
    return _new_zeros(state, list(state.shape), **options)


@_op(aten.zero_.default)
def _zero_(state: QuantizedState) -> QuantizedState:
    for part in state.parts:
        part.zero_()
    return state


@_op(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(state: QuantizedState, value: Any) -> QuantizedState:
    _copy_(state, torch.full(state.shape, float(value), device=state.device))
    return state


@_op(aten.copy_.default)
def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, QuantizedState):
        target.copy_(decoded(source), non_blocking)
        return target
    if target.shape != source.shape:
        raise RuntimeError(f"cannot copy a tensor of shape {tuple(source.shape)} into a state of {tuple(target.shape)}")
    target.become(source)
    if isinstance(source, QuantizedState) and source.format == target.format:
        parts = source.flat_parts()
    else:
        parts = encode_flat(target.format, decoded(source))
    _store(target, parts, non_blocking)
    return target


def _store(target: QuantizedState, parts: Parts, non_blocking: bool = False) -> None:
    for old, new in zip(target.parts, parts, strict=True):
        old.copy_(new.view(old.shape), non_blocking)


@_op(aten.equal.default)
def _equal(left: Tensor, right: Tensor) -> bool:
    if isinstance(left, QuantizedState) and isinstance(right, QuantizedState) and left.format == right.format:
        return left.shape == right.shape and all(map(torch.equal, left.flat_parts(), right.flat_parts()))
    return torch.equal(decoded(left), decoded(right))


# Collectives ------------------------------------------------------------------------------------------------------


# They are named, not referred to: torch may be built without them, and registers some only when they are first used.


@_op("_c10d_functional.all_gather_into_tensor.default")
def _all_gather(state: QuantizedState, group_size: int, group_name: Any) -> Tensor:
    """Gather along the first dimension. All ranks have a state of one shape: whole blocks go as codes."""
    functional = torch.ops._c10d_functional

    def gather(tensor: Tensor) -> Tensor:
        gathered: Tensor = functional.all_gather_into_tensor(tensor.contiguous(), group_size, group_name)
        return functional.wait_tensor(gathered)  # type: ignore[no-any-return]

    if state.numel() % state.format.block:
        return state.marked(gather(state.dequantize()))
    shape = (state.shape[0] * group_size, *state.shape[1:])
    return QuantizedState(state.format, tuple(map(gather, state.flat_parts())), shape, state.dtype)


@_op("_c10d_functional.wait_tensor.default", "_c10d_functional._wrap_tensor_autograd.default")
def _wait(state: QuantizedState) -> QuantizedState:
    return state


@_op("c10d")
def _in_place_collective(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a collective that writes into its arguments on decoded values, and encode what it wrote.

    Other ranks may hold plain tensors, so codes cannot be sent.
    """
    sent: list[tuple[QuantizedState, Tensor]] = []

    def decode(state: QuantizedState) -> Tensor:
        sent.append((state, state.dequantize()))
        return sent[-1][1]

    plain = tree_map_only(QuantizedState, decode, args)
    result = func(*plain, **kwargs)
    # All of them return their work last, some beside the tensors.
    work = result[-1] if isinstance(result, (tuple, list)) else result
    work.wait()
    for state, values in sent:
        if not torch.equal(values, state.dequantize()):
            # Not by `copy_`: ranks hold states of one kind, so ratios come where ratios were.
            _store(state, encode_flat(state.format, values))
    return result
