"""The one optimizer: parameter groups, state and the step.

A step is three hops: `step` checks the groups, `stepping` brings parameters and their state together as flat plain
tensors, and the step function that `dispatch` made for their signature updates them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # comes with torch

from . import checkpoint
from .convert import from_peers
from .hyper import check_hyper, to_flag, to_whole
from .layout import (
    STORAGE_DEFAULTS,
    WEIGHT_DTYPES,
    Layout,
    LowBitOptions,
    check_names,
    check_spelling,
    layout_of,
    storage_options,
)
from .rules import UpdateRule
from .sharding import check_placements, like, local
from .state import stored_parts, zeros_state
from .stepping import Stepper
from .weights import get_mode

Closure = Callable[[], Any]


class LowBitOptimizer(torch.optim.Optimizer):
    """Base of all optimizers of this package; subclasses give a rule and its hyper-parameters.

    Args:
        params: parameters, named parameters or parameter groups, as in torch. Groups may override any option.
        hyper: the rule's hyper-parameters.
        **options: see `LowBitOptions`.

    Raises:
        ValueError: an argument is unknown or out of range; the message names it.
        TypeError: a parameter is not a dense fp32, bf16 or fp16 tensor.
    """

    #: The update rule; override `rule_for` where options select among several.
    rule: ClassVar[UpdateRule]
    default_state: ClassVar[str] = "int8"
    default_weights: ClassVar[str] = "auto"

    def __init__(self, params: ParamsT, hyper: Mapping[str, Any], **options: Unpack[LowBitOptions]) -> None:
        storage = storage_options(options, self.default_state, self.default_weights, hyper)
        defaults = {**hyper, **storage}
        self._check_group(defaults)
        self._reset_caches()
        super().__init__(params, defaults)

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return the update rule that a parameter group's options select."""
        return self.rule

    def layout_for(self, param: Tensor, group: Mapping[str, Any]) -> Layout:
        """Return how `param` is stored and stepped in `group`."""
        return layout_of(param, group, self.rule_for(group))

    # Groups and state ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Raises:
            ValueError, TypeError: an option is not valid or does not fit a parameter; nothing is added.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        known, params = len(self.param_groups), param_group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)
            distinct = {id(item[1] if isinstance(item, tuple) else item) for item in params}
            if len(distinct) < len(params):
                raise ValueError(f"params: group {known} has a parameter twice")
        check_spelling(param_group, self.defaults)
        if "preset" in param_group:
            named = storage_options({"preset": param_group["preset"]}, "", "")
            param_group = {name: value for name, value in param_group.items() if name != "preset"}
            param_group = {"state": named["state"], "weights": named["weights"], **param_group}
        lr = param_group.get("lr", self.defaults["lr"])
        # One tensor in two groups would make a schedule of one move the other.
        if isinstance(lr, Tensor) and any(lr is group["lr"] for group in (self.defaults, *self.param_groups)):
            lr = lr.clone()
        param_group = {**param_group, "params": params, "lr": lr}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for place, param in enumerate(group["params"]):
                self._check_param(param, group, self._name(group, known, place))
        except BaseException:
            self.param_groups.pop()
            raise
        self._reset_caches()

    def _check_group(self, group: dict[str, Any]) -> None:
        check_hyper(group)
        for name in ("seed", "min_quantized_numel"):
            group[name] = to_whole(name, group[name])
        if group["min_quantized_numel"] < 0:
            raise ValueError(f"min_quantized_numel must not be negative, got {group['min_quantized_numel']}")
        group["skip_nonfinite"] = to_flag("skip_nonfinite", group["skip_nonfinite"])
        check_names(group, self.rule_for(group))

    def _check_param(self, param: Tensor, group: dict[str, Any], name: str) -> None:
        if param.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"{name}: dtype {param.dtype} is not supported; parameters must be fp32, bf16 or fp16")
        if param.layout != torch.strided:
            raise TypeError(f"{name}: layout {param.layout} is not supported; parameters must be dense")
        try:
            check_placements(param)
            self.layout_for(param, group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{name}: {error}") from None

    @staticmethod
    def _name(group: Mapping[str, Any], group_place: int, place: int) -> str:
        names = group.get("param_names")
        return f"parameter {names[place]!r}" if names else f"parameter {place} of group {group_place}"

    def named_params(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield (name for messages, parameter, its group) in order."""
        for group_place, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for place, param in enumerate(group["params"]):
                name = f"parameter {names[place]!r}" if names else f"parameter {place} of group {group_place}"
                yield name, param, group

    def _reset_caches(self) -> None:
        self._stepper = Stepper(self)
        self._places: dict[Tensor, int] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore after unpickling or deepcopy; group options that an older version did not have get defaults."""
        defaults = dict(state["defaults"])
        super().__setstate__(state)
        self.defaults = defaults
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
        self._reset_caches()

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of every trainable parameter that has none; no weight and no step count changes."""
        self._forget_strangers()
        for _, param, group in self.named_params():
            if param.requires_grad and not self.state.get(param):
                self.init_param(param, group)

    def _forget_strangers(self) -> None:
        """Drop state that was never stepped of parameters that no group has any more.

        accelerate puts sharded parameters in the place of those that an optimizer was made with.
        """
        strangers = self.state.keys() - {param for _, param, _ in self.named_params()}
        for param in strangers:
            if self.state[param].get("step") == 0:
                del self.state[param]

    def init_param(self, param: Tensor, group: Mapping[str, Any]) -> None:
        """Create the state of one parameter."""
        counters = ("step", "skipped") if group["skip_nonfinite"] else ("step",)
        mode, weight = get_mode(group["weights"], param.dtype), local(param).detach().contiguous()
        extras = [like(extra, param) for extra in mode.extras_for(weight, weight.float())]
        self.state[param] = {
            **{name: torch.zeros((), dtype=torch.float32) for name in counters},
            **self.zero_slots(param, group),
            **dict(zip(mode.extras, extras, strict=True)),
        }

    def zero_slots(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return new slots for one parameter."""
        shard = local(param)
        return {
            name: like(zeros_state(fmt, shard.shape, shard.device), param)
            for name, fmt in self.layout_for(param, group).formats.items()
        }

    def memory_bytes(self) -> int:
        """Return the bytes of all optimizer state on this rank, measured from its storages."""
        storages = {}
        for entry in self.state.values():
            for value in entry.values():
                for part in stored_parts(local(value)) if isinstance(value, Tensor) else ():
                    storage = part.untyped_storage()
                    storages[storage.data_ptr(), part.device] = storage.nbytes()
        return sum(storages.values())

    # The step ------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> Any: ...

    # A user who compiles `step` would trace Python bookkeeping; the arithmetic is compiled already.
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss, with gradients, and returns it.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError, TypeError: a hyper-parameter or gradient is not valid; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_params(self.named_params())
        return loss

    @torch.no_grad()
    def step_params(self, params: Iterable[tuple[str, Tensor, dict[str, Any]]]) -> None:
        """Update some parameters: those that have a gradient.

        Args:
            params: (name for messages, parameter, its group) of each, as `named_params` yields them.

        Raises:
            ValueError, TypeError: as `step` does.
        """
        params = list(params)
        self._check_hypers(params)
        self._stepper.step(params)

    def check_params(self, params: Iterable[tuple[str, Tensor, dict[str, Any]]]) -> None:
        """Check the hyper-parameters, gradients and state of parameters as `step_params` does, and change nothing."""
        params = list(params)
        self._check_hypers(params)
        self._stepper.check(params)

    @staticmethod
    def _check_hypers(params: list[tuple[str, Tensor, dict[str, Any]]]) -> None:
        for group in {id(group): group for _, _, group in params}.values():
            check_hyper(group)

    def place(self, param: Tensor) -> int:
        """Return the parameter's place among all parameters: what its noise is keyed by."""
        if param not in self._places:
            self._places = {param: place for place, (_, param, _) in enumerate(self.named_params())}
            self._forget_strangers()
        return self._places[param]

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every trainable parameter and all options, as torch does.

        State that does not exist yet is created first, so that a checkpoint is never silently incomplete. Only an
        optimizer that was never used, without state or gradients, has an empty one, as torch's have: accelerate asks
        for it before it shards or moves the parameters.
        """
        if self.state or any(param.grad is not None for _, param, _ in self.named_params()):
            self.init_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this package, in any format and weight mode, or of torch's Adam, AdamW or SGD.

        Those of torchao and bitsandbytes that `convert_state_dict` reads are converted as they load.

        Hyper-parameters and the seed come from `state_dict`; formats, weight modes and backends stay what this
        optimizer has, and the state is converted to them. Load the model's weights first: correction bits and the
        like are relative to them.

        Raises:
            ValueError: the state dict belongs to another model or optimizer, is incomplete or damaged. The message
                names the entry, and the optimizer is left as it was.
        """
        checkpoint.check_form(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state_dict = from_peers(state_dict)
        groups = checkpoint.merge_groups(self.param_groups, state_dict, STORAGE_DEFAULTS)
        for group in groups:
            self._check_group(group)
        entries = checkpoint.read_state(self, groups, state_dict)
        self.state.clear()
        self.state.update(entries)
        for group, merged in zip(self.param_groups, groups, strict=True):
            group.update(merged)
        self._reset_caches()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @torch.no_grad()
    def fp32_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return the model's state dict with the full-precision values of this optimizer's parameters, in fp32.

        Args:
            model: the model whose parameters this optimizer steps. Its other tensors are returned as they are.
        """
        return checkpoint.full_precision(self, model)

    @torch.no_grad()
    def load_fp32_state_dict(self, model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> None:
        """Set the model's weights, and what this optimizer keeps beside them, from full-precision values.

        Args:
            model: the model whose parameters this optimizer steps.
            state_dict: what `fp32_state_dict` returned, or any state dict of the model.

        Raises:
            RuntimeError: names or shapes do not fit the model, as `model.load_state_dict` reports them.
        """
        checkpoint.load_full_precision(self, model, state_dict)
