"""What the cases of several clients share. Needs torch and the standard library only."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def shell(*command: object, folder: Path) -> str:
    """Run a command in a folder and return all that it printed.

    Raises:
        RuntimeError: it failed; its output has been printed.
    """
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        print(text, flush=True)
        raise RuntimeError(f"exit code {done.returncode} from: {' '.join(map(str, command))}")
    return text


def floats(pattern: str, text: str) -> list[float]:
    """Return the numbers that the group of a pattern matches."""
    return [float(found) for found in re.findall(pattern, text)]


def load(path: Path) -> Any:
    """Load a file as trainers do: on the CPU, and nothing but tensors and plain values."""
    import lowbit_optim  # noqa: F401 -- makes its state loadable

    return torch.load(path, weights_only=True, map_location="cpu")


def stored_as(optimizer_state: Any) -> set[str]:
    """Return what the tensors of an optimizer's state dict are stored as: specs of formats, or dtypes."""
    entries = optimizer_state["state"].values()
    return {getattr(value, "spec", str(value.dtype)) for entry in entries for value in entry.values()}


def assert_same(mine: Any, theirs: Any, where: str = "") -> None:
    """Compare nested mappings and lists of tensors and plain values, bit for bit.

    Raises:
        AssertionError: they differ; the message says where.
    """
    assert type(mine) is type(theirs), f"{where}: {type(mine).__name__} and {type(theirs).__name__}"
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), f"{where}: other keys: {sorted(map(str, mine.keys() ^ theirs.keys()))}"
        for key in mine:
            assert_same(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), f"{where}: {len(mine)} and {len(theirs)} entries"
        for place, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_same(*pair, f"{where}[{place}]")
    elif hasattr(mine, "dequantize") and hasattr(mine, "spec"):
        assert mine.spec == theirs.spec, f"{where}: {mine.spec} and {theirs.spec}"
        assert_same(list(mine.flat_parts()), list(theirs.flat_parts()), where)
    elif isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype, f"{where}: {mine.dtype} and {theirs.dtype}"
        assert torch.equal(mine, theirs), f"{where}: tensors differ by up to {(mine - theirs).abs().max()}"
    else:
        assert mine == theirs, f"{where}: {mine} and {theirs}"


def assert_close(mine: list[float], theirs: list[float], relative: float) -> float:
    """Compare two lists of losses and return the largest relative difference.

    Raises:
        AssertionError: there are none, or they differ by more.
    """
    assert mine, "no losses"
    assert len(mine) == len(theirs), f"{len(mine)} and {len(theirs)} losses"
    worst = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
    assert worst <= relative, f"losses differ by {worst:.1e}: {mine} and {theirs}"
    return worst


def assert_falling(losses: list[float], count: int) -> None:
    """Check that there are as many losses as steps, and that each is below the one before."""
    assert len(losses) == count, losses
    assert all(after < before for before, after in itertools.pairwise(losses)), losses
