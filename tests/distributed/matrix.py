"""Sharded against whole: `python -m tests.distributed.matrix` prints a row for every combination.

Each rank steps its shards and, beside them, the whole parameters as one process would, on the same gradients, and then
compares bits. Where a shard cuts through blocks (`is_aligned` is false), scales differ and so do quantized moments:
there the row states how far the weights are apart, as a share of the distance that they have moved.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowbit_optim import AdamW
from lowbit_optim.state import QuantizedState

from .launch import run_ranks
from .layouts import LAYOUTS, fill, is_aligned, local_part, shard_like

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATES = ("int8", "int4", "fp8", "bf16")
MODES = ("stochastic", "split8", "kahan", "master")
STEPS = 5
LR = 1e-2
#: Furthest that weights may be from those of one process where blocks are cut, relative to the distance moved
#: (root mean square over the parameter). Blocks of other neighbours have other scales, so each moment differs by about
#: one code step, 3 % of its value at 8 bits and half of it at 4.
UNALIGNED = {"int8": 0.05, "fp8": 0.05, "int4": 0.5}


@dataclass(frozen=True)
class Row:
    """What came out of one combination on one rank, or on all."""

    layout: str
    dtype: str
    state: str
    weights: str
    aligned: bool
    differing: int
    apart: float

    @property
    def passed(self) -> bool:
        return self.differing == 0 if self.aligned else self.apart <= UNALIGNED[self.state]

    def __str__(self) -> str:
        result = "identical" if self.differing == 0 else f"{self.differing} differ"
        if not self.aligned:
            result += f", weights {self.apart:.1%} apart (blocks cut; {UNALIGNED[self.state]:.0%} allowed)"
        cells = f"{self.layout:26} {self.dtype:5} {self.state:5} {self.weights:11}"
        return f"{cells} {'ok' if self.passed else 'FAILED':7} {result}"


def stored(value: Tensor) -> Tensor:
    """Return what a slot or extra holds on this rank: decoded values in fp32, or the tensor itself."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.dequantize() if isinstance(local, QuantizedState) else local


def differing(left: Tensor, right: Tensor) -> int:
    """Number of elements whose bits differ."""
    assert left.shape == right.shape, (left.shape, right.shape)
    assert left.dtype == right.dtype
    as_bits = {2: torch.int16, 4: torch.int32, 1: torch.int8}[left.dtype.itemsize]
    return int((left.contiguous().view(as_bits) != right.contiguous().view(as_bits)).sum())


def compare(layout: str, dtype: str, state: str, weights: str, backend: str) -> Row:
    """Step one layout sharded and whole; call on every rank."""
    made = LAYOUTS[layout]
    whole = fill(made.model(), DTYPES[dtype])
    before = [param.detach().clone() for param in whole.parameters()]
    sharded = made.shard(fill(made.model(), DTYPES[dtype]))
    options = {"lr": LR, "state": state, "weights": weights, "min_quantized_numel": 0, "backend": backend}
    optimizers = [AdamW(model.parameters(), **options) for model in (whole, sharded)]  # type: ignore[arg-type]
    pairs = list(zip(whole.parameters(), sharded.parameters(), strict=True))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for mine, theirs in pairs:
            mine.grad = torch.randn(mine.shape, generator=generator).to(mine.dtype)
            theirs.grad = shard_like(mine.grad, theirs)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        count, apart, aligned = 0, 0.0, True
        for start, (mine, theirs) in zip(before, pairs, strict=True):
            aligned = aligned and (state == "bf16" or is_aligned(theirs))
            expected = local_part(mine, theirs).detach()
            count += differing(stored(theirs.detach()), expected)
            moved = (expected.float() - local_part(start, theirs).float()).square().sum().sqrt()
            distance = (stored(theirs.detach()).float() - expected.float()).square().sum().sqrt()
            apart = max(apart, float(distance / moved) if moved else 0.0)
            entry, expected_entry = optimizers[1].state[theirs], optimizers[0].state[mine]
            assert entry["step"] == expected_entry["step"] == STEPS
            for name in entry.keys() - {"step"}:
                assert isinstance(entry[name], DTensor) == isinstance(theirs, DTensor)
                count += differing(stored(entry[name]), local_part(stored(expected_entry[name]), theirs))
    return Row(layout, dtype, state, weights, aligned, count, apart)


def run_rows(rank: int, combinations: list[tuple[str, str, str, str]], backend: str) -> list[Row]:
    """Compare every combination, on one rank of all."""
    return [compare(*combination, backend) for combination in combinations]


def run_matrix(
    layouts: Sequence[str] = tuple(LAYOUTS),
    dtypes: Iterable[str] = tuple(DTYPES),
    states: Iterable[str] = STATES,
    modes: Iterable[str] = MODES,
    backend: str = "auto",
    timeout: float = 900,
) -> list[Row]:
    """Run the combinations, one group of processes for each number of ranks; a row holds the worst of its ranks."""
    rows = []
    for world, same in itertools.groupby(
        sorted(layouts, key=lambda name: LAYOUTS[name].world), lambda n: LAYOUTS[n].world
    ):
        combinations = list(itertools.product(same, dtypes, states, modes))
        for on_ranks in zip(*run_ranks(world, run_rows, combinations, backend, timeout=timeout), strict=True):
            first = on_ranks[0]
            aligned = all(row.aligned for row in on_ranks)
            count, apart = sum(row.differing for row in on_ranks), max(row.apart for row in on_ranks)
            rows.append(Row(first.layout, first.dtype, first.state, first.weights, aligned, count, apart))
    return rows


def main() -> int:
    """Print the matrix; the exit status is 1 where a row fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    rows = run_matrix(backend=parser.parse_args().backend)
    for row in rows:
        print(row)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} rows, {len(rows) - failed} ok, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
