"""C++ expressions for the operations of a traced step, on numbers and on vectors alike.

Each means what torch's operation means, to the bit: fp32 arithmetic without contraction, 32-bit integers that wrap,
conversions to 16 bits that round to nearest even, NaN through minimum, maximum and clamping. `prelude.h` has the
functions that they call.
"""

from __future__ import annotations

import torch

from .trace import UnsupportedOp, Value

F32, I32, BOOL = torch.float32, torch.int32, torch.bool
BF16, FP16 = torch.bfloat16, torch.float16

#: The C++ type in which a tensor stores a dtype.
STORED = {
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
}
#: The type that holds a number of a dtype in between: small integers widened, 16-bit floats as their bits, truth as -1.
HELD = dict.fromkeys((*STORED, torch.bool), "int32_t") | {torch.float32: "float"}


def number(value: float, dtype: torch.dtype) -> str:
    """The C++ of a constant."""
    if dtype == BOOL:
        return "int32_t(-1)" if value else "int32_t(0)"
    if dtype == I32:
        return f"int32_t({int(value) & 0xFFFFFFFF:#x})"
    single = torch.tensor(float(value), dtype=F32)
    if single.isfinite():
        return f"{float(single).hex()}f"
    return f"from_bits({number(int(single.view(I32)), I32)})"


def _convert(expression: str, old: torch.dtype, new: torch.dtype) -> str:
    """The C++ that converts what holds a value of one dtype into what holds it in another."""
    if old == new:
        return expression
    if old in (BF16, FP16):
        return _convert(f"from_{'bf16' if old == BF16 else 'fp16'}({expression})", F32, new)
    if new in (BF16, FP16):
        return f"to_{'bf16' if new == BF16 else 'fp16'}({_convert(expression, old, F32)})"
    if new == BOOL:
        return f"mask({expression} != 0)"
    if new == F32:
        return f"number({_convert(expression, old, I32)})"
    held = f"whole({expression})" if old == F32 else f"(-{expression})" if old == BOOL else expression
    if old == torch.uint8:
        return f"({held} & 0xFF)"
    # What is narrow is cut to its width only when it is stored or read again.
    unused = {torch.int8: 24, torch.int16: 16}.get(old, 0)
    return f"(shift_left({held}, {unused}) >> {unused})" if unused else held


_NUMBER = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "rsub": "({1} - {0})",
    "mul": "({0} * {1})",
    "neg": "(-{0})",
    "clamp_min": "at_least({0}, {1})",
    "clamp_max": "at_most({0}, {1})",
}
_LOGIC = {
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "bitwise_not": "(~{0})",
}
_OPS = {
    F32: {
        **_NUMBER,
        "sqrt": "square_root({0})",
        "rsqrt": "(1.0f / square_root({0}))",
        "reciprocal": "(1.0f / {0})",
        "floor": "floor_of({0})",
        "ceil": "ceiling_of({0})",
        "trunc": "truncated({0})",
        "round": "rounded({0})",
        "div": "({0} / {1})",
        "sign": "number(mask({0} < 0.0f) - mask({0} > 0.0f))",
        "abs": "from_bits(bits({0}) & 0x7FFFFFFF)",
        "copysign": "from_bits((bits({0}) & 0x7FFFFFFF) | (bits({1}) & int32_t(0x80000000)))",
        "maximum": "pick(mask({0} > {1}) | mask({0} != {0}), {0}, {1})",
        "minimum": "pick(mask({0} < {1}) | mask({0} != {0}), {0}, {1})",
    },
    I32: {
        **_NUMBER,
        **_LOGIC,
        "bitwise_left_shift": "shift_left({0}, {1})",
        "bitwise_right_shift": "({0} >> {1})",
        "sign": "(mask({0} < 0) - mask({0} > 0))",
        "abs": "pick(mask({0} < 0), -{0}, {0})",
        "maximum": "pick(mask({0} > {1}), {0}, {1})",
        "minimum": "pick(mask({0} < {1}), {0}, {1})",
        "floor_divide": "divided({0}, {1})",
    },
    BOOL: {**_LOGIC, "mul": "({0} & {1})"},
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SAME = {
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "logical_and": "bitwise_and",
    "logical_or": "bitwise_or",
    "logical_not": "bitwise_not",
}


def _held_dtype(part: Value | int | float | None) -> torch.dtype:
    """The dtype of what holds an argument; small integers are whole where they come from memory."""
    if not isinstance(part, Value):
        return F32 if isinstance(part, float) else I32
    return I32 if part.op == "input" and part.dtype in (torch.uint8, torch.int8, torch.int16) else part.dtype


def operation(value: Value, args: list[str]) -> str:
    """Return the C++ of an elementwise operation.

    Args:
        value: the operation's result.
        args: expressions that hold its arguments; what stands for a number does not matter.

    Raises:
        UnsupportedOp: there is no C++ for it here; the message names it.
    """
    dtypes = [_held_dtype(part) for part in value.args]
    name, dtype = _SAME.get(value.op, value.op), value.dtype

    def constant(part: float, to: torch.dtype) -> str:
        text = number(part, to)
        return f"all({text})" if value.width > 1 else text

    def converted(to: torch.dtype) -> list[str]:
        return [
            constant(part, to) if isinstance(part, (int, float)) else _convert(args[place], dtypes[place], to)
            for place, part in enumerate(value.args)
        ]

    if name == "cast":
        return _convert(args[0], dtypes[0], dtype)
    if name == "bf16":
        return f"to_bf16({', '.join(args)})"
    if name == "logical_shift":
        return f"shift_right({args[0]}, {value.args[1]})"
    if name == "bitcast" and {dtypes[0], dtype} == {F32, I32}:
        return f"{'bits' if dtype == I32 else 'from_bits'}({args[0]})"
    if name == "where":
        return "pick({}, {}, {})".format(args[0], *converted(dtype)[1:])
    if name in _COMPARE:
        left, right = converted(F32 if F32 in dtypes else I32)
        return f"mask({left} {_COMPARE[name]} {right})"
    if name == "pow" and dtype == F32 and value.args[1] == 2:
        return "({0} * {0})".format(converted(F32)[0])
    if name == "clamp" and dtype in (F32, I32):
        result = converted(dtype)[0]
        for op, end in zip(("clamp_min", "clamp_max"), value.args[1:], strict=False):
            result = result if end is None else _NUMBER[op].format(result, constant(end, dtype))
        return result
    if name.endswith("shift") and isinstance(value.args[1], int) and dtype == I32:
        return _OPS[I32][name].format(args[0], value.args[1])
    if name not in _OPS.get(dtype, {}) or name.endswith("shift") or (name in _LOGIC and set(dtypes) != {dtype}):
        raise UnsupportedOp(f"aten.{value.op} of {', '.join(map(str, dtypes))}")
    return _OPS[dtype][name].format(*converted(dtype))
