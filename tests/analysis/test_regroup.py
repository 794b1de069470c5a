"""The weights that take one run's micro-steps to the other's gradient are found, or none is named."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrace.analysis.regroup import FEWEST_FREE, Regroup

LABELS = ((0, 0), (0, 1), (1, 0), (1, 1))
TOLERANCE = 4e-6


def _regroup(weights, *, noise=0.0, numel=300, seed=0, labels=LABELS, rank_one=False) -> Regroup:
    draw = np.random.default_rng(seed)
    found = Regroup("candidate", labels)
    for _ in range(2):  # parameters
        terms = draw.standard_normal((len(labels), numel))
        if rank_one:
            terms[1] = 2 * terms[0]
        target = np.asarray(weights) @ terms
        found.add(target * (1 + noise * draw.standard_normal(numel)), terms)
    return found


def test_weights_that_explain_everything_are_another_normalisation() -> None:
    weights = [0.75, 1.25, 1.125, 0.875]
    solved = _regroup(weights, noise=1e-7).weights(TOLERANCE)
    assert solved is not None
    assert np.allclose(solved[0], weights, atol=1e-6)
    assert solved[1] < TOLERANCE
    story = _regroup(weights).story(TOLERANCE)
    assert story is not None
    assert story[0] == "scaled"
    assert "0.75 in micro-step 0 of rank 0, 1.25 in micro-step 1 of rank 0" in story[1]
    assert "not a fault of ZeRO" in story[1]


def test_a_micro_step_without_weight_was_not_given_to_the_other_run() -> None:
    story = _regroup([4 / 3, 4 / 3, 0.0, 4 / 3]).story(TOLERANCE)
    assert story is not None
    assert story[0] == "inputs_differ"
    assert "Without micro-step 0 of rank 1, the candidate's" in story[1]


@pytest.mark.parametrize(
    "regroup",
    [
        _regroup([1.0, 1.2, 0.9, 1.1], noise=1e-3),  # the rest is more than rounding
        _regroup([1.0, -0.5, 1.0, 1.0]),  # no normalisation turns a gradient round
        _regroup([1.0, 1.2, 0.9, 1.1], numel=(len(LABELS) + FEWEST_FREE - 1) // 2),
        _regroup([1.0, 1.2, 0.9, 1.1], rank_one=True),  # which of two alike, nobody can tell
        _regroup([0.0, 0.0, 0.0, 0.0]),
    ],
    ids=("noise", "negative", "few", "alike", "nothing"),
)
def test_what_weights_do_not_explain_is_not_named(regroup: Regroup) -> None:
    assert regroup.story(TOLERANCE) is None


def test_what_is_not_finite_is_not_named() -> None:
    regroup = _regroup([1.0, 1.2, 0.9, 1.1])
    regroup.add(np.full(30, np.nan), np.ones((4, 30)))
    assert regroup.story(TOLERANCE) is None
