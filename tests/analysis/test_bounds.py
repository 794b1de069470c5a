"""The bounds are proven: nothing that rounds correctly breaks them, and four times as much does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.analysis import bounds
from gradtrace.analysis.fit import round_to
from gradtrace.trace.dtypes import DTYPES

NAMES = ("float32", "bfloat16", "float16")


def _numbers(rng, dtype, count, numel, exponent):
    """Return tensors of a dtype with magnitudes around 2**exponent, of several structures."""
    kind = rng.integers(5)
    values = rng.standard_normal((count, numel))
    if kind == 1:
        values = np.repeat(rng.standard_normal((count, 1)), numel, axis=1)
    elif kind == 2:
        values *= np.arange(numel) % 7 == 3
    elif kind == 3:
        values *= np.exp2(rng.integers(-12, 1, (count, numel)))
    elif kind == 4:
        values = np.abs(values)
    return [round_to(row * 2.0**exponent, dtype) for row in values]


def _summed(rng, rows, dtype):
    """Add rows up in a random order, as a chain or as a tree, rounding every sum."""
    left = [rows[at] for at in rng.permutation(len(rows))]
    chain = rng.random() < 0.5
    while len(left) > 1:
        at = 0 if chain else int(rng.integers(len(left) - 1))
        left[at : at + 2] = [round_to(left[at] + left[at + 1], dtype)]
    return left[0]


def _exponents(dtype):
    lowest = math.log2(dtype.smallest_subnormal)
    return int(lowest), int(math.log2(dtype.largest)) - 12


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(NAMES), st.integers(1, 40))
def test_a_sum_in_any_order_stays_inside(seed, name, count):
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    low, high = _exponents(dtype)
    rows = _numbers(rng, dtype, count, 37, int(rng.integers(low, high)))
    estimate = bounds.add_up([bounds.exact(row) for row in rows], dtype)
    judgement = bounds.judge(_summed(rng, rows, dtype), estimate)
    assert judgement.broken == 0
    assert judgement.worst_ratio <= 1


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.integers(2, 9),
    st.booleans(),
)
def test_a_mean_through_another_dtype_stays_inside(seed, source_name, comm_name, world, before):
    rng = np.random.default_rng(seed)
    source, comm = DTYPES[source_name], DTYPES[comm_name]
    low, high = _exponents(comm)
    low, high = max(low, _exponents(source)[0]), min(high, _exponents(source)[1])
    rows = _numbers(rng, source, world, 29, int(rng.integers(low, high)))
    sent = [round_to(row, comm) for row in rows]
    terms = [bounds.cast(bounds.exact(row), source, comm) for row in rows]
    if before:
        sent = [round_to(row / world, comm) for row in sent]
        terms = [bounds.scale(term, 1 / world, comm) for term in terms]
        estimate = bounds.add_up(terms, comm)
        result = _summed(rng, sent, comm)
    else:
        estimate = bounds.scale(bounds.add_up(terms, comm), 1 / world, comm)
        inverse = float(np.float32(1 / world))
        result = round_to(_summed(rng, sent, comm) * inverse, comm)
    final = round_to(result, source)
    assert bounds.judge(final, bounds.cast(estimate, comm, source)).broken == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(NAMES), st.integers(2, 20))
def test_four_times_the_bound_always_breaks(seed, name, count):
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    rows = _numbers(rng, dtype, count, 37, int(rng.integers(-8, 3)))
    estimate = bounds.add_up([bounds.exact(row) for row in rows], dtype)
    assert (estimate.error > 0).all() or name == "float16"
    spoiled = _summed(rng, rows, dtype)
    at = int(rng.integers(37))
    spoiled[at] += 4 * (estimate.error[at] + dtype.smallest_subnormal)
    judgement = bounds.judge(spoiled, estimate)
    assert judgement.broken == 1
    assert judgement.index == at
    assert judgement.worst_ratio > 2
    assert judgement.max_abs >= 3 * estimate.error[at]


def test_gamma_is_highams_and_exists_for_every_n():
    for name in NAMES:
        u = DTYPES[name].unit_roundoff
        for n in (1, 2, 7, 30):
            assert n * u <= bounds.gamma(n, u) <= n * (u + 2 * u * u) / (1 - n * (u + 2 * u * u))
    assert bounds.gamma(0, 2.0**-8) == 0
    assert math.isfinite(bounds.gamma(10_000, 2.0**-8))
    assert bounds.gamma(10**9, 2.0**-8) == math.inf


def test_nan_breaks_and_masks_must_match():
    estimate = bounds.exact(np.array([1.0, math.nan, math.inf, 2.0]))
    assert bounds.breaks(np.array([1.0, math.inf, math.nan, 2.0]), estimate).tolist() == [False] * 4
    assert bounds.breaks(np.array([math.nan, 1.0, 5.0, 2.0]), estimate).tolist() == [1, 1, 1, 0]
    judgement = bounds.judge(np.array([math.nan, math.nan, math.inf, 2.0]), estimate)
    assert (judgement.broken, judgement.index, judgement.max_abs) == (1, 0, math.inf)


def test_infinite_terms_give_nothing_finite():
    rows = [bounds.exact(np.array([math.inf, 1.0])), bounds.exact(np.array([2.0, math.nan]))]
    for name in NAMES:
        estimate = bounds.scale(bounds.add_up(rows, DTYPES[name]), 0.3, DTYPES[name])
        assert bounds.breaks(np.array([1.0, 1.0]), estimate).all()
        assert not bounds.breaks(np.array([math.inf, math.nan]), estimate).any()


def test_infinity_is_allowed_only_where_the_sum_may_overflow():
    half = DTYPES["float16"]
    rows = [bounds.exact(np.array([60000.0, 1.0])), bounds.exact(np.array([60000.0, 1.0]))]
    estimate = bounds.add_up(rows, half)
    assert bounds.breaks(np.array([math.inf, math.inf]), estimate).tolist() == [False, True]
    rows = [bounds.exact(np.array([60000.0])), bounds.exact(np.array([-60000.0]))]
    assert not bounds.breaks(np.array([math.inf]), bounds.add_up(rows, half)).any()
    cast = bounds.cast(bounds.exact(np.array([1e6])), DTYPES["float32"], half)
    assert not bounds.breaks(np.array([math.inf]), cast).any()
    assert bounds.breaks(np.array([0.0]), cast).all()


def test_copies_are_exact():
    values = np.array([1.0, -0.0, 3e-45])
    for source, target in (("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")):
        estimate = bounds.cast(bounds.exact(values), DTYPES[source], DTYPES[target])
        assert not estimate.error.any()
        assert bounds.judge(values, estimate).worst_ratio == 0
        assert bounds.judge(values + np.array([0, 0, 1e-44]), estimate).worst_ratio == math.inf
    assert not bounds.embeds(DTYPES["float16"], DTYPES["bfloat16"])
    assert not bounds.embeds(DTYPES["bfloat16"], DTYPES["float16"])


def test_flushed_subnormals_are_no_finding():
    single = DTYPES["float32"]
    rows = [bounds.exact(np.array([3e-39, 1e-30])), bounds.exact(np.array([2e-39, 1e-30]))]
    assert not bounds.breaks(np.array([0.0, 2e-30]), bounds.add_up(rows, single)).any()
    half = DTYPES["float16"]
    tiny = 2.0**-20  # subnormal in float16, which no kernel flushes
    rows = [bounds.exact(np.array([tiny])), bounds.exact(np.array([tiny]))]
    assert bounds.breaks(np.array([tiny]), bounds.add_up(rows, half)).all()


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0, -1.0, 2.0**-20])
def test_powers_of_two_round_nothing(factor):
    values = np.array([1.0, 3.25, -7.5])
    estimate = bounds.scale(bounds.exact(values), factor, DTYPES["bfloat16"])
    assert (estimate.error <= 1e-14).all()
    assert bounds.is_power_of_two(factor)
    assert not bounds.is_power_of_two(1 / 3)


def test_relative_l2_needs_no_luck_with_scale():
    assert bounds.relative_l2(np.array([3e-200]), np.array([4e-200])) == pytest.approx(0.75)
    assert bounds.relative_l2(np.zeros(2), np.zeros(2)) == 0
    assert bounds.relative_l2(np.ones(2), np.zeros(2)) == math.inf
