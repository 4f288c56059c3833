"""Which formats follow exact AdamW best, at equal bytes: `python -m benchmarks.format_study`.

A byte-level transformer learns Python's manual with fp32 weights, so that the moments are all that differs. `distance`
is how far its weights end from those of exact AdamW, as a share of the way that these went; `gap_pct` compares the
validation losses. Coarse moments that enlarge every step gain in loss on so short a run, at the small batch most: a
negative gap is a difference, not a better format. One part varies at a time; "chosen" is what the library's format is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import lowbit_optim
from lowbit_optim.formats import FORMATS, RATIOS, BlockFormat, StateFormat, register_format
from lowbit_optim.hyper import Moment
from lowbit_optim.maps import Linear, PowersOfTwo
from lowbit_optim.rules import adamw

from . import moment_variants as variants
from .byte_lm import ByteTransformer, Corpus, loss_of, manual_text
from .harness import RESULTS, show, warmed_up, write_csv

STEPS, LR, CONTEXT, WIDTH = 250, 1e-3, 64, 64
FIRST, SECOND = RATIOS["int4"], FORMATS["int4"][1]


@dataclass(frozen=True)
class Candidate:
    """A way to keep both moments.

    Attributes:
        part: which moments are not exact, or which of the library's formats is varied.
        variant: what is varied.
        first: format of Adam's first moment, or its ratio.
        second: format of the second.
        bits: of a code of each moment, where that is less than what the formats pack it in.
        keep: used in place of formats, see `moment_variants`.
        bytes: per element, where there is `keep`.
        carried: share of what `keep` takes from the first moment that the weight is given, as with carried formats.
    """

    part: str
    variant: str
    first: StateFormat = FIRST
    second: StateFormat = SECOND
    bits: tuple[int, int] | None = None
    keep: variants.Keep | None = None
    bytes: float = 0.0
    carried: float = 0.0

    @property
    def bytes_per_param(self) -> float:
        """Bytes of both moments per element."""
        if self.keep:
            return self.bytes
        numel = 1 << 20
        stored = sum(
            size * dtype.itemsize
            for fmt in (self.first, self.second)
            for size, dtype in zip(fmt.part_sizes(numel), fmt.parts.values(), strict=True)
        )
        spared = sum(4 - bits for bits in self.bits) / 8 if self.bits else 0.0
        return stored / numel - spared


def _first(**changes: Any) -> StateFormat:
    return replace(FIRST, **changes)


def _second(**changes: Any) -> StateFormat:
    return replace(SECOND, **changes)


def _both(name: str, **changes: Any) -> dict[str, StateFormat]:
    first, second = (replace(fmt, **changes) for fmt in FORMATS[name])
    return {"first": first, "second": second}


def _carried(part: str, variant: str, keep: variants.Keep, bytes: float) -> Candidate:
    return Candidate(part, variant, keep=keep, bytes=bytes, carried=FIRST.carried)


EXACT = FORMATS["fp32"][0]
OCTAVES_FIRST = {"map": PowersOfTwo(7, zero=True), "round_roots": False}
OCTAVES_SECOND = {"map": PowersOfTwo(15), "roots": 0, "round_roots": False}
CANDIDATES = (
    Candidate("both", "chosen"),
    Candidate("both", "not carried", _first(carried=0.0)),
    Candidate("both", "half of it carried", _first(carried=0.5)),
    Candidate("both", "all of it carried", _first(carried=1.0)),
    Candidate("both", "octaves, moment itself", FORMATS["int4"][0], _second(**OCTAVES_SECOND)),
    Candidate("both", "blocks of 64", _first(block=64), _second(block=64)),
    Candidate("both", "blocks of 128", _first(block=128), _second(block=128)),
    Candidate("both", "nearest rounding", _first(rounding="nearest"), _second(rounding="nearest")),
    _carried("both", "8-bit scales", variants.narrow_scales(32), 1.0625),
    _carried("both", "8-bit scales, blocks of 64", variants.narrow_scales(64), 1.03125),
    _carried("both", "no scales of ratios: a grid up to 1", variants.one_scale(1.0), 1.0625),
    _carried("both", "no scales of ratios: a grid up to 3", variants.one_scale(3.0), 1.0625),
    Candidate(
        "both", "4-bit Adam (dynamic map, even levels, nearest, blocks of 128)", keep=variants.lpmm(), bytes=1.0625
    ),
    Candidate("first", "chosen", second=EXACT),
    Candidate("first", "not carried", _first(carried=0.0), EXACT),
    Candidate("first", "half of it carried", _first(carried=0.5), EXACT),
    Candidate("first", "all of it carried", _first(carried=1.0), EXACT),
    Candidate("first", "not carried, nearest", _first(carried=0.0, rounding="nearest"), EXACT),
    Candidate("first", "3 bits", _first(map=Linear(3)), EXACT, bits=(3, 4)),
    Candidate("first", "2 bits", _first(map=Linear(1)), EXACT, bits=(2, 4)),
    Candidate("first", "dither", _first(rounding="dither"), EXACT),
    Candidate("first", "nearest", _first(rounding="nearest"), EXACT),
    Candidate("first", "squares", _first(roots=1, round_roots=False), EXACT),
    Candidate("first", "octaves", _first(**OCTAVES_FIRST), EXACT),
    Candidate("first", "moment itself, even", _first(ratio=False), EXACT),
    Candidate("first", "moment itself, squares", _first(ratio=False, roots=1, round_roots=False), EXACT),
    Candidate("first", "moment itself, octaves", FORMATS["int4"][0], EXACT),
    _carried("first", "NF4", variants.normal_float(ratio=True), 4.5625),
    _carried("first", "moment itself, NF4", variants.normal_float(ratio=False), 4.5625),
    _carried("first", "moment itself, dynamic map", variants.dynamic(), 4.5625),
    Candidate("second", "chosen", EXACT),
    Candidate("second", "dither", EXACT, _second(rounding="dither")),
    Candidate("second", "nearest", EXACT, _second(rounding="nearest")),
    Candidate("second", "drawn by values", EXACT, _second(round_roots=False)),
    Candidate("second", "even", EXACT, _second(roots=0)),
    Candidate("second", "squares, drawn by square roots", EXACT, _second(roots=1)),
    Candidate("second", "eighth powers, drawn by eighth roots", EXACT, _second(roots=3)),
    Candidate("second", "octaves, drawn by values", EXACT, _second(**OCTAVES_SECOND)),
    Candidate("second", "with a zero", EXACT, _second(map=Linear(15))),
    Candidate("second", "logarithmic, drawn by logarithms (SOLO)", keep=variants.logarithmic(), bytes=4.5625),
    Candidate("bf16", "chosen", **_both("bf16")),
    Candidate("bf16", "nearest", keep=variants.bf16(drawn=False), bytes=4.0),
    Candidate("bf16", "independent draws", keep=variants.bf16(drawn=True), bytes=4.0),
    Candidate("int8", "chosen", **_both("int8")),
    Candidate("int8", "carried", **_both("int8", carried=FIRST.carried)),
    Candidate("int8", "blocks of 64", **_both("int8", block=64)),
    Candidate("int8", "blocks of 256", **_both("int8", block=256)),
    Candidate("int8", "nearest", **_both("int8", rounding="nearest")),
    Candidate("int8", "even", **_both("int8", roots=0)),
    Candidate("int8", "squares", **_both("int8", roots=1)),
    Candidate("int8", "dynamic map, blocks of 256 (int8-dynamic)", **_both("int8-dynamic")),
    Candidate("int8", "dynamic map, blocks of 256, nearest", **_both("int8-dynamic", rounding="nearest")),
    Candidate("below 1 B", "2-bit second, fourth powers", second=_second(map=Linear(4, first=1)), bits=(4, 2)),
    Candidate("below 1 B", "2-bit second, eighth powers", second=_second(map=Linear(4, first=1), roots=3), bits=(4, 2)),
    Candidate("below 1 B", "3 bits each", _first(map=Linear(3)), _second(map=Linear(8, first=1)), bits=(3, 3)),
    Candidate("below 1 B", "3 and 2 bits", _first(map=Linear(3)), _second(map=Linear(4, first=1)), bits=(3, 2)),
    Candidate("below 1 B", "2 bits each", _first(map=Linear(1)), _second(map=Linear(4, first=1)), bits=(2, 2)),
    Candidate(
        "below 1 B",
        "3 and 4 bits, blocks of 64",
        _first(map=Linear(3), block=64),
        _second(block=64),
        bits=(3, 4),
    ),
    _carried("below 1 B", "4-bit first, factored second", variants.factored(7), 0.5625),
    _carried("below 1 B", "3-bit first, factored second", variants.factored(3), 0.4375),
    _carried("below 1 B", "2-bit first, factored second", variants.factored(1), 0.3125),
    _carried(
        "below 1 B",
        "4-bit first, 8-bit second of 4 neighbours",
        variants.averaged(4, variants.through(FORMATS["int8"][1])),
        0.5625 + 1.0625 / 4,
    ),
    _carried("below 1 B", "4-bit first, bf16 second of 32 neighbours", variants.averaged(32), 0.5625 + 2 / 32),
)


def _known(candidates: tuple[Candidate, ...]) -> dict[Candidate, str | dict[str, str]]:
    """Register every candidate's formats; return what `state` is for each."""
    states: dict[Candidate, str | dict[str, str]] = {}
    for place, candidate in enumerate(candidates):
        if candidate.keep:
            states[candidate] = "fp32"
            continue
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


@torch.no_grad()
def _keep_all(
    optimizer: torch.optim.Optimizer, keep: variants.Keep, carried: float, step: int, generator: torch.Generator
) -> None:
    moment, carry = Moment(adamw, optimizer.param_groups[0], step), adamw.slots["exp_avg"].carry
    h = dict(zip(moment.names, moment.on(torch.device("cpu"))[0].unbind(), strict=True))
    for param, slots in optimizer.state.items():
        # Those that the library does not quantize either.
        if param.numel() >= 4096:
            m, v = slots["exp_avg"], slots["exp_avg_sq"]
            kept_m, kept_v = keep(m, v, generator)
            if carried and carry:
                # Beside the second moment as it is kept the first is worth what its ratio to that is.
                worth = torch.where(kept_v > 0, kept_m * (v / kept_v).sqrt(), 0.0)
                param.add_(carry(carried * (m - worth), {"exp_avg_sq": v}, h))
            m.copy_(kept_m)
            v.copy_(kept_v)


def train(
    state: Any, batch: int, seed: int, steps: int, candidate: Candidate | None = None
) -> tuple[float, Tensor, Tensor]:
    """Return the validation loss, and all weights at the end and at the start."""
    corpus = Corpus(manual_text(), CONTEXT, batch)
    torch.manual_seed(seed)
    model = ByteTransformer(WIDTH, layers=2, context=CONTEXT)
    optimizer = lowbit_optim.AdamW(model.parameters(), lr=LR, state=state)
    schedule = warmed_up(optimizer, steps, final=0.1)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    generator = torch.Generator().manual_seed(seed)
    for step, tokens in enumerate(itertools.islice(corpus.batches(seed + 1), steps), start=1):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if candidate and candidate.keep:
            _keep_all(optimizer, candidate.keep, candidate.carried, step, generator)
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model, corpus.validation(64)).item()
    return loss, torch.nn.utils.parameters_to_vector(model.parameters()).detach(), start


def rows(candidates: tuple[Candidate, ...], batches: list[int], seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate, batch size and seed."""
    states = _known(candidates)
    runs = list(itertools.product(batches, range(seeds)))
    for batch, seed in runs:
        exact_loss, exact, start = train("fp32", batch, seed, steps)
        way = (exact - start).norm()
        for candidate in track(candidates, f"batch {batch}, seed {seed}"):
            loss, end, _ = train(states[candidate], batch, seed, steps, candidate)
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
    parts = list(dict.fromkeys(candidate.part for candidate in CANDIDATES))
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="sequences per batch")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    candidates = tuple(candidate for candidate in CANDIDATES if candidate.part in options.parts)
    measured = list(rows(candidates, options.batches, options.seeds, options.steps))
    show(measured)
    write_csv(options.out, measured)


if __name__ == "__main__":
    main()
