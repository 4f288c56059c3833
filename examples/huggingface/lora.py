"""Train a LoRA adapter with PEFT: only its weights are trained, and only they have optimizer state.

    python examples/huggingface/lora.py --output runs/lora --steps 30

PEFT keeps adapters in fp32 beside a bf16 model. Such weights lose no updates, so there is nothing for a weight mode to
do; `--adapters bf16` makes them bf16. Matrices of an adapter are small, and those below 4,096 elements keep fp32 state
unless `min_quantized_numel` says otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from trainer import rows, small_llama
from transformers import Trainer, TrainingArguments

from lowbit_optim import PRESETS, AdamW


def main(arguments: Sequence[str] | None = None) -> Trainer:
    """Train an adapter, or go on from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="balanced")
    parser.add_argument("--adapters", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--min-quantized-numel", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(arguments)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(small_llama(torch.bfloat16), config, autocast_adapter_dtype=args.adapters == "fp32")
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        save_steps=args.save_every,
        per_device_train_batch_size=8,
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    options = {"lr": args.lr, "preset": args.preset, "min_quantized_numel": args.min_quantized_numel}
    trainer = Trainer(model, settings, train_dataset=rows(), optimizer_cls_and_kwargs=(AdamW, options))
    trainer.train(resume_from_checkpoint=args.resume)
    return trainer


if __name__ == "__main__":
    main()
