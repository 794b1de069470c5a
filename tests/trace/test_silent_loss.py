"""Records that a probe failed to make, with no gap to say so, never pass for agreement."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tracefiles import segment_bodies, write_segment

from gradtrace.analysis.audit import audit
from gradtrace.analysis.diff import diff
from gradtrace.testing.synthetic import Run, write_run


def _drop(path: Path, point: str, micro_step: int | None) -> None:
    """Take a point's records out of rank 1's index, and let all counts agree with that."""
    for segment in (path / "rank-00001").glob("index-*.jsonl"):
        kept: list[dict[str, object]] = []
        dropped = 0
        for body in segment_bodies(segment):
            if body.get("point") == point and body.get("micro_step") == micro_step:
                dropped += 1
                continue
            if body["kind"] == "step_end":
                body["records"] -= dropped
                dropped = 0
            kept.append(body)
        kept[-1]["lines"] = len(kept) - 2
        write_segment(segment, kept)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("point", ("master_grad", "clipped_grad", "accumulated"))
def test_missing_records_make_agreement_inconclusive(
    stage: int, point: str, tmp_path: Path
) -> None:
    whole = write_run(tmp_path / "whole", Run(stage=stage, steps=2, micro_steps=2))
    lacking = tmp_path / "lacking"
    shutil.copytree(whole, lacking)
    _drop(lacking, point, 1 if point == "accumulated" else None)
    assert audit(whole).verdict == "pass"
    assert audit(lacking).verdict == "inconclusive"
    result = diff(whole, lacking)
    assert result.verdict == "inconclusive"
    assert result.notes[0].startswith("the candidate lacks records that it should hold")
