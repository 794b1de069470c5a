"""Say what accumulating in a coarser dtype costs, where two runs accumulate in different ones."""

from __future__ import annotations

import math
from typing import Final

from gradtrace.analysis.compare import Step
from gradtrace.analysis.judging import ratio

SUMS: Final = ("local_accum", "accumulated")
_SHOWN: Final = 4


def lost_precision(step: Step) -> str | None:
    """Return a note on how far the sums part from micro-step to micro-step, or ``None``."""
    names = [
        str(side.align.header(side.align.ranks[0]).effective.get("grad_accum_dtype"))
        for side in step.sides
    ]
    if names[0] == names[1]:
        return None
    for point in SUMS:
        found = {
            micro_step: ratio(apart, mine)
            for (where, micro_step), (apart, mine) in sorted(step.tally.sums.items())
            if where == point and mine > 0
        }
        if not found or not any(found.values()):
            continue
        last = max(found)
        every = max(1, (len(found) - 1) // (_SHOWN - 1))
        chosen = sorted({*sorted(found)[::-every][:_SHOWN], last})
        listed = ", ".join(f"{found[m]:.2g} after micro-step {m}" for m in chosen)
        bits = (
            "" if found[last] == 0 else f" About {-math.log2(found[last]):.0f} bits are left of it."
        )
        return (
            f"micro-steps are added up in {names[0]} by the baseline, in {names[1]} by the candidate: "
            f"in step {step.step}, {point} parts by {listed} (of its norm): the rounding of the coarser "
            f"sum.{bits}"
        )
    return None
