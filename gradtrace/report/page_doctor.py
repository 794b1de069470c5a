"""Lay out what ``doctor`` found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gradtrace.integrations.doctor.results import Check, Checkup, Cost, ProbeRow, Verdict
from gradtrace.report import words
from gradtrace.report.page import (
    Block,
    Cell,
    Column,
    Commands,
    Items,
    Page,
    Prose,
    Section,
    Table,
    Tone,
    facts,
    section,
    sections,
)

_TONES: Final[Mapping[Verdict, Tone]] = {
    "traced": "good",
    "refused": "bad",
    "unbound": "bad",
    "unknown": "warn",
}
_HEADS: Final[Mapping[Verdict, str]] = {
    "traced": "TRACED WHOLE",
    "refused": "REFUSED",
    "unbound": "A PROBE DOES NOT BIND",
    "unknown": "CANNOT SAY",
}


def doctor_page(result: Checkup) -> Page:
    """Lay out a checkup: one configuration in full, several as a table."""
    release = result.packages.get("deepspeed", "none")
    single = len(result.checks) == 1
    verdict = f"{_HEADS[result.verdict]} by gradtrace with deepspeed {release}"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.packages.items()))
    if single:
        parts = _check_sections(result.checks[0])
    else:
        parts = [
            section("Configurations", _overview(result)),
            *map(_trouble, result.checks),
            _more(),
        ]
    return Page(
        title="doctor",
        verdict=f"{verdict}: {result.checks[0].name}" if single else verdict,
        tone=_TONES[result.verdict],
        lead=f"Engines built for real on {words.plural(result.ranks, 'CPU rank')}. {versions}.",
        sections=sections(*parts),
    )


def _overview(result: Checkup) -> Table:
    rows = []
    for check in result.checks:
        bound = sum(probe.bound for probe in check.probes)
        cost = check.cost
        rows.append(
            (
                Cell(check.name),
                Cell(check.verdict, _TONES[check.verdict]),
                Cell(check.optimizer),
                Cell(f"{bound} of {len(check.probes)}" if check.probes else "-"),
                Cell("-" if cost is None else str(cost.records)),
                Cell("-" if cost is None else words.size(_tensor_bytes(cost))),
            )
        )
    columns = (Column("configuration"), Column("is"), Column("optimizer"), Column("probes", True))
    return Table((*columns, Column("records", True), Column("bytes", True)), tuple(rows))


def _tensor_bytes(cost: Cost) -> int:
    return cost.tensor_bytes if cost.scaled_tensor_bytes is None else cost.scaled_tensor_bytes


def _trouble(check: Check) -> Section | None:
    blocks = () if check.verdict == "traced" else _engine(check)
    return section(check.name, *blocks, _notes(check))


def _more() -> Section | None:
    text = (
        "Each stage with defaults. Records and bytes: of one step, on the rank that records most."
    )
    command = ("gradtrace doctor --config ds_config.json", "all about your own configuration")
    return section("More", Prose(text, "dim"), Commands((command,)))


def _notes(check: Check) -> Items:
    return Items(tuple(Cell(note, "warn") for note in check.notes))


def _check_sections(check: Check) -> list[Section | None]:
    return [
        section("Engine", *_engine(check)),
        section("Changed, to run it on this machine", _changes(check)),
        section("Probes", _probes(check)),
        section("Points, in one step of the stand-in", _points(check)),
        section("Laws", _laws(check)),
        section("Cost of one step, on the rank that records most", _cost(check.cost)),
        section("Notes", _notes(check)),
    ]


def _engine(check: Check) -> tuple[Block, ...]:
    reason = check.reason
    return (
        facts(
            ("verdict", Cell(check.verdict, _TONES[check.verdict])),
            ("found", None if reason is None else Cell(reason.found, "bad")),
            ("expected", None if reason is None else reason.expected),
            ("remedy", None if reason is None else reason.remedy),
            ("message", None if reason is None else reason.slug),
            ("model", check.model),
            ("optimizer", check.optimizer or None),
            ("adapter", check.adapter),
        ),
    )


def _changes(check: Check) -> Table:
    columns = (Column("setting"), Column("given"), Column("used"), Column("because"))
    rows = tuple(
        (Cell(c.setting), Cell(_value(c.given), "dim"), Cell(_value(c.used)), Cell(c.why, "dim"))
        for c in check.changes
    )
    return Table(columns, rows)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _probes(check: Check) -> Table:
    columns = (Column("point"), Column("binds"), Column("method"), Column("where"))
    return Table(columns, tuple(_probe(probe) for probe in check.probes))


def _probe(probe: ProbeRow) -> tuple[Cell, ...]:
    if probe.bound:
        binds = Cell("yes", "good")
    else:
        binds = Cell("NO", "bad") if probe.required else Cell("no, not needed", "dim")
    where = probe.place if probe.reason is None else probe.reason
    method = f"{probe.when} {probe.owner}.{probe.method}"
    return Cell(probe.point), binds, Cell(method), Cell(where or "-", "dim")


def _points(check: Check) -> Table:
    scaled = check.cost is not None and check.cost.scaled_to is not None
    columns = [
        Column("point"),
        Column("status"),
        Column("records", True),
        Column("tensors", True),
        Column("bytes", True),
    ]
    rows = []
    for point in check.points:
        recorded = point.status == "recorded"
        row = [
            Cell(point.point),
            Cell(point.status, "good" if recorded else "dim"),
            Cell(str(point.records)),
            Cell(str(point.tensors)),
            Cell(words.size(point.bytes)),
        ]
        if scaled:
            row.append(Cell(words.size(point.scaled_bytes or 0)))
        rows.append(tuple(row))
    if scaled:
        columns.append(Column("scaled", True))
    return Table(tuple(columns), tuple(rows))


def _laws(check: Check) -> Table:
    columns = (Column("law"), Column("says"), Column("checked", True), Column("why not"))
    rows = tuple(
        (
            Cell(law.law, "good" if law.checked else "dim"),
            Cell(words.LAW_WORDS.get(law.law, ""), "dim"),
            Cell(str(law.checked)),
            Cell(law.reason or "", "dim"),
        )
        for law in check.laws
    )
    return Table(columns, rows)


def _cost(cost: Cost | None) -> Block | None:
    if cost is None:
        return None
    told = (
        f"Measured by tracing {words.plural(cost.steps, 'step')} of a stand-in model with "
        f"{cost.parameters:,} trainable parameters, {words.plural(cost.micro_steps, 'micro-step')} each: "
        f"{words.plural(cost.records, 'record')} with {words.plural(cost.tensors, 'tensor')}, "
        f"{words.size(cost.tensor_bytes)} of tensors and {words.size(cost.index_bytes)} of index."
    )
    if cost.scaled_to is not None and cost.scaled_tensor_bytes is not None:
        told += (
            f" Scaled, not measured, to the {cost.scaled_to:,} trainable parameters of {cost.scaled_by}: "
            f"{words.size(cost.scaled_tensor_bytes)} of tensors. How many records there are depends on "
            "the model's parameters and buckets; shards get smaller with more ranks."
        )
    return Prose(told)
