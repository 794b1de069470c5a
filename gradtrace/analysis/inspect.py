"""Say what is in a trace: what ``info`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gradtrace.analysis.reported import Reported, reported, reported_notes
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Gap, Record
from gradtrace.trace.spans import layout_numel

INFO_FORMAT: Final = "gradtrace.info"
INFO_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Describe one optimizer step over all ranks.

    Attributes:
        complete: whether every rank finished it; audit and diff judge only such steps.
        micro_steps: backward passes, the largest number over the ranks.
        records, gaps: sums over the ranks.
        partial: the first window was wrapped midway on some rank.
        facts: the step's scalars on the lowest rank that finished it.
    """

    step: int
    complete: bool
    micro_steps: int
    records: int
    gaps: int
    partial: bool
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PointInfo:
    """Describe what was recorded at one point.

    Attributes:
        status: ``recorded``, ``not_planned``, ``absent: REASON``, or ``mixed`` when ranks differ.
        bytes: size of the tensors.
        digests: records that hold a digest instead of a tensor.
    """

    point: str
    status: str
    records: int
    bytes: int
    gaps: int
    digests: int


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """Count the parameters of the traced model."""

    count: int
    captured: int
    elements: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Hold what ``info`` says.

    Attributes:
        effective: settings as the optimizer objects hold them, equal on all ranks.
        reported: what frameworks reported, beside what was recorded.
        effective_differs: setting -> rank -> value, where ranks do not agree.
        closed: rank -> why it ended, ``None`` when it never closed.
        perturbation: how the weights were moved on purpose before the run, or ``None``.
    """

    path: str
    run_id: str
    created_s: float
    world_size: int
    ranks: tuple[int, ...]
    packages: Mapping[str, str]
    plan: Mapping[str, Any]
    parameters: ParameterInfo
    effective: Mapping[str, Any]
    effective_differs: Mapping[str, Mapping[int, Any]]
    steps: tuple[StepInfo, ...]
    points: tuple[PointInfo, ...]
    gaps: tuple[Gap, ...]
    reported: tuple[Reported, ...]
    closed: Mapping[int, str | None]
    notes: tuple[str, ...]
    perturbation: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``info --json`` prints."""
        return {
            "format": INFO_FORMAT,
            "version": INFO_VERSION,
            "path": self.path,
            "run_id": self.run_id,
            "created_s": self.created_s,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "packages": dict(self.packages),
            "plan": dict(self.plan),
            "parameters": asdict(self.parameters),
            "effective": dict(self.effective),
            "effective_differs": {
                name: {str(rank): value for rank, value in values.items()}
                for name, values in self.effective_differs.items()
            },
            "steps": [asdict(step) for step in self.steps],
            "points": [asdict(point) for point in self.points],
            "gaps": [asdict(gap) for gap in self.gaps],
            "reported": [entry.to_dict() for entry in self.reported],
            "closed": {str(rank): reason for rank, reason in self.closed.items()},
            "notes": list(self.notes),
            "perturbation": None if self.perturbation is None else dict(self.perturbation),
        }


def inspect(path: str | Path) -> TraceInfo:
    """Read the index of a trace, whole or not, and sum it up.

    Args:
        path: the trace directory.

    Raises:
        GradtraceError: the trace cannot be opened (see `gradtrace.trace.reader.open_trace`).
    """
    trace = open_trace(path)
    manifest = trace.manifest
    reports = reported(trace)
    same, differs = _effective(trace)
    return TraceInfo(
        path=str(path),
        run_id=manifest.run_id,
        created_s=manifest.created_s,
        world_size=manifest.world_size,
        ranks=tuple(trace.ranks),
        packages=manifest.packages,
        plan=manifest.plan,
        parameters=ParameterInfo(
            count=len(manifest.parameters),
            captured=sum(parameter.captured for parameter in manifest.parameters),
            elements=sum(parameter.numel for parameter in manifest.parameters),
            dtypes=tuple(sorted({parameter.dtype for parameter in manifest.parameters})),
        ),
        effective=same,
        effective_differs=differs,
        steps=_steps(trace),
        points=tuple(_point(trace, point) for point in POINT_NAMES),
        gaps=tuple(gap for rank in trace.ranks.values() for gap in rank.gaps),
        reported=reports,
        closed={number: rank.closed for number, rank in trace.ranks.items()},
        notes=(*trace.notes, *reported_notes(reports)),
        perturbation=manifest.perturbation,
    )


def record_bytes(trace: Trace, record: Record) -> int:
    """Return the size of a record's tensor, 0 for a record of facts only."""
    if record.key is None or record.dtype is None:
        return 0
    return layout_numel(trace.layout(record)) * DTYPES[record.dtype].size_bytes


def _effective(trace: Trace) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    tables = {number: rank.header.effective for number, rank in trace.ranks.items()}
    names = sorted({name for table in tables.values() for name in table})
    same: dict[str, Any] = {}
    differs: dict[str, dict[int, Any]] = {}
    for name in names:
        values = {number: table.get(name) for number, table in tables.items()}
        if _all_equal(list(values.values())):
            same[name] = next(iter(values.values()))
        else:
            differs[name] = values
    return same, differs


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _steps(trace: Trace) -> tuple[StepInfo, ...]:
    records = Counter(r.step for rank in trace.ranks.values() for r in rank.records)
    gaps = Counter(g.step for rank in trace.ranks.values() for g in rank.gaps)
    seen: Counter[int] = Counter()  # what a step that nobody finished had so far
    for rank in trace.ranks.values():
        for record in rank.records:
            if record.micro_step is not None:
                seen[record.step] = max(seen[record.step], record.micro_step + 1)
    ended = {step for rank in trace.ranks.values() for step in rank.steps}
    result = []
    for step in sorted({*records, *gaps, *ended}):
        ends = [rank.steps[step] for rank in trace.ranks.values() if step in rank.steps]
        result.append(
            StepInfo(
                step=step,
                complete=step in trace.steps,
                micro_steps=max((end.micro_steps for end in ends), default=seen[step]),
                records=records[step],
                gaps=gaps[step],
                partial=any(end.partial for end in ends),
                facts=ends[0].facts if ends else {},
            )
        )
    return tuple(result)


def _point(trace: Trace, point: str) -> PointInfo:
    statuses = sorted({rank.header.points[point] for rank in trace.ranks.values()})
    records = [r for rank in trace.ranks.values() for r in rank.records if r.point == point]
    gaps = [g for rank in trace.ranks.values() for g in rank.gaps if g.point in (point, None)]
    return PointInfo(
        point=point,
        status=statuses[0] if len(statuses) == 1 else "mixed: " + "; ".join(statuses),
        records=len(records),
        bytes=sum(record_bytes(trace, record) for record in records),
        gaps=len(gaps),
        digests=sum("digest" in record.facts for record in records),
    )
