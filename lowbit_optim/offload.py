"""CPU offload: an optimizer whose state lives and steps on the host, for models whose state does not fit a device.

Gradients are copied to pinned memory on a stream of their own as they arrive, the step runs on the host, and weights
are copied back. The result is that of the same optimizer on the device, bit for bit where both backends agree.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .engine import LowBitOptimizer
from .sharding import is_sharded

Closure = Callable[[], Any]
#: Bytes of weights that are stepped before they are sent back together.
_BATCH_BYTES = 64 << 20


class Done(Protocol):
    """A copy under way."""

    def synchronize(self) -> None:
        """Wait until it has been made."""


class Copier(Protocol):
    """Copies between a device and the host, in order, beside the work of the device."""

    def pinned(self, like: Tensor) -> Tensor:
        """Return an empty host tensor that can be copied to and from."""

    def start(self, source: Tensor, target: Tensor) -> Done:
        """Begin a copy after what the device has been given so far, and after earlier copies."""

    def join(self) -> None:
        """Let what the device is given next wait for all copies begun so far."""


class HostCopier:
    """For parameters that are on the host anyway: copies at once."""

    def pinned(self, like: Tensor) -> Tensor:
        """See `Copier`."""
        return torch.empty(like.shape, dtype=like.dtype)

    def start(self, source: Tensor, target: Tensor) -> Done:
        """See `Copier`."""
        target.copy_(source)
        return _Finished()

    def join(self) -> None:
        """See `Copier`."""


class _Finished:
    def synchronize(self) -> None:
        """Nothing is under way."""


class StreamCopier:
    """Copies on a stream of its own, with an event for each copy.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device=device)

    def pinned(self, like: Tensor) -> Tensor:
        """See `Copier`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def start(self, source: Tensor, target: Tensor) -> Done:
        """See `Copier`."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done: Done = self._module.Event()
            done.record(self._stream)  # type: ignore[attr-defined]
        for tensor in (source, target):
            if tensor.device == self._device:
                # The allocator must not hand its memory out again before the copy has been made.
                tensor.record_stream(self._stream)
        return done

    def join(self) -> None:
        """See `Copier`."""
        self._module.current_stream(self._device).wait_stream(self._stream)


@dataclass
class _Offloaded:
    """A parameter's host side.

    Attributes:
        host: the host's copy of the weight, which the optimizer steps.
        device: the weight's device when the copy was made.
        grad: its gradient's pinned buffer.
        weight_version: of the device's weight when the two were last equal, as autograd counts changes.
        arrived: the gradient, its version and its copy under way.
        turn: place in the order in which gradients arrived.
        sent: the weight's copy under way.
    """

    host: Tensor
    device: torch.device
    weight_version: int
    grad: Tensor | None = None
    arrived: tuple[weakref.ref[Tensor], int, Done] | None = None
    turn: int = -1
    sent: Done = field(default_factory=_Finished)


def _make_copier(device: torch.device) -> Copier:
    return HostCopier() if device.type == "cpu" else StreamCopier(device)


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """Runs an optimizer of this package on the host, for parameters on a device.

    It is an ordinary optimizer from outside: schedulers, parameter groups, clipping, gradient accumulation, closures
    and checkpoints work, and its state dict is that of the optimizer it runs, so that either loads the other's.
    Gradients stay on the device until `zero_grad`; what is changed after they arrived, as by clipping, is copied again.

    Host memory per parameter: its state, as without offload, and copies of weight and gradient in their dtypes.

    Args:
        params: as for any optimizer; parameters on the device.
        optimizer_class: a class of this package, such as `AdamW8bit`.
        min_offload_numel: parameters with fewer elements are stepped where they are.
        make_copier: returns the `Copier` for a device; None chooses by the device's type.
        **options: arguments of `optimizer_class`.

    Raises:
        TypeError: `optimizer_class` is not of this package, or a parameter is a DTensor (use FSDP2's
            `CPUOffloadPolicy`, with which these optimizers step on the host as they are).
    """

    # GradScaler then sets these two around `step` in place of unscaling the gradients itself.
    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[LowBitOptimizer],
        *,
        min_offload_numel: int = 4096,
        make_copier: Callable[[torch.device], Copier] | None = None,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, LowBitOptimizer)):
            raise TypeError(f"optimizer_class must be an optimizer of lowbit_optim, got {optimizer_class!r}")
        # Checks the arguments and tells the defaults, on a parameter of no importance.
        defaults = optimizer_class([torch.nn.Parameter(torch.zeros(1))], **options).defaults
        self._make: Callable[[Any], LowBitOptimizer] = functools.partial(optimizer_class, **options)
        self._inner: LowBitOptimizer | None = None
        self._min_offload_numel = min_offload_numel
        self._make_copier = make_copier or _make_copier
        self._copiers: dict[torch.device, Copier] = {}
        self._offloaded: dict[Tensor, _Offloaded] = {}
        self._turns = itertools.count()
        super().__init__(params, defaults)

    @property
    def optimizer(self) -> LowBitOptimizer:
        """The optimizer that runs on the host."""
        assert self._inner is not None
        return self._inner

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("CPUOffloadOptimizer cannot be pickled or copied; save its state_dict() instead")

    # Groups ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._add_to_inner(group)
        except BaseException:
            self.param_groups.pop()
            raise

    def _add_to_inner(self, group: dict[str, Any]) -> None:
        if any(is_sharded(param) for param in group["params"]):
            raise TypeError("CPUOffloadOptimizer takes plain parameters; for sharded ones use FSDP2's CPUOffloadPolicy")
        hosts = [self._host_of(param) for param in group["params"]]
        # `param_names` go with the parameters; the rest of the options are shared.
        given = {**group, "params": hosts}
        if self._inner is None:
            self._inner = self._make([given])
        else:
            self._inner.add_param_group(given)
        group.update({name: value for name, value in self._inner.param_groups[-1].items() if name != "params"})

    def _host_of(self, param: Tensor) -> Tensor:
        if param.numel() < self._min_offload_numel:
            return param
        host = torch.nn.Parameter(self._copier(param).pinned(param), requires_grad=param.requires_grad)
        self._copier(param).start(param.detach(), host.detach()).synchronize()
        self._offloaded[param] = _Offloaded(host, param.device, param._version)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self._gradient_arrived)  # type: ignore[no-untyped-call]
        return host

    def _copier(self, param: Tensor) -> Copier:
        if param.device not in self._copiers:
            self._copiers[param.device] = self._make_copier(param.device)
        return self._copiers[param.device]

    def _pairs(self) -> Iterable[tuple[str, Tensor, Tensor, dict[str, Any]]]:
        """Yield (name, parameter, what the inner optimizer has in its place, inner group)."""
        params = (param for group in self.param_groups for param in group["params"])
        for param, (name, host, group) in zip(params, self.optimizer.named_params(), strict=True):
            yield name, param, host, group

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _gradient_arrived(self, param: Tensor) -> None:
        """Begin to copy a gradient to the host; after a later backward pass its sum is copied over it."""
        entry, grad = self._offloaded[param], param.grad
        if grad is None or grad.layout != torch.strided:
            return
        if entry.grad is None or entry.grad.dtype != grad.dtype:
            entry.grad = self._copier(param).pinned(grad)
        done = self._copier(param).start(grad.detach(), entry.grad)
        entry.arrived, entry.turn = (weakref.ref(grad), grad._version, done), next(self._turns)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; see `LowBitOptimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None and not self._unscale():
            return loss
        self._share_options()
        for param in self._offloaded:
            self._bring_gradient(param)
        due = [pair for pair in self._pairs() if pair[1].grad is not None]
        self.optimizer.check_params([(name, host, group) for name, _, host, group in due])
        # The first to arrive go first: the host then works while the last are on their way.
        due.sort(key=lambda pair: self._offloaded[pair[1]].turn if pair[1] in self._offloaded else -1)
        batch: list[tuple[str, Tensor, Tensor, dict[str, Any]]] = []
        size = 0
        for pair in due:
            batch.append(pair)
            size += pair[2].nbytes
            if size >= _BATCH_BYTES:
                self._step_batch(batch)
                batch, size = [], 0
        self._step_batch(batch)
        for copier in self._copiers.values():
            copier.join()
        self._share_state()
        return loss

    def _unscale(self) -> bool:
        """Do a GradScaler's part, and return whether to step at all.

        Its own way of unscaling would change gradients without autograd's knowing, after they have been copied.
        """
        for entry in self._offloaded.values():
            entry.arrived = None
        if self.found_inf.item():
            return False
        if self.grad_scale is not None:
            inverse = self.grad_scale.double().reciprocal().float()
            for _, param, _, _ in self._pairs():
                if param.grad is not None:
                    param.grad.mul_(inverse.to(param.grad.device))
        return True

    def _share_options(self) -> None:
        """Give the inner groups what users and schedulers put into the outer ones."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            theirs.update({name: value for name, value in mine.items() if name != "params"})

    def _bring_gradient(self, param: Tensor) -> None:
        entry, grad = self._offloaded[param], param.grad
        if grad is None or grad.layout != torch.strided:
            # The inner optimizer refuses sparse gradients by name.
            entry.host.grad = grad
            return
        if entry.arrived is None or entry.arrived[0]() is not grad or entry.arrived[1] != grad._version:
            self._gradient_arrived(param)
        self._refresh(param)
        entry.host.grad = entry.grad

    def _refresh(self, param: Tensor) -> None:
        """Copy a weight that somebody else has written to, as loading a checkpoint does, to the host.

        Trainers may also cast or move a model whose optimizer they have made already.
        """
        entry = self._offloaded[param]
        if entry.host.dtype != param.dtype or entry.device != param.device:
            entry.host.data = self._copier(param).pinned(param)
            entry.device, entry.weight_version = param.device, -1
        if param._version != entry.weight_version:
            entry.sent.synchronize()
            self._copier(param).start(param.detach(), entry.host.detach()).synchronize()
            entry.weight_version = param._version

    def _step_batch(self, batch: list[tuple[str, Tensor, Tensor, dict[str, Any]]]) -> None:
        """Wait for the gradients of some parameters, step them and begin to send the weights back."""
        for _, param, _, _ in batch:
            entry = self._offloaded.get(param)
            if entry is not None and entry.arrived is not None:
                entry.arrived[2].synchronize()
                # The host must not write to a weight that is still on its way from the last step.
                entry.sent.synchronize()
        self.optimizer.step_params([(name, host, group) for name, _, host, group in batch])
        for _, param, host, _ in batch:
            entry = self._offloaded.get(param)
            if entry is not None:
                entry.sent = self._copier(param).start(host.detach(), param.detach())
                entry.weight_version, entry.arrived = param._version, None
                host.grad = None

    # State -----------------------------------------------------------------------------------------------------------

    def _share_state(self) -> None:
        """Show the inner optimizer's state under the parameters themselves."""
        self.state.clear()
        for _, param, host, _ in self._pairs():
            if self.optimizer.state.get(host):
                self.state[param] = self.optimizer.state[host]

    @torch.no_grad()
    def init_state(self) -> None:
        """Create all state without a step; see `LowBitOptimizer.init_state`."""
        for _, param, host, _ in self._pairs():
            host.requires_grad_(param.requires_grad)
            if param in self._offloaded:
                self._refresh(param)
        self.optimizer.init_state()
        self._share_state()

    def memory_bytes(self) -> int:
        """Return the bytes of all optimizer state and of the host's copies of weights and gradients."""
        copies = [tensor for entry in self._offloaded.values() for tensor in (entry.host, entry.grad)]
        return self.optimizer.memory_bytes() + sum(tensor.nbytes for tensor in copies if tensor is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return what the inner optimizer's `state_dict` would on the device's parameters."""
        self._share_options()
        self.init_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `LowBitOptimizer.load_state_dict` takes; the state stays on the host."""
        self._share_options()
        for param in self._offloaded:
            self._refresh(param)
        self.optimizer.load_state_dict(state_dict)
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})
        self._share_state()
