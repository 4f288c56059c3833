"""The ways to keep moments and weights that the studies compare and the library does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_optim
from benchmarks import format_study, moment_variants, weight_study
from lowbit_optim.weights import Draws

KEPT = {f"{candidate.part}, {candidate.variant}": candidate for candidate in format_study.CANDIDATES if candidate.keep}


def moments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(64, 128, generator=generator))
    return 0.3 * size * torch.randn(64, 128, generator=generator), size.square()


@pytest.mark.parametrize("name", KEPT)
def test_studies_keep_signs_and_zeros_and_the_size_of_steps(name: str) -> None:
    m, v = moments()
    m[0], v[0] = 0.0, 0.0
    keep = KEPT[name].keep
    assert keep is not None
    kept_m, kept_v = keep(m, v, torch.Generator().manual_seed(1))
    assert kept_m.shape == kept_v.shape == m.shape
    assert (kept_m * m >= 0).all()
    assert (kept_m[0] == 0).all()
    assert kept_v.isfinite().all()
    assert (kept_v >= 0).all()
    step, exact = kept_m[1:] / kept_v[1:].sqrt(), m[1:] / v[1:].sqrt()
    # Even levels of 4 bits in blocks of 128, rounded to nearest, stand for few of second moments that differ by e, and
    # ratios of 2 bits are all or nothing.
    coarse = any(kind in name for kind in ("4-bit Adam", "2-bit first"))
    assert (step - exact).abs().mean() < (1.0 if coarse else 0.6) * exact.abs().mean()


@pytest.mark.parametrize("name", [name for name in KEPT if "nearest" not in name and "neighbours" not in name])
def test_studies_draws_make_moments_right_in_the_mean(name: str) -> None:
    m, v = moments()
    keep = KEPT[name].keep
    assert keep is not None
    if "factored" in name:
        v = v.mean(1, keepdim=True) * v.mean(0) / v.mean()
    generator = torch.Generator().manual_seed(1)
    runs = [keep(m, v, generator) for _ in range(200)]
    steps = torch.stack([kept_m / kept_v.sqrt() for kept_m, kept_v in runs]).mean(0)
    exact = m / v.sqrt()
    cut = exact.abs() < 0.9 if "up to 1" in name else torch.ones_like(exact, dtype=torch.bool)
    error = (steps - exact)[cut].sum() / exact[cut].abs().sum()
    assert abs(error) < 0.02


def test_studies_levels_of_published_maps() -> None:
    normal = moment_variants._normal_float()
    known = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    torch.testing.assert_close(normal[:8], torch.tensor(known), atol=1e-4, rtol=0)
    assert normal[15] == 1
    dynamic = moment_variants._dynamic()
    assert len(dynamic) == 16
    assert -1 not in dynamic.tolist()
    assert dynamic[-1] == 1


def test_studies_count_bits_that_codes_are_not_packed_in() -> None:
    found = {candidate.variant: candidate.bytes_per_param for candidate in format_study.CANDIDATES}
    assert found["2-bit second, fourth powers"] == 0.875
    assert found["2 bits each"] == 0.625
    assert all(candidate.bytes_per_param < 1 for candidate in format_study.CANDIDATES if candidate.part == "below 1 B")


@pytest.mark.parametrize("candidate", weight_study.candidates(), ids=lambda c: f"{c.view}-{c.bits}-{c.drawn}")
def test_studies_corrections_hold_what_the_view_lacks(candidate: Any) -> None:
    value = torch.empty(4096).uniform_(1, 2, generator=torch.Generator().manual_seed(0))
    random = torch.randint(1 << 16, value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    drawn = random if candidate.drawn else weight_study.HALF
    weight, extras = candidate.mode.write(value, torch.bfloat16, Draws(lambda: drawn, lambda: random.flip(0)))
    error = candidate.mode.read(weight, extras) - value
    ulp, kept = 2.0**-7, max(candidate.bits - (candidate.view == "dithered"), 0)
    assert error.abs().max() <= ulp / 2**kept * (1 if candidate.drawn else 0.5)
    assert error.abs().max() > 0 or candidate.bits == 16
    assert (weight.float() - value).abs().max() <= ulp * ((0.5 if candidate.view == "nearest" else 1) + 2.0**-kept)


def test_studies_give_the_weight_what_a_carried_candidate_loses() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = lowbit_optim.AdamW([weight], lr=1e-3, weight_decay=0.0, state="fp32", backend="eager")
    weight.grad = torch.linspace(-1, 1, 64 * 128).view(64, 128)
    optimizer.step()
    before, slots = weight.detach().clone(), optimizer.state[weight]
    v = slots["exp_avg_sq"].clone()

    def forget(m: Tensor, v: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(m), v

    format_study._keep_all(optimizer, forget, 0.0, 1, torch.Generator())
    assert torch.equal(weight, before)
    slots["exp_avg"].copy_(0.1 * weight.grad)
    format_study._keep_all(optimizer, forget, 1.0, 1, torch.Generator())
    # All that a first step at lr 1e-3 would still have done: the sum of 0.1 * 0.9^k / (1 - 0.9^(k + 1)), k from 1 on.
    to_come = 1e-3 * sum(0.1 * 0.9**k / (1 - 0.9 ** (k + 1)) for k in range(1, 1000))
    torch.testing.assert_close(weight.detach() - before, -to_come * weight.grad.sign(), rtol=0.15, atol=1e-6)
    assert torch.equal(slots["exp_avg_sq"], v)
