"""`diagnose` tells what nearest rounding loses, and that is what it loses."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from lowbit_optim import SGD, AdamW, diagnose

from .cases import RULES
from .runs import bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def prepared(lr: float, dtype: torch.dtype = BF16, steps: int = 0, **options: Any) -> tuple[torch.nn.Parameter, AdamW]:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter((torch.randn(256, 64, generator=generator) * 0.05).to(dtype))
    optimizer = AdamW([param], lr=lr, weight_decay=0.0, backend="eager", **options)
    for _ in range(steps):
        param.grad = torch.randn(256, 64, generator=generator).to(dtype)
        optimizer.step()
    param.grad = torch.randn(256, 64, generator=generator).to(dtype)
    return param, optimizer


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("lr", [1e-2, 1e-3, 3e-4, 1e-5])
@pytest.mark.parametrize("steps", [0, 3])
def test_lost_is_what_a_nearest_step_loses(lr: float, dtype: torch.dtype, steps: int) -> None:
    param, optimizer = prepared(lr, dtype, steps, state="fp32", weights="nearest")
    (row,) = diagnose(optimizer).rows
    before = param.detach().clone()
    optimizer.step()
    stayed = (param.detach() == before).float().mean()
    assert row.lost == pytest.approx(float(stayed), abs=1e-4)
    # An update may be zero in fp32 already.
    assert 0.999 * param.numel() <= row.numel <= param.numel()


def test_updates_are_measured_in_units_of_the_last_place() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0, -3.0, 0.0], dtype=BF16))
    param.grad = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=BF16)
    optimizer = SGD([param], lr=2.0**-7, weights="nearest", backend="eager")
    (row,) = diagnose(optimizer).rows
    # bf16 values lie 2^-7 apart at 1, and 2^-6 apart at 2 and 3; the last element would not move.
    assert (row.numel, row.update_in_ulps, row.lost) == (3, 0.5, pytest.approx(1 / 3))


@pytest.mark.parametrize("rule", RULES)
def test_diagnose_changes_nothing(rule: str) -> None:
    for weights in ("nearest", "split8", "master"):
        param = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(BF16))
        optimizer = RULES[rule].make([param], lr=1e-3, weights=weights, min_quantized_numel=0)
        param.grad = torch.ones_like(param)
        optimizer.step()
        saved, weight = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
        diagnose(optimizer)
        assert torch.equal(bits(param.detach()), bits(weight))
        for mine, theirs in zip(optimizer.state_dict()["state"][0].values(), saved["state"][0].values(), strict=True):
            assert torch.equal(mine, theirs)


def test_report_advises_what_keeps_the_updates() -> None:
    generator = torch.Generator().manual_seed(1)
    params = [
        torch.nn.Parameter((torch.randn(64, 64, generator=generator) * 0.05).to(dtype))
        for dtype in (BF16, BF16, FP16, FP32, BF16)
    ]
    for param in params:
        param.grad = torch.randn(64, 64, generator=generator).to(param.dtype)
    groups = [
        {"params": params[:1], "weights": "nearest", "lr": 6e-7},
        {"params": params[1:2], "weights": "split8", "lr": 6e-7},
        {"params": params[2:3], "weights": "nearest", "lr": 6e-7},
        {"params": params[3:4], "lr": 6e-7},
        {"params": params[4:], "weights": "nearest", "lr": 1e-2},
    ]
    assert_expected_inline(
        str(diagnose(AdamW(groups, weight_decay=0.0, backend="eager"))),
        """\
group  dtype     weights  elements  |update|/ulp  lost to nearest  advice
0      bfloat16  nearest  4,096     0.00246       99.6%            weights="split8", or "stochastic" at no memory
1      bfloat16  split8   4,096     0.00246       99.6%            none: split8 keeps them
2      float16   nearest  4,096     0.0197        96.5%            weights="stochastic"
3      float32   nearest  4,096     161           0.0%             none: fp32 weights are exact
4      bfloat16  nearest  4,096     41            0.0%             none: nearest rounding would do""",
    )


def test_diagnose_needs_gradients() -> None:
    param, optimizer = prepared(1e-3)
    param.grad = None
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        diagnose(optimizer)


def test_diagnose_refuses_optimizers_of_others() -> None:
    with pytest.raises(TypeError, match="needs an optimizer of lowbit_optim, got Adamax"):
        diagnose(torch.optim.Adamax([torch.nn.Parameter(torch.ones(4))]))  # type: ignore[arg-type]


def test_report_tells_updates_that_are_not_finite_or_not_there() -> None:
    params = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (8, 8, 0)]
    for param in params:
        param.grad = torch.full_like(param, 1.0)
    assert params[0].grad is not None
    params[0].grad[:3] = float("nan")
    groups = [{"params": [param], "weights": "nearest"} for param in params]
    groups[1]["lr"] = 0.0
    report = diagnose(AdamW(groups, lr=1e-2, backend="eager", weight_decay=0.0))
    assert [row.advice for row in report.rows] == [
        "3 updates are not finite: skip_nonfinite=True",
        "none: no weight would move",
        "none: no weight would move",
    ]
    assert (report.rows[0].lost, round(report.rows[0].update_in_ulps, 2)) == (0.0, 1.28)


def test_report_of_the_page_on_lost_updates() -> None:
    page = (Path(__file__).parents[1] / "docs/why-bf16-stalls.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    namespace: dict[str, object] = {}
    exec(compile(example, "why-bf16-stalls.md", "exec"), namespace)
    # Eager square roots of torch 2.6 are an ulp off those of later ones here and there.
    printed = str(namespace["report"]).replace("8.18 ", "8.19 ")
    assert_expected_inline(
        printed,
        """\
group  dtype     weights  elements  |update|/ulp  lost to nearest  advice
0      bfloat16  nearest  32,768    0.00246       99.7%            weights="split8", or "stochastic" at no memory
1      bfloat16  nearest  256       0.128         100.0%           weights="split8", or "stochastic" at no memory
2      bfloat16  nearest  16,384    8.19          0.0%             none: nearest rounding would do""",
    )
    assert f"```text\n{printed}\n```" in page
