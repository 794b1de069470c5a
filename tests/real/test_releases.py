"""The tools that run other releases, and what they found: docs/deepspeed-compat.md is true to it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.real.catalog import ENTRIES
from tests.real.catalog.defects import DEFECTS
from tests.real.catalog.entry import Entry
from tests.real.releases import install, judge, page
from tests.real.releases.__main__ import RELEASES, problems
from tests.real.releases.drift import Sources, declared, drift
from tests.real.releases.observe import TRAINED, Observation
from tests.real.training import Setup

RESULTS = json.loads((Path(__file__).parent / "releases/results.json").read_text(encoding="utf-8"))
PAGE = install.ROOT / "docs/deepspeed-compat.md"


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page.render(RESULTS)


def test_every_release_was_run() -> None:
    assert set(RELEASES) <= set(RESULTS["releases"])
    lines = {tuple(release.split(".")[:2]) for release in RESULTS["releases"]}
    assert lines >= {("0", str(minor)) for minor in range(14, 20)}


@pytest.mark.parametrize("release", RESULTS["releases"])
def test_what_was_found_is_what_must_come_of_it(release: str) -> None:
    newest = max(RESULTS["releases"], key=page.version)
    assert problems(release, RESULTS["releases"][release], newest) == []


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.slug)
def test_every_listed_defect_was_found_on_the_first_bad_release_that_trains_it(
    defect: Any,
) -> None:
    """Both ends are evidence: found at the first bad release, a pass at the first right one."""

    def verdicts(release: str) -> set[tuple[str | None, str | None, str | None]]:
        return {
            (seen.verdict, seen.law, seen.cause)
            for seen in (Observation(**raw) for raw in RESULTS["releases"][release]["observations"])
            if defect.applies(page.BY_NAME[seen.entry].setup) and seen.verdict is not None
        }

    bad = [r for r in RESULTS["releases"] if defect.concerns(r) and verdicts(r)]
    assert bad
    assert ("fail", defect.law, defect.cause) in verdicts(min(bad, key=page.version))


SEEN = Observation("a", TRAINED, bitwise=True, verdict="pass")
CLEAN = Entry(Setup(3))
REFUSED = "unsupported_engine: fp16"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another training": ({"bitwise": False}, "tracing changed the training"),
    "a false alarm": ({"verdict": "fail", "law": "reduce", "cause": "scaled"}, "expected a pass"),
    "no verdict": ({"verdict": "inconclusive"}, "verdict inconclusive"),
    "a probe that does not bind": ({"refused": "probe_missing: no step"}, "refused: probe_missing"),
    "a refusal on the newest release": ({"refused": REFUSED}, "refused: unsupported_engine"),
    "a failure of the traced run": ({"failed": "KeyError: 0"}, "only the traced run failed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_must_not_come_of_a_run_is_a_problem(name: str) -> None:
    changes, words = WRONG[name]
    assert judge.problem(CLEAN, SEEN, "0.19.8", "0.19.8") is None
    found = judge.problem(CLEAN, dataclasses.replace(SEEN, **changes), "0.19.8", "0.19.8")
    assert found is not None
    assert words in found


def test_what_must_be_refused_must_be_refused_on_the_newest_release() -> None:
    entry = Entry(Setup(2), refused="offload_optimizer")
    refused = Observation("a", TRAINED, refused="unsupported_engine: offload_optimizer")
    assert judge.problem(entry, refused, "0.19.8", "0.19.8") is None
    assert judge.problem(entry, SEEN, "0.19.8", "0.19.8") is not None
    assert judge.problem(CLEAN, refused, "0.17.5", "0.19.8") is None


def test_a_known_defect_must_be_found_and_only_where_it_is() -> None:
    entry = Entry(Setup(2))
    hit = dataclasses.replace(SEEN, verdict="fail", law="accumulate", cause="dropped_micro_steps")
    for release, right, wrong in (("0.17.5", SEEN, hit), ("0.18.2", hit, SEEN)):
        assert judge.problem(entry, right, release, "0.19.8") is None
        assert judge.problem(entry, wrong, release, "0.19.8") is not None


def test_a_window_that_was_not_seen_whole_convicts_nobody() -> None:
    entry = Entry(Setup(1, mode="mixed"))
    note = "gaps: engine_bypassed"
    part = dataclasses.replace(SEEN, verdict="inconclusive", notes=(note,))
    assert judge.problem(entry, part, "0.18.2", "0.19.8") is None
    blamed = dataclasses.replace(part, law="reduce", cause="scaled")
    assert judge.problem(entry, blamed, "0.18.2", "0.19.8") is not None


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_table_of_defects_and_the_catalog_agree_on_the_newest_release(entry: Entry) -> None:
    defect = judge.defect_of(entry, install.installed())
    if defect is not None and entry.refused is None:
        assert entry.finding == (defect.law, defect.cause)


# --- drift -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(install.location(install.installed(), Path()))


def test_everything_that_is_declared_is_found_in_the_installed_release(sources: Sources) -> None:
    methods, attributes = declared()
    optional = {("BF16_Optimizer", "backward"), ("DeepSpeedZeroOptimizer", "backward")}
    assert {place for place in methods if sources.method(*place) is None} <= optional
    assert [place for place in attributes if not sources.has(*place)] == []
    assert drift(sources, sources) == []


MOVES = {
    "def average_tensor(self, tensor: torch.Tensor,": (
        "def average_tensor(self, bucket: torch.Tensor,",
        ("average_tensor", "signature"),
    ),
    "def copy_grads_in_partition(": (
        "def move_grads_in_partition(",
        ("copy_grads_in_partition", "removed"),
    ),
    "self.averaged_gradients": ("self.mean_gradients", ("averaged_gradients", "attribute removed")),
    "        self._wait_for_offload_copies()\n        if self.cpu_offload:": (
        "        if self.cpu_offload:",
        ("step", "body"),
    ),
}


@pytest.mark.parametrize("old", MOVES)
def test_what_moved_is_named(old: str, sources: Sources, tmp_path: Path) -> None:
    new, (name, change) = MOVES[old]
    target = tmp_path / "deepspeed/runtime"
    shutil.copytree(sources.directory / "deepspeed/runtime", target)
    path = target / "zero/stage_1_and_2.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    found = [
        entry
        for entry in drift(sources, Sources(tmp_path))
        if entry["owner"] == "DeepSpeedZeroOptimizer" and entry["name"] == name
    ]
    assert [entry["change"].split(" (")[0] for entry in found] == [change]
    assert drift(Sources(tmp_path), Sources(tmp_path)) == []


def test_comments_and_docstrings_are_no_drift(sources: Sources, tmp_path: Path) -> None:
    target = tmp_path / "deepspeed/runtime"
    shutil.copytree(sources.directory / "deepspeed/runtime", target)
    path = target / "zero/stage_1_and_2.py"
    text = path.read_text(encoding="utf-8").replace(
        "        Not supporting closure.", "        Something else."
    )
    path.write_text("# a comment\n" + text, encoding="utf-8")
    assert drift(sources, Sources(tmp_path)) == []
