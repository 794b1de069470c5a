"""A reduction recomputed in its stated order: silent on that order, and no wider than it must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis.bounds import breaks, cast, exact
from gradtrace.analysis.fit import round_to
from gradtrace.analysis.laws.division import reduce_as_stated
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64

NAMES = ("bfloat16", "float16", "float32")
NUMEL = 64


def _buckets(seed: int, world: int, dtype: Dtype, size: float) -> list[Float64]:
    generator = np.random.default_rng(seed)
    return [round_to(size * generator.standard_normal(NUMEL), dtype) for _ in range(world)]


def _run(
    buckets: Sequence[Float64], division: str, before: float, source: Dtype, comm: Dtype
) -> Float64:
    """Compute a mean as DeepSpeed does, every operation rounded to the dtype that it has there.

    Source: 0.19.8, stage_1_and_2.py: average_tensor and allreduce_bucket (``bucket``, ``wire``),
    gradient_reduction_w_predivide (``wire``, ``sum``).
    """
    world = len(buckets)
    parts = []
    for values in buckets:
        part = round_to(values / world, source) if division == "bucket" else values
        part = round_to(part, comm)
        if division == "wire":
            part = round_to(part / world, comm)
        if division == "sum" and before != 1:
            part = round_to(part * (1 / before), comm)
        parts.append(part)
    total = parts[0]
    for part in parts[1:]:
        total = round_to(total + part, comm)
    if division == "sum" and before != world:
        total = round_to(total * (before / world), comm)
    return round_to(total, source)


def _outside(
    buckets: Sequence[Float64],
    found: Float64,
    division: str,
    before: float,
    source: Dtype,
    comm: Dtype,
) -> int:
    facts = {"division": division, "predivide": before}
    factor = 1.0 if division == "none" else 1 / len(buckets)
    entered = [(exact(values), source) for values in buckets]
    estimate = cast(reduce_as_stated(entered, facts, factor, comm), comm, source)
    return int(breaks(found, estimate).sum())


@given(
    seed=st.integers(0, 2**31),
    world=st.integers(1, 9),
    division=st.sampled_from(("bucket", "wire", "sum", "none")),
    before=st.sampled_from((1.0, 0.5, 2.0, 3.0, 7.0)),
    source=st.sampled_from(NAMES),
    comm=st.sampled_from(NAMES),
    size=st.sampled_from((1.0, 1e-6, 1e-12, 1e-38, 1e4)),
)
def test_the_stated_order_is_inside_the_bound(
    seed: int, world: int, division: str, before: float, source: str, comm: str, size: float
) -> None:
    kinds = DTYPES[source], DTYPES[comm]
    buckets = _buckets(seed, world, kinds[0], size)
    before = before if division == "sum" else 1.0
    found = _run(buckets, division, before, *kinds)
    assert _outside(buckets, found, division, before, *kinds) == 0


@pytest.mark.parametrize(
    ("division", "before"), (("bucket", 1.0), ("wire", 1.0), ("sum", 1.0), ("sum", 3.0))
)
def test_a_sum_that_was_not_divided_is_outside(division: str, before: float) -> None:
    kinds = DTYPES["float32"], DTYPES["bfloat16"]
    buckets = _buckets(0, 3, kinds[0], 1.0)
    summed = _run(buckets, "none", 1.0, *kinds)
    assert _outside(buckets, summed, division, before, *kinds) > NUMEL // 2


def test_a_division_in_another_dtype_than_stated_is_outside() -> None:
    """In bfloat16 a third is rounded where in float32 it is not; with one rank nothing hides it."""
    single, half = DTYPES["float32"], DTYPES["bfloat16"]
    buckets = [np.full(NUMEL, 1.0) for _ in range(3)]
    coarse = round_to(sum(round_to(values / 3, half) for values in buckets), single)
    assert _outside(buckets, coarse, "bucket", 1.0, single, single) == NUMEL
    assert _outside(buckets, coarse, "wire", 1.0, single, half) == 0
