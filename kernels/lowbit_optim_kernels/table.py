"""The table by which one launch steps many parameters.

A parameter is cut into *spans* that one set of noise words serves, and a ragged end is a span of its own. A span is a
row of int64. A program finds its row and its tile in a list of int32 pairs. The gradients' addresses, which may
change from step to step, are a vector of their own. Spans whose addresses allow accesses of 16 bytes, in whole
blocks, go into one launch, all others into a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

#: Elements of the span.
NUMEL: tl.constexpr = tl.constexpr(0)
#: Addresses of the weight and of the mode's extra tensors.
WEIGHT: tl.constexpr = tl.constexpr(1)
EXTRA: tl.constexpr = tl.constexpr(2)
EXTRA_LOW: tl.constexpr = tl.constexpr(3)
#: Four words that count the elements: counter of column 0, first column, elements of a row, spacing of rows.
FIRST: tl.constexpr = tl.constexpr(4)
COLUMN: tl.constexpr = tl.constexpr(5)
RUN: tl.constexpr = tl.constexpr(6)
STRIDE: tl.constexpr = tl.constexpr(7)
#: Two words each that key the noise of the weight and of its view.
WEIGHT_KEY: tl.constexpr = tl.constexpr(8)
VIEW_KEY: tl.constexpr = tl.constexpr(10)
#: The first slot; in each slot, addresses of codes (or plain values) and scales, and the two words of its noise.
SLOTS: tl.constexpr = tl.constexpr(12)
CODES: tl.constexpr = tl.constexpr(0)
SCALE: tl.constexpr = tl.constexpr(1)
KEY: tl.constexpr = tl.constexpr(2)
SLOT_WIDTH: tl.constexpr = tl.constexpr(4)

#: Spans are at most this long, so that 32-bit integers count their elements.
LONGEST_SPAN = 1 << 30
#: Elements that aligned spans hold a multiple of.
GRANULE = 32

#: Cuts a parameter: (operands, keys) -> (first element, operands of the span, noise words) of each span.
Cut = Callable[[Any, Any], Iterable[tuple[int, Any, list[int]]]]
#: (operands, keys) of a parameter, with the attributes of `lowbit_optim.step.Operands`.
Item = tuple[Any, Any]


def _addresses(operands: Any) -> tuple[int, ...]:
    """Return length and addresses of everything but the gradient."""
    kept = [operands.weight, *(part for parts in operands.parts for part in parts), *operands.extras]
    return (operands.weight.numel(), *(tensor.data_ptr() for tensor in kept))


def _pad(values: list[int], width: int) -> list[int]:
    return values + [0] * (width - len(values))


def _row(span: Any, words: list[int]) -> list[int]:
    """Return the row of one span, in the places above."""
    region, weight_keys, slot_keys = words[:4], words[4:8], words[8:]
    row = [span.weight.numel(), span.weight.data_ptr()]
    row += _pad([extra.data_ptr() for extra in span.extras], 2) + region + weight_keys
    for slot, parts in enumerate(span.parts):
        row += _pad([part.data_ptr() for part in parts], 2) + slot_keys[2 * slot : 2 * slot + 2]
    return row


def _is_aligned(span: Any) -> bool:
    """Whether a span is whole granules that lie at multiples of 16 bytes; scales are read one by one."""
    wide = [span.weight, span.grad, *span.extras, *(parts[0] for parts in span.parts)]
    return span.weight.numel() % GRANULE == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in wide)


class Table:
    """Rows, gradient addresses and tiles of a list of parameters, on their device.

    Args:
        items: (operands, keys) of each parameter.
        cut: cuts a parameter into spans.
        tile: elements of a tile.
        device: where the parameters lie.
    """

    def __init__(self, items: Sequence[Item], cut: Cut, tile: int, device: torch.device) -> None:
        self._device = device
        self._identity, self._alignment = self._identity_of(items), self._alignment_of(items)
        # An id is a key only as long as its object lives. The first keys own the table, so it must not own them.
        self._keys = [keys for _, keys in items[1:]]
        rows, sources, offsets, aligned = [], [], [], []
        for place, (operands, keys) in enumerate(items):
            for start, span, words in cut(operands, keys):
                rows.append(_row(span, words))
                sources.append(place)
                offsets.append(start * operands.grad.element_size())
                aligned.append(_is_aligned(span))
        self._sources, self._offsets = torch.tensor(sources), torch.tensor(offsets)
        # Captured copies are replayed from these, so nobody may write them again.
        self._host: list[Tensor] = []
        self.rows = self._upload(torch.tensor(rows))
        self._bases = self._bases_of(items)
        self.grads = self._upload(self._grads())
        self._spare = self._pinned(torch.zeros_like(self._offsets))
        self.launches = [
            (kind, self._upload(self._tiles([place for place, flag in enumerate(aligned) if flag == kind], rows, tile)))
            for kind in (True, False)
            if kind in aligned
        ]

    def _pinned(self, host: Tensor) -> Tensor:
        """Return a copy on the host from which the device can read without a wait."""
        return host.clone() if self._device.type == "cpu" else host.pin_memory()

    def _upload(self, host: Tensor) -> Tensor:
        self._host.append(self._pinned(host))
        return self._host[-1].to(self._device, non_blocking=True)

    @staticmethod
    def _tiles(spans: list[int], rows: list[list[int]], tile: int) -> Tensor:
        """Return (row, tile of its span) of each program, int32 of shape (programs, 2)."""
        counts = torch.tensor([-(-rows[span][0] // tile) for span in spans])
        row = torch.repeat_interleave(torch.tensor(spans), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return torch.stack([row, torch.arange(len(row)) - first], dim=1).int()

    @staticmethod
    def _identity_of(items: Sequence[Item]) -> list[tuple[int, ...]]:
        return [(id(keys), *_addresses(operands)) for operands, keys in items]

    @staticmethod
    def _alignment_of(items: Sequence[Item]) -> list[bool]:
        return [operands.grad.data_ptr() % 16 == 0 for operands, _ in items]

    @staticmethod
    def _bases_of(items: Sequence[Item]) -> list[int]:
        return [operands.grad.data_ptr() for operands, _ in items]

    def _grads(self) -> Tensor:
        """Return the address of each span's gradient."""
        return torch.tensor(self._bases)[self._sources] + self._offsets

    def matches(self, items: Sequence[Item]) -> bool:
        """Whether the table is one of these parameters, wherever their gradients are."""
        return self._identity == self._identity_of(items) and self._alignment == self._alignment_of(items)

    def follow(self, items: Sequence[Item], capturing: bool) -> None:
        """Bring the gradients' addresses up to date, in one small copy if any moved."""
        bases = self._bases_of(items)
        if bases != self._bases:
            self._bases = bases
            # Page-locking memory is not allowed in a capture. Elsewhere the last copy may still be reading.
            host = self._spare.copy_(self._grads()) if capturing else self._pinned(self._grads())
            self.grads.copy_(host, non_blocking=True)
