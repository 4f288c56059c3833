"""What low-bit state does to training, through the public classes: users' reports and the bounds that answer them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit_optim
from lowbit_optim import AdamW, QuantizedState, param_policy
from lowbit_optim.rules import adamw as adamw_rule
from lowbit_optim.slots import absolute
from lowbit_optim.state import decoded

from .cases import FORMAT_NAMES, RULES, modes_for
from .references import run_rule
from .runs import bits, fingerprint, values

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_format = pytest.mark.parametrize("state", FORMAT_NAMES)
each_rule_and_format = pytest.mark.parametrize(
    ("name", "state"), [(name, state) for name in RULES for state in FORMAT_NAMES]
)
LOW_BIT = [name for name in FORMAT_NAMES if name != "fp32"]


def adamw(param: Tensor, **options: Any) -> AdamW:
    return AdamW([param], **{"lr": 1e-3, "weight_decay": 0.0, "backend": "eager", "min_quantized_numel": 0, **options})


# All rules and formats -------------------------------------------------------------------------------------------

#: Format -> (error of 60 steps as a share of their length, error of the length itself).
TRACKING = {
    "fp32": (1e-5, 1e-5),
    "bf16": (0.01, 0.002),
    "int8": (0.03, 0.01),
    "int8-dynamic": (0.03, 0.01),
    "fp8": (0.11, 0.04),
    "int4": (0.35, 0.1),
}


@each_rule_and_format
def test_steps_follow_the_fp64_reference(name: str, state: str) -> None:
    rule, start = RULES[name], values((4096,), 0)
    grads = [values((4096,), 100 + step) + 0.5 for step in range(60)]
    hyper = {"lr": 1e-2, **({"weight_decay": 0.01} if rule.cls is AdamW else {}), **rule.options}
    param = nn.Parameter(start.clone())
    optimizer = rule.make([param], lr=1e-2, state=state)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    moved = param.detach().double() - start
    expected = run_rule(name, start, grads, **hyper)[0] - start
    error, gain = TRACKING[state]
    assert (moved - expected).square().mean().sqrt() <= error * expected.square().mean().sqrt()
    assert (moved * expected).mean().item() == pytest.approx(expected.square().mean().item(), rel=gain)


# Promise 6, and C1 for a first step
@each_rule_and_format
def test_a_step_of_lr_0_and_no_gradient_changes_no_weight_bit(name: str, state: str) -> None:
    cases = [(dtype, mode) for dtype in (FP32, BF16, FP16) for mode in modes_for(dtype)]
    start = values((len(cases), 256), 0)
    start[:, :4] = torch.tensor([1e-30, -3e38, 1e30, 5e-8])
    params = [nn.Parameter(row.to(dtype)) for row, (dtype, _) in zip(start, cases, strict=True)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]

    def make(of: list[nn.Parameter]) -> Any:
        groups = [{"params": [param], "weights": mode} for param, (_, mode) in zip(of, cases, strict=True)]
        return RULES[name].make(groups, lr=1e-2, state=state, min_quantized_numel=0, weight_decay=0.0)

    def step(optimizer: Any, of: list[nn.Parameter], lr: float, scale: float) -> None:
        for group, param in zip(optimizer.param_groups, of, strict=True):
            group["lr"] = lr
            param.grad = scale * values((256,), 7).to(param.dtype)
        optimizer.step()

    optimizer, undisturbed = make(params), make(twins)
    before = [bits(param) for param in params]
    step(optimizer, params, 0.0, 0.0)
    assert all(torch.equal(bits(param), old) for param, old in zip(params, before, strict=True))
    for of, its in ((params, optimizer), (twins, undisturbed)):
        step(its, of, 1e-2, 1.0)
    for (dtype, mode), param, twin in zip(cases, params, twins, strict=True):
        assert torch.equal(bits(param), bits(twin)), f"{dtype} {mode}: asking for state changed the first update"
    # A warm optimizer: moments are there, and rounded anew, but no weight moves.
    step(optimizer, params, 1e-2, -0.3)
    before = [bits(param) for param in params]
    for _ in range(2):
        step(optimizer, params, 0.0, 0.0)
    for (dtype, mode), param, old in zip(cases, params, before, strict=True):
        assert torch.equal(bits(param), old), f"{dtype} {mode}"


# N14
@each_rule_and_format
def test_zero_gradients_change_nothing(name: str, state: str) -> None:
    param = nn.Parameter(values((512,), 0))
    before = bits(param)
    optimizer = RULES[name].make([param], lr=1e-2, state=state, min_quantized_numel=0, weight_decay=0.0)
    param.grad = torch.zeros(512)
    for _ in range(3):
        optimizer.step()
    assert torch.equal(bits(param), before)


# N15
@each_rule_and_format
def test_one_bad_gradient_harms_one_weight(name: str, state: str) -> None:
    numel, start = 1 << 12, values((1 << 12,), 0)
    weights = {}
    for bad in (0.0, float("nan"), float("inf")):
        param = nn.Parameter(start.clone())
        optimizer = RULES[name].make([param], lr=1e-2, state=state, min_quantized_numel=0, weight_decay=0.0)
        for step in range(2):
            param.grad = values((numel,), 1 + step)
            if step == 0:
                param.grad[5] = bad
            optimizer.step()
        weights[str(bad)] = param.detach()
    others = torch.arange(numel) != 5
    for bad in ("nan", "inf"):
        assert weights[bad][others].isfinite().all()
        assert torch.equal(weights[bad][others], weights["0.0"][others]), "a neighbour differs"


# N15
@each_format
@pytest.mark.parametrize("mode", ["stochastic", "kahan", "split8", "split16", "master"])
def test_skipping_bad_gradients_leaves_everything_as_it_was(mode: str, state: str) -> None:
    param = nn.Parameter(values((512,), 0).bfloat16())
    optimizer = adamw(param, state=state, weights=mode, skip_nonfinite=True)
    for step in range(3):
        param.grad = values((512,), 1 + step).bfloat16()
        optimizer.step()
    before = fingerprint(optimizer)
    param.grad[5] = float("nan")
    optimizer.step()
    after = fingerprint(optimizer)
    changed = {name for name in after if str(after[name]) != str(before[name])}
    assert all("skipped" in name for name in changed)
    assert optimizer.state[param]["skipped"] == 1
    assert optimizer.state[param]["step"] == 3


@pytest.mark.parametrize("backend", ["eager", "cpp"])
@pytest.mark.parametrize(
    "state", [*FORMAT_NAMES, *({"exp_avg": "int4", "exp_avg_sq": second} for second in ("fp32", "bf16"))], ids=str
)
def test_a_gradient_whose_square_overflows_moves_no_weight_far(state: Any, backend: str) -> None:
    param = nn.Parameter(torch.ones(64, 64))
    optimizer = adamw(param, lr=1e-2, state=state, backend=backend)
    for step in range(20):
        param.grad = torch.ones(64, 64)
        param.grad[3, 5] = 1e25 if step == 0 else 1.0
        param.grad[7] = 1e21 if step == 1 else 1.0
        optimizer.step()
    assert param.isfinite().all()
    # Steps are of lr at most, or the weight stands still as in fp32; neighbours go on.
    assert 0.75 < param.min() <= param.max() <= 1.01
    assert param[10].mean().item() == pytest.approx(0.8, abs=0.02)


# Averages that follow their input --------------------------------------------------------------------------------


#: Format -> bound of the mean of 1 / sqrt(v), relative to exact.
LONGEST_STEP = {"int8": 1.1, "int4": 2.6}


# N3, F5
@pytest.mark.parametrize(
    ("state", "steps"), [("bf16", 3000), ("int8", 3000), ("fp8", 1000), ("int4", 1000), ("int8-dynamic", 600)]
)
def test_second_moments_decay(state: str, steps: int) -> None:
    numel, few = 4096, 20
    param = nn.Parameter(torch.zeros(numel))
    optimizer = adamw(param, lr=0.0, state={"exp_avg": "fp32", "exp_avg_sq": state})
    param.grad = torch.ones(numel)
    for _ in range(few):
        optimizer.step()
    # In the first half all gradients fall; in the second every other one stays, and with it the scale of each block.
    param.grad[: numel // 2] = 1e-3
    param.grad[numel // 2 :: 2] = 1e-3
    for _ in range(steps):
        optimizer.step()
    expected = 0.999**steps * (1 - 0.999**few) + 1e-6 * (1 - 0.999**steps)
    assert steps != 3000 or expected == pytest.approx(9.8e-4, rel=0.01)
    found = decoded(optimizer.state[param]["exp_avg_sq"]).double()
    parts = {
        "alone": (found[: numel // 2], expected),
        "beside": (found[numel // 2 :: 2], expected),
        "large": (found[numel // 2 + 1 :: 2], 1 - 0.999 ** (few + steps)),
    }
    for name, (part, target) in parts.items():
        if state in LONGEST_STEP:
            # Drawn by roots, so that what a step is divided by is right. Frozen, it would be 1.6 times too large.
            assert 0.95 < part.rsqrt().mean().item() * target**0.5 < LONGEST_STEP[state], name
            continue
        # Rounding without bias still spreads: of 4 bits beside a thousandfold, by ten times the mean.
        three_errors = 3 * part.std().item() / part.numel() ** 0.5
        assert part.mean().item() == pytest.approx(target, abs=max(0.05 * target, three_errors)), name


# N3: the classes that users know take these formats as their defaults.
@pytest.mark.parametrize(
    "cls", ["AdamWBf16SR", "AdamW8bit", "AdamWFp8", "AdamW4bit", "Adam8bit", "Adam4bit", "AdamFp8"]
)
def test_public_classes_do_not_freeze_their_moments(cls: str) -> None:
    param = nn.Parameter(torch.zeros(4096, dtype=BF16))
    optimizer = getattr(lowbit_optim, cls)([param], lr=0.0, backend="eager")
    for step in range(150):
        param.grad = torch.full_like(param, 1.0 if step < 20 else 1e-3)
        optimizer.step()
    moment = decoded(optimizer.state[param]["exp_avg_sq"]).double()
    expected = 0.999**130 * (1 - 0.999**20)
    # A frozen moment would be 14 % above.
    assert moment.mean().item() == pytest.approx(expected, rel=0.06 if "4bit" in cls else 0.03)


@pytest.mark.parametrize("state", LOW_BIT)
def test_first_moments_keep_the_mean_of_their_gradients(state: str) -> None:
    # A moment that shrinks is a learning rate that shrinks, most of all for the small values of a block.
    numel, steps, warmup = 8192, 150, 50
    param = nn.Parameter(torch.zeros(numel))
    optimizer = adamw(param, lr=0.0, state={"exp_avg": state, "exp_avg_sq": "fp32"})
    size = torch.ones(numel)
    size[1::2], size[2::4] = 0.05, 0.3
    seen = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        param.grad = size * (1 + values((numel,), step))
        optimizer.step()
        if step >= warmup:
            slots = {name: optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")}
            seen += decoded(absolute(adamw_rule, slots)["exp_avg"]) / (steps - warmup)
    for share in (1.0, 0.3, 0.05):
        gain = seen[size == share].mean().item() / share
        assert gain == pytest.approx(1.0, abs=0.04 if state == "int4" else 0.015), share


@pytest.mark.parametrize("state", LOW_BIT)
def test_a_running_maximum_is_not_rounded_up_at_random(state: str) -> None:
    # Such a maximum never comes down again, and all of it would end at the level above.
    param = nn.Parameter(torch.zeros(4096))
    formats = {"exp_avg": "fp32", "exp_avg_sq": "fp32", "max_exp_avg_sq": state}
    optimizer = adamw(param, lr=0.0, betas=(0.9, 0.9), amsgrad=True, state=formats)
    param.grad = values((4096,), 0).exp()
    for _ in range(60):
        optimizer.step()
    exact = decoded(optimizer.state[param]["exp_avg_sq"]).double()
    error = decoded(optimizer.state[param]["max_exp_avg_sq"]).double() / exact - 1
    error = error[exact > 1e-3 * exact.max()]
    assert abs(error.mean().item()) < 0.4 * error.std().item()


# Zeros -----------------------------------------------------------------------------------------------------------


# N11
@each_format
def test_weights_without_gradient_do_not_drift(state: str) -> None:
    # A residue of the moments would show at the first step: it is divided by its own root.
    start = values((4096,), 0)
    param = nn.Parameter(start.clone())
    optimizer = adamw(param, state=state)
    for step in range(100):
        param.grad = values((4096,), 1 + step)
        param.grad[1::2] = 0.0
        optimizer.step()
    moved = (param.detach() - start).abs()
    assert moved[1::2].max() == 0.0
    assert moved[::2].min() > 0.0


# The hazard of a second moment that rounds to zero: updates hundreds of times too large.
@pytest.mark.parametrize("state", LOW_BIT)
def test_rare_gradients_do_not_explode(state: str) -> None:
    numel, steps = 2048, 120
    generator = torch.Generator().manual_seed(0)
    kinds = ((0.015, 0.01), (0.05, 0.05), (0.002, 1.0))
    grads = []
    for _ in range(steps):
        grad = torch.randn(numel, generator=generator)
        for place, (size, probability) in enumerate(kinds):
            rare = grad[place::32]
            rare *= size * (torch.rand(rare.shape, generator=generator) < probability)
        grads.append(grad)
    param = nn.Parameter(torch.zeros(numel))
    optimizer = adamw(param, lr=1.0, eps=1e-12, state=state)
    exact, largest = nn.Parameter(torch.zeros(numel)), torch.zeros(2, numel)
    reference = torch.optim.AdamW([exact], lr=1.0, eps=1e-12, weight_decay=0.0)
    for grad in grads:
        for row, (weight, steps_it) in zip(largest, ((param, optimizer), (exact, reference)), strict=True):
            before = weight.detach().clone()
            weight.grad = grad.clone()
            steps_it.step()
            torch.maximum(row, (weight.detach() - before).abs(), out=row)
    for place in range(len(kinds)):
        ours, theirs = (row[place::32].max().item() for row in largest)
        assert ours <= (4 if state == "int4" else 2) * theirs, kinds[place]


# Outliers --------------------------------------------------------------------------------------------------------

SMALL = (1e-2, 1e-3, 1e-4, 1e-5)
#: Format -> (smallest neighbours of a gradient of 1 that move as they should, how far off their mean may be, and how
#: far above the exact move the largest of them). Smaller neighbours may move too little, never too far.
OUTLIERS = {
    "fp32": (1e-5, 1.001, 1.001),
    "bf16": (1e-5, 1.02, 1.02),
    "int8": (1e-5, 1.5, 2.0),
    "fp8": (1e-5, 1.5, 2.0),
    "int8-dynamic": (1e-3, 1.5, 2.0),
    "int4": (1e-2, 3.0, 3.0),
}


@cache
def neighbour_moves(state: str, small: float) -> tuple[Tensor, Tensor]:
    """Moves in 20 steps of AdamW beside one gradient of 1 in each 128: of its block of 32, and of the others."""
    numel = 1 << 14
    place = torch.arange(numel) % 128
    param = nn.Parameter(torch.zeros(numel))
    param.grad = torch.where(place == 0, 1.0, small)
    optimizer = adamw(param, state=state)
    for _ in range(20):
        optimizer.step()
    moved = -param.detach().double()
    return moved[(place > 0) & (place < 32)], moved[place >= 32]


# N12, F8, promise 10
@each_format
@pytest.mark.parametrize("small", SMALL, ids=str)
def test_a_large_gradient_does_not_wreck_its_neighbours(small: float, state: str) -> None:
    limit, mean_factor, max_factor = OUTLIERS[state]
    exact = 0.02
    for moved in neighbour_moves(state, small):
        # Overshoot is the dangerous side, at any ratio.
        assert moved.max().item() <= max_factor * exact
        assert moved.mean().item() <= mean_factor * exact
        if small >= limit:
            assert moved.mean().item() >= exact / mean_factor
        assert moved.min().item() > 0


# N12
@pytest.mark.parametrize(("state", "factor"), [("int8", 1.03), ("fp8", 1.1), ("int4", 1.5)])
def test_outliers_leave_other_blocks_alone(state: str, factor: float) -> None:
    for small in SMALL:
        outside = neighbour_moves(state, small)[1]
        assert 0.02 / factor <= outside.mean().item() <= 0.02 * factor


# N12
@each_format
def test_a_spike_does_not_wreck_its_neighbours(state: str) -> None:
    numel = 1 << 14
    place = torch.arange(numel) % 128
    grads = [torch.where(place == 0, 100.0, 0.0)] + [torch.full((numel,), 0.01)] * 19
    exact = -run_rule("adamw", torch.zeros(numel), grads, lr=1e-3)[0][1].item()
    assert exact == pytest.approx(0.0184, abs=1e-4)
    param = nn.Parameter(torch.zeros(numel))
    optimizer = adamw(param, state=state)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    _, mean_factor, max_factor = OUTLIERS[state]
    moved = -param.detach()
    for part in (moved[(place > 0) & (place < 32)], moved[place >= 32]):
        assert part.max().item() <= max_factor * exact
        assert part.mean().item() <= mean_factor * exact
    if state != "int8-dynamic":
        # Its blocks of 256 all have a spike in them.
        assert moved[place >= 32].mean().item() >= exact / mean_factor


# Embeddings ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding, under a name that says nothing, tied to the head; and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(128, 64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.lookup.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.lookup(tokens)))


# N13, F17
def test_embeddings_tied_to_the_head_keep_fp32_state() -> None:
    torch.manual_seed(0)
    model = Tied()
    twin = Tied()
    twin.load_state_dict(model.state_dict())
    optimizer = lowbit_optim.AdamW4bit(param_policy(model), lr=1e-2, backend="eager")
    exact = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert sum(param is model.lookup.weight for param in params) == 1
    assert len(params) == len(list(model.parameters())) == 3
    for each, net in ((optimizer, model), (exact, twin)):
        net(torch.arange(100)).square().mean().backward()
        each.step()
    state = optimizer.state[model.lookup.weight]
    for slot in ("exp_avg", "exp_avg_sq"):
        assert type(state[slot]) is Tensor
        assert state[slot].dtype == FP32
        torch.testing.assert_close(state[slot], exact.state[twin.lookup.weight][slot], rtol=1e-6, atol=1e-12)
        assert isinstance(optimizer.state[model.middle.weight][slot], QuantizedState)
    assert model.head.weight is model.lookup.weight
    torch.testing.assert_close(model.lookup.weight, twin.lookup.weight, rtol=1e-6, atol=1e-7)


# N13, F1
def test_embedding_options_can_be_set_or_unset() -> None:
    model = Tied()
    for rules, embeddings, expected in (
        (None, {"state": "int8"}, QuantizedState),
        (None, {}, QuantizedState),
        ({"lookup*": {"state": "int8"}}, None, QuantizedState),
        ({"middle*": {"state": "fp32"}}, None, Tensor),
    ):
        optimizer = lowbit_optim.AdamW8bit(param_policy(model, rules, embeddings=embeddings), backend="eager")
        optimizer.init_state()
        assert type(optimizer.state[model.lookup.weight]["exp_avg"]) is expected
        middle = type(optimizer.state[model.middle.weight]["exp_avg"])
        assert middle is (Tensor if rules and "middle*" in rules else QuantizedState)


# Training --------------------------------------------------------------------------------------------------------


def regression_loss(make: Any, dtype: torch.dtype, seed: int = 0, steps: int = 120) -> float:
    """Loss of a small network on noisy targets of another, averaged over the last steps."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    x = normal(512, 64)
    y = (x @ normal(64, 32) / 8).tanh() @ normal(32, 8) / 6 + 0.1 * normal(512, 8)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    for param in net.parameters():
        param.data = normal(*param.shape) / param.shape[-1] ** 0.5
    net = net.to(dtype)
    optimizer = make(net.parameters())
    late = []
    for step in range(steps):
        rows = torch.randint(0, 512, (64,), generator=generator)
        loss = (net(x[rows].to(dtype)).float() - y[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= steps - 10:
            with torch.no_grad():
                late.append((net(x.to(dtype)).float() - y).square().mean().item())
    return sum(late) / len(late)


@cache
def reference_loss() -> float:
    return regression_loss(lambda params: torch.optim.AdamW(params, lr=3e-3), FP32)


# N22
@pytest.mark.parametrize(
    ("cls", "dtype"),
    [("AdamW4bit", FP32), ("AdamW4bit", BF16), ("AdamW8bit", BF16), ("AdamWFp8", BF16), ("AdamWBf16SR", BF16)],
    ids=lambda item: str(item).replace("torch.", ""),
)
def test_regression_reaches_the_loss_of_fp32(cls: str, dtype: torch.dtype) -> None:
    make = getattr(lowbit_optim, cls)
    loss = regression_loss(lambda params: make(params, lr=3e-3, backend="eager", min_quantized_numel=0), dtype)
    assert loss <= reference_loss() * (1.2 if cls == "AdamW4bit" else 1.05)


# N22: what the bound above means. Training that stood still would be far outside.
def test_regression_has_something_to_learn() -> None:
    start = regression_loss(lambda params: torch.optim.AdamW(params, lr=0.0), FP32, steps=11)
    assert start > 10 * reference_loss()
