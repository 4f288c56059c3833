"""Recipes: which optimizer trains a task, as data. Their names are values of the CSV."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import lowbit_optim
from lowbit_optim import LowBitOptimizer
from lowbit_optim.formats import FORMATS
from lowbit_optim.weights import WEIGHT_MODES

Named = Iterable[tuple[str, nn.Parameter]]
#: Hyper-parameters beside lr, the same for every library.
HYPER: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        "lion": {"betas": (0.9, 0.99), "weight_decay": 0.01},
        "sgd": {"momentum": 0.9},
    }
)
_CLASSES = {"adamw": lowbit_optim.AdamW, "lion": lowbit_optim.Lion, "sgd": lowbit_optim.SGD}


@dataclass(frozen=True)
class Recipe:
    """One way to store weights and state.

    Attributes:
        name: value of the CSV's column.
        part: the set of recipes that it belongs to; tasks name the sets that run on them.
        weights: how weights are stored, for the CSV.
        state: how the slots are stored, for the CSV.
        optimizer: "adamw", "lion" or "sgd".
        library: whose optimizer it is, a key of `MAKERS`.
        made: the class's name in that library, where it has several.
        options: its further arguments.
        dtype: of the weights.
        sweep: whether it also runs at half and twice the reference's learning rate.
    """

    name: str
    part: str
    weights: str
    state: str
    optimizer: str = "adamw"
    library: str = "lowbit_optim"
    made: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    sweep: bool = False

    @property
    def yardstick(self) -> str:
        """Name of the recipe that the gap and the distance are relative to: the same optimizer, master and fp32."""
        return "reference" if self.optimizer == "adamw" else f"{self.optimizer} master + fp32"

    def make(self, params: Named, lr: float, seed: int) -> torch.optim.Optimizer:
        """Return the optimizer.

        Args:
            params: named parameters of the model, in the recipe's dtype.
            lr: learning rate.
            seed: of the rounding noise, for those that take one.
        """
        return MAKERS[self.library](self, params, lr, seed)


# How each library's optimizers are made -------------------------------------------------------------------------------


def _make_own(recipe: Recipe, params: Named, lr: float, seed: int) -> torch.optim.Optimizer:
    storage = {"state": recipe.state, "weights": recipe.weights, "seed": seed}
    return _CLASSES[recipe.optimizer](params, lr=lr, **HYPER[recipe.optimizer], **storage)


def _make_torch(recipe: Recipe, params: Named, lr: float, seed: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in params], lr=lr, fused=True, **HYPER["adamw"])


def _make_torchao(recipe: Recipe, params: Named, lr: float, seed: int) -> torch.optim.Optimizer:
    made = getattr(importlib.import_module("torchao.optim"), recipe.made)
    optimizer: torch.optim.Optimizer = made([p for _, p in params], lr=lr, **HYPER["adamw"], **recipe.options)
    return optimizer


def _make_bitsandbytes(recipe: Recipe, params: Named, lr: float, seed: int) -> torch.optim.Optimizer:
    made = importlib.import_module("bitsandbytes.optim").AdamW8bit
    optimizer: torch.optim.Optimizer = made([p for _, p in params], lr=lr, **HYPER["adamw"], min_8bit_size=4096)
    return optimizer


def _make_optimi(recipe: Recipe, params: Named, lr: float, seed: int) -> torch.optim.Optimizer:
    made = importlib.import_module("optimi").AdamW
    optimizer: torch.optim.Optimizer = made([p for _, p in params], lr=lr, **HYPER["adamw"], kahan_sum=True)
    return optimizer


MAKERS: Mapping[str, Callable[[Recipe, Named, float, int], torch.optim.Optimizer]] = MappingProxyType(
    {
        "lowbit_optim": _make_own,
        "torch": _make_torch,
        "torchao": _make_torchao,
        "bitsandbytes": _make_bitsandbytes,
        "optimi": _make_optimi,
    }
)


# The recipes ----------------------------------------------------------------------------------------------------------


def _presets() -> list[Recipe]:
    return [
        Recipe(name, "main", preset.weights, preset.state, sweep=True) for name, preset in lowbit_optim.PRESETS.items()
    ]


def _torch() -> list[Recipe]:
    fp32 = Recipe("torch fp32", "main", "fp32", "fp32", library="torch", dtype=torch.float32)
    return [fp32, Recipe("torch bf16", "main", "nearest", "bf16 nearest", library="torch")]


def _torchao() -> list[Recipe]:
    """Stochastic rounding as torchao offers it, and its default, which is a plain cast."""
    found = []
    for state, made in {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}.items():
        for rounded in True, False:
            found.append(
                Recipe(
                    f"torchao {made}{' SR' if rounded else ''}",
                    ("peers" if state == "fp8" else "main") if rounded else "plain",
                    "stochastic" if rounded else "nearest",
                    f"torchao {state}",
                    library="torchao",
                    made=made,
                    options={"bf16_stochastic_round": rounded},
                    sweep=rounded and state != "fp8",
                )
            )
    return found


def _isolated() -> list[Recipe]:
    """Every weight mode with exact state, and every state format with exact weights; presets are not repeated."""
    modes = [mode for mode in WEIGHT_MODES if mode != "master"]
    formats = [name for name in FORMATS if name != "fp32"]
    return [
        *(Recipe(f"{mode} + fp32", "weights", mode, "fp32") for mode in modes),
        *(Recipe(f"split16 + {name}", "state", "split16", name) for name in formats),
        Recipe("stochastic + fp8", "state", "stochastic", "fp8"),
    ]


def _peers() -> list[Recipe]:
    return [
        Recipe("bitsandbytes AdamW8bit", "peers", "nearest", "bitsandbytes 8bit", library="bitsandbytes"),
        Recipe("optimi AdamW Kahan", "peers", "kahan", "bf16 nearest", library="optimi"),
    ]


def _others(optimizer: str) -> list[Recipe]:
    pairs = (("master", "fp32"), ("stochastic", "fp32"), ("stochastic", "int8"), ("split8", "int8"), ("split8", "int4"))
    return [
        Recipe(f"{optimizer} {weights} + {state}", optimizer, weights, state, optimizer=optimizer)
        for weights, state in pairs
    ]


#: Every recipe by name, the most telling first.
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            *_presets()[:1],
            *_torch(),
            *_presets()[1:],
            *_torchao(),
            *_isolated(),
            *_peers(),
            *_others("lion"),
            *_others("sgd"),
        )
    }
)


# What an optimizer keeps ----------------------------------------------------------------------------------------------


def exact_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the fp32 values that the optimizer's weights stand for, with what it keeps beside them."""
    if isinstance(optimizer, LowBitOptimizer):
        full = optimizer.fp32_state_dict(model)
        return [full[name].float() for name, _ in model.named_parameters()]
    # Asked for by `get`: the state of a parameter that was never stepped must stay away.
    kept = (optimizer.state.get(param, {}).get("kahan_comp", 0.0) for param in model.parameters())
    return [param.detach().float() + more for param, more in zip(model.parameters(), kept, strict=True)]


def intended_updates(recipe: Recipe, optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what the next step would add to each weight in fp32 arithmetic, from the optimizer's own state.

    Args:
        recipe: the optimizer's.
        optimizer: parameters have gradients; nothing is changed.
        weights: exact values of its parameters, in order.
    """
    twins = [nn.Parameter(weight.clone()) for weight in weights]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for twin, param in zip(twins, params, strict=True):
        twin.grad = param.grad.float()
    shadow = _CLASSES[recipe.optimizer](twins, state="fp32", backend="eager")
    shadow.load_state_dict(_optimi_state(optimizer) if recipe.library == "optimi" else _slots_alone(optimizer))
    shadow.step()
    return [twin.detach() - weight for twin, weight in zip(twins, weights, strict=True)]


def _slots_alone(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state dict without what belongs to weights: the twins' are exact."""
    extras = {name for mode in WEIGHT_MODES.values() for name in mode.extras}
    saved = optimizer.state_dict()
    state = {
        key: {name: value for name, value in entry.items() if name not in extras}
        for key, entry in saved["state"].items()
    }
    return {**saved, "state": state}


def _optimi_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return optimi's moments, which it keeps corrected for their bias, in the form of torch's AdamW."""
    (group,) = optimizer.param_groups
    step, params = int(group["step"]), group["params"]
    betas = group["beta1"], group["beta2"]
    twin = torch.optim.AdamW(
        [nn.Parameter(param.detach().float()) for param in params],
        lr=group["lr"],
        betas=betas,
        eps=group["eps"],
        weight_decay=HYPER["adamw"]["weight_decay"],
    )
    state = {
        place: {
            "step": torch.tensor(float(step)),
            "exp_avg": optimizer.state[param]["exp_avg"].float() * (1 - betas[0] ** step),
            "exp_avg_sq": optimizer.state[param]["exp_avg_sq"].float() * (1 - betas[1] ** step),
        }
        for place, param in enumerate(params)
    }
    return {"state": state, "param_groups": twin.state_dict()["param_groups"]}
