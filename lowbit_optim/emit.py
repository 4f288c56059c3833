"""C++ source of a step: one function for the graph that `trace` recorded.

The code goes over rows. What is one number for a whole span is computed once; what is one number for a row, once for
the row; all else in loops over the row's elements, on vectors of 8 that the compiler's own vector types spell out: its
vectorizer gave up on half of the loops. They are split where a reduction or a move between elements needs all of a
block, and where values have nothing to do with each other. A turn of a loop makes two vectors, step by step in turn:
a square root takes five times as long as it keeps others waiting. In between everything is 4 bytes wide; it is
narrowed as the row is stored, in loops of their own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from .expressions import BOOL, F32, HELD, I32, STORED, number, operation
from .simplify import simplify
from .trace import Graph, Value

_PRELUDE = Path(__file__).with_name("prelude.h")
_ENTRY = """\
struct Table { int64_t size; void* data[@OPERANDS@]; int32_t keys[@KEYS@]; };

extern "C" void advance(float* const* counters, int64_t count) {
    for (int64_t r = 0; r < count; ++r) *counters[r] += 1.0f;
}

extern "C" void step(const Table* rows, int64_t count, const float* scalars, const int32_t* clock,
                     const uint8_t* proceed, int threads) {
    int64_t total = 0;
    for (int64_t r = 0; r < count; ++r) total += (rows[r].size + ROW - 1) / ROW;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) {
        // Blocks are dealt out evenly, whatever the sizes of the rows.
        int64_t first = total * part / threads, last = total * (part + 1) / threads;
        for (int64_t r = 0; r < count && last > 0; ++r) {
            const int64_t blocks = (rows[r].size + ROW - 1) / ROW;
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


#: First element, length and spacing of runs of neighbours.
Runs = tuple[int, int, int]
#: What needs all of a block, and so ends the loop that makes its arguments.
_WIDE = ("amax", "amax_number", "repeat", "cat", "slice")
#: Vectors made in one turn of a loop. One leaves the processor waiting, and four do not fit its registers.
_TURNS = 2


def _is_word(value: Value) -> bool:
    """Whether a value is stored as what holds it."""
    return value.dtype in (F32, I32)


def _is_counter(value: Value) -> bool:
    """Whether a value counts elements from some number on; each loop that needs it counts anew."""
    if value.op == "add" and value.dtype == I32:
        return value.args[0] in value.inputs and _is_counter(value.args[0]) and _is_uniform(value.args[1])
    return value.op == "arange"


def _is_uniform(part: Any) -> bool:
    """Whether an argument is one whole number for all elements of a span."""
    return isinstance(part, Value) and part.width == 0 and part.dtype == I32


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
        #: Operands that loops change as they go.
        self.renewed = {graph.operands[place].value for place, new in graph.stores if _is_word(new)}
        #: Values of the loop that is being printed.
        self.made: set[Value] = set()
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
        if value.op in ("slice", "repeat") or _is_counter(value):
            return False
        if value.op == "input":
            # Whole words are stored by the loop that makes them, and what was there before may be needed later.
            own = [new for place, new in self.graph.stores if place == value.args[0]]
            copied = any(new is value for _, new in self.graph.stores)
            first = min((self.stage[new] for new in own if _is_word(new)), default=len(self.order))
            late = any(user.op in _WIDE or self.stage[user] > first for user in self.users[value])
            return bool(own) and (copied or (late and first < len(self.order)))
        later = any(user.op in _WIDE or self.stage[user] != self.stage[value] for user in self.users[value])
        narrow = any(new is value and not _is_word(value) for _, new in self.graph.stores)
        return later or narrow or value.op in _WIDE

    def _homes(self) -> dict[Value, tuple[Value, Runs]]:
        """Where in another array a value is made at once, by value: parts of a `cat` that no other block-wide needs."""
        homes = {}
        stored = {value for _, value in self.graph.stores}
        for value in self.order:
            for part, runs in _pieces(value) if value.op == "cat" else ():
                wide = [user for user in self.users[part] if user.op in _WIDE]
                if part.op not in (*_WIDE, "input") and wide == [value] and part in self.arrays - stored:
                    homes[part] = value, runs
        return homes

    # Printing --------------------------------------------------------------------------------------------------------

    def source(self, keys: int) -> str:
        """Return the whole file."""
        operands = self.graph.operands
        entry = _ENTRY.replace("@OPERANDS@", str(len(operands))).replace("@KEYS@", str(keys + keys % 2))
        struct_at = entry.index("extern")
        return "\n".join(
            [
                f"#define LANES {self.lanes}",
                _PRELUDE.read_text(),
                f"static const int64_t ROW = {self.graph.width};",
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
        fields = [f"    {HELD[value.dtype]} {self.names[value]};" for value in self._shared()]
        return ["struct Uniform {", *fields, "};", ""]

    def _expression(self, value: Value, outer: Value, turn: int = 0) -> str:
        """How code that makes vector `turn` of `outer` reads a value; in loops `l` counts elements."""
        if value.op == "number":
            text = number(value.args[0], value.dtype)
        elif value.width == 0:
            text = f"u.{self.names[value]}" if outer.width else self.names[value]
        elif value.width == 1:
            text = self.names[value]
        elif value.op == "repeat":
            text = f"{HELD[value.dtype]}(*({self._address(value, self._index(turn, value))}))"
        elif _is_counter(value):
            return self._local(value, turn)
        elif value.op in (*_WIDE, "input") or (value in self.arrays and value not in self.made):
            return f"load({self._address(value, self._index(turn))})"
        else:
            return self._local(value, turn)
        return f"all({text})" if outer.width > 1 else text

    def _local(self, value: Value, turn: int) -> str:
        """The variable that holds one vector of a value."""
        return f"{self.names[value]}{'abcdefgh'[turn]}"

    def _index(self, turn: int, repeated: Value | None = None) -> str:
        """Which element a vector begins with; of what is repeated, one that has the same number."""
        together = self.lanes * _TURNS
        same = repeated is not None and repeated.width // repeated.inputs[0].width % together == 0
        return f"(l + {turn * self.lanes})" if turn and not same else "l"

    def _address(self, value: Value, index: str = "l") -> str:
        """Where a value's element lies in memory."""
        if value.op == "slice":
            return self._address(value.args[0], _spaced(index, value.args[1:], value.width))
        if value.op == "repeat":
            return self._address(value.args[0], f"({index} / {value.width // value.args[0].width})")
        if value in self.homes:
            whole, runs = self.homes[value]
            return f"{self.names[whole]} + {_spaced(index, runs, value.width)}"
        return f"{self.names[value] if value in self.arrays else f'p{value.args[0]}'} + {index}"

    def _computed(self, value: Value, turn: int = 0) -> str:
        if value.op == "element":
            vector = "row.keys" if value.args[0] == "keys" else value.args[0]
            return f"mask({vector}[0])" if value.dtype == BOOL else f"{vector}[{value.args[1]}]"
        return operation(
            value, [self._expression(part, value, turn) if isinstance(part, Value) else "" for part in value.args]
        )

    def _span(self) -> list[str]:
        operands = self.graph.operands
        lines = [
            "static void span(const Table& row, const float* scalars, const int32_t* clock, const uint8_t* proceed,",
            "                 int64_t begin, int64_t end) {",
        ]
        for value in self.order:
            if value.width == 0 and value.op not in ("number", "vector"):
                lines.append(f"    const {HELD[value.dtype]} {self.names[value]} = {self._computed(value)};")
        lines += [f"    const Uniform u = {{{', '.join(self.names[value] for value in self._shared())}}};"]
        for place, operand in enumerate(operands):
            kind = STORED[operand.value.dtype]
            lines.append(f"    {kind}* q{place} = ({kind}*)row.data[{place}] + begin * {operand.value.width};")
        arguments = ", ".join(f"q{place}" for place in range(len(operands)))
        lines += [
            "    const int64_t whole = end * ROW <= row.size ? end : end - 1, rest = row.size - whole * ROW;",
            f"    if (begin < whole) blocks(u, {arguments}, whole - begin, uint32_t(begin * ROW));",
            "    if (whole == end) return;",
            "    // The ragged end is stepped in zero-padded copies.",
        ]
        stored = {place for place, _ in self.graph.stores}
        after = []
        for place, operand in enumerate(operands):
            kind, width = STORED[operand.value.dtype], operand.value.width
            size = f"(rest + {operand.unit - 1}) / {operand.unit} * {operand.per_unit} * sizeof({kind})"
            at = f"q{place} + (whole - begin) * {width}"
            lines += [f"    {kind} t{place}[{width}] = {{}};", f"    memcpy(t{place}, {at}, {size});"]
            if place in stored:
                after.append(f"    memcpy({at}, t{place}, {size});")
        arguments = ", ".join(f"t{place}" for place in range(len(operands)))
        return [*lines, f"    blocks(u, {arguments}, 1, uint32_t(whole * ROW));", *after, "}"]

    def _blocks(self) -> list[str]:
        operands = self.graph.operands
        pointers = [f"{STORED[op.value.dtype]}* __restrict p{place}" for place, op in enumerate(operands)]
        lines = [
            f"static __attribute__((noinline)) void blocks(const Uniform& u, {', '.join(pointers)},",
            "                                             int64_t count, uint32_t first) {",
            "    for (int64_t block = 0; block < count; ++block) {",
        ]
        for stage in range(max(self.stage.values(), default=0) + 1):
            lines += [f"        {line}" for line in self._stage(stage)]
        lines += [f"        {line}" for line in self._last_stores()]
        steps = [f"p{place} += {op.value.width};" for place, op in enumerate(operands)]
        return [*lines, f"        {' '.join(steps)} first += ROW;", "    }", "}", ""]

    def _stage(self, stage: int) -> list[str]:
        lines: list[str] = []
        here = [value for value in self.order if self.stage[value] == stage and value.width > 0]
        for value in here:
            name, held = self.names[value], HELD[value.dtype]
            if value in self.arrays and value not in self.homes:
                lines.append(f"alignas(64) {held} {name}[{value.width}];")
            if value.op == "input" and value.width == 1:
                lines.append(f"const {held} {name} = p{value.args[0]}[0];")
            elif value.op == "input" and value in self.arrays:
                lines.append(f"for (int l = 0; l < {value.width}; ++l) {name}[l] = p{value.args[0]}[l];")
        plain = [value for value in here if value.op not in (*_WIDE, "input") and not _is_counter(value)]
        for value in plain:
            if value.width == 1:
                lines.append(f"const {HELD[value.dtype]} {self.names[value]} = {self._computed(value)};")
        for width in sorted({value.width for value in plain} - {1}):
            for values in self._apart([value for value in plain if value.width == width]):
                lines += self._loop(width, values)
        for value in here:
            if value.op in _WIDE:
                lines += self._wide(value)
        return lines

    def _apart(self, values: list[Value]) -> list[list[Value]]:
        """Divide values of one loop into those of several that have nothing to do with each other.

        None needs what another one makes, nor reads an operand that another one stores anew.
        """
        groups: list[tuple[list[Value], set[Value]]] = []
        for value in values:
            stored = {self.graph.operands[place].value for place, new in self.graph.stores if new is value}
            inputs = {part for part in value.inputs if part in values or part in self.renewed}
            members, bound = [value], {value} | inputs | stored
            for group in [group for group in groups if group[1] & bound]:
                groups.remove(group)
                members, bound = group[0] + members, group[1] | bound
            groups.append((members, bound))
        return [sorted(members, key=values.index) for members, _ in groups]

    def _loop(self, width: int, values: list[Value]) -> list[str]:
        self.made = set(values)
        turns = range(_TURNS if width % (self.lanes * _TURNS) == 0 else 1)
        parts = [part for value in values for part in value.inputs]
        counters = [value for value in dict.fromkeys(parts) if _is_counter(value)]
        lines = [f"Ints {self._local(value, 0)} = {self._first(value)};" for value in counters]
        lines += [f"for (int l = 0; l < {width}; l += {len(turns)} * LANES) {{"]
        for value in counters:
            for turn in turns[1:]:
                lines.append(f"    const Ints {self._local(value, turn)} = {self._local(value, 0)} + {turn} * LANES;")
        stores = {value: [place for place, new in self.graph.stores if new is value] for value in values}
        for value in values:
            kind = "Floats" if value.dtype == F32 else "Ints"
            for turn in turns:
                local, index = self._local(value, turn), self._index(turn)
                lines.append(f"    const {kind} {local} = {self._computed(value, turn)};")
                if value in self.arrays:
                    lines.append(f"    store({self._address(value, index)}, {local});")
        for value, places in stores.items():
            for place in places if value not in self.arrays else ():
                for turn in turns:
                    lines.append(f"    store(p{place} + {self._index(turn)}, {self._local(value, turn)});")
        lines += [f"    {self._local(value, 0)} += {len(turns)} * LANES;" for value in counters]
        # Counters of several loops have the same names.
        return ["{", *(f"    {line}" for line in lines), "    }", "}"] if counters else [*lines, "}"]

    def _first(self, counter: Value) -> str:
        """The first vector of a counter."""
        if counter.op == "arange":
            return "counters(first)"
        return f"{self._first(counter.args[0])} + all(u.{self.names[counter.args[1]]})"

    def _last_stores(self) -> list[str]:
        lines = []
        for place, value in self.graph.stores:
            kind = STORED[value.dtype]
            if value.width == 1:
                lines.append(f"p{place}[0] = {kind}({self.names[value]});")
            elif value in self.arrays or value.op in ("slice", "repeat", "input"):
                width, array = value.width, self.names[value]
                if value in self.arrays and value not in self.homes and not _is_word(value) and value.op != "input":
                    lines.append(f"narrow(p{place}, {array}, {width});")
                else:
                    lines.append(f"for (int l = 0; l < {width}; ++l) p{place}[l] = {kind}(*({self._address(value)}));")
        return lines

    def _wide(self, value: Value) -> list[str]:
        name, parts = self.names[value], value.inputs
        if value.op in ("slice", "repeat"):
            return []
        if value.op == "cat":
            return [
                f"for (int l = 0; l < {part.width}; ++l) {name}[{_spaced('l', runs, part.width)}] = "
                f"*({self._address(part)});"
                for part, runs in _pieces(value)
                if part not in self.homes
            ]
        source, times = self._address(parts[0], "0"), parts[0].width // value.width
        find = "largest" if value.op == "amax" else "largest_number"
        if value.width == 1:
            return [f"const float {name} = {find}({source}, {times});"]
        if value.op == "amax_number" and value.width % self.lanes == 0:
            step, call = "s += LANES", f"largest_numbers({name} + s, {source} + s * {times}, {times})"
        else:
            step, call = "++s", f"{name}[s] = {find}({source} + s * {times}, {times})"
        return [f"for (int s = 0; s < {value.width}; {step}) {call};"]


def _pieces(value: Value) -> list[tuple[Value, Runs]]:
    """The parts of a `cat`, and where their elements go."""
    times, first, pieces = value.args[0], 0, []
    for part in value.inputs:
        run = part.width // times
        pieces.append((part, (first, run, value.width // times)))
        first += run
    return pieces


def _spaced(index: str, runs: Runs, width: int) -> str:
    """Where element `index` of a value of some width lies among runs."""
    first, run, stride = runs
    return f"({index} + {first})" if run == width else f"({index} / {run} * {stride} + {first} + {index} % {run})"
