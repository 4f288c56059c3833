"""One thread in each test process, and no test of a package that is not there.

On busy cores, two threads on one small tensor take ten times as long.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

#: Packages that test modules need besides torch, with the oldest version that will do.
NEEDS: dict[str, dict[str, tuple[int, ...]]] = {
    "test_convert": {"bitsandbytes": (), "torchao.optim": ()},
    "test_kernel_report": {"triton": (3, 4)},
    "test_triton": {"triton": (3, 4)},
}


def lacking(module: str) -> str | None:
    """Say why a test module cannot be run here: releases of peers are made for one torch or another."""
    for name, oldest in NEEDS.get(module, {}).items():
        try:
            found = importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported: {error}"
        if oldest and tuple(map(int, found.__version__.split(".")[: len(oldest)])) < oldest:
            return f"{name} {found.__version__} is older than {'.'.join(map(str, oldest))}"
    return None


class Lacking(pytest.Module):
    """A test module that is skipped as a whole, before it is imported."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(str(lacking(self.path.stem)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if lacking(module_path.stem) is None else Lacking.from_parent(parent, path=module_path)
