"""Losses that are normalised otherwise: named as such, and never a fault of ZeRO."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradtrace.analysis.diff import diff
from gradtrace.analysis.results import DiffResult
from gradtrace.testing.synthetic import Fault, Run, write_run

SHAPES = (("a", (16, 16)), ("b", (16, 16)), ("c", (33,)), ("d", (5, 7)))
WHOLE = Run(parameters=SHAPES, world_size=2, micro_steps=1, samples=24)
CUT = Run(parameters=SHAPES, world_size=2, micro_steps=4, samples=24, stage=3)
Compare = Callable[[Run, Run], DiffResult]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    numbers = itertools.count()

    def run(baseline: Run, candidate: Run) -> DiffResult:
        place = tmp_path / str(next(numbers))
        return diff(write_run(place / "b", baseline), write_run(place / "c", candidate))

    return run


@pytest.mark.parametrize("swap", (False, True))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_loss_that_the_caller_divided(compare: Compare, dtype: str, swap: bool) -> None:
    """Accumulating 4 micro-steps by hand, each loss divided by 4: no trace holds that division."""
    whole = replace(WHOLE, model_dtype=dtype)
    divided = replace(CUT, model_dtype=dtype, gas_mode="manual", local_factors=(0.25,) * 4)
    result = compare(divided, whole) if swap else compare(whole, divided)
    first, blame = result.first, result.blame
    assert first is not None and blame is not None
    assert (first.step, first.micro_step, first.point) == (0, None, "master_grad")
    assert (blame.side, blame.law, blame.cause) == ("neither", None, "scaled")
    assert "loss normalisation, not a fault of ZeRO" in blame.detail
    assert ("Candidate over baseline: 4" if swap else "Candidate over baseline: 0.25") in (
        blame.detail if dtype == "float32" else f"{blame.detail}: Candidate over baseline: 0.25 4"
    )
    assert "The factor is the ratio of the runs' micro-steps" in blame.detail


@pytest.mark.parametrize("swap", (False, True))
@pytest.mark.parametrize("factors", [(0.5, 1.5, 1.25, 0.75), (0.98, 1.02, 1.0, 1.0)])
def test_the_mean_of_means(compare: Compare, factors: tuple[float, ...], swap: bool) -> None:
    cut = replace(CUT, local_factors=factors)
    result = compare(cut, WHOLE) if swap else compare(WHOLE, cut)
    first, blame = result.first, result.blame
    assert first is not None and blame is not None, result.notes
    assert (first.step, first.micro_step, first.point) == (0, None, "master_grad")
    assert (blame.side, blame.law, blame.cause) == ("neither", None, "scaled")
    assert "loss normalisation, not a fault of ZeRO" in " ".join(blame.detail.split())
    expected = ", ".join(f"{1 / factor:.4g}" for factor in factors)
    assert f"rank 0: {expected}; rank 1: {expected}" in blame.detail
    assert result.counts["diverged"] == len(SHAPES)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_the_same_normalisation_is_rounding(compare: Compare, dtype: str) -> None:
    result = compare(replace(WHOLE, model_dtype=dtype), replace(CUT, model_dtype=dtype))
    assert result.verdict == "rounding", result.blame


def test_other_batches_are_no_normalisation(compare: Compare) -> None:
    result = compare(WHOLE, replace(CUT, seed=5, weight_seed=0))
    assert result.blame is not None
    assert result.blame.cause == "inputs_differ"


def test_other_kernels_are_no_normalisation(compare: Compare) -> None:
    result = compare(WHOLE, replace(CUT, noise=0.1))
    assert "normalisation" not in str(result.blame)
    assert result.blame is None or result.blame.cause != "scaled"


def test_a_broken_law_is_not_excused(compare: Compare) -> None:
    """Micro-steps that ZeRO loses weigh nothing either, but the law names who lost them."""
    bad = replace(CUT, faults=(Fault("dropped_micro_steps", "accumulate"),))
    result = compare(WHOLE, bad)
    assert result.blame is not None
    assert (result.blame.side, result.blame.law) == ("candidate", "accumulate")
    assert result.blame.cause == "dropped_micro_steps"


def test_too_few_elements_to_tell(compare: Compare) -> None:
    few = (("a", (3,)), ("b", (4,)))
    result = compare(
        replace(WHOLE, parameters=few),
        replace(CUT, parameters=few, local_factors=(0.5, 1.5, 1.25, 0.75)),
    )
    assert "normalisation" not in str(result.blame)
