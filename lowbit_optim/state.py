"""`QuantizedState`: a tensor of a parameter's shape whose values are stored in a block format.

It exists for storage: `optimizer.state`, checkpoints, `.to()`, `repr`. Steps work on its plain parts. Operations that
only move or copy data keep the codes (`state_ops` has them); any other reads the decoded values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .formats import FORMATS, RATIOS, BlockFormat, FloatFormat, Parts, StateFormat, get_format, parse_spec
from .window import UnfinishedBlocks, format_behind


class QuantizedState(Tensor):
    """A read-mostly tensor view of stored codes and scales.

    Args:
        format: the block format.
        parts: its stored parts, for the flattened tensor with the last block padded: 1-D, or rows of whole blocks
            where the state is a slice that shares another's storage.
        shape: logical shape.
        dtype: dtype of decoded values; storage does not depend on it.
        origin: where the state is a slice of another, what `origin` returns.
    """

    parts: Parts

    @staticmethod
    def __new__(
        cls,
        format: BlockFormat,
        parts: Parts,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        origin: tuple[QuantizedState, tuple[range, ...]] | None = None,
    ) -> QuantizedState:
        """Wrap parts; they are not copied."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)

    def __init__(
        self,
        format: BlockFormat,
        parts: Parts,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        origin: tuple[QuantizedState, tuple[range, ...]] | None = None,
    ) -> None:
        # One cell for all tensors on one storage, so that all of them learn of a change.
        self._format: list[BlockFormat] = [format] if origin is None else origin[0]._format
        self.parts = tuple(parts)
        self._origin = origin
        self._unfinished = UnfinishedBlocks()

    @property
    def format(self) -> BlockFormat:
        """The block format; `become` may change its kind."""
        return self._format[0]

    @property
    def spec(self) -> str:
        """The format's spec string."""
        return self.format.spec

    def dequantize(self) -> Tensor:
        """Return the decoded values as a plain tensor of the state's shape and dtype."""
        flat = self.format.decode(self.flat_parts())
        return flat[: self.numel()].view(self.shape).to(self.dtype)

    @property
    def origin(self) -> tuple[QuantizedState, tuple[range, ...]]:
        """The state whose storage this one shares and, for each of its dimensions, which indices are here."""
        return self._origin or (self, tuple(map(range, self.shape)))

    def flat_parts(self) -> Parts:
        """Return the parts as 1-D tensors; copies where the state is a slice with gaps."""
        return tuple(part.reshape(-1) for part in self.parts)

    def become(self, source: Tensor) -> None:
        """Before values of another state, or a window of one, come in: take the kind of format that says what they are.

        There are two kinds of one size where a name has a format for ratios. A loader that writes another checkpoint's
        values into this storage knows of neither, and `load_state_dict`, which does, must find out. Plain values tell
        nothing and are taken as what is here already.
        """
        other = format_behind(source) or self.format
        if self.format.ratio != other.ratio and self.format.signed and self.format.name in RATIOS:
            fmt = get_format(self.format.name, signed=True, ratio=other.ratio)
            assert isinstance(fmt, BlockFormat)
            self._format[0] = fmt

    def marked(self, values: Tensor) -> Tensor:
        """Return decoded values of this state in a form that tells what they are: ratios in a state of their own."""
        if not self.format.ratio:
            return values
        return QuantizedState(self.format, encode_flat(self.format, values), values.shape, self.dtype)

    def write(self, index: Tensor, values: Tensor) -> None:
        """Write values at flat indices, distinct and in any order.

        A block is encoded once all its elements have been written, from what was written: filled piece by piece, it
        holds what it would hold if it had been written whole. Until then its other elements keep their values.
        """
        block = self.format.block
        touched, row = torch.unique(index // block, return_inverse=True)
        stored = [part.view(-1, width) for part, width in zip(self.parts, self._widths(), strict=True)]
        before = tuple(part[touched] for part in stored)
        rows = self._unfinished.take(touched, before, block)
        place = touched[:, None] * block + torch.arange(block, device=touched.device)
        rows[place >= self.numel()] = 0.0
        rows.view(-1)[row * block + index % block] = values.float().nan_to_num(0.0, 0.0, 0.0)
        current = self.format.decode(tuple(part.view(-1) for part in before)).view(-1, block)
        fresh = encode_flat(self.format, torch.where(rows.isnan(), current, rows))
        after = tuple(new.view(len(touched), -1) for new in fresh)
        for part, new in zip(stored, after, strict=True):
            part[touched] = new
        self._unfinished.keep(touched, rows, after)

    def _widths(self) -> tuple[int, ...]:
        """Entries of each part for one block."""
        return self.format.part_sizes(self.format.block)

    def __repr__(self) -> str:  # type: ignore[override]
        values = "..." if self.device.type == "meta" else self.dequantize()
        return f"QuantizedState({self.spec}, shape={tuple(self.shape)}, device={self.device}, {values})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The default reduction refuses a callable `map_location` (Lightning passes one); plain tensors accept any.
        return rebuild_state, (self.spec, self.flat_parts(), tuple(self.shape), self.dtype)

    def share_memory_(self) -> QuantizedState:
        """Move the parts to shared memory."""
        for part in self.parts:
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse: indexing decodes, so the values would land in a copy."""
        raise NotImplementedError("QuantizedState cannot be changed by indexing; use copy_, zero_ or fill_")

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedState:
        copied: QuantizedState = memo.setdefault(id(self), self.with_parts(torch.clone))
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

    def with_parts(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedState:
        """Return a state of this one's format and shape with changed copies of its flat parts."""
        return QuantizedState(self.format, tuple(map(change, self.flat_parts())), self.shape, dtype or self.dtype)

    def sharing(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None = None) -> QuantizedState:
        """Return a state of another shape or dtype on the same storage."""
        origin = self.origin if tuple(shape) == tuple(self.shape) else None
        shared = QuantizedState(self.format, self.parts, shape, dtype or self.dtype, origin)
        shared._format = self._format
        return shared

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled implementation's signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Use the table of `state_ops`; every other operation works on decoded values."""
        kwargs = kwargs or {}
        handler = OPS.get(func) or OPS.get(str(func))
        if handler is not None:
            return handler(*args, **kwargs)
        if func.namespace in OPS:
            return OPS[func.namespace](func, args, kwargs)
        if func._schema.is_mutable and _writes_to_state(func, args, kwargs):
            raise NotImplementedError(f"QuantizedState cannot be changed by {func}; use copy_, zero_ or fill_")
        return func(*tree_map_only(cls, cls.dequantize, args), **tree_map_only(cls, cls.dequantize, kwargs))


#: Operations that keep the codes, by overload, name or namespace, filled by `state_ops`.
OPS: dict[Any, Callable[..., Any]] = {}


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


def zeros_state(fmt: StateFormat, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """Return a slot of zeros in a format: a plain tensor for fp32 and bf16, else a `QuantizedState`."""
    parts = tuple(
        torch.zeros(size, dtype=dtype, device=device)
        for size, dtype in zip(fmt.part_sizes(math.prod(shape)), fmt.parts.values(), strict=True)
    )
    return QuantizedState(fmt, parts, torch.Size(shape)) if isinstance(fmt, BlockFormat) else parts[0].view(shape)


def stored_parts(state: Tensor) -> Parts:
    """Return the flat stored tensors of a slot."""
    return state.flat_parts() if isinstance(state, QuantizedState) else (state.view(-1),)


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


def encode_flat(fmt: BlockFormat, values: Tensor) -> Parts:
    """Encode values of any shape, rounding to nearest; the last block is padded with zeros.

    Values that the format held before, to fp32 rounding, are encoded without loss: if the largest of a block had been
    rounded down by one level when its scale was chosen, that scale is found again.
    """
    flat = values.reshape(-1).float()
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % fmt.block))
    parts = fmt.encode(flat, None)
    if flat.numel() == 0 or flat.device.type == "meta":
        return parts

    def lossless(stored: Parts) -> Tensor:
        return ((fmt.decode(stored) - flat).abs() <= 2.0**-20 * flat.abs()).view(-1, fmt.block).all(dim=1)

    lossy = ~lossless(parts)
    if lossy.any():
        larger = fmt.encode(flat, None, fmt.scale_above(flat))
        better = lossy & lossless(larger)
        parts = tuple(
            torch.where(better[:, None], new.view(better.numel(), -1), old.view(better.numel(), -1)).view(-1)
            for old, new in zip(parts, larger, strict=True)
        )
    return parts


torch.serialization.add_safe_globals([rebuild_state, QuantizedState])
