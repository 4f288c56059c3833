"""The host's side of a step: keeps tables, and launches one kernel for all parameters of a signature."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .formats import Format
from .registry import DTYPES
from .step import step_0, step_1, step_2, step_3
from .table import Cut, Item, Table
from .weights import Mode

_TEMPLATES = (step_0, step_1, step_2, step_3)
#: Threads of a program.
_THREADS = 128


@dataclass(frozen=True)
class Variant:
    """Everything that a kernel is compiled for.

    Attributes:
        rule: device function.
        carry: device function of what the weight is given for the first slot, or None.
        mode: weight mode.
        formats: format of each slot.
        weight, grad: Triton dtypes of the weight and the gradient.
        strided: whether spans have gaps.
    """

    rule: Any
    carry: Any
    mode: Mode
    formats: tuple[Format, ...]
    weight: Any
    grad: Any
    strided: bool

    @property
    def kernel(self) -> Any:
        """The template of this number of slots."""
        return _TEMPLATES[len(self.formats)]

    @property
    def tile(self) -> int:
        """Elements of a program: as many codes for each thread as 16 bytes hold."""
        bits = min((fmt.bits for fmt in self.formats if fmt.block > 1), default=8)
        return _THREADS * 128 // bits

    def constants(self, aligned: bool) -> dict[str, Any]:
        """Return the template's compile-time arguments."""
        return {
            "RULE": self.rule,
            "CARRY": self.carry,
            "MODE": self.mode,
            "WEIGHT": self.weight,
            "GRAD": self.grad,
            "STRIDED": self.strided,
            "TILE": self.tile,
            "ALIGNED": aligned,
            **{f"FORMAT_{slot}": fmt for slot, fmt in enumerate(self.formats)},
        }


def options(warp_size: int) -> dict[str, Any]:
    """Return compiler options. Without fused multiply-adds, sums and products round as they do in torch."""
    return {"num_warps": _THREADS // warp_size, "enable_fp_fusion": False}


def _current_options() -> dict[str, Any]:
    if triton.knobs.runtime.interpret:
        return {}
    return options(triton.runtime.driver.active.get_current_target().warp_size)


def dtype_of(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    return DTYPES[dtype]


class Launcher:
    """Steps lists of parameters of one variant.

    A list's table lives as long as the keys of its first parameter, which belong to an optimizer, and so do the
    tables that a CUDA graph has captured.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._tables: weakref.WeakKeyDictionary[Any, Table] = weakref.WeakKeyDictionary()
        self._captured: weakref.WeakKeyDictionary[Any, list[Table]] = weakref.WeakKeyDictionary()

    def __call__(
        self,
        items: Sequence[Item],
        cut: Cut,
        scalars: Tensor,
        clock: Tensor,
        proceed: Tensor | None,
    ) -> None:
        """Step parameters in place.

        Args:
            items: (operands, keys) of each parameter, with the attributes of `lowbit_optim.step.Operands`; all on one
                device.
            cut: cuts a parameter into spans.
            scalars: fp32 vector in the order of the rule's scalars.
            clock: int32 of the dither's offset and the step's word.
            proceed: 0-d bool, False to leave everything as it is, or None.
        """
        items = [item for item in items if item[0].weight.numel()]
        if not items:
            return
        device = items[0][0].weight.device
        with _current(device):
            table = self._table(items, cut, device)
            for aligned, tiles in table.launches:
                self.variant.kernel[(len(tiles),)](
                    tiles,
                    table.rows,
                    table.grads,
                    scalars,
                    clock,
                    proceed,
                    **self.variant.constants(aligned),
                    **_current_options(),
                )

    def compile(self, guarded: bool) -> None:
        """Compile the kernel of aligned spans for the current device, without a launch; interpreters do not compile."""
        if triton.knobs.runtime.interpret:
            return
        pointers = torch.int32, torch.int64, torch.int64, torch.float32, torch.int32, torch.bool if guarded else None
        self.variant.kernel.warmup(*pointers, grid=(1,), **self.variant.constants(True), **_current_options())

    def _table(self, items: Sequence[Item], cut: Cut, device: torch.device) -> Table:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        owner = items[0][1]
        # What a graph has captured is its own from then on: later steps get another table.
        table = self._tables.pop(owner, None)
        if table is None or not table.matches(items):
            table = Table(items, cut, self.variant.tile, device)
        table.follow(items, capturing)
        if capturing:
            self._captured.setdefault(owner, []).append(table)
        else:
            self._tables[owner] = table
        return table


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which launches go to `device`."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return guard
