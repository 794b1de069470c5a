"""Every configuration of the catalog: traced as it trains untraced, judged right, or refused by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest

from gradtrace import errors
from gradtrace.trace.reader import Trace
from gradtrace.trace.records import Record
from tests.real import coverage, pairs
from tests.real.catalog import ENTRIES, sample
from tests.real.catalog.entry import Entry
from tests.real.expected import faults
from tests.real.measure import Measured

Measure = Callable[[Entry], Measured]
WHOLE = os.environ.get("GRADTRACE_CATALOG") == "whole"
TRIED = ENTRIES if WHOLE else sample()
TRACED = [entry for entry in TRIED if entry.refused is None]
REFUSED = [entry for entry in TRIED if entry.refused is not None]
# Where DeepSpeed leaves something out, it is not recorded: the page's counts hold these to the number.
CLEAN = [entry for entry in TRACED if entry.finding is None]
AT_LEAST = 200  # pairs that must be compared
AT_MOST = 220  # pairs that are compared here; `python -m tests.real.coverage --pairs` compares all
PAIRS = pairs.pairs(TRIED, most=AT_MOST)


@pytest.mark.parametrize("entry", TRACED, ids=lambda entry: entry.name)
def test_traced_runs_train_as_if_untraced_and_are_judged_right(
    entry: Entry, measured: Measure
) -> None:
    run = measured(entry)
    assert run.refusal is None, run.refusal
    assert run.traced == run.untraced
    result = run.audit
    assert result is not None
    if entry.finding is None:
        assert result.verdict == "pass", (result.first, result.notes)
    else:
        assert result.first is not None
        assert (result.first.law, result.first.cause) == entry.finding, entry.reference
    assert result.laws["end_to_end"].checked > 0
    assert result.laws["reduce"].checked > 0
    assert result.laws["unscale_clip"].checked > 0


@pytest.mark.parametrize("entry", CLEAN, ids=lambda entry: entry.name)
def test_every_point_records_each_element_as_often_as_it_must_and_when(
    entry: Entry, measured: Measure
) -> None:
    run = measured(entry)
    assert run.refusal is None, run.refusal
    assert faults(run.open(), entry.setup)[:5] == []


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.name)
def test_what_cannot_be_traced_is_refused_by_name_before_anything_is_replaced(
    entry: Entry, measured: Measure
) -> None:
    assert entry.refused is not None
    run = measured(entry)
    assert isinstance(run.refusal, errors.UnsupportedEngineError), run.refusal
    assert entry.refused in str(run.refusal)
    assert not run.path.exists()


def test_configurations_that_must_agree_do(measured: Measure) -> None:
    assert len(PAIRS) >= AT_LEAST
    results = pairs.compare(measured, PAIRS)
    bad = [
        (one.name, other.name, result)
        for (one, other), result in zip(PAIRS, results, strict=True)
        if not result.good
    ]
    assert not bad, (len(bad), bad[:3])


def test_the_page_of_coverage_is_what_running_gives(measured: Measure) -> None:
    import deepspeed

    text = coverage.PAGE.read_text(encoding="utf-8")
    if f"DeepSpeed {deepspeed.__version__}," not in text:
        pytest.skip("the page is of another release")
    if WHOLE:
        assert coverage.page([measured(entry) for entry in ENTRIES], deepspeed.__version__) == text
    assert f" {len(ENTRIES)} configurations: " in text
    known = set(text.splitlines())
    fresh = {coverage.line(measured(entry)) for entry in TRIED}
    assert fresh <= known, (
        f"run python -m tests.real.coverage; changed: {sorted(fresh - known)[:4]}"
    )


# --- the check of the counts must be able to fail --------------------------------------------------


def _twice(records: list[Record], at: int) -> list[Record]:
    return [*records, dataclasses.replace(records[at], occurrence=records[at].occurrence + 1)]


def _never(records: list[Record], at: int) -> list[Record]:
    return records[:at] + records[at + 1 :]


def _elsewhen(records: list[Record], at: int) -> list[Record]:
    wrong = dataclasses.replace(records[at], micro_step=1 - (records[at].micro_step or 0))
    return [*records[:at], wrong, *records[at + 1 :]]


def _change(trace: Trace, point: str, how: Callable[[list[Record], int], list[Record]]) -> Trace:
    rank = max(trace.ranks)  # the one whose shard cuts a parameter
    held = trace.ranks[rank]
    at = next(
        n
        for n, r in enumerate(held.records)
        if r.point == point and (r.step, r.micro_step) != (0, 1)
    )
    changed = dataclasses.replace(held, records=tuple(how(list(held.records), at)))
    return dataclasses.replace(trace, ranks={**trace.ranks, rank: changed})


@pytest.mark.parametrize("how", (_twice, _never, _elsewhen))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_record_too_many_too_few_or_at_another_time_is_noticed_at_every_point(
    stage: int, how: Callable[[list[Record], int], list[Record]], measured: Measure
) -> None:
    entry = next(entry for entry in TRACED if entry.setup.stage == stage)
    trace = measured(entry).open()
    assert faults(trace, entry.setup) == []
    points = {record.point for record in trace.ranks[1].records}
    assert len(points) >= 7
    for point in points:
        assert faults(_change(trace, point, how), entry.setup), point
