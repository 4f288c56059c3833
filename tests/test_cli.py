"""The command line: what it prints, its exit codes, and files that are whole or not there."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from typer.testing import CliRunner

import lowbit_optim
from lowbit_optim import (
    PRESETS,
    AdamW,
    Lion,
    QuantizedState,
    convert_state_dict,
    dispatch,
    doctor,
    files,
    plan,
    presets,
)
from lowbit_optim.cli import app

from .lacking import lacking
from .runs import assert_same, bits, fingerprint, run
from .test_shapes import LLAMA_3_8B

ROOT = Path(__file__).parents[1]
NO_TORCHAO = lacking("test_convert")


def call(*arguments: object, code: int = 0) -> Any:
    """Run a command at a fixed width, and check its exit code."""
    environment = {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def text(*arguments: object, code: int = 0) -> str:
    """Return what a command prints, without the spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in call(*arguments, code=code).stdout.splitlines())


def error(*arguments: object, code: int) -> str:
    """Return the one line that a command that fails prints."""
    result = call(*arguments, code=code)
    assert result.stdout == ""
    return result.stderr.removesuffix("\n")


def as_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code).stdout)


# presets -------------------------------------------------------------------------------------------------------------


def test_cli_presets() -> None:
    assert_expected_inline(
        text("presets"),
        """\
preset     state  weights     B/param      gap     gain  for
reference  fp32   master           14  +0.00 %   84.1 %  mirrors mixed-precision training; the yardstick
bf16       bf16   stochastic        6  +0.01 %  100.7 %  no blocks, no scales: the simplest
balanced   int8   split8        5.125  +0.02 %  100.4 %  recommended: exact weights, 8-bit moments
light      int8   stochastic    4.125  +0.03 %  100.7 %  8-bit moments on plain bf16 weights
compact    int4   split8        4.125  +0.12 %  100.3 %  4-bit moments, exact weights: small lr, little memory
minimal    int4   stochastic    3.125  -0.06 %   99.9 %  the smallest

B/param: weight and adamw state of large bf16 matrices, without gradients.
Measured with AdamW on a model of 0.4M parameters, one seed: gap is the pretraining loss against reference,
gain the share of fp32's progress in fine-tuning at lr 1e-6 that the bf16 forward pass sees.""",
    )


def test_cli_presets_are_computed_and_measured() -> None:
    measured = {
        row["recipe"]: row for row in csv.DictReader((ROOT / "benchmarks/results/demo.csv").read_text().splitlines())
    }
    with torch.device("meta"):
        matrix = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    rows = as_json("presets")
    assert [row["name"] for row in rows] == list(PRESETS)
    for row in rows:
        assert row["bytes_per_param"] == plan(matrix, row["name"]).bytes_per_param
        assert row["loss_gap_pct"] == float(measured[row["name"]]["gap_pct"])
        assert row["finetune_gain_pct"] == float(measured[row["name"]]["finetune_gain_pct"])
        assert row["summary"] == PRESETS[row["name"]].summary


def test_cli_presets_of_an_optimizer_that_was_not_measured_have_no_losses() -> None:
    with torch.device("meta"):
        matrix = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    for row in as_json("presets", "--optimizer", "lion"):
        assert row["bytes_per_param"] == plan(matrix, row["name"], optimizer="lion").bytes_per_param
        assert row["loss_gap_pct"] is None
        assert row["finetune_gain_pct"] is None
    assert_expected_inline(
        text("presets", "--optimizer", "sgd"),
        """\
preset     state  weights     B/param  for
reference  fp32   master           10  mirrors mixed-precision training; the yardstick
bf16       bf16   stochastic        4  no blocks, no scales: the simplest
balanced   int8   split8       4.0625  recommended: exact weights, 8-bit moments
light      int8   stochastic   3.0625  8-bit moments on plain bf16 weights
compact    int4   split8       3.5625  4-bit moments, exact weights: small lr, little memory
minimal    int4   stochastic   2.5625  the smallest

B/param: weight and sgd state of large bf16 matrices, without gradients.
Losses were measured with adamw only.""",
    )


def test_cli_presets_measured_figures_are_those_of_the_benchmark() -> None:
    # The package has a copy, since benchmarks are no part of it.
    assert (ROOT / "lowbit_optim/measured.csv").read_bytes() == (ROOT / "benchmarks/results/demo.csv").read_bytes()
    assert presets.measured().keys() == PRESETS.keys()


def test_cli_presets_agree_with_the_table_in_the_docs() -> None:
    page = (ROOT / "docs/choosing.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) GiB \|$", page, re.M
    )
    computed = {
        name: {row["name"]: row for row in as_json("presets", "--optimizer", name)} for name in ("adamw", "lion")
    }
    large = as_json("plan", "--params", "8.03B")["per_gpu"]
    assert [row[0] for row in rows] == list(PRESETS)
    for name, weights, state, adamw, lion, _, gib in rows:
        assert (weights, state) == (PRESETS[name].weights, PRESETS[name].state)
        assert float(adamw) == computed["adamw"][name]["bytes_per_param"]
        assert float(lion) == computed["lion"][name]["bytes_per_param"]
        assert float(gib) == round((large[name]["weights"] + large[name]["state"]) / 1024**3, 1)


# plan ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


def test_cli_plan_of_a_count() -> None:
    shown = text("plan", "--params", "8.03e9", "--preset", "compact", "--gpus", 8, "--gpu-mem", "80GiB")
    assert_expected_inline(
        shown,
        """\
Memory of one GPU:
preset      weights  gradients      state  gathered      total   released  fits
reference  1.87 GiB   1.87 GiB  11.22 GiB         -  14.96 GiB  13.09 GiB  yes
bf16       1.87 GiB   1.87 GiB   3.74 GiB         -   7.48 GiB   5.61 GiB  yes
balanced   1.87 GiB   1.87 GiB   2.92 GiB         -   6.66 GiB   4.79 GiB  yes
light      1.87 GiB   1.87 GiB   1.99 GiB         -   5.73 GiB   3.86 GiB  yes
compact    1.87 GiB   1.87 GiB   1.99 GiB         -   5.73 GiB   3.86 GiB  yes
minimal    1.87 GiB   1.87 GiB   1.05 GiB         -   4.79 GiB   2.92 GiB  yes
gathered: whole weights and gradients of the largest block; released: the total with step_in_backward.
8,030,000,000 parameters, bf16 weights, adamw on 8 GPUs (FSDP2); activations are not counted.
--params assumes that all are in large matrices and knows no layers: what is gathered for one, and its
gradients with gradient release, are not counted. They are with --model and --hf-config.
compact fits 80.00 GiB and leaves 74.27 GiB for activations.""",
    )


def test_cli_plan_of_a_config(config: Path) -> None:
    shown = text("plan", "--hf-config", config, "--gpus", 2, "--gpu-mem", "24GiB", "--preset", "light")
    assert_expected_inline(
        shown,
        """\
Memory of one GPU:
preset      weights  gradients      state  gathered      total   released  fits
reference  7.48 GiB   7.48 GiB  44.87 GiB  3.91 GiB  63.74 GiB  57.24 GiB  no
bf16       7.48 GiB   7.48 GiB  14.96 GiB  3.91 GiB  33.83 GiB  27.33 GiB  no
balanced   7.48 GiB   7.48 GiB  11.69 GiB  3.91 GiB  30.56 GiB  24.06 GiB  no
light      7.48 GiB   7.48 GiB   7.95 GiB  3.91 GiB  26.82 GiB  20.32 GiB  if released
compact    7.48 GiB   7.48 GiB   7.95 GiB  3.91 GiB  26.82 GiB  20.32 GiB  if released
minimal    7.48 GiB   7.48 GiB   4.21 GiB  3.91 GiB  23.08 GiB  16.58 GiB  yes
gathered: whole weights and gradients of the largest block; released: the total with step_in_backward.
8,030,261,248 parameters, bf16 weights, adamw on 2 GPUs (FSDP2); activations are not counted.
light fits 24.00 GiB with gradient release only, and leaves 3.68 GiB for activations.""",
    )


def test_cli_plan_that_does_not_fit_exits_with_1(config: Path) -> None:
    shown = text("plan", "--hf-config", config, "--gpu-mem", "48GB", "--preset", "reference", code=1)
    assert_expected_inline(
        shown.splitlines()[-1],
        """reference does not fit 44.70 GiB; balanced, light, compact, minimal would, or 4 GPUs would do.""",
    )
    shown = text("plan", "--hf-config", config, "--gpu-mem", "1GiB", "--preset", "reference", "--gpus", 4096, code=1)
    assert_expected_inline(shown.splitlines()[-1], """reference does not fit 1.00 GiB.""")


def test_cli_plan_of_shapes_is_what_the_planner_says(tmp_path: Path) -> None:
    shapes = {"layers.0.a": [64, 128], "layers.1.a": {"shape": [64, 256], "dtype": "fp32"}, "norm": [64]}
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(shapes))
    dtypes = {"layers.1.a": torch.float32}
    params = [
        (
            name,
            nn.Parameter(
                torch.empty(
                    shape["shape"] if isinstance(shape, dict) else shape, dtype=dtypes.get(name, torch.bfloat16)
                )
            ),
        )
        for name, shape in shapes.items()
    ]
    found = as_json("plan", "--model", path, "--gpus", 2, "--optimizer", "lion", "--gpu-mem", "100kB", code=1)
    assert {name: found[name] for name in ("gpus", "gpu_mem", "optimizer", "parameters", "all_in_matrices")} == {
        "gpus": 2,
        "gpu_mem": 100_000,
        "optimizer": "lion",
        "parameters": 64 * (128 + 256 + 1),
        "all_in_matrices": False,
    }
    for name in PRESETS:
        planned = plan(params, name, 2, "lion")
        per_gpu = found["per_gpu"][name]
        assert per_gpu["weights"] == planned.weight_bytes
        assert per_gpu["gradients"] == planned.gradient_bytes
        assert per_gpu["state"] == planned.state_bytes
        assert per_gpu["gathered"] == planned.gathered_bytes == 2 * 4 * 64 * 256
        assert per_gpu["total"] == planned.total_bytes
        assert per_gpu["released"] == planned.released_bytes
        assert per_gpu["fits"] == (planned.total_bytes <= 100_000)
        assert per_gpu["fits_released"] == (planned.released_bytes <= 100_000)


def test_cli_plan_leaves_out_presets_that_a_dtype_cannot_have() -> None:
    found = as_json("plan", "--params", "1B", "--dtype", "fp16", "--preset", "light")
    assert list(found["per_gpu"]) == ["reference", "bf16", "light", "minimal"]
    shown = error("plan", "--params", "1B", "--dtype", "fp16", code=2)
    assert "split8" in shown
    assert "fp16" in shown or "float16" in shown


@pytest.mark.parametrize(
    ("written", "size"),
    [("80GiB", 80 * 1024**3), ("80 gib", 80 * 1024**3), ("1.5TB", 1.5e12), ("24GB", 24e9), ("512MiB", 512 * 1024**2)],
)
def test_cli_plan_reads_sizes(written: str, size: float) -> None:
    assert as_json("plan", "--params", "1e6", "--gpu-mem", written)["gpu_mem"] == size


@pytest.mark.parametrize(
    ("written", "count"), [("8.03e9", 8_030_000_000), ("8.03B", 8_030_000_000), ("70m", 7e7), ("5_000", 5000)]
)
def test_cli_plan_reads_counts(written: str, count: float) -> None:
    assert as_json("plan", "--params", written)["parameters"] == count


ONE_OF = "give the model by one of --params, --model and --hf-config"
BAD_PLANS: dict[str, tuple[list[str], str]] = {
    "no model": ([], ONE_OF),
    "two models": (["--params", "1B", "--model", "x.json"], ONE_OF),
    "count": (
        ["--params", "many"],
        "'many' is not a number with one of the units K, M, B, T; write for example 8.03e9 or 8.03B",
    ),
    "no parameters": (["--params", "0"], "'0' must be from 1 to 1e+17"),
    "too many parameters": (["--params", "1e400"], "'1e400' must be from 1 to 1e+17"),
    "too much memory": (["--params", "1B", "--gpu-mem", "1e300GiB"], "'1e300GiB' must be from 1 to 1e+17"),
    "memory": (
        ["--params", "1B", "--gpu-mem", "80"],
        "'80' is not a number with one of the units B, KiB, KB, MiB, MB, GiB, GB, TiB, TB; write for example 80GiB",
    ),
    "preset": (
        ["--params", "1B", "--preset", "compat"],
        "preset: unknown 'compat'; choose one of reference, bf16, balanced, light, compact, minimal; "
        "did you mean 'compact'?",
    ),
    "optimizer": (["--params", "1B", "--optimizer", "adamv"], "optimizer: unknown 'adamv'"),
    "dtype": (["--params", "1B", "--dtype", "bf17"], "dtype: unknown 'bf17'"),
    "no file": (["--model", "missing.json"], "--model missing.json: "),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_cli_plan_says_what_is_wrong(case: str) -> None:
    arguments, message = BAD_PLANS[case]
    assert error("plan", *arguments, code=2).startswith(f"lowbit-optim: {message}")


def test_cli_plan_names_what_a_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, message in (
        ("{", f"--hf-config {path}: Expecting property name"),
        ('{"model_type": "llama"}', "a config of model_type 'llama' needs 'hidden_size' as a whole number, got None"),
        ('{"model_type": "mixtrall"}', "unknown architecture 'mixtrall'"),
    ):
        path.write_text(content)
        assert error("plan", "--hf-config", path, code=2).startswith(f"lowbit-optim: {message}")


# doctor --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that is the same everywhere: one device, and no compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    dispatch.step_fn.cache_clear()
    dispatch._warn_slower.cache_clear()
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "1.2.3", "Triton": "not installed"})
    monkeypatch.setattr(doctor, "devices", lambda: {"cpu": "a processor"})
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: 0.0)
    yield
    # The eager steps that were made are not for tests that have a compiler.
    dispatch.step_fn.cache_clear()


@pytest.mark.usefixtures("eager")
def test_cli_doctor() -> None:
    # Differences from fp32 in the last place depend on the processor.
    shown = re.sub(r"0\.00\d\d(?=  +1e-05)", "0.0000", text("doctor"))
    shown = re.sub(r"(0\.\d)\d\d\d(?=  +0\.)", r"\1***", shown)
    # The note is as wide as the output.
    shown, notes = re.subn(r"lowbit_optim steps run in eager mode[^']*'no-such-compiler' was not found", "NOTE", shown)
    assert notes == 1
    assert_expected_inline(
        shown,
        """\
torch       1.2.3
Triton      not installed
device cpu  a processor

device  preset     backend  differ   error  bound    time  result  note
cpu     reference  eager     0.00%  0.0000  1e-05  0.00 s  ok      NOTE
cpu     bf16       eager     0.00%  0.1***    0.2  0.00 s  ok
cpu     balanced   eager     0.00%  0.0***   0.02  0.00 s  ok
cpu     light      eager     0.00%  0.1***    0.2  0.00 s  ok
cpu     compact    eager     0.00%  0.1***   0.17  0.00 s  ok
cpu     minimal    eager     0.00%  0.1***   0.28  0.00 s  ok
differ: weights that are not the eager reference's, at most 0.1%;
error: distance from torch's AdamW in fp32, over the distance moved; time: 8 steps, compiling included.
All checks passed.""",
    )


@pytest.mark.usefixtures("eager")
def test_cli_doctor_fails_if_a_preset_does_not_do_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BOUNDS", {**doctor.BOUNDS, "light": 1e-3})
    found = as_json("doctor", code=1)
    assert found["passed"] is False
    assert {check["preset"]: check["passed"] for check in found["checks"]} == {
        name: name != "light" for name in PRESETS
    }
    assert all(check["error"] <= doctor.BOUNDS[check["preset"]] for check in found["checks"] if check["passed"])


def test_cli_doctor_reports_a_step_that_differs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make = doctor.from_preset

    def other(params: Any, preset: str, **options: Any) -> Any:
        if options.get("backend") == "eager":
            return make(params, preset, seed=1, **options)
        if preset == "bf16":
            raise RuntimeError("out of order\nand more")
        return make(params, preset, **{"backend": "eager", **options})

    monkeypatch.setattr(doctor, "from_preset", other)
    with pytest.raises(RuntimeError, match="out of order"):
        list(doctor.self_test("cpu"))
    monkeypatch.setattr(
        doctor, "_run", lambda optimizer, params: (_ for _ in ()).throw(RuntimeError("broken\nand more"))
    )
    monkeypatch.setattr(doctor, "from_preset", make)
    start = [torch.ones(64, 64, dtype=torch.bfloat16)]
    (failed,) = [doctor._check("cpu", "light", start, [nn.Parameter(start[0].float())], 1.0)]
    assert (failed.passed, failed.note) == (False, "RuntimeError: broken")
    assert failed.differ != failed.differ


def test_cli_doctor_bounds_are_there_for_every_preset() -> None:
    assert doctor.BOUNDS.keys() == PRESETS.keys()


def test_cli_doctor_versions_and_devices_are_those_of_this_machine() -> None:
    found = doctor.versions()
    assert found["torch"] == torch.__version__
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert found.keys() == {
        *("lowbit-optim", "Python", "torch", "C++ compiler", "Triton", "torchao", "bitsandbytes", "platform")
    }
    assert ("cuda" in doctor.devices()) == torch.cuda.is_available()
    assert "cpu" in doctor.devices()


def test_cli_doctor_says_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert dispatch.toolchain()["C++ compiler"] == "'no-such-compiler' not found"
    monkeypatch.setenv("CXX", "false")
    assert dispatch.toolchain()["C++ compiler"].startswith("false failed")


# convert -------------------------------------------------------------------------------------------------------------


def trained(make: Callable[..., Any] = AdamW, **options: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    optimizer = make(model.parameters(), **{"lr": 1e-3, "backend": "eager", **options})
    run(optimizer, list(model.parameters()), range(2))
    return model, optimizer


def contents(value: Any) -> Any:
    """Bits of everything, for comparisons with `==`."""
    if isinstance(value, QuantizedState):
        return value.spec, [bits(part).tolist() for part in value.parts]
    if hasattr(value, "__tensor_flatten__"):
        return [bits(getattr(value, name)).tolist() for name in value.__tensor_flatten__()[0]]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bits(value).tolist()
    if isinstance(value, dict):
        return {key: contents(entry) for key, entry in value.items()}
    return [contents(entry) for entry in value] if isinstance(value, list) else value


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


TARGETS = ["torch", "bitsandbytes", "lowbit"] + ["torchao"] * (NO_TORCHAO is None)


@pytest.mark.parametrize("to", TARGETS)
def test_cli_convert_does_what_convert_state_dict_does(to: str, tmp_path: Path) -> None:
    model, optimizer = trained(preset="light")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "args": {"lr": 1e-3}}
    torch.save(saved, tmp_path / "in.pt")
    found = as_json("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", to)
    written = load(tmp_path / "out.pt")
    assert contents(written["optimizer"]) == contents(convert_state_dict(optimizer.state_dict(), to))
    assert contents({**written, "optimizer": 0}) == contents({**saved, "optimizer": 0})
    assert list(written) == list(saved)
    assert (found["keys"], found["source"], found["to"]) == (["optimizer"], ["lowbit"], to)
    assert (found["parameters"], found["is_folder"], found["notes"]) == (4, False, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.pt"]


def test_cli_convert_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, optimizer = trained(preset="balanced")
    torch.save({"optimizer_states": [optimizer.state_dict()], "epoch": 1}, "last.ckpt")
    assert_expected_inline(
        text("convert", "last.ckpt", "torch.ckpt", "--to", "torch"),
        """\
optimizer_states.0 (lowbit) -> torch: state of 4 parameters, 65.02 KiB, in the file torch.ckpt
note: convert_state_dict(to='torch') leaves out correction, which is precision of the weights beyond their dtype; save optimizer.fp32_state_dict(model) to keep it""",  # noqa: E501
    )


def test_cli_convert_writes_what_the_library_then_loads(tmp_path: Path) -> None:
    model, optimizer = trained(state="int8-dynamic", weights="stochastic")
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    call("convert", tmp_path / "ours.pt", tmp_path / "torch.pt", "--to", "torch")
    theirs = torch.optim.AdamW(model.parameters(), lr=0.5)
    theirs.load_state_dict(load(tmp_path / "torch.pt"))
    assert theirs.param_groups[0]["lr"] == 1e-3
    decoded = optimizer.state[model[0].weight]["exp_avg"].dequantize()
    assert torch.equal(load(tmp_path / "torch.pt")["state"][0]["exp_avg"], decoded)
    # And back: codes of the shared format survive the way through bitsandbytes.
    call("convert", tmp_path / "ours.pt", tmp_path / "bnb.pt", "--to", "bitsandbytes")
    call("convert", tmp_path / "bnb.pt", tmp_path / "back.pt", "--to", "lowbit")
    again = AdamW(model.parameters(), state="int8-dynamic", weights="stochastic", backend="eager")
    again.load_state_dict(load(tmp_path / "back.pt"))
    assert_same(fingerprint(again), fingerprint(optimizer))


@pytest.mark.skipif(NO_TORCHAO is not None, reason=str(NO_TORCHAO))
def test_cli_convert_reads_torchao_in_a_process_that_has_not_imported_it(tmp_path: Path) -> None:
    _, optimizer = trained(preset="light")
    torch.save(convert_state_dict(optimizer.state_dict(), "torchao"), tmp_path / "ao.pt")
    done = command("convert", tmp_path / "ao.pt", tmp_path / "out.pt", "--to", "torch", "--json")
    assert json.loads(done.stdout)["source"] == ["torchao"], done.stderr
    assert done.returncode == 0


def test_cli_convert_passes_the_format_on(tmp_path: Path) -> None:
    _, optimizer = trained(preset="light")
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    call("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "bitsandbytes", "--format", "32bit")
    assert load(tmp_path / "out.pt")["state"][0]["state1"].dtype == torch.float32


# Finding the state


def test_cli_convert_converts_every_optimizer_of_a_list(tmp_path: Path) -> None:
    optimizers = [trained(preset="light")[1], trained(Lion, preset="light")[1]]
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"optimizer_states": states, "loops": {}}, tmp_path / "in.ckpt")
    found = as_json("convert", tmp_path / "in.ckpt", tmp_path / "out.ckpt", "--to", "bitsandbytes")
    assert found["keys"] == ["optimizer_states.0", "optimizer_states.1"]
    written = load(tmp_path / "out.ckpt")["optimizer_states"]
    assert contents(written) == contents([convert_state_dict(state, "bitsandbytes") for state in states])


def test_cli_convert_wants_a_key_where_there_are_several(tmp_path: Path) -> None:
    state = trained(preset="light")[1].state_dict()
    saved = {"gen": {"optim.v1": state}, "disc": {"optim": state}, "other": {"deep": [1, 2]}}
    torch.save(saved, tmp_path / "in.pt")
    paths = tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch"
    message = "lowbit-optim: several optimizer states found; choose one with --key: gen.optim.v1, disc.optim"
    assert error("convert", *paths, code=1) == message
    assert not (tmp_path / "out.pt").exists()
    call("convert", *paths, "--key", "gen.optim.v1")
    written = load(tmp_path / "out.pt")
    assert contents(written["gen"]["optim.v1"]) == contents(convert_state_dict(state, "torch"))
    assert contents(written["disc"]) == contents(saved["disc"])
    for key, message in (
        ("gen.optimizer", "no 'gen.optimizer' in the checkpoint: gen has optim.v1"),
        ("nothing", "no 'nothing' in the checkpoint: it has gen, disc, other"),
        ("other.deep", "other.deep: not an optimizer's state dict, which has 'state' and 'param_groups'"),
    ):
        assert error("convert", *paths, "--force", "--key", key, code=1) == f"lowbit-optim: {message}"


def test_cli_convert_names_the_entry_that_is_damaged(tmp_path: Path) -> None:
    state = torch.optim.AdamW([nn.Parameter(torch.ones(4))]).state_dict()
    state["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4)}}
    torch.save({"optimizer": state}, tmp_path / "in.pt")
    message = error("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "bitsandbytes", code=1)
    assert message == "lowbit-optim: optimizer: state[0]: it lacks exp_avg_sq; it has step, exp_avg"
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def half_saved(path: Path) -> None:
    torch.save({"optimizer": torch.ones(10_000)}, path)
    path.write_bytes(path.read_bytes()[:10_000])


DAMAGED = "{path} cannot be read: it is no file of torch.save, or a damaged one"
NO_STATE = "no optimizer state found; the checkpoint has "
BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no state": (lambda path: torch.save({"model": {"w": torch.ones(2)}, "step": 1}, path), f"{NO_STATE}model, step"),
    "a tensor": (lambda path: torch.save(torch.ones(2), path), f"{NO_STATE}a Tensor"),
    "text": (lambda path: path.write_text("hello"), f"{DAMAGED} ("),
    "empty": (lambda path: path.write_text(""), f"{DAMAGED} (EOFError)"),
    "half": (lambda path: half_saved(path), f"{DAMAGED} ("),
    "code": (
        lambda path: torch.save({"optimizer": print}, path),
        "{path} holds objects that are not read from a file nobody vouches for: print",
    ),
    "folder": (lambda path: path.mkdir(), "{path} has no .metadata: it is no DCP folder, or its save was not finished"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_cli_convert_refuses_what_is_no_checkpoint(case: str, tmp_path: Path) -> None:
    make, message = BAD_FILES[case]
    path = tmp_path / "in.pt"
    make(path)
    shown = error("convert", path, tmp_path / "out.pt", "--to", "torch", code=1)
    assert shown.startswith("lowbit-optim: " + message.format(path=path))
    assert "\n" not in shown
    assert [found.name for found in tmp_path.iterdir()] == ["in.pt"]


def test_cli_convert_says_what_is_wrong_with_the_command(tmp_path: Path) -> None:
    source = tmp_path / "in.pt"
    torch.save(trained()[1].state_dict(), source)
    out = tmp_path / "out.pt"
    for arguments, message in (
        ((source, out, "--to", "torhc"), "to: unknown 'torhc'; choose one of torch, torchao, bitsandbytes, lowbit"),
        ((source, out, "--to", "torch", "--format", "8bit"), "format: to='torch' has no '8bit'"),
        ((tmp_path / "none.pt", out, "--to", "torch"), f"there is no {tmp_path / 'none.pt'}"),
        ((source, source, "--to", "torch"), f"{source} exists already; --force replaces it"),
        ((source, tmp_path / "a/b.pt", "--to", "torch"), f"there is no folder {tmp_path / 'a'} to write to"),
    ):
        assert error("convert", *arguments, code=2).startswith(f"lowbit-optim: {message}")
    assert "Missing option '--to'" in error("convert", source, out, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


# Writing


def test_cli_convert_replaces_with_force_and_only_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = trained(preset="light")
    path = tmp_path / "in.pt"
    torch.save(optimizer.state_dict(), path)
    before = path.read_bytes()

    def broken(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", broken)
        assert error("convert", path, path, "--to", "torch", "--force", code=1) == "lowbit-optim: disk full"
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["in.pt"]

    call("convert", path, path, "--to", "torch", "--force")
    assert contents(load(path)) == contents(convert_state_dict(optimizer.state_dict(), "torch"))
    assert [found.name for found in tmp_path.iterdir()] == ["in.pt"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


# Folders of distributed checkpoint


def dcp_contents(model: nn.Module, optimizer: Any, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state, "step": 2, "more": [torch.ones(2), {"a": 1}]}


def save_dcp(content: dict[str, Any], path: Path) -> None:
    with files._one_process():
        dcp.save(content, checkpoint_id=path)


def load_dcp(content: dict[str, Any], path: Path) -> None:
    # The options that only one of Adam and AdamW has are in no converted state dict.
    with files._one_process():
        dcp.load(content, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
def test_cli_convert_makes_folders_that_torch_resumes_from(flat: bool, tmp_path: Path) -> None:
    model, optimizer = trained(preset="light")
    save_dcp(dcp_contents(model, optimizer, flat), tmp_path / "ours")
    found = as_json("convert", tmp_path / "ours", tmp_path / "theirs", "--to", "torch")
    assert (found["keys"], found["source"], found["parameters"]) == (["optimizer"], ["lowbit"], 4)
    assert found["is_folder"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]

    torch.manual_seed(1)
    resumed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    theirs = torch.optim.AdamW(resumed.parameters(), lr=0.5)
    content = dcp_contents(resumed, theirs, flat)
    load_dcp(content, tmp_path / "theirs")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        resumed, theirs, model_state_dict=content["model"], optim_state_dict=content["optimizer"], options=options
    )
    assert content["step"] == 2
    assert torch.equal(content["more"][0], torch.ones(2))
    assert theirs.param_groups[0]["lr"] == 1e-3
    for mine, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)
        for slot in "exp_avg", "exp_avg_sq":
            # DCP loads into torch's slots, which are bf16 as the weights are.
            expected = optimizer.state[mine][slot]
            expected = expected.dequantize() if isinstance(expected, QuantizedState) else expected
            assert torch.equal(theirs.state[other][slot], expected.to(theirs.state[other][slot].dtype))
        assert theirs.state[other]["step"] == 2


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
def test_cli_convert_goes_between_folders_and_files(flat: bool, tmp_path: Path) -> None:
    model, optimizer = trained(state="int8-dynamic", weights="stochastic")
    save_dcp(dcp_contents(model, optimizer, flat), tmp_path / "a")
    call("convert", tmp_path / "a", tmp_path / "b.pt", "--to", "bitsandbytes")
    state = load(tmp_path / "b.pt")["optimizer"]
    codes = state["state.0.weight.state1"] if flat else state["state"]["0.weight"]["state1"]
    # A folder is read decoded, and what a format has held is encoded without loss.
    kept = convert_state_dict(optimizer.state_dict(), "bitsandbytes")["state"][0]["state1"]
    assert torch.equal(codes, kept)
    call("convert", tmp_path / "a", tmp_path / "c", "--to", "bitsandbytes")
    again = files.read_checkpoint(tmp_path / "c")
    assert contents(again) == contents(load(tmp_path / "b.pt"))
    assert contents(again["more"]) == contents([torch.ones(2), {"a": 1}])


def test_cli_convert_replaces_folders_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(preset="light")
    path = tmp_path / "a"
    save_dcp(dcp_contents(model, optimizer, True), path)
    before = {found.name: found.read_bytes() for found in path.iterdir()}

    def broken(content: Any, checkpoint_id: Path) -> None:
        (checkpoint_id / "half").touch()
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(dcp, "save", broken)
        assert error("convert", path, path, "--to", "torch", "--force", code=1) == "lowbit-optim: disk full"
    assert {found.name: found.read_bytes() for found in path.iterdir()} == before
    assert (
        error("convert", path, path, "--to", "torch", code=2)
        == f"lowbit-optim: {path} exists already; --force replaces it"
    )
    call("convert", path, path, "--to", "torch", "--force")
    assert files.recognise(files._unflatten(files.read_checkpoint(path)["optimizer"])[0]) == "torch"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def test_cli_convert_deletes_no_folder_but_one_of_dcp(tmp_path: Path) -> None:
    model, optimizer = trained(preset="light")
    runs = tmp_path / "runs"
    save_dcp(dcp_contents(model, optimizer, True), runs / "a")
    (runs / "notes").mkdir()
    torch.save(optimizer.state_dict(), runs / "in.pt")
    save_dcp(dcp_contents(model, optimizer, True), tmp_path / "mixed")
    (tmp_path / "mixed/precious.txt").touch()
    # A name without an ending, as folders have, is no less precious.
    save_dcp(dcp_contents(model, optimizer, True), tmp_path / "nested")
    (tmp_path / "nested/runs").mkdir()
    before = sorted(path for path in tmp_path.rglob("*"))
    targets = [
        (runs / "in.pt", runs),
        *((runs / "a", target) for target in (runs, tmp_path / "mixed", tmp_path / "nested")),
    ]
    for source, target in targets:
        message = error("convert", source, target, "--to", "torch", "--force", code=2)
        assert message.startswith(f"lowbit-optim: {target} is a folder, and not of DCP alone: it is not replaced")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_cli_version() -> None:
    assert text("--version") == f"lowbit-optim {lowbit_optim.__version__}"


def test_cli_convert_says_which_piece_of_a_folder_cannot_be_read(tmp_path: Path) -> None:
    model, optimizer = trained(preset="light")
    save_dcp(dcp_contents(model, optimizer, True), tmp_path / "a")
    for found in (tmp_path / "a").glob("*.distcp"):
        found.write_bytes(b"")
    message = error("convert", tmp_path / "a", tmp_path / "b", "--to", "torch", code=1)
    assert message.startswith(f"lowbit-optim: {tmp_path / 'a'} cannot be read: ")
    assert "\n" not in message
    assert not (tmp_path / "b").exists()


# The command itself --------------------------------------------------------------------------------------------------


def command(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run the installed script's function in a process of its own."""
    code = f"{prelude}\nfrom lowbit_optim.__main__ import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_cli_without_its_extra_says_what_to_install(package: str) -> None:
    done = command("presets", prelude=f"import sys; sys.modules[{package!r}] = None")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"lowbit-optim: the command line needs {package!r}, which is not installed; "
        "run: pip install 'lowbit-optim[cli]'\n"
    )


def test_cli_script_is_this_function() -> None:
    assert 'lowbit-optim = "lowbit_optim.__main__:main"' in (ROOT / "pyproject.toml").read_text()
    done = command("plan", "--params", "1M", "--json")
    assert done.returncode == 0, done.stderr
    assert json.load(io.StringIO(done.stdout))["parameters"] == 10**6
    assert done.stderr == ""


def test_cli_page_shows_what_the_commands_print(config: Path) -> None:
    page = (ROOT / "docs/cli.md").read_text()
    shown = re.findall(r"^```console\n\$ lowbit-optim (.*)\n((?:.+\n|\n)*?)```", page, re.M)
    commands = [(typed.replace("config.json", str(config)).split(), output) for typed, output in shown if output]
    assert [typed[0] for typed, _ in commands] == ["presets", "plan"]
    for typed, output in commands:
        assert text(*typed) == output.rstrip()
