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
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

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


class NativeStep(StepFn):
    """A compiled C++ step: all parameters of a call, and all spans of each, are rows of one table.

    A row is the number of elements, the address of each operand where the span begins, and the span's key words.
    """

    def __init__(self, sig: Signature) -> None:
        super().__init__(sig, "cpp")
        graph = trace(sig)
        words = 8 + 2 * len(sig.formats)
        self._function = build(source(graph, words)).step
        self._function.restype = None
        self._strides = [(op.unit, op.per_unit * op.value.dtype.itemsize) for op in graph.operands]
        self._none = [0] * len(self._strides)
        self._row = struct.Struct(f"={1 + len(self._strides)}q")
        self._block = sig.block
        self._spans: WeakKeyDictionary[NoiseKeys, tuple[int, list[tuple[int, int, bytes]]]] = WeakKeyDictionary()

    def __call__(self, items: Sequence[Item], timing: Timing) -> None:
        """Update parameters in place."""
        rows, total = [], 0
        for operands, keys in items:
            numel = operands.weight.numel()
            total += numel
            addresses = [tensor.data_ptr() for tensor in operands.tensors()]
            for start, size, words in self._spans_of(keys, numel):
                offsets = [start // unit * stride for unit, stride in self._strides] if start else self._none
                rows += [self._row.pack(size, *map(operator.add, addresses, offsets)), words]
        threads = max(1, min(torch.get_num_threads(), total // _SHARE))
        self._function(
            ctypes.c_char_p(b"".join(rows)),
            ctypes.c_int64(len(rows) // 2),
            ctypes.c_void_p(timing.scalars.data_ptr()),
            ctypes.c_void_p(timing.clock.data_ptr()),
            ctypes.c_void_p(None if timing.proceed is None else timing.proceed.data_ptr()),
            ctypes.c_int(threads),
        )

    def _spans_of(self, keys: NoiseKeys, numel: int) -> list[tuple[int, int, bytes]]:
        """(first element, number of elements, key words) of each span of a parameter."""
        known = self._spans.get(keys)
        if known is None or known[0] != numel:
            known = numel, self._make_spans(keys, numel)
            self._spans[keys] = known
        return known[1]

    def _make_spans(self, keys: NoiseKeys, numel: int) -> list[tuple[int, int, bytes]]:
        spans, start = [], 0
        while start < numel:
            whole = max(min(keys.region.span(start)[0], _LONGEST_SPAN) // self._block, 1) * self._block
            size = min(whole, numel - start)
            words = keys.words(start, self.sig)
            spans.append(
                (start, size, struct.pack(f"={len(words) + len(words) % 2}i", *words, *[0] * (len(words) % 2)))
            )
            start += size
        return spans
