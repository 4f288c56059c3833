"""Gradient release: steps within the backward pass equal ordinary ones, free gradients, and refuse what cannot work."""

from __future__ import annotations

import contextlib
import copy
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from lowbit_optim import PRESETS, AdamW, LowBitOptimizer, from_preset, step_in_backward

from .cases import BF16, FP32, RULES, modes_for
from .runs import assert_same, assert_same_optimizers, fingerprint, values


class Net(nn.Module):
    """A matrix that is quantized, small ones and vectors, and an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.up, self.norm, self.down = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.down(self.norm(self.up(self.embedding(tokens))).relu()))
        return result


def net(dtype: torch.dtype = BF16) -> Net:
    model = Net().to(dtype)
    with torch.no_grad():
        for place, param in enumerate(model.parameters()):
            param.copy_(values(param.shape, place) * 0.1)
    return model


def loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).float(), tokens.flip(0))


Make = Callable[[nn.Module], LowBitOptimizer]
Schedule = Callable[[LowBitOptimizer], Any]


def train_both(make: Make, schedule: Schedule | None = None, dtype: torch.dtype = BF16, steps: int = 4) -> None:
    """Train twice, with and without gradient release, and compare every bit after each step."""
    models = [net(dtype), net(dtype)]
    ordinary, released = (make(model) for model in models)
    schedules = [schedule(optimizer) for optimizer in (ordinary, released)] if schedule else []
    with step_in_backward(models[1], released):
        for step in range(steps):
            loss(models[0], step).backward()
            ordinary.step()
            ordinary.zero_grad()
            loss(models[1], step).backward()
            assert all(param.grad is None for param in models[1].parameters())
            # The step has been taken; step() adds nothing, but trainers and schedulers want to see it called.
            assert_same_optimizers(released, ordinary)
            released.step()
            assert_same_optimizers(released, ordinary)
            for made in schedules:
                made.step()
    assert ordinary.state


@pytest.mark.parametrize("preset", PRESETS)
def test_release_equals_ordinary_steps_with_every_preset(preset: str) -> None:
    train_both(lambda model: from_preset(model.parameters(), preset, lr=1e-2, backend="eager"))


@pytest.mark.parametrize("state", ["int8", "int4"])
@pytest.mark.parametrize("rule", RULES)
def test_release_equals_ordinary_steps_with_every_rule(rule: str, state: str) -> None:
    train_both(lambda model: RULES[rule].make(model.parameters(), lr=1e-2, state=state))


@pytest.mark.parametrize("weights", modes_for(BF16))
def test_release_equals_ordinary_steps_with_every_weight_mode(weights: str) -> None:
    train_both(lambda model: AdamW(model.parameters(), lr=1e-2, weights=weights, backend="eager"))


@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"lr": torch.tensor(1e-2)}, {"lr": 0.0}], ids=str)
def test_release_equals_ordinary_steps_with_other_options(options: dict[str, Any]) -> None:
    train_both(lambda model: AdamW(model.parameters(), backend="eager", **copy.deepcopy(options)), dtype=FP32)


def test_release_compiles_within_the_backward_pass() -> None:
    train_both(lambda model: AdamW(model.parameters(), lr=1e-2, backend="compile"), steps=2)


SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6),
    "warm-up from 0": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_release_follows_schedulers(name: str) -> None:
    # Warnings are errors here: a scheduler that missed its optimizer's step() would warn.
    train_both(lambda model: AdamW(model.parameters(), lr=1e-2, backend="eager"), SCHEDULES[name])


def grouped(model: nn.Module) -> LowBitOptimizer:
    vectors = [param for param in model.parameters() if param.dim() == 1]
    matrices = [param for param in model.parameters() if param.dim() > 1]
    return AdamW([{"params": vectors, "lr": 3e-2, "weight_decay": 0.0}, {"params": matrices}], lr=1e-2, backend="eager")


def test_release_follows_parameter_groups() -> None:
    train_both(grouped, SCHEDULES["LambdaLR"])


def test_release_leaves_frozen_parameters_alone() -> None:
    def frozen(model: nn.Module) -> LowBitOptimizer:
        model.get_parameter("up.weight").requires_grad_(False)
        return AdamW(model.parameters(), lr=1e-2, backend="eager")

    train_both(frozen)


def test_release_steps_a_tied_parameter_once() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, backend="eager")
    with step_in_backward(model, optimizer):
        for step in range(3):
            loss(model, step).backward()
            optimizer.step()
    assert optimizer.state[model.embedding.weight]["step"] == 3
    assert model.head.weight is model.embedding.weight
    assert len(optimizer.state) == len(list(model.parameters()))


def test_release_steps_without_a_call_of_step() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, backend="eager")
    with step_in_backward(model, optimizer):
        for step in range(3):
            loss(model, step).backward()
    assert all(entry["step"] == 3 for entry in optimizer.state.values())


# Memory --------------------------------------------------------------------------------------------------------------


class LiveGradients:
    """How many gradients are alive at once, at most, from the moment that each has been accumulated."""

    def __init__(self, model: nn.Module) -> None:
        self.alive = self.most = self.seen = 0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, param: Tensor) -> None:
        assert param.grad is not None
        self.alive += 1
        self.seen += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(param.grad.untyped_storage(), self._freed)

    def _freed(self) -> None:
        self.alive -= 1


def test_release_keeps_one_gradient_alive_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).to(BF16)
    live = LiveGradients(model)
    optimizer = AdamW(model.parameters(), backend="eager")
    data = torch.ones(4, 64, dtype=BF16)
    with step_in_backward(model, optimizer):
        for _ in range(2):
            model(data).float().square().sum().backward()
            assert live.alive == 0
    assert (live.most, live.seen) == (1, 16)
    model(data).float().square().sum().backward()  # the count sees what is there to be seen
    assert live.most == 8


# Refusals ------------------------------------------------------------------------------------------------------------


def made() -> tuple[Net, AdamW]:
    model = net()
    return model, AdamW(model.parameters(), lr=1e-2, backend="eager")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 .* nothing to add to"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm=1.0 .* the first are used by then"),
    ],
    ids=str,
)
def test_release_refuses_what_a_configuration_asks_in_vain(options: dict[str, Any], reason: str) -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match=reason):
        step_in_backward(model, optimizer, **options)
    assert_untouched(model, optimizer)


def assert_untouched(model: nn.Module, optimizer: LowBitOptimizer) -> None:
    """No hook is left: gradients stay until step() uses them."""
    loss(model, 0).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert not optimizer.state


def test_release_refuses_a_second_backward_pass_before_step() -> None:
    model, optimizer = made()
    with step_in_backward(model, optimizer):
        loss(model, 0).backward()
        loss(model, 1).backward()
        with pytest.raises(RuntimeError, match="2 backward passes came before this step"):
            optimizer.step()
        loss(model, 2).backward()
        optimizer.step()  # said once, the run may go on


def test_release_lets_two_losses_of_different_parameters_share_a_step() -> None:
    model, optimizer = made()
    with step_in_backward(model, optimizer):
        model.up(torch.ones(2, 64, dtype=BF16)).sum().backward()
        model.down(torch.ones(2, 96, dtype=BF16)).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 3


@pytest.mark.parametrize("call", [lambda o, c: o.step(c), lambda o, c: o.step(closure=c)], ids=["positional", "named"])
def test_release_refuses_closures(call: Callable[[AdamW, Any], Any]) -> None:
    model, optimizer = made()
    with step_in_backward(model, optimizer):
        loss(model, 0).backward()
        call(optimizer, None)  # as accelerate calls it
        with pytest.raises(RuntimeError, match="a closure cannot be used"):
            call(optimizer, lambda: loss(model, 1))


def test_release_refuses_optimizers_of_others() -> None:
    model = net()
    with pytest.raises(TypeError, match="needs an optimizer of lowbit_optim, got AdamW"):
        step_in_backward(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]


def test_release_refuses_gradients_that_are_there_already() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters(), backend="eager")
    loss(model, 0).backward()
    with pytest.raises(ValueError, match=r"parameter 'embedding.weight' has a gradient already; call .*zero_grad"):
        step_in_backward(model, optimizer)
    optimizer.zero_grad()
    step_in_backward(model, optimizer).remove()


def test_release_refuses_parameters_of_another_model() -> None:
    model, _ = made()
    other = AdamW([*model.parameters(), nn.Parameter(torch.ones(3))], backend="eager")
    with pytest.raises(ValueError, match="parameter 6 of group 0 of the optimizer is not a parameter of the model"):
        step_in_backward(model, other)
    assert_untouched(model, other)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("name", WRAPPERS)
def test_release_refuses_wrappers_that_reduce_gradients_later(name: str) -> None:
    wrapped = nn.Sequential(WRAPPERS[name](net()))
    optimizer = AdamW(wrapped.parameters(), backend="eager")
    with pytest.raises(TypeError, match=rf"cannot work with {name}.* use fully_shard \(FSDP2\), or step\(\)"):
        step_in_backward(wrapped, optimizer)


def test_release_does_not_go_with_a_loss_scaler() -> None:
    """It would unscale gradients that are used by then; torch's own check finds none."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    with step_in_backward(model, optimizer):
        scaler.scale(loss(model, 0)).backward()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)


# Leaving, and errors -------------------------------------------------------------------------------------------------


def leave_by_remove(model: nn.Module, optimizer: LowBitOptimizer) -> None:
    handle = step_in_backward(model, optimizer)
    loss(model, 0).backward()
    handle.remove()


def leave_by_context(model: nn.Module, optimizer: LowBitOptimizer) -> None:
    with step_in_backward(model, optimizer):
        loss(model, 0).backward()


def leave_by_error(model: nn.Module, optimizer: LowBitOptimizer) -> None:
    with contextlib.suppress(ZeroDivisionError), step_in_backward(model, optimizer):
        loss(model, 0).backward()
        raise ZeroDivisionError


@pytest.mark.parametrize("leave", [leave_by_remove, leave_by_context, leave_by_error])
def test_release_ends_with_its_handle(leave: Callable[[nn.Module, LowBitOptimizer], None]) -> None:
    model, optimizer = made()
    leave(model, optimizer)
    before = fingerprint(optimizer)
    loss(model, 1).backward()
    loss(model, 2).backward()
    assert_same(fingerprint(optimizer), before)
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step(lambda: 0.0)  # closures and accumulation work again
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


def test_release_reports_errors_of_a_step_in_backward() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, backend="eager")
    optimizer.init_state()
    optimizer.state[model.up.weight]["exp_avg"] = torch.zeros(3)
    before = model.up.weight.detach().clone()
    with step_in_backward(model, optimizer):
        message = "parameter 'up.weight': exp_avg has shape (3,), the parameter (96, 64)"
        with pytest.raises(ValueError, match=re.escape(message)):
            loss(model, 0).backward()
    # What arrived earlier has been stepped, the rest has not.
    assert optimizer.state[model.down.weight]["step"] == 1
    assert optimizer.state[model.embedding.weight]["step"] == 0
    assert torch.equal(model.up.weight, before)


def test_release_checks_hyper_parameters_at_each_step() -> None:
    model, optimizer = made()
    with step_in_backward(model, optimizer):
        optimizer.param_groups[0]["lr"] = -1.0
        before = fingerprint(optimizer)
        with pytest.raises(ValueError, match="lr must"):
            loss(model, 0).backward()
    assert_same(fingerprint(optimizer), before)
