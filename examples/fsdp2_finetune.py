"""Train a small byte-level transformer in bf16 under FSDP2, with checkpoints that resume on any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2_finetune.py --preset balanced --steps 60 --checkpoint-dir runs/a
    torchrun --nproc-per-node 3 examples/fsdp2_finetune.py --preset balanced --steps 90 --checkpoint-dir runs/a --resume

Runs with gloo where there is no GPU. The text is Python's own manual; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from lowbit_optim import PRESETS, from_preset, param_policy, step_in_backward

LENGTH, WIDTH, DEPTH, HEADS = 128, 128, 2, 4


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width) of the same."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for (batch, length) of bytes."""
        x = self.bytes(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


def batch_of(step: int, text: Tensor, size: int, device: torch.device) -> Tensor:
    """Return this rank's rows of a batch that depends on the step alone: not on ranks, not on earlier steps."""
    starts = torch.randint(len(text) - LENGTH, (size,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[dist.get_rank() :: dist.get_world_size()].to(device)


def lr_at(step: int, peak: float, warmup: int, steps: int) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


class Progress:
    """Everything that a checkpoint holds, as DCP asks for it; tensors are saved as shards and loaded as any others."""

    # With flattened names, each parameter finds its state whatever the number of ranks or groups.
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and the number of steps taken."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Set the model first, then the optimizer, whose correction bits are relative to the weights."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
            options=self.options,
        )
        self.step = found["step"]


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def newest_complete(folder: Path) -> Path | None:
    """Return the newest checkpoint that was saved to the end: DCP writes `.metadata` last. Rank 0 decides for all."""
    chosen: list[Path | None] = [None]
    if dist.get_rank() == 0:
        for path in sorted(folder.glob("step-*"), reverse=True):
            if (path / ".metadata").exists():
                chosen = [path]
                break
            say(f"skipped {path.name}: it is incomplete")
    dist.broadcast_object_list(chosen)
    return chosen[0]


def parse() -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="balanced")
    parser.add_argument("--backend", default="auto", help="of the optimizer: auto, compile or eager")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients together; 0 is no limit")
    parser.add_argument("--release", action="store_true", help="step within the backward pass; needs --clip 0")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    args = parser.parse_args()
    if args.release and args.clip:
        parser.error("--release uses each gradient before the norm of all is known: add --clip 0")
    if args.batch < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--batch {args.batch} leaves ranks without data")
    return args


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the start or from a checkpoint, with a line for each step."""
    torch.manual_seed(0)  # every rank makes the same model, and keeps its shards of it
    model = ByteTransformer().to(device, torch.bfloat16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = from_preset(param_policy(model), args.preset, lr=args.lr, backend=args.backend)
    if args.release:
        step_in_backward(model, optimizer)

    progress = Progress(model, optimizer)
    newest = newest_complete(args.checkpoint_dir)
    if newest and not args.resume:
        raise SystemExit(f"{args.checkpoint_dir} holds checkpoints: add --resume, or choose another folder")
    if newest:
        dcp.load({"progress": progress}, checkpoint_id=newest)
    say(f"resumed from {newest.name}" if newest else "starting at step 0")

    text = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    while progress.step < args.steps:
        lr = lr_at(progress.step, args.lr, args.warmup, args.steps)
        for group in optimizer.param_groups:  # before the backward pass, which steps if --release
            group["lr"] = lr
        rows = batch_of(progress.step, text, args.batch, device).long()
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        loss = loss / (args.batch * LENGTH)
        # FSDP averages over ranks; what is wanted is the sum, since each loss is a share of the whole batch's.
        (loss * dist.get_world_size()).backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        say(f"step {progress.step:4} loss {total.item():.6f} lr {lr:.2e}")
        if progress.step % args.save_every == 0 or progress.step == args.steps:
            dcp.save({"progress": progress}, checkpoint_id=args.checkpoint_dir / f"step-{progress.step:06}")
    say(f"state: {optimizer.memory_bytes():,} bytes on rank 0")
    # Gloo's threads may still hold tensors of the last collective, and abort if they let go of them while Python ends
    # (pytorch issue 190489). One that holds none gives them the time.
    dist.barrier()


def main() -> None:
    """Set the process group up, train, and take it down."""
    args = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
