"""Checkpoints saved at one number of ranks and loaded at another, with distributed checkpoint (DCP)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from lowbit_optim import AdamW

from .layouts import Weights, box_of, fill, fully_sharded, is_aligned, shard_like
from .matrix import stored

SHAPES: tuple[tuple[int, ...], ...] = (
    (256, 256),
    (257, 256),
    (515, 96),
    (65, 128),
    (66, 128),
    (160, 32),
    (64, 96),
    (3, 8),
    (3, 8192),
    (1000, 50),
    (5000,),
    (6, 40, 64),
    (1,),
    (2,),
)
RECIPES: dict[str, dict[str, Any]] = {
    "int8 split8": {"state": "int8", "weights": "split8"},
    "int4 stochastic": {"state": "int4", "weights": "stochastic"},
    "fp8 kahan": {"state": "fp8", "weights": "kahan"},
    "bf16 master": {"state": "bf16", "weights": "master"},
}
LR = 1e-2
#: Largest relative error that one more encoding adds to a decoded value where blocks are cut, as a share of the
#: block's largest value for first moments and of the value itself for second ones: one code step. fp8 keeps four
#: significant bits of a second moment's root: half a step is 6.3 % of the root, 12.9 % of the moment.
STEP_SIZE = {"int8": 0.04, "fp8": 0.13, "int4": 0.51}


def make(recipe: str) -> tuple[nn.Module, AdamW]:
    """Return a model sharded over all ranks and its optimizer."""
    model = fully_sharded(fill(Weights(*SHAPES), torch.bfloat16))
    options = {"lr": LR, "min_quantized_numel": 0, "backend": "eager", **RECIPES[recipe]}
    return model, AdamW(model.parameters(), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Step on gradients that depend on the step's number only."""
    generator = torch.Generator().manual_seed(100 + number)
    for param in model.parameters():
        param.grad = shard_like(torch.randn(param.shape, generator=generator).to(param.dtype), param)
    optimizer.step()


def pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Any, Tensor]]:
    """Return (place in the whole, values) of each local shard of weights and state."""
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        for key, value in {"weight": param.detach(), **optimizer.state[param]}.items():
            if key != "step":
                found[f"{name}.{key}"] = box_of(param)[::-1], stored(value).detach().clone()
    return found


@dataclass
class Saved:
    """What a run held when it saved, and after one step more, in pieces by rank; and which shards cut blocks."""

    at_save: list[dict[str, tuple[Any, Tensor]]]
    one_later: list[dict[str, tuple[Any, Tensor]]]
    aligned: dict[str, bool]


def save(rank: int, folder: Path, recipe: str) -> Any:
    """Take three steps, save, and take one more."""
    model, optimizer = make(recipe)
    for number in range(3):
        step(model, optimizer, number)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=folder)
    at_save = pieces(model, optimizer)
    step(model, optimizer, 3)
    aligned = {name: is_aligned(param) for name, param in model.named_parameters()}
    return at_save, pieces(model, optimizer), aligned


def load(rank: int, folders: list[Path], recipe: str) -> list[Any]:
    """Load each checkpoint into fresh objects, and take one step."""
    results = []
    for folder in folders:
        model, optimizer = make(recipe)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
        loaded = pieces(model, optimizer)
        step(model, optimizer, 3)
        aligned = {name: is_aligned(param) for name, param in model.named_parameters()}
        results.append((loaded, pieces(model, optimizer), aligned))
        dist.barrier()
    return results


def gather(on_ranks: list[Any]) -> Saved:
    """Put what each rank returned together."""
    at_save, one_later, aligned = zip(*on_ranks, strict=True)
    return Saved(list(at_save), list(one_later), {name: all(rank[name] for rank in aligned) for name in aligned[0]})


def assemble(ranks: list[dict[str, tuple[Any, Tensor]]], name: str) -> Tensor:
    """Return the whole tensor that the pieces of a name make."""
    found = [rank[name] for rank in ranks]
    extent = [max(start[dim] + size[dim] for (start, size), _ in found) for dim in range(len(found[0][0][0]))]
    whole = torch.empty(extent, dtype=found[0][1].dtype)
    for (starts, sizes), values in found:
        whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))] = values
    return whole
