"""Name the points of ZeRO's gradient path, in causal order (DESIGN section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Space = Literal["scalar", "param", "spans"]


@dataclass(frozen=True, slots=True)
class Point:
    """Describe one place in the gradient path where something is recorded.

    Attributes:
        name: the word used in the API, files, JSON and CLI.
        depth: position in the causal order; a fault shows first at the smallest broken depth.
        space: ``scalar`` (facts only), ``param`` (one whole parameter a record) or ``spans``
            (a flat buffer whose layout says which parameter each stretch belongs to).
        per_micro_step: whether records carry a micro_step (optimizer points have null).
        what: one line for people.
    """

    name: str
    depth: int
    space: Space
    per_micro_step: bool
    what: str


POINTS: Final[tuple[Point, ...]] = (
    Point("loss", 0, "scalar", True, "loss handed to backward, its seed and the boundary flags"),
    Point("local_grad", 1, "param", True, "what autograd produced on this rank, this micro-step"),
    Point("local_accum", 2, "param", True, "the rank's own accumulation buffer, before reduction"),
    Point("bucket", 3, "spans", True, "the flat buffer as it enters the collective"),
    Point("reduced", 4, "spans", True, "the same buffer as it leaves the collective"),
    Point("partition", 5, "spans", True, "this rank's shard of the reduced gradient"),
    Point("accumulated", 6, "spans", True, "the accumulation buffer of reduced shards"),
    Point("master_grad", 7, "spans", False, "the gradient given to the optimizer, still scaled"),
    Point("clipped_grad", 8, "spans", False, "the same after unscale and clip"),
)

POINT_NAMES: Final[tuple[str, ...]] = tuple(point.name for point in POINTS)
BY_NAME: Final[dict[str, Point]] = {point.name: point for point in POINTS}


def depth(name: str) -> int:
    """Return the causal depth of the point called ``name``.

    Raises:
        KeyError: no point has that name.
    """
    return BY_NAME[name].depth
