"""The generated C++ step: bit for bit the reference, for every signature, size and region; and how it is built."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowbit_optim
from lowbit_optim import rules
from lowbit_optim.dispatch import step_fn
from lowbit_optim.emit import source
from lowbit_optim.formats import BlockFormat, get_format
from lowbit_optim.hyper import Moment
from lowbit_optim.maps import Linear
from lowbit_optim.noise import WHOLE, Region
from lowbit_optim.rules import Slot, UpdateRule, adam_scalars, lion_scalars, update_rule
from lowbit_optim.step import Item, NoiseKeys, Operands, Signature, Timing
from lowbit_optim.trace import UnsupportedOp, trace
from lowbit_optim.weights import get_mode

from .cases import BF16, DTYPES, FORMAT_NAMES, FP16, FP32, modes_for
from .references import exact_roots

ALL_RULES = {name: rule for name, rule in vars(rules).items() if isinstance(rule, UpdateRule)}
GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1}
# Whole rows, ragged rows, ragged blocks, next to nothing.
SIZES = (0, 1, 7, 32, 256, 1000, 5000)


def run(sig: Signature, backend: str, items: list[Item], timing: Timing) -> None:
    step = step_fn(sig, backend)
    with exact_roots():
        step(items, timing)


def signature(
    rule: UpdateRule | str = "adamw",
    state: str | dict[str, str] = "int8",
    weights: str = "stochastic",
    weight_dtype: torch.dtype = BF16,
    grad_dtype: torch.dtype | None = None,
    guarded: bool = False,
    strided: bool = False,
) -> Signature:
    rule = ALL_RULES[rule] if isinstance(rule, str) else rule
    names = dict.fromkeys(rule.slots, state) if isinstance(state, str) else state
    ratio = rule.name.endswith("_ratio")
    formats = tuple(
        get_format(names[name], slot.signed, ratio and slot.over is not None) for name, slot in rule.slots.items()
    )
    mode = get_mode(weights, weight_dtype)
    scalars = Moment(rule, GROUP, 1).names
    return Signature(rule, formats, mode, scalars, weight_dtype, grad_dtype or weight_dtype, "cpu", guarded, strided)


def gradient(sig: Signature, numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(sig.grad_dtype)


def fresh(sig: Signature, numel: int, seed: int = 0) -> Operands:
    weight = (gradient(sig, numel, seed).float() * 0.1).to(sig.weight_dtype)
    parts = tuple(
        tuple(
            torch.zeros(size, dtype=dtype)
            for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True)
        )
        for fmt in sig.formats
    )
    extras = tuple(extra.clone() for extra in sig.mode.extras_for(weight, weight.float()))
    return Operands(weight, gradient(sig, numel, seed + 1), parts, extras)


def timing(sig: Signature, step: int, proceed: bool = True) -> Timing:
    scalars, clock = Moment(sig.rule, GROUP, step).on(torch.device("cpu"))
    return Timing(scalars, clock, torch.tensor(proceed) if sig.guarded else None)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether bits agree; NaN may have any payload."""
    if left.is_floating_point():
        nan = left.isnan()
        if not torch.equal(nan, right.isnan()):
            return False
        left, right = left[~nan], right[~nan]
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def check_same(sig: Signature, numel: int, region: Region = WHOLE) -> None:
    runs = []
    for backend in "eager", "cpp":
        operands, keys = fresh(sig, numel), NoiseKeys(3, 5, region)
        for step in range(1, 5):
            operands.grad.copy_(gradient(sig, numel, 10 + step))
            if step == 3 and numel > 3:
                operands.grad[:: max(1, numel // 5)] = float("inf")
                operands.grad[numel // 2], operands.grad[numel // 3] = float("nan"), -float("inf")
            run(sig, backend, [(operands, keys)], timing(sig, step, proceed=step != 2))
        runs.append(operands.tensors())
    names = ("weight", "grad", *(f"{fmt.spec} {part}" for fmt in sig.formats for part in fmt.parts), *sig.mode.extras)
    for name, eager, cpp in zip(names, *runs, strict=True):
        assert same_bits(eager, cpp), f"{name} of {numel} elements"


CASES = [
    ("adamw", "int8", "stochastic"),
    ("adamw", "int4", "split8"),
    ("adamw_amsgrad", "bf16", "kahan/dithered"),
    ("adam", "fp8", "split8/nearest"),
    ("adam_amsgrad", "int8", "split16"),
    ("lion", "int8-dynamic", "kahan"),
    ("sgd", "fp32", "master/dithered"),
    ("sgd_momentum", "int4", "nearest"),
    ("sgd_nesterov", "int8-dynamic", "split16/dithered"),
]
ALL_CASES = [
    (rule, state, mode)
    for rule in ALL_RULES
    for state in FORMAT_NAMES
    for mode in modes_for(BF16)
    if (rule, state, mode) not in CASES
]


# Arithmetic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_step_stores_the_bits_of_the_reference(case: tuple[str, str, str]) -> None:
    sig = signature(*case)
    for numel in SIZES:
        check_same(sig, numel)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids="-".join)
def test_step_stores_the_bits_of_the_reference_in_full(case: tuple[str, str, str]) -> None:
    check_same(signature(*case), 1000)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("weight_dtype", "mode"), [(FP32, "nearest"), (FP16, "stochastic"), (FP16, "master"), (BF16, "nearest")], ids=str
)
def test_step_takes_every_dtype(weight_dtype: torch.dtype, mode: str, grad_dtype: torch.dtype) -> None:
    check_same(signature("lion", "bf16", mode, weight_dtype, grad_dtype), 1000)


def test_every_fp16_value_and_rounding_is_right() -> None:
    sig = signature("sgd", {}, "nearest", FP16, FP32)
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(FP16)
    steps = torch.cat([patterns[:-1], torch.full((1,), 1e6).half()]).float() * 100 * 0.50006
    for grad in steps, patterns.float() * 100 * 1e-3, torch.zeros(1 << 16):
        runs = []
        for backend in "eager", "cpp":
            operands = Operands(patterns.clone(), grad.clone(), (), ())
            run(sig, backend, [(operands, NoiseKeys(0, 0))], timing(sig, 1))
            runs.append(operands.weight)
        assert same_bits(*runs)


def test_guarded_step_leaves_everything_where_it_does_not_proceed() -> None:
    sig = signature("adamw", "int4", "kahan", guarded=True)
    for numel in SIZES:
        check_same(sig, numel)


def test_slots_may_have_formats_of_different_blocks() -> None:
    sig = signature("adamw", {"exp_avg": "int8-dynamic", "exp_avg_sq": "int4"})
    for numel in SIZES:
        check_same(sig, numel)
    check_same(signature("adamw", {"exp_avg": "bf16", "exp_avg_sq": "int8"}, "split8"), 1000)


@pytest.mark.parametrize("offset", [(1 << 31) - 500, (1 << 32) - 500, (1 << 40) + 3, (1 << 32) - 512], ids=str)
def test_noise_is_that_of_the_whole_tensor(offset: int) -> None:
    check_same(signature("lion", "int4", "stochastic"), 3000, Region(offset))


def test_noise_of_a_shard_with_gaps_is_that_of_the_whole_tensor() -> None:
    sig = signature("lion", "int4", "stochastic", strided=True)
    shape = (1 << 20, 3, 130)
    check_same(sig, 2000 * 37, Region.of_box(shape, (7, 1, 5), (1000, 2, 37)))
    # 32-bit counters run over within the shard.
    check_same(sig, 3000 * 40, Region.of_box((1 << 20, 5000), ((1 << 32) // 5000 - 2, 100), (3000, 40)))


def test_tensors_need_not_be_aligned() -> None:
    sig = signature("adamw", "int8", "split8")
    runs = []
    for backend in "eager", "cpp":
        operands = fresh(sig, 1000)
        shifted = [torch.cat([tensor[:1], tensor])[1:] for tensor in operands.tensors()]
        codes = (tuple(shifted[2:4]), tuple(shifted[4:6]))
        run(
            sig,
            backend,
            [(Operands(shifted[0], shifted[1], codes, tuple(shifted[6:])), NoiseKeys(0, 0))],
            timing(sig, 1),
        )
        runs.append(shifted)
    assert all(map(same_bits, *runs))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_parameters_in_one_call_are_stepped_as_one_by_one(threads: int) -> None:
    sig = signature("adamw", "int8", "stochastic")
    sizes = [70_000, 1, 0, 33, 5000, 256, 40_000]

    def items() -> list[Item]:
        return [(fresh(sig, size, seed), NoiseKeys(0, seed, Region((1 << 32) - 99))) for seed, size in enumerate(sizes)]

    together, apart = items(), items()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step_fn(sig, "cpp")(together, timing(sig, 1))
    finally:
        torch.set_num_threads(before)
    for item in apart:
        step_fn(sig, "cpp")([item], timing(sig, 1))
    for (left, _), (right, _) in zip(together, apart, strict=True):
        assert all(map(same_bits, left.tensors(), right.tensors()))


def test_a_call_finds_tensors_where_they_are_now() -> None:
    sig = signature("adamw", "int8", "split8")
    sizes = [300, 5000, 0, 40]

    def items() -> list[Item]:
        return [(fresh(sig, size, seed), NoiseKeys(0, seed, Region((1 << 32) - 99))) for seed, size in enumerate(sizes)]

    def moved(item: Item, step: int) -> Item:
        operands, keys = item
        grad = gradient(sig, operands.weight.numel(), 10 + step)
        parts = tuple(tuple(part.clone() for part in stored) for stored in operands.parts)
        return Operands(operands.weight.clone(), grad, parts, tuple(extra.clone() for extra in operands.extras)), keys

    together, apart = items(), items()
    calls = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1), (0, 1, 2, 3), (3,), (2, 0)]
    for step, places in enumerate(calls, start=1):
        for place in places:
            together[place], apart[place] = moved(together[place], step), moved(apart[place], step)
            run(sig, "eager", [apart[place]], timing(sig, step))
        step_fn(sig, "cpp")([together[place] for place in places], timing(sig, step))
    step_fn(sig, "cpp")([], timing(sig, 1))
    for (left, _), (right, _) in zip(together, apart, strict=True):
        assert all(map(same_bits, left.tensors(), right.tensors()))


def test_counters_advance_by_one_whatever_they_are() -> None:
    step = step_fn(signature(), "cpp")
    for dtype in FP32, torch.float64, torch.int64:
        counters = [torch.tensor(7, dtype=dtype), torch.tensor(0, dtype=dtype)]
        versions = [counter._version for counter in counters]
        moved = step.advance(counters)
        assert [counter.item() for counter in counters] == [8, 1]
        assert [counter._version for counter in counters] == [version + moved for version in versions]


# Generality ----------------------------------------------------------------------------------------------------------


def rule_of(update: object, slots: dict[str, Slot] | None = None) -> UpdateRule:
    return update_rule(slots or {"exp_avg": Slot()}, lion_scalars)(update)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
def test_a_rule_may_keep_what_it_was_given(weight_dtype: torch.dtype) -> None:
    def lagging(weight, grad, slots, h):  # type: ignore[no-untyped-def]
        return weight - h["lr"] * slots["exp_avg"].clamp(-1, 1) - grad**2 * 0.01, {"exp_avg": weight}

    for state in "fp32", "bf16":
        check_same(signature(rule_of(lagging), state, "nearest", weight_dtype), 300)


def test_operations_mean_what_torch_means_for_special_values() -> None:
    def odd(weight, grad, slots, h):  # type: ignore[no-untyped-def]
        a, b = grad, slots["exp_avg"]
        total = a.maximum(b) + a.minimum(b) + a.sign() + a.ceil() + a.round() - a.trunc() + (1 - a) + a.reciprocal()
        total = total + a.copysign(b) + a.clamp_max(0.5).clamp_min(-0.5) + (a < b) + (~(a < b) | (a == b)) * 2.0
        total = total + torch.where((a > 0) ^ (b > 0), a.rsqrt(), -b) + a.to(torch.int32).abs().float()
        return total, {"exp_avg": grad * 0.5 - b}

    sig = signature(rule_of(odd), "fp32", "nearest", FP32)
    special = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, float("nan"), float("inf"), -float("inf"), 1e-40, -3e9, 2.0**31, 7.49]
    a, b = (grid.flatten() for grid in torch.meshgrid(torch.tensor(special), torch.tensor(special), indexing="ij"))
    a = a.clone()
    runs = []
    for backend in "eager", "cpp":
        # fp32 to int32 is undefined in C++ where it does not fit.
        operands = Operands(torch.zeros_like(a), a.clamp(-1e9, 1e9).nan_to_num(3.0), ((b.clone(),),), ())
        run(sig, backend, [(operands, NoiseKeys(0, 0))], timing(sig, 1))
        runs.append(operands.tensors())
    assert all(map(same_bits, *runs))


def test_a_format_with_a_block_of_another_length_is_served() -> None:
    rule = ALL_RULES["lion"]
    for block, bits in (8, 4), (20, 8), (96, 4), (512, 8):
        fmt = BlockFormat(f"test{block}", True, bits, block, Linear(7))
        sig = Signature(rule, (fmt,), get_mode("stochastic", BF16), Moment(rule, GROUP, 1).names, BF16, BF16, "cpu")
        check_same(sig, 1100)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("aten.exp", lambda grad: grad.exp()),
        ("aten.sum", lambda grad: grad / grad.sum()),
        ("aten.add_", lambda grad: grad.clone().add_(1.0)),
        ("aten.flip", lambda grad: grad.flip(0)),
        ("aten.select", lambda grad: grad * grad[0]),
    ],
)
def test_an_operation_that_cannot_be_emitted_is_refused_by_name(name: str, direction: object) -> None:
    def update(weight, grad, slots, h):  # type: ignore[no-untyped-def]
        return weight - direction(grad), slots  # type: ignore[operator]

    sig = signature(rule_of(update), "fp32", "nearest", FP32)
    with pytest.raises(UnsupportedOp, match=name):
        step_fn(sig, "cpp")


def test_auto_gives_a_refused_signature_to_the_next_backend() -> None:
    def exponential(weight, grad, slots, h):  # type: ignore[no-untyped-def]
        return weight - h["lr"] * grad.exp(), slots

    assert step_fn(signature(rule_of(exponential), "fp32", "nearest", FP32), "auto").backend == "compile"
    assert step_fn(signature(), "auto").backend == "cpp"


def test_source_is_the_same_for_the_same_signature() -> None:
    # The cache on disk is keyed by it.
    texts = {source(trace(signature("adamw", "int4", "split8", guarded=True)), 12) for _ in range(3)}
    assert len(texts) == 1


# Building ------------------------------------------------------------------------------------------------------------

ONE_STEP = """
import warnings, torch, lowbit_optim
param = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
param.grad = torch.ones_like(param)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = lowbit_optim.AdamW8bit([param], lr=1e-1, backend={backend!r})
    optimizer.step()
step = next(iter(optimizer._stepper._prepared.values())).step
ours = [str(w.message) for w in caught if "lowbit_optim" in str(w.message)]
print(step.backend, len(ours), param.float().mean().item() < 0.95)
"""


def start(backend: str = "auto", **environment: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(ONE_STEP.format(backend=backend))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out.split()


def test_processes_that_build_the_same_step_at_once_share_the_result(tmp_path: Path) -> None:
    both = [start(LOWBIT_OPTIM_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert [finish(process) for process in both] == [["cpp", "0", "True"]] * 2
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    built = next(tmp_path.iterdir())
    before = built.stat().st_mtime_ns
    assert finish(start(LOWBIT_OPTIM_CACHE_DIR=str(tmp_path))) == ["cpp", "0", "True"]
    assert built.stat().st_mtime_ns == before


def test_a_cache_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert finish(start("cpp", LOWBIT_OPTIM_CACHE_DIR=str(tmp_path / "file" / "cache"))) == ["cpp", "0", "True"]


def test_a_compiler_that_fails_gives_way_to_eager_with_one_warning(tmp_path: Path) -> None:
    found = finish(start(CXX="/bin/false", LOWBIT_OPTIM_CACHE_DIR=str(tmp_path)))
    assert found == ["eager", "1", "True"]


def test_a_compiler_that_fails_is_an_error_where_cpp_is_asked_for(tmp_path: Path) -> None:
    process = start("cpp", CXX="/bin/false", LOWBIT_OPTIM_CACHE_DIR=str(tmp_path))
    _, err = process.communicate(timeout=280)
    assert "BuildError: /bin/false failed" in err


def test_cpp_is_refused_on_other_devices() -> None:
    with pytest.raises(ValueError, match="on CPU"):
        lowbit_optim.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))], backend="cpp")


def test_adabelief_as_documented_is_served() -> None:
    def adabelief(weight, grad, slots, h):  # type: ignore[no-untyped-def]
        mean = slots["exp_avg"] + (grad - slots["exp_avg"]) * h["beta1_rest"]
        var = slots["exp_avg_var"] * h["beta2"] + (grad - mean) ** 2 * h["beta2_rest"] + h["eps"]
        step = h["step_size"] * mean / (var.sqrt() * h["bias2_rsqrt"] + h["eps"])
        return weight * h["keep"] - step, {"exp_avg": mean, "exp_avg_var": var}

    slots = {"exp_avg": Slot(signed=True), "exp_avg_var": Slot(signed=False)}
    check_same(signature(update_rule(slots, adam_scalars)(adabelief), "int8", "split8"), 1000)
