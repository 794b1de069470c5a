"""Run one entry of the catalog, traced and untraced, and keep all that the tests ask of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradtrace
from gradtrace import errors
from gradtrace.analysis.results import AuditResult
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import Trace, open_trace
from tests.real.catalog.entry import Entry
from tests.real.training import Outcome, train

# step -> rank -> records of each point
Counts = Mapping[int, Mapping[int, Counter[str]]]


@dataclass(frozen=True)
class Measured:
    """Hold what became of one entry.

    Attributes:
        path: where the trace was to be written.
        refusal: what `wrap` raised, or None.
        traced, untraced: what each rank saw; empty when `wrap` raised.
        audit: the judgement on the trace, or None.
        counts: how many records each rank made at each point of each step.
    """

    entry: Entry
    path: Path
    refusal: errors.GradtraceError | None = None
    traced: tuple[Outcome, ...] = ()
    untraced: tuple[Outcome, ...] = ()
    audit: AuditResult | None = None
    counts: Counts = dataclasses.field(default_factory=dict)

    def open(self) -> Trace:
        return open_trace(self.path)


def measure(entry: Entry, path: Path) -> Measured:
    """Train an entry twice, once into ``path``."""
    try:
        traced = train(entry.setup, path)
    except errors.GradtraceError as error:
        return Measured(entry, path, refusal=error)
    trace = open_trace(path)
    return Measured(
        entry,
        path,
        traced=tuple(traced),
        untraced=tuple(train(entry.setup, None)),
        audit=gradtrace.audit(trace),
        counts=count(trace),
    )


def count(trace: Trace) -> Counts:
    return {
        step: {
            rank: Counter(r.point for r in held.records if r.step == step)
            for rank, held in trace.ranks.items()
        }
        for step in trace.steps
    }


class Runs:
    """Measure each entry at most once, however many tests ask for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Measured] = {}

    def __call__(self, entry: Entry) -> Measured:
        key = repr(entry.setup)  # a name does not hold all of it
        if key not in self._known:
            place = self._directory / f"{len(self._known):03}"
            self._known[key] = measure(entry, place)
        return self._known[key]


def each(values: Iterable[Any]) -> list[Any]:
    """Return the distinct values, in order."""
    return list(dict.fromkeys(values))


def points_of(counts: Counts) -> list[str]:
    """Return the points that have records, in causal order."""
    seen = {point for ranks in counts.values() for found in ranks.values() for point in found}
    return [point for point in POINT_NAMES if point in seen]
