"""The engine on one device: parameters of any shape and dtype, harmless state, guarded steps, bounded memory."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowbit_optim
from lowbit_optim import PRESETS, SGD, AdamW, AdamW4bit, AdamW8bit, AdamWBf16SR, Lion, QuantizedState, from_preset, plan
from lowbit_optim.formats import FORMATS, BlockFormat, get_format
from lowbit_optim.noise import Region, element_index, hash16, make_key
from lowbit_optim.rules import adamw
from lowbit_optim.state import decoded, stored_parts
from lowbit_optim.step import KernelStep, NoiseKeys, Operands, Signature, Timing
from lowbit_optim.weights import WEIGHT_MODES

from .cases import BF16, DTYPES, FORMAT_NAMES, FP32, PUBLIC_CLASSES, RULES, modes_for
from .runs import (
    SHAPE,
    assert_same_optimizers,
    assert_same_weights,
    bits,
    parameters,
    run,
    set_gradients,
    values,
)

each_mode = pytest.mark.parametrize("mode", modes_for(BF16))
each_format = pytest.mark.parametrize("state", FORMAT_NAMES)


# Shapes, strides and dtypes ------------------------------------------------------------------------------------------

ODD_SHAPES = [(), (0,), (0, 64), (1,), (2,), (31,), (33,), (3, 5, 7), (1, 257), (65, 63)]


@pytest.mark.parametrize("mode", ["stochastic", "split8", "kahan", "master/dithered"])
@each_format
def test_engine_steps_odd_shapes_like_their_padded_selves(state: str, mode: str) -> None:  # C23, D10, M6
    options: dict[str, Any] = {
        "lr": 1e-2,
        "state": state,
        "weights": mode,
        "min_quantized_numel": 0,
        "backend": "eager",
    }
    for shape in ODD_SHAPES:
        params = parameters(shape, dtype=BF16)
        # The same values at the front of a vector of whole blocks; what follows has no gradient and no weight.
        whole = nn.Parameter(torch.zeros(-(-max(params[0].numel(), 1) // 512) * 512, dtype=BF16))
        with torch.no_grad():
            whole[: params[0].numel()] = params[0].flatten()
        ours, padded = AdamW(params, **options), AdamW([whole], **options)
        for step in range(3):
            set_gradients(params, step)
            whole.grad = torch.zeros_like(whole)
            whole.grad[: params[0].numel()] = params[0].grad.flatten()  # type: ignore[union-attr]
            ours.step()
            padded.step()
        assert params[0].shape == shape
        assert torch.equal(bits(params[0]), bits(whole[: params[0].numel()])), shape
        for name, value in ours.state[params[0]].items():
            if name != "step":
                assert value.shape == shape
                expected = decoded(padded.state[whole][name]).flatten()[: params[0].numel()]
                assert torch.equal(decoded(value).flatten(), expected), (shape, name)


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same values at other places in memory."""
    if kind == "transposed":
        return tensor.t().contiguous().t()
    if kind == "every-second":
        return torch.stack([tensor, tensor + 1], dim=-1)[..., 0]
    return torch.cat([tensor, tensor])[: len(tensor)]


@pytest.mark.parametrize("grad_kind", ["transposed", "every-second", "offset"])
@pytest.mark.parametrize("kind", ["transposed", "every-second", "offset"])
def test_engine_steps_noncontiguous_like_contiguous(kind: str, grad_kind: str) -> None:
    for mode in modes_for(BF16):
        (expected,) = parameters((96, 65), dtype=BF16)
        param = nn.Parameter(strided(expected.detach(), kind))
        pointer = param.data_ptr()
        assert kind == "offset" or not param.is_contiguous()
        optimizers = [AdamW8bit([p], weights=mode, backend="eager") for p in (param, expected)]
        for step in range(3):
            set_gradients([expected], step)
            param.grad = strided(expected.grad.clone(), grad_kind)  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
        assert param.data_ptr() == pointer
        assert torch.equal(param, expected)
        assert_same_optimizers(*optimizers)


def test_engine_steps_expanded_gradients() -> None:
    (param, expected) = (parameters(SHAPE)[0] for _ in range(2))
    param.sum().backward()
    assert param.grad is not None
    expected.grad = torch.ones(SHAPE)
    param.grad = torch.ones(()).expand(SHAPE)
    for p in param, expected:
        AdamW8bit([p], backend="eager").step()
    assert torch.equal(param, expected)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_engine_steps_gradients_of_another_dtype_like_fp32_ones(
    dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:  # A16
    (param,), (expected,) = parameters(SHAPE, dtype=dtype), parameters(SHAPE, dtype=dtype)
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the parameter's dtype")
    param.grad_dtype, expected.grad_dtype = grad_dtype, FP32
    ours, upcast = AdamW8bit([param], backend="eager"), AdamW8bit([expected], backend="eager")
    for step in range(3):
        param.grad = values(SHAPE, step).to(grad_dtype)
        expected.grad = param.grad.float()
        ours.step()
        upcast.step()
        assert param.grad.dtype == grad_dtype
    assert_same_optimizers(ours, upcast)


@pytest.mark.parametrize("name", RULES)
def test_engine_mixed_dtypes_equal_their_single_runs(name: str) -> None:  # P5
    def make() -> list[nn.Parameter]:
        return [parameters(SHAPE, dtype=dtype, seed=place)[0] for place, dtype in enumerate(DTYPES)]

    together = make()
    run(RULES[name].make(together, lr=1e-2), together, range(3))
    for place, expected in enumerate(together):
        # The others are there, since noise depends on the place, but have no gradients.
        alone = make()
        optimizer = RULES[name].make(alone, lr=1e-2)
        for step in range(3):
            set_gradients(alone, step)
            for other in alone[:place] + alone[place + 1 :]:
                other.grad = None
            optimizer.step()
        assert torch.equal(alone[place], expected)
        assert alone[place].dtype == DTYPES[place]


def test_engine_group_overrides_choose_formats_and_modes() -> None:  # A8, F1
    a, b, c, d = parameters(SHAPE, SHAPE, SHAPE, SHAPE, dtype=BF16)
    optimizer = AdamW8bit(
        [
            {"params": [a]},
            {"params": [b], "state": "fp32", "weights": "master"},
            {"params": [c], "state": {"exp_avg": "int4", "exp_avg_sq": "bf16"}, "weights": "split8"},
            {"params": [d], "min_quantized_numel": 10_000, "amsgrad": True},
        ],
        backend="eager",
    )
    run(optimizer, [a, b, c, d], range(2))
    kinds = {
        name: [
            (slot, value.spec if isinstance(value, QuantizedState) else value.dtype) for slot, value in entry.items()
        ][1:]
        for name, entry in zip("abcd", optimizer.state.values(), strict=True)
    }
    assert kinds == {
        "a": [("exp_avg", "int8/b32/signed"), ("exp_avg_sq", "int8/b32/unsigned")],
        "b": [("exp_avg", FP32), ("exp_avg_sq", FP32), ("master", FP32)],
        "c": [("exp_avg", "int4/b32/ratio"), ("exp_avg_sq", BF16), ("correction", torch.int8)],
        "d": [("exp_avg", FP32), ("exp_avg_sq", FP32), ("max_exp_avg_sq", FP32)],
    }


def loss_after(optimizer: Any, param: Tensor, steps: int = 6) -> float:
    """Minimize the mean square of a parameter that starts at 1."""
    for _ in range(steps):
        param.grad = param.detach().clone()
        optimizer.step()
    return param.detach().float().square().mean().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_engine_every_public_class_lowers_a_loss(name: str, dtype: torch.dtype) -> None:  # A10, A13, A18
    cls = getattr(lowbit_optim, name)
    for state in (None, *FORMAT_NAMES):
        (param,) = parameters(SHAPE, dtype=dtype)
        optimizer = cls([param], lr=0.1, state=state, backend="eager", **PUBLIC_CLASSES[name])
        before = param.detach().float().square().mean().item()
        assert loss_after(optimizer, param) < 0.7 * before, state
        expected = cls.default_state if state is None else state
        for slot in optimizer.rule_for(optimizer.param_groups[0]).slots:
            stored = optimizer.state[param][slot]
            found = (
                stored.format.name if isinstance(stored, QuantizedState) else {FP32: "fp32", BF16: "bf16"}[stored.dtype]
            )
            assert found == expected
            assert decoded(stored).ne(0).any()


# Noise ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
def test_engine_noise_is_new_at_each_step(guard: bool) -> None:  # N7, C19
    # Lion with betas (0, 0) takes the same step whatever the count, so that only the rounding can differ.
    results = []
    for count in (0, 1, 1, 12_345):
        params = parameters(SHAPE, dtype=BF16)
        optimizer = Lion(params, lr=1e-3, betas=(0.0, 0.0), skip_nonfinite=guard, backend="eager")
        optimizer.init_state()
        optimizer.state[params[0]]["step"].fill_(count)
        run(optimizer, params, range(1))
        results.append(params[0])
    assert torch.equal(results[1], results[2])
    for one, other in ((0, 1), (1, 3), (0, 3)):
        assert 0.05 < (results[one] != results[other]).float().mean() < 0.95


def test_engine_seeds_of_any_size_differ() -> None:
    results = []
    for seed in (-1, 0, 1, 1 << 60, (1 << 60) + 1, 1 << 100):
        params = parameters(SHAPE, dtype=BF16)
        run(AdamW8bit(params, seed=seed, backend="eager"), params, range(1))
        results.append(params[0])
    for place, result in enumerate(results):
        assert not any(torch.equal(result, other) for other in results[:place])


def test_engine_draws_nothing_from_torchs_generators() -> None:  # D6, promise 2
    before = torch.get_rng_state()
    results = []
    for seed in (0, 0, 1):
        params = parameters(SHAPE, dtype=BF16)
        run(AdamW4bit(params, weights="split8", seed=seed, backend="eager"), params, range(3))
        torch.rand(7)
        results.append(params[0])
    torch.set_rng_state(before)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    (param,) = parameters(SHAPE, dtype=BF16)
    run(AdamW4bit([param], backend="eager"), [param], range(2))
    assert torch.equal(torch.get_rng_state(), before)


@each_mode
def test_engine_step_params_rounds_like_step(mode: str) -> None:  # N6
    for state in FORMAT_NAMES:
        params, expected = (parameters(SHAPE, (70, 61), (5,), dtype=BF16) for _ in range(2))
        ours = AdamW(params, state=state, weights=mode, backend="eager")
        whole = AdamW(expected, state=state, weights=mode, backend="eager")
        run(whole, expected, range(3))
        for step in range(3):
            set_gradients(params, step)
            for param in reversed(params):  # as gradients arrive in a backward pass
                ours.step_params([("", param, ours.param_groups[0])])
        assert_same_optimizers(ours, whole)


def reference_hash16(index: int, key: tuple[int, int]) -> int:
    """The hash in Python's unbounded integers."""
    mask = (1 << 32) - 1
    x = (index ^ key[0]) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = (x ^ key[1]) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x >> 16


def signature(state: str = "int8", mode: str = "split8") -> Signature:
    formats = (get_format(state, True), get_format(state, False))
    return Signature(adamw, formats, WEIGHT_MODES[mode], ("grad_sign",), BF16, BF16, "cpu")


@pytest.mark.parametrize(
    "start", [0, 1 << 18, (1 << 31) - 8, (1 << 31) + 7, (1 << 32) - (1 << 18), 1 << 32, 5 << 40], ids=hex
)
def test_engine_noise_index_is_exact_beyond_32_bits(start: int) -> None:  # N21
    seed, place, sig, cpu = 11, 3, signature(), torch.device("cpu")
    words = NoiseKeys(seed, place).at(start, sig, cpu)
    index = element_index(words, 16, cpu)
    for number, purpose in enumerate(("weight", "view", *sig.rule.slots)):
        draws = hash16(index, (words[4 + 2 * number], words[5 + 2 * number])).tolist()
        key = make_key(seed, place, zlib.crc32(purpose.encode()), start >> 32)
        assert draws == [reference_hash16((start + element) % (1 << 32), key) for element in range(16)], purpose
    # A shard that begins there draws the same.
    assert torch.equal(NoiseKeys(seed, place, Region(start)).at(0, sig, cpu), words)
    assert start < 4096 or torch.equal(NoiseKeys(seed, place, Region(4096)).at(start - 4096, sig, cpu), words)


def test_engine_noise_of_far_elements_is_not_that_of_near_ones() -> None:  # N21
    sig, cpu, keys = signature(), torch.device("cpu"), NoiseKeys(0, 0)
    drawn = []
    for start in (0, 1 << 31, 1 << 32, 3 << 32):
        words = keys.at(start, sig, cpu)
        drawn.append(hash16(element_index(words, 4096, cpu), (words[4], words[5])).float())
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert correlation.abs().max() < 0.07


HUGE = (1 << 31) + 256 + 5


@pytest.mark.parametrize("name", [name for name, pair in FORMATS.items() if isinstance(pair[0], BlockFormat)])
def test_engine_part_sizes_are_exact_beyond_31_bits(name: str) -> None:  # N21
    fmt = get_format(name, True)
    assert isinstance(fmt, BlockFormat)
    blocks = math.ceil(HUGE / fmt.block)
    assert fmt.part_sizes(HUGE) == (blocks * fmt.block * fmt.bits // 8, blocks)


@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "int8-dynamic"])
def test_engine_spans_tile_a_huge_parameter(name: str) -> None:  # N21
    sig = signature(name)
    starts: list[int] = []
    offsets: list[tuple[int, ...]] = []
    rows: list[int] = []

    class Keys(NoiseKeys):
        def at(self, start: int, sig: Signature, device: torch.device) -> Tensor:
            starts.append(start)
            return torch.empty(0, device="meta")

    def kernel(weight: Tensor, grad: Tensor, parts: Any, extras: Any, *rest: Any) -> None:
        offsets.append(
            tuple(t.storage_offset() for t in (weight, grad, *extras, *(p for stored in parts for p in stored)))
        )
        rows.append(weight.numel())

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    parts = tuple(
        tuple(empty(size, dtype) for size, dtype in zip(fmt.part_sizes(HUGE), fmt.parts.values(), strict=True))
        for fmt in sig.formats
    )
    operands = Operands(empty(HUGE, BF16), empty(HUGE, BF16), parts, (empty(HUGE, torch.int8),))
    KernelStep(sig, "eager", kernel)([(operands, Keys(0, 0))], Timing(empty(1, FP32), empty(2, torch.int32)))

    block = sig.block
    assert starts[0] == 0
    assert starts[-1] >= 1 << 31
    for start, end, found, size in zip(starts, [*starts[1:], HUGE], offsets, rows, strict=True):
        if end - start >= 2 * block:
            assert size == end - start
            expected = [offset for fmt in sig.formats for offset in fmt.part_sizes(start)]
            assert found == (start, start, start, *expected)
        else:  # a short end is stepped in scratch memory
            assert start > HUGE - 2 * block
            assert size == 2 * block


def test_engine_spans_end_where_the_counter_runs_over() -> None:  # N21
    numel, spans = 10_000, []
    sig = signature("int8", "stochastic")

    def kernel(
        weight: Tensor, grad: Tensor, parts: Any, extras: Any, scalars: Any, clock: Any, words: Tensor, *rest: Any
    ) -> None:
        spans.append((words.clone(), weight.numel()))

    parts = tuple(
        tuple(
            torch.zeros(size, dtype=dtype)
            for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True)
        )
        for fmt in sig.formats
    )
    operands = Operands(torch.zeros(numel, dtype=BF16), torch.zeros(numel, dtype=BF16), parts, ())
    # A shard that begins 4096 elements before the 32-bit counter runs over.
    keys = NoiseKeys(7, 2, Region((1 << 32) - 4096))
    KernelStep(sig, "eager", kernel)([(operands, keys)], Timing(torch.zeros(1), torch.zeros(2, dtype=torch.int32)))
    drawn = torch.cat([hash16(element_index(words, size, words.device), (words[4], words[5])) for words, size in spans])
    identity = 7, 2, zlib.crc32(b"weight")
    expected = [
        reference_hash16(element % (1 << 32), make_key(*identity, element >> 32))
        for element in range((1 << 32) - 4096, (1 << 32) - 4096 + numel)
    ]
    assert drawn[:numel].tolist() == expected


# Asking for state ----------------------------------------------------------------------------------------------------


def zero_lr_step(optimizer: Any, params: list[nn.Parameter]) -> None:
    """What DCP's helpers and torchtitan do to make an optimizer create its state."""
    lrs = [group["lr"] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(()) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


ASK: dict[str, Callable[[Any, list[nn.Parameter]], object]] = {
    "init_state": lambda optimizer, params: optimizer.init_state(),
    "init_state-twice": lambda optimizer, params: (optimizer.init_state(), optimizer.init_state()),
    "state_dict": lambda optimizer, params: optimizer.state_dict(),
    "zero-lr-step": zero_lr_step,
    "zero-lr-steps": lambda optimizer, params: (zero_lr_step(optimizer, params), zero_lr_step(optimizer, params)),
    "save-and-load": lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float-lr", "tensor-lr"])
@pytest.mark.parametrize("ask", ASK)
def test_engine_asking_for_state_changes_no_later_update(ask: str, tensor_lr: bool) -> None:  # C1, C4, promise 9
    for rule in map(RULES.get, ("adam-amsgrad", "adamw", "lion", "sgd-momentum")):
        for mode in ("stochastic", "split8"):
            assert rule is not None
            params, expected = (parameters(SHAPE, (5,), dtype=BF16) for _ in range(2))
            lr = torch.tensor(0.1) if tensor_lr else 0.1
            ours, never = (rule.make(p, lr=copy.copy(lr), weights=mode) for p in (params, expected))
            before = [bits(param) for param in params]
            ASK[ask](ours, params)
            assert all(torch.equal(bits(param), old) for param, old in zip(params, before, strict=True))
            assert [float(entry["step"]) for entry in ours.state.values()] == [0.0, 0.0]
            run(ours, params, range(2))
            run(never, expected, range(2))
            assert_same_weights(params, expected)
            assert_same_optimizers(ours, never)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float-lr", "tensor-lr"])
def test_engine_dcp_helper_changes_no_later_update(lr: Any, flatten: bool) -> None:  # C1, C4
    updates = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = AdamW8bit(model.parameters(), lr=copy.copy(lr), backend="eager")
        if asks:
            saved = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten)
            )
            step = saved["state.weight.step"] if flatten else saved["state"]["weight"]["step"]
            assert float(step) == 0
        run(optimizer, list(model.parameters()), range(1))
        updates.append(model)
    assert_same_weights(updates[0].parameters(), updates[1].parameters())


def test_engine_state_dict_with_pending_gradients_is_complete() -> None:  # C3, promise 9
    params = parameters(SHAPE, SHAPE, (5,))
    optimizer = AdamW8bit(params, backend="eager")
    set_gradients(params[:1], 0)
    optimizer.step()
    set_gradients(params, 1)
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2]
    assert [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == [1, 0, 0]


def test_engine_zero_lr_step_with_gradients_is_a_step() -> None:
    ours, theirs = parameters(SHAPE), parameters(SHAPE)
    optimizers = [AdamW(ours, lr=0.0, state="fp32", backend="eager"), torch.optim.AdamW(theirs, lr=0.0)]
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        run(optimizer, params, range(2))
        optimizer.param_groups[0]["lr"] = 1e-2
        run(optimizer, params, range(2, 4))
    assert float(optimizers[0].state[ours[0]]["step"]) == 4
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=2e-6)


@each_mode
def test_engine_zero_lr_and_gradients_change_no_weight_bit(mode: str) -> None:  # promise 6, N11
    for state in FORMAT_NAMES:
        params = parameters(SHAPE, (5,), dtype=BF16)
        optimizer = AdamW(params, state=state, weights=mode, lr=1e-2, backend="eager")
        run(optimizer, params, range(3))
        before = [bits(param) for param in params]
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(3):
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
        assert all(torch.equal(bits(param), old) for param, old in zip(params, before, strict=True)), state


def test_engine_step_counter_is_that_of_torch() -> None:
    ours, theirs = parameters((4,), (4,)), parameters((4,), (4,))
    optimizer, reference = AdamW8bit(ours, backend="eager"), torch.optim.AdamW(theirs)
    for step in range(5):
        for params, each in (ours, optimizer), (theirs, reference):
            each.zero_grad()
            set_gradients(params[: 1 + step % 2], step)
            each.step()
    for param, same in zip(ours, theirs, strict=True):
        count, expected = optimizer.state[param]["step"], reference.state[same]["step"]
        assert (float(count), count.dtype, count.shape) == (float(expected), expected.dtype, expected.shape)


def test_engine_state_moved_between_steps_changes_nothing() -> None:  # A14
    params, expected = (parameters(SHAPE, (5,), dtype=BF16) for _ in range(2))
    ours, still = (AdamW8bit(p, weights="split8", backend="eager") for p in (params, expected))
    for step in range(3):
        run(ours, params, range(step, step + 1))
        for entry in ours.state.values():
            for name, value in entry.items():
                entry[name] = value.to("cpu", copy=True)
    run(still, expected, range(3))
    assert_same_optimizers(ours, still)


# Not finite ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_engine_guard_skips_a_nonfinite_gradient(name: str, bad: float) -> None:  # N15
    params, expected = (parameters((128, 128), (7,), dtype=BF16) for _ in range(2))
    guarded = from_preset(params, name, skip_nonfinite=True, backend="eager")
    never = from_preset(expected, name, skip_nonfinite=True, backend="eager")
    for step in range(4):
        set_gradients(params, step)
        set_gradients(expected, step)
        if step in (0, 2):
            params[0].grad.view(-1)[5] = bad  # type: ignore[union-attr]
            expected[0].grad = None
        before = [bits(part) for value in guarded.state[params[0]].values() for part in stored_parts(value)][:-1]
        weight = bits(params[0])
        guarded.step()
        never.step()
        if step in (0, 2):
            assert torch.equal(bits(params[0]), weight)
        if step == 2:
            after = [bits(part) for name, value in guarded.state[params[0]].items() for part in stored_parts(value)]
            assert sum(not torch.equal(old, new) for old, new in zip(before, after, strict=False)) == 1, (
                "only the counter"
            )
    counts = [(float(entry["step"]), float(entry["skipped"])) for entry in guarded.state.values()]
    assert counts == [(2, 2), (4, 0)]
    for entry in never.state.values():
        entry["skipped"].fill_(0)
    for entry in guarded.state.values():
        entry["skipped"].fill_(0)
    # As if the bad gradients had never been there, noise included.
    assert_same_optimizers(guarded, never)


def test_engine_without_guard_one_nonfinite_gradient_harms_one_weight() -> None:  # N15, promise 10
    for state in FORMAT_NAMES:
        params = parameters((128, 128), dtype=BF16)
        optimizer = AdamW(params, state=state, backend="eager")
        set_gradients(params, 0)
        params[0].grad.view(-1)[5] = float("nan")  # type: ignore[union-attr]
        optimizer.step()
        run(optimizer, params, range(1, 2))
        assert int(params[0].isnan().sum()) == 1, state
        assert params[0].view(-1)[5].isnan()


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    FORBIDDEN = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.FORBIDDEN, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PRESETS)
def test_engine_guarded_step_reads_no_value(name: str) -> None:  # N15, P11
    params = parameters(SHAPE, (7,), dtype=BF16)
    optimizer = from_preset(params, name, skip_nonfinite=True, backend="eager")
    for step in range(3):
        set_gradients(params, step)
        with NoWaiting():
            optimizer.step()


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3, device="meta")], ids=["float-lr", "tensor-lr"])
def test_engine_steps_on_the_meta_device(lr: Any, guard: bool) -> None:  # P11
    for name in PRESETS:
        # A device without data shows any read of it.
        param = nn.Parameter(torch.empty(SHAPE, dtype=BF16, device="meta"))
        optimizer = from_preset([param], name, lr=lr, skip_nonfinite=guard, backend="eager")
        for _ in range(2):
            param.grad = torch.empty(SHAPE, dtype=BF16, device="meta")
            optimizer.step()
        devices = {
            part.device.type
            for slot in ("exp_avg", "exp_avg_sq")
            for part in stored_parts(optimizer.state[param][slot])
        }
        assert devices == {"meta"}


# Memory --------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes that operations allocated and nobody has freed yet."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {pointer: (ref, size) for pointer, (ref, size) in self._live.items() if not ref.expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@contextmanager
def live_bytes(optimizer: Any) -> Iterator[LiveBytes]:
    tensors = [part for entry in optimizer.state.values() for value in entry.values() for part in stored_parts(value)]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with LiveBytes(tensors + params + [param.grad for param in params]) as mode:
        yield mode


@pytest.mark.parametrize(("name", "numel"), [("balanced", 1 << 24), ("minimal", 1 << 22), ("bf16", 1 << 22)])
def test_engine_eager_step_needs_bounded_memory(name: str, numel: int) -> None:  # M1, M9
    params = [nn.Parameter(torch.zeros(numel, dtype=BF16)), nn.Parameter(torch.zeros(1 << 20, dtype=BF16))]
    optimizer = from_preset(params, name, backend="eager")
    optimizer.init_state()
    for param in params:
        param.grad = torch.ones_like(param)
    with live_bytes(optimizer) as measured:
        optimizer.step()
    assert params[0].detach().ne(0).all()
    assert 1 << 20 < measured.peak < 64 << 20


def test_engine_memory_measure_sees_temporaries() -> None:
    (param,) = parameters((1 << 16,))
    with LiveBytes([param]) as measured, torch.no_grad():
        (param + 1).sum()
        (param * 2 + param).sum()
    assert measured.peak == pytest.approx(2 * param.numel() * 4, abs=8)


@pytest.mark.parametrize("name", PRESETS)
def test_engine_state_buffers_stay_where_they_are(name: str) -> None:  # M3, M10
    params = parameters(SHAPE, (70, 61), (5,), dtype=BF16)
    optimizer = from_preset(params, name, backend="eager")

    def pointers() -> dict[str, int]:
        return {
            f"{place} {key} {number}": part.data_ptr()
            for place, entry in enumerate(optimizer.state.values())
            for key, value in entry.items()
            for number, part in enumerate(stored_parts(value))
        } | {f"weight {place}": param.data_ptr() for place, param in enumerate(params)}

    run(optimizer, params, range(1))
    before = pointers()
    run(optimizer, params, range(1, 20))
    assert pointers() == before


def test_engine_quantizes_any_size_above_the_threshold() -> None:  # M6
    params = [nn.Parameter(torch.ones(size)) for size in (10_000, 4096, 4095)]
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(1))
    kinds = [isinstance(entry["exp_avg"], QuantizedState) for entry in optimizer.state.values()]
    assert kinds == [True, True, False]
    rows = plan(params, "light", backend="eager").rows
    assert [row.state for row in rows] == ["int8/b32/signed,int8/b32/unsigned"] * 2 + ["fp32,fp32"]
    small = "fewer than min_quantized_numel=4096 elements"
    assert [small in row.reason for row in rows] == [False, False, True]
    assert rows[0].state_bytes == 2 * (10_016 + 2 * 313)
    assert rows[2].state_bytes == 8 * 4095


def state_storages(optimizer: Any) -> int:
    """Bytes of the distinct storages of all state, as the allocator sees them."""
    tensors = [part for entry in optimizer.state.values() for value in entry.values() for part in stored_parts(value)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_engine_memory_bytes_is_what_is_allocated(name: str) -> None:
    for dtype in DTYPES:
        params = parameters(SHAPE, (70, 61), (5,), (), dtype=dtype)
        optimizer = getattr(lowbit_optim, name)(params, backend="eager", **PUBLIC_CLASSES[name])
        assert optimizer.memory_bytes() == 0
        run(optimizer, params, range(2))
        assert optimizer.memory_bytes() == state_storages(optimizer) > 0


BYTES_PER_PARAM = {"reference": 14.0, "bf16": 6.0, "balanced": 5.2, "light": 4.2, "compact": 4.2, "minimal": 3.2}


@pytest.mark.parametrize("name", PRESETS)
def test_engine_presets_keep_their_promise_of_memory(name: str) -> None:  # M3
    model = nn.Sequential(nn.Linear(400, 400), nn.LayerNorm(400), nn.Linear(400, 400)).to(BF16)
    params = list(model.parameters())
    numel = sum(param.numel() for param in params)
    assert 0.985 < sum(param.numel() for param in params if param.dim() == 2) / numel < 0.996
    optimizer = from_preset(params, name, backend="eager")
    run(optimizer, params, range(1))
    weights = sum(param.untyped_storage().nbytes() for param in params)
    counters = sum(entry["step"].element_size() for entry in optimizer.state.values())
    measured = (weights + state_storages(optimizer) - counters) / numel
    assert BYTES_PER_PARAM[name] - 0.2 < measured <= BYTES_PER_PARAM[name]
    assert plan(params, name, backend="eager").bytes_per_param == pytest.approx(measured, rel=1e-9)


def test_engine_stateless_sgd_needs_no_memory() -> None:
    params = parameters(SHAPE)
    optimizer = SGD(params, lr=0.1, backend="eager")
    run(optimizer, params, range(2))
    assert list(optimizer.state[params[0]]) == ["step"]
    assert optimizer.memory_bytes() == 4


def test_engine_bf16_class_keeps_bf16_state_of_small_parameters_too() -> None:
    params = parameters((5,), dtype=BF16)
    optimizer = AdamWBf16SR(params, backend="eager")
    run(optimizer, params, range(1))
    assert optimizer.state[params[0]]["exp_avg"].dtype == BF16
