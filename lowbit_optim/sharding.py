"""Sharded parameters: the one module that knows DTensor.

Everything else works on local tensors, between `local` and `like`. Compiled steps never see a global shape, and the
noise of a shard is that of its `region` of the whole parameter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .noise import WHOLE, Region

# Told at once: every step asks for each parameter several times.
_PLAIN = (Tensor, torch.nn.Parameter)


def _dtensor(tensor: Any) -> Any:
    """Return the tensor if it is a DTensor, else None; nothing is imported where no DTensor can exist yet."""
    if type(tensor) in _PLAIN:
        return None
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def are_plain(param: Tensor, grad: Tensor) -> bool:
    """Whether a parameter and its gradient are of torch's own classes; False proves nothing."""
    return type(param) in _PLAIN and type(grad) in _PLAIN


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, replicated ones included."""
    return _dtensor(tensor) is not None


def is_fsdp1(module: Any) -> bool:
    """Whether a module is wrapped in `FullyShardedDataParallel`, which flattens parameters and uses no DTensor."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def layout_name(tensor: Tensor) -> str:
    """Return how a tensor is laid out, for messages."""
    sharded = _dtensor(tensor)
    if sharded is None:
        return "a plain tensor"
    return f"placed as {tuple(sharded.placements)} on {sharded.device_mesh}"


def check_placements(param: Tensor) -> None:
    """Raise TypeError unless every rank holds a box of the parameter's values."""
    sharded = _dtensor(param)
    if sharded is None:
        return
    if any(placement.is_partial() for placement in sharded.placements):
        raise TypeError(f"parameters cannot be partial sums, this one is {layout_name(param)}")
    shape, _ = _box(sharded)
    if shape != tuple(local(param).shape):
        raise TypeError(
            f"its local shape is {tuple(local(param).shape)}, which no box of {tuple(param.shape)} "
            f"{layout_name(param)} has"
        )


def _box(sharded: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, global offsets) of the local shard."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, starts = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return tuple(shape), tuple(starts)


def _waited(tensor: Tensor) -> Tensor:
    """Return the result of a collective that may still be under way."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its storage, or a plain tensor as it is."""
    sharded = _dtensor(tensor)
    if sharded is None:
        return tensor
    with torch.no_grad():  # which hands out the shard itself, not a view of it
        return _waited(sharded.to_local())


def like(value: Tensor, param: Tensor) -> Tensor:
    """Return a local tensor as a DTensor with the mesh, placements, shape and stride of `param`, if that is one."""
    sharded = _dtensor(param)
    if sharded is None:
        return value
    return sharded.from_local(  # type: ignore[no-any-return]
        value, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def same_layout(value: Tensor, param: Tensor) -> bool:
    """Whether two tensors of one global shape lie on the ranks alike."""
    mine, theirs = _dtensor(value), _dtensor(param)
    if mine is None or theirs is None:
        return mine is theirs
    return bool(mine.device_mesh == theirs.device_mesh and mine.placements == theirs.placements)


def region(param: Tensor) -> Region:
    """Return where the local shard's elements lie in the whole parameter."""
    sharded = _dtensor(param)
    if sharded is None:
        return WHOLE
    shape, starts = _box(sharded)
    return Region.of_box(tuple(sharded.shape), starts, shape)


def local_grad(param: Tensor) -> Tensor:
    """Return the local shard of a parameter's gradient, in the parameter's own placements.

    Tensor parallelism can leave the gradient of a replicated parameter as partial sums: these are added up.
    """
    grad = param.grad
    assert grad is not None
    if not same_layout(grad, param):
        grad = _redistributed(grad, param)
    return local(grad)


def _redistributed(value: Tensor, param: Tensor) -> Tensor:
    mine, theirs = _dtensor(value), _dtensor(param)
    if mine is None or theirs is None or mine.device_mesh != theirs.device_mesh:
        raise ValueError(f"a tensor {layout_name(value)} does not fit a parameter {layout_name(param)}")
    return mine.redistribute(placements=theirs.placements)  # type: ignore[no-any-return]


def check_grad(param: Tensor) -> None:
    """Raise ValueError unless the gradient can be brought into the parameter's layout."""
    grad = param.grad
    assert grad is not None
    mine, theirs = _dtensor(grad), _dtensor(param)
    if (mine is None) != (theirs is None) or (mine is not None and mine.device_mesh != theirs.device_mesh):
        raise ValueError(f"its gradient is {layout_name(grad)}, the parameter {layout_name(param)}")


def everywhere(flag: Tensor, param: Tensor) -> Tensor:
    """Return whether a 0-d bool tensor is true on all ranks that share a parameter; every one of them must ask."""
    sharded = _dtensor(param)
    if sharded is None:
        return flag
    from torch.distributed import ReduceOp, all_reduce

    agreed = flag.to(torch.int32)
    for dim, placement in enumerate(sharded.placements):
        if placement.is_shard():
            all_reduce(agreed, ReduceOp.MIN, group=sharded.device_mesh.get_group(dim))
    return agreed.bool()


def shard_of(value: Tensor, param: Tensor) -> Tensor:
    """Return the part of a saved tensor that belongs on this rank, as a local tensor.

    Args:
        value: a tensor of the parameter's global shape: sharded like the parameter or otherwise, or whole.
        param: the parameter.

    Raises:
        ValueError: a tensor on another mesh.
    """
    target = _dtensor(param)
    if same_layout(value, param):
        return local(value)
    if target is None:
        return _waited(_dtensor(value).full_tensor())
    if is_sharded(value):
        return local(_redistributed(value, param))
    for dim, (start, size) in enumerate(zip(*reversed(_box(target)), strict=True)):
        value = value.narrow(dim, start, size)
    return value
