"""Time, launches and memory of one optimizer step on a GPU: `python -m benchmarks.gpu.step_time`.

Parameters have the shapes of a transformer. The share of bandwidth is that of the bytes which a step cannot avoid
(the gradient read, weight and state read and written, of a master copy's weight only written) per time, over the
bytes per time of a large copy on the same device.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..harness import state_tensors, storage_bytes
from .common import (
    RECIPES,
    ROUNDS,
    Make,
    add_row,
    arguments,
    copy_seconds,
    imported,
    launches,
    make_recipe,
    peak_bytes,
    seconds,
    write,
)

#: Name -> (width, layers, vocabulary) of a transformer.
MODELS = {"100M": (768, 8, 50304), "1B": (2048, 18, 50304)}
TINY = {"tiny": (64, 0, 64)}


def shapes(width: int, layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT's parameters, with biases and norms."""
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,), (width,)]


def parameters(sizes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size, device=device).mul_(0.02).to(dtype)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def copy_bandwidth(device: str, numel: int) -> float:
    """Return bytes read and written per second by a copy of `numel` fp32 values, the median of some."""
    source = torch.empty(numel, device=device)
    return 2 * source.nbytes / copy_seconds(source, torch.empty_like(source), device)


def peers() -> Iterator[tuple[str, str, torch.dtype, Make]]:
    """Yield (implementation, recipe, weight dtype, maker) of the other optimizers that can be imported."""
    bf16 = torch.bfloat16
    for dtype in torch.float32, bf16:
        yield "torch", f"AdamW fused {dtype}".replace("torch.", ""), dtype, lambda p: torch.optim.AdamW(p, fused=True)
    makers: list[tuple[str, str, str, dict[str, Any]]] = [
        ("torchao", "torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
        ("torchao", "torchao.optim", "AdamW4bit", {"bf16_stochastic_round": True}),
        ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {"min_8bit_size": 4096}),
        ("flashoptim", "flashoptim", "FlashAdamW", {}),
    ]
    for name, module, cls, options in makers:
        made = imported(name, module, cls)
        if made is not None:
            yield name, cls, bf16, partial(made, lr=1e-3, **options)


def step_bytes(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> int:
    """Return the bytes that a step cannot avoid to move."""
    weights = sum(param.nbytes for param in params)
    masters = sum(param.nbytes for param in params if "master" in optimizer.state[param])
    state = storage_bytes(state_tensors(optimizer))
    return weights + 2 * (weights + state) - masters


def measure(
    sizes: list[tuple[int, ...]], dtype: torch.dtype, make: Make, device: str, copy: float, rounds: int
) -> dict[str, Any]:
    """Return what is measured of one optimizer."""
    params = parameters(sizes, dtype, device)
    optimizer = make(params)
    first = seconds(optimizer.step, device)
    optimizer.step()
    times = [seconds(optimizer.step, device) for _ in range(rounds)]
    median, numel = statistics.median(times), sum(param.numel() for param in params)
    moved = step_bytes(optimizer, params)
    peak = peak_bytes(optimizer.step, device)
    return {
        "params": numel,
        "tensors": len(params),
        "first_step_s": round(first, 3),
        "median_ms": round(median * 1e3, 3),
        "fastest_ms": round(min(times) * 1e3, 3),
        "bytes_per_param": round(moved / numel, 3),
        "share_of_copy": round(moved / median / copy, 3),
        "launches": launches(optimizer.step, device),
        "state_bytes_per_param": round(storage_bytes(state_tensors(optimizer)) / numel, 3),
        "peak_extra_mb": None if peak is None else round(peak / 1e6, 1),
    }


def main() -> None:
    """Measure, print tables and write them."""
    options = arguments(__doc__)
    device, rounds = options.device, 1 if options.tiny else ROUNDS
    copy = copy_bandwidth(device, 1 << (16 if options.tiny else 28))
    print(f"A copy moves {copy / 1e9:.0f} GB/s", flush=True)
    implementations = [
        ("lowbit_optim", recipe, torch.bfloat16, make_recipe(recipe, options.backend)) for recipe in RECIPES
    ]
    implementations += [peer for peer in peers() if peer[0] == "torch" or not options.tiny]
    rows: list[dict[str, Any]] = []
    # Peers come last with every model: some compile for long.
    for impl, recipe, dtype, make in implementations:
        for name, model in (TINY if options.tiny else MODELS).items():
            about = {"impl": impl, "recipe": recipe, "model": name}
            add_row(rows, about, partial(measure, shapes(*model), dtype, make, device, copy, rounds), device)
            text = write("step_time", f"One step; a copy moves {copy / 1e9:.0f} GB/s", rows, device)
    print(text)


if __name__ == "__main__":
    main()
