"""Parameter shapes of models that are not there: from a list of shapes, or from the configuration of a known decoder.

Shapes become tensors on the meta device, which take no memory, for `plan`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .formats import near_miss
from .layout import WEIGHT_DTYPES

Shapes = dict[str, tuple[int, ...]]
Named = list[tuple[str, nn.Parameter]]

#: More than any model has, and less than what sizes in bytes overflow at.
MOST_ELEMENTS = 10**17
#: Of a decoder, far beyond the deepest: each is a dozen tensors to make, and a mistyped number would run for hours.
_MOST_LAYERS = 1_000

#: dtypes by the names that users give them.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16} | {
    str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES
}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name such as "bf16" or "bfloat16".

    Raises:
        ValueError: unknown, or not one that parameters may have.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype: unknown {name!r}; choose one of {', '.join(DTYPES)}{near_miss(name, DTYPES)}")
    return DTYPES[name]


def meta_params(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Named:
    """Return named parameters on the meta device from shapes and dtypes by name.

    Raises:
        ValueError: a parameter has more elements than tensors can have.
    """
    for name, (shape, _) in shapes.items():
        if math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(f"{name!r}: shape {list(shape)} has more than {MOST_ELEMENTS:.0e} elements")
    return [
        (name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))) for name, (shape, dtype) in shapes.items()
    ]


def from_count(numel: int, dtype: torch.dtype) -> Named:
    """Return one parameter of `numel` elements: a model all of whose parameters are in large matrices."""
    return meta_params({"parameters": ((numel,), dtype)})


def from_listing(listing: Any, dtype: torch.dtype) -> Named:
    """Return parameters from a listing as a JSON file holds it.

    Args:
        listing: maps each name to a shape, `[4096, 4096]`, or to `{"shape": [4096, 4096], "dtype": "bf16"}`.
        dtype: of the parameters that name none.

    Raises:
        ValueError: an entry is not of that form; the message names it.
    """
    if not isinstance(listing, Mapping) or not listing:
        raise ValueError("a list of shapes must be a JSON object of names, each with a shape such as [4096, 4096]")
    shapes = {}
    for name, entry in listing.items():
        try:
            shape, named = (entry["shape"], entry.get("dtype")) if isinstance(entry, Mapping) else (entry, None)
            if isinstance(entry, Mapping) and (unknown := entry.keys() - {"shape", "dtype"}):
                raise ValueError(f"unknown {', '.join(sorted(unknown))}; it has a shape and may have a dtype")
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"its shape must be a list of whole numbers, got {shape!r}")
            shapes[name] = (tuple(shape), dtype if named is None else dtype_named(named))
        except KeyError:
            raise ValueError(f"{name!r}: it has {', '.join(entry) or 'nothing'}, and no 'shape'") from None
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return meta_params(shapes)


def from_hf_config(config: Any, dtype: torch.dtype) -> Named:
    """Return the parameters of a Hugging Face causal language model, from the content of its config.json.

    Shapes of the architectures in `ARCHITECTURES` are worked out here. For any other, `transformers` is asked where it
    is installed; it makes the model on the meta device.

    Args:
        config: the content of config.json.
        dtype: of all parameters.

    Raises:
        ValueError: the architecture is unknown, or the configuration lacks a size; the message names it.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise ValueError("a Hugging Face config must be a JSON object with a 'model_type'")
    model_type = config["model_type"]
    shapes = _ARCHITECTURES[model_type](_Sizes(config)) if model_type in _ARCHITECTURES else _ask_transformers(config)
    return meta_params({name: (shape, dtype) for name, shape in shapes.items()})


class _Sizes:
    """A configuration whose missing entries are reported by name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getitem__(self, name: str) -> int:
        found = self._config.get(name)
        if type(found) is not int or found < 1:
            raise ValueError(
                f"a config of model_type {self._config['model_type']!r} needs {name!r} as a whole number, got {found!r}"
            )
        return found

    def layers(self, name: str) -> range:
        """Return the places of layers, whose number an entry gives."""
        if self[name] > _MOST_LAYERS:
            raise ValueError(f"{name!r}: a model of {self[name]} layers has more than {_MOST_LAYERS}")
        return range(self[name])

    def get(self, name: str, default: Any) -> Any:
        """Return an entry, or the default where it is missing or null."""
        found = self._config.get(name)
        return default if found is None else found


# Architectures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoder:
    """What distinguishes decoders with rotary positions, grouped queries and a gated feed-forward part.

    Attributes:
        norms: names of a layer's norms over the hidden size.
        qkv_bias: whether the first projections of attention have biases; None asks the configuration.
        o_bias: whether the last one has; None asks the configuration.
        qk_norm: "" for none, "head" for norms over a head, "all" for norms over all heads.
        fused: whether queries, keys and values share a matrix, as do gate and up.
        tied: whether the head is the embedding, where the configuration does not say.
        head_dim: size of a head where the configuration does not say; 0 is hidden size / heads.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: str = ""
    fused: bool = False
    tied: bool = False
    head_dim: int = 0

    def __call__(self, c: _Sizes) -> Shapes:
        hidden, vocab = c["hidden_size"], c["vocab_size"]
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in c.layers("num_hidden_layers"):
            for name, shape in self._layer(c, hidden):
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (hidden,)
        if not c.get("tie_word_embeddings", self.tied):
            shapes["lm_head.weight"] = (vocab, hidden)
        return shapes

    def _layer(self, c: _Sizes, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        heads, inner = c["num_attention_heads"], c["intermediate_size"]
        head = c.get("head_dim", self.head_dim) or hidden // heads
        kv_heads = c.get("num_key_value_heads", heads)
        asked = bool(c.get("attention_bias", False))
        qkv_bias, o_bias = (asked if bias is None else bias for bias in (self.qkv_bias, self.o_bias))
        outs = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
        if self.fused:
            outs = {"qkv_proj": sum(outs.values())}
        for name, out in outs.items():
            yield from _linear(f"self_attn.{name}", hidden, out, qkv_bias)
        yield from _linear("self_attn.o_proj", heads * head, hidden, o_bias)
        if self.qk_norm:
            for name, count in ("q_norm", heads), ("k_norm", kv_heads):
                yield f"self_attn.{name}.weight", (head if self.qk_norm == "head" else count * head,)
        bias = bool(c.get("mlp_bias", False))
        for name, out in (
            {"gate_up_proj": 2 * inner} if self.fused else {"gate_proj": inner, "up_proj": inner}
        ).items():
            yield from _linear(f"mlp.{name}", hidden, out, bias)
        yield from _linear("mlp.down_proj", inner, hidden, bias)
        for name in self.norms:
            yield f"{name}.weight", (hidden,)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _gpt2(c: _Sizes) -> Shapes:
    width, vocab = c["n_embd"], c["vocab_size"]
    inner = c.get("n_inner", 4 * width)
    shapes: Shapes = {"transformer.wte.weight": (vocab, width), "transformer.wpe.weight": (c["n_positions"], width)}
    for layer in c.layers("n_layer"):
        block = f"transformer.h.{layer}"
        shapes.update(_norm(f"{block}.ln_1", width))
        shapes.update(_norm(f"{block}.ln_2", width))
        # Its matrices are stored transposed.
        for name, shape in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, inner)),
            ("mlp.c_proj", (inner, width)),
        ):
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[1:]}
    shapes.update(_norm("transformer.ln_f", width))
    if not c.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


def _gpt_neox(c: _Sizes) -> Shapes:
    hidden, inner, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    bias = bool(c.get("attention_bias", True))
    shapes: Shapes = {"gpt_neox.embed_in.weight": (vocab, hidden)}
    for layer in c.layers("num_hidden_layers"):
        block = f"gpt_neox.layers.{layer}"
        shapes.update(_norm(f"{block}.input_layernorm", hidden))
        shapes.update(_norm(f"{block}.post_attention_layernorm", hidden))
        shapes.update(_linear(f"{block}.attention.query_key_value", hidden, 3 * hidden, bias))
        shapes.update(_linear(f"{block}.attention.dense", hidden, hidden, bias))
        shapes.update(_linear(f"{block}.mlp.dense_h_to_4h", hidden, inner, True))
        shapes.update(_linear(f"{block}.mlp.dense_4h_to_h", inner, hidden, True))
    shapes.update(_norm("gpt_neox.final_layer_norm", hidden))
    if not c.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


_GEMMA_2_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_ARCHITECTURES: Mapping[str, Callable[[_Sizes], Shapes]] = {
    "llama": _Decoder(),
    "mistral": _Decoder(qkv_bias=False, o_bias=False),
    "qwen2": _Decoder(qkv_bias=True, o_bias=False),
    "qwen3": _Decoder(qk_norm="head", head_dim=128),
    "phi3": _Decoder(qkv_bias=False, o_bias=False, fused=True),
    "gemma": _Decoder(tied=True, head_dim=256),
    "gemma2": _Decoder(norms=_GEMMA_2_NORMS, tied=True, head_dim=256),
    "gemma3_text": _Decoder(norms=_GEMMA_2_NORMS, qk_norm="head", tied=True, head_dim=256),
    "olmo2": _Decoder(norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="all"),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
#: Values of `model_type` whose shapes are known without `transformers`.
ARCHITECTURES = tuple(_ARCHITECTURES)


def _ask_transformers(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a model that `transformers` makes on the meta device."""
    model_type = config["model_type"]
    unknown = f"unknown architecture {model_type!r}: shapes are known of {', '.join(ARCHITECTURES)}"
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{unknown}{near_miss(model_type, ARCHITECTURES)}; with transformers installed, of all that it has"
        )
    transformers = importlib.import_module("transformers")
    given = {name: value for name, value in config.items() if name != "model_type"}
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(model_type, **given)
            )
    except ValueError as error:
        raise ValueError(f"{unknown}; and transformers says: {str(error).splitlines()[0]}") from error
    named: Iterator[tuple[str, Tensor]] = model.named_parameters()
    return {name: tuple(param.shape) for name, param in named}
