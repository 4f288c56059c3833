"""Gradient release: each parameter is stepped as soon as its gradient has arrived, and the gradient is freed.

A backward pass then holds the gradients of a layer or so in place of those of the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .engine import LowBitOptimizer
from .sharding import is_fsdp1


class InBackward:
    """What `step_in_backward` returns: a handle that undoes it.

    Use it as a context manager, or call `remove()`.
    """

    def __init__(self, optimizer: LowBitOptimizer) -> None:
        self._optimizer = optimizer
        self._places = {param: (name, group) for name, param, group in optimizer.named_params() if param.requires_grad}
        self._stepped: dict[Tensor, int] = {}
        self._hooks: list[Any] = []
        for param in self._places:
            self._hooks.append(param.register_post_accumulate_grad_hook(self._step_param))  # type: ignore[no-untyped-call]
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def _step_param(self, param: Tensor) -> None:
        if param.grad is None:
            return
        name, group = self._places[param]
        self._optimizer.step_params([(name, param, group)])
        self._stepped[param] = self._stepped.get(param, 0) + 1
        param.grad = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse what can only have meant something else; `step()` itself finds no gradient left to use."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        if closure is not None:
            raise RuntimeError("step_in_backward: a closure cannot be used, its backward pass takes the step already")
        most = max(self._stepped.values(), default=0)
        self._stepped.clear()
        if most > 1:
            raise RuntimeError(
                f"step_in_backward: {most} backward passes came before this step(), and each took a step of its own: "
                "gradients cannot be accumulated where they are released. Use larger batches, or remove the handle"
            )

    def remove(self) -> None:
        """Step only in `optimizer.step()` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> InBackward:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


def step_in_backward(
    model: nn.Module,
    optimizer: LowBitOptimizer,
    *,
    gradient_accumulation_steps: int = 1,
    clip_grad_norm: float | None = None,
) -> InBackward:
    """Step each parameter within the backward pass, as its gradient arrives, and free the gradient.

    The weights and state equal those of ordinary steps bit for bit. `optimizer.step()` may still be called, for
    learning-rate schedulers and trainers: it finds no gradients and does nothing. Learning rates must be set before
    the backward pass. Works on plain parameters and under FSDP2 (`fully_shard`, applied before this call).

    Args:
        model: the model whose backward passes are to step.
        optimizer: an optimizer of this package over its parameters.
        gradient_accumulation_steps: anything but 1 is refused, so that a configuration cannot ask for it in vain.
        clip_grad_norm: anything but None is refused likewise.

    Returns:
        A handle with `remove()`, also a context manager.

    Raises:
        ValueError: gradient accumulation or clipping by global norm is asked for, gradients are there already, or a
            parameter of the optimizer is not the model's.
        TypeError: the model is wrapped in DistributedDataParallel or FSDP1, or the optimizer is not of this package.
    """
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(f"step_in_backward needs an optimizer of lowbit_optim, got {type(optimizer).__name__}")
    if gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} cannot work with step_in_backward: each "
            "backward pass steps and frees its gradients, so there is nothing to add to"
        )
    if clip_grad_norm is not None:
        raise ValueError(
            f"clip_grad_norm={clip_grad_norm} cannot work with step_in_backward: the norm of all gradients is known "
            "when the last has arrived, and the first are used by then. Clip by value in a hook, or use step()"
        )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "step_in_backward cannot work with DistributedDataParallel, which averages gradients over ranks only after "
            "they have been accumulated; use fully_shard (FSDP2), or step()"
        )
    if any(is_fsdp1(module) for module in model.modules()):
        raise TypeError(
            "step_in_backward cannot work with FullyShardedDataParallel (FSDP1), which reduces and shards gradients "
            "only after they have been accumulated; use fully_shard (FSDP2), or step()"
        )
    owned = set(model.parameters())
    for name, param, _ in optimizer.named_params():
        if param not in owned:
            raise ValueError(f"step_in_backward: {name} of the optimizer is not a parameter of the model")
        if param.grad is not None:
            raise ValueError(f"step_in_backward: {name} has a gradient already; call optimizer.zero_grad() first")
    return InBackward(optimizer)
