"""The loop of `examples/huggingface/accelerate_loop.py` under accelerate's FSDP2, on CPUs.

accelerate chooses FSDP only where there are accelerators. Its code for FSDP2 runs on CPUs all the same, once its state
says so; nothing else is replaced here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/huggingface"))
import accelerate_loop


def main() -> None:
    """Train as the example does, and keep the gathered weights and state of the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-dict", required=True)
    parser.add_argument("--efficient-loading", type=int, required=True)
    mine, rest = parser.parse_known_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type=mine.state_dict,
        cpu_ram_efficient_loading=bool(mine.efficient_loading),
        reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    args = accelerate_loop.parse(rest)
    model, optimizer = accelerate_loop.train(args, accelerator)
    assert optimizer.optimizer.state.keys() == set(model.parameters())
    weight = model.model.layers[0].mlp.up_proj.weight
    moment = optimizer.optimizer.state[weight]["exp_avg"]
    assert moment.placements == weight.placements
    assert moment.to_local().shape == weight.to_local().shape != weight.shape
    everything = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=everything)
    if accelerator.is_main_process:
        name = "end-resumed.pt" if args.resume else "end.pt"
        torch.save({"model": weights, "optimizer": state}, args.output / name)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
