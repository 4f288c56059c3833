"""Checkpoints: a resumed run is the same run, other formats and libraries are converted, bad ones change nothing."""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lowbit_optim import SGD, Adam, AdamW, AdamW8bit, Lion, LowBitOptimizer, QuantizedState, from_preset
from lowbit_optim.formats import FORMATS, get_format
from lowbit_optim.rules import adamw
from lowbit_optim.slots import absolute
from lowbit_optim.state import decoded, stored_parts, zeros_state
from lowbit_optim.weights import WEIGHT_MODES

from .cases import BF16, DTYPES, FORMAT_NAMES, FP16, FP32, RULES, Rule, modes_for
from .runs import (
    SHAPE,
    assert_same,
    assert_same_optimizers,
    assert_same_weights,
    bits,
    fingerprint,
    parameters,
    run,
    set_gradients,
    values,
)

each_format = pytest.mark.parametrize("state", FORMAT_NAMES)
#: Quantized by default, with a ragged last block; and the same in few elements, for `min_quantized_numel=0`.
RAGGED, TINY = (70, 61), (9, 33)


def through_file(content: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def load_weights(params: list[nn.Parameter], saved: list[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, saved, strict=True):
            param.copy_(value)


def exact_values(optimizer: LowBitOptimizer) -> list[Tensor]:
    """The fp32 weights that stored weights and their extras stand for."""
    found = []
    for _, param, group in optimizer.named_params():
        mode = optimizer.layout_for(param, group).mode
        found.append(mode.read(param.detach(), tuple(optimizer.state[param][name] for name in mode.extras)).clone())
    return found


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_format
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_checkpoint_resumed_run_is_the_uninterrupted_one(rule: Rule, state: str, dtype: torch.dtype) -> None:
    # C5, C9, C19, C23, F18
    for mode in modes_for(dtype):
        options = {"state": state, "weights": mode, "min_quantized_numel": 0}
        params = parameters(TINY, (1,), dtype=dtype)
        straight = rule.make(params, lr=1e-2, seed=5, **options)
        run(straight, params, range(2))
        saved = through_file({"weights": [param.detach() for param in params], "optimizer": straight.state_dict()})
        run(straight, params, range(2, 4))

        torch.manual_seed(len(mode))
        torch.rand(100)
        fresh = parameters(TINY, (1,), dtype=dtype, seed=9)
        resumed = rule.make(fresh, lr=0.5, seed=6, **options)
        load_weights(fresh, saved["weights"])
        resumed.load_state_dict(saved["optimizer"])
        run(resumed, fresh, range(2, 4))
        assert_same_optimizers(resumed, straight)


def test_checkpoint_continues_at_once_with_what_was_saved() -> None:  # C5
    for state in FORMAT_NAMES:
        params = parameters(RAGGED, dtype=BF16)
        optimizer = AdamW(params, state=state, weights="split8", backend="eager")
        run(optimizer, params, range(3))
        before = fingerprint(optimizer)
        saved = through_file(optimizer.state_dict())
        run(optimizer, params, range(3, 6))
        load_weights(params, [before_weights(before, params[0])])
        optimizer.load_state_dict(saved)
        assert_same(fingerprint(optimizer), before)


def before_weights(found: Mapping[str, Any], like: Tensor) -> Tensor:
    stored: Tensor = found["group 0 param 0"]
    return stored.view(like.dtype).view(like.shape)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", ["balanced", "minimal", "reference"])
def test_checkpoint_resumes_through_dcp_helpers(name: str, flatten: bool) -> None:  # C3, C4, C19
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def make(seed: int) -> tuple[nn.Module, LowBitOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3)).to(BF16)
        return model, from_preset(model.parameters(), name, lr=1e-2, backend="eager")

    model, straight = make(0)
    run(straight, list(model.parameters()), range(3))
    saved = through_file([model.state_dict(), get_optimizer_state_dict(model, straight, options=options)])
    run(straight, list(model.parameters()), range(3, 6))
    fresh, resumed = make(1)
    fresh.load_state_dict(saved[0])
    set_optimizer_state_dict(fresh, resumed, saved[1], options=options)
    run(resumed, list(fresh.parameters()), range(3, 6))
    assert_same_optimizers(resumed, straight)


def test_checkpoint_shares_nothing_with_its_source() -> None:  # promise 11
    params, others = (parameters(RAGGED, dtype=BF16) for _ in range(2))
    source = AdamW(params, lr=torch.tensor(1e-2), weights="master", backend="eager")
    run(source, params, range(2))
    target = AdamW(others, lr=torch.tensor(5.0), weights="master", backend="eager")
    load_weights(others, [param.detach() for param in params])
    before = fingerprint(source)
    target.load_state_dict(source.state_dict())
    target.param_groups[0]["lr"].fill_(0.25)
    run(target, others, range(2, 4))
    assert_same(fingerprint(source), before)


def test_checkpoint_records_specs_and_no_class() -> None:  # C6, promise 4
    params = parameters(*[RAGGED] * len(FORMATS), dtype=BF16)
    groups = [{"params": [param], "state": state} for param, state in zip(params, FORMAT_NAMES, strict=True)]
    optimizer = AdamW(groups, weights="split8", backend="eager")
    run(optimizer, params, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        pickled = archive.read(name)
    words = {str(argument) for opcode, argument, _ in pickletools.genops(pickled) if argument is not None}
    ours = {word for word in words if word.startswith("lowbit_optim")}
    # Protocol 2 names a global in one argument, later ones module by module.
    assert ours <= {"lowbit_optim.state rebuild_state", "lowbit_optim.state"}
    adamw_slots = {get_format(name, signed, ratio=signed).spec for name in FORMAT_NAMES for signed in (True, False)}
    assert adamw_slots - {"fp32", "bf16"} <= words


@pytest.mark.parametrize("name", ["light", "minimal", "reference"])
def test_checkpoint_is_as_small_as_the_state(name: str) -> None:
    params = parameters((256, 256), dtype=BF16)
    optimizer = from_preset(params, name, backend="eager")
    run(optimizer, params, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert optimizer.memory_bytes() < len(file.getvalue()) < optimizer.memory_bytes() + 8192


# Conversion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", FORMAT_NAMES)
def test_checkpoint_converts_between_formats(source: str) -> None:  # promise 4, C5
    params = parameters(RAGGED, dtype=BF16)
    optimizer = AdamW(params, state=source, backend="eager")
    run(optimizer, params, range(3))
    saved = through_file(optimizer.state_dict())
    for target in FORMAT_NAMES:
        others = [nn.Parameter(param.detach().clone()) for param in params]
        loaded = AdamW(others, state=target, backend="eager")
        loaded.load_state_dict(saved)
        assert loaded.param_groups[0]["state"] == target
        saved_slots, slots = (
            {name: entry[name] for name in ("exp_avg", "exp_avg_sq")}
            for entry in (optimizer.state[params[0]], loaded.state[others[0]])
        )
        if target == source:
            for name, new in slots.items():
                for mine, theirs in zip(stored_parts(new), stored_parts(saved_slots[name]), strict=True):
                    assert torch.equal(bits(mine), bits(theirs)), target
        old, new = (
            {name: decoded(slot) for name, slot in absolute(adamw, stored).items()} for stored in (saved_slots, slots)
        )
        for name, signed in ("exp_avg", True), ("exp_avg_sq", False):
            if target == "fp32":
                assert torch.equal(new[name], old[name])
            if target == "int4" and signed:
                # Over the root of the second moment that was stored, in the seven levels of each sign.
                root = new["exp_avg_sq"].sqrt()
                ratio = old[name] / root
                scale = nn.functional.pad(ratio.flatten().abs(), (0, -ratio.numel() % 32)).view(-1, 32).amax(1)
                room = scale.repeat_interleave(32)[: ratio.numel()].view(RAGGED) * (0.5 / 7 + 2**-7)
                assert ((new[name] / root - ratio).abs() <= room).all()
                continue
            expected = zeros_state(get_format(target, signed), RAGGED, torch.device("cpu")).copy_(old[name])
            assert torch.equal(new[name], decoded(expected)), target
        run(loaded, others, range(3, 5))


#: Half a unit of the last bit that each mode keeps, relative to the weight; a whole one where the weight is all.
PRECISION = {
    "nearest": 2.0**-7,
    "stochastic": 2.0**-7,
    "kahan": 2.0**-15,
    "kahan/dithered": 2.0**-15,
    "split8": 2.0**-15,
    "split8/nearest": 2.0**-16,
    "split16": 0.0,
    "split16/dithered": 2.0**-22,
    "master": 0.0,
    "master/dithered": 0.0,
}


def conversion_error(source: str, target: str) -> float:
    """The largest relative error of converting weights that are left as they are."""
    nearest_view = target in ("split8/nearest", "split16")
    if nearest_view and getattr(WEIGHT_MODES[source], "dithered", False):
        return 2.0**-8  # corrections reach half an ulp, and the weight may be a whole one away
    if nearest_view and (source == "master" or target == "split8/nearest"):
        # Half an ulp above the weight, where a tie went to even or fewer bits round to, is one step out of reach.
        return 2 * {"split8/nearest": 2.0**-16, "split16": 2.0**-24}[target]
    return 0.0 if source == target else PRECISION[target]


@pytest.mark.parametrize("source", PRECISION)
def test_checkpoint_converts_between_weight_modes(source: str) -> None:  # promise 4
    params = parameters(RAGGED, dtype=BF16)
    optimizer = AdamW(params, lr=1e-3, weights=source, backend="eager")
    run(optimizer, params, range(3))
    (exact,) = exact_values(optimizer)
    saved = through_file(optimizer.state_dict())
    errors = {}
    for target in PRECISION:
        others = [nn.Parameter(param.detach().clone()) for param in params]
        loaded = AdamW(others, weights=target, backend="eager")
        loaded.load_state_dict(saved)
        assert_same_weights(others, params)
        (value,) = exact_values(loaded)
        errors[target] = ((value - exact).abs() / exact.abs().clamp_min(1e-30)).max().item()
        run(loaded, others, range(3, 4))
    assert {t: e for t, e in errors.items() if e > 1.001 * conversion_error(source, t)} == {}


@pytest.mark.parametrize("target", ["split8", "master", "kahan"])
def test_checkpoint_refuses_corrections_of_other_weights(target: str) -> None:
    params, others = parameters(SHAPE, dtype=BF16), parameters(SHAPE, dtype=BF16, seed=4)
    source = AdamW8bit(params, weights="master", backend="eager")
    run(source, params, range(2))
    loaded = AdamW8bit(others, weights=target, backend="eager")
    before = fingerprint(loaded)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0: its master belongs to other weights.*load the model"
    ):
        loaded.load_state_dict(source.state_dict())
    assert_same(fingerprint(loaded), before)


def test_checkpoint_of_the_smallest_weights_belongs_to_them() -> None:
    params = [nn.Parameter(torch.linspace(-1e-6, 1e-6, 64 * 64).view(SHAPE).to(FP16))]  # most are subnormal
    source = AdamW(params, lr=3e-9, weights="master", weight_decay=0.0, backend="eager")
    run(source, params, range(3))
    loaded = AdamW([nn.Parameter(param.detach().clone()) for param in params], weights="master", backend="eager")
    loaded.load_state_dict(source.state_dict())
    assert torch.equal(exact_values(loaded)[0], exact_values(source)[0])


#: How far the next updates together may be from those of the source, relative to their norm, and how many. int4 gives
#: the weight what rounding takes from a momentum, which evens out over some steps.
UPDATE_ERROR = {
    "fp32": (1e-4, 1),
    "bf16": (0.01, 1),
    "fp8": (0.05, 1),
    "int8": (0.02, 1),
    "int4": (0.5, 20),
    "int8-dynamic": (0.05, 1),
}


@each_format
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.torch_cls], ids=lambda rule: rule.name)
def test_checkpoint_of_torch_is_converted(rule: Rule, state: str) -> None:  # C18
    theirs = parameters(RAGGED, (1,))
    reference = rule.make_torch(theirs, lr=3e-3)
    run(reference, theirs, range(20))
    params = [nn.Parameter(param.detach().clone()) for param in theirs]
    ours = rule.make(params, lr=0.5, state=state)
    ours.load_state_dict(through_file(reference.state_dict()))
    assert ours.param_groups[0]["lr"] == 3e-3
    assert ours.param_groups[0]["state"] == state
    before = [param.detach().clone() for param in params]
    if "adam" in rule.name:
        assert [float(entry["step"]) for entry in ours.state.values()] == [20, 20]
    for slot in ours.rule_for(ours.param_groups[0]).slots:
        assert ours.state[params[1]][slot].shape == (1,)  # C23
    bound, count = UPDATE_ERROR[state]
    run(reference, theirs, range(20, 20 + count))
    run(ours, params, range(20, 20 + count))
    updates = [torch.cat([(new - old).flatten() for new, old in zip(p, before, strict=True)]) for p in (params, theirs)]
    error = (updates[0] - updates[1]).norm() / updates[1].norm()
    assert error.item() <= bound


def test_checkpoint_of_torch_with_unused_parameters_is_converted() -> None:  # C3, C18
    theirs = parameters(SHAPE, SHAPE)
    reference = torch.optim.AdamW(theirs)
    run(reference, theirs[:1], range(3))
    params = parameters(SHAPE, SHAPE)
    ours = AdamW8bit(params, backend="eager")
    ours.load_state_dict(reference.state_dict())
    set_gradients(params, 3)
    ours.step()
    assert [float(ours.state[param]["step"]) for param in params] == [4, 1]


def test_checkpoint_of_torch_bf16_moments_are_read() -> None:  # C5
    theirs = parameters(SHAPE, dtype=BF16)
    reference = torch.optim.AdamW(theirs)
    run(reference, theirs, range(3))
    params = parameters(SHAPE, dtype=BF16)
    ours = AdamW(params, state="fp32", weights="master", backend="eager")
    ours.load_state_dict(through_file(reference.state_dict()))
    entry = ours.state[params[0]]
    assert entry["exp_avg"].dtype == FP32
    assert torch.equal(entry["exp_avg"], reference.state[theirs[0]]["exp_avg"].float())
    assert torch.equal(entry["master"], params[0].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("state", "stored"), [("fp32", FP32), ("bf16", BF16)])
def test_checkpoint_state_keeps_its_dtype(state: str, stored: torch.dtype, dtype: torch.dtype) -> None:  # C5, M2
    params = parameters(SHAPE, dtype=dtype)
    optimizer = AdamW(params, state=state, backend="eager")
    run(optimizer, params, range(2))
    loaded = AdamW(params, state=state, backend="eager")
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    assert loaded.state[params[0]]["exp_avg"].dtype == stored
    assert_same_optimizers(loaded, optimizer)
    # The reverse format decides by what the optimizer has, not by what was saved.
    other = {"fp32": "bf16", "bf16": "fp32"}[state]
    converted = AdamW(params, state=other, backend="eager")
    converted.load_state_dict(optimizer.state_dict())
    assert converted.state[params[0]]["exp_avg"].dtype == {"fp32": FP32, "bf16": BF16}[other]


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@each_format
def test_checkpoint_small_second_moments_never_become_zero(state: str, order: str) -> None:  # C17
    theirs = parameters(SHAPE)
    reference = torch.optim.AdamW(theirs, lr=1e-3)
    run(reference, theirs, range(1))
    moments = torch.logspace(-9, -3, 4096)
    if order == "shuffled":
        moments = moments[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    reference.state[theirs[0]]["exp_avg_sq"].copy_(moments.view(SHAPE))
    reference.state[theirs[0]]["exp_avg"].copy_(moments.sqrt().view(SHAPE))
    params = [nn.Parameter(theirs[0].detach().clone())]
    ours = AdamW(params, state=state, backend="eager")
    ours.load_state_dict(reference.state_dict())
    second = decoded(ours.state[params[0]]["exp_avg_sq"]).flatten()
    assert second.min() > 0
    if order == "sorted" or state not in ("int4", "int8-dynamic"):
        # Four bits span 15 octaves and the dynamic map seven decades, coarse at the low end.
        limit = 2.05 if state == "int4" else 1.6 if state == "int8-dynamic" else 1.5
        ratio = (second / moments).sqrt()
        assert 1 / limit < ratio.min() and ratio.max() < limit  # noqa: PT018


def test_checkpoint_keeps_the_guards_counter() -> None:  # N15
    params = parameters(SHAPE)
    guarded = AdamW8bit(params, skip_nonfinite=True, backend="eager")
    run(guarded, params, range(2))
    set_gradients(params, 2)
    params[0].grad[0, 0] = float("nan")  # type: ignore[index]
    guarded.step()
    saved = through_file(guarded.state_dict())
    same = AdamW8bit(parameters(SHAPE), skip_nonfinite=True, backend="eager")
    same.load_state_dict(saved)
    (entry,) = same.state.values()
    assert (float(entry["step"]), float(entry["skipped"])) == (2, 1)
    plain = AdamW8bit(parameters(SHAPE), backend="eager")
    plain.load_state_dict(saved)
    assert "skipped" not in next(iter(plain.state.values()))
    plain_saved = plain.state_dict()
    same.load_state_dict(plain_saved)
    assert float(next(iter(same.state.values()))["skipped"]) == 0


def test_checkpoint_hyper_parameters_come_from_the_file_and_storage_from_the_optimizer() -> None:
    params = parameters(SHAPE, SHAPE, dtype=BF16)
    groups = [
        {"params": params[:1], "lr": 0.5, "betas": (0.5, 0.6), "initial_lr": 0.75},
        {"params": params[1:], "name": "b"},
    ]
    source = AdamW(groups, weight_decay=0.3, seed=8, eps=1e-5, state="int4", weights="kahan", backend="eager")
    run(source, params, range(1))
    target = AdamW(
        [{"params": [p]} for p in parameters(SHAPE, SHAPE, dtype=BF16)], state="fp8", weights="nearest", backend="eager"
    )
    load_weights([group["params"][0] for group in target.param_groups], [param.detach() for param in params])
    target.load_state_dict(through_file(source.state_dict()))
    first, second = target.param_groups
    assert {name: first[name] for name in ("lr", "betas", "initial_lr", "weight_decay", "seed", "eps")} == {
        "lr": 0.5,
        "betas": (0.5, 0.6),
        "initial_lr": 0.75,
        "weight_decay": 0.3,
        "seed": 8,
        "eps": 1e-5,
    }
    assert (second["lr"], second["name"]) == (1e-3, "b")
    assert {(group["state"], group["weights"], group["backend"]) for group in target.param_groups} == {
        ("fp8", "nearest", "eager")
    }


def test_checkpoint_with_amsgrad_turns_it_on() -> None:
    params = parameters(SHAPE)
    source = AdamW8bit(params, amsgrad=True, backend="eager")
    run(source, params, range(2))
    loaded = AdamW8bit(params, backend="eager")
    loaded.load_state_dict(source.state_dict())
    assert_same_optimizers(loaded, source)


@pytest.mark.parametrize(
    "key", ["skip_nonfinite", "min_quantized_numel", "backend", "seed", "maximize", "amsgrad", "eps"]
)
def test_checkpoint_without_a_newer_group_key_loads(key: str) -> None:  # C14
    params = parameters(SHAPE, (5,))
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(2))
    saved = through_file(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group[key]
    fresh = [nn.Parameter(param.detach().clone()) for param in params]
    loaded = AdamW8bit(fresh, backend="eager")
    loaded.load_state_dict(saved)
    assert_same_optimizers(loaded, optimizer)


# Parameters that come and go -----------------------------------------------------------------------------------------


def test_checkpoint_of_a_half_stepped_model_loads_into_a_stepped_one() -> None:  # C3
    params, others = (parameters(SHAPE, SHAPE) for _ in range(2))
    source, target = (AdamW8bit(p, backend="eager") for p in (params, others))
    run(source, params[:1], range(2))
    saved = through_file(source.state_dict())
    assert sorted(saved["state"]) == [0, 1]
    assert saved["state"][0].keys() == saved["state"][1].keys()
    run(target, others, range(4))
    load_weights(others, [param.detach() for param in params])
    target.load_state_dict(saved)
    assert [float(target.state[param]["step"]) for param in others] == [2, 0]
    run(source, params, range(2, 4))
    run(target, others, range(2, 4))
    assert_same_optimizers(target, source)


def test_checkpoint_of_frozen_parameters_keeps_their_state() -> None:  # C3
    params, others = (parameters(SHAPE, SHAPE) for _ in range(2))
    source, target = (AdamW8bit(p, backend="eager") for p in (params, others))
    run(source, params, range(2))
    params[0].requires_grad_(False)
    params[0].grad = None
    run(source, params[1:], range(2, 3))
    saved = through_file(source.state_dict())
    assert sorted(saved["state"]) == [0, 1]
    others[0].requires_grad_(False)
    load_weights(others, [param.detach() for param in params])
    target.load_state_dict(saved)
    assert [float(target.state[param]["step"]) for param in others] == [2, 3]
    for each, optimizer in (params, source), (others, target):
        each[0].requires_grad_(True)
        run(optimizer, each, range(3, 5))
    assert_same_optimizers(target, source)


def test_checkpoint_of_never_trained_frozen_parameters_loads() -> None:  # A2, C3
    params, others = (parameters(SHAPE, SHAPE) for _ in range(2))
    for each in params, others:
        each[0].requires_grad_(False)
    source, target = (AdamW8bit(p, backend="eager") for p in (params, others))
    run(source, params[1:], range(2))
    target.load_state_dict(through_file(source.state_dict()))
    assert not target.state.get(others[0])
    others[0].requires_grad_(True)
    run(target, others, range(2, 3))
    assert sorted(float(entry["step"]) for entry in target.state.values()) == [1, 3]


# Full-precision weights ----------------------------------------------------------------------------------------------


def model_of(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 61), nn.BatchNorm1d(61), nn.Linear(61, 3)).to(dtype)


EVERY_MODE = [(dtype, mode) for dtype in DTYPES for mode in modes_for(dtype)]
each_mode = pytest.mark.parametrize(("dtype", "mode"), EVERY_MODE, ids=lambda value: str(value).removeprefix("torch."))


@each_mode
def test_checkpoint_fp32_weights_are_the_exact_ones(dtype: torch.dtype, mode: str) -> None:
    model = model_of(dtype)
    params = list(model.parameters())
    optimizer = AdamW8bit(params, lr=1e-3, weights=mode, backend="eager")
    run(optimizer, params, range(3))
    before = fingerprint(optimizer)
    saved = optimizer.fp32_state_dict(model)
    assert list(saved) == list(model.state_dict())
    for (name, param), exact in zip(model.named_parameters(), exact_values(optimizer), strict=True):
        assert saved[name].dtype == FP32
        assert torch.equal(saved[name], exact)
        assert (saved[name] - param.float()).abs().max() <= 2.0**-7 * param.abs().max()
        saved[name].fill_(7)
    assert torch.equal(saved["1.running_var"], model.state_dict()["1.running_var"])
    assert_same(fingerprint(optimizer), before)
    nn.Sequential(*model_of(FP32)).load_state_dict({name: value.float() for name, value in saved.items()})


@each_mode
def test_checkpoint_fp32_weights_round_trip(dtype: torch.dtype, mode: str) -> None:
    model = model_of(dtype)
    params = list(model.parameters())
    optimizer = AdamW8bit(params, lr=1e-3, weights=mode, backend="eager")
    run(optimizer, params, range(3))
    fresh = model_of(dtype, seed=1)
    others = list(fresh.parameters())
    resumed = AdamW8bit(others, weights=mode, backend="eager")
    resumed.load_fp32_state_dict(fresh, through_file(optimizer.fp32_state_dict(model)))
    assert_same_weights(others, params)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert_same_optimizers(resumed, optimizer)
    run(optimizer, params, range(3, 5))
    run(resumed, others, range(3, 5))
    assert_same_optimizers(resumed, optimizer)


@each_mode
def test_checkpoint_fp32_weights_of_another_run_are_kept_as_precisely_as_the_mode_can(
    dtype: torch.dtype, mode: str
) -> None:
    model = model_of(dtype)
    optimizer = AdamW8bit(model.parameters(), weights=mode, backend="eager")
    exact = {name: values(param.shape, 3) for name, param in model.named_parameters()}
    optimizer.load_fp32_state_dict(model, {**model.state_dict(), **exact})
    loaded = optimizer.fp32_state_dict(model)
    half_ulp = {FP32: 0.0, BF16: 2.0**-8, FP16: 2.0**-11}[dtype]
    kept = half_ulp if mode in ("nearest", "stochastic") or dtype == FP32 else PRECISION[mode]
    for name, value in exact.items():
        error = ((loaded[name] - value).abs() - 2.0**-25 * (dtype == FP16)) / value.abs()
        assert error.max() <= kept * 1.001, name
        shown = model.get_parameter(name).float()
        assert ((shown - value).abs() <= 2 * half_ulp * value.abs() + 2.0**-25).all()
        if value.numel() > 4000 and dtype != FP32:
            # Views are unbiased: a mean of 4270 errors of at most an ulp.
            assert ((shown - value) / value.abs()).mean().abs() < 5 * half_ulp / 4270**0.5


def test_checkpoint_fp32_weights_cover_tied_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Embedding(70, 64), nn.Linear(64, 70, bias=False), nn.Linear(70, 64)).to(BF16)
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    optimizer = AdamW8bit(model.parameters(), weights="split8", backend="eager")
    run(optimizer, [model[0].weight], range(2))
    saved = optimizer.fp32_state_dict(model)
    assert torch.equal(saved["0.weight"], saved["1.weight"])
    assert {value.dtype for value in saved.values()} == {FP32}
    optimizer.load_fp32_state_dict(model, {name: value + 0.001 for name, value in saved.items()})
    again = optimizer.fp32_state_dict(model)
    for name, value in saved.items():
        torch.testing.assert_close(again[name], value + 0.001, rtol=2.0**-15, atol=1e-9)
    assert model[1].weight is model[0].weight


BAD_WEIGHTS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "missing": lambda sd: sd.pop("2.weight"),
    "extra": lambda sd: sd.update(other=torch.zeros(1)),
    "shape": lambda sd: sd.update({"0.weight": torch.zeros(3)}),
    "late-shape": lambda sd: sd.update({"2.bias": torch.zeros(5)}),
}


@pytest.mark.parametrize("damage", BAD_WEIGHTS)
@pytest.mark.parametrize("mode", ["stochastic", "split8", "master"])
def test_checkpoint_fp32_weights_that_do_not_fit_change_nothing(mode: str, damage: str) -> None:  # promise 4
    model = model_of(BF16)
    params = list(model.parameters())
    optimizer = AdamW8bit(params, weights=mode, backend="eager")
    run(optimizer, params, range(2))
    saved = {name: value + 1 for name, value in optimizer.fp32_state_dict(model).items()}
    BAD_WEIGHTS[damage](saved)
    before = fingerprint(optimizer)
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key|size mismatch"):
        optimizer.load_fp32_state_dict(model, saved)
    assert_same(fingerprint(optimizer), before)


# Bad checkpoints -----------------------------------------------------------------------------------------------------


def damaged_scale(state: QuantizedState, value: float) -> QuantizedState:
    copied = copy.deepcopy(state)
    copied.parts[-1][1] = value
    return copied


def with_slot(**slots: Callable[[Any], Any] | Any) -> Callable[[dict[str, Any]], None]:
    """Replace entries of the second parameter's state."""

    def change(saved: dict[str, Any]) -> None:
        for name, new in slots.items():
            saved["state"][1][name] = new(saved["state"][1].get(name)) if callable(new) else new

    return change


def without(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for key in keys[:-1]:
            saved = saved[key]
        del saved[keys[-1]]

    return change


def with_group(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["param_groups"][0].update(options)


SECOND = "parameter 1 of group 0: "
BAD_DICTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    # Entries of a parameter.
    "no-state-of-one": (without("state", 1), SECOND + "the state dict has no state for it"),
    "empty-state-of-one": (lambda saved: saved["state"].update({1: {}}), SECOND + "the state dict has no state for it"),
    "no-exp-avg": (without("state", 1, "exp_avg"), SECOND + "the state dict lacks exp_avg; it has .*exp_avg_sq"),
    "no-step": (without("state", 1, "step"), SECOND + ".*step"),
    "no-correction": (without("state", 1, "correction"), SECOND + "the state dict lacks correction"),
    "none-exp-avg": (with_slot(exp_avg=None), SECOND + "the state dict lacks exp_avg"),
    "more-state": (
        with_slot(exp_avg_cube=torch.zeros(SHAPE)),
        SECOND + "the state dict has exp_avg_cube, which adamw does not",
    ),
    "other-extras": (with_slot(master=torch.zeros(SHAPE)), SECOND + ".*master"),
    "entry-is-a-tensor": (lambda saved: saved["state"].update({1: torch.ones(SHAPE)}), SECOND + ".*Tensor"),
    "entry-is-text": (lambda saved: saved["state"].update({1: "exp_avg"}), SECOND + ".*str"),
    "unknown-parameter": (
        lambda saved: saved["state"].update({7: saved["state"][1]}),
        "state for 7, which no parameter group",
    ),
    # Damaged tensors.
    "shape": (with_slot(exp_avg=torch.zeros(64, 63)), SECOND + r"exp_avg: shape \(64, 63\) does not fit .*\(64, 64\)"),
    "scalar": (with_slot(exp_avg=torch.zeros(())), SECOND + r"exp_avg: shape \(\) does not fit"),
    "correction-shape": (with_slot(correction=torch.zeros(3, dtype=torch.int8)), SECOND + "correction: shape"),
    "correction-dtype": (with_slot(correction=torch.zeros(SHAPE)), SECOND + "correction: .*int8"),
    "text": (with_slot(exp_avg="zeros"), SECOND + "exp_avg: expected a real tensor, got str"),
    "number": (with_slot(exp_avg=1.0), SECOND + "exp_avg: expected a real tensor, got float"),
    "complex": (
        with_slot(exp_avg=torch.zeros(SHAPE, dtype=torch.complex64)),
        SECOND + "exp_avg: expected a real tensor",
    ),
    "scale-nan": (
        with_slot(exp_avg=lambda s: damaged_scale(s, float("nan"))),
        SECOND + "exp_avg: the block scales are damaged",
    ),
    "scale-inf": (
        with_slot(exp_avg_sq=lambda s: damaged_scale(s, float("inf"))),
        SECOND + "exp_avg_sq: the block scales",
    ),
    "scale-negative": (with_slot(exp_avg_sq=lambda s: damaged_scale(s, -1.0)), SECOND + "exp_avg_sq: the block scales"),
    "sign": (
        lambda saved: saved["state"][1].update(exp_avg_sq=saved["state"][1]["exp_avg"]),
        SECOND + "exp_avg_sq: it is stored as 'int8/b32/signed', but cannot be negative",
    ),
    "negative-second-moment": (with_slot(exp_avg_sq=-torch.ones(SHAPE)), SECOND + "exp_avg_sq: .*negative"),
    # Counters.
    "step-negative": (with_slot(step=torch.tensor(-1.0)), SECOND + "step must be a whole number"),
    "step-fraction": (with_slot(step=1.5), SECOND + "step must be a whole number, got 1.5"),
    "step-nan": (with_slot(step=torch.tensor(float("nan"))), SECOND + "step must be a whole number"),
    "step-inf": (with_slot(step=torch.tensor(float("inf"))), SECOND + "step must be a whole number"),
    "step-vector": (with_slot(step=torch.ones(2)), SECOND + ".*step"),
    "step-text": (with_slot(step="many"), SECOND + ".*step.*many"),
    # Groups.
    "one-group-more": (
        lambda saved: saved["param_groups"].append({"params": []}),
        r"groups of sizes \[2, 0\].*of \[2\]",
    ),
    "no-groups": (lambda saved: saved["param_groups"].clear(), r"groups of sizes \[\].*of \[2\]"),
    "one-parameter-less": (lambda saved: saved["param_groups"][0]["params"].pop(), r"groups of sizes \[1\].*of \[2\]"),
    "group-without-params": (without("param_groups", 0, "params"), "params"),
    "lr-nan": (with_group(lr=float("nan")), "lr must be finite, got nan"),
    "lr-negative": (with_group(lr=-1.0), "lr must not be negative, got -1.0"),
    "betas": (with_group(betas=(0.9, 1.0)), r"betas\[1\] must be in \[0, 1\), got 1.0"),
    "betas-number": (with_group(betas=0.9), "betas must be a pair"),
    "mode": (with_group(weights="split9"), "weights: unknown mode 'split9'.*did you mean 'split8'"),
    # Not a state dict of an optimizer.
    "none": (lambda saved: [None], "not an optimizer state dict"),
    "list": (lambda saved: [[saved]], "not an optimizer state dict"),
    "empty": (lambda saved: [{}], "not an optimizer state dict"),
    "of-a-model": (lambda saved: [{"weight": torch.ones(SHAPE)}], r"not an optimizer state dict: it has \['weight'\]"),
    "wrapped": (lambda saved: [{"optimizer": saved}], r"not an optimizer state dict: it has \['optimizer'\]"),
    "no-state": (without("state"), "not an optimizer state dict"),
    "state-none": (lambda saved: saved.update(state=None), "state"),
    "state-list": (lambda saved: saved.update(state=[{}, {}]), "state"),
    "groups-none": (lambda saved: saved.update(param_groups=None), "param_groups"),
    "groups-dict": (lambda saved: saved.update(param_groups={"params": [0, 1]}), "param_groups"),
}


@pytest.mark.parametrize("damage", BAD_DICTS)
def test_checkpoint_that_is_bad_is_refused_and_changes_nothing(damage: str) -> None:  # promise 4, promise 8, C18
    params = parameters(SHAPE, SHAPE, dtype=BF16)
    optimizer = AdamW8bit(params, weights="split8", backend="eager")
    run(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, range(3, 5))
    change, message = BAD_DICTS[damage]
    replaced = change(saved)
    if isinstance(replaced, list):
        (saved,) = replaced
    before = fingerprint(optimizer)
    pointers = [part.data_ptr() for value in optimizer.state[params[0]].values() for part in stored_parts(value)]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(fingerprint(optimizer), before)
    assert pointers == [
        part.data_ptr() for value in optimizer.state[params[0]].values() for part in stored_parts(value)
    ]
    run(optimizer, params, range(5, 6))


FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "lion": (lambda: Lion(parameters(SHAPE, SHAPE), backend="eager"), "lacks exp_avg_sq"),
    "sgd": (lambda: SGD(parameters(SHAPE, SHAPE), momentum=0.9, backend="eager"), "lacks exp_avg, exp_avg_sq"),
    "torch-sgd": (lambda: torch.optim.SGD(parameters(SHAPE, SHAPE), momentum=0.9), "lacks exp_avg, exp_avg_sq"),
    "torch-rmsprop": (
        lambda: torch.optim.RMSprop(parameters(SHAPE, SHAPE)),
        "lacks exp_avg, exp_avg_sq; it has .*square_avg",
    ),
    "torch-adagrad": (lambda: torch.optim.Adagrad(parameters(SHAPE, SHAPE)), "lacks exp_avg, exp_avg_sq; it has .*sum"),
    "other-model": (lambda: AdamW8bit(parameters(SHAPE, (32, 128)), backend="eager"), r"exp_avg: shape \(32, 128\)"),
    "other-order": (
        lambda: Adam(parameters((5,), SHAPE), backend="eager"),
        r"parameter 0 of group 0: exp_avg: shape \(5,\)",
    ),
    "other-size": (lambda: AdamW8bit(parameters(SHAPE), backend="eager"), r"groups of sizes \[1\]"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_checkpoint_of_something_else_is_refused_and_changes_nothing(kind: str) -> None:  # C18
    source = FOREIGN[kind][0]()
    run(source, [param for group in source.param_groups for param in group["params"]], range(2))
    params = parameters(SHAPE, SHAPE)
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(1))
    before = fingerprint(optimizer)
    with pytest.raises(ValueError, match=FOREIGN[kind][1]):
        optimizer.load_state_dict(source.state_dict())
    assert_same(fingerprint(optimizer), before)


def test_checkpoint_errors_name_the_parameter() -> None:  # promise 4
    model = nn.Linear(64, 64)
    optimizer = AdamW8bit(model.named_parameters(), backend="eager")
    run(optimizer, list(model.parameters()), range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"parameter 'bias': exp_avg: shape \(3,\) does not fit"):
        optimizer.load_state_dict(saved)


def test_checkpoint_with_an_unknown_spec_does_not_load() -> None:
    params = parameters(SHAPE)
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    # As a later version might name a format: the same length keeps the archive readable.
    changed = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"int8/b32/signed", b"int7/b32/signed"))
    before = fingerprint(optimizer)
    changed.seek(0)
    with pytest.raises(Exception, match=r"unknown state format spec 'int7/b32/signed'"):
        torch.load(changed, weights_only=True)
    assert_same(fingerprint(optimizer), before)
