"""Bad arguments: the message says what was given and what is allowed, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowbit_optim
from lowbit_optim import SGD, Adam, AdamW, AdamW4bit, AdamW8bit, Lion, from_preset, param_policy, plan, stochastic_round
from lowbit_optim.weights import WEIGHT_MODES

from .cases import BF16, DTYPES, FP16, FP32, PUBLIC_CLASSES, modes_for
from .runs import SHAPE, assert_same, fingerprint, parameters, run, set_gradients

NAN, INF = float("nan"), float("inf")


def vector(*items: float) -> torch.Tensor:
    return torch.tensor(items)


# (value, exception, message). "{name}" is the hyper-parameter's.
BAD_NUMBERS: dict[str, tuple[Any, type[Exception], str]] = {
    "negative": (-1e-3, ValueError, "{name} must not be negative, got -0.001"),
    "nan": (NAN, ValueError, "{name} must be finite, got nan"),
    "inf": (INF, ValueError, "{name} must be finite, got inf"),
    "text": ("fast", ValueError, "{name} must be a number, got 'fast'"),
    "nan-text": ("nan", ValueError, "{name} must be finite, got 'nan'"),
    "none": (None, TypeError, "{name} must be a number, got None"),
    "bool": (True, TypeError, "{name} must be a number, got True"),
    "list": ([1e-3], TypeError, r"{name} must be a number, got \[0.001\]"),
    "complex": (1j, TypeError, "{name} must be a number, got 1j"),
    "tensor-of-two": (vector(1.0, 2.0), ValueError, r"{name} as a tensor must have one element, got shape \(2,\)"),
    "tensor-nan": (vector(NAN), ValueError, "{name} must be finite, got"),
    "tensor-negative": (vector(-1.0), ValueError, "{name} must not be negative, got"),
}
NUMBERS = {AdamW: ("lr", "eps", "weight_decay"), SGD: ("lr", "momentum", "weight_decay"), Lion: ("lr", "weight_decay")}


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize(
    ("cls", "name"),
    [(cls, name) for cls, names in NUMBERS.items() for name in names],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_bad_number_is_refused_everywhere(cls: Any, name: str, bad: str) -> None:
    value, error, message = BAD_NUMBERS[bad]
    message = message.format(name=name)
    # By the constructor, by a group, and when it was assigned before a step.
    with pytest.raises(error, match=message):
        cls(parameters(SHAPE), backend="eager", **{name: value})
    with pytest.raises(error, match=message):
        cls([{"params": parameters(SHAPE), name: value}], backend="eager")
    params = parameters(SHAPE, dtype=BF16)
    optimizer = cls(params, weights="split8", backend="eager", **PUBLIC_CLASSES[cls.__name__])
    run(optimizer, params, range(2))
    optimizer.param_groups[0][name] = value
    set_gradients(params, 2)
    before = fingerprint_without(optimizer, name)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_same(fingerprint_without(optimizer, name), before)


def fingerprint_without(optimizer: torch.optim.Optimizer, option: str) -> dict[str, Any]:
    """Without an option that may hold anything."""
    kept = optimizer.param_groups[0].pop(option)
    found = fingerprint(optimizer)
    optimizer.param_groups[0][option] = kept
    return found


BAD_BETAS: dict[str, tuple[Any, type[Exception], str]] = {
    "one": ((0.9, 1.0), ValueError, r"betas\[1\] must be in \[0, 1\), got 1.0"),
    "negative": ((-0.1, 0.9), ValueError, r"betas\[0\] must be in \[0, 1\), got -0.1"),
    "nan": ((0.9, NAN), ValueError, r"betas\[1\] must be finite, got nan"),
    "tensor": ((torch.tensor(1.5), 0.9), ValueError, r"betas\[0\] must be in \[0, 1\), got tensor\(1.5000\)"),
    "none": ((0.9, None), TypeError, r"betas\[1\] must be a number, got None"),
    "text": (("high", 0.9), ValueError, r"betas\[0\] must be a number, got 'high'"),
    "number": (0.9, ValueError, "betas must be a pair of numbers, got 0.9"),
    "three": ((0.9, 0.99, 0.999), ValueError, "betas must be a pair of numbers"),
    "a-string": ("0.9, 0.999", ValueError, "betas must be a pair of numbers, got '0.9, 0.999'"),
}


@pytest.mark.parametrize("bad", BAD_BETAS)
@pytest.mark.parametrize("cls", [AdamW, Adam, Lion], ids=lambda cls: cls.__name__)
def test_bad_betas_are_refused_everywhere(cls: Any, bad: str) -> None:
    value, error, message = BAD_BETAS[bad]
    with pytest.raises(error, match=message):
        cls(parameters(SHAPE), betas=value, backend="eager")
    params = parameters(SHAPE)
    optimizer = cls(params, backend="eager")
    run(optimizer, params, range(1))
    optimizer.param_groups[0]["betas"] = value
    before = fingerprint_without(optimizer, "betas")
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_same(fingerprint_without(optimizer, "betas"), before)


BAD_OPTIONS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # Unknown names come with the nearest one.
    "format": (
        lambda: AdamW(parameters(SHAPE), state="int-8"),
        ValueError,
        "unknown format 'int-8'.*did you mean 'int8'",
    ),
    "format-far": (
        lambda: AdamW(parameters(SHAPE), state="q"),
        ValueError,
        "unknown format 'q'; choose one of fp32, .*int4",
    ),
    "format-type": (
        lambda: AdamW(parameters(SHAPE), state=8),
        ValueError,
        "state must be a format name or a mapping.*got 8",
    ),  # type: ignore[arg-type]
    "slot-format": (
        lambda: AdamW(parameters(SHAPE), state={"exp_avg": "bf-16", "exp_avg_sq": "int8"}),
        ValueError,
        "unknown format 'bf-16'.*did you mean 'bf16'",
    ),
    "slot": (
        lambda: AdamW(parameters(SHAPE), state={"exp_av": "int8", "exp_avg_sq": "int8"}),
        ValueError,
        "adamw has no slot 'exp_av'; its slots are exp_avg, exp_avg_sq; did you mean 'exp_avg'",
    ),
    "slot-missing": (
        lambda: AdamW(parameters(SHAPE), state={"exp_avg": "int8"}),
        ValueError,
        "slot 'exp_avg_sq' of adamw needs a format too, one of fp32",
    ),
    "slot-of-stateless": (
        lambda: SGD(parameters(SHAPE), state={"exp_avg": "int8"}),
        ValueError,
        "sgd has no slot.*are none",
    ),
    "mode": (
        lambda: AdamW(parameters(SHAPE), weights="stochastics"),
        ValueError,
        "unknown mode 'stochastics'.*'stochastic'",
    ),
    "mode-of-fp32": (lambda: AdamW(parameters(SHAPE), weights="split9"), ValueError, "unknown mode 'split9'.*'split8'"),
    "preset": (lambda: AdamW(parameters(SHAPE), preset="balance"), ValueError, "preset: unknown 'balance'.*'balanced'"),
    "preset-far": (
        lambda: AdamW(parameters(SHAPE), preset="x"),
        ValueError,
        "choose one of reference, bf16, balanced, light",
    ),
    "backend": (
        lambda: AdamW(parameters(SHAPE), backend="eger"),
        ValueError,
        "backend: unknown 'eger'.*did you mean 'eager'",
    ),
    "backend-of-device": (
        lambda: AdamW(parameters(SHAPE), backend="triton"),
        ValueError,
        "parameter 0 of group 0: backend='triton' cannot serve 'cpu' parameters: ",
    ),
    "optimizer": (
        lambda: from_preset(parameters(SHAPE), optimizer="adam-w"),
        ValueError,
        "optimizer: unknown 'adam-w'; choose one of adamw, adam, lion, sgd; did you mean 'adamw'",
    ),
    "preset-of-from-preset": (
        lambda: from_preset(parameters(SHAPE), "minmal"),
        ValueError,
        "'minmal'.*did you mean 'minimal'",
    ),
    "preset-of-plan": (lambda: plan(parameters(SHAPE), "litgh"), ValueError, "'litgh'.*did you mean 'light'"),
    "optimizer-of-plan": (lambda: plan(parameters(SHAPE), optimizer="Lion"), ValueError, "'Lion'.*did you mean 'lion'"),
    "world-size": (lambda: plan(parameters(SHAPE), world_size=0), ValueError, "world_size must be at least 1, got 0"),
    # Pairs that do not go together.
    "preset-and-state": (
        lambda: AdamW(parameters(SHAPE), preset="light", state="int8"),
        ValueError,
        "preset='light' sets state and weights",
    ),
    "preset-and-weights": (
        lambda: AdamW4bit(parameters(SHAPE), preset="light", weights="kahan"),
        ValueError,
        "preset='light' sets state and weights",
    ),
    "nesterov": (
        lambda: SGD(parameters(SHAPE), nesterov=True),
        ValueError,
        "nesterov needs momentum above 0 and dampening 0",
    ),
    "nesterov-damped": (
        lambda: SGD(parameters(SHAPE), momentum=0.9, dampening=0.1, nesterov=True),
        ValueError,
        "nesterov needs momentum above 0 and dampening 0",
    ),
    # Other options.
    "flag": (
        lambda: AdamW(parameters(SHAPE), amsgrad="maybe"),
        ValueError,
        "amsgrad must be true or false, got 'maybe'",
    ),  # type: ignore[arg-type]
    "flag-number": (lambda: AdamW(parameters(SHAPE), maximize=2), ValueError, "maximize must be true or false, got 2"),  # type: ignore[arg-type]
    "guard": (
        lambda: AdamW(parameters(SHAPE), skip_nonfinite="on"),
        ValueError,
        "skip_nonfinite must be true or false, got 'on'",
    ),  # type: ignore[arg-type]
    "dampening": (lambda: SGD(parameters(SHAPE), dampening=NAN), ValueError, "dampening must be finite, got nan"),
    "seed": (lambda: AdamW(parameters(SHAPE), seed="soon"), ValueError, "seed must be a number, got 'soon'"),  # type: ignore[arg-type]
    "seed-nan": (lambda: AdamW(parameters(SHAPE), seed=NAN), ValueError, "seed must be finite, got nan"),  # type: ignore[arg-type]
    "seed-fraction": (lambda: AdamW(parameters(SHAPE), seed=2.5), ValueError, "seed must be .*whole.*, got 2.5"),  # type: ignore[arg-type]
    "threshold": (
        lambda: AdamW(parameters(SHAPE), min_quantized_numel="few"),  # type: ignore[arg-type]
        ValueError,
        "min_quantized_numel must be a number, got 'few'",
    ),
    "unknown-option": (lambda: AdamW(parameters(SHAPE), stat="int8"), TypeError, "'stat'"),  # type: ignore[call-arg]
    "rounding-dtype": (
        lambda: stochastic_round(torch.ones(2), 0, dtype=FP32),
        ValueError,
        "dtype must be torch.bfloat16 or torch.float16, got torch.float32",
    ),
}


@pytest.mark.parametrize("bad", BAD_OPTIONS)
def test_bad_option_is_refused(bad: str) -> None:  # promise 8, N6
    make, error, message = BAD_OPTIONS[bad]
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        make()
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_preset_of_a_group_is_not_ignored() -> None:  # A8
    try:
        optimizer = AdamW8bit([{"params": parameters(SHAPE), "preset": "minimal"}], backend="eager")
    except ValueError as error:
        assert "preset" in str(error)  # noqa: PT017
    else:
        assert optimizer.param_groups[0]["state"] == "int4"


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [(mode, dtype) for mode in WEIGHT_MODES for dtype in DTYPES],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_bad_mode_for_a_dtype_is_refused_at_construction(mode: str, dtype: torch.dtype) -> None:  # N6, N19
    params = parameters(SHAPE, SHAPE, dtype=dtype)
    groups = [{"params": params[:1]}, {"params": params[1:], "weights": mode}]
    fits = modes_for(dtype)
    if mode in fits or dtype == FP32:  # fp32 weights are exact in every mode
        run(AdamW8bit(groups, backend="eager"), params, range(1))
        return
    choices = f"one of {', '.join(fits)}$"
    message = f"parameter 0 of group 1: weights='{mode}' stores torch.bfloat16 weights, not {dtype}; .*{choices}"
    with pytest.raises(ValueError, match=message):
        AdamW8bit(groups, backend="eager")


# Parameters ----------------------------------------------------------------------------------------------------------

BAD_PARAMETERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "int32": (
        lambda: torch.ones(2, dtype=torch.int32),
        TypeError,
        "dtype torch.int32 is not supported; .*fp32, bf16 or fp16",
    ),
    "bool": (lambda: torch.ones(2, dtype=torch.bool), TypeError, "dtype torch.bool is not supported"),
    "complex64": (
        lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        TypeError,
        "dtype torch.complex64 is not supported",
    ),
    "fp64": (
        lambda: nn.Parameter(torch.ones(2, dtype=torch.float64)),
        TypeError,
        "dtype torch.float64 is not supported",
    ),
    "fp8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), TypeError, "dtype torch.float8_e4m3fn is not supported"),
    "sparse": (
        lambda: nn.Parameter(torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)),
        TypeError,
        "layout torch.sparse_coo is not supported; parameters must be dense",
    ),
    "non-leaf": (lambda: nn.Parameter(torch.ones(2)) * 2, ValueError, "non-leaf"),
    "text": (lambda: "weight", TypeError, "Tensor"),
}


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
def test_bad_parameter_is_refused_and_nothing_is_added(kind: str) -> None:
    make, error, message = BAD_PARAMETERS[kind]
    (good,) = parameters(SHAPE)
    with pytest.raises(error, match=message):
        AdamW8bit([good, make()], backend="eager")
    optimizer = AdamW8bit([good], backend="eager")
    run(optimizer, [good], range(1))
    before = fingerprint(optimizer)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [*parameters(SHAPE, seed=3), make()]})
    assert_same(fingerprint(optimizer), before)
    run(optimizer, [good], range(1, 2))


def test_bad_parameter_is_named() -> None:
    model = nn.ParameterDict(
        {"good": nn.Parameter(torch.ones(2)), "bad": nn.Parameter(torch.ones(2, dtype=torch.float64))}
    )
    with pytest.raises(TypeError, match=r"parameter 'bad': dtype torch\.float64"):
        AdamW(model.named_parameters())


BAD_GROUPS: dict[str, tuple[Callable[[nn.Parameter], Any], type[Exception], str]] = {
    "twice": (lambda p: {"params": [*parameters((3,), seed=2), p, p]}, ValueError, "twice"),
    "twice-named": (lambda p: {"params": [("a", p), ("b", p)]}, ValueError, "twice"),
    "in-another-group": (lambda p: {"params": [p]}, ValueError, "more than one parameter group"),
    "lr": (lambda p: {"params": parameters((3,)), "lr": -1.0}, ValueError, "lr must not be negative, got -1.0"),
    "state": (lambda p: {"params": parameters((3,)), "state": "int9"}, ValueError, "unknown format 'int9'"),
    "mode": (
        lambda p: {"params": parameters((3,), dtype=FP16), "weights": "split8"},
        ValueError,
        "parameter 0 of group 1: weights='split8' stores torch.bfloat16 weights, not torch.float16",
    ),
    "not-a-dict": (lambda p: parameters((3,)), TypeError, "must be a dict"),
    "set": (lambda p: {"params": set(parameters((3,)))}, TypeError, "ordered"),
}


@pytest.mark.parametrize("kind", BAD_GROUPS)
def test_bad_group_is_refused_and_nothing_is_added(kind: str) -> None:
    make, error, message = BAD_GROUPS[kind]
    (param,) = parameters(SHAPE)
    optimizer = AdamW8bit([param], backend="eager")
    run(optimizer, [param], range(2))
    before = fingerprint(optimizer)
    with pytest.raises(error, match=message):
        optimizer.add_param_group(make(param))
    assert len(optimizer.param_groups) == 1
    assert_same(fingerprint(optimizer), before)
    run(optimizer, [param], range(2, 3))
    assert float(optimizer.state[param]["step"]) == 3


@pytest.mark.parametrize("cls", PUBLIC_CLASSES)
def test_bad_parameter_list_is_refused(cls: str) -> None:
    make = getattr(lowbit_optim, cls)
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        make(torch.ones(2))
    (param,) = parameters((2,))
    with pytest.raises(ValueError, match="twice"):
        make([param, param])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("1.wieght", "pattern '1.wieght' matches no trainable parameter; did you mean '1.weight'"),
        ("*norm*", r"pattern '\*norm\*' matches no trainable parameter"),
        ("2.*", r"pattern '2.\*' matches no trainable parameter"),  # frozen
        ("0.weight", None),
    ],
)
def test_bad_policy_pattern_is_reported(pattern: str, message: str | None) -> None:  # A8, N13
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 2).requires_grad_(False))
    if message is None:
        groups = param_policy(model, {pattern: {"state": "int4"}})
        optimizer = AdamW8bit(groups, backend="eager")
        optimizer.init_state()
        assert optimizer.state[model[0].weight]["exp_avg"].spec == "int4/b32/ratio"
    else:
        with pytest.raises(ValueError, match=message):
            param_policy(model, {"0.*": {}, pattern: {"state": "fp32"}})


# Steps that cannot be taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("cls", PUBLIC_CLASSES)
def test_bad_sparse_gradient_changes_nothing(cls: str, started: bool) -> None:  # promise 8
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "table": nn.Embedding(64, 64, sparse=True)})
    params = list(model.parameters())
    optimizer = getattr(lowbit_optim, cls)(model.named_parameters(), backend="eager", **PUBLIC_CLASSES[cls])
    if started:
        run(optimizer, params, range(2))
    optimizer.zero_grad()
    model["body"](model["table"](torch.tensor([1, 2]))).sum().backward()
    assert params[0].grad is not None
    before = fingerprint(optimizer)
    with pytest.raises(
        TypeError, match=r"parameter 'table.weight': sparse gradients are not supported; .*sparse=False"
    ):
        optimizer.step()
    assert_same(fingerprint(optimizer), before)


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_bad_gradient_shape_changes_nothing(backend: str, started: bool) -> None:  # promise 8
    params = parameters(SHAPE, SHAPE)
    optimizer = AdamW8bit(params, backend=backend)
    if started:
        run(optimizer, params, range(2))
    params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.ones_like(params[1])
    # Torch refuses such a gradient, but not such data of one.
    params[1].grad.data = torch.ones(3, dtype=params[1].dtype)
    before = fingerprint(optimizer)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0: its gradient has shape \(3,\), the parameter"):
        optimizer.step()
    assert_same(fingerprint(optimizer), before)


def test_bad_gradient_dtype_changes_nothing() -> None:
    params = parameters(SHAPE, SHAPE)
    if not hasattr(params[1], "grad_dtype"):
        pytest.skip("this torch keeps gradients in the parameter's dtype")
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(1))
    params[1].grad = None
    params[1].grad_dtype = torch.float64
    params[1].grad = torch.ones(SHAPE, dtype=torch.float64)
    before = fingerprint(optimizer)
    with pytest.raises(
        TypeError, match=r"parameter 1 of group 0: gradient dtype torch.float64 is not supported; .*fp16"
    ):
        optimizer.step()
    assert_same(fingerprint(optimizer), before)


def forget(name: str) -> Callable[[Any, nn.Parameter], None]:
    return lambda optimizer, param: optimizer.state[param].pop(name)


def replace(name: str, value: Any) -> Callable[[Any, nn.Parameter], None]:
    return lambda optimizer, param: optimizer.state[param].update({name: value})


def resize(optimizer: Any, param: nn.Parameter) -> None:
    param.data = torch.ones(32, 64, dtype=BF16)
    param.grad = torch.ones(32, 64, dtype=BF16)


BAD_STATES: dict[str, tuple[Callable[[Any, nn.Parameter], None], str]] = {
    "no-slot": (forget("exp_avg_sq"), "exp_avg_sq"),
    "no-step": (forget("step"), "step"),
    "no-correction": (forget("correction"), "correction"),
    "slot-dtype": (replace("exp_avg", torch.zeros(SHAPE, dtype=FP16)), "exp_avg|float16"),
    "slot-shape": (replace("exp_avg", torch.zeros(64, 32)), "exp_avg|shape"),
    "slot-type": (replace("exp_avg", 0.0), "exp_avg"),
    "correction-shape": (replace("correction", torch.zeros(3, dtype=torch.int8)), "correction|shape"),
    "parameter-resized": (resize, "shape"),
    "mode-changed": (lambda optimizer, param: optimizer.param_groups[1].update(weights="master"), "master"),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_bad_state_is_found_before_anything_changes(kind: str) -> None:  # promise 8
    first, second = parameters(SHAPE, SHAPE, dtype=BF16)
    optimizer = AdamW8bit([{"params": [first]}, {"params": [second]}], weights="split8", backend="eager")
    run(optimizer, [first, second], range(2))
    change, message = BAD_STATES[kind]
    change(optimizer, second)
    entry = optimizer.state.pop(second)  # compared by hand: it may hold anything
    kept = dict(entry)
    before = fingerprint(optimizer)
    optimizer.state[second] = entry
    with pytest.raises((ValueError, TypeError), match=rf"parameter 0 of group 1: .*({message})"):
        optimizer.step()
    assert optimizer.state.pop(second).keys() == kept.keys()
    assert_same(fingerprint(optimizer), before)


def test_bad_closure_changes_nothing() -> None:
    params = parameters(SHAPE)
    optimizer = AdamW8bit(params, backend="eager")
    run(optimizer, params, range(1))
    before = fingerprint(optimizer)

    def closure() -> float:
        raise FloatingPointError("diverged")

    with pytest.raises(FloatingPointError, match="diverged"):
        optimizer.step(closure)
    assert_same(fingerprint(optimizer), before)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [("weigths", "weights"), ("stat", "state"), ("pre_set", "preset"), ("weight_deca", "weight_decay")],
)
def test_bad_spelling_of_a_groups_option_is_refused(slip: str, meant: str) -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(TypeError, match=f"unexpected option '{slip}' of a parameter group; did you mean '{meant}'"):
        lowbit_optim.AdamW([{"params": [param], slip: 0.5}])


def test_keys_of_trainers_and_schedulers_stay_in_groups() -> None:
    keys = (
        "name",
        "lr_scale",
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "use_muon",
        "group_name",
    )
    group = {"params": [torch.nn.Parameter(torch.zeros(4))], **dict.fromkeys(keys, 1)}
    for cls in (lowbit_optim.AdamW, lowbit_optim.SGD, lowbit_optim.Lion):
        assert set(keys) <= cls([group]).param_groups[0].keys()


@pytest.mark.parametrize(
    ("slip", "meant"), [("weight_deca", "weight_decay"), ("weigths", "weights"), ("beta", "betas")]
)
def test_bad_spelling_of_an_argument_names_the_argument(slip: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected argument '{slip}'; did you mean '{meant}'"):
        lowbit_optim.AdamW([torch.nn.Parameter(torch.zeros(4))], **{slip: 0.5})
