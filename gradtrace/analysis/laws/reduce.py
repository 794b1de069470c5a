"""Law `reduce`: what leaves a collective is the mean (or sum) of what entered it on its ranks.

Judged at ``reduced``; where reduction and partitioning are one call, at ``partition``. A parameter's
e-th bucket of a micro-step on one rank is reduced with its e-th bucket on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, add_up, cast, exact, gamma, scale, underflow
from gradtrace.analysis.hypotheses import Design, Hypothesis, likeliest_missing, weighted
from gradtrace.analysis.laws.common import (
    Lack,
    Place,
    Scene,
    check,
    coarsest,
    largest_before,
    last_of_previous,
)
from gradtrace.trace.dtypes import DTYPES, Dtype
from gradtrace.trace.records import Facts, Json

LAW = "reduce"
MOST_PEERS = 32
_Entered = list[tuple[int, Estimate, Dtype]]
_Terms = list[tuple[int, Estimate]]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Hold what should leave a collective, for a stretch of one parameter.

    Attributes:
        estimate: the reduced values.
        terms: ``(rank, contribution)``, scaled.
        own: the rank's own contribution, unscaled.
        factor: what each contribution was multiplied with.
        dtype: the coarsest dtype on the path.
    """

    estimate: Estimate
    terms: tuple[tuple[int, Estimate], ...]
    own: Estimate
    factor: float
    dtype: Dtype


def target_point(scene: Scene, rank: int) -> str | None:
    """Return the first recorded point after the collective, or ``None``."""
    points = scene.alignment.header(rank).points
    return next((p for p in ("reduced", "partition") if points[p] == "recorded"), None)


def check_param(scene: Scene, param: int) -> None:
    """Check every reduction of one parameter, on every rank that holds a part of the result."""
    for rank in scene.ranks:
        point = target_point(scene, rank)
        if point is None:
            scene.ledger.lack(LAW, Lack("skip", "neither reduced nor partition is recorded"))
            continue
        for micro_step in scene.micro_steps:
            _check_micro_step(scene, rank, micro_step, param, point)


def _check_micro_step(scene: Scene, rank: int, micro_step: int, param: int, point: str) -> None:
    alignment = scene.alignment
    targets = alignment.events(scene.step, micro_step, point, rank, param)
    buckets = alignment.events(scene.step, micro_step, "bucket", rank, param)
    lack = scene.lack(point, micro_step, rank) or scene.lack("bucket", micro_step, rank)
    if lack is not None:
        if targets or buckets or lack.kind == "gap":
            scene.ledger.lack(LAW, lack)
        return
    if len(targets) != len(buckets):
        if targets or alignment.own_spans(rank, param):
            missing = point if len(targets) < len(buckets) else "bucket"
            scene.ledger.lack(LAW, Lack("gap", f"{missing} has no record, and no gap says why"))
        return
    for at, target in enumerate(targets):
        for span in target.spans:
            start, stop = span.param_offset, span.param_offset + span.numel
            expected = expect(scene, rank, micro_step, param, at, target.dtype, start, stop)
            if isinstance(expected, Lack):
                scene.ledger.lack(LAW, expected)
                continue
            _check_span(scene, target, expected, start, stop)


def expect(
    scene: Scene,
    rank: int,
    micro_step: int,
    param: int,
    at: int,
    target: Dtype,
    start: int,
    stop: int,
) -> Reduction | Lack:
    """Recompute the ``at``-th reduction of a parameter in a micro-step from the ranks' buckets."""
    alignment = scene.alignment
    buckets = alignment.events(scene.step, micro_step, "bucket", rank, param)
    if at >= len(buckets):
        return Lack("gap", "bucket has no record, and no gap says why")
    facts = buckets[at].record.facts
    ranks = [member for member in facts.get("ranks") or () if isinstance(member, int)]
    if not ranks or rank not in ranks:
        return Lack("skip", "the ranks of the collective were not recorded")
    if not set(ranks) <= set(scene.ranks):
        return Lack("skip", "ranks of the collective are not in the trace")
    entered: _Entered = []
    for member in ranks:
        lack = scene.lack("bucket", micro_step, member)
        if lack is not None:
            return lack
        events = alignment.events(scene.step, micro_step, "bucket", member, param)
        if len(events) != len(buckets):
            return Lack("gap", "the ranks recorded different numbers of buckets")
        values = alignment.cut(events[at], start, stop)
        if values is None:
            return Lack("gap", "a bucket holds only a part of the parameter")
        entered.append((member, exact(values), events[at].dtype))
    return _combine(scene, rank, facts, entered, target)


def _combine(
    scene: Scene,
    rank: int,
    facts: Facts,
    entered: _Entered,
    target: Dtype,
) -> Reduction | Lack:
    source = coarsest(*(dtype for _, _, dtype in entered))
    comm = DTYPES.get(str(facts.get("comm_dtype")), source)
    op, division = facts.get("op"), facts.get("division")
    if op not in ("mean", "sum"):
        return Lack("skip", "the kind of reduction was not recorded")
    factor = mean_factor(scene, rank, len(entered)) if op == "mean" else 1.0
    middle = coarsest(source, comm)
    if division is None:
        terms, total = _by_settings(scene, rank, entered, op == "mean", factor, comm)
    else:
        before = _number(facts.get("predivide")) or 1.0
        terms, total = _as_divided(entered, str(division), before, factor, comm)
    estimate = cast(total, comm, target)
    own = next(values for member, values, _ in entered if member == rank)
    dtype = coarsest(middle, target)
    return Reduction(estimate, tuple(terms), own, factor, dtype)


def _as_divided(
    entered: _Entered, division: str, before: float, factor: float, comm: Dtype
) -> tuple[_Terms, Estimate]:
    """Return the contributions and their sum, computed in the order that the run was seen to take.

    Args:
        division: where the mean is formed; see docs/laws/reduce.md.
        before: what the contributions are divided by before the sum, where the rest comes after it.
    """
    early = 1.0 if division in ("sum", "none") else factor
    terms: _Terms = []
    summed: list[Estimate] = []
    for member, values, dtype in entered:
        if division == "bucket":
            part = cast(scale(values, early, dtype), dtype, comm)
        else:
            part = scale(scale(cast(values, dtype, comm), early, comm), 1 / before, comm)
        summed.append(part)
        terms.append((member, exact(values.value * factor)))
    return terms, scale(add_up(summed, comm), factor * before / early, comm)


def _by_settings(
    scene: Scene, rank: int, entered: _Entered, mean: bool, factor: float, comm: Dtype
) -> tuple[_Terms, Estimate]:
    """Return the contributions and their sum, with a bound for every order that settings allow."""
    middle = coarsest(comm, *(dtype for _, _, dtype in entered))
    predivide = scene.fact(rank, "gradient_predivide_factor")
    # Only this path sums before it divides; the others divide each contribution first.
    late = (
        mean
        and scene.fact(rank, "postscale_gradients") is not False
        and scene.fact(rank, "reduce_scatter") is not True
        and scene.fact(rank, "adapter") != "zero3"
    )
    terms: _Terms = []
    for member, values, dtype in entered:
        term = scale(cast(values, dtype, comm), factor, middle)
        if isinstance(predivide, (int, float)) and predivide not in (0, 1):
            extra = gamma(4, middle.unit_roundoff) * (np.abs(term.value) + term.error)
            # What the first division loses by underflow, the second factor makes larger.
            extra += (1 + abs(predivide) * factor) * underflow(middle)
            term = replace(term, error=term.error + extra)
        terms.append((member, term))
    total = add_up([term for _, term in terms], comm)
    if late:  # the sum may be formed before it is divided
        size = np.zeros(len(total.value))
        for _, values, _ in entered:
            size += np.abs(values.value)
        if isinstance(predivide, (int, float)) and 0 < predivide < 1:
            size /= predivide
        with np.errstate(invalid="ignore"):
            total = replace(total, overflow=total.overflow | (size * 1.01 >= comm.largest))
    return terms, total


def _number(value: Json) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def mean_factor(scene: Scene, rank: int, world: int) -> float:
    """Return what a mean over the group multiplies each rank's gradient with."""
    parallel = scene.fact(rank, "sequence_parallel_size")
    several = parallel if isinstance(parallel, (int, float)) and parallel > 0 else 1
    return float(several) / world


def _check_span(scene: Scene, target: Event, expected: Reduction, start: int, stop: int) -> None:
    record = target.record
    found = scene.alignment.cut(target, start, stop)
    assert found is not None and record.micro_step is not None
    place = Place(
        LAW, scene.step, record.micro_step, record.rank, target.param, record.point, start
    )
    context = scene.context(place, expected.dtype, target.dtype)
    terms = tuple((f"rank {rank}", term.value) for rank, term in expected.terms)
    world = len(terms)

    def hypotheses() -> Iterator[Hypothesis]:
        estimate, dtype = expected.estimate, expected.dtype
        if expected.factor != 1:
            words = f"{context.point} is the sum over {world} ranks, not their mean."
            yield Hypothesis(
                "not_averaged", words, weighted([(1 / expected.factor, estimate)], dtype)
            )
            words = f"{context.point} was divided by the world size ({world}) twice."
            yield Hypothesis(
                "averaged_twice", words, weighted([(expected.factor, estimate)], dtype)
            )
        if world > 1:
            for factor, how in (
                (1.0, ""),
                (expected.factor, f", divided by {1 / expected.factor:g}"),
            ):
                words = (
                    f"What leaves the collective is what rank {record.rank} put in{how}: "
                    "nothing was reduced."
                )
                own = cast(
                    weighted([(factor, expected.own)], dtype), DTYPES["float64"], target.dtype
                )
                yield Hypothesis("not_reduced", words, own)
            values = [(rank, term.value) for rank, term in expected.terms]
            for rank, value in likeliest_missing(found, estimate, values):
                words = f"The gradient of rank {rank} is missing from the reduction."
                rest = weighted([(1.0, estimate), (-1.0, exact(value))], dtype)
                yield Hypothesis("rank_missing", words, rest, rank=rank)
                rest = weighted([(world / (world - 1), rest)], dtype)
                yield Hypothesis("rank_missing", words, rest, rank=rank)
        yield from _stale(scene, target, start, stop)
        yield from _swapped(scene, target, stop - start)

    check(
        scene,
        place,
        found,
        expected.estimate,
        context=context,
        designs=[Design("rank", terms)] if world > 1 else [],
        hypotheses=hypotheses,
    )


def _stale(scene: Scene, target: Event, start: int, stop: int) -> Iterator[Hypothesis]:
    """Propose what left the collective one reduction earlier, as recorded."""
    alignment, record = scene.alignment, target.record
    earlier = largest_before(
        alignment.step_events(scene.step, record.point, record.rank, target.param), record.order
    )
    if earlier is None:
        earlier = last_of_previous(scene, target)
    values = None if earlier is None else alignment.cut(earlier, start, stop)
    if earlier is not None and values is not None:
        words = (
            f"What leaves the collective is what left it at step {earlier.record.step}, "
            f"micro-step {earlier.record.micro_step}."
        )
        yield Hypothesis("stale", words, exact(values))


def _swapped(scene: Scene, target: Event, numel: int) -> Iterator[Hypothesis]:
    alignment, record = scene.alignment, target.record
    assert record.micro_step is not None
    tried = 0
    for parameter in alignment.captured():
        if parameter.index == target.param or tried >= MOST_PEERS:
            continue
        events = alignment.events(
            scene.step, record.micro_step, record.point, record.rank, parameter.index
        )
        for span in events[0].spans if events else ():
            if span.numel != numel:
                continue
            start, stop = span.param_offset, span.param_offset + span.numel
            other = expect(
                scene, record.rank, record.micro_step, parameter.index, 0, target.dtype, start, stop
            )
            tried += 1
            if not isinstance(other, Lack):
                words = (
                    f"The result of {parameter.name} stands where {scene.name(target.param)} does."
                )
                yield Hypothesis("swapped", words, other.estimate)
