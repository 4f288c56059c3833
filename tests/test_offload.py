"""CPU offload: the resident optimizer's results, through copies that are made as late as they may be."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit_optim
from lowbit_optim import AdamW, AdamW8bit, CPUOffloadOptimizer, LowBitOptimizer, QuantizedState, offload
from lowbit_optim.offload import HostCopier

from .cases import PUBLIC_CLASSES
from .runs import bits

BF16 = torch.bfloat16


def at_once(device: torch.device) -> HostCopier:
    """Copies as early as a stream may: what changes later must be copied again."""
    return HostCopier()


class LateCopier(HostCopier):
    """Copies as late as a stream may: when somebody waits. Reading or reusing memory too early gives wrong values."""

    def __init__(self, device: torch.device) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []

    def start(self, source: Tensor, target: Tensor) -> Any:
        self.queue.append((source, target))
        return _Waiting(self, len(self.queue), source, target)

    def join(self) -> None:
        self.run(len(self.queue))

    def run(self, count: int) -> None:
        for place, pair in enumerate(self.queue[:count]):
            if pair is not DONE:
                pair[1].copy_(pair[0])
                self.queue[place] = DONE


DONE: Any = None


both_extremes = pytest.mark.parametrize("copier", [LateCopier, at_once])


class _Waiting:
    def __init__(self, copier: LateCopier, place: int, *tensors: Tensor) -> None:
        self.copier, self.place = copier, place

    def synchronize(self) -> None:
        self.copier.run(self.place)


def model(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 96), nn.LayerNorm(96)).to(dtype)


def backward(net: nn.Module, number: int, share: float = 1.0) -> None:
    data = torch.randn(8, 96, generator=torch.Generator().manual_seed(number)).to(next(net.parameters()).dtype)
    (net(data).float().square().mean() * share).backward()


def pair(
    cls: type[LowBitOptimizer] = AdamW8bit, copier: Callable[[torch.device], Any] = LateCopier, **options: Any
) -> tuple[nn.Sequential, LowBitOptimizer, nn.Sequential, CPUOffloadOptimizer]:
    """A resident optimizer and an offloaded one on equal models."""
    settings = {"lr": 1e-2, "min_quantized_numel": 0, "backend": "eager", **options}
    resident, offloaded = model(), model()
    return (
        resident,
        cls(resident.parameters(), **settings),
        offloaded,
        CPUOffloadOptimizer(offloaded.parameters(), cls, min_offload_numel=100, make_copier=copier, **settings),
    )


def assert_equal(left: nn.Module, one: torch.optim.Optimizer, right: nn.Module, other: torch.optim.Optimizer) -> None:
    """The same bits in weights and state."""
    for mine, theirs in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(bits(mine.detach()), bits(theirs.detach()))
        assert one.state[mine].keys() == other.state[theirs].keys()
        for name, value in one.state[mine].items():
            assert torch.equal(value, other.state[theirs][name]), name


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_offload_steps_as_the_optimizer_that_it_runs(name: str) -> None:  # M11
    left, one, right, other = pair(getattr(lowbit_optim, name), **PUBLIC_CLASSES[name])
    for number in range(4):
        for net, optimizer in ((left, one), (right, other)):
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)


def test_offload_steps_in_the_order_in_which_gradients_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_BATCH_BYTES", 1)
    sent: list[Tensor] = []

    class Watched(HostCopier):
        def start(self, source: Tensor, target: Tensor) -> Any:
            sent.append(target)
            return super().start(source, target)

    net = model()
    optimizer = CPUOffloadOptimizer(
        net.parameters(), AdamW8bit, min_offload_numel=100, make_copier=lambda device: Watched(), backend="eager"
    )
    first, second = net[0].weight, net[2].weight
    for number in range(2):
        backward(net, number)
        sent.clear()
        optimizer.step()
        # The last layer's gradient is the first that backward gives.
        assert [target.data_ptr() for target in sent] == [second.data_ptr(), first.data_ptr()]
        optimizer.zero_grad()


@pytest.mark.parametrize("weights", ["split8", "kahan", "master", "split16"])
def test_offload_keeps_what_lies_beside_the_weights(weights: str) -> None:
    left, one, right, other = pair(AdamW, weights=weights)
    for number in range(3):
        for net, optimizer in ((left, one), (right, other)):
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)


@both_extremes
def test_offload_accumulates_gradients(copier: Any) -> None:  # A12
    left, one, right, other = pair(copier=copier)
    for step in range(2):
        for net, optimizer in ((left, one), (right, other)):
            for number in range(4):
                backward(net, 4 * step + number, share=0.25)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)


@both_extremes
def test_offload_sees_gradients_that_were_clipped(copier: Any) -> None:  # D14
    left, one, right, other = pair(copier=copier)
    for number in range(3):
        for net, optimizer in ((left, one), (right, other)):
            backward(net, number)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)


@pytest.mark.parametrize("unscaled_before", [False, True])
@both_extremes
def test_offload_works_with_a_grad_scaler(copier: Any, unscaled_before: bool) -> None:  # A1
    left, one, right, other = pair(copier=copier)
    for net, optimizer in ((left, one), (right, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for number in range(3):
            data = torch.randn(8, 96, generator=torch.Generator().manual_seed(number)).to(BF16)
            scaler.scale(net(data).float().square().mean()).backward()
            if number == 1:  # an overflow: the step is skipped
                next(net.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            if unscaled_before:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)


def test_offload_follows_groups_and_schedulers() -> None:  # A1, A3
    net = model()
    first, second, *rest = net.parameters()
    groups = [{"params": [first], "lr": 1e-3}, {"params": [second], "lr": 1e-4}]
    optimizer = CPUOffloadOptimizer(groups, AdamW8bit, min_offload_numel=0, make_copier=LateCopier, backend="eager")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 1e-3
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
    for number in range(3):
        backward(net, number)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-4, 2.5e-5])
    before = [param.detach().clone() for param in rest]
    optimizer.add_param_group({"params": rest, "lr": 1.0})
    backward(net, 3)
    optimizer.step()
    assert all(not torch.equal(param, old) for param, old in zip(rest, before, strict=True))
    # What the host steps with is what the groups say.
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LinearLR(o),
    ],
)
def test_offload_takes_every_scheduler(scheduler: Callable[[Any], Any]) -> None:  # A1
    left, one, right, other = pair()
    schedules = [scheduler(one), scheduler(other)]
    for number in range(3):
        for net, optimizer, schedule in zip((left, right), (one, other), schedules, strict=True):
            backward(net, number)
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            optimizer.zero_grad()
    assert_equal(left, one, right, other)


def test_offload_skips_frozen_parameters_until_they_are_not() -> None:  # A2
    left, one, right, other = pair()
    for net in (left, right):
        for param in net[0].parameters():
            param.requires_grad_(False)
    frozen = model()
    for param in frozen[0].parameters():
        param.requires_grad_(False)
    late = CPUOffloadOptimizer(
        frozen.parameters(),
        AdamW8bit,
        min_offload_numel=100,
        lr=1e-2,
        min_quantized_numel=0,
        backend="eager",
        make_copier=LateCopier,
    )
    runs = [(left, one), (right, other), (frozen, late)]
    for number in range(4):
        for net, optimizer in runs:
            for param in net[0].parameters():
                param.requires_grad_(number >= 2)
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)
    assert_equal(left, one, frozen, late)


def test_offload_and_resident_load_each_others_state() -> None:  # C10, C21
    left, one, right, other = pair()
    for number in range(5):
        for net, optimizer in ((left, one), (right, other)):
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
    saved = copy.deepcopy((right.state_dict(), other.state_dict()))
    assert copy.deepcopy(one.state_dict())["state"].keys() == saved[1]["state"].keys()
    fresh = pair(lr=5.0)
    for net, optimizer in (fresh[:2], fresh[2:]):
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert optimizer.param_groups[0]["lr"] == 1e-2
    for number in range(5, 8):
        for net, optimizer in ((left, one), fresh[:2], fresh[2:]):
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, *fresh[:2])
    assert_equal(left, one, *fresh[2:])


def test_offload_state_does_not_depend_on_what_is_offloaded() -> None:  # M8
    _, _, right, other = pair()
    backward(right, 0)
    other.step()
    net = model()
    net.load_state_dict(right.state_dict())
    small = CPUOffloadOptimizer(net.parameters(), AdamW8bit, min_offload_numel=1 << 20, lr=1e-2, min_quantized_numel=0)
    small.load_state_dict(other.state_dict())
    assert_equal(right, other, net, small)


def test_offload_sees_weights_that_somebody_else_wrote() -> None:
    left, one, right, other = pair()
    for number in range(2):
        for net, optimizer in ((left, one), (right, other)):
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in net.parameters():
                    param.mul_(0.5)
    for net, optimizer in ((left, one), (right, other)):
        backward(net, 2)
        optimizer.step()
    assert_equal(left, one, right, other)


class NoCopies(HostCopier):
    """For an accelerator that holds nothing, the meta device."""

    def __init__(self, device: torch.device) -> None:
        pass

    def pinned(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=like.dtype)

    def start(self, source: Tensor, target: Tensor) -> Any:
        return super().start(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize("first", ["step", "load", "init"])
def test_offload_follows_a_model_that_is_cast_after_it(first: str) -> None:
    settings = {"lr": 1e-2, "weights": "split8", "min_quantized_numel": 0, "backend": "eager"}
    left, right = model(), model(torch.float32)
    one = AdamW8bit(left.parameters(), **settings)
    other = CPUOffloadOptimizer(
        right.parameters(), AdamW8bit, min_offload_numel=100, make_copier=LateCopier, **settings
    )
    right.to(BF16)
    right.load_state_dict(left.state_dict())
    if first == "load":
        backward(left, 9)
        one.step()
        one.zero_grad()
        right.load_state_dict(left.state_dict())
        other.load_state_dict(one.state_dict())
    elif first == "init":
        other.init_state()
    for number in range(3):
        for net, optimizer in ((left, one), (right, other)):
            backward(net, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(left, one, right, other)
    assert "correction" in other.state[right[0].weight]


def test_offload_keeps_state_on_the_host_when_it_loads() -> None:  # C15
    _, _, right, other = pair()
    backward(right, 0)
    other.step()
    away = model().to("meta")
    options = {"min_offload_numel": 0, "make_copier": NoCopies, "lr": 1e-2, "min_quantized_numel": 0}
    optimizer = CPUOffloadOptimizer(away.parameters(), AdamW8bit, **options)  # type: ignore[arg-type]
    optimizer.load_state_dict(other.state_dict())
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    assert {value.device.type for value in values} == {"cpu"}
    assert len(optimizer.state) == len(list(away.parameters()))


def test_offload_memory_is_state_and_two_copies() -> None:  # M7, M10
    net = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).to(BF16)
    optimizer = CPUOffloadOptimizer(net.parameters(), AdamW8bit, backend="eager")
    numel = 4 * 512 * 512
    addresses = []
    for _ in range(3):
        net(torch.ones(1, 512, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        addresses.append([entry.grad.data_ptr() for entry in optimizer._offloaded.values() if entry.grad is not None])
    # Two moments of 8 bits with a bf16 scale for 32 of them, and weight and gradient of two bytes each.
    assert optimizer.memory_bytes() == pytest.approx(numel * (2 * (1 + 2 / 32) + 2 + 2), rel=0.02)
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(addresses[0]) == 4


@pytest.mark.parametrize(
    ("device", "width"),
    [
        ("cpu", 128),
        pytest.param(
            "cuda",
            1024,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
            ],
        ),
    ],
)
def test_offload_copies_what_the_device_has_computed(
    device: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # P13
    monkeypatch.setattr("lowbit_optim.offload._BATCH_BYTES", 4 * width**2)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)]).to(BF16)
    away = copy.deepcopy(net).to(device)
    one = AdamW8bit(net.parameters(), lr=1e-2, backend="eager")
    other = CPUOffloadOptimizer(away.parameters(), AdamW8bit, lr=1e-2, backend="eager")
    gradients = []
    # Nothing here waits for the device: copies that do not would take old gradients, or half of the new weights.
    for number in range(4):
        away(torch.randn(32, width, device=device, dtype=BF16)).float().square().mean().backward()
        if number == 2:
            torch.nn.utils.clip_grad_norm_(away.parameters(), 1e-3)
        gradients.append([param.grad.clone() for param in away.parameters() if param.grad is not None])
        other.step()
        other.zero_grad()
    for grads in gradients:
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad.cpu()
        one.step()
    assert_equal(net, one, away.cpu(), other)


def test_offload_does_not_keep_gradients_alive() -> None:
    _, _, right, other = pair()
    backward(right, 0)
    grads = [weakref.ref(param.grad) for param in right.parameters() if param.grad is not None]
    other.zero_grad()  # without a step, as a scaler skips one
    gc.collect()
    assert [ref() for ref in grads] == [None] * len(grads)


def test_offload_refuses_before_anything_changes() -> None:
    _, _, right, other = pair()
    backward(right, 0)
    other.step()
    before = [param.detach().clone() for param in right.parameters()]
    backward(right, 1)
    last = list(right.parameters())[-1]
    last.grad = torch.zeros(96, dtype=BF16).to_sparse()
    with pytest.raises(TypeError, match="parameter 5 of group 0: sparse"):
        other.step()
    other.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        other.step()
    assert all(torch.equal(param, old) for param, old in zip(right.parameters(), before, strict=True))
    with pytest.raises(TypeError, match="optimizer_class"):
        CPUOffloadOptimizer(right.parameters(), torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="betas"):
        CPUOffloadOptimizer(right.parameters(), AdamW8bit, betas=(2.0, 0.9))
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(other)


def test_offload_quantizes_and_creates_state_on_request() -> None:
    _, _, right, other = pair()
    other.init_state()
    assert all(isinstance(other.state[param]["exp_avg"], QuantizedState) for param in right.parameters())
    assert all(other.state[param]["step"] == 0 for param in right.parameters())
