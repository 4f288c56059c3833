"""Weight modes: exact where they promise it, without bias elsewhere, and moving as far as fp32 weights do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_optim
from lowbit_optim import SGD, AdamW, AdamW8bit, AdamWBf16SR
from lowbit_optim.noise import hash16, make_key
from lowbit_optim.weights import WEIGHT_MODES, Draws, WeightMode

from .cases import MODE_NAMES, PUBLIC_CLASSES, modes_for
from .references import neighbours, run_rule, spacing
from .runs import bits, values

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = 0x8000
EXACT_BITS = {"split8": 7, "split8/nearest": 8, "split16/dithered": 15, "split16": 16}
DITHERED = [name for name in MODE_NAMES if name.endswith("/dithered") or name == "split8"]
NEAREST_VIEW = ["nearest", "kahan", "split8/nearest", "split16", "master"]
LIMIT = 4.5

each_mode = pytest.mark.parametrize("name", MODE_NAMES)
each_mode_and_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for dtype in (FP32, BF16, FP16) for name in modes_for(dtype)],
    ids=lambda item: str(item).replace("torch.", ""),
)


def noise(numel: int, seed: int) -> Tensor:
    return hash16(torch.arange(numel, dtype=torch.int32), make_key(seed))


def draws(step: Tensor | int, fixed: Tensor | int, like: Tensor) -> Draws:
    """Draws as `Draws` hands them out; whole numbers stand for the same draw everywhere."""
    full = lambda draw: draw if isinstance(draw, Tensor) else torch.full(like.shape, draw, dtype=torch.int32)  # noqa: E731
    return Draws(step=lambda: full(step), fixed=lambda: full(fixed))


def patterns(count: int, seed: int = 0) -> Tensor:
    """Random fp32 bit patterns: all binades, subnormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int32).view(FP32)


def ties() -> Tensor:
    """All fp32 values half way between two bf16 values."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    return ((upper << 16) | 0x8000).view(FP32)


def every_weight(dtype: torch.dtype) -> Tensor:
    """Each weight that a dtype has, or 2^16 of them."""
    if dtype == FP32:
        return patterns(1 << 16)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, where all NaN are the same."""
    number = ~expected.isnan()
    assert torch.equal(actual.isnan(), ~number)
    wrong = (bits(actual) != bits(expected)) & number
    assert not wrong.any(), f"{int(wrong.sum())} differ: {actual[wrong][:4]} for {expected[wrong][:4]}"


# Reading and writing ---------------------------------------------------------------------------------------------


@each_mode_and_dtype
@pytest.mark.parametrize("draw", [0, HALF, 0xFFFF, "random"])
def test_writing_what_was_read_changes_no_weight_bit(name: str, dtype: torch.dtype, draw: Any) -> None:
    mode, weight = WEIGHT_MODES[name], every_weight(dtype)
    step = noise(weight.numel(), 1) if draw == "random" else draw
    given = draws(step, noise(weight.numel(), 2), weight)
    # As a fresh optimizer finds them, and as an earlier write left them, with other draws.
    value = mode.read(weight, mode.extras_for(weight, weight.float()))
    assert_same_bits(value, weight.float())
    assert_same_bits(mode.write(value, dtype, given)[0], weight)
    moved = weight.float() * (1 + values(weight.shape, 3) / 300)
    earlier = draws(noise(weight.numel(), 4), noise(weight.numel(), 2), weight)
    stored, extras = mode.write(moved, dtype, earlier)
    again, extras_again = mode.write(mode.read(stored, extras), dtype, given)
    assert_same_bits(again, stored)
    assert_same_bits(mode.read(again, extras_again), mode.read(stored, extras))


@each_mode_and_dtype
def test_odd_values_are_kept(name: str, dtype: torch.dtype) -> None:
    mode = WEIGHT_MODES[name]
    largest = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), largest, -largest, 1.0, -2.0])
    for step in (0, HALF, 0xFFFF):
        for fixed in (0, HALF, 0xFFFF):
            weight, extras = mode.write(x, dtype, draws(step, fixed, x))
            assert weight.dtype == dtype
            assert [extra.dtype for extra in extras] == list(mode.extras.values())
            assert all(extra.shape == x.shape for extra in extras)
            assert_same_bits(weight.float(), x)
            assert_same_bits(mode.read(weight, extras), x)


@each_mode_and_dtype
def test_subnormal_values_are_within_a_unit(name: str, dtype: torch.dtype) -> None:
    mode = WEIGHT_MODES[name]
    smallest = torch.finfo(dtype).smallest_normal
    x = values((4096,), 5) * smallest
    weight, extras = mode.write(x, dtype, draws(noise(4096, 1), noise(4096, 2), x))
    unit = torch.zeros(1) if dtype == FP32 else spacing(x, dtype)
    assert ((weight.double() - x.double()).abs() <= unit).all()
    assert ((mode.read(weight, extras).double() - x.double()).abs() <= unit).all()


@pytest.mark.parametrize("name", NEAREST_VIEW)
def test_nearest_view_is_the_nearest_value(name: str) -> None:
    x = patterns(1 << 16, 6)
    # Under 2^-118 bf16 itself has too few bits for a compensation.
    x = x[(x.abs() < 3e38) & (x.abs() > 1e-35)]
    weight, _ = WEIGHT_MODES[name].write(x, BF16, draws(noise(x.numel(), 1), noise(x.numel(), 2), x))
    low, high = neighbours(x, BF16)
    nearest = torch.minimum(x.double() - low, high - x.double())
    # These round to about 24 bits first, which may carry a value to a tie and so past it.
    slack = (high - low) * (2.0**-7 if name in ("split8/nearest", "kahan") else 0.0)
    assert ((weight.double() - x.double()).abs() <= nearest + slack).all()


# Correction bits -------------------------------------------------------------------------------------------------


# N18
def test_split16_is_exact_for_every_pattern() -> None:
    mode = WEIGHT_MODES["split16"]
    for x in (patterns(1 << 22), ties()):
        weight, extras = mode.write(x, BF16, draws(0, 0, x[:1]))
        assert_same_bits(mode.read(weight, extras), x)
        tie = (bits(x) & 0xFFFF) == 0x8000
        # 2^16 patterns share 2^16 - 1 corrections about one even weight: exact ties go away from zero, not to even.
        away = ((bits(x) & -65536) + 0x10000).view(FP32).bfloat16()
        expected = torch.where(tie & ~x.isnan(), away, x.bfloat16())
        assert_same_bits(weight, expected)
        assert (weight[~tie].isinf() == x.bfloat16()[~tie].isinf()).all()


# N18
@pytest.mark.parametrize("name", EXACT_BITS)
def test_split_keeps_its_bits(name: str) -> None:
    mode, kept = WEIGHT_MODES[name], EXACT_BITS[name]
    x = torch.cat([patterns(1 << 19, 7), ties()])
    x = x[x.abs() < 3.38e38]
    unit = 1 << (16 - kept)
    for step in (0, HALF, 0xFFFF, noise(x.numel(), 1)):
        for fixed in (0, 0xFFFF, noise(x.numel(), 2)):
            weight, extras = mode.write(x, BF16, draws(step, fixed, x))
            joined = mode.read(weight, extras)
            # In units of fp32's last place; patterns of one sign are in the order of their values.
            error = (bits(joined).long() - bits(x).long()).abs()
            assert (joined.signbit() == x.signbit()).all()
            assert error.max() <= (unit // 2 if step is HALF else unit - 1)
            assert ((weight.double() - x.double()).abs() <= 1.01 * spacing(x, BF16)).all()


@pytest.mark.parametrize("name", [name for name in MODE_NAMES if WEIGHT_MODES[name].extras])
def test_extras_for_a_given_weight_hold_the_value(name: str) -> None:
    # Conversion between modes: the weight stays, and what is kept beside it makes up the difference.
    mode = WEIGHT_MODES[name]
    # In units of a bf16 ulp; signed corrections lack the upper end of half an ulp, which costs one unit there.
    bound = {"split8": 2.0**-8, "split8/nearest": 2.0**-8, "split16/dithered": 2.0**-16, "kahan": 2.0**-10}
    for dtype in mode.dtypes:
        x = values((1 << 16,), 8)
        weight = x.to(dtype)
        error = (mode.read(weight, mode.extras_for(weight, x)).double() - x.double()).abs()
        assert (error <= bound.get(name, bound["kahan"] if name == "kahan/dithered" else 0.0) * spacing(x, BF16)).all()


# Views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DITHERED)
def test_dithered_view_is_exact_in_the_mean(name: str) -> None:
    mode = WEIGHT_MODES[name]
    fixed = torch.arange(1 << 16, dtype=torch.int32)
    # On the grid of 24-bit values, so that the view alone rounds.
    for value in (1 + 2.0**-13, 1.5 - 2.0**-14, -0.0217437744140625, 3 * 2.0**-20 + 2.0**-30, -257.25):
        x = torch.full(fixed.shape, float(value))
        weight, extras = mode.write(x, BF16, draws(HALF, fixed, x))
        assert torch.equal(mode.read(weight, extras), x)
        ulp = spacing(x[:1], BF16).item()
        assert weight.double().mean().item() == pytest.approx(value, abs=2.0**-8 * ulp)
        assert ((weight.double() - x.double()).abs() < ulp).all()


# The forward pass sees at once what the exact weights have gained.
@pytest.mark.parametrize("name", DITHERED)
def test_dithered_view_of_a_step_follows_the_exact_weights(name: str) -> None:
    numel = 1 << 16
    weight = torch.nn.Parameter(values((numel,), 9).bfloat16())
    start = weight.detach().double()
    optimizer = SGD([weight], lr=1.0, weights=name, backend="eager")
    moved = 0.1 * spacing(start, BF16)
    weight.grad = moved.bfloat16()
    optimizer.step()
    seen = (start - weight.detach().double()) / spacing(start, BF16)
    standard_error = (0.1 * 0.9 / numel) ** 0.5
    assert abs(seen.mean().item() - 0.1) < LIMIT * standard_error


# Rounding without bias -------------------------------------------------------------------------------------------


def _near(ulp_share: float) -> Tensor:
    """fp32 values at a share of an ulp above bf16 values of several binades and both signs."""
    base = torch.tensor([1.0, 1.5, 0.99609375, 0.0217285, -3.0, -0.75, 1e-20, -1e20]).bfloat16().double()
    return (base + ulp_share * spacing(base, BF16)).float()


@pytest.mark.parametrize("name", [name for name in MODE_NAMES if name != "nearest"])
@pytest.mark.parametrize("share", [0.0001, 0.013, 0.25, 0.4999, 0.5001, 0.7, 0.9999])
def test_writing_has_no_bias(name: str, share: float) -> None:
    # Over all draws of a step, what is read back is the value, whatever the view's offset; near a flip of the view too.
    mode = WEIGHT_MODES[name]
    step = torch.arange(1 << 16, dtype=torch.int32)
    for value in _near(share):
        x = value.expand(step.shape)
        for fixed in (0, 0x1234, HALF, 0xFFFF):
            weight, extras = mode.write(x, BF16, draws(step, fixed, x))
            mean = mode.read(weight, extras).double().mean()
            assert abs(mean - value.double()) <= 2.0**-14 * spacing(value, BF16), (value, fixed)


@pytest.fixture(scope="module")
def drifted() -> dict[str, tuple[Tensor, Tensor]]:
    """(exact weight, view) of every mode after 400 updates of 0.0018 ulp; the second half goes down."""
    size = 4096
    start = (0.5 + 0.5 * torch.rand(size, generator=torch.Generator().manual_seed(0))).bfloat16()
    params = {name: torch.nn.Parameter(start.clone()) for name in MODE_NAMES}
    params["fp32"] = torch.nn.Parameter(start.float())
    optimizer = SGD(
        [{"params": [param], "weights": "auto" if name == "fp32" else name} for name, param in params.items()],
        lr=7e-6,
        backend="eager",
    )
    for param in params.values():
        param.grad = torch.full_like(param, -1.0)
        param.grad[size // 2 :] = 1.0
    for _ in range(400):
        optimizer.step()
    found = {"start": (start.double(), start.double())}
    for name, param in params.items():
        mode = WEIGHT_MODES["nearest" if name == "fp32" else name]
        extras = tuple(optimizer.state[param][extra] for extra in mode.extras)
        found[name] = (mode.read(param.detach(), extras).double(), param.detach().double())
    return found


# N9
@pytest.mark.parametrize("half", [0, 1], ids=["up", "down"])
@pytest.mark.parametrize("name", [name for name in MODE_NAMES if name != "nearest"])
def test_tiny_updates_move_weights_as_far_as_fp32(
    name: str, half: int, drifted: dict[str, tuple[Tensor, Tensor]]
) -> None:
    target, start, (exact, view) = (
        drifted["fp32"][0].chunk(2)[half],
        drifted["start"][0].chunk(2)[half],
        (found.chunk(2)[half] for found in drifted[name]),
    )
    moved = (target - start).abs().mean().item()
    assert moved == pytest.approx(2.8e-3, rel=0.01)
    # What is kept always; what the forward pass sees where the mode promises it.
    for found in [exact, view] if name in (*DITHERED, "stochastic") else [exact]:
        error = found - target
        standard_error = error.std().item() / error.numel() ** 0.5
        assert abs(error.mean().item()) <= max(3 * standard_error, 3e-4 * moved)
    if name != "stochastic":
        assert ((view - exact).abs() <= spacing(exact, BF16)).all()


def test_tiny_updates_are_lost_by_nearest_rounding(drifted: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert torch.equal(drifted["nearest"][1], drifted["start"][1])


# N9
def test_low_learning_rate_drift_is_unbiased_in_the_long_run() -> None:
    numel, steps, update = 8192, 10_000, 1e-6
    weight = torch.nn.Parameter(torch.full((numel,), 0.02, dtype=BF16))
    start, exact = weight.detach().double(), weight.detach()[:1].float()
    optimizer = SGD([weight], lr=update, weights="stochastic", backend="eager")
    weight.grad = torch.full_like(weight, -1.0)
    for _ in range(steps):
        optimizer.step()
        exact = exact + update
    moved = (exact.double() - start[0]).item()
    assert moved == pytest.approx(1e-2, rel=1e-3)
    error = weight.detach().double() - start - moved
    assert abs(error.mean().item()) < 3 * error.std().item() / numel**0.5
    # Independent draws would spread a path of this length by the root of (path * ulp); the dither's errors cancel.
    assert error.std().item() < 0.7 * (moved * spacing(exact, BF16).item()) ** 0.5


# Reports, through the public classes -----------------------------------------------------------------------------


def constant_gradient(optimizer: Any, param: Tensor, steps: int, value: float) -> Tensor:
    param.grad = torch.full_like(param, value)
    for _ in range(steps):
        optimizer.step()
    return param.detach().double()


# N1
@pytest.mark.parametrize("cls", [AdamWBf16SR, AdamW8bit], ids=lambda cls: cls.__name__)
def test_weight_decay_acts_on_bf16_weights(cls: Any) -> None:
    param = torch.nn.Parameter(torch.full((4096,), 0.5, dtype=BF16))
    optimizer = cls([param], lr=1e-4, weight_decay=0.1, backend="eager")
    mean = constant_gradient(optimizer, param, 1000, 0.0).mean().item()
    assert mean == pytest.approx(0.49502, abs=2e-4)


# N1
@each_mode
def test_weight_decay_acts_in_every_mode(name: str) -> None:
    # A tenth as many steps, ten times the decay.
    param = torch.nn.Parameter(torch.full((4096,), 0.5, dtype=BF16))
    optimizer = AdamW([param], lr=1e-4, weight_decay=1.0, state="fp32", weights=name, backend="eager")
    mean = constant_gradient(optimizer, param, 100, 0.0).mean().item()
    lag = 2.0**-9 if name in NEAREST_VIEW else 2e-4
    assert mean == pytest.approx(0.5 if name == "nearest" else 0.49502, abs=lag)
    if WEIGHT_MODES[name].extras:
        mode = WEIGHT_MODES[name]
        exact = mode.read(param.detach(), tuple(optimizer.state[param][extra] for extra in mode.extras))
        assert exact.double().mean().item() == pytest.approx(0.49502, abs=2e-5)


# N2, N19
@each_mode
def test_norm_scales_move_in_every_mode_but_nearest(name: str) -> None:
    param = torch.nn.Parameter(torch.ones(1024, dtype=BF16))
    optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, weights=name, backend="eager")
    mean = constant_gradient(optimizer, param, 100, 1.0).mean().item()
    assert mean == pytest.approx(1.0 if name == "nearest" else 0.9, abs=0.0 if name == "nearest" else 0.01)


# N2
@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_public_classes_move_norm_scales_like_the_reference(name: str) -> None:
    options = PUBLIC_CLASSES[name]
    rule = next(rule for rule in ("adamw", "adam", "lion", "sgd") if name.lower().startswith(rule))
    hyper = {"lr": 1e-3 if rule != "sgd" else 1e-4, "weight_decay": 0.0, **options}
    param = torch.nn.Parameter(torch.ones(1024, dtype=BF16))
    optimizer = getattr(lowbit_optim, name)([param], backend="eager", min_quantized_numel=0, **hyper)
    mean = constant_gradient(optimizer, param, 100, 1.0).mean().item()
    expected = run_rule(rule, torch.ones(1), [torch.ones(1)] * 100, **hyper)[0].item()
    assert expected == pytest.approx(0.9, abs=0.01)
    assert mean == pytest.approx(expected, abs=0.01)


# N19
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_master_weights_are_kept_in_fp32(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(1024, dtype=dtype))
    twin = torch.nn.Parameter(torch.ones(1024))
    optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, weights="master", state="fp32", backend="eager")
    exact = AdamW([twin], lr=1e-3, weight_decay=0.0, state="fp32", backend="eager")
    mean = constant_gradient(optimizer, param, 100, 1.0).mean().item()
    constant_gradient(exact, twin, 100, 1.0)
    master = optimizer.state[param]["master"]
    assert mean == pytest.approx(0.9, abs=0.01)
    assert master.dtype == FP32
    assert torch.equal(master, twin.detach())
    assert torch.equal(param.detach(), master.to(dtype))


@pytest.mark.parametrize("name", ["split16", "master"])
def test_exact_modes_step_as_fp32_weights_do(name: str) -> None:
    start = values((64, 64), 10).bfloat16()
    params = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())]
    optimizer = AdamW(
        [{"params": params[:1], "weights": name}, {"params": params[1:]}], lr=1e-3, state="fp32", backend="eager"
    )
    for step in range(20):
        grad = values((64, 64), 100 + step).bfloat16()
        for param in params:
            param.grad = grad.to(param.dtype)
        optimizer.step()
    mode = WEIGHT_MODES[name]
    entry = optimizer.state[params[0]]
    read = mode.read(params[0].detach().view(-1), tuple(entry[extra].view(-1) for extra in mode.extras))
    assert torch.equal(read, params[1].detach().view(-1))
    assert torch.equal(params[0].detach(), params[1].detach().bfloat16())


def test_modes_and_their_copies_are_the_same() -> None:
    # Signatures of compiled steps are keyed by modes.
    for mode in WEIGHT_MODES.values():
        twin: WeightMode = copy.deepcopy(mode)
        assert twin == mode
        assert hash(twin) == hash(mode)
        assert WEIGHT_MODES[twin.spec] is mode
