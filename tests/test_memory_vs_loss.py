"""Memory against loss: runs that are there are not made again, rows say what was measured, the report what they say."""

from __future__ import annotations

import csv
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from benchmarks import report
from benchmarks.memory_vs_loss import run, suite, tasks
from benchmarks.memory_vs_loss.__main__ import chosen_runs, default_path, main, parser
from benchmarks.memory_vs_loss.recipes import RECIPES, exact_weights, intended_updates
from benchmarks.memory_vs_loss.run import COLUMNS, broken_row, one_run
from benchmarks.memory_vs_loss.suite import Run, done_keys, read_rows, run_all, run_in_process, schedule
from benchmarks.memory_vs_loss.summary import Results, gap_at_best
from benchmarks.memory_vs_loss.tasks import TASKS, Settings

CONTRACT = (
    "task,recipe,optimizer,weights,state,lr,seed,steps,bytes_per_param,state_bytes,val_loss,gap_pct,distance,lost_pct,"
    "peak_rss_mib,step_ms"
)
#: Some steps of the smallest tasks.
TINY = Settings(shrink=TASKS["long-horizon"].steps // 40)
LR = TASKS["spiky"].lrs["adamw"][0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in tasks, run:
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")


def in_this_process(made: Run, settings: Settings) -> dict[str, Any]:
    return one_run(made.task, made.recipe, made.lr, settings)


def test_second_suite_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    names = ("reference", "torch fp32", "torch bf16", "balanced", "minimal")
    runs = [Run("long-horizon", name, 3e-3, 0) for name in names]
    assert run_all(runs[:3], TINY, path, jobs=1, make=in_this_process) == 3
    assert run_all(runs, TINY, path, jobs=1, make=in_this_process) == 2
    assert run_all(runs, TINY, path, jobs=1, make=in_this_process) == 0
    assert path.read_text().startswith(CONTRACT)
    rows = {row["recipe"]: row for row in read_rows(path)}
    assert tuple(rows) == names
    for row in rows.values():
        assert None not in row.values()
        assert row["status"] == "ok"
        assert all(math.isfinite(float(row[column])) for column in COLUMNS[5:-1])
        assert float(row["val_loss"]) < float(row["start_loss"])
        assert float(row["peak_rss_mib"]) > 100
    # The yardstick is fp32 training seen through bf16; the same start, so the exact weights end close by.
    assert float(rows["torch fp32"]["distance"]) < 0.01
    assert float(rows["torch fp32"]["decoded_loss"]) == pytest.approx(
        float(rows["reference"]["decoded_loss"]), rel=1e-3
    )
    assert float(rows["reference"]["gap_pct"]) == float(rows["reference"]["distance"]) == 0
    assert float(rows["torch bf16"]["distance"]) > 0.02
    sizes = {name: float(row["bytes_per_param"]) for name, row in rows.items()}
    params = sum(param.numel() for param in tasks.Network(128).parameters())
    small = sum(param.numel() for param in tasks.Network(128).parameters() if param.numel() < 4096)
    counters = 4 * len(list(tasks.Network(128).parameters()))
    assert sizes["torch fp32"] == pytest.approx(12 + counters / params, abs=1e-3)
    balanced = (5.125 * (params - small) + 11 * small) / params
    assert sizes["balanced"] == pytest.approx(balanced, abs=2 * counters / params)


def test_yardsticks_are_made_first() -> None:
    runs = schedule((0, 1, 2))
    assert len({made.key for made in runs}) == len(runs)
    place = {made.key: number for number, made in enumerate(runs)}
    for made in runs:
        yardstick = Run(made.task, RECIPES[made.recipe].yardstick, made.lr, made.seed)
        assert place[yardstick.key] <= place[made.key]
    assert {made.recipe for made in runs} == set(RECIPES)
    assert {made.task for made in runs} == set(TASKS) == set(suite.TRAIN_S) == set(report.TASK_NOTES)
    # What compares final losses is run at three learning rates.
    assert {made.lr for made in runs if (made.task, made.recipe) == ("spiky", "balanced")} == {LR / 2, LR, 2 * LR}
    assert sum(suite.cost_s(made, shrink=1) for made in runs) < 12 * 3600


def test_nothing_waits_for_what_is_not_made(tmp_path: Path) -> None:
    runs = [Run("spiky", name, LR, 0) for name in ("reference", "balanced")]
    order: list[str] = []

    def make(made: Run, settings: Settings) -> dict[str, Any]:
        order.append(f"{made.recipe} starts")
        row = {**broken_row(made.task, made.recipe, made.lr, settings, "ok"), "val_loss": 1.0}
        order.append(f"{made.recipe} ends")
        return row

    assert run_all(runs, TINY, tmp_path / "rows.csv", jobs=2, make=make) == 2
    assert order == ["reference starts", "reference ends", "balanced starts", "balanced ends"]
    assert run_all(runs, TINY, tmp_path / "late.csv", jobs=2, make=make, deadline=0.0) == 0


def test_a_yardstick_whose_end_is_lost_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    reference, minimal = (Run("long-horizon", name, 3e-3, 0) for name in ("reference", "minimal"))
    run_all([reference], TINY, path, jobs=1, make=in_this_process)
    shutil.rmtree(tmp_path / "cache")
    # In a fresh clone the rows are there and the ends are not; nor is either where only one recipe is asked for.
    assert run_all([reference, minimal], TINY, path, jobs=2, make=in_this_process) == 2
    assert [row["recipe"] for row in read_rows(path)] == ["reference", "minimal"]
    assert float(read_rows(path)[1]["distance"]) > 0


def test_broken_runs_are_rows_until_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    suite.add_row(path, run_in_process(Run("spiky", "reference", LR, 0), TINY, timeout=0.01))
    suite.add_row(path, run_in_process(Run("spiky", "light", LR, 0), Settings(device="nothing")))
    rows = read_rows(path)
    assert rows[0]["status"] == "no end within 0.01 s"
    assert rows[1]["status"].startswith("exit 1: RuntimeError: Expected one of cpu")
    assert {row["val_loss"] for row in rows} == {"nan"}
    assert [row["steps"] for row in rows] == ["12", "3000"]
    cell = Results(rows).cell("spiky", "reference", "0.01")
    assert cell is not None
    assert cell.broken == 1
    assert done_keys(path, TINY) == set()
    assert run_all([Run("spiky", "reference", LR, 0)], TINY, path, jobs=1, make=in_this_process) == 1
    assert done_keys(path, TINY) == {("spiky", "reference", "0.01", "0")}
    assert [row["recipe"] for row in read_rows(path)] == ["reference", "light"]


def test_rows_that_are_cut_off_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = {**broken_row("spiky", "reference", LR, TINY, "ok"), "val_loss": 1.0}
    for recipe in "reference", "light":
        suite.add_row(path, {**row, "recipe": recipe})
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("nan")])
    assert done_keys(path, TINY) == {("spiky", "reference", "0.01", "0")}
    suite.add_row(path, {**row, "recipe": "light"})
    assert path.read_text() == whole


def runs_of(suite_pid: int) -> list[int]:
    """The suite's children that train; naming the machine takes a process too, before anything can be stopped."""
    tasks = Path(f"/proc/{suite_pid}/task").glob("*/children")
    words = {int(pid): Path(f"/proc/{pid}/cmdline") for task in tasks for pid in task.read_text().split()}
    return [pid for pid, path in words.items() if path.exists() and b"memory_vs_loss.one" in path.read_bytes()]


def test_a_run_that_starts_while_the_suite_stops_ends_too() -> None:
    with pytest.raises(KeyboardInterrupt), suite._children_end():
        raise KeyboardInterrupt
    began = time.monotonic()
    assert run_in_process(Run("long-horizon", "reference", 3e-3, 0), Settings())["status"].startswith("exit -9")
    assert time.monotonic() - began < 10
    with suite._children_end():
        pass
    assert not suite._stopping.is_set()


def test_a_stopped_suite_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.memory_vs_loss", "--tasks", "spiky", "--jobs", "1", "--out", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        deadline = time.monotonic() + 60
        while not (started := runs_of(parent.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.send_signal(signal.SIGTERM)
        _, errors = parent.communicate(timeout=30)
    assert errors.endswith("Stopped; the same command goes on from here.\n")
    assert parent.returncode == 1
    for pid in started:
        assert not Path(f"/proc/{pid}").exists()
    assert not path.exists()


def test_options_choose_runs() -> None:
    def choose(*words: str) -> list[Run]:
        return chosen_runs(parser().parse_args(words))

    assert choose() == schedule((0, 1, 2))
    quick = choose("--quick")
    assert {made.seed for made in quick} == {0}
    assert {made.task for made in quick} == set(TASKS)
    assert {RECIPES[made.recipe].part for made in quick} == {"main"}
    some = choose("--tasks", "vision,spiky", "--recipes", "balanced", "--seeds", "4")
    assert {(made.task, made.recipe, made.seed) for made in some} == {
        ("vision", "balanced", 4),
        ("spiky", "balanced", 4),
    }
    for wrong in ("--recipes", "balancd"), ("--jobs", "0"), ("--scale", "-1"), ("--seeds", "x"):
        with pytest.raises(SystemExit):
            choose(*wrong)
    paths = {default_path(parser().parse_args(words)).name for words in ([], ["--quick"], ["--scale", "8"])}
    assert paths == {"memory_vs_loss.csv", "memory_vs_loss_quick.csv", "memory_vs_loss_x8.csv"}


def test_another_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit):
        main(["--out", str(path)])
    assert f"{path} has other columns than task, recipe, " in capsys.readouterr().err


def test_rows_of_another_length_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    suite.add_row(path, broken_row("spiky", "light", LR, Settings(), "ok"))
    only = ["--tasks", "spiky", "--recipes", "light", "--seeds", "0", "--out", str(path)]
    with pytest.raises(SystemExit):
        main([*only, "--quick"])
    assert "rows of 3000 steps of spiky, these runs 120; name another file" in capsys.readouterr().err


def test_the_machine_is_that_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.with_suffix(".machine").write_text("theirs\n")
    only = ["--tasks", "long-horizon", "--recipes", "light", "--seeds", "0", "--out", str(path)]
    suite.add_row(path, broken_row("long-horizon", "light", 3e-3, Settings(), "ok"))
    main([*only, "--budget-minutes", "0"])
    assert path.with_suffix(".machine").read_text() == "theirs\n"


def test_broken_runs_end_the_command_with_an_error(tmp_path: Path) -> None:
    only = ["--tasks", "spiky", "--recipes", "reference", "--quick", "--device", "nothing"]
    with pytest.raises(SystemExit, match="1 of them gave no result"):
        main([*only, "--out", str(tmp_path / "rows.csv")])


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_the_same_for_a_seed(name: str) -> None:
    settings = Settings(seed=3, shrink=200)
    first, second = TASKS[name].build(settings), TASKS[name].build(settings)
    other = TASKS[name].build(Settings(seed=4, shrink=200))
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, mine.bfloat16().float())
    batches = [next(problem.batches) for problem in (first, second, other)]
    firsts, seconds, others = ([*batch] if isinstance(batch, tuple) else [batch] for batch in batches)
    assert all(map(torch.equal, firsts, seconds))
    assert not all(map(torch.equal, firsts, others))
    loss = first.loss_of(batches[0])
    loss.backward()
    assert all(param.grad is not None for param in first.model.parameters())
    larger = TASKS[name].build(Settings(seed=3, scale=2, shrink=200))
    assert larger.loss_of(next(larger.batches)).isfinite()
    sizes = [sum(param.numel() for param in problem.model.parameters()) for problem in (first, larger)]
    assert sizes[1] > 1.9 * sizes[0]
    assert {len(batch[0] if isinstance(batch, tuple) else batch) for batch in first.validation} == {
        len(first.validation[0][0] if isinstance(first.validation[0], tuple) else first.validation[0])
    }


@pytest.mark.parametrize(
    "name",
    ["torch bf16", "balanced", "light", "bitsandbytes AdamW8bit", "optimi AdamW Kahan", "lion split8 + int8"],
)
@pytest.mark.filterwarnings("ignore")
def test_intended_updates_are_those_of_fp32(name: str) -> None:
    """Where the exact weights are kept, each moves by what was intended; where not, by nothing or a whole ulp."""
    recipe, lr = RECIPES[name], 1e-6
    if recipe.library not in ("lowbit_optim", "torch"):
        pytest.importorskip(recipe.library, reason="not in the test extra")
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    optimizer = recipe.make(model.named_parameters(), lr, 0)
    for _ in range(3):
        model.weight.grad = torch.randn(64, 64).bfloat16()
        before = exact_weights(model, optimizer)
        (meant,) = intended_updates(recipe, optimizer, before) if optimizer.state else (None,)
        optimizer.step()
        (moved,) = (new - old for new, old in zip(exact_weights(model, optimizer), before, strict=True))
    assert meant is not None
    assert 0.2 * lr < meant.abs().mean() < 2 * lr
    if recipe.weights in ("nearest", "stochastic"):
        kept = (moved * meant).sum() / meant.square().sum()
        assert (moved == 0).float().mean() > 0.9
        assert kept < 0.6 if recipe.weights == "nearest" else kept > 0.4
    else:
        finest = 2.0**-15 if recipe.weights == "split8" else 2.0**-14
        assert (moved - meant).abs().max() < 2 * finest * model.weight.abs().max()


# The report -----------------------------------------------------------------------------------------------------------


def row(task: str, recipe: str, lr: str, seed: int, size: float, loss: float, **more: float) -> dict[str, str]:
    known = broken_row(task, recipe, float(lr), Settings(seed), "ok")
    figures = {"bytes_per_param": size, "val_loss": loss, "decoded_loss": loss, "start_loss": 3.0, "step_ms": 1.5}
    return {name: str(value) for name, value in {**known, **figures, "peak_rss_mib": 300.0, **more}.items()}


def plain(text: str) -> str:
    """Printable ASCII, which is what expecttest can write."""
    return text.replace("±", "+-")


def fixture() -> list[dict[str, str]]:
    rows = []
    for seed, shift in enumerate((0.0, 0.01)):
        for factor, lr in enumerate(("0.005", "0.01", "0.02")):
            rows.append(row("spiky", "reference", lr, seed, 14, 2.0 + 0.1 * factor + shift, distance=0, lost_pct=0))
            rows.append(
                row("spiky", "minimal", lr, seed, 3.2, 2.1 - 0.05 * factor + 2 * shift, distance=0.5, lost_pct=0.2)
            )
    rows.append(row("spiky", "torchao AdamW4bit SR", "0.01", 0, 3.1, math.nan))
    for recipe, loss, decoded in (("torch fp32", 2.8, 2.8), ("reference", 2.9, 2.8), ("torch bf16", 2.98, 2.98)):
        rows.append(row("finetune-small-lr", recipe, "1e-06", 0, 12, loss, decoded_loss=decoded))
    return rows


def test_gaps_are_paired_by_seed() -> None:
    results = Results(fixture())
    cell = results.cell("spiky", "minimal", "0.01")
    assert cell is not None
    by_hand = [100 * (2.05 / 2.1 - 1), 100 * (2.07 / 2.11 - 1)]
    assert cell.gap.value == pytest.approx(sum(by_hand) / 2)
    assert cell.gap.error == pytest.approx(abs(by_hand[0] - by_hand[1]) / 2)
    # Each at its own best: minimal at 0.02, the reference at 0.005.
    best = gap_at_best(results, "spiky", "minimal")
    assert best.value == pytest.approx((0.0 + 100 * (2.02 / 2.01 - 1)) / 2)


def test_report_of_a_task() -> None:
    results = Results(fixture())
    swept, fine = (plain(report.task_section(results, task)) for task in ("spiky", "finetune-small-lr"))
    assert_expected_inline(
        swept.split("3,000 steps.")[1].split("Without")[0],
        """\


| recipe | bytes | loss | gap, % | gap at best lr, % | distance | lost, % | step, ms | peak, MiB | seeds |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| reference | 14.000 | 2.1050 | +0.000 +- 0.000 | +0.000 +- 0.000 (0.005) | 0.000 | 0.0 | 1.50 | 300 | 2 |
| minimal | 3.200 | 2.0600 | -2.138 +- 0.243 | +0.249 +- 0.249 (0.02) | 0.500 | 0.2 | 1.50 | 300 | 2 |
| torchao AdamW4bit SR | 3.100 | - | - | - | - | - | 1.50 | 300 | 1, 1 without a loss |

Missing: 92 of 105 runs. """,
    )
    assert_expected_inline(
        fine.split("800 steps.")[1].split("Without")[0],
        """\


| recipe | bytes | loss | visible, % | decoded, % | distance | lost, % | step, ms | peak, MiB | seeds |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| reference | 12.000 | 2.90000 | 50.0 | 100.0 | - | - | 1.50 | 300 | 1 |
| torch fp32 | 12.000 | 2.80000 | 100.0 | 100.0 | - | - | 1.50 | 300 | 1 |
| torch bf16 | 12.000 | 2.98000 | 10.0 | 10.0 | - | - | 1.50 | 300 | 1 |

Missing: 147 of 150 runs. """,
    )


def test_report_says_how_to_choose() -> None:
    text = plain(report.choice_section(Results(fixture())))
    assert_expected_inline(
        text.split("fp32.")[1],
        """\


| recipe | bytes | largest gap, % | mean gap, % | tasks without a gap | fine-tuning seen, % |
|---|--:|--:|--:|--:|--:|
| reference | 14.00 to 14.00 | +0.000 +- 0.000 (spiky) | +0.000 | 1 of 1 | 50.0 |
| bf16 | no run yet | - | - | - | - |
| balanced | no run yet | - | - | - | - |
| light | no run yet | - | - | - | - |
| compact | no run yet | - | - | - | - |
| minimal | 3.20 to 3.20 | -2.138 +- 0.243 (spiky) | -2.138 | 1 of 1 | - |
| torch bf16 | - | - | - | 0 of 0 | 10.0 |
| torchao AdamW8bit SR | no run yet | - | - | - | - |
| torchao AdamW4bit SR | - | no loss (spiky) | - | 0 of 1 | - |

- Without a gap on every task that has been run, smallest first: `minimal`.
- At a small learning rate, less than 98 % of fp32's progress is seen with: `reference` (50 %).""",
    )


def test_a_run_without_a_loss_meets_no_goal() -> None:
    fine = [row("spiky", name, "0.01", 0, 4, 2.1) for name in ("compact", "balanced")]
    results = Results([*fixture(), *fine, row("vision", "compact", "0.002", 0, 4, math.nan)])
    assert "| `compact`: no gap on every task | does not hold | vision without a loss |" in report.goals_section(
        results
    )
    assert "| `balanced`: no gap on every task | holds | - |" in report.goals_section(results)
    assert "- `compact` ended without a loss on: vision." in report.choice_section(results)


def test_report_tells_runs_of_fewer_steps() -> None:
    results = Results([{**fixture()[0], "steps": "60"}])
    assert "60 steps, in place of 3,000." in report.task_section(results, "spiky")


def test_report_without_rows_says_so(tmp_path: Path) -> None:
    page = report.page(tmp_path, None)
    assert page.count("No run yet.") == len(TASKS)
    assert page.count("Not measured yet.") == 2
    assert "0 of" in page
    assert "holds" not in page.split("## Goals")[1].split("##")[0].replace("goal that holds", "")


def test_report_draws(tmp_path: Path) -> None:
    rows = fixture()
    with (tmp_path / "memory_vs_loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    report.draw(Results(read_rows(tmp_path / "memory_vs_loss.csv")), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_docs_are_the_committed_rows() -> None:
    folder, docs = Path(report.RESULTS), Path(report.DOCS)
    plot = "memory_vs_loss.png" if read_rows(folder / "memory_vs_loss.csv") else None
    assert (docs / "benchmarks.md").read_text() == report.page(folder, plot)
    stalls = (docs / "why-bf16-stalls.md").read_text()
    assert stalls == report.with_rows(stalls, Results(read_rows(folder / "memory_vs_loss.csv")))
