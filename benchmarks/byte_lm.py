"""A byte-level transformer and the text that every Python ships, so that nothing has to be downloaded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Standard library modules whose sources make the text for fine-tuning.
SOURCE_MODULES = (
    "argparse",
    "ast",
    "inspect",
    "logging",
    "pathlib",
    "shutil",
    "subprocess",
    "tarfile",
    "typing",
    "unittest.mock",
)


def manual_text() -> bytes:
    """Return the text of Python's manual, as `help()` shows it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def source_text() -> bytes:
    """Return the source code of some of Python's standard library."""
    for name in SOURCE_MODULES:
        __import__(name)
    return "\n\n".join(inspect.getsource(sys.modules[name]) for name in SOURCE_MODULES).encode()


class Corpus:
    """Bytes split into a training part and the last tenth for validation.

    Args:
        text: the bytes.
        context: tokens per sequence.
        batch: sequences per training batch.
    """

    def __init__(self, text: bytes, context: int, batch: int) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        cut = len(data) * 9 // 10
        self._train, self._valid = data[:cut], data[cut:]
        self._context, self._batch = context, batch

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield random training batches of shape (batch, context + 1), the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self._train) - self._context - 1, (self._batch,), generator=generator)
            yield torch.stack([self._train[start : start + self._context + 1] for start in starts])

    def validation(self, sequences: int) -> Tensor:
        """Return evenly spread validation sequences of shape (sequences, context + 1)."""
        starts = torch.linspace(0, len(self._valid) - self._context - 1, sequences).long()
        return torch.stack([self._valid[start : start + self._context + 1] for start in starts])


class ByteTransformer(nn.Module):
    """A small pre-norm GPT over bytes.

    Args:
        width: model dimension.
        layers: number of blocks.
        heads: attention heads.
        context: longest sequence.
    """

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        init_gpt(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, 256)."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_gpt(model: nn.Module, layers: int) -> None:
    """Draw matrices as GPT-2 does: std 0.02, less for those that write into the residual stream."""
    for name, param in model.named_parameters():
        if param.ndim == 2:
            deep = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)


class Block(nn.Module):
    """Attention, causal or not, and a GELU network, each with a residual connection."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def call_in_fp32(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a model makes of its inputs, computed in fp32.

    Weights are seen in the precision they are stored in; activations are fp32, so that what differs between recipes
    is the optimizer alone, and a CPU without bf16 units is not slowed down. Gradients have the dtype of the weights.
    """
    weights = {name: param.float() for name, param in model.named_parameters()}
    outputs: Tensor = torch.func.functional_call(model, weights, (inputs,))
    return outputs


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-byte loss in nats, computed in fp32."""
    logits = call_in_fp32(model, tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))
