"""This package's optimizers in a torchtitan config: import it only where torchtitan is installed.

torchtitan 0.3 knows its optimizers by name and has no registry, so that others come by a subclass of its container.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from .. import optimizers
from ..engine import LowBitOptimizer
from ..formats import near_miss
from ..layout import get_preset

#: Optimizers by what a parameter group of a config calls them.
OPTIMIZERS: dict[str, type[LowBitOptimizer]] = {
    f"lowbit_optim.{name}": member
    for name, member in vars(optimizers).items()
    if isinstance(member, type) and issubclass(member, LowBitOptimizer) and not name.startswith("_")
    if member is not LowBitOptimizer
}

#: Those whose names say nothing of formats, which a preset may choose.
_OPEN = tuple(f"lowbit_optim.{name}" for name in ("AdamW", "Adam", "Lion", "SGD"))


class LowBitOptimizersContainer(OptimizersContainer):  # type: ignore[misc] # torchtitan need not be installed
    """torchtitan's container of optimizers, with those of this package beside torch's.

    A parameter group names one as `optimizer_name="lowbit_optim.AdamW8bit"`, and its `optimizer_kwargs` may hold any
    argument of it: `preset`, `state`, `weights`, `seed` and so on. Names without `lowbit_optim.` are torchtitan's.

    Args:
        config: as in torchtitan, and `preset`.
        model_parts: as in torchtitan.

    Raises:
        NotImplementedError: an optimizer's name is known to neither; the message has the nearest one.
        ValueError: unknown preset.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc] # as above
        """Fields of torchtitan's config, and one more."""

        preset: str | None = None
        """Preset of the groups of `lowbit_optim.AdamW`, `Adam`, `Lion` and `SGD` that choose no preset, state or
        weights themselves. On the command line: --optimizer.preset balanced"""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.preset is not None:
            preset = get_preset(config.preset).name
            config = copy.copy(config)
            config.param_groups = [_with_preset(group, preset) for group in config.param_groups]
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name in OPTIMIZERS:
            return OPTIMIZERS[name]
        try:
            factory: Callable[..., torch.optim.Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
        except NotImplementedError as error:
            nearest = near_miss("lowbit_optim." + name.removeprefix("lowbit_optim."), tuple(OPTIMIZERS))
            raise NotImplementedError(f"{str(error).rstrip('.')}{nearest}") from None
        return factory


def _with_preset(group: ParamGroupConfig, preset: str) -> ParamGroupConfig:
    chosen = {"preset", "state", "weights"} & group.optimizer_kwargs.keys()
    if group.optimizer_name not in _OPEN or chosen:
        return group
    return replace(group, optimizer_kwargs={**group.optimizer_kwargs, "preset": preset})


def default_lowbit(
    lr: float = 8e-4, preset: str | None = "balanced", **kwargs: Any
) -> LowBitOptimizersContainer.Config:
    """Return a config with one group of AdamW for all parameters, as torchtitan's `default_adamw` does.

    Args:
        lr: learning rate.
        preset: name of a preset of `lowbit_optim.PRESETS`; None where `state` and `weights` are given.
        **kwargs: other arguments of `lowbit_optim.AdamW`; betas and weight decay are those of `default_adamw`.
    """
    arguments = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **kwargs}
    group = ParamGroupConfig(pattern=r".*", optimizer_name="lowbit_optim.AdamW", optimizer_kwargs=arguments)
    return LowBitOptimizersContainer.Config(param_groups=[group], preset=preset)
