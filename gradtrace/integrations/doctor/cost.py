"""Read what a traced step of the stand-in holds, what it costs, and which laws could be checked."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gradtrace.analysis.audit import audit
from gradtrace.analysis.results import AuditResult
from gradtrace.integrations.doctor.results import Check, Cost, LawRow, PointRow
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Record
from gradtrace.trace.spans import layout_numel


def with_cost(check: Check, path: Path, parameters: int, target: int | None, source: str) -> Check:
    """Add what a real trace shows.

    Args:
        path: a trace of the stand-in; the last step is looked at.
        parameters: trainable elements of the stand-in.
        target: trainable elements to scale bytes to, or None.
        source: where that number comes from.
    """
    trace = open_trace(path)
    judged = audit(trace)
    step = trace.steps[-1]
    rank = max(
        trace.ranks,
        key=lambda r: (sum(_bytes(trace, record) for record in _of(trace, r, step)), -r),
    )
    factor = None if target is None else target / parameters
    points = tuple(_points(trace, rank, step, factor))
    total = sum(point.bytes for point in points)
    index = sum(file.stat().st_size for file in path.glob(f"rank-{rank:05}/index-*.jsonl"))
    cost = Cost(
        steps=len(trace.steps),
        micro_steps=trace.ranks[rank].steps[step].micro_steps,
        records=sum(point.records for point in points),
        tensors=sum(point.tensors for point in points),
        tensor_bytes=total,
        index_bytes=index // len(trace.steps),
        parameters=parameters,
        scaled_to=target,
        scaled_by=None if target is None else source,
        scaled_tensor_bytes=None if factor is None else round(total * factor),
    )
    return dataclasses.replace(
        check,
        points=points,
        laws=tuple(_laws(judged)),
        cost=cost,
        notes=(*check.notes, *_findings(judged)),
    )


def _of(trace: Trace, rank: int, step: int) -> list[Record]:
    return [record for record in trace.ranks[rank].records if record.step == step]


def _bytes(trace: Trace, record: Record) -> int:
    if record.key is None or record.dtype is None:
        return 0  # facts, or a digest
    return layout_numel(trace.layout(record)) * DTYPES[record.dtype].size_bytes


def _points(trace: Trace, rank: int, step: int, factor: float | None) -> Iterator[PointRow]:
    found: dict[str, list[Record]] = {name: [] for name in POINT_NAMES}
    for record in _of(trace, rank, step):
        found[record.point].append(record)
    for name, records in found.items():
        size = sum(_bytes(trace, record) for record in records)
        yield PointRow(
            point=name,
            status=trace.ranks[rank].header.points.get(name, "not_planned"),
            records=len(records),
            tensors=sum(record.key is not None for record in records),
            bytes=size,
            scaled_bytes=None if factor is None else round(size * factor),
        )


def _laws(judged: AuditResult) -> Iterator[LawRow]:
    for law, count in judged.laws.items():
        reason = None
        if not count.checked:
            told = Counter(dict(count.skip_reasons)).most_common(1)
            reason = told[0][0] if told else "this configuration gives it nothing to check"
        yield LawRow(law, count.checked, reason)


def _findings(judged: AuditResult) -> Iterator[str]:
    if judged.verdict == "pass":
        return
    first = judged.first
    if first is None:
        yield f"the audit of the stand-in's trace is {judged.verdict}: {'; '.join(judged.notes[:2])}"
    else:
        yield (
            f"law {first.law} is broken on the stand-in ({first.cause}), with nothing planted: "
            f"{first.detail}"
        )
