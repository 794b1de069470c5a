"""Draw what property tests need: tensors of any magnitude, arithmetics, and how many examples."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from gradtrace.testing.arithmetic import ORDERS, Arithmetic
from gradtrace.trace.dtypes import DTYPES, from_float64, raw_bits, to_float64

NAMES = ("float32", "bfloat16", "float16")
DEEP = settings.get_current_profile_name() == "deep"
seeds = st.integers(0, 2**32 - 1)


def examples(count):
    """Run so many examples, the same ones each time; twenty times as many, new ones, when deep."""
    return settings(
        max_examples=5 * count if DEEP else count,
        derandomize=not DEEP,
        deadline=None,
        database=None,
    )


def rounded(values, dtype):
    return to_float64(raw_bits(from_float64(values, dtype), dtype), dtype).reshape(values.shape)


def arithmetics(rng, *, postscale=None, predivide=True):
    """Return a random way to average."""
    return Arithmetic(
        order=str(rng.choice(ORDERS)),
        wide=bool(rng.random() < 0.3),
        flush=bool(rng.random() < 0.4),
        predivide=float(rng.choice([1, 1, 2, 3, 8, 7.5, 0.5, 0.3])) if predivide else 1.0,
        postscale=bool(rng.random() < 0.5) if postscale is None else postscale,
        seed=int(rng.integers(2**31)),
    )


def magnitudes(dtype):
    return math.log2(dtype.smallest_subnormal), math.log2(dtype.largest)


def tensor(rng, dtype, numel, *, special=0.0, scale=None):
    """Return values of a dtype, of one of several structures, magnitudes over its whole range.

    Args:
        special: share of the elements that are NaN, infinite, zero, or at an end of the range.
        scale: binary exponent of the typical element; drawn over the whole range by default.
    """
    low, high = magnitudes(dtype)
    exponent = rng.uniform(low, high) if scale is None else scale
    kind = rng.integers(7)
    values = rng.standard_normal(numel)
    if kind == 1:
        values = np.full(numel, rng.standard_normal())
    elif kind == 2:
        values *= np.arange(numel) % 7 == 3
    elif kind == 3:
        values *= np.exp2(rng.integers(-12, 1, numel))
    elif kind == 4:
        values = np.abs(values)
    elif kind == 5:  # every element of another size, over the whole range
        values = np.sign(values) * np.exp2(rng.uniform(low, high, numel) - exponent)
    elif kind == 6:  # a few units in the last place around a power of two
        values = np.sign(values) * (1 + rng.integers(-3, 4, numel) * dtype.unit_roundoff)
    with np.errstate(over="ignore"):
        values = values * 2.0 ** int(exponent)
    odd = rng.random(numel) < special
    ends = [0.0, -0.0, dtype.largest, -dtype.largest, dtype.smallest_normal]
    ends += [dtype.smallest_subnormal, -dtype.smallest_subnormal]
    if rng.random() < 0.3:
        ends += [math.nan, math.inf, -math.inf]
    values[odd] = rng.choice(ends, int(odd.sum()))
    return rounded(values, dtype)


def tensors(rng, dtype, count, numel, **more):
    """Return several tensors of one magnitude (mostly), as the ranks of a group have."""
    low, high = magnitudes(dtype)
    scale = rng.uniform(low, high)
    return [
        tensor(rng, dtype, numel, scale=scale if rng.random() < 0.8 else None, **more)
        for _ in range(count)
    ]


def dtype_of(name):
    return DTYPES[name]
