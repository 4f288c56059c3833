"""A transformer of 125M parameters in bf16 on the bytes of Python's manual: `python -m benchmarks.gpu.train`.

The same batches and the same initial weights for every recipe, one seed. `torch fp32` keeps its weights in fp32; all
models compute in bf16.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..byte_lm import ByteTransformer, Corpus, manual_text
from .common import RECIPES, arguments, make_recipe, wait, write


@dataclass(frozen=True)
class Size:
    """Shape of the model and length of the run."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float = 3e-4


FULL = Size(width=896, layers=13, heads=14, context=256, batch=32, steps=200)
TINY = Size(width=16, layers=0, heads=2, context=16, batch=2, steps=2)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-byte loss in nats, of logits in fp32."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, 256), tokens[:, 1:].reshape(-1))


def run(recipe: str, start: nn.Module, size: Size, corpus: Corpus, device: str, backend: str) -> dict[str, Any]:
    """Train one copy of `start`, and return a row of the CSV."""
    model = copy.deepcopy(start)
    lr = size.lr
    if recipe == "torch fp32":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    else:
        model = model.bfloat16()
        optimizer = (
            torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
            if recipe == "torch bf16"
            else make_recipe(recipe, backend, lr)(model.parameters())
        )
    warmup = size.steps // 20 + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / size.steps)),
    )
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for _, tokens in zip(range(size.steps), corpus.batches(seed=0), strict=False):
        loss = loss_of(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        wait(device)
        began = time.perf_counter()
        optimizer.step()
        wait(device)
        times.append(time.perf_counter() - began)
        schedule.step()
        losses.append(loss.detach())
    with torch.no_grad():
        batches = corpus.validation(2 * size.batch).to(device).split(size.batch)
        valid = statistics.mean(loss_of(model, tokens).item() for tokens in batches)
    return {
        "recipe": recipe,
        "params": sum(param.numel() for param in model.parameters()),
        "steps": size.steps,
        "train_loss": round(torch.stack(losses[-max(size.steps // 10, 1) :]).mean().item(), 4),
        "valid_loss": round(valid, 4),
        "first_step_s": round(times[0], 3),
        "median_step_ms": round(statistics.median(times) * 1e3, 3),
        "peak_gb": None if device == "cpu" else round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def main() -> None:
    """Train with every recipe, print the table and write it."""
    options = arguments(__doc__)
    size = TINY if options.tiny else FULL
    torch.manual_seed(0)
    start = ByteTransformer(size.width, size.layers, size.heads, size.context).to(options.device)
    corpus = Corpus(manual_text(), size.context, size.batch)
    rows = []
    for recipe in ("torch fp32", "torch bf16", *RECIPES):
        rows.append(run(recipe, start, size, corpus, options.device, options.backend))
        text = write("train", "Training a byte-level transformer in bf16", rows, options.device)
        print(rows[-1], flush=True)
    print(text)


if __name__ == "__main__":
    main()
