"""Hold the rules of optimizers, for the law `update`: what one step makes of weights and moments.

Recomputes Adam, AdamW and SGD in float64 from what the optimizer was given, with a proven bound on
how far torch's and DeepSpeed's own kernels may round away from there (docs/laws/update.md). Pure
functions of tensors and settings; nothing here reads a trace.

Source: torch 2.13.0, optim/adam.py (`_single_tensor_adam`), optim/sgd.py (`_single_tensor_sgd`);
deepspeed 0.19.8, ops/csrc/adam/multi_tensor_adam.cu and ops/csrc/includes/cpu_adam.h.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from gradtrace.analysis.bounds import Estimate, Mask, gamma, underflow
from gradtrace.trace.dtypes import Dtype, Float64

_U32: Final = 2.0**-24
_U64: Final = 2.0**-53
_OWN: Final = 64  # roundings of this recomputation in float64, by a wide margin


@dataclass(frozen=True, slots=True)
class Kernel:
    """Say how an implementation rounds, where that differs from one rounding an operation.

    Attributes:
        scalars: in which precision 1 - beta, beta**step and the like are computed.
        division, root: roundings that one division, one square root are worth.
    """

    scalars: Literal["float64", "float32"]
    division: int
    root: int


KERNELS: Final[Mapping[str, Kernel]] = {
    # for-loop, foreach and fused; a capturable one keeps its scalars in float32
    "torch": Kernel("float64", 1, 1),
    "torch_capturable": Kernel("float32", 1, 1),
    # nvcc --use_fast_math: a quotient within 2 ulp, a root within 2**-23
    "FusedAdam": Kernel("float32", 4, 2),
    "DeepSpeedCPUAdam": Kernel("float32", 1, 1),
}


@dataclass(frozen=True, slots=True)
class Adam:
    """Hold the settings of one step of Adam or AdamW.

    Attributes:
        step: counted from 1, this one included.
        decoupled: AdamW: decay the weight itself instead of adding to the gradient.
        bias_correction: off only where DeepSpeed's ``bias_correction`` is.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    maximize: bool = False
    bias_correction: bool = True


@dataclass(frozen=True, slots=True)
class Sgd:
    """Hold the settings of one step of SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """Hold what a step leaves.

    Attributes:
        weight: after the step.
        moments: by torch's name: ``exp_avg`` and ``exp_avg_sq``, or ``momentum_buffer``.
    """

    weight: Estimate
    moments: Mapping[str, Estimate]


def adam(
    weight: Float64,
    grad: Float64,
    exp_avg: Float64,
    exp_avg_sq: Float64,
    rule: Adam,
    dtype: Dtype,
    kernel: Kernel,
) -> Updated:
    """Recompute one step of Adam or AdamW.

    Args:
        weight: 1-D, before the step.
        grad: 1-D, unscaled and clipped: what the optimizer was given.
        exp_avg, exp_avg_sq: 1-D moments before the step; zeros before the first.
        rule: the settings in effect.
        dtype: the coarsest in which weight, gradient and moments are held or computed.
        kernel: how the implementation rounds; one of `KERNELS`.

    Returns:
        Weight and moments after the step. Where an intermediate may overflow, or the denominator
        may be zero, nothing is said of the element: its error is infinite.
    """
    u, eta = dtype.unit_roundoff, underflow(dtype)
    with np.errstate(all="ignore"):
        g, g_error = _decayed(weight, grad, rule.weight_decay, rule.maximize, rule.decoupled, dtype)
        reach = np.abs(g) + g_error

        first, first_rel = _rest(rule.beta1, kernel)
        m = rule.beta1 * exp_avg + first * g
        spread = _lerp_size(np.abs(exp_avg), reach, first)
        m_error = _grown(4, u, first_rel) * spread + first * g_error + 5 * eta

        second, second_rel = _rest(rule.beta2, kernel)
        v = rule.beta2 * exp_avg_sq + second * g * g
        v_size = rule.beta2 * np.abs(exp_avg_sq) + second * reach * reach
        v_error = _grown(4, u, second_rel) * v_size + 6 * eta
        v_error += second * g_error * (2 * np.abs(g) + g_error)

        one, one_rel = _correction(rule.beta1, rule, kernel)
        two, two_rel = _correction(rule.beta2, rule, kernel)
        root = np.sqrt(np.maximum(v, 0) / two)
        moved = (v_error + 2 * eta) / two
        root_error = np.minimum(np.sqrt(moved), moved / root)
        roundings = kernel.root + kernel.division + 3
        root_error += _grown(roundings, u, two_rel) * (root + root_error) + 2 * eta
        bottom = root + rule.eps
        bottom_error = root_error + _grown(4, u) * (bottom + root_error) + 2 * eta
        least = bottom - bottom_error

        top = m / one
        top_error = m_error / one
        ratio = top / bottom
        ratio_error = top_error / least + np.abs(top) * bottom_error / (bottom * least)
        ratio_error += (
            _grown(2 * kernel.division + 5, u, one_rel) * (np.abs(top) + top_error) / least
        )
        lost_here = 4 * eta * (1 + 1 / least)  # before or after lr is multiplied in
        ratio_error += lost_here

        decay = rule.lr * rule.weight_decay if rule.decoupled else 0.0
        value = weight * (1 - decay) - rule.lr * ratio
        change = decay * np.abs(weight) + rule.lr * (np.abs(ratio) + ratio_error)
        error = _grown(3 if decay else 1, u) * np.abs(weight) + _grown(7, u) * change
        error += rule.lr * ratio_error + lost_here + 6 * eta

        lost = ~(least > 0)
        narrow = dtype.largest / 8
        folded = bottom / min(1.0, rule.lr / one or 1.0)  # as a capturable step divides by
        largest = np.abs(top) + top_error
        sizes = (reach, reach * reach, spread, v_size, folded, np.abs(weight), largest, change)
        for size in (*sizes, largest / least):
            lost |= size >= narrow
        over = (spread >= narrow) | (reach >= narrow)
        squared = (v_size >= narrow) | (reach * reach >= narrow)
    return Updated(
        _result(value, error, lost, weight, grad, exp_avg, exp_avg_sq),
        {
            "exp_avg": _result(m, m_error, over, weight, grad, exp_avg),
            "exp_avg_sq": _result(v, v_error, squared, weight, grad, exp_avg_sq),
        },
    )


def sgd(
    weight: Float64,
    grad: Float64,
    momentum_buffer: Float64 | None,
    rule: Sgd,
    dtype: Dtype,
) -> Updated:
    """Recompute one step of SGD.

    Args:
        weight: 1-D, before the step.
        grad: 1-D, unscaled and clipped.
        momentum_buffer: 1-D, before the step; ``None`` before the first, which copies the gradient
            without dampening.
        rule: the settings in effect.
        dtype: the coarsest in which the tensors are held or computed.
    """
    u, eta = dtype.unit_roundoff, underflow(dtype)
    moments: dict[str, Estimate] = {}
    narrow = dtype.largest / 8
    with np.errstate(all="ignore"):
        g, g_error = _decayed(weight, grad, rule.weight_decay, rule.maximize, False, dtype)
        lost = np.abs(g) + g_error >= narrow
        inputs = [weight, grad]
        if rule.momentum != 0:
            held, held_error = g, g_error
            if momentum_buffer is not None:
                inputs.append(momentum_buffer)
                share = 1 - rule.dampening
                held = rule.momentum * momentum_buffer + share * g
                size = np.abs(rule.momentum * momentum_buffer)
                size += abs(share) * (np.abs(g) + g_error)
                held_error = _grown(3, u) * size + abs(share) * g_error + 4 * eta
                lost |= size >= narrow
            moments["momentum_buffer"] = _result(held, held_error, lost.copy(), *inputs)
            if rule.nesterov:
                size = np.abs(g) + g_error + rule.momentum * (np.abs(held) + held_error)
                g = g + rule.momentum * held
                g_error = g_error + rule.momentum * held_error + _grown(3, u) * size + 4 * eta
                lost |= size >= narrow
            else:
                g, g_error = held, held_error
        value = weight - rule.lr * g
        change = rule.lr * (np.abs(g) + g_error)
        error = _grown(1, u) * np.abs(weight) + _grown(3, u) * change + rule.lr * g_error + 4 * eta
        lost |= (change >= narrow) | (np.abs(weight) >= narrow)
    return Updated(_result(value, error, lost, *inputs), moments)


def _grown(roundings: int, u: float, relative: float = 0.0) -> float:
    """Return the effect of so many roundings and of a scalar that is off by a relative error."""
    own = gamma(_OWN, _U64)
    return (1 + gamma(roundings, u)) * (1 + relative) * (1 + own) - 1


def _decayed(
    weight: Float64, grad: Float64, decay: float, maximize: bool, decoupled: bool, dtype: Dtype
) -> tuple[Float64, Float64]:
    """Return the gradient with its sign and, unless decoupled, the weight decay; and its error."""
    g = -grad if maximize else grad
    if decoupled or decay == 0:
        return g, np.where((g != 0) & (np.abs(g) < dtype.smallest_normal), underflow(dtype), 0.0)
    size = np.abs(g) + decay * np.abs(weight)
    return g + decay * weight, _grown(3, dtype.unit_roundoff) * size + 4 * underflow(dtype)


def _lerp_size(before: Float64, now: Float64, share: float) -> Float64:
    """Return what the roundings of a moving average are relative to, however it is written.

    b*m + (1-b)*g is the smallest; torch's ``lerp`` computes m + (1-b)*(g - m), and for a share of one
    half or more g - (g - m)*b, with b = 1 - share rounded against 1.
    """
    apart = before + now
    return before + share * apart if share < 0.5 else now + (2 - share) * apart


def _rest(beta: float, kernel: Kernel) -> tuple[float, float]:
    """Return 1 - beta, and its relative error beyond one rounding."""
    rest = 1 - beta
    if kernel.scalars == "float64" or rest == 0:
        return rest, 0.0
    return rest, 2 * _U32 * (beta / rest + 1)


def _correction(beta: float, rule: Adam, kernel: Kernel) -> tuple[float, float]:
    """Return 1 - beta**step, and its relative error beyond one rounding."""
    if not rule.bias_correction:
        return 1.0, 0.0
    power = beta**rule.step
    rest = 1 - power
    if kernel.scalars == "float64":
        return rest, 2 * _U32
    # beta is rounded, and its power is a product of `step` factors or within 2 ulp.
    return rest, 2 * _U32 * ((2 * rule.step + 4) * power / rest + 2)


def _result(value: Float64, error: Float64, lost: Mask, *inputs: Float64) -> Estimate:
    """Say nothing of elements that may overflow; what is not finite already, stays so."""
    odd = np.zeros(len(value), dtype=np.bool_)
    for tensor in inputs:
        odd |= ~np.isfinite(tensor)
    odd |= ~np.isfinite(error)
    lost = lost | odd
    return Estimate(np.where(lost, 0.0, value), np.where(lost, math.inf, error), lost)
