"""Define what a report is made of, before it becomes text or HTML: plain frozen data.

Results become pages (``page_diff``, ``page_audit``, ...), pages become text (``text``) or HTML
(``html``). Strings are raw here; each renderer escapes for its own medium.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["plain", "good", "bad", "warn", "dim"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Hold one piece of text and how it should strike the eye."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Column:
    """Head one column of a table.

    Attributes:
        number: aligned to the right.
    """

    title: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Hold rows of cells under columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Hold ``label: value`` rows."""

    rows: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True)
class Prose:
    """Hold sentences."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Items:
    """Hold short paragraphs, each with a mark before it."""

    items: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """Draw one value of a series.

    Attributes:
        label: what it belongs to.
        value: as text.
        length: from 0 to 1.
    """

    label: str
    value: Cell
    length: float


@dataclass(frozen=True, slots=True)
class Bars:
    """Draw a series of values, one under the other."""

    caption: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """Hold commands that a reader may copy."""

    commands: tuple[tuple[str, str], ...]  # (command, what it does)


Block = Table | Facts | Prose | Items | Bars | Commands


@dataclass(frozen=True, slots=True)
class Section:
    """Hold blocks under a heading."""

    heading: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """Hold a whole report.

    Attributes:
        title: what was asked, such as ``diff a b``.
        verdict: the one line that a reader must not miss.
        tone: of the verdict.
        lead: one or two sentences under it.
        sections: the rest.
    """

    title: str
    verdict: str
    tone: Tone
    lead: str
    sections: tuple[Section, ...]


def facts(*rows: tuple[str, str | Cell | None]) -> Facts:
    """Make facts of those rows that have a value."""
    kept = [(label, value) for label, value in rows if value is not None]
    return Facts(
        tuple((label, value if isinstance(value, Cell) else Cell(value)) for label, value in kept)
    )


def section(heading: str, *blocks: Block | None) -> Section | None:
    """Make a section of those blocks that hold something; ``None`` when none does."""
    kept = tuple(block for block in blocks if block is not None and not _empty(block))
    return Section(heading, kept) if kept else None


def sections(*parts: Section | None) -> tuple[Section, ...]:
    """Keep the sections that hold something."""
    return tuple(part for part in parts if part is not None)


def _empty(block: Block) -> bool:
    if isinstance(block, Prose):
        return not block.text
    if isinstance(block, (Table, Facts)):
        return not block.rows
    if isinstance(block, Items):
        return not block.items
    return not (block.bars if isinstance(block, Bars) else block.commands)
