"""What an optimizer would do with each parameter, and what it would cost, without making one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .engine import LowBitOptimizer
from .presets import from_preset
from .tables import aligned


@dataclass(frozen=True)
class PlanRow:
    """One parameter: how it is stored, on what backend it steps, and its bytes on the device with the largest shard.

    Attributes:
        name: the parameter's name, or its place where it has none.
        shape: global shape.
        state: spec of each slot's format, joined by commas.
        weights: weight mode.
        backend: step backend.
        weight_bytes: bytes of the weight.
        state_bytes: bytes of slots and extra tensors.
        whole_bytes: bytes of the weight before sharding.
        reason: why not what was asked for, or an empty string.
    """

    name: str
    shape: tuple[int, ...]
    state: str
    weights: str
    backend: str
    weight_bytes: int
    state_bytes: int
    whole_bytes: int
    reason: str

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient, which has the weight's shape and dtype."""
        return self.weight_bytes


@dataclass(frozen=True)
class Plan:
    """A row for each parameter and the sums over them. Activations and buffers are not counted.

    Attributes:
        preset: the preset's name, or None.
        world_size: number of devices that share each parameter.
        rows: one per parameter.
    """

    preset: str | None
    world_size: int
    rows: tuple[PlanRow, ...]

    @property
    def numel(self) -> int:
        """Number of parameters' elements, before sharding."""
        return sum(_numel(row.shape) for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on one device."""
        return sum(row.weight_bytes for row in self.rows)

    @property
    def state_bytes(self) -> int:
        """Bytes of all optimizer state on one device."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients on one device."""
        return sum(row.gradient_bytes for row in self.rows)

    @property
    def largest_gradient_bytes(self) -> int:
        """Bytes of the gradients that gradient release still holds together on one device.

        That is one parameter's on one device, and one block's where parameters are sharded, since `fully_shard`
        reduces the gradients of a block at once.
        """
        return self._largest([(row.name, row.gradient_bytes) for row in self.rows])

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the largest block's weights and gradients before sharding; 0 on one device.

        A sharded model cannot do with less during its backward pass: the block's weights are gathered, and its
        gradients are whole until they are reduced. Prefetching holds more.
        """
        if self.world_size == 1:
            return 0
        return 2 * self._largest([(row.name, row.whole_bytes) for row in self.rows])

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients, state and what is gathered, on one device."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes + self.gathered_bytes

    @property
    def released_bytes(self) -> int:
        """The same with gradient release (`step_in_backward`)."""
        return self.total_bytes - self.gradient_bytes + self.largest_gradient_bytes

    def _largest(self, sizes: list[tuple[str, int]]) -> int:
        """Return the largest sum over what `fully_shard` usually wraps together; over one parameter on one device."""
        sums: dict[object, int] = {}
        for place, (name, size) in enumerate(sizes):
            key = place if self.world_size == 1 else _block(name)
            sums[key] = sums.get(key, 0) + size
        return max(sums.values(), default=0)

    @property
    def bytes_per_param(self) -> float:
        """Bytes of weight and state per element, over all devices."""
        return (self.weight_bytes + self.state_bytes) * self.world_size / max(self.numel, 1)

    def __str__(self) -> str:
        table = [("parameter", "shape", "state", "weights", "backend", "bytes", "note")]
        for row in self.rows:
            size = f"{row.weight_bytes + row.state_bytes:,}"
            table.append(
                (
                    row.name,
                    "x".join(map(str, row.shape)) or "scalar",
                    row.state,
                    row.weights,
                    row.backend,
                    size,
                    row.reason,
                )
            )
        total = f"{self.numel:,} parameters, {self.weight_bytes + self.state_bytes:,} bytes per device"
        return f"{aligned(table)}\n{total}, {self.bytes_per_param:.3f} bytes per parameter (weight + state)"


def _block(name: str) -> str:
    """Return the numbered block that a parameter belongs to, such as "model.layers.3"; "" for the rest of the model."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return found[0] if found else ""


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def plan(
    model_or_params: nn.Module | Iterable[Any],
    preset: str | None = "balanced",
    world_size: int = 1,
    optimizer: str = "adamw",
    **kwargs: Any,
) -> Plan:
    """Say how each parameter would be stored and stepped, and what that costs.

    Args:
        model_or_params: a model, which may be on the meta device, or what an optimizer takes as `params`.
        preset: a name of `PRESETS`; None where `state` and `weights` are given.
        world_size: number of devices that share each parameter, along its first dimension as FSDP2 does; the largest
            share is counted.
        optimizer: as in `from_preset`.
        **kwargs: other arguments of the optimizer.

    Returns:
        A `Plan`; printing it gives a table.

    Raises:
        ValueError: an argument is not valid, as the optimizer itself would report it.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if isinstance(model_or_params, nn.Module):
        model_or_params = [(name, param) for name, param in model_or_params.named_parameters() if param.requires_grad]
    made = from_preset(model_or_params, preset, optimizer, **kwargs)
    rows = tuple(_row(made, *named, world_size) for named in made.named_params())
    return Plan(preset, world_size, rows)


def _row(optimizer: LowBitOptimizer, name: str, param: Tensor, group: dict[str, Any], world_size: int) -> PlanRow:
    layout = optimizer.layout_for(param, group)
    # The largest shard is that of the first devices: whole rows.
    numel = -(-param.shape[0] // world_size) * _numel(param.shape[1:]) if param.dim() else 1
    state_bytes = sum(numel * dtype.itemsize for dtype in layout.mode.extras.values())
    for fmt in layout.formats.values():
        state_bytes += sum(
            size * dtype.itemsize for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True)
        )
    return PlanRow(
        name=name.removeprefix("parameter ").strip("'"),
        shape=tuple(param.shape),
        state=",".join(fmt.spec for fmt in layout.formats.values()) or "none",
        weights=layout.mode.spec,
        backend=layout.backend,
        weight_bytes=numel * param.element_size(),
        state_bytes=state_bytes,
        whole_bytes=param.numel() * param.element_size(),
        reason=layout.reason,
    )
