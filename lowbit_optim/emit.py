"""C++ source of a step: one function for the graph that `trace` recorded.

The code goes over blocks. What is one number for a whole span is computed once; what is one number for a block, once
for the block; all else in loops over the block's elements that have no branch, no call and only 4-byte types, which
compilers turn into vector instructions. Loops are split where a reduction or a move between elements needs all of a
block. Narrow types are widened in loops of their own: mixed widths would make the vectorizer unroll everything.

Each operation is written to mean what torch's means, to the bit: fp32 arithmetic without contraction, 32-bit integers
that wrap, conversions to 16 bits that round to nearest even, NaN through minimum, maximum and clamping.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from .simplify import simplify
from .trace import Graph, UnsupportedOp, Value

F32, I32, BOOL = torch.float32, torch.int32, torch.bool
BF16, FP16 = torch.bfloat16, torch.float16

_STORED = {
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
}
# 16-bit floats are held as their bits, small integers widened, and truth as 0 or 1: bools keep loops scalar.
_HELD = dict.fromkeys((*_STORED, torch.bool), "int32_t") | {torch.float32: "float"}

_PRELUDE = """\
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES @LANES@
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// Everything below serves single numbers and vectors alike. Truth is -1 and falsehood 0.
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Ints all(int32_t x) { return x - Ints{}; }
template <class To, class From> INLINE To same_bits(From x) { To y; memcpy(&y, &x, sizeof x); return y; }
INLINE int32_t bits(float x) { return same_bits<int32_t>(x); }
INLINE Ints bits(Floats x) { return same_bits<Ints>(x); }
INLINE float from_bits(int32_t x) { return same_bits<float>(x); }
INLINE Floats from_bits(Ints x) { return same_bits<Floats>(x); }
INLINE int32_t mask(bool x) { return -int32_t(x); }
INLINE Ints mask(Ints x) { return x; }
template <class T> INLINE T pick(int32_t c, T a, T b) { return c ? a : b; }
INLINE Floats pick(Ints c, Floats a, Floats b) { return c ? a : b; }
INLINE Ints pick(Ints c, Ints a, Ints b) { return c ? a : b; }
INLINE float number(int32_t x) { return float(x); }
INLINE Floats number(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE int32_t whole(float x) { return int32_t(x); }
INLINE Ints whole(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE int32_t shift_left(int32_t x, int n) { return int32_t(uint32_t(x) << n); }
INLINE Ints shift_left(Ints x, int n) { return x << n; }
INLINE int32_t shift_right(int32_t x, int n) { return int32_t(uint32_t(x) >> n); }
INLINE Ints shift_right(Ints x, int n) { return same_bits<Ints>(same_bits<Words>(x) >> n); }

#define EACH(name, Type, Vector, expression) \\
    INLINE Type name(Type x) { return expression; } \\
    INLINE Vector name(Vector x) { Vector y; for (int k = 0; k < LANES; ++k) y[k] = name(x[k]); return y; }
EACH(square_root, float, Floats, __builtin_sqrtf(x))
EACH(floor_of, float, Floats, __builtin_floorf(x))
EACH(ceiling_of, float, Floats, __builtin_ceilf(x))
EACH(truncated, float, Floats, __builtin_truncf(x))
EACH(rounded, float, Floats, __builtin_rintf(x))
// Exact: a quotient of 32-bit integers is further from the next integer than its rounding error in double precision.
INLINE int32_t divided(int32_t a, int32_t b) { return int32_t(__builtin_floor(double(a) / double(b))); }
INLINE Ints divided(Ints a, Ints b) { for (int k = 0; k < LANES; ++k) a[k] = divided(a[k], b[k]); return a; }

template <class I> INLINE auto from_bf16(I x) { return from_bits(shift_left(x, 16)); }
template <class F> INLINE auto to_bf16(F x) {
    const auto y = bits(x), nan = mask((y & 0x7FFFFFFF) > 0x7F800000);
    return (shift_right(y + 0x7FFF + (shift_right(y, 16) & 1), 16) & ~nan) | (nan & 0x7FC0);
}
template <class I> INLINE auto from_fp16(I x) {
    const auto rest = x & 0x7FFF;
    // The exponent moves by 112, and by as much again for infinities and NaN. Subnormal numbers are counts of 2^-24.
    const auto normal = (rest << 13) + (112 << 23) + (mask(rest >= 0x7C00) & (112 << 23));
    const auto value = pick(mask(rest < 0x400), bits(number(rest) * 0x1p-24f), normal);
    return from_bits(value | shift_left(x & 0x8000, 16));
}
template <class F> INLINE auto to_fp16(F x) {
    const auto rest = bits(x) & 0x7FFFFFFF, nan = mask(rest > 0x7F800000);
    const auto normal = (rest - (112 << 23) + 0xFFF + (rest >> 13 & 1)) >> 13, huge = mask(normal > 0x7C00);
    // Adding a half makes the sum's last bit worth 2^-24, the spacing of subnormal numbers.
    const auto subnormal = bits(from_bits(rest) + 0.5f) - (126 << 23);
    const auto finite = pick(mask(rest < 113 << 23), subnormal, (normal & ~huge) | (huge & 0x7C00));
    return (finite & ~nan) | (nan & 0x7E00) | (shift_right(bits(x), 16) & 0x8000);
}
// For values that `round_bits` has rounded to bf16: `rounded` where `finite` is true, otherwise infinite or NaN. The sum
// keeps a NaN a NaN that has only low bits set.
template <class I, class F> INLINE auto to_bf16(I finite, F rounded, F x) {
    return shift_right(bits(pick(finite, rounded, x + x)), 16);
}
// Numbers in their order as integers; NaN is above all.
template <class F> INLINE auto ordered(F x) {
    const auto y = bits(x), nan = mask((y & 0x7FFFFFFF) > 0x7F800000);
    return ((y ^ (y >> 31 & 0x7FFFFFFF)) & ~nan) | (nan & 0x7FC00000);
}
INLINE Floats load(const float* x) { Floats y; memcpy(&y, x, sizeof y); return y; }
INLINE Ints load(const int32_t* x) { Ints y; memcpy(&y, x, sizeof y); return y; }
#if defined(__AVX2__) && LANES == 8
// One instruction each, which no loop is made into.
typedef char Bytes __attribute__((vector_size(16)));
typedef short Halves __attribute__((vector_size(16)));
template <class T> INLINE Bytes eight(const T* x) {
    typedef long long Pair __attribute__((vector_size(16)));
    long long y;
    memcpy(&y, x, 8);
    return Bytes(Pair{y, 0});
}
template <class T> INLINE Halves sixteen(const T* x) { Halves y; memcpy(&y, x, 16); return y; }
INLINE Ints load(const uint8_t* x) { return Ints(__builtin_ia32_pmovzxbd256(eight(x))); }
INLINE Ints load(const int8_t* x) { return Ints(__builtin_ia32_pmovsxbd256(eight(x))); }
INLINE Ints load(const uint16_t* x) { return Ints(__builtin_ia32_pmovzxwd256(sixteen(x))); }
INLINE Ints load(const int16_t* x) { return Ints(__builtin_ia32_pmovsxwd256(sixteen(x))); }
#else
template <class T> INLINE Ints load(const T* x) { Ints y; for (int k = 0; k < LANES; ++k) y[k] = x[k]; return y; }
#endif
template <class T, class V> INLINE T largest_of(V x) {
    T y[LANES];
    memcpy(y, &x, sizeof y);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int k = 0; k < n; ++k) y[k] = y[k + n] > y[k] ? y[k + n] : y[k];
    return y[0];
}
INLINE float largest(const float* values, int count) {
    Ints most = all(INT32_MIN);
    for (int l = 0; l < count; l += LANES) {
        const Ints x = ordered(load(values + l));
        most = x > most ? x : most;
    }
    const int32_t last = largest_of<int32_t>(most);
    return from_bits(last ^ (last >> 31 & 0x7FFFFFFF));
}
INLINE float largest_number(const float* values, int count) {
    Floats most = load(values);
    for (int l = LANES; l < count; l += LANES) {
        const Floats x = load(values + l);
        most = x > most ? x : most;
    }
    return largest_of<float>(most);
}
template <class T, class V> INLINE void store(T* x, V y) { memcpy(x, &y, sizeof y); }
INLINE Ints counters(uint32_t first) {
    Words x;
    for (int k = 0; k < LANES; ++k) x[k] = uint32_t(k);
    return same_bits<Ints>(x + first);
}
"""

_ENTRY = """\
struct Row { int64_t size; void* data[@OPERANDS@]; int32_t keys[@KEYS@]; };

extern "C" void step(const Row* rows, int64_t count, const float* scalars, const int32_t* clock,
                     const uint8_t* proceed, int threads) {
    int64_t total = 0;
    for (int64_t r = 0; r < count; ++r) total += (rows[r].size + BLOCK - 1) / BLOCK;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) {
        // Blocks are dealt out evenly, whatever the sizes of the rows.
        int64_t first = total * part / threads, last = total * (part + 1) / threads;
        for (int64_t r = 0; r < count && last > 0; ++r) {
            const int64_t blocks = (rows[r].size + BLOCK - 1) / BLOCK;
            const int64_t stop = last < blocks ? last : blocks;
            if (first < stop) span(rows[r], scalars, clock, proceed, first, stop);
            first = first > blocks ? first - blocks : 0;
            last -= blocks;
        }
    }
}
"""




def source(graph: Graph, keys: int) -> str:
    """Return the C++ source of a graph's step.

    Args:
        graph: what `trace` returned.
        keys: number of words in a row of keys.

    Raises:
        UnsupportedOp: the graph has an operation that has no C++ here; the message names it.
    """
    return _Emitter(simplify(graph)).source(keys)


def _number(value: float, dtype: torch.dtype) -> str:
    if dtype == BOOL:
        return "int32_t(-1)" if value else "int32_t(0)"
    if dtype == I32:
        return f"int32_t({int(value) & 0xFFFFFFFF:#x})"
    single = torch.tensor(float(value)).item()
    if single != single or abs(single) == float("inf"):
        return f"from_bits(int32_t({torch.tensor(single).view(I32).item() & 0xFFFFFFFF:#x}))"
    return f"{single.hex()}f"


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
    "clamp_min": "pick(mask({0} < {1}), {1}, {0})",
    "clamp_max": "pick(mask({0} > {1}), {1}, {0})",
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
#: What needs all of a block, and so ends the loop that makes its arguments.
_WIDE = ("amax", "amax_number", "repeat", "cat", "slice")


def _is_word(value: Value) -> bool:
    """Whether a value is stored as what holds it."""
    return value.dtype in (F32, I32)


def _held_dtype(value: Value) -> torch.dtype:
    """The dtype of what holds a value; small integers are whole where they come from memory."""
    return I32 if value.op == "input" and value.dtype in (torch.uint8, torch.int8, torch.int16) else value.dtype


def _operation(value: Value, args: list[str]) -> str:
    """The C++ of an elementwise operation on expressions that hold its arguments."""
    dtypes = [_held_dtype(part) if isinstance(part, Value) else type(part) for part in value.args]
    name, dtype = _SAME.get(value.op, value.op), value.dtype

    def number(part: float, to: torch.dtype) -> str:
        text = _number(part, to)
        return f"all({text})" if value.width > 1 else text

    def converted(to: torch.dtype) -> list[str]:
        return [
            number(part, to) if isinstance(part, (int, float)) else _convert(args[place], dtypes[place], to)
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
        left, right = converted(F32 if {F32, float} & set(dtypes) else I32)
        return f"mask({left} {_COMPARE[name]} {right})"
    if name == "pow" and dtype == F32 and value.args[1] == 2:
        return "({0} * {0})".format(converted(F32)[0])
    if name == "clamp" and dtype in (F32, I32):
        result = converted(dtype)[0]
        for op, end in zip(("clamp_min", "clamp_max"), value.args[1:], strict=False):
            result = result if end is None else _NUMBER[op].format(result, number(end, dtype))
        return result
    if name.endswith("shift") and isinstance(value.args[1], int) and dtype == I32:
        return _OPS[I32][name].format(args[0], value.args[1])
    if name not in _OPS.get(dtype, {}) or name.endswith("shift") or (name in _LOGIC and set(dtypes) - {dtype, int}):
        raise UnsupportedOp(f"aten.{value.op} of {', '.join(map(str, dtypes))}")
    return _OPS[dtype][name].format(*converted(dtype))


class _Emitter:
    """Schedules the values of one graph and prints them.

    A stage is the loops between two points where all of a block must be known. Values are made in the last stage that
    needs no copy of them, so that as few as possible are carried from one stage to the next.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = self._reachable()
        self.names = {value: f"v{place}" for place, value in enumerate(self.order)}
        self.users: dict[Value, list[Value]] = defaultdict(list)
        for value in self.order:
            for part in value.inputs:
                self.users[part].append(value)
        self.stage = self._stages()
        self.arrays = {value for value in self.order if value.width > 1 and self._is_carried(value)}
        self.homes = self._homes()
        # Vectors of at most 8 numbers that lie within every row, block and run.
        self.lanes = math.gcd(8, *(length for value in self.order for length in self._lengths(value)))

    def _reachable(self) -> list[Value]:
        order: dict[Value, None] = {}
        pending = [value for _, value in reversed(self.graph.stores)]
        while pending:
            value = pending[-1]
            missing = [part for part in value.inputs if part not in order]
            if missing:
                pending += missing
            else:
                order[pending.pop()] = None
        return list(order)

    def _stages(self) -> dict[Value, int]:
        earliest: dict[Value, int] = {}
        for value in self.order:
            earliest[value] = max((earliest[part] + (part.op in _WIDE) for part in value.inputs), default=0)
        stage = dict(earliest)
        stored = {value for _, value in self.graph.stores}
        for value in reversed(self.order):
            if value not in stored and value.op not in (*_WIDE, "input"):
                stage[value] = min(stage[user] for user in self.users[value])
        return stage

    @staticmethod
    def _lengths(value: Value) -> list[int]:
        lengths = [value.width] if value.width > 1 else []
        if value.op in ("amax", "amax_number"):
            lengths.append(value.inputs[0].width // value.width)
        if value.op == "repeat":
            lengths.append(value.width // value.inputs[0].width)
        if value.op == "slice":
            lengths += value.args[1:]
        if value.op == "cat":
            lengths += [part.width // value.args[0] for part in value.inputs]
        return lengths

    def _is_carried(self, value: Value) -> bool:
        """Whether a value outlives the loop that makes it, in an array."""
        if value.op in ("arange", "slice", "repeat"):
            return False
        if value.op == "input":
            # Whole words are stored by the loop that makes them, and what is there before may be needed later.
            stored = [self.stage[new] for place, new in self.graph.stores if place == value.args[0] and _is_word(new)]
            return any(user.op in _WIDE or self.stage[user] > least for user in self.users[value] for least in stored)
        later = any(user.op in _WIDE or self.stage[user] != self.stage[value] for user in self.users[value])
        narrow = any(new is value and not _is_word(value) for _, new in self.graph.stores)
        return later or narrow or value.op in _WIDE

    def _homes(self) -> dict[Value, tuple[str, int, int, int]]:
        """Where in another array a value is made at once, by value: parts of a `cat` that nothing else uses."""
        homes = {}
        stored = {value for _, value in self.graph.stores}
        for value in self.order:
            for part, place in self._places(value) if value.op == "cat" else ():
                if part.op not in (*_WIDE, "input", "arange") and self.users[part] == [value] and part not in stored:
                    homes[part] = place
        return homes

    def _places(self, value: Value) -> list[tuple[Value, tuple[str, int, int, int]]]:
        """The parts of a `cat`, and for each (array, first element, length of a run, spacing of the runs)."""
        times, at, places = value.args[0], 0, []
        for part in value.inputs:
            run = part.width // times
            places.append((part, (self.names[value], at, run, value.width // times)))
            at += run
        return places

    # Printing --------------------------------------------------------------------------------------------------------

    def source(self, keys: int) -> str:
        """Return the whole file."""
        operands = self.graph.operands
        entry = _ENTRY.replace("@OPERANDS@", str(len(operands))).replace("@KEYS@", str(keys + keys % 2))
        struct_at = entry.index("extern")
        return "\n".join(
            [
                _PRELUDE.replace("@LANES@", str(self.lanes)),
                f"static const int64_t BLOCK = {self.graph.width};",
                entry[:struct_at],
                *self._uniform(),
                *self._blocks(),
                *self._span(),
                "",
                entry[struct_at:],
            ]
        )

    def _shared(self) -> list[Value]:
        """Numbers of the whole span that blocks use."""
        return [
            value
            for value in self.order
            if value.width == 0 and value.op != "number" and any(user.width for user in self.users[value])
        ]

    def _uniform(self) -> list[str]:
        fields = [f"    {_HELD[value.dtype]} {self.names[value]};" for value in self._shared()]
        return ["struct Uniform {", *fields, "};", ""]

    def _expression(self, value: Value, outer: Value) -> str:
        """How code that makes `outer` reads a value; in loops `l` counts elements."""
        if value.op == "number":
            text = _number(value.args[0], value.dtype)
        elif value.width == 0:
            text = f"u.{self.names[value]}" if outer.width else self.names[value]
        elif value.width == 1:
            text = self.names[value]
        elif value.op == "repeat":
            text = f"{_HELD[value.dtype]}(*({self._address(value)}))"
        elif value.op == "arange":
            return "counters(first + uint32_t(l))"
        elif value in self.arrays and (value.op in (*_WIDE, "input") or self.stage[value] != self.stage[outer]):
            return f"load({self._address(value)})"
        elif value.op in ("input", "slice"):
            return f"load({self._address(value)})"
        else:
            return f"{self.names[value]}_" if value in self.arrays else self.names[value]
        return f"all({text})" if outer.width > 1 else text

    def _address(self, value: Value, index: str = "l") -> str:
        """Where a value's element lies in memory."""
        if value.op == "slice":
            return self._address(value.args[0], _spaced(index, *value.args[1:], value.width))
        if value.op == "repeat":
            return self._address(value.args[0], f"({index} / {value.width // value.args[0].width})")
        if value in self.homes:
            array, *place = self.homes[value]
            return f"{array} + {_spaced(index, *place, value.width)}"
        return f"{self.names[value] if value in self.arrays else f'p{value.args[0]}'} + {index}"

    def _computed(self, value: Value) -> str:
        if value.op == "element":
            vector = "row.keys" if value.args[0] == "keys" else value.args[0]
            return f"mask({vector}[0])" if value.dtype == BOOL else f"{vector}[{value.args[1]}]"
        return _operation(
            value, [self._expression(part, value) if isinstance(part, Value) else "" for part in value.args]
        )

    def _span(self) -> list[str]:
        operands = self.graph.operands
        lines = [
            "static void span(const Row& row, const float* scalars, const int32_t* clock, const uint8_t* proceed,",
            "                 int64_t begin, int64_t end) {",
        ]
        for value in self.order:
            if value.width == 0 and value.op not in ("number", "vector"):
                lines.append(f"    const {_HELD[value.dtype]} {self.names[value]} = {self._computed(value)};")
        lines += [f"    const Uniform u = {{{', '.join(self.names[value] for value in self._shared())}}};"]
        for place, operand in enumerate(operands):
            kind = _STORED[operand.value.dtype]
            lines.append(f"    {kind}* q{place} = ({kind}*)row.data[{place}] + begin * {operand.value.width};")
        arguments = ", ".join(f"q{place}" for place in range(len(operands)))
        lines += [
            "    const int64_t whole = end * BLOCK <= row.size ? end : end - 1, rest = row.size - whole * BLOCK;",
            f"    if (begin < whole) blocks(u, {arguments}, whole - begin, uint32_t(begin * BLOCK));",
            "    if (whole == end) return;",
            "    // The ragged end is stepped in zero-padded copies.",
        ]
        stored = {place for place, _ in self.graph.stores}
        after = []
        for place, operand in enumerate(operands):
            kind, width = _STORED[operand.value.dtype], operand.value.width
            size = f"(rest + {operand.unit - 1}) / {operand.unit} * {operand.per_unit} * sizeof({kind})"
            at = f"q{place} + (whole - begin) * {width}"
            lines += [f"    {kind} t{place}[{width}] = {{}};", f"    memcpy(t{place}, {at}, {size});"]
            if place in stored:
                after.append(f"    memcpy({at}, t{place}, {size});")
        arguments = ", ".join(f"t{place}" for place in range(len(operands)))
        return [*lines, f"    blocks(u, {arguments}, 1, uint32_t(whole * BLOCK));", *after, "}"]

    def _blocks(self) -> list[str]:
        operands = self.graph.operands
        pointers = [f"{_STORED[op.value.dtype]}* __restrict p{place}" for place, op in enumerate(operands)]
        lines = [
            f"static __attribute__((noinline)) void blocks(const Uniform& u, {', '.join(pointers)},",
            "                                             int64_t count, uint32_t first) {",
            "    for (int64_t block = 0; block < count; ++block) {",
        ]
        for stage in range(max(self.stage.values(), default=0) + 1):
            lines += [f"        {line}" for line in self._stage(stage)]
        lines += [f"        {line}" for line in self._last_stores()]
        steps = [f"p{place} += {op.value.width};" for place, op in enumerate(operands)]
        return [*lines, f"        {' '.join(steps)} first += BLOCK;", "    }", "}", ""]

    def _stage(self, stage: int) -> list[str]:
        lines: list[str] = []
        here = [value for value in self.order if self.stage[value] == stage and value.width > 0]
        for value in here:
            name, held = self.names[value], _HELD[value.dtype]
            if value in self.arrays and value not in self.homes:
                lines.append(f"alignas(64) {held} {name}[{value.width}];")
            if value.op == "input" and value.width == 1:
                lines.append(f"const {held} {name} = p{value.args[0]}[0];")
            elif value.op == "input" and value in self.arrays:
                lines.append(f"for (int l = 0; l < {value.width}; ++l) {name}[l] = p{value.args[0]}[l];")
        plain = [value for value in here if value.op not in (*_WIDE, "input", "arange")]
        for value in plain:
            if value.width == 1:
                lines.append(f"const {_HELD[value.dtype]} {self.names[value]} = {self._computed(value)};")
        for width in sorted({value.width for value in plain} - {1}):
            lines += self._loop(width, [value for value in plain if value.width == width])
        for value in here:
            if value.op in _WIDE:
                lines += self._wide(value)
        return lines

    def _loop(self, width: int, values: list[Value]) -> list[str]:
        lines = [f"for (int l = 0; l < {width}; l += LANES) {{"]
        for value in values:
            kind = "Floats" if value.dtype == F32 else "Ints"
            local = f"{self.names[value]}{'_' if value in self.arrays else ''}"
            lines.append(f"    const {kind} {local} = {self._computed(value)};")
            if value in self.arrays:
                lines.append(f"    store({self._address(value)}, {local});")
        for place, new in self.graph.stores:
            if new in values and new not in self.arrays:
                lines.append(f"    store(p{place} + l, {self.names[new]});")
        return [*lines, "}"]

    def _last_stores(self) -> list[str]:
        lines = []
        for place, value in self.graph.stores:
            kind = _STORED[value.dtype]
            if value.width == 1:
                lines.append(f"p{place}[0] = {kind}({self.names[value]});")
            elif value in self.arrays or value.op in ("slice", "repeat", "input"):
                lines.append(f"for (int l = 0; l < {value.width}; ++l) p{place}[l] = {kind}(*({self._address(value)}));")
        return lines

    def _wide(self, value: Value) -> list[str]:
        name, parts = self.names[value], value.inputs
        if value.op in ("slice", "repeat"):
            return []
        if value.op == "cat":
            return [
                f"for (int l = 0; l < {part.width}; ++l) {name}[{_spaced('l', *place[1:], part.width)}]"
                f" = *({self._address(part)});"
                for part, place in self._places(value)
                if part not in self.homes
            ]
        source, times = self._address(parts[0], "0"), parts[0].width // value.width
        find = "largest" if value.op == "amax" else "largest_number"
        if value.width == 1:
            return [f"const float {name} = {find}({source}, {times});"]
        return [f"for (int s = 0; s < {value.width}; ++s) {name}[s] = {find}({source} + s * {times}, {times});"]


def _spaced(index: str, first: int, run: int, stride: int, width: int) -> str:
    """Where element `index` lies among runs of neighbours that are `stride` apart."""
    return f"({index} + {first})" if run == width else f"({index} / {run} * {stride} + {first} + {index} % {run})"
