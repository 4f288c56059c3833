"""Triton kernels in the interpreter: every combination against the reference step, bit for bit."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from lowbit_optim.noise import Region

from .cases import BF16, DTYPES, FORMAT_NAMES, FP16, FP32, MODE_NAMES, modes_for
from .interpreted import interpreted
from .kernel_checks import UPDATES, Case, check, differences, moved, reference, timing_of

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


def case_of(rule: str, fmt: str, mode: str, **options: object) -> Case:
    return Case(rule, (fmt,) * len(UPDATES[rule].slots), mode, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "fmt", "mode"), COVERING, ids=map("-".join, COVERING))
@interpreted
def test_kernels_store_what_the_reference_stores(rule: str, fmt: str, mode: str) -> None:
    check(case_of(rule, fmt, mode), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fmt", "mode"), REST, ids=map("-".join, REST))
@interpreted
def test_kernels_store_what_the_reference_stores_in_full(rule: str, fmt: str, mode: str) -> None:
    check(case_of(rule, fmt, mode), "cpu")


@pytest.mark.parametrize("grad", NAMES)
@pytest.mark.parametrize("weight", NAMES)
@interpreted
def test_weights_and_gradients_of_every_dtype(weight: str, grad: str) -> None:
    for mode in modes_for(NAMES[weight]) if NAMES[weight] != BF16 else ["stochastic"]:
        if NAMES[weight] != FP32 or mode == "nearest":
            case = case_of("adamw", "int8", mode, weight_dtype=NAMES[weight], grad_dtype=NAMES[grad], sizes=(2100,), regions=(Region(),))
            check(case, "cpu")
