"""Compare two runs over one step, parameter by parameter, point by point.

Everything downstream of ``local_grad`` is linear in it. So with y what a side recorded and L what its
own local gradients give (`gradtrace.analysis.sides`), the runs diverge where

    not (|(y_b - y_c) - (L_b - L_c)| <= B_b + B_c).

Differences of inputs are carried along exactly; only what they do not explain is charged to a hop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, relative_l2
from gradtrace.analysis.gate import Pair
from gradtrace.analysis.growth import Distance, divisors
from gradtrace.analysis.judging import Sample, sample
from gradtrace.analysis.origins import Origins
from gradtrace.analysis.results import Divergence
from gradtrace.analysis.sides import Locals, Reduction, Side, gather, reductions
from gradtrace.trace.dtypes import Dtype, Float64
from gradtrace.trace.points import depth, moment

Mode = Literal["full", "local", "boundary"]
Rank = int | None
SHARDS: Final = ("reduced", "partition")
UNDERFLOWS: Final = 16  # roundings to nothing that are allowed for in each micro-step
_U64: Final = 2.0**-53


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the first disagreement of one parameter at one place."""

    order: int
    divergence: Divergence

    @property
    def sort_key(self) -> tuple[int, int, int, int, str, int]:
        """Return step, micro_step (null last), depth, backward order, name, rank."""
        found = self.divergence
        micro_step = moment(found.point, found.micro_step)
        rank = -1 if found.rank is None else found.rank
        return (
            found.step, micro_step, depth(found.point), self.order, found.param or "", rank,
        )  # fmt: skip


@dataclass
class Tally:
    """Gather what one step gave.

    Attributes:
        counts: ``equal``, ``rounding``, ``diverged``, ``left_out``.
        outcomes: what rounding does not explain.
        samples: what has no bound, to be judged over all parameters.
        lost: what gaps made incomparable, in words, without the step.
        masters: how far apart the averaged gradients are, divided by the seeds.
        widest: the largest relative L2 difference that rounding explains, and a phrase that says where.
        sums: (point, micro_step) of an accumulation -> squared norms of difference and baseline.
    """

    counts: Counter[str] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lost: dict[str, None] = field(default_factory=dict)
    masters: Distance = field(default_factory=Distance)
    widest: tuple[float, str] = (0.0, "")
    sums: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Hold one step of both runs.

    Attributes:
        mode: ``full``: everything corresponds; ``local``: only what belongs to one rank does;
            ``boundary``: only the averaged gradient of the whole step does.
        dtype: the coarser of the two runs' dtypes.
        origins: what hashes say of the weights and batches that both began with.
    """

    baseline: Side
    candidate: Side
    step: int
    mode: Mode
    dtype: Dtype
    tally: Tally
    origins: Origins = field(default_factory=Origins)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Return both runs."""
        return self.baseline, self.candidate

    @property
    def partial(self) -> bool:
        """Say whether a run was wrapped in the middle of this step."""
        return any(side.align.partial(self.step) for side in self.sides)

    def recorded(self, point: str) -> bool:
        """Say whether both runs record a point."""
        return all(side.align.recorded(point) for side in self.sides)

    def lost(self, point: str, micro_step: int | None, pair: Pair) -> bool:
        """Say whether a gap on either side may have swallowed records of a point."""
        indices = (pair.baseline, pair.candidate)
        return any(
            side.lost(self.step, point, micro_step, index)
            for side, index in zip(self.sides, indices, strict=True)
        )

    def absolute(self, divisor: float) -> float:
        """Return what underflow may change an element by, on the way to a sum of a whole step."""
        counts = [len(side.align.micro_steps(self.step)) for side in self.sides]
        most = max(side.path.absolute for side in self.sides)
        return UNDERFLOWS * max(1, *counts) * most / divisor

    def boundary(self, micro_step: int | None) -> bool | None:
        """Return the baseline's claim that a micro-step ends the accumulation."""
        return self.baseline.boundary(self.step, micro_step)


def compare_parameter(step: Step, pair: Pair) -> None:
    """Compare everything that both runs recorded of one parameter in one step."""
    mine = Locals(step.baseline, step.step, pair.baseline)
    theirs = Locals(step.candidate, step.step, pair.candidate)
    if step.mode != "boundary":
        _compare_locals(step, pair, mine, theirs)
    if step.partial:
        return
    if step.mode != "boundary":
        _compare_local_accum(step, pair, mine, theirs)
    if step.mode == "full":
        _compare_reductions(step, pair, mine, theirs)
        _compare_accumulated(step, pair, mine, theirs)
    if step.mode != "local":
        _compare_master(step, pair, mine, theirs)


def _micro_steps(step: Step) -> range:
    return step.baseline.align.micro_steps(step.step)


def _compare_locals(step: Step, pair: Pair, mine: Locals, theirs: Locals) -> None:
    if not step.recorded("local_grad"):
        return
    for micro_step in _micro_steps(step):
        if step.lost("local_grad", micro_step, pair):
            _lose(step, "local_grad", pair)
            continue
        for rank in step.baseline.align.ranks:
            if rank not in step.candidate.align.ranks:
                continue
            one = mine.values.get((rank, micro_step))
            two = theirs.values.get((rank, micro_step))
            if one is None and two is None:
                continue
            zeros = np.zeros(pair.numel)  # no gradient counts as nothing
            scales = [side.loss_scale(step.step, micro_step, rank) for side in step.sides]
            step.tally.samples.append(
                sample(
                    ("local_grad", micro_step, rank),
                    (pair.name, pair.order),
                    zeros if one is None else one,
                    zeros if two is None else two,
                    step.dtype,
                    factor=scales[1] / scales[0],
                    absolute=step.absolute(1.0) * max(1.0, scales[1] / scales[0]),
                )
            )


def _compare_local_accum(step: Step, pair: Pair, mine: Locals, theirs: Locals) -> None:
    if not step.recorded("local_accum"):
        return
    plans = _patterns(step, pair)
    reduced = None if plans is None else [{entry.micro_step for entry in plan} for plan in plans]
    for micro_step in _micro_steps(step):
        if step.lost("local_accum", micro_step, pair):
            _lose(step, "local_accum", pair)
            continue
        if reduced is None or any(at < micro_step for plan in reduced for at in plan):
            # Buffers that were emptied or written back after a reduction hold something else.
            continue
        content = range(micro_step + 1)
        for rank in step.baseline.align.ranks:
            one = _whole(step.baseline, step.step, micro_step, "local_accum", rank, pair.baseline)
            two = _whole(step.candidate, step.step, micro_step, "local_accum", rank, pair.candidate)
            if one is None or two is None:
                step.tally.counts["left_out"] += one is not two
                continue
            if _taken(step.baseline, step.step, micro_step, rank, pair.baseline) or _taken(
                step.candidate, step.step, micro_step, rank, pair.candidate
            ):
                step.tally.counts["left_out"] += 1
                continue
            _keep_sum(step, "local_accum", micro_step, one, two)
            _contrast(
                step, ("local_accum", micro_step, rank), pair, one, two,
                (mine, theirs), (mine.local(rank, content), theirs.local(rank, content)),
            )  # fmt: skip


def _patterns(step: Step, pair: Pair) -> tuple[tuple[Reduction, ...], tuple[Reduction, ...]] | None:
    plans = (
        reductions(step.baseline, step.step, pair.baseline),
        reductions(step.candidate, step.step, pair.candidate),
    )
    return None if plans[0] is None or plans[1] is None else (plans[0], plans[1])


def _compare_reductions(step: Step, pair: Pair, mine: Locals, theirs: Locals) -> None:
    points = [point for point in ("bucket", *SHARDS) if step.recorded(point)]
    if not points:
        return
    if any(step.lost(point, None, pair) for point in points):
        for point in points:
            if step.lost(point, None, pair):
                _lose(step, point, pair)
        return
    plans = _patterns(step, pair)
    if plans is None or plans[0] != plans[1]:
        step.tally.counts["left_out"] += len(points) * len(_micro_steps(step))
        return
    for event in plans[0]:
        at = event.micro_step
        if "bucket" in points:
            for rank in step.baseline.align.ranks:
                _contrast(
                    step, ("bucket", at, rank), pair,
                    _whole(step.baseline, step.step, at, "bucket", rank, pair.baseline),
                    _whole(step.candidate, step.step, at, "bucket", rank, pair.candidate),
                    (mine, theirs),
                    (mine.local(rank, event.content), theirs.local(rank, event.content)),
                )  # fmt: skip
        for point in points:
            if point in SHARDS:
                means = mine.mean(event.content), theirs.mean(event.content)
                _contrast(
                    step, (point, at, None), pair,
                    gather(step.baseline, step.step, at, point, pair.baseline, means[0].value),
                    gather(step.candidate, step.step, at, point, pair.candidate, means[1].value),
                    (mine, theirs), means,
                )  # fmt: skip


def _compare_accumulated(step: Step, pair: Pair, mine: Locals, theirs: Locals) -> None:
    if not step.recorded("accumulated"):
        return
    for micro_step in _micro_steps(step):
        one = gather(step.baseline, step.step, micro_step, "accumulated", pair.baseline)
        two = gather(step.candidate, step.step, micro_step, "accumulated", pair.candidate)
        if step.lost("accumulated", micro_step, pair):
            _lose(step, "accumulated", pair)
            continue
        if one is None or two is None:
            step.tally.counts["left_out"] += one is not two
            continue
        _keep_sum(step, "accumulated", micro_step, one, two)
        content = range(micro_step + 1)
        _contrast(
            step, ("accumulated", micro_step, None), pair, one, two,
            (mine, theirs), (mine.mean(content), theirs.mean(content)),
        )  # fmt: skip


def _keep_sum(step: Step, point: str, micro_step: int, one: Float64, two: Float64) -> None:
    """Add to how far the runs' sums are apart after a micro-step."""
    usable = np.isfinite(one) & np.isfinite(two)
    error, mine = (one - two)[usable], one[usable]
    apart, size = step.tally.sums.get((point, micro_step), (0.0, 0.0))
    step.tally.sums[point, micro_step] = (
        apart + float(error @ error),
        size + float(mine @ mine),
    )


def _compare_master(step: Step, pair: Pair, mine: Locals, theirs: Locals) -> None:
    if not step.recorded("master_grad"):
        return
    if step.lost("master_grad", None, pair):
        _lose(step, "master_grad", pair)
        return
    expected = [own.mean(own.side.align.micro_steps(step.step)) for own in (mine, theirs)]
    one, two = (
        gather(side, step.step, None, "master_grad", index, estimate.value)
        for side, index, estimate in zip(
            step.sides, (pair.baseline, pair.candidate), expected, strict=True
        )
    )
    seeds = [side.total_seed(step.step) for side in step.sides]
    if step.mode == "boundary":
        if seeds[0] is None or seeds[1] is None:
            step.tally.lost["the seed of the loss is not known, so gradients have no scale"] = None
            return
        one = None if one is None else one / seeds[0]
        two = None if two is None else two / seeds[1]
        expected = [
            scaled(estimate, seed or 1.0) for estimate, seed in zip(expected, seeds, strict=True)
        ]
    place = ("master_grad", None, None)
    status = _contrast(step, place, pair, one, two, (mine, theirs), (expected[0], expected[1]))
    if one is None or two is None:
        return
    if step.mode == "boundary" and status == "rounding" and mine.known and theirs.known:
        # Every hop is explained; whether the local gradients themselves agree is another question.
        step.tally.counts["rounding"] -= 1
        _sample_means(step, pair, (one, two), (expected[0], expected[1]), seeds)
    scales = (1.0, 1.0) if step.mode == "boundary" else divisors(step.sides, step.step)
    step.tally.masters.add(one / scales[0], two / scales[1])


def _sample_means(
    step: Step,
    pair: Pair,
    recorded: tuple[Float64, Float64],
    expected: tuple[Estimate, Estimate],
    seeds: Sequence[float | None],
) -> None:
    """Keep the two runs' mean local gradients for judgement, with the recorded values beside."""
    divisor = min(abs(seed) for seed in seeds if seed is not None)
    found = sample(
        ("master_grad", None, None),
        (pair.name, pair.order),
        expected[0].value,
        expected[1].value,
        step.dtype,
        absolute=step.absolute(divisor),
    )
    at = found.index or 0
    if not pair.numel:
        return
    values = float(recorded[0][at]), float(recorded[1][at])
    step.tally.samples.append(replace(found, baseline=values[0], candidate=values[1]))


def scaled(estimate: Estimate, seed: float) -> Estimate:
    """Return an estimate divided by the total seed."""
    error = estimate.error / abs(seed) + 4 * _U64 * np.abs(estimate.value / seed)
    return Estimate(estimate.value / seed, error, estimate.overflow)


def _whole(
    side: Side, step: int, micro_step: int, point: str, rank: int, param: int
) -> Float64 | None:
    """Return a whole parameter that one rank recorded once, or ``None``."""
    events: tuple[Event, ...] = side.align.events(step, micro_step, point, rank, param)
    if len(events) != 1:
        return None
    found = side.align.assemble(events, param)
    return found.values if found.complete else None


def _taken(side: Side, step: int, micro_step: int, rank: int, param: int) -> bool:
    """Say whether the collective had the buffer before it was recorded.

    Stage 1 with ``overlap_comm`` reduces full buckets during the backward pass, in place. Traces of
    gradtrace 0.1 recorded all buffers at its end; later ones record each before its bucket is full.
    """
    (own,) = side.align.events(step, micro_step, "local_accum", rank, param)
    return any(
        event.record.order < own.record.order
        for event in side.align.events(step, micro_step, "bucket", rank, param)
    )


def _lose(step: Step, point: str, pair: Pair) -> None:
    step.tally.lost[f"{point} of {pair.name}"] = None


def _contrast(
    step: Step,
    place: tuple[str, int | None, Rank],
    pair: Pair,
    mine: Float64 | None,
    theirs: Float64 | None,
    locals_: tuple[Locals, Locals],
    expected: tuple[Estimate, Estimate],
) -> str | None:
    """Compare one quantity of both runs, count it, and keep what rounding does not explain."""
    point, micro_step, rank = place
    if mine is None or theirs is None:
        if mine is not None or theirs is not None:
            step.tally.counts["left_out"] += 1
        return None
    if np.array_equal(mine, theirs, equal_nan=True):
        step.tally.counts["equal"] += 1
        return "equal"
    if not all(entry.known for entry in locals_):
        if any(entry.lost for entry in locals_):
            _lose(step, "local_grad", pair)
            return None
        step.tally.samples.append(
            sample(
                place, (pair.name, pair.order), mine, theirs, step.dtype,
                absolute=step.absolute(1.0),
            )
        )  # fmt: skip
        return None
    status, found, unexplained = contrast(mine, theirs, expected)
    step.tally.counts[status] += 1
    if found is None:
        where = f"{point} of {pair.name}" + at_micro_step(micro_step)
        step.tally.widest = max(step.tally.widest, (unexplained, where))
    else:
        index, bound, max_abs = found
        step.tally.outcomes.append(
            Outcome(
                pair.order,
                Divergence(
                    step=step.step,
                    micro_step=micro_step,
                    boundary=step.boundary(micro_step),
                    point=point,
                    param=pair.name,
                    rank=rank,
                    index=index,
                    baseline=float(mine[index]),
                    candidate=float(theirs[index]),
                    max_abs=max_abs,
                    rel_l2=_relative(mine, theirs),
                    bound=bound,
                ),
            )
        )
    return status


def at_micro_step(micro_step: int | None) -> str:
    """Return a phrase such as `` at micro-step 3``, empty at optimizer points."""
    return "" if micro_step is None else f" at micro-step {micro_step}"


def contrast(
    mine: Float64, theirs: Float64, expected: tuple[Estimate, Estimate]
) -> tuple[Literal["rounding", "diverged"], tuple[int, float, float] | None, float]:
    """Judge two recorded quantities against what each side's inputs give.

    Returns:
        The status; for a divergence the lowest index, the bound there and the largest difference; and
        the L2 norm of what the inputs leave unexplained, over that of the baseline.
    """
    one, two = expected
    with np.errstate(invalid="ignore", over="ignore"):
        apart = (mine - theirs) - (one.value - two.value)
        size = np.abs(mine) + np.abs(theirs) + np.abs(one.value) + np.abs(two.value)
        bound = one.error + two.error
        outside = ~(np.abs(apart) <= bound + 4 * _U64 * size)
    for found, estimate in ((mine, one), (theirs, two)):
        # Not finite because its own inputs are not, or because the sum may overflow: explained.
        outside &= ~(~np.isfinite(found) & (~np.isfinite(estimate.value) | estimate.overflow))
    usable = np.isfinite(apart) & np.isfinite(mine)
    unexplained = relative_l2(apart[usable], mine[usable])
    if not outside.any():
        return "rounding", None, unexplained
    index = int(np.argmax(outside))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(mine - theirs)
    finite = error[np.isfinite(error)]
    broken = outside & ~np.isfinite(error)
    max_abs = math.inf if broken.any() else float(finite.max(initial=0.0))
    return "diverged", (index, float(bound[index]), max_abs), unexplained


def _relative(mine: Float64, theirs: Float64) -> float:
    usable = np.isfinite(mine) & np.isfinite(theirs)
    return relative_l2(mine[usable] - theirs[usable], mine[usable])
