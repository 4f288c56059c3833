"""One thread in each test process, and no test of a package that is not there.

On busy cores, two threads on one small tensor take ten times as long.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lacking import lacking

torch.set_num_threads(1)


class Lacking(pytest.Module):
    """A test module that is skipped as a whole, before it is imported."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(str(lacking(self.path.stem)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if lacking(module_path.stem) is None else Lacking.from_parent(parent, path=module_path)
