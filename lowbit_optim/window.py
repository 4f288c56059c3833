"""Slices of quantized state that do not fall between blocks.

A checkpoint saved at one world size and loaded at another is read in pieces that need not hold whole blocks. A
`StateWindow` reads as the decoded values, and what is copied into it reaches the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class UnfinishedBlocks:
    """What has been written to blocks that are not complete yet, in fp32."""

    def __init__(self) -> None:
        self._blocks = torch.empty(0, dtype=torch.int64)
        self._rows = torch.empty(0)
        self._stored: tuple[Tensor, ...] = ()

    def take(self, blocks: Tensor, stored: tuple[Tensor, ...], block: int) -> Tensor:
        """Return a row of `block` values for each of `blocks` (sorted), NaN where nothing was written yet.

        Rows of a block that has been stored anew since are forgotten.
        """
        rows = torch.full((blocks.numel(), block), torch.nan, device=blocks.device)
        if self._blocks.numel():
            place = torch.searchsorted(self._blocks, blocks).clamp_max(self._blocks.numel() - 1)
            known = self._blocks[place] == blocks
            for old, now in zip(self._stored, stored, strict=True):
                known &= (old[place] == now).all(dim=1)
            rows = torch.where(known[:, None], self._rows[place], rows)
        return rows

    def keep(self, blocks: Tensor, rows: Tensor, stored: tuple[Tensor, ...]) -> None:
        """Remember those rows that still lack values."""
        other = ~torch.isin(self._blocks, blocks) if self._blocks.numel() else torch.empty(0, dtype=torch.bool)
        lacking = rows.isnan().any(dim=1)
        if not lacking.any() and not other.any():
            self._blocks, self._rows, self._stored = self._blocks[:0], self._rows[:0], ()
            return
        kept = torch.cat([self._blocks[other].to(blocks.device), blocks[lacking]])
        order = kept.argsort()

        def merge(old: Tensor, new: Tensor) -> Tensor:
            return torch.cat([old[other], new[lacking]])[order] if old.numel() else new[lacking]

        self._rows = merge(self._rows, rows)
        old_stored = self._stored or tuple(new[:0] for new in stored)
        self._stored = tuple(merge(old, new) for old, new in zip(old_stored, stored, strict=True))
        self._blocks = kept[order]


def format_behind(values: Tensor) -> Any:
    """Return the format of a quantized state, or of the one that a window shows; None of plain values."""
    return getattr(getattr(values, "state", values), "format", None)


def holds_ratio(values: Tensor) -> bool:
    """Return whether the values of a quantized state, or of a window of one, are ratios (`rules.by_ratio`)."""
    fmt = format_behind(values)
    return fmt is not None and bool(fmt.ratio)


class StateWindow(Tensor):
    """A box of a quantized state: reads decode it, `copy_`, `zero_` and `fill_` write through to it.

    Args:
        state: the `QuantizedState`.
        box: for each dimension, the indices that belong to the window.
    """

    state: Any
    box: tuple[range, ...]

    @staticmethod
    def __new__(cls, state: Any, box: tuple[range, ...]) -> StateWindow:
        """Make a view; nothing is decoded yet."""
        shape = tuple(map(len, box))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=state.dtype, device=state.device)

    def __init__(self, state: Any, box: tuple[range, ...]) -> None:
        self.state = state
        self.box = box

    def dequantize(self) -> Tensor:
        """Return the decoded values as a plain tensor."""
        values: Tensor = self.state.dequantize()
        return values[tuple(slice(place.start, place.stop, place.step) for place in self.box)]

    def _index(self) -> Tensor:
        """Return the flat index of each element, in order."""
        index = torch.zeros((), dtype=torch.int64, device=self.device)
        for size, places in zip(self.state.shape, self.box, strict=True):
            steps = torch.tensor(list(places), dtype=torch.int64, device=self.device)
            index = index[..., None] * size + steps
        return index.reshape(-1)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StateWindow({self.state.spec}, {self.dequantize()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.state.marked(self.dequantize()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self.state.marked(self.dequantize().clone()))
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled implementation's signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Write through, narrow further, or work on the decoded values."""
        window = args[0] if args else None
        if isinstance(window, StateWindow):
            if func in (aten.detach.default, aten.alias.default):
                return StateWindow(window.state, window.box)
            if func is aten.slice.Tensor:
                return window._slice(*args[1:])
            if func in (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
                window._write(args[1] if len(args) > 1 else 0.0)
                return window
            if func._schema.is_mutable:
                raise NotImplementedError(f"a window of quantized state cannot be changed by {func}; use copy_")
        decode = StateWindow.dequantize
        result = func(*tree_map_only(cls, decode, args), **tree_map_only(cls, decode, kwargs or {}))
        if func is aten.cat.default and all(map(holds_ratio, args[0])):
            result = next(piece for piece in args[0] if isinstance(piece, cls)).state.marked(result)
        return result

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> StateWindow:
        dim = dim % self.dim()
        return StateWindow(self.state, (*self.box[:dim], self.box[dim][start:end:step], *self.box[dim + 1 :]))

    def _write(self, source: Any) -> None:
        values = torch.as_tensor(source, device=self.device)
        if values.dim() and values.shape != self.shape:
            raise RuntimeError(f"cannot copy a tensor of shape {tuple(values.shape)} into one of {tuple(self.shape)}")
        if isinstance(source, Tensor):
            self.state.become(source)
        if isinstance(values, (StateWindow, type(self.state))):
            values = values.dequantize()
        self.state.write(self._index(), values.expand(self.shape).reshape(-1))
