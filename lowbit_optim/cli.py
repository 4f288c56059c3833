"""The commands of `lowbit-optim`: what users type, and what they see of it. All else is in the modules below.

Exit codes: 0 for success, 1 where a check or a conversion failed, 2 for a command that makes no sense.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import doctor as doctor_
from . import files, shapes
from .convert import check_target
from .layout import PRESETS, get_preset
from .planner import Plan
from .planner import plan as plan_
from .presets import measured

app = typer.Typer(
    help="Plan, check and convert low-bit optimizer state.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_UNITS = {"B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for kind, base in (("iB", 1024), ("B", 1000))
}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"([\d_]*\.?\d+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)"
_MOST_GPUS = 4096
#: Columns of what does not go to a terminal.
_WIDTH = 140

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OptimizerName = Annotated[str, typer.Option("--optimizer", help="adamw, adam, lion or sgd (with momentum).")]


@contextmanager
def _exits(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Print what is raised in one line, and exit with `code`."""
    try:
        yield
    except kinds as error:
        typer.echo(f"lowbit-optim: {error}", err=True)
        raise typer.Exit(code) from None


def _console() -> Console:
    """A console that cuts no figure: as wide as its terminal, and as any table where there is none."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    return console


def _table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in ("note", "for"))
    return table


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))


def _quantity(text: str, units: Mapping[str, int], example: str) -> int:
    found = re.fullmatch(_NUMBER, text.strip())
    unit = next((unit for unit in units if found and unit.upper() == found[2].upper()), None)
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a number with one of the units {', '.join(filter(None, units))}; {example}")
    amount = float(found[1]) * units[unit]
    if not 1 <= amount <= shapes.MOST_ELEMENTS:
        raise ValueError(f"{text!r} must be from 1 to {shapes.MOST_ELEMENTS:.0e}; {example}")
    return round(amount)


def _size(text: str) -> int:
    return _quantity(text, _UNITS, "write for example 80GiB")


def _count(text: str) -> int:
    return _quantity(text, _COUNTS, "write for example 8.03e9 or 8.03B")


def _gib(size: int) -> str:
    """A size with three significant digits or more, in the unit that suits it."""
    unit, power = next(
        ((name, 1024**p) for p, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")) if size >= 1024**p), ("B", 1)
    )
    return f"{size / power:.2f} {unit}" if power > 1 else f"{size} B"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lowbit-optim {importlib.import_module('lowbit_optim').__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)


@app.callback()
def _options(version: Annotated[bool, _VERSION] = False) -> None:
    """Plan, check and convert low-bit optimizer state."""


# presets -------------------------------------------------------------------------------------------------------------


@app.command()
def presets(optimizer: OptimizerName = "adamw", as_json: Json = False) -> None:
    """Show the presets: what they store, what that costs in memory, and what it cost in loss."""
    with _exits(2, ValueError):
        matrix = shapes.from_count(1 << 24, torch.bfloat16)
        costs = {name: _planned(matrix, name, optimizer, 1).bytes_per_param for name in PRESETS}
    # Losses were measured with this one.
    runs = measured() if optimizer == "adamw" else {}
    rows = [
        {
            **dataclasses.asdict(preset),
            "bytes_per_param": round(costs[name], 6),
            "loss_gap_pct": runs[name]["gap_pct"] if runs else None,
            "finetune_gain_pct": runs[name]["finetune_gain_pct"] if runs else None,
        }
        for name, preset in PRESETS.items()
    ]
    if as_json:
        _print_json(rows)
        return
    figures = ("B/param", "gap", "gain") if runs else ("B/param",)
    table = _table("preset", "state", "weights", *figures, "for", left=("preset", "state", "weights", "for"))
    for row in rows:
        losses = (f"{row['loss_gap_pct']:+.2f} %", f"{row['finetune_gain_pct']:.1f} %") if runs else ()
        table.add_row(row["name"], row["state"], row["weights"], f"{row['bytes_per_param']:g}", *losses, row["summary"])
    console = _console()
    console.print(table)
    console.print(f"\nB/param: weight and {optimizer} state of large bf16 matrices, without gradients.")
    console.print(
        "Measured with AdamW on a model of 0.4M parameters, one seed: gap is the pretraining loss against reference,"
        "\ngain the share of fp32's progress in fine-tuning at lr 1e-6 that the bf16 forward pass sees."
        if runs
        else "Losses were measured with adamw only."
    )


# plan ----------------------------------------------------------------------------------------------------------------


def _planned(params: shapes.Named, preset: str, optimizer: str, gpus: int) -> Plan:
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    return plan_(params, preset, gpus, optimizer, **options)


@dataclasses.dataclass(frozen=True)
class _Budget:
    """Bytes on one GPU.

    Where the model's blocks are unknown, nothing is known of what they gather (None), and of their gradients nothing is
    counted with gradient release.
    """

    weights: int
    gradients: int
    state: int
    gathered: int | None
    total: int
    released: int

    @classmethod
    def of(cls, plan: Plan, blocks: bool) -> _Budget:
        shards = plan.weight_bytes, plan.gradient_bytes, plan.state_bytes
        if not blocks:
            return cls(*shards, None, sum(shards), plan.weight_bytes + plan.state_bytes)
        return cls(*shards, plan.gathered_bytes, plan.total_bytes, plan.released_bytes)

    def fits(self, memory: int | None) -> bool | None:
        return None if memory is None else self.total <= memory

    def fits_released(self, memory: int | None) -> bool | None:
        return None if memory is None else self.released <= memory


def _read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{what} {path}: {error}") from None


def _params_of(params: str | None, model: Path | None, hf_config: Path | None, dtype: torch.dtype) -> shapes.Named:
    if sum(source is not None for source in (params, model, hf_config)) != 1:
        raise ValueError("give the model by one of --params, --model and --hf-config")
    if params is not None:
        return shapes.from_count(_count(params), dtype)
    if model is not None:
        return shapes.from_listing(_read_json(model, "--model"), dtype)
    assert hf_config is not None
    return shapes.from_hf_config(_read_json(hf_config, "--hf-config"), dtype)


@app.command()
def plan(
    params: Annotated[str | None, typer.Option(help="Number of parameters, as 8.03e9 or 8.03B.")] = None,
    model: Annotated[Path | None, typer.Option(help="JSON file of shapes by parameter name.")] = None,
    hf_config: Annotated[Path | None, typer.Option(help="config.json of a Hugging Face model.")] = None,
    preset: Annotated[str, typer.Option(help="The preset to plan with.")] = "balanced",
    optimizer: OptimizerName = "adamw",
    gpus: Annotated[int, typer.Option(min=1, max=1 << 20, help="GPUs that share the model (FSDP2).")] = 1,
    gpu_mem: Annotated[str | None, typer.Option(help="Memory of one GPU, as 80GiB.")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the weights: bf16, fp32 or fp16.")] = "bf16",
    as_json: Json = False,
) -> None:
    """Show what training a model takes on each GPU, and what fits. Activations are not counted.

    Exits with 1 if the preset does not fit in --gpu-mem, with gradient release or without.
    """
    with _exits(2, ValueError):
        get_preset(preset)
        memory = None if gpu_mem is None else _size(gpu_mem)
        named = _params_of(params, model, hf_config, shapes.dtype_named(dtype))
        blocks = params is None
        chosen = _Budget.of(_planned(named, preset, optimizer, gpus), blocks)
    budgets = {}
    for name in PRESETS:
        try:
            budgets[name] = _Budget.of(_planned(named, name, optimizer, gpus), blocks)
        except ValueError:
            continue  # not for this dtype; of the chosen one the user has been told
    numel = sum(param.numel() for _, param in named)
    fits = bool(chosen.fits(memory) or chosen.fits_released(memory))
    if as_json:
        asked = {"preset": preset, "optimizer": optimizer, "gpus": gpus, "gpu_mem": memory, "dtype": dtype}
        each = {
            name: {
                **dataclasses.asdict(budget),
                "fits": budget.fits(memory),
                "fits_released": budget.fits_released(memory),
            }
            for name, budget in budgets.items()
        }
        _print_json({**asked, "parameters": numel, "all_in_matrices": not blocks, "per_gpu": each})
    else:
        _show_plan(budgets, preset, memory)
        shared = f" on {gpus} GPUs (FSDP2)" if gpus > 1 else ""
        _tell(f"{numel:,} parameters, {dtype} weights, {optimizer}{shared}; activations are not counted.")
        if not blocks:
            _tell(
                "--params assumes that all are in large matrices and knows no layers: what is gathered for one, and its"
            )
            _tell("gradients with gradient release, are not counted. They are with --model and --hf-config.")
        if memory is not None:
            _tell(_verdict(named, preset, optimizer, gpus, memory, blocks, budgets))
    if memory is not None and not fits:
        raise typer.Exit(1)


def _tell(text: str) -> None:
    typer.echo(text)


def _show_plan(budgets: Mapping[str, _Budget], preset: str, memory: int | None) -> None:
    columns = ["preset", "weights", "gradients", "state", "gathered", "total", "released"]
    table = _table(*columns, *(["fits"] if memory is not None else []), left=("preset", "fits"))
    for name, budget in budgets.items():
        sizes = dataclasses.astuple(budget)
        cells = ["-" if size is None else _gib(size) for size in sizes]
        if memory is not None:
            cells.append("yes" if budget.fits(memory) else "if released" if budget.fits_released(memory) else "no")
        table.add_row(name, *cells, style="bold" if name == preset else None)
    console = _console()
    console.print("Memory of one GPU:")
    console.print(table)
    console.print(
        "gathered: whole weights and gradients of the largest block; released: the total with step_in_backward."
    )


def _verdict(
    named: shapes.Named,
    preset: str,
    optimizer: str,
    gpus: int,
    memory: int,
    blocks: bool,
    budgets: Mapping[str, _Budget],
) -> str:
    chosen, room = budgets[preset], _gib(memory)
    if chosen.fits(memory):
        return f"{preset} fits {room} and leaves {_gib(memory - chosen.total)} for activations."
    if chosen.fits_released(memory):
        left = _gib(memory - chosen.released)
        return f"{preset} fits {room} with gradient release only, and leaves {left} for activations."
    others = [name for name, budget in budgets.items() if budget.fits(memory) or budget.fits_released(memory)]
    more = 2 * gpus
    while more <= _MOST_GPUS and not _Budget.of(_planned(named, preset, optimizer, more), blocks).fits(memory):
        more *= 2
    hints = [f"{', '.join(others)} would"] if others else []
    hints += [f"{more} GPUs would do"] if more <= _MOST_GPUS else []
    return f"{preset} does not fit {room}" + (f"; {', or '.join(hints)}." if hints else ".")


# doctor --------------------------------------------------------------------------------------------------------------


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices and the backends they get, and step every preset. Exits with 1 if a check fails."""
    found, devices = doctor_.versions(), doctor_.devices()
    checks = [check for device in devices for check in doctor_.self_test(device)]
    passed = all(check.passed for check in checks)
    if as_json:
        listed = [
            {**dataclasses.asdict(check), "differ": _or_none(check.differ), "error": _or_none(check.error)}
            for check in checks
        ]
        _print_json({"versions": found, "devices": devices, "checks": listed, "passed": passed})
    else:
        _show_doctor(found, devices, checks)
        _tell("All checks passed." if passed else "Some checks failed.")
    if not passed:
        raise typer.Exit(1)


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if value == value else None


def _show_doctor(found: Mapping[str, str], devices: Mapping[str, str], checks: list[doctor_.Check]) -> None:
    console = _console()
    table = _table("", " ", left=("", " "))
    table.show_header = False
    for name, version in [*found.items(), *((f"device {kind}", name) for kind, name in devices.items())]:
        table.add_row(name, version)
    console.print(table)
    console.print()
    names = ("device", "preset", "backend", "differ", "error", "bound", "time", "result", "note")
    table = _table(*names, left=("device", "preset", "backend", "result", "note"))
    for check in checks:
        figures = (
            f"{check.differ:.2%}",
            f"{check.error:.4f}",
            f"{doctor_.BOUNDS[check.preset]:g}",
            f"{check.seconds:.2f} s",
        )
        result = "ok" if check.passed else "FAILED"
        table.add_row(check.device, check.preset, check.backend, *figures, result, check.note)
    console.print(table)
    console.print(
        f"differ: weights that are not the eager reference's, at most {doctor_.MAY_DIFFER:.1%};"
        "\nerror: distance from torch's AdamW in fp32, over the distance moved; time: 8 steps, compiling included."
    )


# convert -------------------------------------------------------------------------------------------------------------


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of torch.save, or a folder of DCP.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A file if it ends with .pt, .pth, .bin or .ckpt.")],
    to: Annotated[str, typer.Option("--to", help="torch, torchao, bitsandbytes or lowbit.")],
    format: Annotated[str | None, typer.Option(help="Format of quantized slots, as in convert_state_dict.")] = None,
    key: Annotated[str | None, typer.Option(help="Where the optimizer's state is, as optimizer_states.0.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with its optimizer state in another library's form, and all else as it is."""
    with _exits(2, ValueError, OSError):
        check_target(to, format)
        files.check_paths(source, target, force)
    with _exits(1, ValueError, OSError, ImportError):
        done = files.convert_checkpoint(source, target, to, format=format, key=key, force=force)
    if as_json:
        _print_json({"in": str(source), "out": str(target), "to": to, **dataclasses.asdict(done)})
        return
    where = [f"{key or 'the checkpoint'} ({library})" for key, library in zip(done.keys, done.source, strict=True)]
    kind = "folder" if done.is_folder else "file"
    _tell(
        f"{', '.join(where)} -> {to}: state of {done.parameters} parameters, {_gib(done.bytes)}, in the {kind} {target}"
    )
    for note in done.notes:
        _tell(f"note: {note}")
