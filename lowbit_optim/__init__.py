"""Drop-in PyTorch optimizers for training in bf16 with small optimizer state."""

from . import state_ops as state_ops  # fills the table of operations on quantized state
from .convert import convert_state_dict
from .engine import LowBitOptimizer
from .in_backward import step_in_backward
from .layout import LowBitOptions
from .noise import stochastic_round
from .optimizers import (
    SGD,
    Adam,
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWBf16SR,
    AdamWFp8,
    Lion,
    Lion4bit,
    Lion8bit,
    SGD8bit,
)
from .planner import Plan, plan
from .presets import PRESETS, Preset, from_preset, param_policy
from .state import QuantizedState

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SGD",
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWBf16SR",
    "AdamWFp8",
    "Lion",
    "Lion4bit",
    "Lion8bit",
    "LowBitOptimizer",
    "LowBitOptions",
    "Plan",
    "Preset",
    "QuantizedState",
    "SGD8bit",
    "convert_state_dict",
    "from_preset",
    "param_policy",
    "plan",
    "step_in_backward",
    "stochastic_round",
]
