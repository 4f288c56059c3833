"""README and docs: their examples run, their links lead somewhere, their figures are those of the committed CSV."""

from __future__ import annotations

import csv
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import lowbit_optim
from benchmarks.demo import markdown_table
from lowbit_optim import formats

from .lacking import forward_under_fsdp2

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


FSDP2 = {ROOT / "docs/distributed.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=forward_under_fsdp2) if page in FSDP2 else page for page in PAGES], ids=page_id
)
def test_page_examples_run(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    # What a page registers is known for the length of its test.
    for table in formats.FORMATS, formats.RATIOS, formats._BY_SPEC:
        before = dict(table)
        request.addfinalizer(lambda table=table, before=before: (table.clear(), table.update(before)))
    # A page that fails must not leave its process group to the next.
    request.addfinalizer(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        exec(compile(block, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_readme_shows_the_committed_figures() -> None:
    rows = list(csv.DictReader((ROOT / "benchmarks/results/demo.csv").read_text().splitlines()))
    assert markdown_table(rows) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(lowbit_optim.__path__)])
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(f"lowbit_optim.{name}")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    assert sorted(re.findall(r"^::: lowbit_optim\.(\w+)$", page, re.M)) == sorted(lowbit_optim.__all__)


def test_every_public_name_is_documented() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name in lowbit_optim.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing
