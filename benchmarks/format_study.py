"""Which 4-bit format follows exact AdamW best, at equal bytes: `python -m benchmarks.format_study`.

A byte-level transformer learns Python's manual with fp32 weights, so that the moments are all that differs. `distance`
is how far its weights end from those of exact AdamW, as a share of the way that these went; `gap_pct` compares the
validation losses. Coarse moments that enlarge every step gain in loss on so short a run, at the small batch most: a
negative gap is a difference, not a better format. One part varies at a time; "chosen" is what `int4` is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lowbit_optim
from lowbit_optim.formats import FORMATS, RATIOS, BlockFormat, StateFormat, register_format
from lowbit_optim.maps import PowersOfTwo

from .byte_lm import ByteTransformer, Corpus, loss_of, manual_text
from .harness import RESULTS, warmed_up, write_csv

STEPS, LR, CONTEXT, WIDTH = 250, 1e-3, 64, 64
FIRST, SECOND = RATIOS["int4"], FORMATS["int4"][1]
assert isinstance(FIRST, BlockFormat)
assert isinstance(SECOND, BlockFormat)


@dataclass(frozen=True)
class Candidate:
    """A pair of formats: of Adam's first moment, or its ratio, and of its second."""

    part: str
    variant: str
    first: StateFormat = FIRST
    second: StateFormat = SECOND

    @property
    def bytes_per_param(self) -> float:
        """Bytes of both moments per element."""
        numel = 1 << 20
        pairs = [
            (size, dtype.itemsize)
            for fmt in (self.first, self.second)
            for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True)
        ]
        return sum(size * itemsize for size, itemsize in pairs) / numel


def _first(**changes: Any) -> StateFormat:
    assert isinstance(FIRST, BlockFormat)
    return replace(FIRST, **changes)


def _second(**changes: Any) -> StateFormat:
    assert isinstance(SECOND, BlockFormat)
    return replace(SECOND, **changes)


EXACT = FORMATS["fp32"][0]
OCTAVES_FIRST = {"map": PowersOfTwo(7, zero=True), "round_roots": False}
OCTAVES_SECOND = {"map": PowersOfTwo(15), "roots": 0, "round_roots": False}
CANDIDATES = (
    Candidate("both", "chosen"),
    Candidate("both", "octaves, moment itself (int4 until now)", FORMATS["int4"][0], _second(**OCTAVES_SECOND)),
    Candidate("both", "blocks of 64", _first(block=64), _second(block=64)),
    Candidate("both", "blocks of 128", _first(block=128), _second(block=128)),
    Candidate("both", "nearest rounding", _first(rounding="nearest"), _second(rounding="nearest")),
    Candidate("first", "chosen", second=EXACT),
    Candidate("first", "dither", _first(rounding="dither"), EXACT),
    Candidate("first", "nearest", _first(rounding="nearest"), EXACT),
    Candidate("first", "squares", _first(roots=1, round_roots=False), EXACT),
    Candidate("first", "octaves", _first(**OCTAVES_FIRST), EXACT),
    Candidate("first", "moment itself, even", _first(ratio=False), EXACT),
    Candidate("first", "moment itself, squares", _first(ratio=False, roots=1, round_roots=False), EXACT),
    Candidate("first", "moment itself, octaves", FORMATS["int4"][0], EXACT),
    Candidate("second", "chosen", EXACT),
    Candidate("second", "dither", EXACT, _second(rounding="dither")),
    Candidate("second", "nearest", EXACT, _second(rounding="nearest")),
    Candidate("second", "drawn by values", EXACT, _second(round_roots=False)),
    Candidate("second", "even", EXACT, _second(roots=0)),
    Candidate("second", "squares, drawn by square roots", EXACT, _second(roots=1)),
    Candidate("second", "eighth powers, drawn by eighth roots", EXACT, _second(roots=3)),
    Candidate("second", "octaves, drawn by values", EXACT, _second(**OCTAVES_SECOND)),
)


def _known(candidates: tuple[Candidate, ...]) -> dict[Candidate, dict[str, str]]:
    """Register every candidate's formats; return what `state` is for each."""
    states = {}
    for place, candidate in enumerate(candidates):
        names = []
        for slot, fmt in ("first", candidate.first), ("second", candidate.second):
            name = fmt.name
            if isinstance(fmt, BlockFormat):
                name = f"{slot}{place}"
                # A name has formats for all kinds of slots; AdamW uses the one that was meant.
                named, plain = replace(fmt, name=name), replace(fmt, name=name, ratio=False)
                other = replace(plain, signed=not plain.signed)
                kinds = (plain, other) if plain.signed else (other, plain)
                register_format(*kinds, named if named.ratio else None)
            names.append(name)
        states[candidate] = dict(zip(("exp_avg", "exp_avg_sq"), names, strict=True))
    return states


def train(state: Any, batch: int, seed: int, steps: int) -> tuple[float, Tensor, Tensor]:
    """Return the validation loss, and all weights at the end and at the start."""
    corpus = Corpus(manual_text(), CONTEXT, batch)
    torch.manual_seed(seed)
    model = ByteTransformer(WIDTH, layers=2, context=CONTEXT)
    optimizer = lowbit_optim.AdamW(model.parameters(), lr=LR, state=state)
    schedule = warmed_up(optimizer, steps, final=0.1)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for tokens in itertools.islice(corpus.batches(seed + 1), steps):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model, corpus.validation(64)).item()
    return loss, torch.nn.utils.parameters_to_vector(model.parameters()).detach(), start


def rows(batches: list[int], seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate, batch size and seed."""
    states = _known(CANDIDATES)
    runs = list(itertools.product(batches, range(seeds)))
    for batch, seed in runs:
        exact_loss, exact, start = train("fp32", batch, seed, steps)
        way = (exact - start).norm()
        for candidate in track(CANDIDATES, f"batch {batch}, seed {seed}"):
            loss, end, _ = train(states[candidate], batch, seed, steps)
            yield {
                "part": candidate.part,
                "variant": candidate.variant,
                "bytes_per_param": round(candidate.bytes_per_param, 4),
                "batch": batch,
                "seed": seed,
                "steps": steps,
                "gap_pct": round(100 * (loss / exact_loss - 1), 3),
                "distance": round(((end - exact).norm() / way).item(), 4),
            }


def main() -> None:
    """Measure, print the table and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "format_study.csv")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="sequences per batch")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    measured = list(rows(options.batches, options.seeds, options.steps))
    table = Table(*measured[0])
    for row in measured:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    write_csv(options.out, measured)


if __name__ == "__main__":
    main()
