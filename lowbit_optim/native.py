"""Compiled C++ steps: built once per machine, kept on disk, called with a table of parameters."""

from __future__ import annotations

import ctypes
import hashlib
import operator
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .emit import source
from .step import Item, NoiseKeys, Signature, StepFn, Timing
from .trace import trace

# Exactly what the source says: no contraction into fused multiply-adds, integers that wrap. Nobody looks at errno or
# at floating-point exceptions, and without them square roots and selections become vector instructions.
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"),
)
# Longer spans would carry the counter of a row's place past 31 bits.
_LONGEST_SPAN = 1 << 30
# Elements below which a thread is not worth waking.
_SHARE = 1 << 14


class BuildError(Exception):
    """The C++ compiler did not make a library of a step."""


def compiler() -> str:
    """Return the name of the C++ compiler, which `CXX` may set."""
    return os.environ.get("CXX", "g++")


def compiler_version() -> str:
    """Return the first line of what the C++ compiler says of itself, or why there is none."""
    if shutil.which(compiler()) is None:
        return f"{compiler()!r} not found"
    try:
        return _run([compiler(), "--version"]).splitlines()[0]
    except BuildError as error:
        return str(error)


def build(code: str) -> ctypes.CDLL:
    """Return the library of a source, compiled unless this machine has compiled it before.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    digest = hashlib.sha256("\0".join([code, *_FLAGS, _compiler_version(compiler()), _processor()]).encode())
    for folder in _cache_folders():
        path = folder / f"{digest.hexdigest()[:32]}.so"
        try:
            if not path.exists():
                _compile(code, path)
            return ctypes.CDLL(str(path))
        except OSError:
            continue  # not writable, or mounted without the right to execute
    raise BuildError("no folder to build in")


def _cache_folders() -> Iterator[Path]:
    chosen = os.environ.get("LOWBIT_OPTIM_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    yield Path(chosen) if chosen else Path(home) / "lowbit_optim"
    yield Path(_temporary())


@cache
def _temporary() -> str:
    return tempfile.mkdtemp(prefix="lowbit_optim_")


def _compile(code: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Built under a name of its own and then renamed: other processes see all of a library or none of it.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written, built = Path(folder) / "step.cpp", Path(folder) / "step.so"
        written.write_text(code)
        done = _run([compiler(), *_FLAGS, "-o", str(built), str(written)])
        if not built.exists():
            raise BuildError(f"{compiler()} made no library: {done}")
        built.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        raise BuildError(f"{command[0]} failed: {message.strip().splitlines()[0]}") from error
    return done.stdout


@cache
def _compiler_version(name: str) -> str:
    return f"{shutil.which(name)} {_run([name, '--version'])}"


@cache
def _processor() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(facts)])


@dataclass(frozen=True)
class _Table:
    """The rows of one call's spans; a call with the same parameters only puts their addresses in anew.

    Attributes:
        serials, sizes: of the parameters that it is for.
        rows: 64-bit words, `width` to a row: number of elements, address of each operand, key words in pairs.
        offsets: (parameter, bytes from the beginning of each of its operands) by row; None where each has one row.
    """

    serials: list[int]
    sizes: list[int]
    rows: array[int]
    width: int
    offsets: list[tuple[int, list[int]]] | None

    def fill(self, addresses: array[int], operands: int) -> None:
        """Put in the addresses of all operands of the first parameter, then those of the next ones."""
        if self.offsets is not None:
            begins = addresses
            addresses = array("q")
            for place, offsets in self.offsets:
                addresses.extend(map(operator.add, begins[place * operands : (place + 1) * operands], offsets))
        for operand in range(operands):
            self.rows[1 + operand :: self.width] = addresses[operand::operands]


class NativeStep(StepFn):
    """A compiled C++ step: all parameters of a call, and all spans of each, are rows of one table.

    A row is the number of elements, the address of each operand where the span begins, and the span's key words.
    """

    def __init__(self, sig: Signature) -> None:
        super().__init__(sig, "cpp")
        graph = trace(sig)
        words = 8 + 2 * len(sig.formats)
        library = build(source(graph, words))
        self._function, self._advance = library.step, library.advance
        self._function.restype = self._advance.restype = None
        self._strides = [(op.unit, op.per_unit * op.value.dtype.itemsize) for op in graph.operands]
        self._block = sig.block
        # By the keys of a call's first parameter: a group has the same ones in every step.
        self._tables: WeakKeyDictionary[NoiseKeys, _Table] = WeakKeyDictionary()

    def __call__(self, items: Sequence[Item], timing: Timing) -> None:
        """Update parameters in place."""
        if not items:
            return
        table = self._table(items)
        tensors = [tensor for operands, _ in items for tensor in operands.tensors()]
        table.fill(array("q", map(Tensor.data_ptr, tensors)), len(self._strides))
        threads = max(1, min(torch.get_num_threads(), sum(table.sizes) // _SHARE))
        self._function(
            ctypes.c_void_p(table.rows.buffer_info()[0]),
            ctypes.c_int64(len(table.rows) // table.width),
            ctypes.c_void_p(timing.scalars.data_ptr()),
            ctypes.c_void_p(timing.clock.data_ptr()),
            ctypes.c_void_p(None if timing.proceed is None else timing.proceed.data_ptr()),
            ctypes.c_int(threads),
        )

    def advance(self, counters: list[Tensor]) -> int:
        """Add 1 to the step counters of parameters, as `StepFn.advance` does, which takes 3 us for each."""
        kinds = {(counter.dtype, counter.is_cpu) for counter in counters}
        if kinds != {(torch.float32, True)}:
            return super().advance(counters)
        addresses = array("q", map(Tensor.data_ptr, counters))
        self._advance(ctypes.c_void_p(addresses.buffer_info()[0]), ctypes.c_int64(len(addresses)))
        return 0

    def _table(self, items: Sequence[Item]) -> _Table:
        """The table for some parameters, without addresses or with old ones."""
        serials = [keys.serial for _, keys in items]
        sizes = [operands.weight.numel() for operands, _ in items]
        table = self._tables.get(items[0][1])
        if table is None or table.serials != serials or table.sizes != sizes:
            table = self._make_table(serials, sizes, [keys for _, keys in items])
            self._tables[items[0][1]] = table
        return table

    def _make_table(self, serials: list[int], sizes: list[int], all_keys: list[NoiseKeys]) -> _Table:
        rows, offsets = array("q"), []
        blank = [0] * len(self._strides)
        for place, (numel, keys) in enumerate(zip(sizes, all_keys, strict=True)):
            for start, size, words in self._spans(keys, numel):
                rows.extend([size, *blank])
                rows.frombytes(words)
                offsets.append((place, [start // unit * stride for unit, stride in self._strides]))
        width = 1 + len(blank) + (9 + 2 * len(self.sig.formats)) // 2
        single = [place for place, _ in offsets] == list(range(len(sizes)))
        return _Table(serials, sizes, rows, width, None if single else offsets)

    def _spans(self, keys: NoiseKeys, numel: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (first element, number of elements, key words) of each span of a parameter."""
        start = 0
        while start < numel:
            whole = max(min(keys.region.span(start)[0], _LONGEST_SPAN) // self._block, 1) * self._block
            size = min(whole, numel - start)
            words = keys.words(start, self.sig)
            words += [0] * (len(words) % 2)
            yield start, size, struct.pack(f"={len(words)}i", *words)
            start += size
