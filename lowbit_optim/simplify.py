"""Rewrites of a traced graph that save instructions and leave every bit of the result as it is."""

from __future__ import annotations

import torch

from .noise import LARGEST
from .trace import Graph, Value


def simplify(graph: Graph) -> Graph:
    """Return a graph that stores the same, with "logical_shift", "bf16" and "amax_number" where they fit."""
    rewritten: dict[Value, Value] = {}

    def rewrite(value: Value) -> Value:
        if value not in rewritten:
            args = tuple(rewrite(arg) if isinstance(arg, Value) else arg for arg in value.args)
            same = args == value.args
            rewritten[value] = _rewrite(value if same else Value(value.op, args, value.dtype, value.width))
        return rewritten[value]

    return Graph(graph.width, graph.operands, tuple((place, rewrite(value)) for place, value in graph.stores))


def _rewrite(value: Value) -> Value:
    if _is_logical_shift(value):
        return Value("logical_shift", value.args[0].args, value.dtype, value.width)
    if value.op == "cast" and value.dtype == torch.bfloat16 and _is_rounded_to_bf16(value.args[0]):
        return Value("bf16", value.args[0].args, value.dtype, value.width)
    if value.op == "amax" and _is_never_nan(value.args[0]):
        return Value("amax_number", value.args, value.dtype, value.width)
    return value


def _is_logical_shift(value: Value) -> bool:
    """An arithmetic shift, and then a mask that clears what it drew in from the left."""
    if value.op != "bitwise_and" or not isinstance(value.args[0], Value) or value.args[0].op != "__rshift__":
        return False
    bits = value.args[0].args[1]
    return isinstance(bits, int) and value.dtype == torch.int32 and value.args[1] == (1 << (32 - bits)) - 1


def _is_rounded_to_bf16(value: Value) -> bool:
    """What `noise.round_bits` returns for 16 dropped bits."""
    if value.op != "where" or not all(isinstance(part, Value) for part in value.args):
        return False
    finite, rounded, plain = value.args
    masked = rounded.args[0] if rounded.op == "bitcast" else None
    cut = isinstance(masked, Value) and masked.op == "bitwise_and" and masked.args[1] == -0x10000
    return cut and _is_finite_test(finite, plain) and finite.args[0].op == "abs"


def _is_finite_test(test: Value, value: Value) -> bool:
    """Whether `test` is false wherever `value` is NaN."""
    if test.op != "le" or test.args[1] != LARGEST:
        return False
    tested = test.args[0]
    return tested is value or (tested.op == "abs" and tested.args[0] is value)


def _is_never_nan(value: Value) -> bool:
    if value.op != "where":
        return False
    test, kept, other = value.args
    return _is_finite_test(test, kept) and other.op == "number" and other.args[0] == other.args[0]
