"""The reference step as a graph: what it does to a row of blocks, recorded while it runs on an example.

Every tensor of a step is, in its memory's order, a sequence of rows of the same few blocks, and no operation moves a
value from one row to another. So a graph of values as wide as a row says all that there is to say of a step, whatever
the rule, the formats and the mode are: code for one row is code for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .step import Signature, reference_step

# Elements of a row, and as many as make whole blocks: with several blocks, what is one number for a block is a vector
# too, and the waits for one block's reduction are spent on the others. Without blocks there is nothing to wait for.
_TILE, _PLAIN_TILE = 256, 64
#: Rows of the example: enough to see that no operation mixes them.
_ROWS = 3


class UnsupportedOp(Exception):
    """The step does something that has no form as straight loops over blocks."""


@dataclass(frozen=True, eq=False)
class Value:
    """One result in the graph.

    Attributes:
        op: aten's name of the operation, or one of "input", "element", "slice", "repeat", "cat", "bitcast", "amax".
        args: values and numbers it is made of.
        dtype: its dtype.
        width: elements in each row; 0 where it is one number for the whole span.
    """

    op: str
    args: tuple[Any, ...]
    dtype: torch.dtype
    width: int

    @property
    def inputs(self) -> list[Value]:
        """The values among the arguments."""
        return [arg for arg in self.args if isinstance(arg, Value)]


@dataclass(frozen=True)
class Operand:
    """A tensor of `Operands` as the graph sees it.

    Attributes:
        value: what it holds before the step.
        unit: elements of the weight that share what is stored together.
        per_unit: stored elements for each unit.
    """

    value: Value
    unit: int
    per_unit: int


@dataclass(frozen=True)
class Graph:
    """A traced step: its operands in the order of `Operands.tensors`, and (operand, new value) of those it changes."""

    width: int
    operands: tuple[Operand, ...]
    stores: tuple[tuple[int, Value], ...]


_VIEWS = {"view", "_unsafe_view", "slice", "select", "expand", "squeeze", "unsqueeze", "detach", "alias", "clone"}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations as values; equal operations on equal arguments are one value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stores: dict[Value, Value] = {}
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []
        self._known: dict[tuple[Any, ...], Value] = {}

    def make(self, op: str, args: Sequence[Any], dtype: torch.dtype, width: int) -> Value:
        key = op, tuple((type(arg), repr(arg)) if isinstance(arg, float) else arg for arg in args), dtype, width
        return self._known.setdefault(key, Value(op, tuple(args), dtype, width))

    def bind(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)  # or its id would be used again

    def value(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._values:
            raise UnsupportedOp("a tensor that is neither an operand nor made of operands")
        return self._values[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._note(func, args, kwargs or {}, result)
        except UnsupportedOp as error:
            raise UnsupportedOp(f"{func}: {error}") from None
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
        if name == "copy_":
            old, new = self.value(args[0]), self._cast(self._lanes(args[1], args[0].shape), args[0].dtype)
            if old.op != "input" or old.width != new.width:
                raise UnsupportedOp("it writes something that is no operand, or one number to many elements")
            self.stores[old] = new
        elif name == "unbind":
            for place, piece in enumerate(result):
                self.bind(piece, self._element(args[0], place))
        elif name.endswith("_") and not name.endswith("__"):
            raise UnsupportedOp("it changes a tensor in place")
        elif not isinstance(result, Tensor):
            raise UnsupportedOp("its result is no tensor")
        else:
            self.bind(result, self._record(name, overload, func, args, kwargs, result))

    def _record(
        self, name: str, overload: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Value:
        if name == "arange" and args == (result.numel(),) and result.dtype == torch.int32:
            return self.make("arange", (), result.dtype, self._width(result))
        if name in ("scalar_tensor", "full", "zeros_like", "ones_like", "full_like", "zeros", "ones"):
            number = {"scalar_tensor": args[0], "ones_like": 1, "ones": 1}.get(name, 0)
            number = args[1] if name.startswith("full") else number
            return self._cast(self.make("number", (number,), result.dtype, 0), result.dtype)
        if name == "view" and overload == "dtype":
            return self.make("bitcast", (self.value(args[0]),), result.dtype, self._width(result))
        if name == "_to_copy":
            return self._cast(self.value(args[0]), result.dtype)
        if name == "select" and self.value(args[0]).op == "vector":
            return self._element(args[0], args[2])
        if name in _VIEWS:
            ids = func(_ids(args[0]), *args[1:], **kwargs)
            return self._relane(self.value(args[0]), ids)
        if name == "cat":
            return self._cat(args, result)
        if name == "amax":
            return self._amax(args, result)
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode"):
            raise UnsupportedOp(f"it has the options {kwargs}")
        if any(isinstance(arg, Tensor) and arg.numel() > result.numel() for arg in args):
            raise UnsupportedOp("a reduction")
        parts = [self._lanes(arg, result.shape) if isinstance(arg, Tensor) else arg for arg in args]
        if not all(part is None or isinstance(part, (Value, int, float)) for part in parts):
            raise UnsupportedOp("it is not elementwise")
        return self.make(name, parts, result.dtype, self._width(result))

    @staticmethod
    def _width(tensor: Tensor) -> int:
        if tensor.ndim == 0:
            return 0
        if tensor.numel() % _ROWS:
            raise UnsupportedOp(f"a tensor of shape {tuple(tensor.shape)}, which is not made of rows")
        return tensor.numel() // _ROWS

    def _cast(self, value: Value, dtype: torch.dtype) -> Value:
        return value if value.dtype == dtype else self.make("cast", (value,), dtype, value.width)

    def _element(self, vector: Tensor, place: int) -> Value:
        value = self.value(vector)
        return self.make("element", (value.args[0], place), value.dtype, 0)

    def _lanes(self, tensor: Tensor, shape: torch.Size) -> Value:
        """The value of a tensor, broadcast to `shape` where each row has a number of its own for parts of it."""
        value = self.value(tensor)
        if value.op == "vector":
            raise UnsupportedOp("arithmetic on the vector of scalars, the clock or the keys as a whole")
        if value.width == 0 or tensor.shape == shape:
            return value
        return self._relane(value, _ids(tensor).expand(shape))

    def _relane(self, value: Value, ids: Tensor) -> Value:
        """A value whose elements are those of `value` that `ids` names, by their place in its tensor."""
        if value.width == 0:
            return value
        lanes = _lanes_of(ids, value.width)
        width, first = len(lanes), lanes[0]
        if lanes == list(range(value.width)) or value.width == 1:
            return value
        # Runs of neighbours, evenly spaced, as the first halves of all blocks are.
        run = next((place for place in range(1, width) if lanes[place] != first + place), width)
        stride = lanes[run] - first if run < width else run
        if run > 1 and lanes == [first + place // run * stride + place % run for place in range(width)]:
            return self.make("slice", (value, first, run, stride), value.dtype, width)
        if width % value.width == 0 and lanes == [lane // (width // value.width) for lane in range(width)]:
            return self.make("repeat", (value,), value.dtype, width)
        raise UnsupportedOp("a view that reorders the elements of a block")

    def _cat(self, args: tuple[Any, ...], result: Tensor) -> Value:
        # Every row must have the same number of runs of each piece in turn, as two halves make each block.
        values = [self.value(piece) for piece in args[0]]
        total = sum(value.width for value in values)
        marked = [_ids(piece) % value.width for piece, value in zip(args[0], values, strict=True)]
        marked = [lanes + place * total for place, lanes in enumerate(marked)]
        found = torch.cat(marked, *args[1:]).flatten().tolist()
        runs = sum(left // total != right // total for left, right in itertools.pairwise(found[:total])) + 1
        times = max(1, runs // len(values))
        wanted = [
            place * total + turn * (value.width // times) + lane
            for turn in range(times)
            for place, value in enumerate(values)
            for lane in range(value.width // times)
        ]
        if found != wanted * _ROWS:
            raise UnsupportedOp("its pieces are not parts of a block")
        return self.make("cat", (times, *values), result.dtype, total)

    def _amax(self, args: tuple[Any, ...], result: Tensor) -> Value:
        tensor, dims = args[0], args[1] if len(args) > 1 else []
        if [dim % tensor.ndim for dim in dims] != [tensor.ndim - 1] or tensor.dtype != torch.float32:
            raise UnsupportedOp("it is not over the last dimension, of fp32")
        return self.make("amax", (self.value(tensor),), result.dtype, self._width(result))


def _ids(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel()).view(tensor.shape)


def _lanes_of(ids: Tensor, width: int) -> list[int]:
    """Which element of its row each element of a row comes from."""
    if ids.numel() % _ROWS:
        raise UnsupportedOp(f"elements of shape {tuple(ids.shape)}, which are not the same in all rows")
    rows = ids.reshape(_ROWS, -1)
    lanes = rows - torch.arange(_ROWS).view(-1, 1) * width
    if not bool(((lanes == lanes[:1]) & (lanes >= 0) & (lanes < width)).all()):
        raise UnsupportedOp("a view that moves elements from one block to another")
    return [int(lane) for lane in lanes[0]]


@torch.no_grad()
def trace(sig: Signature) -> Graph:
    """Return the graph of a signature's reference step.

    Raises:
        UnsupportedOp: the rule, a format or the mode does something that no block on its own can do.
    """
    width = sig.block * max(1, _TILE // sig.block) if sig.block > 1 else _PLAIN_TILE
    weight, grad, parts, extras, scalars, clock, keys, proceed = sig.example(_ROWS * width)
    recorder = _Recorder()
    units = [(1, 1), (1, 1)]
    for fmt in sig.formats:
        units += [(fmt.block, per_unit) for per_unit in fmt.part_sizes(fmt.block)]
    units += [(1, 1)] * len(extras)
    tensors = [weight, grad, *(part for stored in parts for part in stored), *extras]
    operands = []
    for place, (tensor, unit) in enumerate(zip(tensors, units, strict=True)):
        value = recorder.make("input", (place,), tensor.dtype, recorder._width(tensor))
        recorder.bind(tensor, value)
        operands.append(Operand(value, *unit))
    for name, tensor in {"scalars": scalars, "clock": clock, "keys": keys}.items():
        recorder.bind(tensor, recorder.make("vector", (name,), tensor.dtype, 0))
    if proceed is not None:
        recorder.bind(proceed, recorder.make("element", ("proceed", 0), torch.bool, 0))
    with recorder:
        reference_step(sig, weight, grad, parts, extras, scalars, clock, keys, proceed)
    stores = [(int(old.args[0]), new) for old, new in recorder.stores.items()]
    return Graph(width, tuple(operands), tuple(stores))
