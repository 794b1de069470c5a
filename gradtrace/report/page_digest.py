"""Lay out records that hold no values: digests of weights, and what a batch was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gradtrace.analysis.show import View
from gradtrace.report import words
from gradtrace.report.page import Cell, Column, Table
from gradtrace.trace.schema import decode_float

TABLED: Final = frozenset({"digest", "tensors", "others"})  # facts that have a table of their own
_MOST_ROWS: Final = 40


def digest_table(view: View) -> Table | None:
    """Lay out a digest, one row a stretch."""
    if not view.digest:
        return None
    columns = (
        Column("parameter"),
        Column("its elements"),
        Column("L2 norm", True),
        Column("max |x|", True),
        Column("zeros", True),
        Column("NaN", True),
        Column("Inf", True),
        Column("hash"),
    )
    rows = [
        (
            Cell(piece.param or "padding"),
            Cell(f"{piece.param_offset} to {piece.param_offset + piece.numel - 1}"),
            Cell(words.number(decode_float(entry["l2"]))),
            Cell(words.number(decode_float(entry["max_abs"]))),
            Cell(str(entry["zeros"])),
            Cell(str(entry["nans"]), "bad" if entry["nans"] else "plain"),
            Cell(str(entry["infs"]), "bad" if entry["infs"] else "plain"),
            Cell(entry["hash"]),
        )
        for piece, entry in zip(view.pieces, view.digest, strict=True)
    ]
    return _cut(columns, rows)


def batch_table(facts: Mapping[str, Any]) -> Table | None:
    """Lay out a batch, one row a tensor or other value."""
    rows = [
        (
            Cell(entry["name"]),
            Cell(entry["dtype"]),
            Cell(" x ".join(map(str, entry["shape"])) or "scalar"),
            Cell(entry["hash"] or "not hashed", "plain" if entry["hash"] else "dim"),
        )
        for entry in facts.get("tensors", ())
    ]
    rows += [
        (
            Cell(entry["name"]),
            Cell(entry["type"], "dim"),
            Cell("-", "dim"),
            Cell(entry["hash"] or "not hashed", "plain" if entry["hash"] else "dim"),
        )
        for entry in facts.get("others", ())
    ]
    columns = (Column("given as"), Column("type"), Column("shape"), Column("hash"))
    return _cut(columns, rows) if rows else None


def _cut(columns: tuple[Column, ...], rows: Sequence[tuple[Cell, ...]]) -> Table:
    shown = list(rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        more = Cell(f"and {len(rows) - _MOST_ROWS} more", "dim")
        shown.append((more, *(Cell("") for _ in columns[1:])))
    return Table(columns, tuple(shown))
