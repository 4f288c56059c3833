"""Update rules: the device side of `lowbit_optim.rules`, line by line.

A rule takes `(weight, grad, *slots, h)`, fp32 tiles and a pointer to the step's scalars, and returns the new weight
and slots. A carry takes `(lost, *other slots, h)`, what rounding took from the first slot and the fresh other ones, and
returns the change of weight that makes up for it. Square roots and divisions are those of IEEE 754, as torch computes
them.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Scalars of Adam's variants, in order; `h` points to their first.
ADAM_SCALARS = (
    "grad_sign",
    "beta1_rest",
    "beta2",
    "beta2_rest",
    "step_size",
    "bias2_rsqrt",
    "eps",
    "weight_decay",
    "keep",
    "carry",
)
LION_SCALARS = ("grad_sign", "beta1_rest", "beta2_rest", "lr", "keep")
SGD_SCALARS = ("grad_sign", "momentum", "grad_share", "lr", "weight_decay")


@triton.jit
def _moments(grad, exp_avg, exp_avg_sq, h):
    beta1_rest, beta2, beta2_rest = tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
    exp_avg = exp_avg + (grad - exp_avg) * beta1_rest
    return exp_avg, exp_avg_sq * beta2 + grad * grad * beta2_rest


@triton.jit
def _adam_direction(exp_avg, exp_avg_sq, h):
    step_size, bias2_rsqrt, eps = tl.load(h + 4), tl.load(h + 5), tl.load(h + 6)
    return step_size * tl.div_rn(exp_avg, tl.sqrt_rn(exp_avg_sq) * bias2_rsqrt + eps)


@triton.jit
def _kept(exp_avg, exp_avg_sq):
    return tl.where(exp_avg_sq == float("inf"), 0.0, exp_avg)


@triton.jit
def adam_carry(lost, exp_avg_sq, h):
    """What a part of the first moment would still do to the weight."""
    return -_adam_direction(lost * tl.load(h + 9), exp_avg_sq, h)


@triton.jit
def adam_amsgrad_carry(lost, exp_avg_sq, max_exp_avg_sq, h):
    """The same with AMSGrad."""
    return -_adam_direction(lost * tl.load(h + 9), max_exp_avg_sq, h)


@triton.jit
def adamw(weight, grad, exp_avg, exp_avg_sq, h):
    """AdamW."""
    exp_avg, exp_avg_sq = _moments(grad, exp_avg, exp_avg_sq, h)
    weight = weight * tl.load(h + 8) - _adam_direction(exp_avg, exp_avg_sq, h)
    return weight, _kept(exp_avg, exp_avg_sq), exp_avg_sq


@triton.jit
def adamw_amsgrad(weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, h):
    """AdamW dividing by the largest second moment so far."""
    exp_avg, exp_avg_sq = _moments(grad, exp_avg, exp_avg_sq, h)
    largest = tl.maximum(max_exp_avg_sq, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
    weight = weight * tl.load(h + 8) - _adam_direction(exp_avg, largest, h)
    return weight, _kept(exp_avg, exp_avg_sq), exp_avg_sq, largest


@triton.jit
def adam(weight, grad, exp_avg, exp_avg_sq, h):
    """Adam: weight decay is part of the gradient."""
    exp_avg, exp_avg_sq = _moments(grad + tl.load(h + 7) * weight, exp_avg, exp_avg_sq, h)
    return weight - _adam_direction(exp_avg, exp_avg_sq, h), _kept(exp_avg, exp_avg_sq), exp_avg_sq


@triton.jit
def adam_amsgrad(weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, h):
    """Adam dividing by the largest second moment so far."""
    exp_avg, exp_avg_sq = _moments(grad + tl.load(h + 7) * weight, exp_avg, exp_avg_sq, h)
    largest = tl.maximum(max_exp_avg_sq, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
    return weight - _adam_direction(exp_avg, largest, h), _kept(exp_avg, exp_avg_sq), exp_avg_sq, largest


@triton.jit
def _from_ratio(ratio, exp_avg_sq):
    # Bounded above any finite root: the ratio to an overflowed square is zero, and 0 * inf would be NaN.
    return ratio * tl.minimum(tl.sqrt_rn(exp_avg_sq), 2e19)


@triton.jit
def _to_ratio(exp_avg, exp_avg_sq):
    root = tl.sqrt_rn(exp_avg_sq)
    return tl.where(root > 0, tl.div_rn(exp_avg, root), 0.0)


@triton.jit
def adam_ratio_carry(lost, exp_avg_sq, h):
    """What a part of the ratio would still do to the weight."""
    return adam_carry(_from_ratio(lost, exp_avg_sq), exp_avg_sq, h)


@triton.jit
def adam_amsgrad_ratio_carry(lost, exp_avg_sq, max_exp_avg_sq, h):
    """The same with AMSGrad."""
    return adam_amsgrad_carry(_from_ratio(lost, exp_avg_sq), exp_avg_sq, max_exp_avg_sq, h)


@triton.jit
def adamw_ratio(weight, grad, ratio, exp_avg_sq, h):
    """AdamW whose first moment is held as its ratio to the root of the second."""
    weight, exp_avg, exp_avg_sq = adamw(weight, grad, _from_ratio(ratio, exp_avg_sq), exp_avg_sq, h)
    return weight, _to_ratio(exp_avg, exp_avg_sq), exp_avg_sq


@triton.jit
def adamw_amsgrad_ratio(weight, grad, ratio, exp_avg_sq, max_exp_avg_sq, h):
    """AdamW with AMSGrad whose first moment is held as its ratio to the root of the second."""
    exp_avg = _from_ratio(ratio, exp_avg_sq)
    weight, exp_avg, exp_avg_sq, largest = adamw_amsgrad(weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, h)
    return weight, _to_ratio(exp_avg, exp_avg_sq), exp_avg_sq, largest


@triton.jit
def adam_ratio(weight, grad, ratio, exp_avg_sq, h):
    """Adam whose first moment is held as its ratio to the root of the second."""
    weight, exp_avg, exp_avg_sq = adam(weight, grad, _from_ratio(ratio, exp_avg_sq), exp_avg_sq, h)
    return weight, _to_ratio(exp_avg, exp_avg_sq), exp_avg_sq


@triton.jit
def adam_amsgrad_ratio(weight, grad, ratio, exp_avg_sq, max_exp_avg_sq, h):
    """Adam with AMSGrad whose first moment is held as its ratio to the root of the second."""
    exp_avg = _from_ratio(ratio, exp_avg_sq)
    weight, exp_avg, exp_avg_sq, largest = adam_amsgrad(weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, h)
    return weight, _to_ratio(exp_avg, exp_avg_sq), exp_avg_sq, largest


@triton.jit
def lion(weight, grad, exp_avg, h):
    """Lion: the sign of an interpolated momentum."""
    beta1_rest, beta2_rest, lr, keep = tl.load(h + 1), tl.load(h + 2), tl.load(h + 3), tl.load(h + 4)
    mixed = exp_avg + (grad - exp_avg) * beta1_rest
    direction = (mixed > 0).to(tl.float32) - (mixed < 0).to(tl.float32)
    return weight * keep - lr * direction, exp_avg + (grad - exp_avg) * beta2_rest


@triton.jit
def sgd(weight, grad, h):
    """Stochastic gradient descent without momentum."""
    lr, weight_decay = tl.load(h + 3), tl.load(h + 4)
    return weight - lr * (grad + weight_decay * weight)


@triton.jit
def _momentum(weight, grad, buffer, h):
    momentum, grad_share, weight_decay = tl.load(h + 1), tl.load(h + 2), tl.load(h + 4)
    grad = grad + weight_decay * weight
    return grad, buffer * momentum + grad * grad_share


@triton.jit
def sgd_momentum(weight, grad, momentum_buffer, h):
    """SGD with heavy-ball momentum."""
    _, buffer = _momentum(weight, grad, momentum_buffer, h)
    return weight - tl.load(h + 3) * buffer, buffer


@triton.jit
def sgd_nesterov(weight, grad, momentum_buffer, h):
    """SGD with Nesterov momentum."""
    grad, buffer = _momentum(weight, grad, momentum_buffer, h)
    return weight - tl.load(h + 3) * (grad + tl.load(h + 1) * buffer), buffer
