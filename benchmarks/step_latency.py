"""Time of one optimizer step against torch's fused AdamW and peers: `python -m benchmarks.step_latency`.

All implementations step in turn in one process, so the ratios hold where the machine's speed drifts. The yardstick is
`torch.optim.AdamW(fused=True)` with fp32 weights; the others step bf16 weights.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lowbit_optim

from .harness import RESULTS, interleaved, machine, show, write_csv

#: Name -> (number of tensors, shape of each).
TENSORS = {"large": (8, (2048, 2048)), "many-small": (1000, (1000,))}
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _presets() -> Iterator[tuple[str, torch.dtype, Make]]:
    for name in lowbit_optim.PRESETS:
        yield name, torch.bfloat16, lambda params, name=name: lowbit_optim.from_preset(params, name, lr=1e-3)
    yield "fp8 + stochastic", torch.bfloat16, lambda params: lowbit_optim.AdamWFp8(params)
    yield "fp32", torch.float32, lambda params: lowbit_optim.AdamW(params, state="fp32")


def _torch() -> Iterator[tuple[str, torch.dtype, Make]]:
    for dtype in torch.float32, torch.bfloat16:
        name = f"AdamW fused {'fp32' if dtype == torch.float32 else 'bf16'}"
        yield name, dtype, lambda params: torch.optim.AdamW(params, fused=True)


def _torchao() -> Iterator[tuple[str, torch.dtype, Make]]:
    optim = importlib.import_module("torchao.optim")
    for name in "AdamW8bit", "AdamW4bit":
        made = getattr(optim, name)
        yield name, torch.bfloat16, lambda params, made=made: made(params, bf16_stochastic_round=True)


def _bitsandbytes() -> Iterator[tuple[str, torch.dtype, Make]]:
    optim = importlib.import_module("bitsandbytes.optim")
    yield "AdamW8bit", torch.bfloat16, lambda params: optim.AdamW8bit(params, min_8bit_size=4096)


IMPLEMENTATIONS = {"lowbit_optim": _presets, "torch": _torch, "torchao": _torchao, "bitsandbytes": _bitsandbytes}
YARDSTICK = ("torch", "AdamW fused fp32")


def make_params(tensors: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    """Return parameters of a trained model's size of values, with gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-2
    return params


def measure(impls: list[str], tensors: int, shape: tuple[int, ...], device: str, rounds: int) -> list[dict[str, Any]]:
    """Return one row per implementation and recipe, in the columns of the CSV."""
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    first: dict[tuple[str, str], float] = {}
    for impl in impls:
        for recipe, dtype, make in IMPLEMENTATIONS[impl]():
            optimizer = make(make_params(tensors, shape, dtype, device))
            began = time.perf_counter()
            optimizer.step()
            first[impl, recipe] = time.perf_counter() - began
            steps[impl, recipe] = optimizer.step
    seconds = interleaved({f"{impl}\t{recipe}": step for (impl, recipe), step in steps.items()}, rounds)
    medians = {tuple(name.split("\t")): statistics.median(times) for name, times in seconds.items()}
    numel = tensors * torch.Size(shape).numel()
    return [
        {
            "impl": impl,
            "recipe": recipe,
            "device": device,
            "params": numel,
            "tensors": tensors,
            "first_step_s": round(first[impl, recipe], 2),
            "median_ms": round(median * 1e3, 2),
            "ns_per_param": round(median / numel * 1e9, 3),
            "ratio_to_torch_fused": round(median / medians[YARDSTICK], 2),
        }
        for (impl, recipe), median in medians.items()
    ]


def main() -> None:
    """Measure, print a table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--vs", default="torch,torchao,bitsandbytes", help="comma-separated; peers that cannot be imported are named"
    )
    parser.add_argument("--tensors", choices=TENSORS, default="large")
    parser.add_argument("--rounds", type=int, default=9, help="counted steps of each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="CSV file; by default in benchmarks/results")
    options = parser.parse_args()
    console = Console(width=130)
    impls = ["lowbit_optim", "torch"]
    for peer in dict.fromkeys(options.vs.split(",")):
        if peer not in IMPLEMENTATIONS:
            parser.error(f"--vs: unknown {peer!r}; choose from {', '.join(IMPLEMENTATIONS)}")
        try:
            importlib.import_module(peer)
        except ImportError as error:
            print(f"Without {peer}: {error}", file=sys.stderr)
            continue
        impls += [peer] if peer not in impls else []
    console.print(machine())
    rows = measure(impls, *TENSORS[options.tensors], options.device, options.rounds)
    show(rows)
    suffix = "" if options.tensors == "large" else f"_{options.tensors.replace('-', '_')}"
    path = options.out or RESULTS / f"step_latency{suffix}.csv"
    write_csv(path, rows)
    console.print(f"Wrote {path}")


if __name__ == "__main__":
    main()
