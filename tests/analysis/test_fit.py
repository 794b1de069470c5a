"""The coefficient test is silent on whatever rounds correctly, and sees what the bound cannot."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrace.analysis import bounds
from gradtrace.analysis.fit import FEWEST_ROWS, fit, round_to
from gradtrace.trace.dtypes import DTYPES

STRUCTURES = (
    "gauss",
    "constant",
    "row",
    "column",
    "rank1",
    "wide",
    "sign",
    "integers",
    "positive",
    "few",
    "narrow",
    "relu",
    "sparse",
)


def _tensor(rng, kind, numel):
    rows = -(-numel // 32)
    plain = rng.standard_normal(numel)
    made = {
        "gauss": lambda: plain,
        "constant": lambda: np.full(numel, plain[0]),
        "row": lambda: np.repeat(rng.standard_normal(rows), 32)[:numel],
        "column": lambda: plain * (np.arange(numel) % 32 == 5),
        "rank1": lambda: np.outer(rng.standard_normal(rows), plain[:32]).ravel()[:numel],
        "wide": lambda: plain * np.exp(3 * rng.standard_normal(numel)),
        "sign": lambda: rng.choice([-1, 1], numel) * rng.uniform(0.5, 2),
        "integers": lambda: rng.integers(-8, 9, numel).astype(float),
        "positive": lambda: np.abs(plain),
        "few": lambda: rng.choice(plain[:7], numel),
        "narrow": lambda: rng.uniform(1, 1.5, numel),
        "relu": lambda: np.maximum(plain, 0),
        "sparse": lambda: plain * (rng.random(numel) < 0.05),
    }
    return made[kind]()


def _add(rng, rows, dtype, how):
    if how == "wide":
        return round_to(np.sum(rows, axis=0), dtype)
    rows = list(rows) if how != "shuffled" else [rows[at] for at in rng.permutation(len(rows))]
    while len(rows) > 1:
        if how == "tree":
            pairs = [round_to(a + b, dtype) for a, b in zip(rows[::2], rows[1::2], strict=False)]
            rows = pairs + (rows[-1:] if len(rows) % 2 else [])
        else:
            rows[:2] = [round_to(rows[0] + rows[1], dtype)]
    return rows[0]


def _reduction(rng, dtype, world, numel, kinds, weights=None, how="chain"):
    """Return what a mean over ``world`` ranks gives, its terms and its estimate."""
    rows = [_tensor(rng, kind, numel) for kind in kinds]
    if rng.random() < 0.6:
        rows = [row / (np.abs(row).max() or 1) for row in rows]
    else:
        rows = [row * 10.0 ** rng.uniform(-3, 0) for row in rows]
    rows = [round_to(row, dtype) for row in rows]
    shares = [round_to(row / world, dtype) for row in rows]
    used = shares if weights is None else [w * s for w, s in zip(weights, shares, strict=True)]
    terms = [bounds.scale(bounds.exact(row), 1 / world, dtype) for row in rows]
    named = [(f"rank {at}", row / world) for at, row in enumerate(rows)]
    used = [round_to(row, dtype) for row in used]
    return _add(rng, used, dtype, how), named, bounds.add_up(terms, dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_whatever_the_structure(name, seed):
    rng, dtype = np.random.default_rng([seed, 7]), DTYPES[name]
    for _ in range(60):
        world = int(rng.choice([2, 3, 4, 8, 16]))
        numel = int(rng.choice([100, 512, 2048]))
        kinds = [rng.choice(STRUCTURES) for _ in range(world)]
        if rng.random() < 0.5:
            kinds = kinds[:1] * world
        how = rng.choice(["chain", "shuffled", "tree", "wide"])
        found, terms, estimate = _reduction(rng, dtype, world, numel, kinds, how=how)
        result = fit(found, terms, estimate, dtype)
        assert not result.off, (name, world, numel, kinds, how, result.off)


@pytest.mark.parametrize("seed", range(5))
def test_one_rank_of_64_lost_in_bfloat16(seed):
    rng, dtype = np.random.default_rng(seed), DTYPES["bfloat16"]
    weights = np.ones(64)
    weights[17] = 0
    found, terms, estimate = _reduction(rng, dtype, 64, 1024, ["gauss"] * 64, weights)
    assert bounds.judge(found, estimate).broken == 0  # the proven bound is too wide to see it
    result = fit(found, terms, estimate, dtype)
    assert [entry.label for entry in result.off] == ["rank 17"]
    assert abs(result.off[0].estimate) < 0.1


@pytest.mark.parametrize("name, wrong", [("bfloat16", 1.05), ("float32", 1.001)])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gauss", "rank1", "wide", "relu"])
def test_a_coefficient_slightly_off(name, wrong, world, kind):
    for seed in range(3):
        rng, dtype = np.random.default_rng([seed, world]), DTYPES[name]
        rows = [round_to(_tensor(rng, kind, 2048), dtype) for _ in range(world)]
        weights = np.ones(world)
        weights[-1] = wrong
        estimate = bounds.add_up([bounds.exact(row) for row in rows], dtype)
        terms = [(f"rank {at}", row) for at, row in enumerate(rows)]
        # One scaling and the additions, as a run would do them: 5 % is above bfloat16's own steps.
        spoiled = [round_to(w * row, dtype) for w, row in zip(weights, rows, strict=True)]
        result = fit(_add(rng, spoiled, dtype, "chain"), terms, estimate, dtype)
        assert [entry.label for entry in result.off] == [f"rank {world - 1}"], (seed, result)
        assert result.off[0].estimate == pytest.approx(wrong, abs=0.01)


def test_equal_ranks_are_one_term():
    rng, dtype = np.random.default_rng(0), DTYPES["float32"]
    row = round_to(rng.standard_normal(500), dtype)
    estimate = bounds.add_up([bounds.exact(row)] * 4, dtype)
    result = fit(3 * row, [(f"rank {at}", row) for at in range(4)], estimate, dtype)
    assert [entry.label for entry in result.off] == ["rank 0, rank 1, rank 2, rank 3"]
    assert result.off[0].estimate == pytest.approx(0.75)


def test_proportional_ranks_are_judged_by_their_sum():
    rng, dtype = np.random.default_rng(0), DTYPES["float32"]
    row = round_to(rng.standard_normal(500), dtype)
    rows = [row, 2 * row, 4 * row]
    estimate = bounds.add_up([bounds.exact(part) for part in rows], dtype)
    terms = [(f"rank {at}", part) for at, part in enumerate(rows)]
    assert not fit(7 * row, terms, estimate, dtype).off
    assert fit(5 * row, terms, estimate, dtype).off[0].estimate == pytest.approx(5 / 7)


def test_too_little_is_refused_not_passed():
    dtype = DTYPES["float32"]
    row = np.arange(1.0, 11.0)
    estimate = bounds.add_up([bounds.exact(row)] * 2, dtype)
    result = fit(row, [("a", row), ("b", row)], estimate, dtype)
    assert result.refused is not None
    assert not result.off
    same = np.full(4 * FEWEST_ROWS, 3.0)
    estimate = bounds.add_up([bounds.exact(same)] * 2, dtype)
    assert not fit(same, [("a", same), ("b", same)], estimate, dtype).off  # one row, many times


def test_nothing_finite_is_refused():
    dtype = DTYPES["float32"]
    row = np.full(200, np.nan)
    estimate = bounds.add_up([bounds.exact(row)] * 2, dtype)
    assert fit(row, [("a", row), ("b", row)], estimate, dtype).refused is not None
    zero = np.zeros(200)
    estimate = bounds.add_up([bounds.exact(zero)] * 2, dtype)
    assert fit(zero, [("a", zero), ("b", zero)], estimate, dtype).refused is not None


def test_a_swallowed_term_is_not_called_lost():
    rng, dtype = np.random.default_rng(3), DTYPES["bfloat16"]
    large = round_to(rng.choice([-1, 1], 4000) * rng.uniform(1, 2, 4000), dtype)
    small = round_to(rng.standard_normal(4000) * 1e-4, dtype)
    found = round_to(large + small, dtype)
    assert (found == large).all()
    estimate = bounds.add_up([bounds.exact(large), bounds.exact(small)], dtype)
    assert not fit(found, [("large", large), ("small", small)], estimate, dtype).off
