"""Optimizers by the name of a preset, and parameter groups by patterns of names."""

from __future__ import annotations

import csv
import fnmatch
import importlib.resources
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from . import optimizers
from .engine import LowBitOptimizer
from .formats import near_miss
from .layout import PRESETS, Preset

__all__ = ["PRESETS", "Preset", "from_preset", "param_policy"]

_OPTIMIZERS: dict[str, type[LowBitOptimizer]] = {
    "adamw": optimizers.AdamW,
    "adam": optimizers.Adam,
    "lion": optimizers.Lion,
    "sgd": optimizers.SGD,
}


def from_preset(
    params: ParamsT, preset: str | None = "balanced", optimizer: str = "adamw", lr: float | None = None, **kwargs: Any
) -> LowBitOptimizer:
    """Make an optimizer from a preset.

    Args:
        params: parameters, named parameters or parameter groups.
        preset: a name of `PRESETS`; None where `state` and `weights` are given.
        optimizer: "adamw", "adam", "lion" or "sgd".
        lr: learning rate; None takes the optimizer's default.
        **kwargs: any other argument of the optimizer.

    Raises:
        ValueError: unknown preset or optimizer, with the nearest name.
    """
    if optimizer not in _OPTIMIZERS:
        names = ", ".join(_OPTIMIZERS)
        raise ValueError(
            f"optimizer: unknown {optimizer!r}; choose one of {names}{near_miss(optimizer, tuple(_OPTIMIZERS))}"
        )
    if lr is not None:
        kwargs["lr"] = lr
    return _OPTIMIZERS[optimizer](params, preset=preset, **kwargs)


def measured() -> dict[str, dict[str, float]]:
    """Return what each preset cost in a small training run, by preset: the rows of `benchmarks/results/demo.csv`.

    `gap_pct` is the pretraining loss against `reference` in percent, `finetune_gain_pct` the share of fp32's
    fine-tuning progress that the bf16 forward pass sees. One seed, a model of 0.4M parameters.
    """
    text = importlib.resources.files(__package__).joinpath("measured.csv").read_text()
    rows = {row.pop("recipe"): row for row in csv.DictReader(text.splitlines())}
    return {name: {key: float(value) for key, value in rows[name].items()} for name in PRESETS}


def param_policy(
    model: nn.Module,
    rules: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    embeddings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Build parameter groups from patterns of parameter names, with fp32 state for embeddings.

    Low-bit state is known to hurt embeddings, whose rows see few gradients (arXiv 2110.02861). They are found by
    module type, so that a head tied to an embedding counts too.

    Args:
        model: gives the named parameters; frozen ones are left out, shared ones appear once.
        rules: shell patterns of names, such as `"*norm*"`, to group options. The first match wins, before
            `embeddings`.
        embeddings: group options of embedding weights; None is `{"state": "fp32"}`, and `{}` treats them as any other.

    Returns:
        Parameter groups with named parameters, for any optimizer of this package.

    Raises:
        ValueError: a pattern matches no trainable parameter.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64))
        >>> [group.get("state") for group in param_policy(model, {"*bias": {"weight_decay": 0.0}})]
        [None, 'fp32', None]
    """
    rules = rules or {}
    embeddings = {"state": "fp32"} if embeddings is None else embeddings
    rest: list[tuple[str, nn.Parameter]] = []
    embedded: list[tuple[str, nn.Parameter]] = []
    matched: dict[str, list[tuple[str, nn.Parameter]]] = {pattern: [] for pattern in rules}
    in_embedding = {id(param) for param in _embedding_weights(model)}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        pattern = next((pattern for pattern in rules if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is not None:
            matched[pattern].append((name, param))
        elif id(param) in in_embedding:
            embedded.append((name, param))
        else:
            rest.append((name, param))
    for pattern, params in matched.items():
        if not params:
            names = tuple(name for name, param in model.named_parameters() if param.requires_grad)
            raise ValueError(
                f"param_policy: pattern {pattern!r} matches no trainable parameter{near_miss(pattern, names)}"
            )
    groups = [{"params": rest}, {"params": embedded, **embeddings}]
    groups += [{"params": params, **rules[pattern]} for pattern, params in matched.items()]
    return [group for group in groups if group["params"]]


def _embedding_weights(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight
