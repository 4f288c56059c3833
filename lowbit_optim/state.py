"""`QuantizedState`: a tensor of a parameter's shape whose values are stored in a block format.

It exists for storage: `optimizer.state`, checkpoints, `.to()`, `repr`. Steps work on its plain parts. Operations that
only move or copy data keep the codes; any other reads the decoded values, and in-place writes encode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .formats import FORMATS, BlockFormat, FloatFormat, Parts, StateFormat, get_format, parse_spec

aten = torch.ops.aten


class QuantizedState(Tensor):
    """A read-mostly tensor view of stored codes and scales.

    Args:
        format: the block format.
        parts: its stored parts, 1-D, for the flattened tensor with the last block padded.
        shape: logical shape.
        dtype: dtype of decoded values; storage does not depend on it.
    """

    format: BlockFormat
    parts: Parts

    @staticmethod
    def __new__(
        cls, format: BlockFormat, parts: Parts, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> QuantizedState:
        """Wrap parts; they are not copied."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)

    def __init__(
        self, format: BlockFormat, parts: Parts, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> None:
        self.format = format
        self.parts = tuple(parts)

    @property
    def spec(self) -> str:
        """The format's spec string."""
        return self.format.spec

    def dequantize(self) -> Tensor:
        """Return the decoded values as a plain tensor of the state's shape and dtype."""
        flat = self.format.decode(self.parts)
        return flat[: self.numel()].view(self.shape).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        values = "..." if self.device.type == "meta" else self.dequantize()
        return f"QuantizedState({self.spec}, shape={tuple(self.shape)}, device={self.device}, {values})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The default reduction refuses a callable `map_location` (Lightning passes one); plain tensors accept any.
        return rebuild_state, (self.spec, self.parts, tuple(self.shape), self.dtype)

    def share_memory_(self) -> QuantizedState:
        """Move the parts to shared memory."""
        for part in self.parts:
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse: indexing decodes, so the values would land in a copy."""
        raise NotImplementedError("QuantizedState cannot be changed by indexing; use copy_, zero_ or fill_")

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedState:
        copied: QuantizedState = memo.setdefault(id(self), self._with_parts(torch.clone))
        return copied

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, torch.Size]]:
        return [f"part{place}" for place in range(len(self.parts))], (self.spec, self.dtype, self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("part") and name[4:].isdigit():
            return self.parts[int(name[4:])]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], meta: tuple[str, torch.dtype, torch.Size], outer_size: Any, outer_stride: Any
    ) -> QuantizedState:
        spec, dtype, shape = meta
        return rebuild_state(spec, tuple(inner[f"part{place}"] for place in range(len(inner))), shape, dtype)

    def _with_parts(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedState:
        return QuantizedState(self.format, tuple(map(change, self.parts)), self.shape, dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled implementation's signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Use the table below; every other operation works on decoded values."""
        kwargs = kwargs or {}
        handler = _OPS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func._schema.is_mutable and _writes_to_state(func, args, kwargs):
            raise NotImplementedError(f"QuantizedState cannot be changed by {func}; use copy_, zero_ or fill_")
        return func(*tree_map_only(cls, cls.dequantize, args), **tree_map_only(cls, cls.dequantize, kwargs))


def _writes_to_state(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if any(
                isinstance(item, QuantizedState) for item in (value if isinstance(value, (list, tuple)) else [value])
            ):
                return True
    return False


def rebuild_state(spec: str, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedState:
    """Make a state of what a checkpoint holds.

    Raises:
        ValueError: unknown spec, or parts whose number, dtypes or sizes do not fit it.
    """
    fmt = parse_spec(spec)
    if not isinstance(fmt, BlockFormat):
        raise ValueError(f"format spec {spec!r} has no quantized state")
    sizes = fmt.part_sizes(math.prod(shape))
    found = [(part.dtype, part.numel()) for part in parts]
    expected = list(zip(fmt.parts.values(), sizes, strict=True))
    if found != expected:
        raise ValueError(f"state {spec!r} of shape {tuple(shape)} needs parts {expected}, got {found}")
    return QuantizedState(fmt, tuple(parts), torch.Size(shape), dtype)


def zeros_state(name: str, signed: bool, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """Return a slot of zeros in the named format: a plain tensor for fp32 and bf16, else a `QuantizedState`."""
    fmt = get_format(name, signed)
    parts = tuple(
        torch.zeros(size, dtype=dtype, device=device)
        for size, dtype in zip(fmt.part_sizes(math.prod(shape)), fmt.parts.values(), strict=True)
    )
    return QuantizedState(fmt, parts, torch.Size(shape)) if isinstance(fmt, BlockFormat) else parts[0].view(shape)


def stored_parts(state: Tensor) -> Parts:
    """Return the flat stored tensors of a slot."""
    return state.parts if isinstance(state, QuantizedState) else (state.view(-1),)


def _float_format(dtype: torch.dtype, signed: bool) -> FloatFormat | None:
    formats = (get_format(name, signed) for name in FORMATS)
    return next((fmt for fmt in formats if isinstance(fmt, FloatFormat) and fmt.dtype == dtype), None)


def has_format(state: Tensor) -> bool:
    """Return whether a slot is stored in a known format."""
    return isinstance(state, QuantizedState) or _float_format(state.dtype, signed=True) is not None


def stored_format(state: Tensor, signed: bool) -> StateFormat:
    """Return the format that a slot is stored in.

    Raises:
        TypeError: a plain tensor of a dtype that no format has.
    """
    fmt = state.format if isinstance(state, QuantizedState) else _float_format(state.dtype, signed)
    if fmt is None:
        raise TypeError(f"optimizer state of dtype {state.dtype} has no format")
    return fmt


def decoded(state: Tensor) -> Tensor:
    """Return a slot's values as a plain fp32 tensor."""
    return (state.dequantize() if isinstance(state, QuantizedState) else state).float()


# Operations that keep the codes ------------------------------------------------------------------------------------

_OPS: dict[Any, Callable[..., Any]] = {}


_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def _op(*overloads: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _OPS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


@_op(aten.detach.default, aten.alias.default)
def _same(state: QuantizedState) -> QuantizedState:
    return state._with_parts(lambda part: part)


@_op(aten.clone.default)
def _clone(state: QuantizedState, memory_format: Any = None) -> QuantizedState:
    return state._with_parts(torch.clone)


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
    return state._with_parts(lambda part: part.to(target, non_blocking=non_blocking, copy=True), dtype)


@_op(aten._pin_memory.default)
def _pin_memory(state: QuantizedState, device: Any = None) -> QuantizedState:
    return state._with_parts(lambda part: part.pin_memory())


@_op(aten.is_pinned.default)
def _is_pinned(state: QuantizedState, device: Any = None) -> bool:
    return all(part.is_pinned() for part in state.parts)


@_op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(state: QuantizedState, shape: list[int]) -> QuantizedState:
    known = -math.prod(shape) if -1 in shape else 1
    shape = [state.numel() // known if size == -1 else size for size in shape]
    if math.prod(shape) != state.numel():
        raise RuntimeError(f"shape {shape} is invalid for a state of {state.numel()} elements")
    return QuantizedState(state.format, state.parts, torch.Size(shape), state.dtype)


@_op(aten.view.dtype)
def _view_dtype(state: QuantizedState, dtype: torch.dtype) -> QuantizedState:
    return state._with_parts(lambda part: part, dtype)


@_op(aten.slice.Tensor)
def _slice(
    state: QuantizedState, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Slice exactly where the cut falls between blocks; elsewhere return decoded values."""
    dim = dim % state.dim()
    size = state.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    inner, outer = math.prod(state.shape[dim + 1 :]), math.prod(state.shape[:dim])
    block, run = state.format.block, size * inner
    first, last = start * inner, max(end, start) * inner
    ragged_end = outer == 1 and last == run
    aligned = first % block == 0 and (last % block == 0 or ragged_end) and (run % block == 0 or outer == 1)
    if step != 1 or not aligned:
        return state.dequantize()[(slice(None),) * dim + (slice(start, end, step),)]
    blocks = [-(-count // block) for count in (run, first, last)]
    shape = (*state.shape[:dim], max(end - start, 0), *state.shape[dim + 1 :])

    def cut(part: Tensor) -> Tensor:
        return part.view(outer, blocks[0], -1)[:, blocks[1] : blocks[2]].reshape(-1)

    return QuantizedState(state.format, tuple(map(cut, state.parts)), torch.Size(shape), state.dtype)


@_op(aten.split.Tensor, aten.split_with_sizes.default)
def _split(state: QuantizedState, sizes: int | list[int], dim: int = 0) -> list[Tensor]:
    total = state.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, max(total, 1), sizes)]
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [_slice(state, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@_op(aten.new_zeros.default)
def _new_zeros(state: QuantizedState, size: list[int], **options: Any) -> Tensor:
    dtype, device = options.get("dtype") or state.dtype, options.get("device") or state.device
    if not dtype.is_floating_point:
        return torch.zeros(size, dtype=dtype, device=device)
    zeros = zeros_state(state.format.name, state.format.signed, tuple(size), device)
    assert isinstance(zeros, QuantizedState)
    return zeros._with_parts(lambda part: part, dtype)


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
    if isinstance(source, QuantizedState) and source.format == target.format:
        parts = source.parts
    else:
        parts = encode_flat(target.format, decoded(source))
    for old, new in zip(target.parts, parts, strict=True):
        old.copy_(new, non_blocking)
    return target


def encode_flat(fmt: BlockFormat, values: Tensor) -> Parts:
    """Encode values of any shape, rounding to nearest; the last block is padded with zeros."""
    flat = values.reshape(-1).float()
    return fmt.encode(torch.nn.functional.pad(flat, (0, -flat.numel() % fmt.block)), None)


@_op(aten.equal.default)
def _equal(left: Tensor, right: Tensor) -> bool:
    if isinstance(left, QuantizedState) and isinstance(right, QuantizedState) and left.format == right.format:
        return left.shape == right.shape and all(map(torch.equal, left.parts, right.parts))
    return torch.equal(decoded(left), decoded(right))


torch.serialization.add_safe_globals([rebuild_state, QuantizedState])
