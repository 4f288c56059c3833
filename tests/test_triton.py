"""Triton kernels in the interpreter: every combination against the reference step, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import itertools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit_optim
from lowbit_optim.dispatch import choose_backend, step_fn
from lowbit_optim.formats import FORMATS, RATIOS, BlockFormat, get_format
from lowbit_optim.hyper import Moment
from lowbit_optim.layout import layout_of
from lowbit_optim.noise import Region
from lowbit_optim.rules import Scalars, Slot, Slots, UpdateRule, adam_scalars, update_rule
from lowbit_optim.step import Item, KernelStep, NoiseKeys, Signature, StepFn, Timing, reference_step
from lowbit_optim.weights import WEIGHT_MODES

from .cases import BF16, FORMAT_NAMES, FP16, FP32, MODE_NAMES, modes_for
from .interpreted import interpreted
from .kernel_checks import (
    HYPER,
    UPDATES,
    Case,
    ExactRoots,
    check,
    differences,
    moved,
    random_operands,
    reference,
    timing_of,
)
from .runs import assert_same, fingerprint, parameters, set_gradients

#: Options of a case with one parameter.
ONE = {"sizes": (2304,), "regions": (Region(),)}
NAMES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
ALL = [
    (rule, fmt, mode)
    for rule in UPDATES
    for fmt in (FORMAT_NAMES if UPDATES[rule].slots else ("fp32",))
    for mode in MODE_NAMES
]


def covering() -> list[tuple[str, str, str]]:
    """Combinations in which every pair of a rule, a format and a mode occurs at least once."""
    pairs: set[tuple[str, str]] = set()
    chosen = []
    # A fixed shuffle: in order, the first rule would be paired with everything.
    for case in sorted(ALL, key=lambda case: zlib.crc32("-".join(case).encode())):
        found = set(itertools.combinations(case, 2)) - pairs
        if len(found) > 1:
            chosen.append(case)
            pairs |= found
    return chosen


COVERING = covering()
REST = [case for case in ALL if case not in COVERING]


def case_of(rule: str, fmt: str, mode: str, **options: Any) -> Case:
    return Case(rule, (fmt,) * len(UPDATES[rule].slots), mode, **options)


@pytest.mark.parametrize(("rule", "fmt", "mode"), COVERING, ids=map("-".join, COVERING))
@interpreted
def test_kernels_store_what_the_reference_stores(rule: str, fmt: str, mode: str) -> None:
    check(case_of(rule, fmt, mode), "cpu", steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fmt", "mode"), REST, ids=map("-".join, REST))
@interpreted
def test_kernels_store_what_the_reference_stores_in_full(rule: str, fmt: str, mode: str) -> None:
    check(case_of(rule, fmt, mode), "cpu")


@pytest.mark.parametrize("grad", NAMES)
@pytest.mark.parametrize("weight", NAMES)
@interpreted
def test_weights_and_gradients_of_every_dtype(weight: str, grad: str) -> None:
    modes = {"fp32": ["nearest"], "bf16": ["nearest", "stochastic"], "fp16": modes_for(FP16)}[weight]
    for mode in modes:
        dtypes = {"weight_dtype": NAMES[weight], "grad_dtype": NAMES[grad]}
        check(case_of("adamw", "int8", mode, **dtypes, **ONE), "cpu", steps=1)


@pytest.mark.parametrize("formats", ["int8,bf16", "bf16,int4", "int8-dynamic,int8", "int4,int8-dynamic", "fp32,fp8"])
@interpreted
def test_slots_of_different_formats(formats: str) -> None:
    check(Case("adamw", tuple(formats.split(",")), "split8"), "cpu", steps=1)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("mode", ["kahan", "split8", "split16", "master"])
@interpreted
def test_nan_and_infinite_gradients(fmt: str, mode: str) -> None:
    check(case_of("adamw_amsgrad", fmt, mode), "cpu", steps=1, special=True)


@pytest.mark.parametrize("rule", ["lion", "sgd_momentum"])
@interpreted
def test_nan_and_infinite_gradients_of_other_rules(rule: str) -> None:
    check(case_of(rule, "int8", "stochastic"), "cpu", special=True)


@pytest.mark.parametrize("offset", [2**31 - 512, 2**32 - 512, 2**32 - 7, 2**33 + 2**31])
@pytest.mark.parametrize("fmt", ["int8", "bf16"])
@interpreted
def test_element_counters_around_powers_of_two(offset: int, fmt: str) -> None:
    # Spans end where the low word of the counter does; of ragged spans only plain formats know.
    aligned = offset // 32 * 32 if fmt == "int8" else offset
    check(case_of("adamw", fmt, "split8", sizes=(1500,), regions=(Region(aligned),)), "cpu")


@pytest.mark.parametrize("columns", [32, 50, 96])
@interpreted
def test_shards_with_gaps(columns: int) -> None:
    inner = Region.of_box((40, 200), (3, 60), (30, columns))
    deep = Region.of_box((4, 10, 200), (1, 2, 60), (2, 5, columns))
    fmt = "bf16" if columns % 32 else "int8"
    sizes = 30 * columns, 10 * columns
    assert inner.strided
    assert deep.strided
    check(case_of("adamw", fmt, "kahan/dithered", sizes=sizes, regions=(inner, deep)), "cpu")


@pytest.mark.parametrize("proceed", [True, False])
@interpreted
def test_guarded_step_is_taken_or_left(proceed: bool) -> None:
    case = case_of("adamw", "int4", "split8", guarded=True)
    before = case.items()
    ours, expected = moved(before, "cpu"), moved(before, "cpu")
    step_fn(case.signature("cpu"), "triton")(ours, timing_of(case, 1, "cpu", proceed))
    with ExactRoots():
        reference(case)(expected, timing_of(case, 1, "cpu", proceed))
    assert differences(ours, expected) == (0, 0)
    assert (differences(ours, before) == (0, 0)) == (not proceed)


@interpreted
def test_many_parameters_are_stepped_as_one_by_one() -> None:
    case = case_of("adamw", "int8", "split8", sizes=(2304, 333, 64, 7, 0, 512), regions=(Region(),) * 6)
    together, apart = case.items(), case.items()
    step = step_fn(case.signature("cpu"), "triton")
    for count in 1, 2:
        step(together, timing_of(case, count, "cpu"))
        for item in apart:
            step([item], timing_of(case, count, "cpu"))
    assert differences(together, apart) == (0, 0)


def unaligned(tensor: Tensor) -> Tensor:
    """A copy that starts one element past a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 17, dtype=tensor.dtype)
    start = next(place for place in range(17) if room[place:].data_ptr() % 16 == tensor.element_size())
    return room[start : start + tensor.numel()].copy_(tensor)


@pytest.mark.parametrize("which", ["grad", "weight"])
@interpreted
def test_unaligned_tensors(which: str) -> None:
    case = case_of("adamw", "int8", "split8", **ONE)
    [(operands, keys)] = case.items()
    ours = [(operands._replace(**{which: unaligned(getattr(operands, which))}), keys)]
    expected = case.items()
    step_fn(case.signature("cpu"), "triton")(ours, timing_of(case, 1, "cpu"))
    with ExactRoots():
        reference(case)(expected, timing_of(case, 1, "cpu"))
    assert differences(ours, expected) == (0, 0)


# Tables and launches -------------------------------------------------------------------------------------------------


def launches_of(step: StepFn, items: list[Item], timing: Timing) -> list[int]:
    """Programs of each launch of one step."""
    from triton.runtime.interpreter import GridExecutor

    grids: list[int] = []
    run = GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        grids.append(self.grid[0])
        run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", counted)
        step(items, timing)
    return grids


@interpreted
def test_two_launches_serve_any_number_of_parameters() -> None:
    case = case_of("sgd", "fp32", "nearest", sizes=(32, 4128, 5) * 20, regions=(Region(),) * 60)
    step = step_fn(case.signature("cpu"), "triton")
    assert launches_of(step, case.items(), timing_of(case, 1, "cpu")) == [20 * (1 + 3), 20]
    assert launches_of(step, case.items()[:1], timing_of(case, 1, "cpu")) == [1]
    assert launches_of(step, [], timing_of(case, 1, "cpu")) == []


def table_of(step: Any, items: list[Item]) -> Any:
    return step._launch._tables[items[0][1]]


@interpreted
def test_table_is_kept_while_only_gradients_move() -> None:
    case = case_of("lion", "bf16", "stochastic")
    items, expected = case.items(), case.items()
    step = step_fn(case.signature("cpu"), "triton")
    by_reference = reference(case)
    tables = []
    for count in range(1, 4):
        items = [(operands._replace(grad=operands.grad.clone()), keys) for operands, keys in items]
        step(items, timing_of(case, count, "cpu"))
        by_reference(expected, timing_of(case, count, "cpu"))
        tables.append(table_of(step, items))
    assert tables[0] is tables[1] is tables[2]
    assert differences(items, expected) == (0, 0)
    # Another weight, or a gradient that 16-byte accesses cannot read, needs another table.
    replaced = [(operands._replace(weight=operands.weight.clone()), keys) for operands, keys in items]
    step(replaced, timing_of(case, 4, "cpu"))
    assert table_of(step, replaced) is not tables[2]
    shifted = [(operands._replace(grad=unaligned(operands.grad)), keys) for operands, keys in replaced]
    step(shifted, timing_of(case, 5, "cpu"))
    for count in 4, 5:
        by_reference(expected, timing_of(case, count, "cpu"))
    assert differences(shifted, expected) == (0, 0)


@interpreted
def test_table_goes_with_its_optimizer() -> None:
    case = case_of("sgd", "fp32", "nearest", **ONE)
    step: Any = step_fn(case.signature("cpu"), "triton")
    items = case.items()
    step(items, timing_of(case, 1, "cpu"))
    known = len(step._launch._tables)
    del items
    gc.collect()
    assert len(step._launch._tables) < known


# Optimizers and the choice of a backend ------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", list(lowbit_optim.PRESETS))
@interpreted
def test_optimizers_step_by_kernels(preset: str) -> None:
    def run(backend: str) -> dict[str, Any]:
        params = parameters((64, 65), (5,), (0, 3), dtype=BF16)
        optimizer = lowbit_optim.from_preset(params, preset, lr=1e-2, backend=backend)
        for step in range(2):
            set_gradients(params, step)
            with ExactRoots():
                optimizer.step()
        found = fingerprint(optimizer)
        return {name: value for name, value in found.items() if "backend" not in name}

    assert_same(run("triton"), run("eager"))


@interpreted
def test_auto_does_not_take_the_interpreter() -> None:
    layout = layout_of_one("auto")
    assert layout.backend != "triton"
    assert layout.reason == ""
    assert layout_of_one("triton").backend == "triton"


def layout_of_one(backend: str, **options: Any) -> Any:
    optimizer = lowbit_optim.AdamW([torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))], backend=backend, **options)
    return optimizer.layout_for(optimizer.param_groups[0]["params"][0], optimizer.param_groups[0])


PIECES = UPDATES["adamw"], (get_format("int8", True), get_format("int8", False)), WEIGHT_MODES["split8"]
#: A rule of a user's own, with the name of one of the library's.
FOREIGN = UpdateRule("adamw", UPDATES["adamw"].slots, UPDATES["adamw"].scalars, UPDATES["adamw"].update)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_auto_takes_kernels_on_gpus(device: str) -> None:
    assert choose_backend("auto", device, PIECES) == ("triton", "")


def test_cpu_needs_the_interpreter() -> None:
    with pytest.raises(ValueError, match=r"backend='triton' cannot serve 'cpu' .* TRITON_INTERPRET=1"):
        choose_backend("triton", "cpu", PIECES)
    with pytest.raises(ValueError, match="no Triton kernels for 'mps'"):
        choose_backend("triton", "mps", PIECES)


def test_piece_without_a_device_function_is_refused_or_compiled() -> None:
    pieces = (FOREIGN, *PIECES[1:])
    with pytest.raises(ValueError, match="no Triton device function for rule 'adamw'"):
        choose_backend("triton", "cuda", pieces)
    assert choose_backend("auto", "cuda", pieces) == ("compile", "no Triton device function for rule 'adamw'")
    square = dataclasses.replace(PIECES[1][0], name="square")
    mode = dataclasses.replace(WEIGHT_MODES["split16"], bits=12)
    with pytest.raises(ValueError, match="format 'square/b32/signed', weight mode 'split12'"):
        choose_backend("triton", "cuda", (PIECES[0], (square, square), mode))


def test_plan_shows_why_not_kernels() -> None:
    # Sizes and devices without memory: no GPU is needed to plan for one.
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(64, 64, dtype=BF16, device="cuda"))]
    group = {"state": "int8", "weights": "split8", "backend": "auto", "min_quantized_numel": 1}
    assert layout_of(params[0], group, UPDATES["adamw"]).backend == "triton"
    layout = layout_of(params[0], group, FOREIGN)
    assert (layout.backend, layout.reason) == ("compile", "no Triton device function for rule 'adamw'")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    with pytest.raises(ValueError, match="the package 'triton' is not installed"):
        choose_backend("triton", "cuda", PIECES)


def test_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("triton"), "__version__", "3.3.1")
    with pytest.raises(ValueError, match=r"need Triton 3\.4 or newer, 3\.3\.1 is installed"):
        choose_backend("triton", "cuda", PIECES)


def test_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0, this device has 7\.5"):
        choose_backend("triton", "cuda", PIECES)


@update_rule({"exp_avg": Slot(signed=True), "exp_avg_var": Slot(signed=False)}, adam_scalars)
def adabelief(weight: Tensor, grad: Tensor, slots: Slots, h: Scalars) -> tuple[Tensor, Slots]:
    """The rule of docs/extending.md."""
    mean = slots["exp_avg"] + (grad - slots["exp_avg"]) * h["beta1_rest"]
    var = slots["exp_avg_var"] * h["beta2"] + (grad - mean) ** 2 * h["beta2_rest"] + h["eps"]
    step = h["step_size"] * mean / (var.sqrt() * h["bias2_rsqrt"] + h["eps"])
    return weight * h["keep"] - step, {"exp_avg": mean, "exp_avg_var": var}


@dataclasses.dataclass(frozen=True)
class Squares:
    """The map of docs/extending.md."""

    top: int
    first: int = 0

    @property
    def last(self) -> int:
        return self.top - self.first

    def level(self, code: Tensor) -> Tensor:
        root = (code + self.first) / self.top
        return root * root

    def floor(self, magnitude: Tensor) -> Tensor:
        return ((magnitude.sqrt() * self.top).floor() - self.first).clamp_min(0.0)


@interpreted
def test_pieces_of_a_user_run_by_kernels() -> None:
    kernels = importlib.import_module("lowbit_optim_kernels")
    user = importlib.import_module("tests.user_kernels")
    signed = BlockFormat("square4", True, 4, 32, Squares(7))
    unsigned = BlockFormat("square4", False, 4, 32, Squares(16, first=1), rounding="independent")
    kernels.RULES[adabelief] = kernels.Rule(user.adabelief_kernel, Moment(adabelief, HYPER, 1).names)
    kernels.MAPS[signed] = kernels.Map(user.square4_level, user.square4_floor)
    kernels.MAPS[unsigned] = kernels.Map(user.square4_unsigned_level, user.square4_unsigned_floor)
    names = Moment(adabelief, HYPER, 1).names
    sig = Signature(adabelief, (signed, unsigned), WEIGHT_MODES["split8"], names, BF16, BF16, "cpu")
    operands = random_operands(sig, 1000, torch.Generator().manual_seed(0))
    ours, expected = [(operands, NoiseKeys(0, 0))], moved([(operands, NoiseKeys(0, 0))], "cpu")
    timing = Timing(*Moment(adabelief, HYPER, 1).on(torch.device("cpu")))
    step_fn(sig, "triton")(ours, timing)
    with ExactRoots():
        KernelStep(sig, "eager", functools.partial(reference_step, sig))(expected, timing)
    assert differences(ours, expected) == (0, 0)


def test_a_carry_without_device_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("lowbit_optim_kernels")
    int8, second = get_format("int8", signed=True), get_format("int8", signed=False)
    carried = dataclasses.replace(int8, carried=0.75)
    monkeypatch.setitem(kernels.MAPS, carried, kernels.MAPS[int8.spec])
    monkeypatch.setitem(kernels.RULES, "adamw", dataclasses.replace(kernels.RULES["adamw"], carry=None))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="no Triton device function for what rule 'adamw' carries"):
        choose_backend("triton", "cpu", (UPDATES["adamw"], (carried, second), WEIGHT_MODES["split8"]))
    choose_backend("triton", "cpu", (UPDATES["adamw"], (int8, second), WEIGHT_MODES["split8"]))


def test_docs_show_the_device_functions_of_a_user() -> None:
    source = Path(__file__).with_name("user_kernels.py").read_text()
    shown = source[source.index("@triton.jit") :]
    assert shown in (Path(__file__).parents[1] / "docs/extending.md").read_text()


def test_every_piece_of_the_library_has_a_device_function() -> None:
    kernels = importlib.import_module("lowbit_optim_kernels")
    for rule in UPDATES.values():
        assert kernels.RULES[rule.name].scalars == Moment(rule, HYPER, 1).names
        carried = [slot.carry is not None for slot in rule.slots.values()]
        assert any(carried[:1]) == (kernels.RULES[rule.name].carry is not None)
        assert not any(carried[1:])
    formats = itertools.chain(*FORMATS.values(), RATIOS.values())
    blocks = [fmt.spec for fmt in formats if isinstance(fmt, BlockFormat)]
    assert set(blocks) == set(kernels.MAPS)
    assert set(WEIGHT_MODES) == set(kernels.MODES)
