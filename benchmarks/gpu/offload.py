"""What CPU offload costs, and how much of its copying backward hides: `python -m benchmarks.gpu.offload`.

An iteration is forward, backward and step of a transformer in bf16. The step is made on the device; on the host, with
each gradient copied as backward makes it; and on the host, with all gradients copied after backward. `step_ms` is what
an iteration takes beyond forward and backward. `hidden_share` is the share of the time of one copy of all gradients by
which forward and backward do not become longer when gradients are copied meanwhile.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import lowbit_optim

from ..byte_lm import ByteTransformer, Corpus, manual_text
from ..harness import interleaved, median_ms
from .common import Make, add_row, arguments, copy_seconds, imported, make_recipe, seconds, wait, write
from .train import TINY, Size, loss_of

MODELS = {
    "100M": Size(width=768, layers=14, heads=12, context=256, batch=32, steps=8),
    "1B": Size(width=2048, layers=20, heads=16, context=256, batch=32, steps=5),
}
#: Recipes by model: steps on a host take long.
RECIPES = {"100M": ("light", "balanced", "bf16"), "1B": ("light",), "tiny": ("light",)}
DEVICE, WITHIN, AFTER = "device", "host, copies in backward", "host, copies after backward"
PLACES = (DEVICE, WITHIN, AFTER)
LR = 1e-3


def implementations(recipes: Sequence[str], backend: str, with_peers: bool) -> Iterator[tuple[str, str, str, Make]]:
    """Yield (implementation, recipe, where it steps, maker)."""
    for recipe in recipes:
        host = functools.partial(
            lowbit_optim.CPUOffloadOptimizer, optimizer_class=lowbit_optim.AdamW, preset=recipe, lr=LR
        )
        for place in PLACES:
            yield "lowbit_optim", recipe, place, make_recipe(recipe, backend, LR) if place == DEVICE else host
    fused = {"lr": LR, "fused": True}
    yield "torch", "AdamW fused bfloat16", DEVICE, functools.partial(torch.optim.AdamW, **fused)
    peer = imported("torchao", "torchao.optim", "CPUOffloadOptimizer") if with_peers else None
    if peer is not None:
        yield "torchao", "AdamW fused bfloat16", WITHIN, lambda params: peer(params, torch.optim.AdamW, **fused)


def make_model(size: Size, device: str) -> ByteTransformer:
    """Return the same model in bf16 at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return ByteTransformer(size.width, size.layers, size.heads, size.context).bfloat16()


def set_gradients(model: nn.Module, tokens: Tensor, place: str) -> None:
    """Compute gradients, which an offloading optimizer sees in backward or only when it steps."""
    loss = loss_of(model, tokens)
    if place != AFTER:
        loss.backward()
        return
    # Hooks on the accumulation of gradients are not called.
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad


def measure(place: str, size: Size, make: Make, batches: list[Tensor], copy_s: float, device: str) -> dict[str, Any]:
    """Return what is measured of one optimizer."""
    model = make_model(size, device)
    optimizer = make(model.parameters())
    set_gradients(model, batches[0], place)
    first = seconds(optimizer.step, device)

    def backward(place: str) -> None:
        optimizer.zero_grad()
        set_gradients(model, batches[0], place)
        wait(device)

    # In turn, since their difference is small.
    backwards = interleaved({way: functools.partial(backward, way) for way in (AFTER, WITHIN)}, len(batches))
    alone, copying = (statistics.median(backwards[way]) for way in (AFTER, WITHIN))

    def iteration(tokens: Tensor) -> None:
        optimizer.zero_grad()
        set_gradients(model, tokens, place)
        optimizer.step()

    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds(functools.partial(iteration, tokens), device) for tokens in batches]
    peak = None if device == "cpu" else torch.cuda.max_memory_allocated()
    with torch.no_grad():
        loss = loss_of(model, batches[0]).item()
    return {
        "first_step_s": round(first, 3),
        "backward_ms": round(alone * 1e3, 3),
        "iteration_ms": round(median_ms(times), 3),
        "step_ms": round(median_ms(times) - alone * 1e3, 3),
        "copy_ms": round(copy_s * 1e3, 3),
        "hidden_share": round(1 - (copying - alone) / copy_s, 3) if place == WITHIN else None,
        "peak_gb": None if peak is None else round(peak / 1e9, 2),
        "loss": round(loss, 4),
    }


def main() -> None:
    """Measure, print the table and write it."""
    options = arguments(__doc__)
    device = options.device
    models = {"tiny": replace(TINY, steps=3)} if options.tiny else MODELS
    rows: list[dict[str, Any]] = []
    for name, size in models.items():
        corpus = Corpus(manual_text(), size.context, size.batch)
        batches = [tokens.to(device) for tokens in islice(corpus.batches(seed=0), size.steps)]
        numel = sum(param.numel() for param in make_model(size, device).parameters())
        source = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        copy_s = copy_seconds(source, torch.empty_like(source, device="cpu", pin_memory=device != "cpu"), device)
        for impl, recipe, place, make in implementations(RECIPES[name], options.backend, not options.tiny):
            about = {"impl": impl, "recipe": recipe, "step": place, "model": name, "params": numel}
            add_row(rows, about, functools.partial(measure, place, size, make, batches, copy_s, device), device)
            text = write("offload", "An iteration with state and step on the device or on the host", rows, device)
    print(text)


if __name__ == "__main__":
    main()
