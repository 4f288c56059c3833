"""Whatever torch's optimizers do with the same arguments: with fp32 state and weights, with the same numbers too."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR

import lowbit_optim
from lowbit_optim import AdamW, AdamW8bit, AdamWBf16SR, LowBitOptimizer

from .cases import FORMAT_NAMES, RULES, modes_for
from .runs import SHAPE, assert_same, assert_same_optimizers, fingerprint, parameters, run, set_gradients, values

SHAPES = [(16, 8), (5,)]


def twins(shapes: Any = None, **options: Any) -> tuple[AdamW, torch.optim.AdamW]:
    """Our AdamW with exact state, and torch's, on equal parameters."""
    shapes = SHAPES if shapes is None else shapes
    ours = AdamW(parameters(*shapes), state="fp32", backend="eager", **copy.deepcopy(options))
    return ours, torch.optim.AdamW(parameters(*shapes), **copy.deepcopy(options))


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_close_weights(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Equal to a few roundings of fp32."""
    for mine, exact in zip(weights_of(ours), weights_of(theirs), strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-6, atol=2e-6)


def run_both(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, steps: range) -> None:
    for optimizer in ours, theirs:
        run(optimizer, weights_of(optimizer), steps)


# The numbers of torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.torch_cls], ids=lambda rule: rule.name)
def test_dropin_equals_torch_over_100_steps(rule: Any, maximize: bool) -> None:
    ours = rule.make(parameters(*SHAPES), lr=1e-2, state="fp32", maximize=maximize)
    theirs = rule.make_torch(parameters(*SHAPES), lr=1e-2, maximize=maximize)
    run_both(ours, theirs, range(100))
    assert_close_weights(ours, theirs)


def test_dropin_defaults_equal_those_of_torch() -> None:
    for mine, theirs in (
        (AdamW, torch.optim.AdamW),
        (lowbit_optim.Adam, torch.optim.Adam),
        (lowbit_optim.SGD, torch.optim.SGD),
    ):
        ours = mine(parameters((2,))).defaults
        exact = theirs(parameters((2,))).defaults
        shared = ours.keys() & exact.keys()
        assert {"lr", "weight_decay", "maximize"} <= shared
        assert {name: ours[name] for name in shared} == {name: exact[name] for name in shared}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    # These two cycle beta1 as well.
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=14),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-4, anneal_epochs=5),
}


def test_dropin_every_scheduler_of_torch_is_tested() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float-lr", "tensor-lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_dropin_scheduler_steps_like_torch(name: str, kind: Callable[[float], Any]) -> None:  # A1, A5, P4, promise 11
    ours, theirs = twins(lr=kind(5e-3))
    schedules = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    for step in range(12):
        run_both(ours, theirs, range(step, step + 1))
        for schedule in schedules:
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        lr, expected = ours.param_groups[0]["lr"], theirs.param_groups[0]["lr"]
        assert type(lr) is type(expected)
        assert float(lr) == float(expected)
        assert float(ours.param_groups[0]["betas"][0]) == float(theirs.param_groups[0]["betas"][0])
        if isinstance(lr, float):
            json.dumps([lr, schedules[0].get_last_lr()])
    assert_close_weights(ours, theirs)


def test_dropin_groups_keep_their_own_lr_under_a_scheduler() -> None:  # A3
    a, b, c = parameters((4, 4), (4, 4), (4, 4))
    optimizer = AdamW([{"params": [a]}, {"params": [b], "lr": 1e-4}], lr=1e-3, backend="eager")
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        run(optimizer, [a, b], range(step, step + 1))
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-4, 2.5e-5], rel=1e-12)
    optimizer.add_param_group({"params": [c], "lr": 7e-3})
    before = c.detach().clone()
    run(optimizer, [a, b, c], range(3, 4))
    assert float((c.detach() - before).abs().median()) == pytest.approx(7e-3, rel=1e-2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-4, 2.5e-5, 7e-3], rel=1e-12)


@pytest.mark.parametrize("start", [1e-3, torch.tensor(1e-3)], ids=["float", "tensor"])
def test_dropin_lr_may_be_assigned_at_any_time(start: float | Tensor) -> None:  # A4, C4, promise 11
    ours, theirs = twins(lr=start)
    for step, lr in enumerate(
        (1e-2, torch.tensor(3e-3), 0.0, torch.tensor(1e-4, dtype=torch.float64), torch.tensor([2e-3]), 1)
    ):
        for optimizer in ours, theirs:
            optimizer.param_groups[0]["lr"] = copy.deepcopy(lr)
        theirs.param_groups[0]["lr"] = float(lr)
        run_both(ours, theirs, range(step, step + 1))
        assert ours.param_groups[0]["lr"] == lr
        assert type(ours.param_groups[0]["lr"]) is type(lr)
        assert_close_weights(ours, theirs)


def test_dropin_float_lr_is_json() -> None:  # A5
    optimizer = AdamW(parameters((4,)), lr=1e-3, backend="eager")
    run(optimizer, weights_of(optimizer), range(2))
    shown = [{name: option for name, option in group.items() if name != "params"} for group in optimizer.param_groups]
    assert json.loads(json.dumps(shown))[0]["lr"] == 1e-3
    assert json.loads(json.dumps(optimizer.state_dict()["param_groups"]))[0]["betas"] == [0.9, 0.999]


def test_dropin_groups_do_not_share_a_tensor_lr() -> None:  # promise 11
    lr = torch.tensor(1e-3)
    a, b, c = parameters((4,), (4,), (4,))
    optimizer = AdamW([{"params": [a]}, {"params": [b]}], lr=lr, backend="eager")
    optimizer.add_param_group({"params": [c]})
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.5, 1e-3, 1e-3])
    assert float(optimizer.defaults["lr"]) == pytest.approx(1e-3)


def test_dropin_tensor_lr_under_lambdas_of_each_group() -> None:  # A3, promise 11
    a, b = parameters((4,), (4,))
    optimizer = AdamW([{"params": [a]}, {"params": [b]}], lr=torch.tensor(1e-3), backend="eager")
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    run(optimizer, [a, b], range(1))
    schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([5e-4, 1e-4])


@pytest.mark.parametrize("kind", ["list", "fp64", "fp64-1d", "strings"])
def test_dropin_betas_of_any_kind_are_the_same(kind: str) -> None:
    betas: Any = {
        "list": [0.8, 0.95],
        "fp64": (torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64)),
        "fp64-1d": (torch.tensor([0.8], dtype=torch.float64), 0.95),
        "strings": ("0.8", "0.95"),
    }[kind]
    params, expected = parameters(SHAPE), parameters(SHAPE)
    run(AdamW8bit(params, betas=betas, backend="eager"), params, range(5))
    run(AdamW8bit(expected, betas=(0.8, 0.95), backend="eager"), expected, range(5))
    assert torch.equal(params[0], expected[0])


def test_dropin_betas_are_not_rounded_to_the_weights_dtype() -> None:  # N4
    runs = []
    for beta2 in (0.999, 0.9999):
        params = parameters(SHAPE, dtype=torch.bfloat16)
        run(AdamWBf16SR(params, lr=1e-2, betas=(0.9, beta2), backend="eager"), params, range(10))
        runs.append(params[0])
    assert not torch.equal(*runs)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "1-d"])
def test_dropin_tensor_lr_equals_float_lr(shape: tuple[int, ...]) -> None:
    params, expected = parameters(SHAPE), parameters(SHAPE)
    run(AdamW8bit(params, lr=torch.full(shape, 2.0**-9), backend="eager"), params, range(5))
    run(AdamW8bit(expected, lr=2.0**-9, backend="eager"), expected, range(5))
    assert torch.equal(params[0], expected[0])


def test_dropin_options_may_be_strings() -> None:  # A11
    given = {"lr": "1e-2", "eps": "1e-6", "weight_decay": "0.1", "min_quantized_numel": "256", "seed": "3"}
    flags = {"amsgrad": "true", "maximize": "True", "skip_nonfinite": "1"}
    params, expected = parameters((16, 32), dtype=torch.bfloat16), parameters((16, 32), dtype=torch.bfloat16)
    ours = AdamW(params, **given, **flags, backend="eager")  # type: ignore[arg-type]
    same = AdamW(
        expected,
        lr=1e-2,
        eps=1e-6,
        weight_decay=0.1,
        min_quantized_numel=256,
        seed=3,
        amsgrad=True,
        maximize=True,
        skip_nonfinite=True,
        backend="eager",
    )
    run(ours, params, range(3))
    run(same, expected, range(3))
    assert_same_optimizers(ours, same)
    assert "max_exp_avg_sq" in ours.state[params[0]]
    for word, expected_flag in ("false", False), ("no", False), ("0", False), ("yes", True), ("TRUE", True):
        assert AdamW(parameters((2,)), amsgrad=word).defaults["amsgrad"] is expected_flag  # type: ignore[arg-type]


# Groups and parameters -----------------------------------------------------------------------------------------------


def test_dropin_group_added_late_steps_like_torch() -> None:
    ours, theirs = twins()
    run_both(ours, theirs, range(3))
    for optimizer in ours, theirs:
        optimizer.add_param_group({"params": parameters((6, 6), seed=7), "lr": 3e-3, "weight_decay": 0.5})
    run_both(ours, theirs, range(3, 8))
    assert_close_weights(ours, theirs)
    assert [float(entry["step"]) for entry in ours.state.values()] == [8, 8, 5]


def test_dropin_momentum_turned_on_late_steps_like_torch() -> None:
    ours = lowbit_optim.SGD(parameters(*SHAPES), lr=1e-2, state="fp32", backend="eager")
    theirs = torch.optim.SGD(parameters(*SHAPES), lr=1e-2)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        for optimizer in ours, theirs:
            optimizer.param_groups[0]["momentum"] = momentum
        run_both(ours, theirs, range(3))
        assert_close_weights(ours, theirs)


def test_dropin_group_added_late_draws_the_noise_of_its_place() -> None:
    early, late = (parameters(SHAPE, SHAPE, dtype=torch.bfloat16) for _ in range(2))
    ours = AdamW8bit([{"params": late[:1]}], backend="eager")
    same = AdamW8bit([{"params": early[:1]}, {"params": early[1:]}], backend="eager")
    run(ours, late[:1], range(3))
    run(same, early[:1], range(3))
    ours.add_param_group({"params": late[1:]})
    run(ours, late, range(3, 6))
    run(same, early, range(3, 6))
    assert_same_optimizers(ours, same)


def test_dropin_frozen_and_unused_parameters_step_like_torch() -> None:  # A2
    ours, theirs = twins([(8, 8), (8, 8), (8, 8)])
    for optimizer in ours, theirs:
        frozen, sometimes, always = weights_of(optimizer)
        frozen.requires_grad_(False)
        for step in range(6):
            if step == 4:
                frozen.requires_grad_(True)
            optimizer.zero_grad()
            set_gradients([always, *([sometimes] * (step % 2)), *([frozen] * (step >= 4))], step)
            optimizer.step()
    assert_close_weights(ours, theirs)
    assert [float(entry["step"]) for entry in ours.state.values()] == [float(e["step"]) for e in theirs.state.values()]


def test_dropin_frozen_parameters_have_no_state() -> None:  # A2
    frozen, trained = parameters(SHAPE, SHAPE)
    frozen.requires_grad_(False)
    optimizer = AdamW8bit([frozen, trained], backend="eager")
    optimizer.init_state()
    assert list(optimizer.state_dict()["state"]) == [1]
    assert not optimizer.state.get(frozen)
    frozen.requires_grad_(True)
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]


def test_dropin_shared_parameters_step_once() -> None:  # D13, N13
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    optimizer = AdamW(model.parameters(), lr=1e-2, state="fp32", backend="eager")
    expected = nn.Parameter(model[0].weight.detach().clone())
    reference = torch.optim.AdamW([expected], lr=1e-2)
    for step in range(3):
        set_gradients([model[0].weight], step)
        set_gradients([expected], step)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(model[1].weight, expected, rtol=2e-6, atol=2e-6)
    assert model[0].weight is model[1].weight
    assert len(optimizer.state) == 1


@pytest.mark.parametrize(
    "maker", [AdamW8bit, lowbit_optim.SGD8bit, lowbit_optim.Adam4bit], ids=lambda cls: cls.__name__
)
def test_dropin_unknown_group_keys_are_kept_and_ignored(maker: type[LowBitOptimizer]) -> None:
    extra = {"fused": True, "foreach": False, "capturable": True, "initial_lr": 1e-3, "name": "body", "lr_scale": 0.5}
    params, expected = parameters(SHAPE), parameters(SHAPE)
    optimizer = maker([{"params": params, **extra}], backend="eager")  # type: ignore[call-arg]
    run(optimizer, params, range(3))
    run(maker(expected, backend="eager"), expected, range(3))  # type: ignore[call-arg]
    assert torch.equal(params[0], expected[0])
    saved = optimizer.state_dict()["param_groups"][0]
    assert extra.items() <= optimizer.param_groups[0].items()
    assert extra.items() <= saved.items()


def test_dropin_accepts_the_switches_of_torch() -> None:
    for cls in AdamW, lowbit_optim.Adam, lowbit_optim.SGD:
        for switches in {"fused": True}, {"foreach": True}, {"foreach": False, "fused": None}:
            cls(parameters((2,)), **switches)


def test_dropin_named_parameters_keep_their_names() -> None:
    model = nn.Linear(8, 8)
    ours = AdamW(model.named_parameters(), state="fp32", backend="eager")
    assert ours.param_groups[0]["param_names"] == ["weight", "bias"]
    assert ours.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert [name for name, _, _ in ours.named_params()] == ["parameter 'weight'", "parameter 'bias'"]


# Training loops ------------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_dropin_training_loop_with_clipping_and_accumulation(set_to_none: bool) -> None:
    losses = []
    for cls, options in (AdamW, {"state": "fp32", "backend": "eager"}), (torch.optim.AdamW, {}):
        model = network()
        optimizer = cls(model.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
        for step in range(20):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(2):
                batch = values((4, 8), 100 * step + micro)
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / 2
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        losses.append((loss.item(), norm.item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_dropin_closure_recomputes_the_loss() -> None:
    ours, theirs = twins()
    returned = []
    for optimizer in ours, theirs:

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in weights_of(optimizer)), torch.zeros(()))
            loss.backward()
            return loss

        with torch.no_grad():
            returned.append([optimizer.step(closure) for _ in range(5)])
    assert torch.allclose(torch.stack(returned[0]), torch.stack(returned[1]), rtol=1e-6)
    assert returned[0][-1] < returned[0][0]
    assert_close_weights(ours, theirs)
    assert ours.step() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", ["fp32", "int8", "int4"])
def test_dropin_grad_scaler_skips_infinite_gradients(dtype: torch.dtype, state: str) -> None:  # A19
    params, expected = parameters(SHAPE, (5,), dtype=dtype), parameters(SHAPE, (5,), dtype=dtype)
    ours, plain = AdamW(params, state=state, backend="eager"), AdamW(expected, state=state, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))  # creates the scale
    run(plain, expected, range(1))
    for step in range(3):
        before = fingerprint(ours)
        set_gradients(params, 0 if step == 0 else step, scale=2.0**10 if step == 0 else scaler.get_scale())
        if step == 1:
            params[0].grad[3, 3] = float("inf")
        scaler.step(ours)
        scaler.update()
        if step == 1:
            assert_same(fingerprint(ours), before)
            assert scaler.get_scale() == 2.0**9
    run(plain, expected, range(2, 3))
    # Scales are powers of two, so that unscaled gradients are those of the plain run.
    assert_same_optimizers(ours, plain)


# Hooks ---------------------------------------------------------------------------------------------------------------


def test_dropin_step_hooks_run_around_the_step() -> None:
    (param,) = parameters((4,))
    optimizer = AdamW([param], backend="eager")
    calls: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda hooked, args, kwargs: calls.append((name, hooked.param_groups[0]["params"][0].detach().clone()))

    handles = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        start = param.detach().clone()
        run(optimizer, [param], range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(name for name, _ in calls[:2]) == ["global pre", "pre"]
    assert sorted(name for name, _ in calls[2:]) == ["global post", "post"]
    for name, weight in calls:
        assert torch.equal(weight, start if "pre" in name else param)
    run(optimizer, [param], range(1, 2))
    assert len(calls) == 4


def test_dropin_pre_hook_may_replace_the_closure() -> None:
    (param,) = parameters((4,))
    optimizer = AdamW([param], backend="eager")
    # The arguments of hooks begin with the optimizer itself.
    optimizer.register_step_pre_hook(lambda hooked, args, kwargs: ((hooked, lambda: f"replaced {args[1]()}"), kwargs))
    set_gradients([param], 0)
    assert optimizer.step(lambda: "original") == "replaced original"


def test_dropin_state_dict_hooks_run_in_order() -> None:
    params = parameters(SHAPE)
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(2))
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda hooked: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda hooked, saved: {**saved, "note": "kept"})
    optimizer.register_load_state_dict_pre_hook(
        lambda hooked, saved: calls.append(f"load pre {float(hooked.state[params[0]]['step'])}")
    )
    optimizer.register_load_state_dict_post_hook(
        lambda hooked: calls.append(f"load post {float(hooked.state[params[0]]['step'])}")
    )
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["note"] == "kept"
    run(optimizer, params, range(2, 5))
    optimizer.load_state_dict(saved)
    assert calls == ["save pre", "load pre 5.0", "load post 2.0"]


def test_dropin_load_hook_may_replace_the_state_dict_but_not_the_users() -> None:
    params = parameters(SHAPE)
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())

    def add_entry(hooked: Any, state_dict: dict[str, Any]) -> None:
        state_dict["added"] = True

    def replace(hooked: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert state_dict["added"]
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(add_entry)
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25
    # As in torch, hooks get a shallow copy.
    assert "added" not in saved
    assert saved["param_groups"][0]["lr"] == 1e-3


# Copies --------------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[LowBitOptimizer], LowBitOptimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in fingerprint(optimizer).items() if " param " in name}


@pytest.mark.parametrize("mode", modes_for(torch.bfloat16))
@pytest.mark.parametrize("how", COPIES)
def test_dropin_copied_optimizer_continues_bit_for_bit(how: str, mode: str) -> None:  # C22
    for state in FORMAT_NAMES:
        params = parameters(SHAPE, (5,), dtype=torch.bfloat16)
        groups = [{"params": params[:1], "lr": 1e-2}, {"params": params[1:]}]
        optimizer = AdamW(groups, state=state, weights=mode, backend="eager")
        run(optimizer, params, range(3))
        before = fingerprint(optimizer)
        copied = COPIES[how](optimizer)
        assert type(copied) is AdamW
        run(copied, weights_of(copied), range(3, 6))
        assert_same(fingerprint(optimizer), before)
        run(optimizer, params, range(3, 6))
        assert_same(tensors_of(copied), tensors_of(optimizer))


@pytest.mark.parametrize("how", COPIES)
def test_dropin_copied_optimizer_has_the_same_group_options(how: str) -> None:  # C14, C22
    # A key that only copies have would be missing from checkpoints of the original.
    optimizer = AdamW8bit([{"params": parameters(SHAPE), "lr": torch.tensor(1e-2), "name": "body"}], backend="eager")
    assert_same_optimizers(COPIES[how](optimizer), optimizer)
    assert COPIES[how](optimizer).param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]


def test_dropin_pickle_of_an_older_version_gets_new_options() -> None:  # C14
    params = parameters(SHAPE)
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(2))
    for name in "skip_nonfinite", "min_quantized_numel", "maximize":
        del optimizer.param_groups[0][name]
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.param_groups[0]["skip_nonfinite"] is False
    assert copied.param_groups[0]["min_quantized_numel"] == 4096
    run(copied, weights_of(copied), range(2, 3))


def test_dropin_is_an_optimizer_of_torch() -> None:  # A1
    optimizer = AdamW8bit(parameters(SHAPE), lr=2e-3, backend="eager")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 2e-3
    assert "lr: 0.002" in repr(optimizer)
    assert repr(optimizer).startswith("AdamW8bit")
