"""Plans say what an optimizer then does, byte for byte; presets and policies choose what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import lowbit_optim
from lowbit_optim import PRESETS, AdamW, AdamW4bit, LowBitOptimizer, QuantizedState, from_preset, param_policy, plan
from lowbit_optim.state import stored_parts

from .cases import BF16, DTYPES, FP32, PUBLIC_CLASSES, modes_for
from .runs import SHAPE, assert_same_optimizers, bits, parameters, run

OPTIMIZERS = {
    "adamw": lowbit_optim.AdamW,
    "adam": lowbit_optim.Adam,
    "lion": lowbit_optim.Lion,
    "sgd": lowbit_optim.SGD,
}


class Model(nn.Module):
    """A ragged matrix, an embedding tied to a head, a frozen layer, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.body = nn.Linear(64, 101)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, 64))


def model_on(device: str, dtype: torch.dtype) -> Model:
    with torch.device(device):
        return Model().to(dtype)


def bytes_of(entry: dict[str, Tensor]) -> int:
    parts = [part for name, value in entry.items() if name not in ("step", "skipped") for part in stored_parts(value)]
    return sum(part.untyped_storage().nbytes() for part in parts)


def described(entry: dict[str, Tensor], slots: Iterator[str] | Any) -> str:
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    specs = [value.spec if isinstance(value, QuantizedState) else kinds[value.dtype] for value in map(entry.get, slots)]
    return ",".join(specs) or "none"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("preset", PRESETS)
def test_plan_equals_what_is_allocated(preset: str, device: str) -> None:  # M6
    for name, dtype in [(name, dtype) for name in OPTIMIZERS for dtype in DTYPES]:
        if PRESETS[preset].weights not in modes_for(dtype) and dtype != FP32:
            continue
        options: dict[str, Any] = {"backend": "eager", **({"momentum": 0.9} if name == "sgd" else {})}
        planned = plan(model_on(device, dtype), preset, optimizer=name, **options)
        model = model_on("cpu", dtype)
        optimizer = from_preset(model.named_parameters(), preset, name, **options)
        optimizer.init_state()
        trained = {key: param for key, param in model.named_parameters() if param.requires_grad}
        assert [row.name for row in planned.rows] == list(trained)
        for row, param in zip(planned.rows, trained.values(), strict=True):
            entry = optimizer.state[param]
            rule = optimizer.rule_for(optimizer.param_groups[0])
            assert row.shape == param.shape
            assert row.weight_bytes == param.untyped_storage().nbytes()
            assert row.state_bytes == bytes_of(entry), (row, name)
            assert row.state == described(entry, rule.slots)
            assert row.backend == "eager"
            extras = entry.keys() - rule.slots.keys() - {"step"}
            assert extras == lowbit_optim.weights.WEIGHT_MODES[row.weights].extras.keys()
            assert ("fewer than" in row.reason) == (param.numel() < 4096 and PRESETS[preset].state.startswith("int"))
        counters = 4 * len(planned.rows)
        assert planned.state_bytes == optimizer.memory_bytes() - counters
        assert planned.numel == sum(param.numel() for param in trained.values())
        assert planned.bytes_per_param == (planned.weight_bytes + planned.state_bytes) / planned.numel


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_plan_of_shards_is_what_a_device_holds(preset: str, world_size: int) -> None:
    whole, shard = (parameters(shape, dtype=BF16) for shape in ((64, 256), (64 // world_size, 256)))
    planned = plan(whole, preset, world_size=world_size, backend="eager")
    # A shard is quantized because the whole is large enough.
    optimizer = from_preset(shard, preset, min_quantized_numel=0, backend="eager")
    optimizer.init_state()
    assert planned.weight_bytes == shard[0].numel() * 2
    assert planned.state_bytes == bytes_of(optimizer.state[shard[0]])
    assert planned.numel == 64 * 256
    assert planned.bytes_per_param == pytest.approx(plan(whole, preset, backend="eager").bytes_per_param)


def test_plan_counts_a_ragged_shard_whole() -> None:
    params = [nn.Parameter(torch.zeros(10, 1000, dtype=BF16))]
    (row,) = plan(params, "light", world_size=3, backend="eager").rows
    numel = 4000  # of three shards the first two have four of the ten rows
    assert row.weight_bytes == row.gradient_bytes == 2 * numel
    assert row.state_bytes == 2 * (125 * 32 + 125 * 2)
    assert row.whole_bytes == 20000


class Blocks(nn.Module):
    """Three numbered blocks of which the last is the largest, and weights outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 32, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, width, bias=False)) for width in (32, 32, 96)
        )


def test_plan_counts_gradients_and_what_release_leaves_of_them() -> None:
    model = Blocks().bfloat16()
    sizes = [param.numel() for param in model.parameters()]
    whole = plan(model, "light", backend="eager")
    assert whole.gradient_bytes == whole.weight_bytes == 2 * sum(sizes)
    assert whole.largest_gradient_bytes == 2 * max(sizes) == 2 * 64 * 96
    assert whole.gathered_bytes == 0
    assert whole.total_bytes == whole.state_bytes + 4 * sum(sizes)
    assert whole.released_bytes == whole.state_bytes + 2 * sum(sizes) + 2 * max(sizes)

    shared = plan(model, "light", world_size=4, backend="eager")
    block = 64 * 64 + 64 * 96
    assert shared.gradient_bytes == 2 * sum(sizes) // 4
    assert shared.largest_gradient_bytes == 2 * block // 4
    assert shared.gathered_bytes == 2 * 2 * block
    assert shared.total_bytes == shared.state_bytes + 4 * sum(sizes) // 4 + 4 * block
    assert shared.released_bytes == shared.state_bytes + 2 * sum(sizes) // 4 + 2 * block // 4 + 4 * block


def test_plan_counts_what_is_alive_in_the_backward_pass_with_release() -> None:
    # Against the gradients that are there: hooks see them all when one is about to be stepped.
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96, bias=False), nn.Linear(96, 64)).bfloat16()
    optimizer = from_preset(model.parameters(), "light", backend="eager")
    alive = []

    def count(_: Tensor) -> None:
        alive.append(sum(param.grad.nbytes for param in model.parameters() if param.grad is not None))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    with lowbit_optim.step_in_backward(model, optimizer):
        model(torch.ones(2, 64, dtype=BF16)).sum().backward()
    assert max(alive) == plan(model, "light", backend="eager").largest_gradient_bytes


def test_plan_takes_what_an_optimizer_takes() -> None:
    model = model_on("cpu", BF16)
    groups = param_policy(model, {"body.*": {"state": "int4", "weights": "kahan"}})
    rows = plan(groups, preset="light", backend="eager").rows
    assert {row.name: (row.state.split("/")[0], row.weights) for row in rows} == {
        "scale": ("fp32,fp32", "stochastic"),
        "nothing": ("fp32,fp32", "stochastic"),
        "table.weight": ("fp32,fp32", "stochastic"),
        "body.weight": ("int4", "kahan"),
        "body.bias": ("fp32,fp32", "kahan"),
    }
    assert [row.name for row in plan(parameters(SHAPE, SHAPE), backend="eager").rows] == [
        "0 of group 0",
        "1 of group 0",
    ]
    assert plan(model, None, state="bf16", weights="nearest", backend="eager").rows[0].state == "bf16,bf16"


def test_plan_changes_nothing() -> None:
    model = model_on("cpu", BF16)
    before = [bits(param) for param in model.parameters()]
    generator = torch.get_rng_state()
    plan(model, "balanced", backend="eager")
    assert all(torch.equal(bits(param), old) for param, old in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(param.grad is None for param in model.parameters())


def test_plan_prints_a_table() -> None:
    table = str(plan(model_on("meta", BF16), "balanced", optimizer="lion", backend="eager"))
    assert_expected_inline(
        table,
        """\
parameter     shape   state            weights  backend  bytes   note
scale         scalar  fp32             split8   eager    7       fewer than min_quantized_numel=4096 elements
nothing       0x64    fp32             split8   eager    0       fewer than min_quantized_numel=4096 elements
table.weight  100x64  int8/b32/signed  split8   eager    26,000
body.weight   101x64  int8/b32/signed  split8   eager    26,260
body.bias     101     fp32             split8   eager    707     fewer than min_quantized_numel=4096 elements
12,966 parameters, 52,974 bytes per device, 4.086 bytes per parameter (weight + state)""",
    )


def test_plan_prints_the_share_of_each_device() -> None:
    params = [("wide", nn.Parameter(torch.empty(4096, 4096, device="meta"))), ("small", nn.Parameter(torch.empty(8)))]
    table = str(plan(params, "minimal", world_size=4, backend="eager"))
    assert_expected_inline(
        table,
        """\
parameter  shape      state                             weights  backend  bytes       note
wide       4096x4096  int4/b32/ratio,int4/b32/unsigned  nearest  eager    21,495,808  fp32 weights are exact
small      8          fp32,fp32                         nearest  eager    24          fewer than min_quantized_numel=4096 elements; fp32 weights are exact
16,777,224 parameters, 21,495,832 bytes per device, 5.125 bytes per parameter (weight + state)""",  # noqa: E501
    )


# Presets -------------------------------------------------------------------------------------------------------------


def test_preset_names_and_choices_are_the_documented_ones() -> None:  # A9
    assert {name: (preset.name, preset.weights, preset.state) for name, preset in PRESETS.items()} == {
        "reference": ("reference", "master", "fp32"),
        "bf16": ("bf16", "stochastic", "bf16"),
        "balanced": ("balanced", "split8", "int8"),
        "light": ("light", "stochastic", "int8"),
        "compact": ("compact", "split8", "int4"),
        "minimal": ("minimal", "stochastic", "int4"),
    }
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["light"]  # type: ignore[index]
    assert all(preset.summary for preset in PRESETS.values())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_preset_keyword_is_state_and_weights(name: str, preset: str) -> None:
    cls: Any = getattr(lowbit_optim, name)
    chosen, spelled = (parameters(SHAPE, (5,), dtype=BF16) for _ in range(2))
    extra = {"backend": "eager", **PUBLIC_CLASSES[name]}
    ours = cls(chosen, preset=preset, **extra)
    same = cls(spelled, state=PRESETS[preset].state, weights=PRESETS[preset].weights, **extra)
    run(ours, chosen, range(2))
    run(same, spelled, range(2))
    assert_same_optimizers(ours, same)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_preset_optimizer_is_the_class_with_its_defaults(name: str) -> None:
    made = from_preset(parameters(SHAPE, dtype=BF16), "compact", name, backend="eager")
    direct: LowBitOptimizer = OPTIMIZERS[name](parameters(SHAPE, dtype=BF16), preset="compact", backend="eager")
    assert type(made) is type(direct)
    assert made.defaults == direct.defaults
    tuned = from_preset(parameters(SHAPE), optimizer=name, lr=0.25, weight_decay=0.5, seed=9)
    assert (tuned.defaults["lr"], tuned.defaults["weight_decay"], tuned.defaults["seed"]) == (0.25, 0.5, 9)


def test_preset_defaults_are_balanced_adamw() -> None:
    made = from_preset(parameters(SHAPE))
    assert type(made) is AdamW
    assert (made.defaults["state"], made.defaults["weights"], made.defaults["lr"]) == ("int8", "split8", 1e-3)


def test_preset_names_of_the_familiar_classes_match() -> None:
    for cls, preset in (lowbit_optim.AdamW8bit, "light"), (AdamW4bit, "minimal"), (lowbit_optim.AdamWBf16SR, "bf16"):
        ours, same = parameters(SHAPE, dtype=BF16), parameters(SHAPE, dtype=BF16)
        optimizers = [cls(ours, backend="eager"), from_preset(same, preset, backend="eager")]
        for optimizer, params in zip(optimizers, (ours, same), strict=True):
            run(optimizer, params, range(2))
        assert torch.equal(bits(ours[0]), bits(same[0]))


# Policies ------------------------------------------------------------------------------------------------------------


def test_policy_keeps_the_state_of_embeddings_exact() -> None:  # N13, F17
    model = model_on("cpu", BF16)
    optimizer = AdamW4bit(param_policy(model), backend="eager")
    optimizer.init_state()
    tied = optimizer.state[model.head.weight]
    assert type(tied["exp_avg"]) is Tensor
    assert (tied["exp_avg"].dtype, tied["exp_avg_sq"].dtype) == (FP32, FP32)
    assert optimizer.state[model.body.weight]["exp_avg"].spec == "int4/b32/ratio"
    assert sum(param is model.head.weight for group in optimizer.param_groups for param in group["params"]) == 1
    assert not any(param is model.frozen.weight for group in optimizer.param_groups for param in group["params"])


def test_policy_rules_are_taken_in_order() -> None:  # A8, F1
    model = model_on("cpu", BF16)
    policy = {"body.bias": {"lr": 0.5}, "body.*": {"lr": 0.25}, "*": {"state": "bf16"}}
    optimizer = AdamW(param_policy(model, policy), lr=0.125, backend="eager")
    found = {name: (group["lr"], group["state"]) for group in optimizer.param_groups for name in group["param_names"]}
    assert found == {
        "body.bias": (0.5, "int8"),
        "body.weight": (0.25, "int8"),
        "table.weight": (0.125, "bf16"),
        "scale": (0.125, "bf16"),
        "nothing": (0.125, "bf16"),
    }
    plain = AdamW(param_policy(model, embeddings={}), backend="eager")
    assert {group["state"] for group in plain.param_groups} == {"int8"}
