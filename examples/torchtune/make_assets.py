"""Make a tiny tokenizer, data set and Llama 2 checkpoint in ./toy, so that the configs here run without a download.

    python examples/torchtune/make_assets.py
    tune run full_finetune_single_device --config examples/torchtune/from_preset.yaml

With a model of your own you need none of this: the `optimizer` section of the configs is all that is new.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import sentencepiece
import torch
from torchtune.models.llama2 import llama2

TEXT = "one two three four five sum of and the cat dog house river sees runs near under red blue small a"


def main() -> None:
    """Write ./toy."""
    folder = Path("toy")
    folder.mkdir(exist_ok=True)
    draw, vocabulary = random.Random(0), TEXT.split()
    rows = [{"input": draw.choices(vocabulary, k=6), "output": draw.choices(vocabulary, k=4)} for _ in range(64)]
    texts = [{key: " ".join(words) for key, words in row.items()} for row in rows]
    (folder / "data.json").write_text(json.dumps(texts))
    (folder / "corpus.txt").write_text("\n".join(text for row in texts for text in row.values()))
    # Llama 3's tokenizer would need an embedding of 128,256 rows for its special tokens.
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=-1,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    torch.manual_seed(0)
    model = llama2(vocab_size=512, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=128)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.02)
    torch.save(model.bfloat16().state_dict(), folder / "model.pt")


if __name__ == "__main__":
    main()
