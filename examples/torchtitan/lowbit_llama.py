"""torchtitan's small Llama 3 with low-bit optimizers: a config of one's own, as torchtitan takes it.

    export PYTHONPATH=examples/torchtitan
    torchrun --nproc-per-node 8 -m torchtitan.train --module lowbit_llama --config llama3_debugmodel_lowbit

Run it in a checkout of torchtitan, whose tokenizer and text the debug model uses. torchtitan trains on GPUs only.
"""

from __future__ import annotations

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from lowbit_optim.integrations.torchtitan import LowBitOptimizersContainer, default_lowbit


def llama3_debugmodel_lowbit() -> Trainer.Config:
    """Return the debug model's config with one optimizer for all parameters."""
    config = llama3_debugmodel()
    # Weights in bf16: half the memory, and updates that survive it are what this library is for.
    config.training.dtype = "bfloat16"
    config.optimizer = default_lowbit(lr=8e-4, preset="balanced")
    return config


def llama3_debugmodel_mixed() -> Trainer.Config:
    """Return it with another choice for each kind of parameter; the first pattern that matches a name wins."""
    config = llama3_debugmodel_lowbit()
    adamw = {"lr": 8e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    config.optimizer = LowBitOptimizersContainer.Config(
        preset="light",  # of the groups below that choose nothing
        param_groups=[
            # torch's own, for the norms.
            ParamGroupConfig(pattern=r"norm", optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": 0.0}),
            # Embeddings want exact state.
            ParamGroupConfig(
                pattern=r"tok_embeddings",
                optimizer_name="lowbit_optim.AdamW",
                optimizer_kwargs={**adamw, "state": "fp32"},
            ),
            ParamGroupConfig(
                pattern=r"feed_forward",
                optimizer_name="lowbit_optim.AdamW",
                optimizer_kwargs={**adamw, "preset": "compact"},
            ),
            ParamGroupConfig(
                pattern=r"lm_head|output",
                optimizer_name="lowbit_optim.AdamW8bit",
                optimizer_kwargs={**adamw, "weights": "split8"},
            ),
            ParamGroupConfig(pattern=r".*", optimizer_name="lowbit_optim.AdamW", optimizer_kwargs=adamw),
        ],
    )
    return config
