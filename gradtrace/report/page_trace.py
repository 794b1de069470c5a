"""Lay out what ``info``, ``show`` and ``verify`` say of one trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from gradtrace.analysis.inspect import StepInfo, TraceInfo
from gradtrace.analysis.show import Match, Piece, ShowResult, Statistics, View
from gradtrace.analysis.verify import VerifyResult
from gradtrace.report import words
from gradtrace.report.page import (
    Cell,
    Column,
    Facts,
    Items,
    Page,
    Section,
    Table,
    facts,
    section,
    sections,
)
from gradtrace.report.page_audit import notes
from gradtrace.report.page_digest import TABLED, batch_table, digest_table
from gradtrace.report.page_reported import reported_section
from gradtrace.trace.merge import MergeResult
from gradtrace.trace.points import ON_REQUEST, POINT_NAMES
from gradtrace.trace.schema import decode_float

_MOST_ROWS: Final = 40
_MOST_PIECES: Final = 12


def info_page(info: TraceInfo) -> Page:
    """Lay out what is in a trace."""
    open_ranks = [rank for rank, reason in info.closed.items() if reason is None]
    records = sum(point.records for point in info.points)
    size = sum(point.bytes for point in info.points)
    complete = sum(step.complete for step in info.steps)
    whole = not open_ranks and not info.gaps and complete == len(info.steps)
    return Page(
        title=f"info {info.path}",
        verdict=f"{info.path}: {_run_line(info)}",
        tone="plain",
        lead=(
            f"{words.plural(complete, 'complete step')}, {words.plural(records, 'record')}, "
            f"{words.size(size)} of tensors" + ("." if whole else "; not everything is there.")
        ),
        sections=sections(
            _run_facts(info),
            section("Settings in effect", _settings(info)),
            section("Points", _points(info)),
            section("Steps", _steps(info.steps)),
            reported_section(info.reported),
            section("Gaps", _gaps(info)),
            notes(info.notes),
        ),
    )


def _run_line(info: TraceInfo) -> str:
    stage = info.effective.get("zero_stage", "?")
    dtype = "/".join(info.parameters.dtypes) or "?"
    return f"ZeRO-{stage}, {dtype}, {words.plural(info.world_size, 'rank')}"


def _run_facts(info: TraceInfo) -> Section | None:
    parameters = info.parameters
    missing = info.world_size - len(info.ranks)
    return section(
        "Run",
        facts(
            ("run id", info.run_id),
            ("recorded", _date(info.created_s)),
            ("versions", ", ".join(f"{k} {v}" for k, v in sorted(info.packages.items()))),
            (
                "ranks",
                f"{len(info.ranks)} of {info.world_size}" + (" (as planned)" if missing else ""),
            ),
            (
                "parameters",
                f"{parameters.count} ({parameters.captured} captured), "
                f"{parameters.elements} elements in all",
            ),
            ("plan", _plan(info.plan)),
            ("weights", _perturbed(info.perturbation)),
            ("ended", _ended(info.closed)),
        ),
    )


def _perturbed(perturbation: Mapping[str, Any] | None) -> Cell | None:
    if perturbation is None:
        return None
    sample = perturbation.get("sample")
    return Cell(f"moved by one unit in the last place before the run, sample {sample}", "warn")


def _plan(plan: Mapping[str, Any]) -> str:
    """Write what the plan narrows down; what it leaves open needs no words."""
    chosen = {name: value for name, value in plan.items() if value is not None}
    if set(chosen.get("points", ())) >= set(POINT_NAMES) - ON_REQUEST:
        more = [name for name in chosen["points"] if name in ON_REQUEST]
        chosen["points"] = ", ".join(["all", *more])
    if not chosen.get("digested"):
        chosen.pop("digested", None)
    return ", ".join(f"{name} {_short(value)}" for name, value in chosen.items())


def _date(created_s: float) -> str:
    try:
        moment = datetime.fromtimestamp(created_s, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return words.number(created_s)  # no date that a calendar has
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC, by rank 0's clock"


def _ended(closed: Mapping[int, str | None]) -> Cell:
    open_ranks = [str(rank) for rank, reason in closed.items() if reason is None]
    if open_ranks:
        return Cell(f"never closed on rank {words.listing(open_ranks, 8)}", "warn")
    reasons = sorted({reason for reason in closed.values() if reason is not None})
    return Cell("; ".join(reasons))


def _settings(info: TraceInfo) -> Facts:
    rows: list[tuple[str, str | Cell]] = [(k, _short(v)) for k, v in info.effective.items()]
    for name, values in info.effective_differs.items():
        told = words.listing((f"rank {rank}: {_short(v)}" for rank, v in values.items()), 4)
        rows.append((name, Cell(f"differs: {told}", "warn")))
    return facts(*rows)


def _short(value: Any, most: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _points(info: TraceInfo) -> Table:
    columns = (
        Column("point"),
        Column("status"),
        Column("records", True),
        Column("bytes", True),
        Column("gaps", True),
    )
    return Table(
        columns,
        tuple(
            (
                Cell(point.point),
                Cell(
                    "recorded (digests)" if point.digests else point.status,
                    "plain" if point.status == "recorded" else "dim",
                ),
                Cell(str(point.records)),
                Cell(words.size(point.bytes)),
                Cell(str(point.gaps), "warn" if point.gaps else "dim"),
            )
            for point in info.points
        ),
    )


def _steps(steps: tuple[StepInfo, ...]) -> Table:
    columns = (
        Column("step", True),
        Column("micro-steps", True),
        Column("records", True),
        Column("gaps", True),
        Column("grad norm", True),
        Column("loss scale", True),
        Column("remarks"),
    )
    shown = steps if len(steps) <= _MOST_ROWS else (*steps[: _MOST_ROWS - 1], steps[-1])
    rows = [
        (
            Cell(str(step.step)),
            Cell(str(step.micro_steps)),
            Cell(str(step.records)),
            Cell(str(step.gaps), "warn" if step.gaps else "dim"),
            Cell(_scalar(step.facts.get("grad_norm"))),
            Cell(_scalar(step.facts.get("loss_scale"))),
            Cell(", ".join(_remarks(step)), "warn"),
        )
        for step in shown
    ]
    if len(shown) < len(steps):
        blank = Cell("...", "dim")
        hidden = Cell(f"{len(steps) - len(shown)} more", "dim")
        rows.insert(-1, (blank, blank, blank, blank, blank, blank, hidden))
    return Table(columns, tuple(rows))


def _remarks(step: StepInfo) -> list[str]:
    remarks = []
    if not step.complete:
        remarks.append("incomplete")
    if step.partial:
        remarks.append("partial")
    if step.facts.get("overflow") is True:
        remarks.append("overflow")
    return remarks


def _scalar(value: Any) -> str:
    try:
        return words.number(decode_float(value))
    except ValueError:
        return _short(value, 12)


def _gaps(info: TraceInfo) -> Table | None:
    if not info.gaps:
        return None
    columns = (Column("rank", True), Column("where"), Column("what"), Column("reason"))
    rows = [
        (
            Cell(str(gap.rank)),
            Cell(words.place(gap.step, gap.micro_step)),
            Cell(" of ".join(text for text in (gap.point, gap.unit) if text) or "everything"),
            Cell(f"{gap.reason}: {gap.detail}", "warn"),
        )
        for gap in info.gaps[:_MOST_ROWS]
    ]
    if len(info.gaps) > _MOST_ROWS:
        more = Cell(f"and {len(info.gaps) - _MOST_ROWS} more", "dim")
        rows.append((Cell(""), Cell(""), Cell(""), more))
    return Table(columns, tuple(rows))


def show_page(result: ShowResult) -> Page:
    """Lay out one record, or the list of those that match."""
    if result.record is not None:
        return _record_page(result.path, result.record, reported_section(result.reported))
    shown = result.matches[:_MOST_ROWS]
    hidden = len(result.matches) - len(shown)
    return Page(
        title=f"show {result.path}",
        verdict=f"{len(result.matches)} records match",
        tone="plain",
        lead="Narrow it down to one with --step, --micro-step, --point, --param, --rank, --unit "
        "or --occurrence.",
        sections=sections(
            section(
                "Records",
                _matches(shown),
                Items((Cell(f"and {hidden} more", "dim"),)) if hidden else None,
            ),
            reported_section(result.reported),
        ),
    )


def _matches(matches: tuple[Match, ...]) -> Table:
    columns = (
        Column("rank", True),
        Column("step", True),
        Column("micro", True),
        Column("point"),
        Column("unit"),
        Column("occ", True),
        Column("dtype"),
        Column("elements", True),
    )
    return Table(
        columns,
        tuple(
            (
                Cell(str(match.rank)),
                Cell(str(match.step)),
                Cell("-" if match.micro_step is None else str(match.micro_step)),
                Cell(match.point),
                Cell(match.unit),
                Cell(str(match.occurrence)),
                Cell(match.dtype or "facts"),
                Cell(str(match.numel)),
            )
            for match in matches
        ),
    )


def _record_page(path: str, view: View, reports: Section | None) -> Page:
    match = view.match
    named = view.param if view.param is not None else match.unit
    when = words.place(match.step, match.micro_step)
    return Page(
        title=f"show {path}",
        verdict=f"{words.thing(match.point, named)}, {when}, rank {match.rank}",
        tone="plain",
        lead=words.about(match.point),
        sections=sections(
            section("Values", _statistics(view.statistics), _values(view), digest_table(view)),
            section("Batch", batch_table(view.facts)),
            section(
                "Where it came from", _origin(view), None if view.digest else _pieces(view.pieces)
            ),
            section(
                "Facts", facts(*(_fact(k, v) for k, v in view.facts.items() if k not in TABLED))
            ),
            reports,
        ),
    )


def _fact(name: str, value: Any) -> tuple[str, str]:
    return name, _short(value, 200)


def _statistics(stats: Statistics | None) -> Facts | None:
    if stats is None:
        return None
    return facts(
        ("elements", str(stats.numel)),
        ("min, max", f"{words.number(stats.min)}, {words.number(stats.max)}"),
        ("mean", words.number(stats.mean)),
        ("L2 norm", words.number(stats.l2)),
        ("zeros", str(stats.zeros)),
        ("NaN", Cell(str(stats.nans), "bad" if stats.nans else "plain")),
        ("Inf", Cell(str(stats.infs), "bad" if stats.infs else "plain")),
    )


def _values(view: View) -> Facts | None:
    if not view.values:
        return None
    return facts(("first values", "  ".join(words.number(value) for value in view.values)))


def _origin(view: View) -> Facts:
    match = view.match
    return facts(
        ("rank", str(match.rank)),
        ("unit", match.unit),
        ("occurrence", str(match.occurrence)),
        ("file", view.shard),
        ("key", view.key),
        ("dtype", match.dtype),
        ("shape", None if view.shape is None else " x ".join(map(str, view.shape)) or "scalar"),
    )


def _pieces(pieces: tuple[Piece, ...]) -> Table | None:
    if not pieces:
        return None
    columns = (Column("parameter"), Column("its elements"), Column("stand in the record at", True))
    rows = [
        (
            Cell(piece.param or "padding", "plain" if piece.param else "dim"),
            Cell(f"{piece.param_offset} to {piece.param_offset + piece.numel - 1}"),
            Cell(str(piece.flat_offset)),
        )
        for piece in pieces[:_MOST_PIECES]
        if piece.numel
    ]
    if len(pieces) > _MOST_PIECES:
        rows.append((Cell(f"and {len(pieces) - _MOST_PIECES} more", "dim"), Cell(""), Cell("")))
    return Table(columns, tuple(rows))


def verify_page(result: VerifyResult) -> Page:
    """Lay out what was checked, and what is damaged."""
    size = words.size(sum(file.size_bytes for file in result.files))
    checked = (
        f"{words.plural(result.ranks, 'rank')}, {words.plural(result.segments, 'index segment')}, "
        f"{words.plural(result.records, 'record')}, {words.plural(len(result.files), 'shard')} "
        f"({size})"
    )
    faults = result.faults
    sound = result.verdict == "sound"
    return Page(
        title=f"verify {result.path}",
        verdict=(
            f"SOUND: {result.path} is whole"
            if sound
            else f"DAMAGED: {words.plural(len(faults), 'shard')} of {result.path}"
        ),
        tone="good" if sound else "bad",
        lead=f"Checked {checked}.",
        sections=sections(
            section(
                "Damage",
                Items(
                    tuple(
                        Cell(
                            f"{fault.where}: {fault.found}. Expected {fault.expected}. "
                            f"{fault.remedy} [{fault.slug}]",
                            "bad",
                        )
                        for fault in faults
                    )
                ),
            ),
            section("Shards", _files(result)),
            notes(result.notes),
        ),
    )


def merge_page(result: MergeResult) -> Page:
    """Lay out what was brought together."""
    came: dict[str, list[str]] = {}
    for rank, place in result.ranks.items():
        came.setdefault(place, []).append(str(rank))
    copied = result.files - result.linked
    return Page(
        title=f"merge {result.path}",
        verdict=f"{result.path} holds {words.plural(len(result.ranks), 'rank')}",
        tone="good",
        lead=f"{words.plural(result.files, 'file')}: {result.linked} linked, {copied} copied.",
        sections=sections(
            section(
                "Ranks",
                facts(*((place, words.listing(ranks, 12)) for place, ranks in came.items())),
            ),
            notes(result.notes),
        ),
    )


def _files(result: VerifyResult) -> Table:
    columns = (Column("file"), Column("size", True), Column("tensors", True), Column(""))
    rows = [
        (
            Cell(file.file),
            Cell(words.size(file.size_bytes)),
            Cell(str(file.tensors)),
            Cell("sound", "good") if file.fault is None else Cell(file.fault.slug, "bad"),
        )
        for file in result.files[:_MOST_ROWS]
    ]
    if len(result.files) > _MOST_ROWS:
        more = Cell(f"and {len(result.files) - _MOST_ROWS} more", "dim")
        rows.append((more, Cell(""), Cell(""), Cell("")))
    return Table(columns, tuple(rows))
