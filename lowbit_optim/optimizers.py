"""The public optimizers: signatures and documentation. All work is the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from . import rules
from .engine import LowBitOptimizer
from .layout import LowBitOptions
from .rules import UpdateRule


class _AdamFamily(LowBitOptimizer):
    """What Adam and AdamW share: their hyper-parameters, and the choice of the amsgrad rule."""

    amsgrad_rule: UpdateRule

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        **options: Unpack[LowBitOptions],
    ) -> None:
        hyper = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, hyper, **options)

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return the rule that the group's options select."""
        return self.amsgrad_rule if group["amsgrad"] else self.rule


class Adam(_AdamFamily):
    """Adam (arXiv 1412.6980) with low-bit state and exact updates of 16-bit weights.

    Weight decay, if any, is part of the gradient; for decoupled decay use `AdamW`.

    Args:
        params: parameters, named parameters or parameter groups; groups may override every other argument.
        lr: learning rate, a float or a one-element tensor.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: divide by the largest second moment so far (arXiv 1904.09237).
        maximize: ascend instead of descend.
        **options: state format, weight mode, preset and more; see `LowBitOptions`.

    Raises:
        ValueError: an argument is unknown or out of range; the message names it.
        TypeError: a parameter is not a dense fp32, bf16 or fp16 tensor.
    """

    rule = rules.adam
    amsgrad_rule = rules.adam_amsgrad


class AdamW(_AdamFamily):
    """AdamW (arXiv 1711.05101) with low-bit state and exact updates of 16-bit weights.

    Decay and update are combined in fp32 and rounded once, so that neither is lost to rounding.

    Args:
        params: parameters, named parameters or parameter groups; groups may override every other argument.
        lr: learning rate, a float or a one-element tensor.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled decay: each step multiplies the weight by `1 - lr * weight_decay`.
        amsgrad: divide by the largest second moment so far (arXiv 1904.09237).
        maximize: ascend instead of descend.
        **options: state format, weight mode, preset and more; see `LowBitOptions`.

    Raises:
        ValueError: an argument is unknown or out of range; the message names it.
        TypeError: a parameter is not a dense fp32, bf16 or fp16 tensor.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3, preset="balanced", backend="eager")
        >>> model(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].spec
        'int8/b32/signed'
    """

    rule = rules.adamw
    amsgrad_rule = rules.adamw_amsgrad

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        **options: Unpack[LowBitOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            **options,
        )


class Lion(LowBitOptimizer):
    """Lion (arXiv 2302.06675): one moment, and every weight moves by lr.

    Use a learning rate 3 to 10 times smaller, and a decay as many times larger, than AdamW's. Not for batches so
    small that the sign of the gradient is noise.

    Args:
        params: parameters, named parameters or parameter groups; groups may override every other argument.
        lr: learning rate, a float or a one-element tensor.
        betas: interpolation of the direction, and decay rate of the moment.
        weight_decay: decoupled decay.
        maximize: ascend instead of descend.
        **options: state format, weight mode, preset and more; see `LowBitOptions`.

    Raises:
        ValueError: an argument is unknown or out of range; the message names it.
        TypeError: a parameter is not a dense fp32, bf16 or fp16 tensor.
    """

    rule = rules.lion

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[LowBitOptions],
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
            **options,
        )


class SGD(LowBitOptimizer):
    """Stochastic gradient descent, in torch's form, with a low-bit momentum.

    Without momentum there is no state, and all that is left to choose is the weight mode.

    Args:
        params: parameters, named parameters or parameter groups; groups may override every other argument.
        lr: learning rate, a float or a one-element tensor.
        momentum: heavy-ball momentum.
        dampening: share of the gradient that does not enter the momentum, from the second step on.
        weight_decay: L2 penalty.
        nesterov: look ahead; needs momentum and no dampening.
        maximize: ascend instead of descend.
        **options: state format, weight mode, preset and more; see `LowBitOptions`.

    Raises:
        ValueError: an argument is unknown or out of range; the message names it.
        TypeError: a parameter is not a dense fp32, bf16 or fp16 tensor.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[LowBitOptions],
    ) -> None:
        hyper = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, hyper, **options)

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return the rule that the group's options select."""
        if group["momentum"] == 0:
            return rules.sgd
        return rules.sgd_nesterov if group["nesterov"] else rules.sgd_momentum


class AdamW8bit(AdamW):
    """`AdamW` with 8-bit moments; bf16 weights are rounded stochastically. Same arguments."""

    default_state = "int8"


class AdamW4bit(AdamW):
    """`AdamW` with 4-bit moments; bf16 weights are rounded stochastically. Same arguments."""

    default_state = "int4"


class AdamWFp8(AdamW):
    """`AdamW` with float8 e4m3 moments; bf16 weights are rounded stochastically. Same arguments."""

    default_state = "fp8"


class AdamWBf16SR(AdamW):
    """`AdamW` in pure bf16: weights and moments are bf16 and rounded stochastically. Same arguments."""

    default_state = "bf16"
    default_weights = "stochastic"


class Adam8bit(Adam):
    """`Adam` with 8-bit moments. Same arguments."""

    default_state = "int8"


class Adam4bit(Adam):
    """`Adam` with 4-bit moments. Same arguments."""

    default_state = "int4"


class AdamFp8(Adam):
    """`Adam` with float8 e4m3 moments. Same arguments."""

    default_state = "fp8"


class Lion8bit(Lion):
    """`Lion` with an 8-bit moment. Same arguments."""

    default_state = "int8"


class Lion4bit(Lion):
    """`Lion` with a 4-bit moment. Same arguments."""

    default_state = "int4"


class SGD8bit(SGD):
    """`SGD` with an 8-bit momentum. Same arguments."""

    default_state = "int8"
