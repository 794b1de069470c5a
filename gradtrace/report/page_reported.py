"""Lay out what frameworks reported beside what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from gradtrace.analysis.reported import QUANTITIES, Quantity, Reported
from gradtrace.report import words
from gradtrace.report.page import Cell, Column, Section, Table, section

_NAMES: Final = {"loss": "loss", "grad_norm": "grad norm", "lr": "learning rate"}
_MOST: Final = 12  # reports, each of up to three rows
T = TypeVar("T")


def reported_section(entries: Sequence[Reported]) -> Section | None:
    """Lay out each report with the records beside it; what was not reported has no row."""
    shown = _some(entries)
    rows = []
    for entry in shown:
        over = "1 step" if entry.steps == 1 else f"mean of {entry.steps} steps"
        for name in QUANTITIES:
            found = entry.quantities[name]
            if found.reported is not None:
                what = f"{_NAMES[name]}, {over}" if name == "loss" else _NAMES[name]
                rows.append(
                    (
                        Cell(str(entry.step)),
                        Cell(what),
                        _number(found.reported, found),
                        _number(found.recorded, found),
                        _remark(found),
                    )
                )
    if not rows:
        return None
    columns = (
        Column("step", True),
        Column("what"),
        Column("reported", True),
        Column("recorded", True),
        Column(""),
    )
    sources = ", ".join(sorted({entry.source for entry in entries}))
    return section(f"Reported by {sources}{_of(shown, entries)}", Table(columns, tuple(rows)))


def pairs_section(pairs: Sequence[tuple[Reported, Reported]]) -> Section | None:
    """Lay out what was reported of the same step of two runs."""
    shown = _some(pairs)
    rows = []
    for one, two in shown:
        for name in QUANTITIES:
            mine, other = one.quantities[name], two.quantities[name]
            if mine.reported is not None or other.reported is not None:
                rows.append(
                    (
                        Cell(str(one.step)),
                        Cell(_NAMES[name]),
                        _number(mine.reported, mine),
                        _number(other.reported, other),
                    )
                )
    if not rows:
        return None
    columns = (
        Column("step", True),
        Column("what"),
        Column("baseline", True),
        Column("candidate", True),
    )
    return section(f"Reported by the frameworks{_of(shown, pairs)}", Table(columns, tuple(rows)))


def _some(entries: Sequence[T]) -> Sequence[T]:
    return entries if len(entries) <= _MOST else [*entries[: _MOST - 1], entries[-1]]


def _of(shown: Sequence[object], entries: Sequence[object]) -> str:
    return "" if len(shown) == len(entries) else f" ({len(shown)} of {len(entries)} reports)"


def _number(value: float | None, quantity: Quantity) -> Cell:
    if value is None:
        return Cell("-", "dim")
    return Cell(words.number(value), "warn" if quantity.agrees is False else "plain")


def _remark(quantity: Quantity) -> Cell:
    if quantity.agrees is False:
        return Cell("differs", "warn")
    return Cell("" if quantity.agrees else "not compared", "dim")
