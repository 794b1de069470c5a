"""Single out one record of a trace, and compute its statistics: what ``show`` prints."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from gradtrace.analysis.reported import Reported, reported
from gradtrace.errors import NoSuchRecordError
from gradtrace.trace import points, schema
from gradtrace.trace.digest import MEMBERS as DIGEST_MEMBERS
from gradtrace.trace.dtypes import Float64
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Record
from gradtrace.trace.spans import PADDING, layout_numel

SHOW_FORMAT: Final = "gradtrace.show"
SHOW_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Query:
    """Say which records are wanted; ``None`` leaves a member open.

    Attributes:
        param: name or alias of a parameter; its part of a flat buffer is cut out.
    """

    step: int | None = None
    micro_step: int | None = None
    point: str | None = None
    param: str | None = None
    rank: int | None = None
    unit: str | None = None
    occurrence: int | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Name one record.

    Attributes:
        dtype: of the recorded values, ``None`` for a record of facts only.
        numel: elements of the whole record, padding included.
    """

    rank: int
    step: int
    micro_step: int | None
    point: str
    unit: str
    occurrence: int
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Say where one stretch of a record belongs; ``param`` is ``None`` for padding."""

    param: str | None
    param_offset: int
    flat_offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sum up the values shown, in the record's own scale.

    Attributes:
        min, max, mean, l2: over the finite values; ``None`` when there is none.
    """

    numel: int
    min: float | None
    max: float | None
    mean: float | None
    l2: float | None
    zeros: int
    nans: int
    infs: int

    def to_dict(self) -> dict[str, Any]:
        """Return the members, non-finite numbers as strings."""
        return {
            name: schema.encode_float(value) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class View:
    """Show one record.

    Attributes:
        shard: file of the tensor, relative to the trace; ``None`` for facts only.
        key: name of the tensor in it.
        param: the parameter that was cut out, ``None`` when the whole record is shown.
        shape: its full shape, when one parameter is shown.
        pieces: what is shown, in the order of the values.
        values: the first of them.
        digest: for a record that holds no values, one entry for each of ``pieces``.
    """

    match: Match
    shard: str | None
    key: str | None
    param: str | None
    shape: tuple[int, ...] | None
    pieces: tuple[Piece, ...]
    statistics: Statistics | None
    values: tuple[float, ...]
    facts: Mapping[str, Any]
    digest: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the members of ``record`` in ``show --json``."""
        return {
            **asdict(self.match),
            "shard": self.shard,
            "key": self.key,
            "param": self.param,
            "shape": None if self.shape is None else list(self.shape),
            "spans": [asdict(piece) for piece in self.pieces],
            "statistics": None if self.statistics is None else self.statistics.to_dict(),
            "values": [schema.encode_float(value) for value in self.values],
            "digest": [dict(entry) for entry in self.digest],
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class ShowResult:
    """Hold what ``show`` says: the records that match, and one in full when it is the only one.

    Attributes:
        reported: what frameworks reported of the one step that all matches are of.
    """

    path: str
    matches: tuple[Match, ...]
    record: View | None
    reported: tuple[Reported, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``show --json`` prints."""
        return {
            "format": SHOW_FORMAT,
            "version": SHOW_VERSION,
            "path": self.path,
            "record": None if self.record is None else self.record.to_dict(),
            "matches": [asdict(match) for match in self.matches],
            "reported": [entry.to_dict() for entry in self.reported],
        }


def show(path: str | Path, query: Query, count: int = 8) -> ShowResult:
    """Find the records that a query leaves, and read the tensor when it is one.

    Args:
        path: the trace directory.
        query: what is wanted.
        count: how many values to return.

    Raises:
        NoSuchRecordError: nothing matches; says what there is.
        GradtraceError: the trace cannot be opened, or the shard is damaged.
    """
    trace = open_trace(path)
    param = None if query.param is None else _parameter(trace, query.param)
    records = _select(trace, query, param)
    matches = tuple(_match(trace, record) for record in records)
    view = _view(trace, records[0], matches[0], param, count) if len(records) == 1 else None
    steps = {match.step for match in matches}
    reports = tuple(entry for entry in reported(trace) if {entry.step} == steps)
    return ShowResult(str(path), matches, view, reports)


def _parameter(trace: Trace, name: str) -> int:
    names: dict[str, int] = {}
    for parameter in trace.manifest.parameters:
        for known in (parameter.name, *parameter.aliases):
            names[known] = parameter.index
    if name not in names:
        near = difflib.get_close_matches(name, names, 5, 0.3) or list(names)[:5]
        _none(trace, f"no parameter {name!r}", f"one of {len(names)}, such as {', '.join(near)}")
    return names[name]


def _select(trace: Trace, query: Query, param: int | None) -> list[Record]:
    """Apply one member of the query after the other, so that the one that empties it is known."""
    records = [record for rank in trace.ranks.values() for record in rank.records]
    members: tuple[tuple[str, Any, Callable[[Record], Any]], ...] = (
        ("rank", query.rank, lambda record: record.rank),
        ("step", query.step, lambda record: record.step),
        ("point", query.point, lambda record: record.point),
        ("micro_step", query.micro_step, lambda record: record.micro_step),
        ("unit", query.unit, lambda record: record.unit),
        ("occurrence", query.occurrence, lambda record: record.occurrence),
    )
    chosen: list[str] = []
    for name, wanted, take in members:
        if wanted is None:
            continue
        left = [record for record in records if take(record) == wanted]
        if not left:
            there = _listing(sorted({take(record) for record in records}, key=_null_last))
            _none(
                trace,
                f"no record of {name} {wanted}{_among(chosen)}",
                f"{name} {there}{_why_absent(trace, query)}",
            )
        chosen.append(f"{name} {wanted}")
        records = left
    if param is not None:
        left = [record for record in records if any(True for _ in _pieces(trace, record, param))]
        if not left:
            there = _listing(sorted({n for record in records for n in _names(trace, record)}))
            _none(
                trace,
                f"no record of parameter {query.param!r}{_among(chosen)}",
                f"one of {there}" if there else "a record with a tensor",
            )
        records = left
    if not records:
        _none(trace, "no record at all", "a trace with records")
    return records


def _why_absent(trace: Trace, query: Query) -> str:
    if query.point is None:
        return ""
    statuses = {rank.header.points[query.point] for rank in trace.ranks.values()} - {"recorded"}
    gaps = sorted(
        f"{gap.reason}: {gap.detail}"
        for rank in trace.ranks.values()
        for gap in rank.gaps
        if gap.point in (None, query.point) and query.step in (None, gap.step)
    )
    reasons = [*sorted(statuses), *(f"a gap, {gap}" for gap in gaps[:1])]
    return f" ({query.point} is {'; '.join(reasons)})" if reasons else ""


def _none(trace: Trace, found: str, expected: str) -> NoReturn:
    raise NoSuchRecordError(
        found,
        where=str(trace.path),
        expected=expected,
        remedy=f"Run 'gradtrace info {trace.path}' to see what there is.",
    )


def _among(chosen: Sequence[str]) -> str:
    return f" with {', '.join(chosen)}" if chosen else ""


def _listing(values: Sequence[Any], most: int = 8) -> str:
    words = ["none (once a step)" if value is None else str(value) for value in values]
    if len(words) > most:
        words = [*words[: most - 1], f"... {words[-1]} ({len(words)} in all)"]
    return ", ".join(words)


def _null_last(value: Any) -> tuple[bool, Any]:
    return (value is None, 0 if value is None else value)


def _match(trace: Trace, record: Record) -> Match:
    return Match(
        rank=record.rank,
        step=record.step,
        micro_step=record.micro_step,
        point=record.point,
        unit=record.unit,
        occurrence=record.occurrence,
        dtype=record.dtype,
        numel=0 if record.layout is None else layout_numel(trace.layout(record)),
    )


def _pieces(trace: Trace, record: Record, param: int | None) -> Iterator[Piece]:
    """Yield the stretches of a record, or those of one parameter in the parameter's order."""
    if record.layout is None:
        return
    spans = list(trace.layout(record))
    if param is not None:
        spans = sorted(
            (span for span in spans if span.param == param and span.numel),
            key=lambda span: span.param_offset,
        )
    for span in spans:
        name = None if span.param == PADDING else trace.manifest.parameters[span.param].name
        yield Piece(name, span.param_offset, span.flat_offset, span.numel)


def _names(trace: Trace, record: Record) -> set[str]:
    pieces = _pieces(trace, record, None)
    return {piece.param for piece in pieces if piece.param is not None and piece.numel}


def _view(trace: Trace, record: Record, match: Match, param: int | None, count: int) -> View:
    pieces = tuple(_pieces(trace, record, param))
    whole = param is None and points.BY_NAME[record.point].space == "param" and len(pieces) == 1
    name = pieces[0].param if pieces and (param is not None or whole) else None
    parameters = {parameter.name: parameter for parameter in trace.manifest.parameters}
    values: Float64 | None = None
    if record.key is not None:
        flat = trace.values(record)
        stretches = [flat[piece.flat_offset : piece.flat_offset + piece.numel] for piece in pieces]
        values = np.concatenate(stretches) if stretches else flat
    return View(
        match=match,
        shard=None if record.shard is None else f"{schema.rank_dir(record.rank)}/{record.shard}",
        key=record.key,
        param=name,
        shape=None if name is None else parameters[name].shape,
        pieces=pieces,
        statistics=None if values is None else statistics(values),
        values=() if values is None else tuple(float(value) for value in values[:count]),
        facts=record.facts,
        digest=_digest(trace, record, pieces),
    )


def _digest(trace: Trace, record: Record, pieces: Sequence[Piece]) -> tuple[Mapping[str, Any], ...]:
    """Return the entries of a digest for some of its stretches."""
    members = record.facts.get("digest")
    if record.layout is None or members is None:
        return ()
    places = {span.flat_offset: at for at, span in enumerate(trace.layout(record)) if span.numel}
    return tuple(
        {name: members[name][places[piece.flat_offset]] for name in DIGEST_MEMBERS}
        for piece in pieces
        if piece.numel
    )


def statistics(values: Float64) -> Statistics:
    """Sum up values of any kind, non-finite ones included.

    Args:
        values: 1-D float64.
    """
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    # Scaled by the largest, so that squares neither overflow nor vanish.
    scaled = finite / largest if largest > 0.0 else finite
    return Statistics(
        numel=int(values.size),
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        mean=largest * float(scaled.mean()) if finite.size else None,
        l2=largest * float(np.sqrt(np.dot(scaled, scaled))) if finite.size else None,
        zeros=int(np.count_nonzero(values == 0.0)),
        nans=int(np.count_nonzero(np.isnan(values))),
        infs=int(np.count_nonzero(np.isinf(values))),
    )
