"""What the compiler makes of the Triton kernels, without a GPU: `python -m benchmarks.kernel_report`.

Every preset with AdamW and Lion is compiled for several GPUs, and counted in the machine code: registers, accesses of
local memory (spills), loads and stores of 128 bits. Bytes per parameter are counted from the loads and stores of the
kernel's intermediate code, and the least possible from the formats. Rows of the table and scalars are left out: all
programs of a parameter read the same few, so they come from the cache.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from lowbit_optim_kernels import Variant, options
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowbit_optim import PRESETS, rules
from lowbit_optim.dispatch import kernel_variant
from lowbit_optim.hyper import Moment
from lowbit_optim.layout import slot_formats, stored_rule
from lowbit_optim.step import Signature
from lowbit_optim.weights import Master, get_mode

from .harness import RESULTS, machine, write_csv

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
RULES = {"adamw": rules.adamw, "lion": rules.lion}
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
THREADS = 128
COLUMNS = ("kernel", "target", "registers", "spills", "bytes_per_param", "min_bytes_per_param", "ld128", "st128")
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8}


def signature(rule: str, preset: str) -> Signature:
    """Return the signature of a preset's bf16 weights and gradients on a GPU."""
    update, bf16 = RULES[rule], torch.bfloat16
    formats = slot_formats(PRESETS[preset].state, update)
    update = stored_rule(update, formats)
    names = Moment(update, HYPER, 1).names
    return Signature(
        update, tuple(formats.values()), get_mode(PRESETS[preset].weights, bf16), names, bf16, bf16, "cuda"
    )


def compile_for(variant: Variant, target: GPUTarget) -> Any:
    """Compile the kernel of aligned spans ahead of time."""
    kernel = variant.kernel
    pointers = dict(zip(kernel.arg_names, ("*i32", "*i64", "*i64", "*fp32", "*i32"), strict=False))
    constants = {"proceed": None, **variant.constants(True)}
    # Tables come from torch's allocator, which aligns them.
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(kernel, {**pointers, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
    return triton.compile(source, target=target, options=options(target.warp_size))


@dataclass(frozen=True)
class Code:
    """Counts from one compiled kernel.

    Attributes:
        registers: vector registers of a thread.
        spills: instructions that access local memory, or spilled registers where the compiler counts those.
        loads, stores: counts of global loads and stores by width in bits.
        doubles: instructions in double precision.
        instructions: all of them, those of paths seldom taken too.
    """

    registers: int
    spills: int
    loads: dict[int, int]
    stores: dict[int, int]
    doubles: int
    instructions: int


def read_code(compiled: Any) -> Code:
    """Count what there is in the machine code of a compiled kernel."""
    return _read_amdgcn(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _read_cubin(compiled)


def _tool(name: str) -> str:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(bundled) if bundled.exists() else str(shutil.which(name))


def _read_cubin(compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(option: str) -> str:
            command = [_tool("cuobjdump"), option, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage, sass = dump("--dump-resource-usage"), dump("-sass")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Code(
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        loads=_widths(re.findall(r"\bLDG\.E((?:\.\w+)*)", sass)),
        stores=_widths(re.findall(r"\bSTG\.E((?:\.\w+)*)", sass)),
        # Not all of SASS is readable by name; what PTX has is all there can be.
        doubles=len(re.findall(r"\.f64\b", compiled.asm["ptx"])),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/(?!\s+NOP\b)", sass, re.MULTILINE)),
    )


def _read_amdgcn(text: str) -> Code:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        assert found is not None, name
        return int(found[1])

    return Code(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        loads=_widths(re.findall(r"\t(?:global|buffer)_load_(\w+)", text)),
        stores=_widths(re.findall(r"\t(?:global|buffer)_store_(\w+)", text)),
        doubles=len(re.findall(r"_f64\b", text)),
        instructions=len(re.findall(r"^\t[a-z]+_(?!nop\b)\w+", text, re.MULTILINE)),
    )


def _widths(suffixes: list[str]) -> dict[int, int]:
    """Count accesses by width, from the suffixes of their instructions."""
    bits = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    bits |= {"dwordx4": 128, "dwordx2": 64, "dword": 32, "ushort": 16, "sshort": 16, "short": 16}
    counts: dict[int, int] = {}
    for suffix in suffixes:
        width = next((bits[word] for word in suffix.split(".") if word in bits), 32)
        counts[width] = counts.get(width, 0) + 1
    return counts


def moved_bytes(compiled: Any, tile: int) -> float:
    """Return the bytes per element of all loads and stores of tiles, and of the list of tiles."""
    accesses = re.findall(r"tt\.(?:load|store) .*?: tensor<(\d+)x!tt\.ptr<(\w+)>", compiled.asm["ttir"])
    return (sum(int(count) * _BYTES[kind] for count, kind in accesses) + 8) / tile


def _least_tiles(sig: Signature) -> tuple[float, float, float]:
    """Return the least bytes per element (read in tiles, written in tiles, read and written block by block)."""
    numel = 1 << 20
    weight = sig.weight_dtype.itemsize
    # A master copy is all that a step reads; the weight is only written.
    read = 0 if isinstance(sig.mode, Master) else weight
    kept = sum(dtype.itemsize for dtype in sig.mode.extras.values())
    scales = 0.0
    for fmt in sig.formats:
        values, *scale = (
            size * dtype.itemsize / numel for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True)
        )
        kept, scales = kept + values, scales + sum(scale)
    return read + kept + sig.grad_dtype.itemsize, weight + kept, scales


def least_bytes(sig: Signature) -> float:
    """Return the bytes per element if everything that a step needs is read once and everything new written once."""
    read, written, scales = _least_tiles(sig)
    return read + written + 2 * scales


def wide_accesses(sig: Signature, tile: int) -> tuple[float, float]:
    """Return how many loads and stores of 128 bits move a thread's weights, gradients, extras and codes."""
    read, written, _ = _least_tiles(sig)
    return read * tile / THREADS / 16, written * tile / THREADS / 16


def instructions_per_param(kernel: str, target: str) -> float:
    """Return how many instructions a thread has for each element that it steps."""
    variant = kernel_variant(signature(*kernel.split("-")))
    return read_code(compile_for(variant, TARGETS[target])).instructions * THREADS / variant.tile


def report(kernel: str, target: str) -> dict[str, Any]:
    """Return one row of the CSV; `kernel` is a rule and a preset, such as "adamw-balanced"."""
    sig = signature(*kernel.split("-"))
    variant = kernel_variant(sig)
    compiled = compile_for(variant, TARGETS[target])
    code = read_code(compiled)
    return {
        "kernel": kernel,
        "target": target,
        "registers": code.registers,
        "spills": code.spills,
        "bytes_per_param": round(moved_bytes(compiled, variant.tile), 3),
        "min_bytes_per_param": round(least_bytes(sig), 3),
        "ld128": code.loads.get(128, 0),
        "st128": code.stores.get(128, 0),
    }


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/kernels.md: one line for each kernel, with its registers on each target."""
    lines = [
        f"| kernel | {' | '.join(TARGETS)} | spills | bytes per parameter | least | ratio |",
        "|---|" + "--:|" * (len(TARGETS) + 4),
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        of_kernel = [row for row in rows if row["kernel"] == kernel]
        registers = " | ".join(str(row["registers"]) for row in of_kernel)
        moved, least = (
            max(float(row[name]) for row in of_kernel) for name in ("bytes_per_param", "min_bytes_per_param")
        )
        spills = sum(int(row["spills"]) for row in of_kernel)
        lines.append(f"| {kernel} | {registers} | {spills} | {moved:.3f} | {least:.3f} | {moved / least:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Compile, print a table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel_report.csv")
    arguments = parser.parse_args()
    print(f"{machine()}, triton {triton.__version__}")
    rows = [report(f"{rule}-{preset}", target) for rule in RULES for preset in PRESETS for target in TARGETS]
    widths = [
        max(len(str(row[column])) for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]) for column in COLUMNS
    ]
    for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]:
        print("  ".join(str(row[column]).ljust(width) for column, width in zip(COLUMNS, widths, strict=True)).rstrip())
    for preset in PRESETS:
        kernel = f"adamw-{preset}"
        print(f"{kernel}: {instructions_per_param(kernel, 'sm_90'):.0f} instructions a parameter on sm_90")
    write_csv(arguments.out, rows)
    print(f"Wrote {arguments.out}")


if __name__ == "__main__":
    main()
