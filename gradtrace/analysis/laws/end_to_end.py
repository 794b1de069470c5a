"""Law `end_to_end`: the optimizer is given the mean over ranks of the sum over micro-steps.

It needs only ``local_grad`` and ``master_grad``, so it also covers hops that were not recorded. Its
bound counts every rounding on the path in the coarsest dtype of the path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, exact, gamma, is_power_of_two, underflow
from gradtrace.analysis.hypotheses import (
    Design,
    Hypothesis,
    likeliest_missing,
    micro_step_hypotheses,
    weighted,
)
from gradtrace.analysis.laws.accumulate import last_of_step_before
from gradtrace.analysis.laws.common import Lack, Place, Scene, check, coarsest
from gradtrace.analysis.laws.reduce import mean_factor
from gradtrace.trace.dtypes import Dtype, Float64

LAW = "end_to_end"
CASTS = 4  # to the bucket, to the wire, to the accumulator, to the optimizer


@dataclass(frozen=True, slots=True)
class _Path:
    """Hold the local gradients of one parameter, and what lies between them and the optimizer.

    Attributes:
        inputs: (rank, micro_step) -> occurrences.
        factor: what a gradient is multiplied with.
        dtype: the coarsest dtype on the path.
        roundings: how many roundings one gradient meets at most.
        underflow: the largest error that one operation makes by underflow, in any dtype on the path.
        largest: what the narrowest range on the path still holds.
    """

    inputs: Mapping[tuple[int, int], tuple[Event, ...]]
    factor: float
    dtype: Dtype
    roundings: int
    underflow: float
    largest: float


def check_param(scene: Scene, param: int) -> None:
    """Check one parameter from end to end, on every rank that holds a part of the result."""
    done: dict[tuple[int, ...], _Path | Lack] = {}
    for rank in scene.ranks:
        events = scene.alignment.events(scene.step, None, "master_grad", rank, param)
        lack = scene.lack("master_grad", None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        group = scene.alignment.header(rank).dp_ranks
        for event in events:
            if group not in done:
                done[group] = _path(scene, rank, group, param, event.dtype)
            path = done[group]
            if isinstance(path, Lack):
                scene.ledger.lack(LAW, path)
                continue
            for span in event.spans:
                _check_span(scene, event, path, span.param_offset, span.param_offset + span.numel)


def _path(
    scene: Scene, rank: int, group: tuple[int, ...], param: int, target: Dtype
) -> _Path | Lack:
    if scene.partial:
        return Lack("skip", "the step was wrapped in the middle")
    if not group or not set(group) <= set(scene.ranks):
        return Lack("skip", "ranks of the group are not in the trace")
    inputs: dict[tuple[int, int], tuple[Event, ...]] = {}
    dtypes = [target]
    for member in group:
        for micro_step in scene.micro_steps:
            events = scene.gradients(micro_step, member, param)
            if isinstance(events, Lack):
                return events
            inputs[member, micro_step] = events
            dtypes += [event.dtype for event in events]
    names = ("model_dtype", "communication_dtype", "grad_accum_dtype")
    dtypes += scene.settings_dtypes(rank, *names)
    for point in ("local_accum", "bucket", "reduced", "partition", "accumulated"):
        dtypes += [
            event.dtype for event in scene.alignment.step_events(scene.step, point, rank, param)
        ]
    factor = _factor(scene, rank, param, len(group))
    if isinstance(factor, Lack):
        return factor
    most = max(sum(len(inputs[member, m]) for m in scene.micro_steps) for member in group)
    scalings = 0 if is_power_of_two(factor) else 2
    predivide = scene.fact(rank, "gradient_predivide_factor")
    enlarged = 1.0  # underflow, where a product follows that is larger than 1
    if isinstance(predivide, (int, float)) and predivide not in (0, 1):
        scalings += 4
        enlarged = max(1.0, abs(predivide) * factor)
    once = len(group) - 1 + scalings + CASTS
    again = _collectives(scene, rank, param) if _carried(scene, group, param) else 1
    # The coarsest dtype need not be the one of the narrowest range: bf16 on the wire of fp16 gradients.
    return _Path(
        inputs,
        factor,
        coarsest(*dtypes),
        max(most - 1, 0) + once * max(again, 1),
        enlarged * max(underflow(dtype) for dtype in dtypes),
        min(dtype.largest for dtype in dtypes),
    )


def _factor(scene: Scene, rank: int, param: int, world: int) -> float | Lack:
    ops = {
        event.record.facts.get("op")
        for event in scene.alignment.step_events(scene.step, "bucket", rank, param)
    }
    if len(ops) > 1:
        return Lack("skip", "reduced by mean and by sum in one step")
    op = next(iter(ops), None)
    if op is None:
        op = "sum" if scene.fact(rank, "gradient_average") is False else "mean"
    return mean_factor(scene, rank, world) if op == "mean" else 1.0


def _collectives(scene: Scene, rank: int, param: int) -> int:
    return len(scene.alignment.step_events(scene.step, "bucket", rank, param))


def _carried(scene: Scene, group: tuple[int, ...], param: int) -> bool:
    """Say whether reduced gradients may have been reduced again with what came later."""
    return any(
        scene.alignment.step_events(scene.step, "local_accum", member, param)
        and _collectives(scene, member, param) > 1
        for member in group
    )


def _check_span(scene: Scene, event: Event, path: _Path, start: int, stop: int) -> None:
    record = event.record
    found = scene.alignment.cut(event, start, stop)
    assert found is not None
    by_rank: dict[int, Float64] = {}
    by_micro_step: dict[int, Float64] = {}
    own: dict[int, Float64] = {}  # this rank's own gradients, unscaled
    size = np.zeros(stop - start)
    with np.errstate(invalid="ignore", over="ignore"):
        for (member, micro_step), events in path.inputs.items():
            for one in events:
                values = scene.alignment.cut(one, start, stop)
                if values is None:
                    scene.ledger.lack(LAW, Lack("gap", "local_grad holds a part only"))
                    return
                scaled = path.factor * values
                size += np.abs(values)
                by_rank[member] = by_rank.get(member, 0.0) + scaled
                by_micro_step[micro_step] = by_micro_step.get(micro_step, 0.0) + scaled
                if member == record.rank:
                    own[micro_step] = own.get(micro_step, 0.0) + values
    estimate = _estimate(by_rank, size, path, sum(map(len, path.inputs.values())))
    place = Place(LAW, scene.step, None, record.rank, event.param, "master_grad", start)
    context = scene.context(place, path.dtype, event.dtype)
    parts = [(number, _like(estimate, values)) for number, values in sorted(by_micro_step.items())]
    designs = [
        Design("rank", tuple((f"rank {r}", v) for r, v in by_rank.items())),
        Design("micro_step", tuple((f"micro-step {m}", part.value) for m, part in parts)),
    ]

    def hypotheses() -> Iterator[Hypothesis]:
        world = len({member for member, _ in path.inputs})
        if path.factor != 1 and world > 1:
            words = f"{context.point} is the sum over {world} ranks, not their mean."
            yield Hypothesis(
                "not_averaged", words, weighted([(1 / path.factor, estimate)], path.dtype)
            )
            words = f"{context.point} was divided by the world size ({world}) twice."
            yield Hypothesis(
                "averaged_twice", words, weighted([(path.factor, estimate)], path.dtype)
            )
        before = last_of_step_before(scene, event, start, stop)
        yield from micro_step_hypotheses(context, parts, before=before)
        if world > 1:
            yield from _local(estimate, path, parts, own, record.rank, context.point)
        values = list(by_rank.items()) if world > 1 else []
        for member, value in likeliest_missing(found, estimate, values):
            words = f"The gradient of rank {member} is missing."
            rest = weighted([(1.0, estimate), (-1.0, exact(value))], path.dtype)
            yield Hypothesis("rank_missing", words, rest, rank=member)

    check(
        scene,
        place,
        found,
        estimate,
        context=context,
        designs=[design for design in designs if len(design.terms) > 1],
        hypotheses=hypotheses,
    )


def _estimate(by_rank: Mapping[int, Float64], size: Float64, path: _Path, count: int) -> Estimate:
    """Return the mean of the sums, and a bound from every rounding on the path."""
    value = np.zeros(len(size))
    with np.errstate(invalid="ignore", over="ignore"):
        for values in by_rank.values():
            value += values
        growth = gamma(path.roundings, path.dtype.unit_roundoff)
        error = (growth + gamma(2 * count + 2, 2.0**-53)) * abs(path.factor) * size
        error += count * (path.roundings + 1) * (1 + growth) * 3 * path.underflow
        overflow = size * (1 + growth) >= path.largest
    if not count:
        error = np.zeros(len(size))
    return Estimate(value, error, overflow)


def _like(estimate: Estimate, values: Float64) -> Estimate:
    """Give a part of the sum the sum's own bound."""
    return Estimate(values, estimate.error, estimate.overflow)


def _local(
    estimate: Estimate,
    path: _Path,
    parts: list[tuple[int, Estimate]],
    own: Mapping[int, Float64],
    rank: int,
    point: str,
) -> Iterator[Hypothesis]:
    """Propose that some micro-step, or all of them, stayed on this rank."""
    everything = [_like(estimate, values) for values in own.values()]
    if not everything:
        return
    for factor, how in ((1.0, ""), (path.factor, f", divided by {1 / path.factor:g}")):
        words = f"{point} holds rank {rank}'s own gradients only{how}: nothing was reduced."
        yield Hypothesis(
            "not_reduced", words, weighted([(factor, part) for part in everything], path.dtype)
        )
    for number, part in parts:
        if number in own and len(parts) > 1:
            words = f"Micro-step {number} was not reduced: rank {rank}'s own gradient was added."
            mixed = [(1.0, estimate), (-1.0, part), (1.0, _like(estimate, own[number]))]
            yield Hypothesis("not_reduced", words, weighted(mixed, path.dtype))
