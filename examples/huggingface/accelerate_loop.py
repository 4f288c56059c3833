"""A training loop of one's own with accelerate, with gradient accumulation, clipping, a schedule and checkpoints.

    python examples/huggingface/accelerate_loop.py --output runs/loop --steps 20
    python examples/huggingface/accelerate_loop.py --output runs/loop --steps 20 --resume

On several processes (`accelerate launch` or `torchrun`), with DDP or FSDP2, nothing in this file changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from trainer import rows, small_llama

from lowbit_optim import PRESETS, AdamW


def train(args: argparse.Namespace, accelerator: Accelerator) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train, with a line for each step, and return the prepared model and optimizer."""
    model = small_llama(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=args.lr, preset=args.preset)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)
    loader = DataLoader(rows(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    # accelerate counts this object, which has a state of its own, as part of its checkpoints.
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = args.output / "checkpoint"
    if args.resume:
        accelerator.load_state(str(saved))
        loader = accelerator.skip_first_batches(loader, progress.step * accelerator.gradient_accumulation_steps)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        progress.step += 1
        accelerator.print(f"step {progress.step:4} loss {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:.2e}")
        if progress.step == args.save_at:
            accelerator.save_state(str(saved))
        if progress.step == args.steps:
            break
    return model, optimizer


class Progress:
    """The number of steps taken."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"step": self.step}

    def load_state_dict(self, found: dict[str, int]) -> None:
        """Take over what a checkpoint kept."""
        self.step = found["step"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="balanced")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-at", type=int, default=10, help="the step after which to save")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # No mixed_precision: the weights are bf16, and accelerate would make FSDP2's weights fp32 again.
    train(parse(), Accelerator(gradient_accumulation_steps=2))
