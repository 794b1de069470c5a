"""Say how far apart two runs are, step by step: gradients, losses, weights.

The gradient that is followed is the one of a whole step, averaged over the ranks and divided by the sum
of the measured seeds: it means the same at any stage, world size, accumulation count and loss scale.
Runs that cut the batch alike are both divided by the baseline's seeds (and their own loss scales): a
caller who divides the loss before ``backward`` leaves a seed of 1 where DeepSpeed's division leaves 1/n,
and the gradients are the same. One parameter at a time is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.gate import Pair
from gradtrace.analysis.origins import Relation, compare_weights
from gradtrace.analysis.series import Growth
from gradtrace.analysis.sides import Side, gather, number
from gradtrace.trace.dtypes import Float64


@dataclass
class Distance:
    """Add up over parameters how far two tensors are apart.

    Attributes:
        size, apart: squared L2 norms of the first and of the difference, over elements that are finite
            on both sides.
        max_abs: largest absolute difference.
        finite: how many elements those are.
        odd: elements that are finite on one side only.
    """

    size: float = 0.0
    apart: float = 0.0
    max_abs: float = 0.0
    finite: int = 0
    odd: int = 0

    def add(self, mine: Float64, theirs: Float64) -> None:
        """Add one parameter: 1-D, of equal length."""
        with np.errstate(invalid="ignore", over="ignore"):
            usable = np.isfinite(mine), np.isfinite(theirs)
            both = usable[0] & usable[1]
            if not both.all():
                mine, theirs = mine[both], theirs[both]
            error = mine - theirs
            self.size += float(mine @ mine)
            self.apart += float(error @ error)
            self.max_abs = max(self.max_abs, float(np.abs(error).max(initial=0.0)))
        self.finite += len(error)
        self.odd += int(np.count_nonzero(usable[0] != usable[1]))

    @property
    def rel_l2(self) -> float | None:
        """Return the L2 norm of the difference over that of the first; ``None`` for nothing."""
        if self.odd:
            return math.inf
        if not self.finite:
            return None
        if self.apart == 0:
            return 0.0
        return math.sqrt(self.apart / self.size) if self.size > 0 else math.inf

    @property
    def largest(self) -> float | None:
        """Return the largest absolute difference; ``None`` for nothing."""
        if self.odd:
            return math.inf
        return self.max_abs if self.finite else None


def divisors(sides: tuple[Side, Side], step: int) -> tuple[float, float]:
    """Return what each run's gradient is divided by to mean the same.

    The sum of a step's measured seeds; where one that is needed is not known, the loss scale alone.
    """
    seeds = [side.total_seed(step) for side in sides]
    scales = [side.loss_scale(step, 0, side.align.ranks[0]) for side in sides]
    counts = [(side.world_size, len(side.align.micro_steps(step))) for side in sides]
    if counts[0] == counts[1]:
        common = scales[0] if seeds[0] is None else seeds[0]
        return common, common * scales[1] / scales[0]
    if seeds[0] is not None and seeds[1] is not None:
        return seeds[0], seeds[1]
    return scales[0], scales[1]


def distance(sides: tuple[Side, Side], pairs: Sequence[Pair], step: int) -> Distance:
    """Compare the averaged gradient of a step; of nothing where it cannot be put together."""
    found = Distance()
    readable = all(
        side.align.recorded("master_grad")
        and side.obstacle() is None
        and not side.align.partial(step)
        for side in sides
    )
    if not readable:
        return found
    scales = divisors(sides, step)
    for pair in pairs:
        one = gather(sides[0], step, None, "master_grad", pair.baseline)
        two = gather(sides[1], step, None, "master_grad", pair.candidate)
        if one is not None and two is not None:
            found.add(one / scales[0], two / scales[1])
    return found


def grown(
    sides: tuple[Side, Side],
    pairs: Sequence[Pair],
    step: int,
    gradient: Distance,
    *,
    local_grad: float | None = None,
    weights: Relation | None = None,
) -> Growth:
    """Put together what is known of a step.

    Args:
        gradient: as `distance` gives it.
        local_grad: relative L2 difference of the local gradients, where they correspond.
        weights: how the weights at the start of the step relate; ``None`` to look, after the runs parted.
    """
    judged = weights is not None
    if weights is None:
        weights = compare_weights(sides[0].align, sides[1].align, step)[0]
    losses = [_loss(side, step) for side in sides]
    return Growth(
        step=step,
        gradient=gradient.rel_l2,
        gradient_max_abs=gradient.largest,
        local_grad=local_grad,
        baseline_loss=losses[0],
        candidate_loss=losses[1],
        weights=weights,
        weights_l2=0.0 if weights == "equal" else _weights_apart(sides, pairs, step),
        judged=judged,
    )


def _loss(side: Side, step: int) -> float | None:
    """Return the mean loss of a step, over ranks and micro-steps; ``None`` where one is unknown."""
    found: list[float] = []
    for rank in side.align.ranks:
        for micro_step in range(side.align.step_end(step, rank).micro_steps):
            loss = number(side.loss_facts(step, micro_step, rank).get("loss"))
            if loss is None:
                return None
            found.append(loss)
    return math.fsum(found) / len(found) if found else None


def _weights_apart(sides: tuple[Side, Side], pairs: Sequence[Pair], step: int) -> float | None:
    """Compare weights of which both runs recorded the values; ``None`` where there are only hashes."""
    found = Distance()
    if not all(_keeps_weights(side, step) for side in sides):
        return None
    for pair in pairs:
        one = _weight(sides[0], step, pair.baseline)
        two = _weight(sides[1], step, pair.candidate)
        if one is not None and two is not None:
            found.add(one, two)
    return found.rel_l2


def _keeps_weights(side: Side, step: int) -> bool:
    return any(
        record.key is not None
        for rank in side.align.ranks
        for record in side.align.records(step, "weight", rank)
    )


def _weight(side: Side, step: int, param: int) -> Float64 | None:
    """Return a weight at the start of a step, from the first rank that holds it whole, or from all."""
    events: list[Event] = []
    for rank in side.align.ranks:
        held = side.align.events(step, None, "weight", rank, param)[-1:]
        if held and held[0].record.key is None:
            return None
        events += held
        if held and held[0].numel == side.align.parameters[param].numel:
            events = list(held)
            break
    whole = side.align.assemble(events, param)
    return whole.values if whole.complete else None
