"""A diff of two accumulation dtypes says how far the sums part, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gradtrace.analysis.diff import diff
from gradtrace.testing.synthetic import Run, write_run

COARSE = Run(
    parameters=(("a", (40, 30)), ("b", (50,))),
    stage=2,
    world_size=2,
    micro_steps=9,
    steps=2,
    samples=36,
    model_dtype="bfloat16",
)
WORDS = "micro-steps are added up in"


def _notes(tmp_path: Path, baseline: Run, candidate: Run) -> list[str]:
    result = diff(write_run(tmp_path / "b", baseline), write_run(tmp_path / "c", candidate))
    assert result.verdict in {"agree", "rounding"}
    return [note for note in result.notes if WORDS in note]


def test_the_coarser_sum_is_named_and_grows(tmp_path: Path) -> None:
    fine = replace(COARSE, accum_dtype="float32")
    (note,) = _notes(tmp_path, COARSE, fine)  # once: later steps begin with other weights
    assert f"{WORDS} bfloat16 by the baseline, in float32 by the candidate: in step 0" in note
    apart = [float(part.split(" after ")[0]) for part in note.split(" parts by ")[1].split(", ")]
    assert apart[0] < apart[-1] < 0.05
    assert "after micro-step 8" in note


def test_equal_dtypes_are_not_spoken_of(tmp_path: Path) -> None:
    assert _notes(tmp_path, COARSE, replace(COARSE, stage=3)) == []
