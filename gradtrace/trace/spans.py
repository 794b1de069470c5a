"""Map stretches of flat buffers to parameters (DESIGN section 2, *span*)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PADDING = -1


@dataclass(frozen=True, slots=True)
class Span:
    """Say which elements of which parameter a stretch of a flat buffer holds.

    Attributes:
        param: index into the manifest's parameter table, or ``PADDING`` for elements of none.
        param_offset: first element, in C order of the full parameter (0 for padding).
        flat_offset: first element in the flat buffer.
        numel: how many elements.
    """

    param: int
    param_offset: int
    flat_offset: int
    numel: int


Layout = tuple[Span, ...]


def layout_numel(layout: Layout) -> int:
    """Return how many elements a flat tensor of this layout has (spans are contiguous)."""
    return layout[-1].flat_offset + layout[-1].numel if layout else 0


def pack_spans(pieces: Iterable[tuple[int, int, int]]) -> Layout:
    """Lay ``(param, param_offset, numel)`` pieces one after another into a layout."""
    spans: list[Span] = []
    flat_offset = 0
    for param, param_offset, numel in pieces:
        spans.append(Span(param, param_offset, flat_offset, numel))
        flat_offset += numel
    return tuple(spans)


def coverage_fault(pieces: Sequence[tuple[int, int]], numel: int) -> str | None:
    """Say in words why ``(offset, numel)`` pieces do not tile ``range(numel)`` exactly once.

    Returns:
        ``None`` when they tile it, else a phrase such as ``elements 3 to 7 are held by nobody``.
    """
    at = 0
    for offset, length in sorted(pieces):
        if length == 0:
            continue
        if offset > at:
            return f"elements {at} to {offset - 1} are held by nobody"
        if offset < at:
            return f"elements {offset} to {min(at, offset + length) - 1} are held twice"
        at = offset + length
    if at < numel:
        return f"elements {at} to {numel - 1} are held by nobody"
    if at > numel:
        return f"elements {numel} to {at - 1} are past the parameter's end"
    return None
