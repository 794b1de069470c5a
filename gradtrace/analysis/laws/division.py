"""Recompute a reduction in the order in which the run was seen to divide, cast and add.

The order is a fact of the ``bucket`` record; docs/laws/reduce.md says which DeepSpeed path has which,
with the bound of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradtrace.analysis.bounds import Estimate, add_up, cast, scale
from gradtrace.trace.dtypes import Dtype
from gradtrace.trace.records import Facts


def known(facts: Facts) -> bool:
    """Say whether the order is stated."""
    return facts.get("division") is not None


def reduce_as_stated(
    entered: Sequence[tuple[Estimate, Dtype]], facts: Facts, factor: float, comm: Dtype
) -> Estimate:
    """Return what leaves the collective, in its own dtype.

    Args:
        entered: the ranks' buckets and their dtypes.
        facts: ``division`` (``bucket``, ``wire``, ``sum`` or ``none``) and ``predivide`` of the record.
        factor: what each contribution is multiplied with in all.
        comm: dtype of the wire, and of the sums or coarser than they.
    """
    division = facts["division"]
    before = float(facts.get("predivide") or 1.0)
    early = factor if division in ("bucket", "wire") else 1.0
    summed = []
    for values, dtype in entered:
        if division == "bucket":
            summed.append(cast(scale(values, early, dtype), dtype, comm))
        else:
            once = scale(cast(values, dtype, comm), 1 / before, comm)
            summed.append(scale(once, early, comm))
    return scale(add_up(summed, comm), factor * before / early, comm)
