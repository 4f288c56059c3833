"""Supervised fine-tuning with TRL's SFTTrainer, which takes an optimizer as the Trainer does.

    python examples/huggingface/sft.py --output runs/sft --steps 20

Nothing is downloaded: the tokenizer is trained here, on the same text as the model. In a run of yours, give SFTTrainer
the name of a model, and it loads both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from lowbit_optim import PRESETS, AdamW

VOCABULARY = 512


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer trained on some texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=128
    )


def main(arguments: Sequence[str] | None = None) -> SFTTrainer:
    """Fine-tune on questions for sections of Python's manual, or go on from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="balanced")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(arguments)
    names = sorted(topics)
    examples = {
        "prompt": [f"What does the manual say about {name}?\n" for name in names],
        "completion": [topics[name][:300] for name in names],
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config).to(torch.bfloat16),
        SFTConfig(
            output_dir=str(args.output),
            max_steps=args.steps,
            save_steps=args.save_every,
            per_device_train_batch_size=8,
            max_length=128,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            bf16=False,  # the weights themselves are bf16: nothing to cast
        ),
        train_dataset=Dataset.from_dict(examples),
        processing_class=tokenizer_of(examples["completion"]),
        optimizer_cls_and_kwargs=(AdamW, {"lr": args.lr, "preset": args.preset}),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    return trainer


if __name__ == "__main__":
    main()
