"""Training on several ranks: the same as on one, whatever the layout, the generators and the caches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lowbit_optim
from lowbit_optim import AdamW, LowBitOptimizer, QuantizedState, from_preset, step_in_backward
from lowbit_optim.formats import FORMATS
from lowbit_optim.weights import WEIGHT_MODES

from ..lacking import forward_under_fsdp2
from .launch import run_ranks
from .layouts import LAYOUTS, Block, Weights, fill, fully_sharded, shard_like, tensor_parallel
from .matrix import differing, run_matrix, stored

pytestmark = pytest.mark.distributed

BF16 = torch.bfloat16


def test_sharded_steps_equal_those_of_one_process() -> None:  # D1, D3, D4, D5, D10
    rows = run_matrix(dtypes=["bf16"], states=["int8"], modes=["split8"], backend="eager")
    rows += run_matrix(["fsdp uneven", "fsdp Shard(1)", "fsdp 1-D unaligned"], states=["int4"], backend="eager")
    assert [row for row in rows if not row.passed] == []
    assert {row.layout for row in rows} == set(LAYOUTS)


@pytest.mark.slow
def test_sharded_steps_equal_those_of_one_process_in_full() -> None:
    assert [row for row in run_matrix(backend="eager", timeout=1500) if not row.passed] == []


@pytest.mark.parametrize("run", ["cold", "warm", "warm again"])
def test_uneven_shards_step_alike_on_a_cold_and_a_warm_cache(run: str) -> None:  # D2
    layouts = ["fsdp even", "fsdp uneven", "fsdp empty shard", "fsdp Shard(1)", "fsdp rows unaligned"]
    rows = run_matrix(layouts, ["bf16"], ["int8"], ["stochastic"], backend="auto")
    assert [row for row in rows if not row.passed] == []


# Replicas ------------------------------------------------------------------------------------------------------------


def replicas(rank: int) -> dict[str, int]:
    """Train with generators that differ by rank; count elements that differ from rank 0's where replicas must agree."""
    counts = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layouts: dict[str, Any] = {
        "ddp": lambda model: DistributedDataParallel(model),
        "hsdp": lambda model: fully_shard(model, mesh=hybrid) and model,
        "tp": lambda model: tensor_parallel(model, mesh),
    }
    for (name, shard), preset in itertools.product(layouts.items(), ["light", "compact", "bf16"]):
        model = shard(fill(Block(), BF16))
        optimizer = from_preset(model.parameters(), preset, lr=1e-3, min_quantized_numel=0, backend="eager")
        torch.manual_seed(rank)
        data = torch.Generator().manual_seed(0)
        for _ in range(50):
            torch.rand(rank + 1)
            model(torch.randn(4, 2, 64, generator=data).to(BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts[f"{name} {preset}"] = sum(drift(tensor) for tensor in replicated(model, optimizer))
    return counts


def replicated(model: nn.Module, optimizer: LowBitOptimizer) -> list[tuple[Tensor, Any]]:
    """Every local tensor of weights and state with the groups of ranks that hold copies of it."""
    found = []
    for param in model.parameters():
        groups: list[Any] = [None]
        if isinstance(param, DTensor):
            dims = [dim for dim, placement in enumerate(param.placements) if placement.is_replicate()]
            groups = [param.device_mesh.get_group(dim) for dim in dims]
        for value in (param.detach(), *optimizer.state[param].values()):
            found += [(stored(value), group) for group in groups]
    return found


def drift(copy: tuple[Tensor, Any]) -> int:
    value, group = copy
    others = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, value.contiguous(), group=group)
    return sum(differing(other, others[0]) for other in others)


@forward_under_fsdp2
def test_replicas_stay_identical_whatever_the_generators_hold() -> None:  # D6
    counts = run_ranks(4, replicas)
    assert counts == [dict.fromkeys(counts[0], 0)] * 4
    assert len(counts[0]) == 9


# The layout of state -------------------------------------------------------------------------------------------------


def state_layouts(rank: int) -> None:
    shapes = [(3, 32), (67, 96), (1, 8192), (5000,)]
    for state, weights in itertools.product(FORMATS, ["split8", "master"]):
        model = fully_sharded(fill(Weights(*shapes), BF16))
        optimizer = AdamW(model.parameters(), state=state, weights=weights, min_quantized_numel=96, backend="eager")
        optimizer.init_state()
        for param in model.parameters():
            assert isinstance(param, DTensor)
            entry = optimizer.state[param]
            assert type(entry["step"]) is Tensor
            assert entry["step"].shape == ()
            for name in entry.keys() - {"step"}:
                value = entry[name]
                assert isinstance(value, DTensor)
                assert (value.device_mesh, value.placements) == (param.device_mesh, param.placements)
                assert (value.shape, value.stride()) == (param.shape, param.stride())
                assert value.to_local().shape == param.to_local().shape
                # The global size decides, so that all ranks agree: each of these has at least 96 elements in all.
                quantized = name.startswith("exp_avg") and state not in ("fp32", "bf16")
                assert isinstance(value.to_local(), QuantizedState) == quantized
                assert value.dtype == value.to_local().dtype


def test_state_lies_on_the_ranks_as_its_parameter_does() -> None:  # D1, D10, D17
    run_ranks(2, state_layouts)


def every_class(rank: int) -> list[str]:
    """Train every exported optimizer sharded and whole, through every checkpoint helper that users call."""
    wrong = []
    for name in lowbit_optim.__all__:
        made = getattr(lowbit_optim, name)
        if not (isinstance(made, type) and issubclass(made, LowBitOptimizer)) or made is LowBitOptimizer:
            continue
        whole, sharded = fill(Weights((64, 96)), BF16), fully_sharded(fill(Weights((64, 96)), BF16))
        optimizers = [made(model.parameters(), lr=1e-2, backend="eager") for model in (whole, sharded)]
        (mine,), (theirs,) = whole.parameters(), sharded.parameters()
        for number in range(3):
            mine.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(number)).to(BF16)
            theirs.grad = shard_like(mine.grad, theirs)
            for optimizer in optimizers:
                optimizer.step()
        assert isinstance(theirs, DTensor)
        if differing(theirs.detach().full_tensor(), mine.detach()):
            wrong.append(name)
    return wrong


def test_every_optimizer_steps_sharded_parameters() -> None:  # D20
    assert run_ranks(2, every_class) == [[], []]


# What surrounds the step ---------------------------------------------------------------------------------------------


def clipped(rank: int) -> float:
    model = fill(Block(), torch.float32)
    sharded = fully_sharded(fill(Block(), torch.float32), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = AdamW(sharded.parameters(), backend="eager")
    for made in (model, sharded):
        made(torch.ones(2, 2, 64)).square().sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(made.parameters(), 1e-3) for made in (model, sharded)]
    optimizer.step()
    assert isinstance(norms[1], DTensor)
    return float(norms[1].full_tensor() / norms[0])


@forward_under_fsdp2
def test_clipping_sees_the_norm_of_the_whole() -> None:  # D14
    assert run_ranks(2, clipped) == pytest.approx([1.0, 1.0], rel=1e-6)


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 96)
        self.head = nn.Linear(96, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens))
        return result


def tied(rank: int) -> tuple[int, bool]:
    model = fully_sharded(fill(Tied(), BF16))
    optimizer = from_preset(model.parameters(), "balanced", backend="eager")
    for _ in range(2):
        model(torch.arange(8)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.state), model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


@forward_under_fsdp2
def test_tied_weights_have_one_state() -> None:  # D13
    assert run_ranks(2, tied) == [(1, True)] * 2


def partial_gradient(rank: int) -> int:
    """A replicated parameter whose gradient comes as partial sums, as sequence parallelism leaves it."""
    mesh = init_device_mesh("cpu", (2,))
    whole, sharded = fill(Weights((64,)), BF16), fill(Weights((64,)), BF16)
    (mine,), (first,) = whole.parameters(), sharded.parameters()
    theirs = nn.Parameter(distribute_tensor(first.detach(), mesh, [Replicate()]))
    mine.grad = torch.ones(64, dtype=BF16) * 3
    theirs.grad = DTensor.from_local(torch.full((64,), 1.0 + rank, dtype=BF16), mesh, [Partial()])
    for param in (mine, theirs):
        AdamW([param], lr=1e-2, backend="eager").step()
    return differing(theirs.detach().to_local(), mine.detach())


def test_partial_gradients_are_added_up() -> None:
    assert run_ranks(2, partial_gradient) == [0, 0]


def first_steps_at_lr_zero(rank: int) -> list[str]:
    """A shard may be all zero, or empty, at a first step whose lr is 0, as warm-up has it, where others are not."""
    found = []
    for value in (0.0, 1.0):
        model = fully_sharded(fill(Weights((1, 4096)), BF16))
        optimizer = AdamW(model.parameters(), lr=0.0, backend="eager")
        (param,) = model.parameters()
        param.grad = shard_like(torch.full((1, 4096), value, dtype=BF16), param)
        optimizer.step()
        found.append(f"gradient {value}: step {int(optimizer.state[param]['step'])}")
    return found


def test_ranks_agree_whether_a_first_step_asks_for_state() -> None:
    assert run_ranks(2, first_steps_at_lr_zero) == [["gradient 0.0: step 0", "gradient 1.0: step 1"]] * 2


def skipped_together(rank: int) -> tuple[int, int]:
    model = fully_sharded(fill(Weights((64, 96)), BF16))
    optimizer = AdamW(model.parameters(), skip_nonfinite=True, backend="eager")
    (param,) = model.parameters()
    before = stored(param.detach()).clone()
    gradient = torch.ones(64, 96, dtype=BF16)
    gradient[0, 0] = torch.nan  # on rank 0 alone
    param.grad = shard_like(gradient, param)
    optimizer.step()
    return differing(stored(param.detach()), before), int(optimizer.state[param]["skipped"])


def test_ranks_skip_a_nonfinite_gradient_together() -> None:
    assert run_ranks(2, skipped_together) == [(0, 1)] * 2


def refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    partial = DTensor.from_local(torch.ones(64, dtype=BF16), mesh, [Partial()])
    param = nn.Parameter(distribute_tensor(torch.ones(64, dtype=BF16), mesh, [Replicate()]))
    optimizer = AdamW([param], backend="eager")
    with pytest.raises(TypeError) as error:
        AdamW([nn.Parameter(partial)])
    messages.append(str(error.value))
    optimizer.init_state()
    optimizer.state[param]["exp_avg"] = torch.zeros(64)
    param.grad = distribute_tensor(torch.ones(64, dtype=BF16), mesh, [Replicate()])
    with pytest.raises(ValueError, match="exp_avg") as mismatch:
        optimizer.step()
    messages.append(str(mismatch.value))
    return messages


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    for messages in run_ranks(2, refused):
        assert "parameter 0 of group 0: parameters cannot be partial sums" in messages[0]
        assert "exp_avg is a plain tensor, the parameter placed as (Replicate()," in messages[1]


# Gradient release ----------------------------------------------------------------------------------------------------


def released(rank: int) -> list[str]:
    wrong = []
    for preset in ("balanced", "minimal", "bf16"):
        models = [fill(nn.Sequential(Block(), Block()), BF16) for _ in range(2)]
        for model in models:
            for block in model.children():
                fully_shard(block)
            fully_shard(model)
        ordinary, release = (from_preset(m.parameters(), preset, lr=1e-2, backend="eager") for m in models)
        data = torch.Generator().manual_seed(rank)
        with step_in_backward(models[1], release):
            for _ in range(3):
                batch = torch.randn(4, 2, 64, generator=data).to(BF16)
                for model in models:
                    model(batch).float().square().mean().backward()
                if any(param.grad is not None for param in models[1].parameters()):
                    wrong.append(f"{preset}: a gradient is left")
                ordinary.step()
                ordinary.zero_grad()
                release.step()
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            entries = ordinary.state[mine], release.state[theirs]
            count = differing(stored(mine.detach()), stored(theirs.detach()))
            count += sum(differing(stored(entries[0][name]), stored(entries[1][name])) for name in entries[0])
            if count:
                wrong.append(f"{preset}: {count} differ")
    return wrong


@forward_under_fsdp2
def test_released_gradients_step_as_ordinary_ones_do() -> None:
    assert run_ranks(2, released) == [[], []]


def empty_shards(rank: int) -> list[tuple[bool, bool, int, set[float]]]:
    """Every rank takes part in what ranks decide together, with a shard or without, also within the backward pass."""
    results = []
    for release, skip in itertools.product([False, True], repeat=2):
        model = fully_sharded(fill(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), BF16))
        optimizer = AdamW(model.parameters(), lr=0.0, skip_nonfinite=skip, backend="eager")
        if release:
            step_in_backward(model, optimizer)
        for _ in range(2):  # the first asks whether a step at lr 0 is for state
            model(torch.ones(2, 64, dtype=BF16)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        empty = sum(not stored(param.detach()).numel() for param in model.parameters())
        results.append((release, skip, empty, {float(entry["step"]) for entry in optimizer.state.values()}))
    return results


@forward_under_fsdp2
def test_ranks_with_empty_shards_take_part_in_decisions() -> None:  # D10
    for rank, results in enumerate(run_ranks(2, empty_shards, timeout=60)):
        assert len(results) == 4
        assert all((empty, steps) == (2 * rank, {2.0}) for _, _, empty, steps in results)


# FSDP1 and the fp32 weights ------------------------------------------------------------------------------------------


def flat_parameters(rank: int) -> tuple[bool, bool, int]:
    """FSDP1 hands optimizers plain flat shards; its own helpers gather their state and hand it back."""
    model = FullyShardedDataParallel(fill(Block(), torch.float32), device_id=torch.device("cpu"))
    optimizer = from_preset(model.parameters(), "balanced", lr=1e-2, backend="eager")
    losses = []
    for _ in range(8):
        loss = model(torch.ones(2, 2, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    quantized = all(isinstance(entry["exp_avg"], QuantizedState) for entry in optimizer.state.values())
    before = [stored(value).clone() for entry in optimizer.state.values() for value in entry.values()]
    gathered = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, gathered))
    after = [stored(value) for entry in optimizer.state.values() for value in entry.values()]
    count = sum(differing(mine, theirs) for mine, theirs in zip(before, after, strict=True))
    return quantized, losses[-1] < losses[0] / 2, count


def test_flat_parameters_of_fsdp1_train_and_their_state_comes_back() -> None:  # D8
    assert run_ranks(2, flat_parameters) == [(True, True, 0)] * 2


def exact_weights(rank: int) -> list[str]:
    wrong = []
    for weights in WEIGHT_MODES:
        made = [fill(Weights((64, 96)), BF16), fully_sharded(fill(Weights((64, 96)), BF16))]
        optimizers = [AdamW(m.parameters(), lr=1e-2, weights=weights, backend="eager") for m in made]
        (mine,), (theirs,) = made[0].parameters(), made[1].parameters()
        mine.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
        theirs.grad = shard_like(mine.grad, theirs)
        for optimizer in optimizers:
            optimizer.step()
        exact = [optimizer.fp32_state_dict(model) for optimizer, model in zip(optimizers, made, strict=True)]
        full = exact[1]["weight0"]
        assert isinstance(full, DTensor)
        if differing(full.full_tensor(), exact[0]["weight0"]):
            wrong.append(f"{weights}: out")
        # Whole values load into shards, and the dithered view draws each element's own bits.
        values = {"weight0": torch.randn(64, 96, generator=torch.Generator().manual_seed(2))}
        for optimizer, model in zip(optimizers, made, strict=True):
            optimizer.load_fp32_state_dict(model, values)
        assert isinstance(theirs, DTensor)
        if differing(theirs.detach().full_tensor(), mine.detach()):
            wrong.append(f"{weights}: in")
    return wrong


def test_exact_weights_leave_and_enter_shards() -> None:
    assert run_ranks(2, exact_weights) == [[], []]
