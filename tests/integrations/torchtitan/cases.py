"""torchtitan's container, scheduler and configs, on its Llama 3 and `examples/torchtitan/lowbit_llama.py`.

Its trainer needs a GPU. What it does with an optimizer needs none: parse a config, build the container and the
scheduler on a sharded model, step both, save and load both with DCP.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import ScaledDotProductAttention

import lowbit_optim
from tests.integrations.helpers import EXAMPLES, assert_close, assert_same

sys.path.insert(0, str(EXAMPLES / "torchtitan"))
STEPS, SAVED, TOKENS = 5, 3, 32


def parsed(name: str, *options: str) -> Any:
    """Return a config of the example, read as `python -m torchtitan.train` reads it, with two layers of its model."""
    config = ConfigManager().parse_args(["--module", "lowbit_llama", "--config", name, *options])
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        # FlexAttention, which it has, is for GPUs.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def model_of(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the config's model with its weights in the config's dtype, or another."""
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states()
    for param in model.parameters():
        param.data = param.data.to(dtype or getattr(torch, config.training.dtype))
    return model


def trained(config: Any, model: Any) -> tuple[Any, Any]:
    """Return the container and the scheduler for a model, as torchtitan's trainer builds them."""
    container = config.optimizer.build(model_parts=[model])
    return container, config.lr_scheduler.build(optimizers=container, training_steps=STEPS)


def step(model: Any, container: Any, scheduler: LRSchedulersContainer, seed: int) -> float:
    """Take one step and return its loss. Every rank has the same rows, so that all numbers of ranks agree exactly."""
    tokens = torch.randint(2048, (2, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    container.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    container.step()
    scheduler.step()
    return loss.item()


def plain(value: Any) -> Any:
    """Return a whole tensor of decoded values."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.dequantize() if hasattr(value, "dequantize") and hasattr(value, "spec") else value.detach().clone()
    return value


def contents(model: Any, container: Any, scheduler: Any) -> dict[str, Any]:
    """Return all that has to be the same after a resume, gathered."""
    parts = {"model": model.state_dict(), "optimizer": container.state_dict(), "scheduler": scheduler.state_dict()}
    return {name: {key: plain(value) for key, value in part.items()} for name, part in parts.items()}


def by_parameter(model: Any, container: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the class of the optimizer and the state of each parameter."""
    owners = {
        param: optimizer for optimizer in container for group in optimizer.param_groups for param in group["params"]
    }
    return {
        name: (f"{type(owners[param]).__module__}.{type(owners[param]).__name__}", owners[param].state[param])
        for name, param in model.named_parameters()
    }


# Several processes ---------------------------------------------------------------------------------------------------


def run_ranks(world: int, folder: Path, function: Callable[..., Any], *args: Any) -> None:
    """Call a function on several gloo processes, which are forked so that torchtitan is imported once."""
    context = multiprocessing.get_context("fork")
    store = folder / f"store-{time.monotonic_ns()}"
    processes = [context.Process(target=_rank, args=(rank, world, store, function, args)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 200
    try:
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, f"exit codes {codes}"


def _rank(rank: int, world: int, store: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()


def sharded(config: Any, world: int) -> Any:
    model = model_of(config)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (*model.layers.values(), model):
        fully_shard(layer, mesh=mesh)
    return model


def everything(model: Any, container: Any, scheduler: Any) -> dict[str, Any]:
    """Return what torchtitan saves, in its order; the wrapper joins weights that the model's state dict has split."""
    return {"model": ModelWrapper(model), "optimizer": container, "lr_scheduler": scheduler}


def save_and_go_on(rank: int, world: int, name: str, folder: Path) -> None:
    config = parsed(name)
    model = sharded(config, world)
    container, scheduler = trained(config, model)
    losses = []
    for seed in range(STEPS):
        losses.append(step(model, container, scheduler, seed))
        if seed + 1 == SAVED:
            dcp.save(everything(model, container, scheduler), checkpoint_id=folder / "checkpoint")
    assert losses[-1] < losses[0], losses
    end = contents(model, container, scheduler)
    if rank == 0:
        torch.save((end, losses), folder / "undisturbed.pt")


def resume(rank: int, world: int, name: str, folder: Path) -> None:
    config = parsed(name)
    model = sharded(config, world)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    container, scheduler = trained(config, model)
    dcp.load(everything(model, container, scheduler), checkpoint_id=folder / "checkpoint")
    losses = [step(model, container, scheduler, seed) for seed in range(SAVED, STEPS)]
    end = contents(model, container, scheduler)
    if rank == 0:
        torch.save((end, losses), folder / f"resumed-{world}.pt")


def reshards(folder: Path, name: str) -> str:
    """Save on 2 ranks, load on 1, 2 and 4, go on, and compare with the run that was not interrupted."""
    run_ranks(2, folder, save_and_go_on, name, folder)
    expected, losses = torch.load(folder / "undisturbed.pt", weights_only=False)
    for world in (1, 2, 4):
        run_ranks(world, folder, resume, name, folder)
        found, after = torch.load(folder / f"resumed-{world}.pt", weights_only=False)
        assert after == losses[SAVED:], (world, after, losses)
        assert_same(found, expected, f"{world} ranks")
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}; 1, 2 and 4 ranks end with the same bits"


# Cases ---------------------------------------------------------------------------------------------------------------


def reshard(folder: Path) -> str:
    """One optimizer for all parameters."""
    return reshards(folder, "llama3_debugmodel_lowbit")


def reshard_mixed(folder: Path) -> str:
    """torch's AdamW for norms, and four choices of this library's for the rest."""
    return reshards(folder, "llama3_debugmodel_mixed")


def config_line(folder: Path) -> str:
    """Configs come through torchtitan's own parser, and the command line changes the preset."""
    for options, stored in ((), "int8/b32/signed"), (("--optimizer.preset", "minimal"), "int4/b32/ratio"):
        config = parsed("llama3_debugmodel_mixed", *options)
        model = model_of(config)
        container, scheduler = trained(config, model)
        step(model, container, scheduler, 0)
        found = by_parameter(model, container)

        def spec(name: str, found: Any = found) -> tuple[str, str, bool]:
            owner, state = found[name]
            return owner, getattr(state["exp_avg"], "spec", str(state["exp_avg"].dtype)), "correction" in state

        assert spec("layers.0.ffn_norm.weight") == ("torch.optim.adamw.AdamW", "torch.bfloat16", False)
        ours = "lowbit_optim.optimizers."
        assert spec("tok_embeddings.weight") == (f"{ours}AdamW", "torch.float32", False)
        assert spec("layers.1.feed_forward.w2.weight") == (f"{ours}AdamW", "int4/b32/ratio", True)
        assert spec("lm_head.weight") == (f"{ours}AdamW8bit", "int8/b32/signed", True)
        assert spec("layers.0.attention.wo.weight") == (f"{ours}AdamW", stored, False)
    config.optimizer.param_groups[-1].optimizer_name = "AdamW8bit"
    for change, message in (
        ({}, "Optimizer AdamW8bit not added; did you mean 'lowbit_optim.AdamW8bit'?"),
        ({"preset": "ballanced"}, "preset: unknown 'ballanced'"),
    ):
        for name, value in change.items():
            setattr(config.optimizer, name, value)
        try:
            config.optimizer.build(model_parts=[model])
        except (NotImplementedError, ValueError) as error:
            if message not in str(error):
                raise
        else:
            raise AssertionError("a name that does not exist was accepted")
    return f"{len(list(container))} optimizers"


def init_state(folder: Path) -> str:
    """torchtitan's request for state changes no weight and counts no step, in every preset."""
    for preset in lowbit_optim.PRESETS:
        config = parsed("llama3_debugmodel_lowbit", "--optimizer.preset", preset)
        # Six presets, two steps each: not worth a compiler.
        config.optimizer.param_groups[0].optimizer_kwargs["backend"] = "eager"
        asked, never = model_of(config), model_of(config)
        (container, scheduler), others = trained(config, asked), trained(config, never)
        lrs = [group["lr"] for optimizer in container for group in optimizer.param_groups]
        before = [param.detach().clone() for param in asked.parameters()]
        for optimizer in container:
            init_optim_state(optimizer)
        assert_same([param.detach() for param in asked.parameters()], before, preset)
        assert lrs == [group["lr"] for optimizer in container for group in optimizer.param_groups]
        entries = [state for _, state in by_parameter(asked, container).values()]
        assert all(float(state["step"]) == 0 and len(state) > 2 for state in entries), preset
        # A save before the first step is harmless too.
        assert sum(key.endswith(".step") for key in container.state_dict()) == len(entries)
        for seed in range(2):
            assert step(asked, container, scheduler, seed) == step(never, *others, seed)
        assert_same(contents(asked, container, scheduler), contents(never, *others), preset)
    return f"presets {', '.join(lowbit_optim.PRESETS)}"


def equals_torch(folder: Path) -> str:
    """With fp32 weights and state, losses are those of torchtitan's default_adamw up to rounding."""
    from lowbit_optim.integrations.torchtitan import default_lowbit

    losses = []
    for optimizer in default_lowbit(lr=8e-4, preset=None, state="fp32"), default_adamw(lr=8e-4):
        config = parsed("llama3_debugmodel_lowbit")
        config.optimizer = optimizer
        model = model_of(config, torch.float32)
        container, scheduler = trained(config, model)
        losses.append([step(model, container, scheduler, seed) for seed in range(STEPS)])
        assert losses[-1][-1] < losses[-1][0], losses
    return f"losses apart by {assert_close(*losses, 2e-6):.0e}"


CASES: dict[str, Callable[[Path], str | None]] = {
    "config": config_line,
    "init-optim-state": init_state,
    "fp32-is-torch": equals_torch,
    "reshard": reshard,
    "reshard-mixed": reshard_mixed,
}
