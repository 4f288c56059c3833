"""Tasks in which precision matters: a model, its batches, a loss and a validation set, from a seed.

All start from weights that bf16 can hold, so that recipes in bf16 and fp32 leave from the same point. Weights are
stored as the recipe says and computed with in fp32 (`call_in_fp32`); gradients have the dtype of the weights.
"""

from __future__ import annotations

import fcntl
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..byte_lm import Block, ByteTransformer, Corpus, call_in_fp32, init_gpt, loss_of, manual_text, source_text
from ..harness import warmed_up

CONTEXT = 64
PRETRAIN_LR = 2e-3
#: Where the pretrained model and the reference's end points are kept; not committed.
CACHE = Path(__file__).parents[1] / "results" / "cache"


@dataclass(frozen=True)
class Problem:
    """One task, ready to train.

    Attributes:
        model: fp32 weights, each a value that bf16 can hold.
        batches: training batches, without end.
        loss: mean loss of a batch, from the model in whatever dtype its weights have.
        validation: batches of equal size that the final loss is the mean over.
    """

    model: nn.Module
    batches: Iterator[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    validation: Sequence[Any]

    def loss_of(self, batch: Any) -> Tensor:
        """Return the model's mean loss of a batch, on the model's device."""
        device = next(self.model.parameters()).device
        return self.loss(self.model, tree_map(lambda tensor: tensor.to(device), batch))


@dataclass(frozen=True)
class Settings:
    """What a run varies beside its task.

    Attributes:
        seed: of the start and of the batches.
        scale: factor on widths and batch sizes; 1 is for one CPU core, 8 and more for a GPU.
        shrink: divisor of the number of steps; 1 in full, more under `--quick`.
        device: to train on.
    """

    seed: int = 0
    scale: int = 1
    shrink: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Task:
    """What is trained, how long, and at which learning rate.

    Attributes:
        name: value of the CSV's column.
        steps: number of steps in full.
        lrs: by optimizer, the reference's learning rates. More than one make a run each.
        build: makes the problem.
        final: share of the learning rate that is left at the end of the linear decay.
        clip: norm that gradients are clipped to, or None.
        sweep: whether the presets are also run at half and twice the learning rate.
        parts: names of the sets of recipes that run on it.
    """

    name: str
    steps: int
    lrs: Mapping[str, tuple[float, ...]]
    build: Callable[[Settings], Problem]
    final: float = 0.1
    clip: float | None = 1.0
    sweep: bool = True
    parts: frozenset[str] = field(default_factory=frozenset)

    def steps_in(self, settings: Settings) -> int:
        """Return the number of steps of a run."""
        return max(self.steps // settings.shrink, 10)


def round_start(model: nn.Module) -> nn.Module:
    """Round weights to values that bf16 can hold, in place."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    return model


def train(problem: Problem, optimizer: torch.optim.Optimizer, steps: int, task: Task) -> Iterator[Callable[[], None]]:
    """Yield, at each step and after the backward pass, the call that takes the optimizer's step.

    lr rises over the first twentieth and then falls linearly to the task's final share.
    """
    schedule = warmed_up(optimizer, steps, task.final)
    for batch in itertools.islice(problem.batches, steps):
        problem.loss_of(batch).backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(problem.model.parameters(), task.clip)
        yield optimizer.step
        schedule.step()
        optimizer.zero_grad()


# Bytes of text --------------------------------------------------------------------------------------------------------


def byte_model(scale: int) -> ByteTransformer:
    """Return the byte transformer of the text tasks, 126 thousand parameters at scale 1."""
    return ByteTransformer(width=64 * scale, layers=2, heads=4, context=CONTEXT)


def _pretrain(settings: Settings, batch: int) -> Problem:
    torch.manual_seed(settings.seed)
    model = round_start(byte_model(settings.scale))
    corpus = Corpus(manual_text(), CONTEXT, batch * settings.scale)
    return Problem(model, corpus.batches(1 + settings.seed), loss_of, [corpus.validation(256)])


def pretrained(settings: Settings) -> dict[str, Tensor]:
    """Return the weights that fine-tuning starts from: `pretrain` in fp32, seed 0; trained once and kept on disk."""
    task = TASKS["pretrain"]
    once = Settings(0, settings.scale, settings.shrink)
    steps = task.steps_in(once)
    path = CACHE / f"pretrained-x{once.scale}-{steps}.pt"
    CACHE.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            problem = task.build(once)
            problem.model.to(settings.device)
            optimizer = torch.optim.AdamW(problem.model.parameters(), lr=PRETRAIN_LR, fused=True)
            for step in train(problem, optimizer, steps, task):
                step()
            torch.save(problem.model.state_dict(), path)
    weights: dict[str, Tensor] = torch.load(path, weights_only=True, map_location="cpu")
    return weights


def _finetune(settings: Settings) -> Problem:
    model = byte_model(settings.scale)
    model.load_state_dict(pretrained(settings))
    corpus = Corpus(source_text(), CONTEXT, 16 * settings.scale)
    return Problem(round_start(model), corpus.batches(1 + settings.seed), loss_of, [corpus.validation(256)])


# Words ----------------------------------------------------------------------------------------------------------------

VOCABULARY, WORDS_BEFORE = 8192, 4


class WordModel(nn.Module):
    """Predicts a word from the ones before it (a feed-forward language model): nearly all weights are embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(WORDS_BEFORE * width, 2 * width)
        self.mix = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits of shape (batch, VOCABULARY) from words of shape (batch, WORDS_BEFORE)."""
        hidden = F.gelu(self.hidden(self.embed(words).flatten(1)))
        return self.head(self.norm(self.mix(hidden)))


def word_ids() -> Tensor:
    """Return manual and sources as ids of words and signs, most frequent first; rarer ones share the last id."""
    words = re.findall(r"\w+|[^\w\s]", (manual_text() + source_text()).decode())
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    return torch.tensor([ranks.get(word, VOCABULARY - 1) for word in words])


def _word_loss(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(call_in_fp32(model, words[:, :-1]), words[:, -1])


def _sparse_embedding(settings: Settings) -> Problem:
    torch.manual_seed(settings.seed)
    model = round_start(WordModel(32 * settings.scale))
    windows = word_ids().unfold(0, WORDS_BEFORE + 1, 1)
    # Every tenth stretch of a thousand words is for validation, so that both parts have all kinds of text.
    stretch = torch.arange(len(windows)) // 1000 % 10
    known, unseen = windows[stretch < 9], windows[stretch == 9]
    generator = torch.Generator().manual_seed(1 + settings.seed)

    def batches() -> Iterator[Tensor]:
        while True:
            yield known[torch.randint(len(known), (192 * settings.scale,), generator=generator)]

    return Problem(model, batches(), _word_loss, unseen[: len(unseen) // 4096 * 4096].split(4096))


# Digits ---------------------------------------------------------------------------------------------------------------

PATCHES, SMOOTHING = 16, 0.1


class DigitTransformer(nn.Module):
    """A small ViT over 2x2 patches of 8x8 images."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.position = nn.Embedding(PATCHES, width)
        self.blocks = nn.ModuleList(Block(width, heads=4, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        init_gpt(self, layers)
        # At the size of a text model's, places do not tell apart for hundreds of steps.
        nn.init.normal_(self.patch.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, 10) from images of shape (batch, 8, 8)."""
        patches = F.unfold(images[:, None], kernel_size=2, stride=2).transpose(1, 2)
        x = self.patch(patches) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def _digit_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    # Smoothed labels put a floor under the loss, so that a gap in percent means something.
    return F.cross_entropy(call_in_fp32(model, images), labels, label_smoothing=SMOOTHING)


def _vision(settings: Settings) -> Problem:
    from sklearn.datasets import load_digits

    torch.manual_seed(settings.seed)
    model = round_start(DigitTransformer(64 * settings.scale))
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 8 - 1
    labels = torch.from_numpy(digits.target)
    generator = torch.Generator().manual_seed(1 + settings.seed)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    cut = 1280

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randint(cut, (32 * settings.scale,), generator=generator)
            down, across = torch.randint(-1, 2, (2,), generator=generator).tolist()
            moved = torch.roll(images[chosen], (down, across), dims=(1, 2))
            yield moved + 0.2 * torch.randn(moved.shape, generator=generator), labels[chosen]

    return Problem(model, batches(), _digit_loss, [(images[cut:], labels[cut:])])


# Teachers -------------------------------------------------------------------------------------------------------------

FEATURES, CLASSES = 64, 64


class Network(nn.Module):
    """A GELU network with one normalised hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(FEATURES, width), nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape (batch, CLASSES) from inputs of shape (batch, FEATURES)."""
        return self.down(self.norm(F.gelu(self.up(inputs))))


def _teacher_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    inputs, target, importance = batch
    return (F.cross_entropy(call_in_fp32(model, inputs), target, reduction="none") * importance).mean()


def _teacher(settings: Settings, batch: int, outliers: int = 0, tail: float | None = None) -> Problem:
    """Learn a random network's probabilities from labels drawn with them.

    Args:
        settings: of the run.
        batch: examples per batch at scale 1.
        outliers: number of input channels that are ten times as large as the others.
        tail: exponent of the Pareto distribution that examples' weights in the loss are drawn from; None for 1.
    """
    torch.manual_seed(1234)
    teacher, loud = Network(128), torch.ones(FEATURES)
    loud[:outliers] = 10.0
    nn.init.normal_(teacher.down.weight, std=2 / 128**0.5)
    torch.manual_seed(settings.seed)
    model = round_start(Network(128 * settings.scale))
    generator = torch.Generator().manual_seed(1 + settings.seed)

    @torch.no_grad()
    def examples(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        quiet = torch.randn(count, FEATURES, generator=source)
        return quiet * loud, teacher(quiet).softmax(1)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            inputs, chances = examples(batch * settings.scale, generator)
            labels = torch.multinomial(chances, 1, generator=generator)[:, 0]
            importance = torch.ones(len(inputs))
            if tail is not None:
                importance = torch.rand(len(inputs), generator=generator).clamp_min(1e-6) ** (-1 / tail)
            yield inputs, labels, importance

    inputs, chances = examples(8192, torch.Generator().manual_seed(0))
    return Problem(model, batches(), _teacher_loss, [(inputs, chances, torch.ones(8192))])


# All of them ----------------------------------------------------------------------------------------------------------

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "pretrain",
                1500,
                {"adamw": (PRETRAIN_LR,), "lion": (4e-4,)},
                lambda settings: _pretrain(settings, batch=12),
                parts=frozenset({"main", "weights", "state", "peers", "plain", "lion"}),
            ),
            Task(
                "finetune-small-lr",
                800,
                {"adamw": (1e-6, 6e-7)},
                _finetune,
                sweep=False,
                parts=frozenset({"main", "weights", "peers", "plain"}),
            ),
            Task(
                "spiky",
                3000,
                {"adamw": (1e-2,)},
                lambda settings: _teacher(settings, batch=64, outliers=4, tail=1.5),
                clip=None,
                parts=frozenset({"main", "state", "peers"}),
            ),
            Task(
                "vision",
                1200,
                {"adamw": (2e-3,), "lion": (3e-4,), "sgd": (0.1,)},
                _vision,
                parts=frozenset({"main", "state", "peers", "lion", "sgd"}),
            ),
            Task(
                "sparse-embedding",
                1200,
                {"adamw": (2e-3,)},
                _sparse_embedding,
                parts=frozenset({"main", "state", "peers"}),
            ),
            Task(
                "long-horizon",
                10000,
                {"adamw": (3e-3,), "lion": (3e-4,), "sgd": (0.3,)},
                lambda settings: _teacher(settings, batch=64),
                final=0.0,
                sweep=False,
                parts=frozenset({"main", "weights", "state", "peers", "lion", "sgd"}),
            ),
            Task(
                "pretrain-large-batch",
                600,
                {"adamw": (PRETRAIN_LR,)},
                lambda settings: _pretrain(settings, batch=48),
                sweep=False,
                parts=frozenset({"main"}),
            ),
        )
    }
)
