"""Shapes without a model: published parameter counts, transformers where it is installed, and measured storage."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import pytest
import torch

from lowbit_optim import PRESETS, from_preset, plan, shapes

from .cases import BF16, FP32
from .runs import stored_bytes

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}


def like_llama(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """A config of vocabulary, hidden size, layers, heads, key-value heads and inner size."""
    names = list(LLAMA_3_8B)[1:7]
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


#: Configs of released models, and the number of parameters that their files hold.
RELEASED = {
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248),
    "Mistral-7B-v0.1": (like_llama("mistral", 32000, 4096, 32, 32, 8, 14336), 7_241_732_096),
    "Qwen2.5-7B": (like_llama("qwen2", 152064, 3584, 28, 28, 4, 18944), 7_615_616_512),
    "Qwen3-8B": (like_llama("qwen3", 151936, 4096, 36, 32, 8, 12288, head_dim=128), 8_190_735_360),
    "Phi-3-mini": (like_llama("phi3", 32064, 3072, 32, 32, 32, 8192), 3_821_079_552),
    "gemma-7b": (like_llama("gemma", 256000, 3072, 28, 16, 16, 24576), 8_537_680_896),
    "gemma-2-9b": (like_llama("gemma2", 256000, 3584, 42, 16, 8, 14336), 9_241_705_984),
    "OLMo-2-7B": (like_llama("olmo2", 100352, 4096, 32, 32, 32, 11008), 7_298_617_344),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "pythia-70m": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "intermediate_size": 2048,
            "vocab_size": 50304,
        },
        70_426_624,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_shapes_have_as_many_elements_as_the_released_model(name: str) -> None:
    config, numel = RELEASED[name]
    params = shapes.from_hf_config(config, BF16)
    assert sum(param.numel() for _, param in params) == numel
    assert {param.device.type for _, param in params} == {"meta"}
    assert {param.dtype for _, param in params} == {BF16}


def tiny(model_type: str) -> dict[str, Any]:
    if model_type == "gpt2":
        return {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 80}
    return like_llama(model_type, 96, 48, 2, 4, 2, 80, head_dim=16)


VARIANTS = [(model_type, {}) for model_type in shapes.ARCHITECTURES]
VARIANTS += [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": None, "num_key_value_heads": None}),
    ("qwen3", {"attention_bias": True, "head_dim": None}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("gpt2", {"n_inner": 100}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS, ids=str)
def test_shapes_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    transformers = importlib.import_module("transformers")
    config = {**tiny(model_type), **changes}
    given = {name: value for name, value in config.items() if name != "model_type" and value is not None}
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(model_type, **given, pad_token_id=0)
        model = transformers.AutoModelForCausalLM.from_config(made)
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    # A released config.json holds what it ties; a config made here leaves that to its class.
    config = {"tie_word_embeddings": made.tie_word_embeddings, **config}
    assert {name: tuple(param.shape) for name, param in shapes.from_hf_config(config, FP32)} == expected


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_shapes_of_other_architectures_are_asked_of_transformers() -> None:
    config = like_llama("stablelm", 96, 48, 2, 4, 2, 80)
    named = dict(shapes.from_hf_config(config, BF16))
    assert named["model.layers.1.self_attn.k_proj.weight"].shape == (24, 48)
    with pytest.raises(ValueError, match=r"unknown architecture 'nosuch'.*transformers says"):
        shapes.from_hf_config({"model_type": "nosuch"}, BF16)


BAD_CONFIGS = {
    "not an object": ([1], "must be a JSON object with a 'model_type'"),
    "no type": ({"hidden_size": 64}, "must be a JSON object with a 'model_type'"),
    "a size is missing": (
        {"model_type": "llama", "vocab_size": 64},
        "a config of model_type 'llama' needs 'hidden_size' as a whole number, got None",
    ),
    "a size is no number": (
        {**LLAMA_3_8B, "num_hidden_layers": "32"},
        "a config of model_type 'llama' needs 'num_hidden_layers' as a whole number, got '32'",
    ),
    "too many layers": (
        {**LLAMA_3_8B, "num_hidden_layers": 10**9},
        "'num_hidden_layers': a model of 1000000000 layers has more than 1000",
    ),
    "too many layers of GPT-2": (
        {"model_type": "gpt2", "n_embd": 64, "vocab_size": 64, "n_positions": 64, "n_layer": 10**9},
        "'n_layer': a model of 1000000000 layers has more than 1000",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_shapes_name_what_a_config_lacks(case: str) -> None:
    config, message = BAD_CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        shapes.from_hf_config(config, BF16)


def test_shapes_refuse_an_unknown_architecture_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"unknown architecture 'lama': shapes are known of llama, .*'llama'"):
        shapes.from_hf_config({**LLAMA_3_8B, "model_type": "lama"}, BF16)


def test_shapes_from_a_listing_have_their_own_dtypes() -> None:
    listing = {
        "a": [4, 8],
        "b": {"shape": [], "dtype": "fp32"},
        "c": {"shape": [3]},
        "d": {"shape": [2], "dtype": "float16"},
    }
    found = {name: (tuple(param.shape), param.dtype) for name, param in shapes.from_listing(listing, BF16)}
    assert found == {"a": ((4, 8), BF16), "b": ((), FP32), "c": ((3,), BF16), "d": ((2,), torch.float16)}  # fmt: skip


BAD_LISTINGS: dict[str, tuple[Any, str]] = {
    "a list": ([[4, 4]], "must be a JSON object of names"),
    "empty": ({}, "must be a JSON object of names"),
    "no shape": ({"w": {"dtype": "bf16"}}, "'w': it has dtype, and no 'shape'"),
    "text": ({"w": "4x4"}, "'w': its shape must be a list of whole numbers, got '4x4'"),
    "negative": ({"w": [-1, 4]}, r"'w': its shape must be a list of whole numbers, got \[-1, 4\]"),
    "fraction": ({"w": [0.5]}, "'w': its shape must be a list of whole numbers"),
    "dtype": ({"w": {"shape": [4], "dtype": "fp8"}}, "'w': dtype: unknown 'fp8'; choose one of bf16"),
}


@pytest.mark.parametrize("case", BAD_LISTINGS)
def test_shapes_name_the_entry_that_is_wrong(case: str) -> None:
    listing, message = BAD_LISTINGS[case]
    with pytest.raises(ValueError, match=message):
        shapes.from_listing(listing, BF16)


# What plans make of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("preset", PRESETS)
def test_shapes_of_a_tiny_model_predict_its_storage(preset: str, optimizer: str) -> None:
    params = shapes.from_hf_config(tiny("llama"), BF16)
    planned = plan(params, preset, optimizer=optimizer, backend="eager")
    real = [torch.nn.Parameter(torch.zeros(param.shape, dtype=BF16)) for _, param in params]
    made = from_preset(real, preset, optimizer, backend="eager")
    for param in real:
        param.grad = torch.ones_like(param)
    made.step()
    weights = sum(param.untyped_storage().nbytes() for param in real)
    gradients = sum(param.grad.untyped_storage().nbytes() for param in real)  # type: ignore[union-attr]
    measured = weights + gradients + made.memory_bytes()
    assert planned.total_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_shapes_of_llama_3_8b_predict_its_tensors(preset: str) -> None:
    params = shapes.from_hf_config(LLAMA_3_8B, BF16)
    planned = plan(params, preset)
    made = from_preset(params, preset)
    made.init_state()  # on the meta device
    weights = sum(param.numel() * param.element_size() for _, param in params)
    assert planned.weight_bytes + planned.state_bytes == pytest.approx(weights + stored_bytes(made), rel=0.01)
    # Norms apart, every parameter is large: the figure is the preset's.
    per_param = {"reference": 14, "bf16": 6, "balanced": 5.125, "light": 4.125, "compact": 4.125, "minimal": 3.125}
    assert planned.bytes_per_param == pytest.approx(per_param[preset], rel=0.01)


def test_shapes_from_a_count_are_one_large_matrix() -> None:
    planned = plan(shapes.from_count(8_030_000_000, BF16), "compact", world_size=8)
    assert planned.numel == 8_030_000_000
    assert planned.bytes_per_param == pytest.approx(4.125, rel=1e-6)
    assert planned.weight_bytes == 2 * math.ceil(8_030_000_000 / 8)
