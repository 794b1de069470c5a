"""The same global batch cut over other ranks and micro-steps: compared where it is comparable."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradtrace
from tests.real.training import Setup, train

# 16 rows a step, however they are cut
CUTS = {
    "one rank, one micro-step": {"ranks": 1, "micro_steps": 1, "batch": 16},
    "one rank, four micro-steps": {"ranks": 1, "micro_steps": 4, "batch": 4},
    "two ranks, four micro-steps": {"ranks": 2, "micro_steps": 4, "batch": 2},
    "two ranks, two micro-steps": {"ranks": 2, "micro_steps": 2, "batch": 4},
}


@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("stages", ((1, 2), (2, 3), (3, 1)))
def test_other_world_sizes_and_accumulation_counts_agree_at_the_boundary(
    stages: tuple[int, int], bf16: bool, tmp_path: Path
) -> None:
    for number, cut in enumerate(CUTS.values()):
        setup = Setup(stages[number % 2], bf16=bf16, **cut)
        train(setup, tmp_path / str(number))
        assert gradtrace.audit(tmp_path / str(number)).verdict == "pass"
    for one in range(len(CUTS)):
        for other in range(one):
            result = gradtrace.diff(tmp_path / str(one), tmp_path / str(other))
            assert result.verdict in ("agree", "rounding"), (one, other, result.first)
            assert result.counts["compared"] > 0
            assert any("left out" in note for note in result.notes), result.notes


def test_a_lost_micro_step_is_blamed_across_accumulation_counts_too(tmp_path: Path) -> None:
    train(Setup(2, mode="by_hand", ranks=2, micro_steps=4, batch=2), tmp_path / "by_hand")
    train(Setup(3, ranks=2, micro_steps=1, batch=8), tmp_path / "at_once")
    result = gradtrace.diff(tmp_path / "at_once", tmp_path / "by_hand")
    assert result.verdict == "diverged"
    assert result.first is not None
    assert result.blame is not None
    assert (result.first.step, result.first.micro_step) == (0, None)
    assert (result.blame.side, result.blame.law) == ("candidate", "accumulate")
    assert result.blame.cause == "dropped_micro_steps"
