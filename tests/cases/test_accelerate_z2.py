"""docs/cases/accelerate_z2.md says what running it gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cases.accelerate_z2.__main__ import AS_REPORTED, SWAPPED, Run, replay
from tests.real.releases import install

PAGE = install.ROOT / "docs/cases/accelerate_z2.md"
INSTALLED = os.environ.get("GRADTRACE_CASES")
RUNS = (*AS_REPORTED, *SWAPPED)


def rows() -> dict[str, tuple[str, str]]:
    """Return the page's table: run -> norms, verdict."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ZeRO-")]
    return {title: (norms, verdict) for title, norms, verdict in cells}


def test_the_page_lists_every_run_and_its_story_follows_from_the_table() -> None:
    table = rows()
    assert list(table) == [run.title for run in RUNS]
    right = table[AS_REPORTED[0].title]
    wrong = table[AS_REPORTED[1].title]
    assert right[1] == "pass"
    assert wrong[1].startswith("accumulate: dropped_micro_steps from step 0, micro-step 1")
    for run in RUNS:
        if run.swapped is not None:
            assert table[run.title] == wrong, "swapping this package changed something"


@pytest.mark.skipif(INSTALLED is None, reason="GRADTRACE_CASES names no directory for packages")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.title)
def test_each_run_gives_what_the_page_says(run: Run, tmp_path: Path) -> None:
    assert INSTALLED is not None
    Path(INSTALLED).mkdir(parents=True, exist_ok=True)
    outcome = replay(run, Path(INSTALLED).resolve(), tmp_path / "trace")
    norms = " ".join(f"{norm:.3f}" for norm in outcome.norms)
    assert (norms, outcome.verdict) == rows()[run.title]
