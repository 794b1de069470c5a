"""Print pages on a terminal, or as plain text where there is none."""

from __future__ import annotations

import shlex
from typing import Final, TextIO

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from gradtrace.report.escape import printable
from gradtrace.report.page import (
    Bars,
    Block,
    Cell,
    Commands,
    Facts,
    Items,
    Page,
    Prose,
    Table,
    Tone,
)

_STYLES: Final[dict[Tone, str]] = {
    "plain": "",
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
    "dim": "dim",
}
_BAR_WIDTH: Final = 24
# A rule under the heads, and nothing else; plain ASCII, so that no encoding spoils it.
_RULED: Final = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def print_page(page: Page, stream: TextIO, *, width: int | None = None) -> None:
    """Print a page.

    Args:
        page: what to print.
        stream: where; colours appear only on a terminal, and NO_COLOR is honoured.
        width: columns, by default the terminal's, or 80.
    """
    console = Console(
        file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False
    )
    plain = not console.encoding.lower().startswith("utf")
    with console.capture() as captured:
        console.print(_page(page, plain=plain, width=console.width))
    # rich fills every line up to the width; nobody wants those blanks in a file or a bug report.
    stream.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _page(page: Page, *, plain: bool, width: int) -> RenderableType:
    parts: list[RenderableType] = [_text(Cell(page.verdict, page.tone), bold=True)]
    if page.lead:
        parts.append(_text(Cell(page.lead)))
    for section in page.sections:
        parts.append(Text(""))
        parts.append(Text(printable(section.heading), style="bold"))
        for number, block in enumerate(section.blocks):
            above = 1 if number and isinstance(block, (Table, Bars)) else 0
            parts.append(Padding(_block(block, plain=plain, width=width - 2), (above, 0, 0, 2)))
    return Group(*parts)


def _text(cell: Cell, *, bold: bool = False) -> Text:
    style = _STYLES[cell.tone]
    if bold and "bold" not in style:
        style = f"bold {style}".strip()
    return Text(printable(cell.text), style=style)


def _block(block: Block, *, plain: bool, width: int) -> RenderableType:
    match block:
        case Prose(text, tone):
            return _text(Cell(text, tone))
        case Facts():
            return _facts(block)
        case Table():
            return _table(block)
        case Items(items):
            grid = Grid.grid(padding=(0, 1))
            for item in items:
                grid.add_row(Text("-", style="dim"), _text(item))
            return grid
        case Bars():
            return _bars(block, plain=plain)
        case Commands(commands):
            return Group(
                *(
                    line
                    for command, meaning in commands
                    for line in (_text(Cell(f"# {meaning}", "dim")), _command(command, width))
                )
            )


def _command(command: str, width: int) -> Text:
    """Break a command as a shell reads it: what is copied from the screen still runs."""
    groups: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if groups and groups[-1].startswith("-") and not word.startswith("-"):
            groups[-1] += f" {word}"  # an option and its value stay together
        else:
            groups.append(word)
    lines = [""]
    for word in groups:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return Text("\n".join(map(printable, lines)), style="cyan", overflow="fold")


def _facts(block: Facts) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, cell in block.rows:
        grid.add_row(Text(printable(label)), _text(cell))
    return grid


def _table(block: Table) -> Grid:
    grid = Grid(
        box=_RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim"
    )
    for column in block.columns:
        grid.add_column(
            Text(printable(column.title)),
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    for row in block.rows:
        grid.add_row(*(_text(cell) for cell in row))
    return grid


def _bars(block: Bars, *, plain: bool) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    mark = "#" if plain else "█"
    for bar in block.bars:
        drawn = mark * round(bar.length * _BAR_WIDTH)
        grid.add_row(
            Text(printable(bar.label), style="dim"),
            Text(drawn, style=_STYLES[bar.value.tone] or "blue"),
            _text(bar.value),
        )
    return Group(Text(printable(block.caption), style="dim"), grid)
