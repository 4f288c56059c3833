"""What there is to test, once: a new rule, format or mode needs a line here and is in every matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import lowbit_optim
from lowbit_optim import LowBitOptimizer
from lowbit_optim.formats import FORMATS
from lowbit_optim.weights import WEIGHT_MODES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (FP32, BF16, FP16)
FORMAT_NAMES = tuple(FORMATS)
MODE_NAMES = tuple(WEIGHT_MODES)


@dataclass(frozen=True)
class Rule:
    """An update rule as users get it: a class and the arguments that select it."""

    name: str
    cls: type[LowBitOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    torch_cls: Callable[..., torch.optim.Optimizer] | None = None

    def make(self, params: Any, **kwargs: Any) -> LowBitOptimizer:
        return self.cls(params, **{"backend": "eager", **self.options, **kwargs})

    def make_torch(self, params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        assert self.torch_cls is not None
        return self.torch_cls(params, **{**self.options, **kwargs})


RULES = {
    rule.name: rule
    for rule in (
        Rule("adamw", lowbit_optim.AdamW, {}, torch.optim.AdamW),
        Rule("adamw-amsgrad", lowbit_optim.AdamW, {"amsgrad": True}, torch.optim.AdamW),
        Rule("adam", lowbit_optim.Adam, {"weight_decay": 0.01}, torch.optim.Adam),
        Rule("adam-amsgrad", lowbit_optim.Adam, {"weight_decay": 0.01, "amsgrad": True}, torch.optim.Adam),
        Rule("lion", lowbit_optim.Lion, {"weight_decay": 0.01}),
        Rule("sgd", lowbit_optim.SGD, {"weight_decay": 0.01}, torch.optim.SGD),
        Rule("sgd-momentum", lowbit_optim.SGD, {"momentum": 0.9, "dampening": 0.1}, torch.optim.SGD),
        Rule("sgd-nesterov", lowbit_optim.SGD, {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    )
}


def modes_for(dtype: torch.dtype) -> list[str]:
    """Weight modes that can store a dtype."""
    return [name for name, mode in WEIGHT_MODES.items() if dtype in mode.dtypes]


#: Public classes by name, with the arguments that make each keep state.
PUBLIC_CLASSES = {
    name: {"momentum": 0.9} if name.startswith("SGD") else {}
    for name in lowbit_optim.__all__
    if isinstance(getattr(lowbit_optim, name), type)
    and issubclass(getattr(lowbit_optim, name), LowBitOptimizer)
    and name != "LowBitOptimizer"
}
