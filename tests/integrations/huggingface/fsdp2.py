"""The loop of `examples/huggingface/accelerate_loop.py` under accelerate's FSDP2, on CPUs.

accelerate chooses FSDP only where there are accelerators. Its code for FSDP2 runs on CPUs all the same, once its state
says so; nothing else is replaced here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.integrations.helpers import assert_same

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/huggingface"))
import accelerate_loop

#: Presets, with how accelerate gathers state for its checkpoints and how it loads models.
RUNS = (
    ("balanced", "SHARDED_STATE_DICT", False),
    ("reference", "FULL_STATE_DICT", False),
    ("compact", "SHARDED_STATE_DICT", True),
)


def train(arguments: list[str], plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """Train as the example does, and return the gathered weights and state of the end."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    model, optimizer = accelerate_loop.train(accelerate_loop.parse(arguments), accelerator)
    assert optimizer.optimizer.state.keys() == set(model.parameters())
    weight = model.model.layers[0].mlp.up_proj.weight
    moment = optimizer.optimizer.state[weight]["exp_avg"]
    assert moment.placements == weight.placements
    assert moment.to_local().shape == weight.to_local().shape != weight.shape
    everything = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=everything)
    return {"model": weights, "optimizer": state}


def main() -> None:
    """Train, save, resume and compare, for each of the runs; arguments are those of the example."""
    for preset, kind, efficient in RUNS:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            state_dict_type=kind,
            cpu_ram_efficient_loading=efficient,
            reshard_after_forward=True,
        )
        arguments = [*sys.argv[1:], "--preset", preset, "--output", preset]
        whole = train(arguments, plugin)
        # From one process: lines of two can end up in each other.
        if torch.distributed.get_rank() == 0:
            print(f"resume {preset}", flush=True)
        assert_same(train([*arguments, "--resume"], plugin), whole, preset)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
