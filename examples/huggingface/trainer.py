"""Train a small Llama in bf16 with the Trainer of transformers, with 8-bit state and correction bits for the weights.

    python examples/huggingface/trainer.py --output runs/trainer --steps 30

If it was interrupted, the same with `--resume` goes on from its last checkpoint. Leave the number of steps as it was:
the schedule depends on it.

The text is Python's own manual, read as bytes; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lowbit_optim import PRESETS, AdamW

LENGTH = 64


def small_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a small model over bytes; in a run of yours, `from_pretrained(..., dtype=torch.bfloat16)`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).to(dtype)


def rows() -> list[dict[str, torch.Tensor]]:
    """Return the manual, cut into rows of bytes."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)]


def make_trainer(
    output: Path, optimizer: tuple[type, dict[str, Any]], dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Trainer:
    """Return a Trainer whose optimizer is a class of this library, or any other.

    Args:
        output: folder for checkpoints.
        optimizer: the class and its arguments. The learning rate must be among them: the Trainer hands its own
            `learning_rate` only to optimizers that it knows by name.
        dtype: of the weights.
        **settings: any of `TrainingArguments`.
    """
    defaults = {
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(output_dir=str(output), **{**defaults, **settings})
    # Weight decay comes from TrainingArguments: the Trainer makes two groups, one without for norms and biases.
    return Trainer(small_llama(dtype), arguments, train_dataset=rows(), optimizer_cls_and_kwargs=optimizer)


def main(arguments: Sequence[str] | None = None) -> Trainer:
    """Train, or go on from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="balanced")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(arguments)
    trainer = make_trainer(
        args.output,
        (AdamW, {"lr": args.lr, "preset": args.preset}),
        max_steps=args.steps,
        save_steps=args.save_every,
        weight_decay=0.01,
        warmup_steps=5,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    return trainer


if __name__ == "__main__":
    main()
