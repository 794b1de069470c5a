"""A cause is named only when its values are the recorded ones; otherwise nothing is pretended."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrace.analysis import bounds
from gradtrace.analysis.diagnose import explain, transfers
from gradtrace.analysis.fit import round_to
from gradtrace.analysis.hypotheses import Context, Hypothesis, micro_step_hypotheses
from gradtrace.trace.dtypes import DTYPES

SINGLE, HALF = DTYPES["float32"], DTYPES["bfloat16"]
FACTORS = {"the world size": 8.0, "the accumulation steps": 4.0, "the loss scale": 1024.0}


def _context(dtype=SINGLE, offset=0):
    return Context("reduced at micro-step 1", offset, dtype, dtype, FACTORS)


def _estimate(values, dtype=SINGLE):
    half = [bounds.exact(values / 2), bounds.exact(values / 2)]
    return bounds.add_up(half, dtype)


def _values(numel=200, seed=0, dtype=SINGLE):
    return round_to(np.random.default_rng(seed).standard_normal(numel), dtype)


def _explain(found, values, dtype=SINGLE, offset=0, hypotheses=()):
    return explain(found, _estimate(values, dtype), hypotheses, [], _context(dtype, offset))


@pytest.mark.parametrize(
    "spoil, cause, words",
    [
        (lambda v: 0 * v, "zeroed", "is zero"),
        (lambda v: -v, "sign_flipped", "opposite sign"),
        (lambda v: v / 8, "averaged_twice", "1 / the world size"),
        (lambda v: v * 8, "not_averaged", "the world size"),
        (lambda v: v * 1024, "scaled", "the loss scale"),
        (lambda v: v / 4, "scaled", "1 / the accumulation steps"),
        (lambda v: v * 0.7312, "scaled", "0.7312"),
        (lambda v: np.roll(v, 3), "shifted", "3 elements ahead"),
        (lambda v: np.concatenate([v[5:], v[:5] * 7]), "shifted", "5 elements behind"),
        (lambda v: round_to(v, HALF), "low_precision", "bfloat16"),
        (lambda v: np.where(np.arange(200) < 60, 0, v), "partly_overwritten", "0 to 59 are zero"),
        (lambda v: np.where(np.arange(200) == 7, 9, v), "partly_overwritten", "element 7 is wrong"),
        (lambda v: np.where(np.arange(200) == 7, np.nan, v), "non_finite", "index 7"),
        (lambda v: np.where(np.arange(200) == 7, np.inf, v), "non_finite", "infinite"),
    ],
)
def test_what_may_happen_to_any_tensor(spoil, cause, words):
    values = _values()
    found = round_to(spoil(values), SINGLE)
    result = _explain(found, values)
    assert result.cause == cause, result
    assert words in result.detail


@pytest.mark.parametrize("dtype, factor", [(SINGLE, 1.0005), (HALF, 1.05), (HALF, 0.96)])
def test_a_factor_near_one_is_never_called_one(dtype, factor):
    values = _values(4000, dtype=dtype)
    result = _explain(round_to(values * factor, dtype), values, dtype)
    assert result.cause == "scaled", result
    assert f"{factor:.3f}"[:4] in result.detail
    assert " 1 times" not in result.detail


def test_where_micro_steps_are_added_up_no_mean_over_ranks_is_forgotten():
    values = _values()
    context = Context("accumulated", 0, SINGLE, SINGLE, FACTORS, averages=False)
    result = explain(8 * values, _estimate(values), (), [], context)
    assert (result.cause, "the world size" in result.detail) == ("scaled", True)
    assert explain(values / 8, _estimate(values), (), [], context).cause == "averaged_twice"


def test_a_cause_is_carried_over_to_a_small_parameter_unless_its_records_refute_it():
    large, small = _values(), _values(5, seed=1)
    leader = next(c for c in _explain(1.5 * large, large).also if c.cause == "scaled")
    assert transfers(leader, _explain(1.5 * small, small).tested)
    assert not transfers(leader, _explain(1.7 * small, small).tested)
    assert not transfers(leader, _explain(small[::-1].copy(), small).tested)


def test_index_ranges_are_those_of_the_parameter():
    values = _values()
    found = values.copy()
    found[10:20] = 3
    assert "elements 1010 to 1019" in _explain(found, values, offset=1000).detail


@pytest.mark.parametrize("seed", range(20))
def test_noise_has_no_cause(seed):
    values = _values(seed=seed)
    other = _values(seed=seed + 1000)
    for found in (other, values + 0.1 * other, values * other):
        result = _explain(round_to(found, SINGLE), values)
        assert result.cause == "unknown", result
        assert "unexplained" in result.detail


@pytest.mark.parametrize("seed", range(30))
def test_one_element_does_not_name_a_cause_by_luck(seed):
    rng = np.random.default_rng(seed)
    parts = [round_to(rng.standard_normal(1), HALF) for _ in range(8)]
    estimates = [(at, bounds.exact(part)) for at, part in enumerate(parts)]
    total = bounds.add_up([estimate for _, estimate in estimates], HALF)
    found = round_to(total.value * rng.uniform(0.2, 5) + 0.37, HALF)
    if not bounds.breaks(found, total).any():
        return
    context = _context(HALF)
    before = bounds.exact(round_to(rng.standard_normal(1), HALF))
    guesses = micro_step_hypotheses(context, estimates, before=before)
    assert explain(found, total, guesses, [], context).cause in ("unknown", "scaled")


def test_the_laws_own_hypothesis_comes_first_unless_another_fits_better():
    values = _values()
    right = Hypothesis("stale", "it is the old one", _estimate(3 * values))
    assert _explain(3 * values, values, hypotheses=[right]).detail == "it is the old one"
    loose = _estimate(3 * values)
    loose = bounds.Estimate(loose.value * 1.01, np.abs(loose.value), loose.overflow)
    wide = Hypothesis("stale", "it is almost the old one", loose)
    assert _explain(3 * values, values, hypotheses=[wide]).cause == "scaled"


def _micro(found, parts, **more):
    estimates = [(at, bounds.exact(part)) for at, part in enumerate(parts)]
    total = bounds.add_up([estimate for _, estimate in estimates], SINGLE)
    context = _context()
    guesses = micro_step_hypotheses(context, estimates, **more)
    return explain(round_to(found, SINGLE), total, guesses, [], context)


def test_micro_steps():
    parts = [_values(seed=at) for at in range(5)]
    total = sum(parts)
    result = _micro(parts[-1], parts)
    assert result.cause == "dropped_micro_steps"
    assert "holds micro-step 4 only; micro-steps 0, 1, 2, 3 are lost" in result.detail
    result = _micro(parts[0] + parts[-1], parts)
    assert "micro-steps 0, 4 only; micro-steps 1, 2, 3 are lost. (first and last)" in result.detail
    result = _micro(total - parts[2], parts)
    assert result.cause == "dropped_micro_steps"
    assert "micro-step 2 is lost" in result.detail
    result = _micro(total + parts[1], parts)
    assert (result.cause, "micro-step 1 twice" in result.detail) == ("double_counted", True)
    old = _values(seed=99)
    result = _micro(total + old, parts, before=bounds.exact(old))
    assert (result.cause, "not cleared" in result.detail) == ("carried_over", True)
    assert _micro(old, parts, before=bounds.exact(old)).cause == "stale"
    carry = sum(parts[:-1])
    result = _micro(carry, parts, carry=bounds.exact(carry))
    assert "micro-step 4 is lost" in result.detail


def _parts(count, numel=60):
    rng = np.random.default_rng(5)
    values = [round_to(rng.standard_normal(numel), SINGLE) for _ in range(count)]
    return [(number, bounds.exact(part)) for number, part in enumerate(values)]


def _of_micro_steps(found, parts, **given):
    values = [part for _, part in parts]
    estimate = bounds.add_up(values, SINGLE) if values else bounds.zeros(len(found))
    hypotheses = micro_step_hypotheses(_context(), parts, **given)
    return explain(round_to(found, SINGLE), estimate, hypotheses, [], _context())


@pytest.mark.parametrize("count", (2, 3, 4, 7))
def test_what_was_lost_before_is_not_said_to_be_there(count):
    """Only micro-step 0 was ever kept; the buffer that was carried is recorded as such."""
    parts = _parts(count)
    first = parts[0][1]
    result = _of_micro_steps(first.value, parts, carry=first)
    assert result.cause == "dropped_micro_steps"
    lost = ", ".join(map(str, range(1, count)))
    assert f"holds micro-step 0 only; micro-step{'s' * (count > 2)} {lost}" in result.detail


def test_a_carry_that_no_micro_steps_make_is_called_what_it_is():
    parts = _parts(3)
    odd = bounds.exact(round_to(2.5 * parts[0][1].value - parts[1][1].value, SINGLE))
    result = _of_micro_steps(odd.value, parts, carry=odd)
    assert result.cause == "dropped_micro_steps"
    assert "holds what was accumulated before only; micro-step 2 is lost" in result.detail


def test_an_empty_buffer_is_zero_unless_others_lost_the_same_micro_steps():
    result = _of_micro_steps(np.zeros(60), _parts(1))
    assert result.cause == "zeroed"
    assert "dropped_micro_steps" in {candidate.cause for candidate in result.also}


def test_what_is_left_where_nothing_belongs_may_not_have_been_cleared():
    before = _parts(1)[0][1]
    result = _of_micro_steps(before.value, [], before=before)
    assert result.cause == "stale"
    assert "carried_over" in {candidate.cause for candidate in result.also}
