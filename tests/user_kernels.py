"""The device functions that docs/extending.md adds: Triton reads their source, so they lie in a file."""

import triton
import triton.language as tl


@triton.jit
def adabelief_kernel(weight, grad, exp_avg, exp_avg_var, h):
    """AdaBelief; the scalars are those of `adam_scalars`, after the gradient's sign."""
    beta1_rest, beta2, beta2_rest, step_size = tl.load(h + 1), tl.load(h + 2), tl.load(h + 3), tl.load(h + 4)
    bias2_rsqrt, eps, keep = tl.load(h + 5), tl.load(h + 6), tl.load(h + 8)
    mean = exp_avg + (grad - exp_avg) * beta1_rest
    surprise = grad - mean
    var = exp_avg_var * beta2 + surprise * surprise * beta2_rest + eps
    step = tl.div_rn(step_size * mean, tl.sqrt_rn(var) * bias2_rsqrt + eps)
    return weight * keep - step, mean, var


@triton.jit
def square4_level(code):
    """Level of `square4` for signed slots."""
    root = tl.div_rn(code.to(tl.float32), 7.0)
    return root * root


@triton.jit
def square4_floor(share):
    """Floor of `square4` for signed slots."""
    return tl.floor(tl.sqrt(share) * 7.0)


@triton.jit
def square4_unsigned_level(code):
    """Level of `square4` for slots that are never negative."""
    root = tl.div_rn(code.to(tl.float32) + 1.0, 16.0)
    return root * root


@triton.jit
def square4_unsigned_floor(share):
    """Floor of `square4` for slots that are never negative."""
    return tl.maximum(tl.floor(tl.sqrt(share) * 16.0) - 1.0, 0.0)
