"""Real bugs are found on the releases that have them, and nothing is on those that do not.

Without other releases only what the installed one shows is run. To run all:

    python -m tests.replay --install DIR     # installs them, and prints one table
    GRADTRACE_RELEASES=DIR python -m pytest tests/replay
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("no deepspeed", allow_module_level=True)

from tests.replay import judge, page, runner
from tests.replay.case import NEWEST, Compared, Run
from tests.replay.cases import CASES, SLUGS
from tests.replay.runner import Ran

# The first test waits for all that runs on its release.
pytestmark = pytest.mark.timeout(1200)
VARIABLE = "GRADTRACE_RELEASES"
WHERE = Path(os.environ[VARIABLE]).resolve() if os.environ.get(VARIABLE) else None
JOBS = 2
RUNS = [
    pytest.param(slug, run, release, id=f"{slug}-{run.name}-{release}")
    for slug in SLUGS
    for run in CASES[slug].runs
    for release in run.releases
]
PAIRS = [
    pytest.param(slug, pair, id=f"{slug}-{'-'.join((*pair.baseline, *pair.candidate))}")
    for slug in SLUGS
    for pair in CASES[slug].compared
]


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[Ran]]]]:
    """Start a process for each release that is there; each runs all that is due on it."""
    out = tmp_path_factory.mktemp("replays")
    there = [release for release in runner.due() if runner.is_there(release, WHERE)]
    with ThreadPoolExecutor(JOBS) as pool:
        yield {
            release: pool.submit(runner.run_release, release, WHERE or out, out / release)
            for release in there
        }


def ran(replays: dict[str, Future[list[Ran]]], slug: str, run: str, release: str) -> Ran:
    """Return one run, or skip the test where its release is not there."""
    if release not in replays:
        pytest.skip(
            f"needs deepspeed {release}: python -m tests.replay --install DIR, {VARIABLE}=DIR"
        )
    return next(r for r in replays[release].result() if (r.slug, r.run.name) == (slug, run))


@pytest.mark.parametrize(("slug", "run", "release"), RUNS)
def test_found_where_it_is_and_only_there(
    slug: str, run: Run, release: str, replays: dict[str, Future[list[Ran]]]
) -> None:
    one = ran(replays, slug, run.name, release)
    assert judge.problems(one, judge.audit_of(one)) == []


@pytest.mark.parametrize(("slug", "pair"), PAIRS)
def test_the_runs_part_where_they_must(
    slug: str, pair: Compared, replays: dict[str, Future[list[Ran]]]
) -> None:
    sides = [ran(replays, slug, *side) for side in (pair.baseline, pair.candidate)]
    assert judge.pair_problems(pair, judge.compare(sides[0], sides[1])) == []


def test_few_releases_show_every_case_bad_and_right() -> None:
    few = {*runner.FEW, NEWEST}
    for slug in SLUGS:
        runs = CASES[slug].runs
        if any(run.bad for run in runs):
            assert any(few & set(run.bad) for run in runs), slug
        assert any(few & set(run.right) for run in runs), slug
        assert all(few & set(run.releases) for run in runs), slug
        pairs = CASES[slug].compared
        assert not pairs or any({p.baseline[1], p.candidate[1]} <= few for p in pairs), slug


def test_the_page_is_what_was_found_and_all_of_it_as_expected() -> None:
    known = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    assert page.PAGE.read_text(encoding="utf-8") == page.render(known)
    assert [row for row in known["rows"] if row["problems"]] == []
    found = {(row["slug"], row["run"], row["release"]) for row in known["rows"]}
    due = {
        (slug, run.name, release)
        for slug in SLUGS
        for run in CASES[slug].runs
        for release in run.releases
    }
    assert due <= found
