"""What the compiler makes of the kernels: 128-bit accesses, no spills, no double precision, and no byte moved twice."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import kernel_report
from benchmarks.kernel_report import COLUMNS, PRESETS, RULES, TARGETS, compile_for, least_bytes, read_code, signature
from lowbit_optim.dispatch import kernel_variant

ROOT = Path(__file__).parents[1]
QUICK = [("adamw", preset, target) for preset in PRESETS for target in ("sm_80", "sm_90")]
REST = [
    case for rule in RULES for preset in PRESETS for target in TARGETS if (case := (rule, preset, target)) not in QUICK
]


def check_code(rule: str, preset: str, target: str) -> None:
    sig = signature(rule, preset)
    variant = kernel_variant(sig)
    compiled = compile_for(variant, TARGETS[target])
    code = read_code(compiled)
    assert code.spills == 0
    assert code.doubles == 0
    loads, stores = kernel_report.wide_accesses(sig, variant.tile)
    # The table's rows may be read in wide loads too; everything else that is narrow is a scale.
    assert code.loads[128] >= loads
    assert code.stores[128] == stores
    assert sum(count for width, count in code.stores.items() if width != 128) <= 2 * len(sig.formats)
    assert kernel_report.moved_bytes(compiled, variant.tile) == pytest.approx(least_bytes(sig), rel=1e-3)


@pytest.mark.parametrize(("rule", "preset", "target"), QUICK, ids=map("-".join, QUICK))
def test_code_of_kernels(rule: str, preset: str, target: str) -> None:
    check_code(rule, preset, target)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "preset", "target"), REST, ids=map("-".join, REST))
def test_code_of_kernels_in_full(rule: str, preset: str, target: str) -> None:
    check_code(rule, preset, target)


@pytest.fixture(scope="module")
def committed() -> list[dict[str, str]]:
    return list(csv.DictReader((ROOT / "benchmarks/results/kernel_report.csv").read_text().splitlines()))


def test_committed_report_is_complete(committed: list[dict[str, str]]) -> None:
    assert tuple(committed[0]) == COLUMNS
    cases = [(row["kernel"], row["target"]) for row in committed]
    assert cases == [(f"{rule}-{preset}", target) for rule in RULES for preset in PRESETS for target in TARGETS]
    for row in committed:
        assert row["spills"] == "0"
        assert float(row["bytes_per_param"]) / float(row["min_bytes_per_param"]) == pytest.approx(1, abs=0.005)
        assert float(row["min_bytes_per_param"]) == least_bytes(signature(*row["kernel"].split("-")))


def test_docs_show_the_committed_report(committed: list[dict[str, str]]) -> None:
    assert kernel_report.markdown_table(committed) in (ROOT / "docs/kernels.md").read_text()
