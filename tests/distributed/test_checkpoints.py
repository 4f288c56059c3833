"""Checkpoints of sharded training: every helper, other formats and modes, and what a crash leaves behind."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit_optim import AdamW, LowBitOptimizer, QuantizedState
from lowbit_optim.formats import FORMATS
from lowbit_optim.step import CHUNK
from lowbit_optim.weights import WEIGHT_MODES

from .launch import run_ranks
from .layouts import Weights, fill, fully_sharded, local_part, shard_like
from .matrix import differing, stored

pytestmark = pytest.mark.distributed

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = ((16, 1024), (17, 1280), (3, 32), (1,))
COMBINATIONS = [("int8", "split8"), ("int4", "stochastic"), ("fp8", "kahan"), ("bf16", "master"), ("fp32", "split16")]


def make(state: str, weights: str, sharded: bool = True, **options: Any) -> tuple[nn.Module, AdamW]:
    model = fill(Weights(*SHAPES), BF16)
    model = fully_sharded(model) if sharded else model
    settings = {"lr": 1e-2, "min_quantized_numel": 0, "backend": "eager", **options}
    return model, AdamW(model.parameters(), state=state, weights=weights, **settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for param in model.parameters():
        param.grad = shard_like(torch.randn(param.shape, generator=generator).to(param.dtype), param)
    optimizer.step()
    optimizer.zero_grad()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of everything on this rank."""
    return {
        f"{name}.{key}": stored(value).detach().clone()
        for name, param in model.named_parameters()
        for key, value in {"weight": param.detach(), **optimizer.state[param]}.items()
    }


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if differing(left[name], right[name])]


# The helpers -----------------------------------------------------------------------------------------------------


def through_helpers(rank: int) -> list[str]:
    """Every set of options: out of one run, into fresh objects, and on."""
    wrong = []
    options = [
        StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full, cpu_offload=offload)
        for flat, full, offload in itertools.product([False, True], [False, True], [False, True])
    ]
    # Torch's helper cannot set a full dict that is flattened, of whatever optimizer (KeyError in torch 2.13).
    options = [option for option in options if not (option.full_state_dict and option.flatten_optimizer_state_dict)]
    for state, weights in COMBINATIONS:
        model, optimizer = make(state, weights)
        for number in range(3):
            step(model, optimizer, number)
        before = contents(model, optimizer)
        weights_now = {name: param.detach().clone() for name, param in model.named_parameters()}
        # A state dict shares its tensors with the optimizer, which goes on.
        saved = [copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=option)) for option in options]
        step(model, optimizer, 3)
        later = contents(model, optimizer)
        for option, state_dict in zip(options, saved, strict=True):
            fresh, other = make(state, weights)
            with torch.no_grad():
                for name, param in fresh.named_parameters():
                    param.copy_(weights_now[name])
            whole_on_rank0 = option.full_state_dict and option.cpu_offload
            loading = StateDictOptions(
                flatten_optimizer_state_dict=option.flatten_optimizer_state_dict,
                full_state_dict=option.full_state_dict,
                broadcast_from_rank0=whole_on_rank0,
            )
            set_optimizer_state_dict(fresh, other, state_dict, options=loading)
            wrong += [f"{state} {weights} {option}: {name}" for name in differences(before, contents(fresh, other))]
            step(fresh, other, 3)
            wrong += [
                f"{state} {weights} {option}: {name} later" for name in differences(later, contents(fresh, other))
            ]
    return wrong


def test_every_helper_hands_the_state_back() -> None:  # C5, C8, C9
    assert run_ranks(2, through_helpers) == [[], []]


def gathered(rank: int, folder: Path) -> dict[str, Any]:
    """Save what rank 0 gathers, and report the weights two steps later."""
    results = {}
    for state, weights in COMBINATIONS:
        model, optimizer = make(state, weights)
        for number in range(3):
            step(model, optimizer, number)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = {
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
            "model": get_model_state_dict(model, options=options),
        }
        if rank == 0:
            torch.save(found, folder / f"{state}.pt")
        step(model, optimizer, 3)
        results[state] = {name: param.detach().full_tensor() for name, param in model.named_parameters()}  # type: ignore[operator]
    return results


def test_a_gathered_state_dict_loads_on_one_process(tmp_path: Path) -> None:  # C6, C8, C12
    later = run_ranks(2, gathered, tmp_path)[0]
    for state, weights in COMBINATIONS:
        found = torch.load(tmp_path / f"{state}.pt", weights_only=True)
        model, optimizer = make(state, weights, sharded=False)
        model.load_state_dict(found["model"])
        names = [name for name, _ in model.named_parameters()]
        by_name = found["optim"]["state"]
        groups = [{**group, "params": list(range(len(names)))} for group in found["optim"]["param_groups"]]
        optimizer.load_state_dict({"state": {i: by_name[n] for i, n in enumerate(names)}, "param_groups": groups})
        step(model, optimizer, 3)
        for name, param in model.named_parameters():
            # Rows of (17, 1280) fill whole blocks, so every shard of this model does: nothing is encoded anew.
            assert differing(param.detach(), later[state][name]) == 0, (state, name)
    # A process that knows torch alone is told what to allow; one that has imported this package loads it.
    script = f"import torch; torch.load(r'{tmp_path / 'int8.pt'}')"
    alone = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "rebuild_state" in alone.stderr
    subprocess.run([sys.executable, "-c", f"import lowbit_optim; {script}"], check=True)


def test_a_gathered_state_dict_is_as_small_as_the_state(tmp_path: Path) -> None:  # M3
    run_ranks(2, gathered, tmp_path)
    found = torch.load(tmp_path / "int8.pt", weights_only=True)["optim"]["state"]
    # The last of the four, of one element, has an empty shard of no whole block.
    assert [isinstance(entry["exp_avg"], QuantizedState) for entry in found.values()] == [True, True, True, False]


# Into other layouts, formats, modes and out of torch ---------------------------------------------------------------


def converted(rank: int) -> list[str]:
    """A whole state dict, and a sharded one, into another format and mode, sharded: as one process converts it."""
    wrong = []
    pairs = [*itertools.pairwise([*COMBINATIONS, COMBINATIONS[0]]), ("torch", ("int8", "split8"))]
    for source, target in pairs:
        runs = []
        for sharded in (False, True):
            model = fill(Weights(*SHAPES), BF16)
            model = fully_sharded(model) if sharded else model
            if source == "torch":
                first: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            else:
                options = {"state": source[0], "weights": source[1], "min_quantized_numel": 0, "backend": "eager"}
                first = AdamW(model.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
            step(model, first, 0)
            runs.append((model, first))
        (whole, whole_optimizer), (model, optimizer) = runs
        with torch.no_grad():  # torch's own sharded step rounds as its whole one, but start from the same bits
            for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                theirs.copy_(shard_like(mine.detach(), theirs))
        state, weights = target
        results = []
        for made, state_dict in (
            (whole, whole_optimizer.state_dict()),
            (model, whole_optimizer.state_dict()),
            (model, optimizer.state_dict()),
        ):
            second = AdamW(made.parameters(), state=state, weights=weights, min_quantized_numel=0, backend="eager")
            second.load_state_dict(state_dict)
            results.append([second.state[param] for param in made.parameters()])
        for (name, param), expected, *loaded in zip(model.named_parameters(), *results, strict=True):
            for kind, entry in zip(("whole", "sharded"), loaded, strict=True):
                for key in entry.keys() - {"step"}:
                    value = entry[key]
                    assert isinstance(value, DTensor)
                    if differing(stored(value), local_part(stored(expected[key]), param)):
                        wrong.append(f"{source} to {target}, {kind}: {name}.{key}")
    return wrong


def test_state_converts_as_it_loads_into_shards() -> None:  # C18
    assert run_ranks(2, converted) == [[], []]


# Asking for state is harmless ----------------------------------------------------------------------------------------


def asked(rank: int) -> list[str]:
    """What DCP's helpers and torchtitan do to create state, for every combination, with decay to tempt it."""
    wrong = []
    combinations = itertools.product(FORMATS, WEIGHT_MODES, (BF16, FP32))
    for state, weights, dtype in combinations:
        for lr in (1e-2, torch.tensor(1e-2)):
            if isinstance(lr, Tensor) and state != "int8":
                continue
            runs = []
            for ask in (False, True):
                model = fully_sharded(fill(Weights((1, 96), (64, 32)), dtype))
                optimizer = AdamW(
                    model.parameters(),
                    lr=lr,
                    state=state,
                    weights=weights,
                    weight_decay=0.5,
                    min_quantized_numel=0,
                    backend="eager",
                )
                before = [stored(param.detach()).clone() for param in model.parameters()]
                if ask:
                    get_optimizer_state_dict(model, optimizer)
                    for param, old in zip(model.parameters(), before, strict=True):
                        if differing(stored(param.detach()), old) or optimizer.state[param]["step"] != 0:
                            wrong.append(f"{state} {weights} {dtype}: asking changed something")
                    if type(optimizer.param_groups[0]["lr"]) is not type(lr):
                        wrong.append(f"{state}: lr became {optimizer.param_groups[0]['lr']!r}")
                step(model, optimizer, 0)
                runs.append(contents(model, optimizer))
            wrong += [f"{state} {weights} {dtype}: {name} after a step" for name in differences(*runs)]
    return wrong


def test_asking_for_sharded_state_changes_nothing() -> None:  # C1, C4
    assert run_ranks(2, asked) == [[], []]


def partly_stepped(rank: int) -> list[int]:
    """Only one of the parameters has had a gradient; then another is frozen."""
    model, optimizer = make("int8", "split8")
    params = list(model.parameters())
    params[0].grad = shard_like(torch.ones(params[0].shape, dtype=BF16), params[0])
    optimizer.step()
    found = get_optimizer_state_dict(model, optimizer)["state"]
    fresh, other = make("int8", "split8")
    set_optimizer_state_dict(fresh, other, get_optimizer_state_dict(model, optimizer))
    params[1].requires_grad_(False)
    again = get_optimizer_state_dict(model, optimizer)["state"]
    steps = [int(other.state[param]["step"]) for param in fresh.parameters()]
    return [len(found), len(again), *steps]


def test_parameters_without_gradients_keep_their_state() -> None:  # C3
    assert run_ranks(2, partly_stepped) == [[4, 4, 1, 0, 0, 0]] * 2


# Distributed checkpoint ----------------------------------------------------------------------------------------------


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }


def load_into(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: Any) -> None:
    found = parts_of(model, optimizer)
    dcp.load(found, checkpoint_id=folder, **options)
    set_model_state_dict(model, found["model"])
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, found["optim"], options=flat)


def saved_asynchronously(rank: int, folder: Path) -> list[str]:
    """What is saved is what was there when `async_save` was called, though training went on."""
    wrong = []
    for state, weights in COMBINATIONS:
        model, optimizer = make(state, weights)
        for number in range(3):
            step(model, optimizer, number)
        before = contents(model, optimizer)
        saving = dcp.async_save(parts_of(model, optimizer), checkpoint_id=folder / state)
        step(model, optimizer, 3)
        getattr(saving, "upload_completion", saving).result()
        fresh, other = make(state, weights)
        load_into(fresh, other, folder / state)
        wrong += [f"{state}: {name}" for name in differences(before, contents(fresh, other))]
    return wrong


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 saves tensors of the host as they are when it comes to them"
)
def test_async_save_holds_the_moment_of_the_call(tmp_path: Path) -> None:
    assert run_ranks(2, saved_asynchronously, tmp_path) == [[], []]


def loaded_as_another_format(rank: int, folder: Path) -> tuple[bool, bool]:
    """An int8 checkpoint read by DCP straight into int4 shards, and one of torch's into int8 shards."""
    model, optimizer = make("int8", "stochastic")
    plain = fully_sharded(fill(Weights(*SHAPES), BF16))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    near = []
    for made, other, name, into in ((model, optimizer, "int8", "int4"), (plain, reference, "torch", "int8")):
        step(made, other, 0)
        dcp.save(parts_of(made, other), checkpoint_id=folder / name)
        fresh, converted = make(into, "stochastic")
        # Torch's groups have other options than ours.
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        load_into(fresh, converted, folder / name, planner=planner)
        close = True
        for mine, theirs in zip(made.parameters(), fresh.parameters(), strict=True):
            expected = stored(other.state[mine]["exp_avg"]).float()
            kept = {name: stored(converted.state[theirs][name]) for name in ("exp_avg", "exp_avg_sq")}
            found = kept["exp_avg"] * kept["exp_avg_sq"].sqrt() if into == "int4" else kept["exp_avg"]
            assert isinstance(converted.state[theirs]["exp_avg"].to_local(), QuantizedState)
            assert converted.state[theirs]["step"] == 1
            # Half of a value, and where that is more, the smallest code of its block.
            largest = expected.abs().max() if expected.numel() else 0.0
            close = close and bool(((found - expected).abs() <= 0.51 * expected.abs() + 0.01 * largest).all())
        near.append(close)
    return near[0], near[1]


def test_dcp_reads_other_formats_and_torch(tmp_path: Path) -> None:  # C14, C18
    assert run_ranks(2, loaded_as_another_format, tmp_path) == [(True, True)] * 2


def torch_into_other_modes(rank: int, folder: Path) -> list[str]:
    """A checkpoint of torch's, read by DCP into fresh objects of every weight mode, whose state it does not have."""
    found = []
    model = fully_sharded(fill(Weights(*SHAPES), BF16))
    step(model, reference := torch.optim.AdamW(model.parameters(), lr=1e-2), 0)
    dcp.save(parts_of(model, reference), checkpoint_id=folder)
    for weights in WEIGHT_MODES:
        fresh = fully_sharded(fill(Weights(*SHAPES), BF16, seed=1))
        converted = AdamW(fresh.parameters(), weights=weights, backend="eager")
        try:
            load_into(fresh, converted, folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        except ValueError as error:
            found.append(f"{weights}: {error}")
            # As the message cannot say: through an optimizer of the saved kind.
            plain = torch.optim.AdamW(fresh.parameters())
            load_into(fresh, plain, folder)
            converted.load_state_dict(plain.state_dict())
        exact = converted.fp32_state_dict(fresh)
        for name, param in model.named_parameters():
            if differing(stored(exact[name]), stored(param.detach()).float()):
                found.append(f"{weights}: {name} is not what was loaded")
    return found


def test_dcp_never_leaves_a_master_copy_of_other_weights(tmp_path: Path) -> None:
    for found in run_ranks(2, torch_into_other_modes, tmp_path):
        assert [line.split(":")[0] for line in found] == ["master", "master/dithered"]
        assert all("master belongs to other weights than the model has" in line for line in found)


# Crashes -------------------------------------------------------------------------------------------------------------

STEPS, EVERY = 8, 2


class DyingWriter(dcp.FileSystemWriter):
    """Kills its process when its data is written but the checkpoint is not complete."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        super().write_data(*args, **kwargs).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, folder: Path, kill: str | None) -> dict[str, Tensor]:
    """Train, saving every other step; continue from the last complete checkpoint; optionally die on rank 1."""
    model, optimizer = make("int8", "split8")
    complete = sorted(path.parent for path in folder.glob("*/.metadata"))
    start = 0
    if complete:
        load_into(model, optimizer, complete[-1])
        start = int(complete[-1].name)
    for number in range(start, STEPS):
        step(model, optimizer, number)
        if rank == 1 and kill == "in training" and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if (number + 1) % EVERY == 0:
            writer = dcp.FileSystemWriter(folder / f"{number + 1:04}")
            if rank == 1 and kill == "in a save" and number + 1 == 6:
                writer = DyingWriter(folder / f"{number + 1:04}")
            dcp.save(parts_of(model, optimizer), storage_writer=writer)
    return contents(model, optimizer)


def incomplete_is_refused(rank: int, folder: Path) -> str:
    model, optimizer = make("int8", "split8")
    try:
        load_into(model, optimizer, folder)
    except BaseException as error:  # torch's own exception is not an Exception
        return type(error).__name__
    return "loaded"


@pytest.mark.parametrize("kill", ["in training", "in a save"])
def test_a_killed_run_resumes_as_if_undisturbed(tmp_path: Path, kill: str) -> None:
    undisturbed = run_ranks(2, train, tmp_path / "undisturbed", None)
    with pytest.raises(AssertionError, match=r"rank [01]"):
        run_ranks(2, train, tmp_path / "killed", kill)
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    complete = sorted(path.parent.name for path in (tmp_path / "killed").glob("*/.metadata"))
    assert complete == ["0002", "0004"]
    if kill == "in a save":
        assert left == ["0002", "0004", "0006"]
        assert run_ranks(2, incomplete_is_refused, tmp_path / "killed" / "0006") == ["CheckpointException"] * 2
    resumed = run_ranks(2, train, tmp_path / "killed", None)
    for mine, theirs in zip(resumed, undisturbed, strict=True):
        assert differences(mine, theirs) == []


# Memory --------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made under this mode that live at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if type(leaf) is Tensor}
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage not in self._known and id(storage) not in given:
                    self._known.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def memory(rank: int, folder: Path) -> dict[str, float]:
    """Peaks of a step and of a save, as shares of one parameter's decoded shard."""
    model = fully_sharded(fill(Weights(*[(2048, 2048)] * 6), BF16))
    optimizer: LowBitOptimizer = AdamW(model.parameters(), state="int8", weights="split8", backend="eager")
    step(model, optimizer, 0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    shard = 2048 * 2048 // 2
    with LiveBytes() as of_step:
        optimizer.step()
    optimizer.zero_grad()
    with LiveBytes() as of_save:
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    return {"step": of_step.peak / CHUNK, "save": of_save.peak / (2 * 4 * shard)}


def test_no_rank_decodes_more_than_a_shard_at_a_time(tmp_path: Path) -> None:  # M1
    for peaks in run_ranks(2, memory, tmp_path):
        # A step works through chunks: some 30 fp32 temporaries of one, whatever the parameter's size.
        assert 8 < peaks["step"] < 160, peaks
        # Both moments of one parameter decoded would be 1; of all six, 6. Codes are copied once on their way out.
        assert peaks["save"] < 1, peaks
