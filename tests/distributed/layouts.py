"""Models whose parameters lie on the ranks in every way that they do in practice, made with torch's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Weights(nn.Module):
    """A module of parameters of given shapes and values, for layouts that need no forward pass."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for place, shape in enumerate(shapes):
            self.register_parameter(f"weight{place}", nn.Parameter(torch.empty(shape)))


def fully_sharded(model: nn.Module, **options: object) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)  # type: ignore[call-overload]
    return model


def hybrid(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model


class Block(nn.Module):
    """A norm and two linear layers, the smallest model with every kind of tensor parallelism; for (batch, seq, 64)."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, hidden)
        self.down = nn.Linear(hidden, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.norm(x)).relu())
        return result


def tensor_parallel(model: nn.Module, mesh: object = None) -> nn.Module:
    """Split the layers' features over the ranks, and the sequence between them; inputs are each rank's part of it."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan)  # type: ignore[arg-type]


def fsdp_and_tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def placed(*placements: object, mesh_shape: tuple[int, ...]) -> Callable[[nn.Module], nn.Module]:
    """Place every parameter alike, as expert-parallel and hand-written layouts do."""

    def place(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", mesh_shape)
        for name, param in list(model.named_parameters()):
            sharded = distribute_tensor(param.detach(), mesh, placements)  # type: ignore[arg-type]
            model.register_parameter(name, nn.Parameter(sharded))
        return model

    return place


@dataclass(frozen=True)
class Layout:
    """A way in which a model lies on `world` ranks."""

    world: int
    model: Callable[[], nn.Module]
    shard: Callable[[nn.Module], nn.Module]


LAYOUTS: Mapping[str, Layout] = {
    "fsdp even": Layout(2, lambda: Weights((64, 96)), fully_sharded),
    "fsdp uneven": Layout(2, lambda: Weights((67, 96)), fully_sharded),
    "fsdp empty shard": Layout(2, lambda: Weights((1, 8192)), fully_sharded),
    "fsdp 1-D": Layout(2, lambda: Weights((8192,)), fully_sharded),
    "fsdp 1-D unaligned": Layout(2, lambda: Weights((5000,)), fully_sharded),
    "fsdp rows unaligned": Layout(2, lambda: Weights((6, 1000)), fully_sharded),
    "fsdp Shard(1)": Layout(
        2, lambda: Weights((96, 128)), lambda model: fully_sharded(model, shard_placement_fn=lambda param: Shard(1))
    ),
    "fsdp experts": Layout(2, lambda: Weights((6, 40, 64)), fully_sharded),
    "fsdp cpu offload": Layout(
        2, Block, lambda model: fully_sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "fsdp fp32 reduce": Layout(
        2,
        Block,
        lambda model: fully_sharded(
            model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ),
    ),
    "tp colwise, rowwise, norm": Layout(2, Block, tensor_parallel),
    "tp unaligned": Layout(2, lambda: Block(96), tensor_parallel),
    "replicated": Layout(2, lambda: Weights((64, 96)), placed(Replicate(), mesh_shape=(2,))),
    "hsdp": Layout(4, lambda: Weights((64, 96), (67, 96)), hybrid),
    "fsdp + tp": Layout(4, Block, fsdp_and_tensor_parallel),
    "tp + fsdp, hand-placed": Layout(4, lambda: Weights((64, 128)), placed(Shard(1), Shard(0), mesh_shape=(2, 2))),
    "experts, rows": Layout(4, lambda: Weights((6, 40, 64)), placed(Shard(0), Shard(1), mesh_shape=(2, 2))),
    "experts, columns": Layout(4, lambda: Weights((6, 40, 64)), placed(Shard(0), Shard(2), mesh_shape=(2, 2))),
    "experts, rows, columns": Layout(4, lambda: Weights((6, 40, 64)), placed(Shard(1), Shard(2), mesh_shape=(2, 2))),
}


def fill(model: nn.Module, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Give a model the same values whatever the rank's generators hold."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def box_of(sharded: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes, starts) of the local shard, by torch's own account."""
    sizes, starts = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return tuple(sizes), tuple(starts)


def local_part(whole: Tensor, sharded: Tensor) -> Tensor:
    """Return the part of a whole tensor that a DTensor holds on this rank."""
    if not isinstance(sharded, DTensor):
        return whole
    sizes, starts = box_of(sharded)
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def shard_like(whole: Tensor, sharded: Tensor) -> Tensor:
    """Return a whole tensor in the layout of a DTensor."""
    if not isinstance(sharded, DTensor):
        return whole
    local = local_part(whole, sharded).contiguous()
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def is_aligned(param: Tensor, block: int = 32) -> bool:
    """Whether each block of the local shard is a block of the whole tensor, cut from it or its ragged end."""
    if not isinstance(param, DTensor) or not param.to_local().numel():
        return True
    places = local_part(torch.arange(math.prod(param.shape)).view(param.shape), param).reshape(-1)
    whole = places.numel() // block * block
    rows = places[:whole].view(-1, block)
    runs = (rows[:, :1] % block == 0).all() and (rows == rows[:, :1] + torch.arange(block)).all()
    rest = places[whole:]
    at_end = not rest.numel() or (rest[0] % block == 0 and rest[-1] == math.prod(param.shape) - 1)
    return bool(runs and at_end)
