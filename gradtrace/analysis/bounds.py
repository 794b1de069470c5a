"""Bound what rounding may do to one hop of the gradient path, element by element, in float64.

An `Estimate` holds the float64 recomputation of a quantity and a proven bound on how far the traced
run's own low-precision computation of it may lie from there. Each function is one operation of the
run (add up, multiply, cast) and carries the bound along: a running error analysis, so a law spells
its path and the bound follows.

For one operation in round-to-nearest, ``fl(a op b) = (a op b)(1 + d)`` with ``|d| <= u / (1 + u)``.
Kernels compute 16-bit operations in float32 and round again, so ``|d| <= u + u*u`` is taken. A sum of
n terms in *any* order (sequential, tree, ring, higher-precision accumulator) multiplies each term by
at most n - 1 such factors, whence ``|error| <= ((1 + u + u*u)**(n-1) - 1) * sum |x_i|``, which is at
most Higham's ``gamma``. Underflow adds an absolute term an operation.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2.2, 2.3, 3.1, 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrace.trace.dtypes import DTYPES, Dtype, Float64

Mask = NDArray[np.bool_]
_U64: Final = 2.0**-53
_WIDER: Final[dict[str, frozenset[str]]] = {
    "bfloat16": frozenset({"bfloat16", "float32", "float64"}),
    "float16": frozenset({"float16", "float32", "float64"}),
    "float32": frozenset({"float32", "float64"}),
    "float64": frozenset({"float64"}),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Hold a recomputed quantity and how far the run's own computation may lie from it.

    Attributes:
        value: 1-D float64 recomputation.
        error: 1-D, proven bound on ``|computed - value|`` where both are finite.
        overflow: 1-D, where the computation may have overflowed although ``value`` is finite.
    """

    value: Float64
    error: Float64
    overflow: Mask


@dataclass(frozen=True, slots=True)
class Judgement:
    """Say how a recorded tensor compares with its estimate.

    Attributes:
        broken: how many elements lie outside the bound.
        index: the lowest of them (position in the compared stretch), or ``None``.
        expected: the estimate there.
        found: the recorded value there.
        bound: the bound there.
        max_abs: largest finite absolute error over all elements; infinite when a non-finite breaks.
        rel_l2: L2 norm of the finite errors over the L2 norm of the finite expected values.
        worst_ratio: largest error over bound; 0 when everything is exact, infinite for an error where
            none is allowed.
    """

    broken: int
    index: int | None
    expected: float | None
    found: float | None
    bound: float | None
    max_abs: float
    rel_l2: float
    worst_ratio: float


def gamma(n: int, unit_roundoff: float) -> float:
    """Return the largest relative effect of n roundings, ``(1 + u + u*u)**n - 1``.

    It never exceeds ``n*u / (1 - n*u)`` by more than rounding of this very formula, and unlike that
    one it exists for every n.

    Args:
        n: number of roundings that a term can meet; 0 or less means none.
        unit_roundoff: u of the dtype.

    Source: Higham, Lemma 3.1.
    """
    if n <= 0:
        return 0.0
    exponent = n * math.log1p(unit_roundoff + unit_roundoff * unit_roundoff)
    return math.expm1(exponent) * (1 + 8 * _U64) if exponent < 700 else math.inf


def underflow(dtype: Dtype) -> float:
    """Return the largest absolute error that one product or cast makes by underflow.

    Half the distance of subnormals where they are kept. float32 and bfloat16 kernels may flush
    subnormals, which loses up to the smallest normal. float16 results are never flushed: F16C and CUDA
    keep its subnormals whatever the flush flags say, and their float32 forms are normal.
    """
    if dtype.name == "float16":
        return dtype.smallest_subnormal / 2
    return dtype.smallest_normal


def flushed(dtype: Dtype) -> float:
    """Return the largest absolute error of one addition by flushing its inputs and its result.

    Without flushing a sum in the subnormal range is exact (Higham, 2.2, Hauser's theorem): a sum is a
    whole multiple of the smallest subnormal, so below the smallest normal it is itself a number.
    """
    return 0.0 if dtype.name == "float16" else 3 * dtype.smallest_normal


def embeds(source: Dtype, target: Dtype) -> bool:
    """Say whether every value of one dtype is a value of the other, so that a cast is exact."""
    return target.name in _WIDER[source.name]


def coarsest(names: Sequence[str]) -> Dtype:
    """Return the dtype with the largest unit roundoff.

    Raises:
        KeyError: a name is no dtype of the format.
    """
    return max((DTYPES[name] for name in names), key=lambda dtype: dtype.unit_roundoff)


def is_power_of_two(factor: float) -> bool:
    """Say whether multiplying by a factor only moves the exponent."""
    return factor != 0 and math.isfinite(factor) and abs(math.frexp(factor)[0]) == 0.5


def exact(values: Float64) -> Estimate:
    """Take recorded values as they are."""
    return Estimate(values, np.zeros(len(values)), np.zeros(len(values), dtype=np.bool_))


def zeros(numel: int) -> Estimate:
    """Return exact zeros."""
    return exact(np.zeros(numel))


def add_up(terms: Sequence[Estimate], dtype: Dtype) -> Estimate:
    """Sum terms in any order, every addition rounded to a dtype or finer.

    Args:
        terms: at least one; of equal length.
        dtype: what the sums are rounded to.

    Returns:
        ``error`` is the terms' own errors, ``gamma(n-1, u) * sum(|x_i| + error_i)``, flushing, and
        the rounding of this recomputation. What an addition flushes, the later ones carry on and
        round: hence ``1 + gamma`` with it. One term alone is a copy, or an addition to zero; that is
        exact, but for a subnormal term.
    """
    n = len(terms)
    value = terms[0].value.copy()
    error = terms[0].error.copy()
    size = np.abs(terms[0].value) + terms[0].error
    overflow = terms[0].overflow.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for term in terms[1:]:
            value += term.value
            error += term.error
            size += np.abs(term.value) + term.error
            overflow |= term.overflow
        if n == 1:
            tiny = (size > 0) & (np.abs(value) - error < dtype.smallest_normal)
            return Estimate(value, error + np.where(tiny, flushed(dtype), 0.0), overflow)
        growth = gamma(n - 1, dtype.unit_roundoff)
        error += (growth + gamma(2 * n, _U64)) * size + n * (1 + growth) * flushed(dtype)
        overflow |= size * (1 + growth) >= dtype.largest
    return Estimate(value, error, overflow)


def either(one: Estimate, other: Estimate) -> Estimate:
    """Allow what either of two ways to compute the same values may lose."""
    return Estimate(one.value, np.maximum(one.error, other.error), one.overflow | other.overflow)


def scale(term: Estimate, factor: float, dtype: Dtype) -> Estimate:
    """Multiply or divide by a scalar, the product rounded to a dtype.

    A factor that is no power of two counts as two roundings: kernels divide by multiplying with a
    rounded reciprocal, and scalars such as 1/W are rounded before the product is.
    """
    if factor == 1:
        return term
    with np.errstate(invalid="ignore", over="ignore"):
        value = term.value * factor
        error = term.error * abs(factor)
        size = np.abs(value) + error
        roundings = 0 if is_power_of_two(factor) else 2
        error = error + (gamma(roundings, dtype.unit_roundoff) + 4 * _U64) * size
        error += (roundings or 1) * underflow(dtype)
        overflow = term.overflow | ((abs(factor) > 1) & (size * 1.01 >= dtype.largest))
    return Estimate(value, error, overflow)


def cast(term: Estimate, source: Dtype, target: Dtype) -> Estimate:
    """Convert from one dtype to another; exact when the target holds every value of the source."""
    if embeds(source, target):
        return term
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(term.value) + term.error
        error = term.error + gamma(1, target.unit_roundoff) * size + underflow(target)
        overflow = term.overflow | (size >= target.largest)
    return Estimate(term.value, error, overflow)


def breaks(found: Float64, estimate: Estimate) -> Mask:
    """Mark the elements that the bound does not cover.

    Written as ``not (|error| <= bound)``, so a NaN breaks it. Non-finite elements must be the same
    on both sides, except where the computation may have overflowed.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # The subtraction rounds too. Nothing of `found` may enter the bound: it can be infinite.
        slack = 4 * _U64 * (np.abs(estimate.value) + estimate.error) * (estimate.error > 0)
        outside = ~(np.abs(found - estimate.value) <= estimate.error + slack)
    lost, lost_here = ~np.isfinite(estimate.value), ~np.isfinite(found)
    outside = (outside & ~(lost & lost_here)) | (lost & ~lost_here)
    outside &= ~(lost_here & estimate.overflow)
    result: Mask = outside
    return result


def judge(found: Float64, estimate: Estimate) -> Judgement:
    """Compare recorded values with their estimate."""
    outside = breaks(found, estimate)
    broken = int(outside.sum())
    usable = np.isfinite(found) & np.isfinite(estimate.value)
    if usable.all():
        error, expected, bound = found - estimate.value, estimate.value, estimate.error
    else:
        expected, bound = estimate.value[usable], estimate.error[usable]
        error = found[usable] - expected
    size = np.abs(error)
    wrong = size > 0
    worst = 0.0
    if wrong.any():
        with np.errstate(divide="ignore", over="ignore"):
            worst = float(np.max(size[wrong] / bound[wrong]))
    max_abs = float(size.max(initial=0.0))
    if (outside & ~usable).any():
        worst = max_abs = math.inf
    at = int(np.argmax(outside)) if broken else None
    return Judgement(
        broken=broken,
        index=at,
        expected=None if at is None else float(estimate.value[at]),
        found=None if at is None else float(found[at]),
        bound=None if at is None else float(estimate.error[at]),
        max_abs=max_abs,
        rel_l2=relative_l2(error, expected),
        worst_ratio=worst,
    )


def relative_l2(error: Float64, expected: Float64) -> float:
    """Return ``|error| / |expected|`` in the L2 norm; 0/0 is 0, and x/0 infinite."""
    top, bottom = _norm(error), _norm(expected)
    if top == 0:
        return 0.0
    return top / bottom if bottom > 0 else math.inf


def _norm(values: Float64) -> float:
    # Scaled first: squares of values near float32's ends leave float64's middle, not its range, but
    # float64 records exist too.
    top = float(np.abs(values).max(initial=0.0))
    if top == 0 or not math.isfinite(top):
        return top
    return top * float(np.linalg.norm(values / top))
