"""The coefficient test: silent on every path that rounds right, and it sees what the issue asks for.

A coefficient is convicted when it lies further from 1 than the fit's own resolution. For the data
below that is finer than 5 % in bfloat16 and 0.1 % in float32; where ranks are so much alike that it
is not, the fit says so (`Coefficient.resolution`), and convicts what is above it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis import bounds
from gradtrace.analysis.fit import SIGMAS, fit
from gradtrace.analysis.laws import reduce
from gradtrace.testing.arithmetic import ORDERS, Arithmetic, mean
from gradtrace.trace.dtypes import DTYPES
from tests.analysis.properties import (
    NAMES,
    arithmetics,
    dtype_of,
    examples,
    rounded,
    seeds,
    tensors,
)

KINDS = ("normal", "correlated", "heavy", "sparse")
OFF = {"bfloat16": 1.05, "float32": 1.001}


def gradients(rng, kind, world, numel):
    """Return what ranks hold: independent, alike (cosine 0.9), heavy-tailed, or with empty rows."""
    rows = rng.standard_normal((world, numel))
    if kind == "correlated":
        rows = np.sqrt(0.9) * rng.standard_normal(numel) + np.sqrt(0.1) * rows
    elif kind == "heavy":
        rows = rng.standard_t(3, (world, numel))
    elif kind == "sparse":  # an embedding: each rank has met three tokens of ten
        present = rng.random((world, -(-numel // 25))) < 0.3
        rows *= np.repeat(present, 25, axis=1)[:, :numel]
    return rows * 10.0 ** rng.uniform(-4, 1)


def reduced(rows, dtype, how, weights=None):
    """Return what a mean of rounded rows gives, and its fit and estimate.

    Args:
        weights: what each rank's gradient is wrongly multiplied with before it is sent.
    """
    rows = [rounded(row, dtype) for row in rows]
    weights = np.ones(len(rows)) if weights is None else weights
    sent = [rounded(weight * row, dtype) for weight, row in zip(weights, rows, strict=True)]
    found = mean(sent, dtype, how)
    way = reduce.Way(dtype, 1 / len(rows), how.predivide, late=how.postscale)
    entered = [(rank, bounds.exact(row), dtype) for rank, row in enumerate(rows)]
    result = reduce.combine(entered, 0, way, dtype)
    terms = [(f"rank {rank}", term.value) for rank, term in result.terms]
    return found, fit(found, terms, result.estimate, result.dtype), result.estimate


def _way(rng):
    order = str(rng.choice(ORDERS))
    return Arithmetic(
        order=order, postscale=bool(rng.random() < 0.5), seed=int(rng.integers(2**31))
    )


@examples(100)
@given(seeds, st.sampled_from(NAMES), st.sampled_from(KINDS), st.sampled_from([2, 3, 5, 8, 16, 64]))
def test_silent_on_gradients(seed, name, kind, world):
    rng = np.random.default_rng(seed)
    numel = int(rng.choice([100, 700, 2000, 6000]))
    rows = gradients(rng, kind, world, numel)
    _, result, _ = reduced(rows, dtype_of(name), arithmetics(rng))
    assert not result.off, result.off


@examples(200)
@given(seeds, st.sampled_from(NAMES), st.integers(2, 12))
def test_silent_on_any_tensor(seed, name, world):
    """Of any structure and magnitude, subnormal to near overflow, NaN and infinity included."""
    rng, dtype = np.random.default_rng(seed), dtype_of(name)
    numel = int(rng.choice([64, 300, 1500]))
    rows = tensors(rng, dtype, world, numel, special=0.02)
    with np.errstate(invalid="ignore", over="ignore"):
        _, result, _ = reduced(rows, dtype, arithmetics(rng))
    assert not result.off, result.off


@examples(100)
@given(seeds, st.sampled_from(NAMES), st.sampled_from(NAMES), st.booleans())
def test_silent_on_an_accumulation(seed, source_name, buffer_name, alike):
    """Two terms of very different size: a sum of many micro-steps and one more."""
    rng, source, buffer = np.random.default_rng(seed), dtype_of(source_name), dtype_of(buffer_name)
    rows = gradients(rng, "correlated" if alike else "normal", 2, 2000)
    rows[0] *= 2.0 ** rng.integers(0, 9)
    how = Arithmetic(flush=bool(rng.random() < 0.5))
    with np.errstate(over="ignore", invalid="ignore"):
        carried, now = rounded(rows[0], buffer), rounded(rows[1], source)
        found = how.add(carried, how.round(now, buffer), buffer)
    terms = [bounds.exact(carried), bounds.cast(bounds.exact(now), source, buffer)]
    estimate = bounds.add_up(terms, buffer)
    named = [("before", carried), ("now", now)]
    coarse = max(source, buffer, key=lambda dtype: dtype.unit_roundoff)
    assert not fit(found, named, estimate, coarse).off


@examples(80)
@given(
    seeds,
    st.sampled_from(sorted(OFF)),
    st.sampled_from([(kind, world) for kind in KINDS for world in (2, 4, 8, 16)]),
)
def test_a_slightly_wrong_coefficient_is_seen(seed, name, shape):
    """5 % in bfloat16 and 0.1 % in float32, of one rank, on 1 000 elements."""
    kind, world = shape
    rng = np.random.default_rng(seed)
    guilty, weights = int(rng.integers(world)), np.ones(world)
    weights[guilty] = OFF[name]
    rows = gradients(rng, kind, world, 1000)
    _, result, _ = reduced(rows, dtype_of(name), _way(rng), weights)
    assert [entry.label for entry in result.off] == [f"rank {guilty}"], result
    assert result.off[0].estimate == pytest.approx(OFF[name], abs=result.off[0].resolution)


@examples(15)
@given(
    seeds,
    st.sampled_from(
        [("float32", kind) for kind in KINDS]
        + [("bfloat16", kind) for kind in KINDS if kind != "correlated"]
    ),
)
def test_a_slightly_wrong_coefficient_of_64_is_seen(seed, case):
    name, kind = case
    rng = np.random.default_rng(seed)
    guilty, weights = int(rng.integers(64)), np.ones(64)
    weights[guilty] = OFF[name]
    _, result, _ = reduced(gradients(rng, kind, 64, 1500), dtype_of(name), _way(rng), weights)
    assert f"rank {guilty}" in [entry.label for entry in result.off], result


@examples(40)
@given(
    seeds,
    st.sampled_from(NAMES),
    st.sampled_from(KINDS),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([200, 1000, 4000]),
    st.floats(0.005, 0.5),
)
def test_what_is_above_the_resolution_is_seen(seed, name, kind, world, numel, wrong):
    """The exact condition: what the fit does not convict is within its own resolution."""
    rng = np.random.default_rng(seed)
    guilty, weights = int(rng.integers(world)), np.ones(world)
    weights[guilty] = 1 + wrong
    rows = gradients(rng, kind, world, numel)
    _, result, _ = reduced(rows, dtype_of(name), _way(rng), weights)
    found = {entry.label: entry for entry in result.coefficients}
    if f"rank {guilty}" not in found:  # too few elements to tell the ranks apart
        assert result.refused or len(result.coefficients) == 1 or not rows[guilty].any()
        return
    entry = found[f"rank {guilty}"]
    noise = max(SIGMAS / 2 * entry.sigma, 2 * dtype_of(name).unit_roundoff)
    assert entry.off or wrong <= entry.resolution + noise, entry


@examples(8)
@given(seeds, st.sampled_from(KINDS), st.sampled_from([1000, 5000]))
def test_one_rank_of_64_missing_in_bfloat16(seed, kind, numel):
    """The bound is 28 % wide there; the fit names the rank."""
    rng, dtype = np.random.default_rng(seed), DTYPES["bfloat16"]
    guilty, weights = int(rng.integers(64)), np.ones(64)
    weights[guilty] = 0
    found, result, estimate = reduced(gradients(rng, kind, 64, numel), dtype, _way(rng), weights)
    if kind in ("normal", "correlated"):  # else one element may be this rank's alone
        assert not bounds.breaks(found, estimate).any()
    assert [entry.label for entry in result.off] == [f"rank {guilty}"]
    assert abs(result.off[0].estimate) < 0.2
