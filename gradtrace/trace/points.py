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
    Point("input", 0, "scalar", True, "the batch given to forward: shapes, dtypes and hashes"),
    Point("weight", 1, "spans", False, "model weights at the start of the step"),
    Point("loss", 2, "scalar", True, "loss handed to backward, its seed and the boundary flags"),
    Point("local_grad", 3, "param", True, "what autograd produced on this rank, this micro-step"),
    Point("local_accum", 4, "param", True, "the rank's own accumulation buffer, before reduction"),
    Point("bucket", 5, "spans", True, "the flat buffer as it enters the collective"),
    Point("reduced", 6, "spans", True, "the same buffer as it leaves the collective"),
    Point("partition", 7, "spans", True, "this rank's shard of the reduced gradient"),
    Point("accumulated", 8, "spans", True, "the accumulation buffer of reduced shards"),
    Point("master_grad", 9, "spans", False, "the gradient given to the optimizer, still scaled"),
    Point("clipped_grad", 10, "spans", False, "the same after unscale and clip"),
    Point(
        "optimizer_state", 11, "spans", False, "the optimizer's moments, and the rule it follows"
    ),
    Point("master_weight", 12, "spans", False, "fp32 weights before and after the optimizer"),
)

POINT_NAMES: Final[tuple[str, ...]] = tuple(point.name for point in POINTS)
BY_NAME: Final[dict[str, Point]] = {point.name: point for point in POINTS}
# Points that the first traces of format version 1 did not have: readers take them as absent there.
LATER: Final = frozenset({"input", "weight", "optimizer_state", "master_weight"})
# Points that are kept as digests unless the plan names them.
DIGESTED: Final = frozenset({"weight", "master_weight"})
# Points that are recorded only where the plan names them: twice the size of the fp32 weights.
ON_REQUEST: Final = frozenset({"optimizer_state"})
_AFTER_ALL: Final = 2**62


def moment(name: str, micro_step: int | None) -> int:
    """Return when in its step a record was made, as a number to sort by.

    Weights come before the first micro-step; other records without one after the last.
    """
    if micro_step is not None:
        return micro_step
    return -1 if name == "weight" else _AFTER_ALL


def depth(name: str) -> int:
    """Return the causal depth of the point called ``name``.

    Raises:
        KeyError: no point has that name.
    """
    return BY_NAME[name].depth
