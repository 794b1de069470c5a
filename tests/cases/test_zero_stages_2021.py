"""docs/cases/zero_stages_2021.md says what running it gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cases.zero_stages_2021.__main__ import BEGIN, END, PAGE, compare, judge, train
from cases.zero_stages_2021.plan import REPORTED, SWAPPED, pairs, runs
from tests.real.releases import install

INSTALLED = os.environ.get("GRADTRACE_CASES")
REPORTERS_TOLERANCE = 1e-5
NEWEST = "0.19.8"
# Two ranks and few runs: what tells the story.
QUICK = (
    "fp32, contiguous gradients: 0 and 1",
    "fp32, contiguous gradients: 0 and 3",
    "fp16, contiguous gradients: 0 and 1",
    "fp16, loss scale 1: 0 and 1",
    "fp16, loss scale 1, no step before training: 0 and 1",
)


def tables() -> dict[str, dict[str, list[str]]]:
    """Return what the page shows: release -> first cell -> the other cells."""
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    found = {}
    for part in shown.split("### deepspeed ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if "|" in line]
        found[part.splitlines()[0]] = {cells[0]: cells[1:] for cells in lines}
    return found


def verdicts(release: str) -> dict[str, tuple[str, str]]:
    """Return the page's verdicts: pair -> what diff says, whether it leaves the noise."""
    table = tables()[release]
    return {p.title: (table[p.title][2], table[p.title][3]) for p in pairs(release)}


def audits(release: str) -> dict[str, str]:
    """Return the page's audits: run -> what audit says."""
    return {
        run.strip("`"): verdict
        for verdict, cells in tables()[release].items()
        if cells and cells[0].startswith("`")
        for run in cells[0].split(", ")
    }


def test_the_page_lists_every_pair_and_every_run() -> None:
    for release in SWAPPED:
        assert set(verdicts(release)) == {pair.title for pair in pairs(release)}
        assert set(audits(release)) == {r.name for r in runs(release) if r.sample is None}


def test_its_story_follows_from_its_tables() -> None:
    for release in SWAPPED:
        for pair in pairs(release):
            losses, _, diff, envelope, _ = tables()[release][pair.title]
            first = abs(float(losses.split()[0]))
            begins_late = {"fp16": True, "fp32": False, "bf16": release == "0.19.8"}
            strays = pair.baseline.stage == 0 and begins_late[pair.baseline.dtype]
            unreduced = (
                release == "0.14.4"
                and pair.candidate.stage in (1, 2)
                and not pair.candidate.contiguous_gradients
            )
            if unreduced:
                assert diff.endswith("candidate breaks reduce: not_reduced")
            elif strays and pair.baseline.step_before_training:
                assert envelope != "inside"
                assert first > 1000 * REPORTERS_TOLERANCE
            else:
                assert diff.startswith("rounding")
                assert envelope == "inside"
            if pair.baseline.dtype == "fp32" and not unreduced:
                assert all(abs(float(loss)) < REPORTERS_TOLERANCE for loss in losses.split())
    scaled = [p for p in pairs("0.19.8") if p.baseline == REPORTED]
    assert all(verdicts("0.19.8")[p.title][0].endswith("seed: scaled") for p in scaled)


@pytest.mark.skipif(INSTALLED is None, reason="GRADTRACE_CASES names no directory for releases")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", SWAPPED)
def test_each_release_gives_what_the_page_says(release: str, tmp_path: Path) -> None:
    assert INSTALLED is not None
    directory = Path(INSTALLED).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    losses = train(release, directory, runs(release), tmp_path)
    found, said = judge(release, losses, tmp_path)
    assert {t: (o.verdict, o.envelope) for t, o in found.items()} == verdicts(release)
    assert said == audits(release)


@pytest.mark.skipif(install.installed() != NEWEST, reason=f"the page tells of deepspeed {NEWEST}")
def test_two_ranks_tell_the_same_story(tmp_path: Path) -> None:
    chosen = [pair for pair in pairs(NEWEST) if pair.title in QUICK and pair.baseline.stage == 0]
    assert len(chosen) == len(QUICK)
    needed = {run: None for p in chosen for run in (p.baseline, *p.baseline.noise[:2], p.candidate)}
    losses = train(NEWEST, tmp_path, list(needed), tmp_path, ranks=2)
    for pair in chosen:
        outcome = compare(pair, losses, tmp_path, samples=2)
        # There is one order only in which to add two ranks: what rounds at eight may be equal here.
        verdict = "rounding" if outcome.verdict == "agree" else outcome.verdict
        assert (verdict, outcome.envelope) == verdicts(NEWEST)[pair.title]
        parted = max(map(abs, outcome.losses))
        assert outcome.losses[0] == 0
        assert parted > 1e-3 if outcome.envelope != "inside" else parted <= 4 * max(outcome.noise)
