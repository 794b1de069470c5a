"""Law `accumulate`: the accumulation buffer is what it was plus what was reduced since.

For each ``accumulated`` record = the one before in this step + the shards since (``partition``, else
own stretches of ``reduced``), or the last shard alone where the local buffer already carried the
reduced gradient. Nothing is carried over from the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, add_up, cast, embeds, exact, gamma, underflow, zeros
from gradtrace.analysis.hypotheses import (
    Design,
    Hypothesis,
    micro_step_hypotheses,
    weighed,
    weighted,
)
from gradtrace.analysis.laws.common import (
    Lack,
    Place,
    Scene,
    check,
    coarsest,
    largest_before,
    last_of_previous,
    simple_finding,
)
from gradtrace.trace.dtypes import DTYPES, Dtype

LAW = "accumulate"
MOST_LEFT = 8  # earlier contents that a buffer may have kept


@dataclass(frozen=True, slots=True)
class Shards:
    """Hold a parameter's shard events of one step on one rank.

    Attributes:
        events: in causal order.
        restart: position of the first event that counts: events before it are already contained in
            it, because the local buffer carried the reduced gradient.
    """

    events: tuple[Event, ...]
    restart: int

    def between(self, after: int, before: int) -> tuple[Event, ...]:
        """Return the events recorded between two positions that count."""
        return tuple(
            event for event in self.events[self.restart :] if after < event.record.order < before
        )


def shards_of(scene: Scene, rank: int, param: int, before: int) -> Shards | Lack:
    """Find the shards that a parameter got on a rank in this step, up to a position."""
    alignment = scene.alignment
    points = alignment.header(rank).points
    point = next((p for p in ("partition", "reduced") if points[p] == "recorded"), None)
    if point is None:
        return Lack("skip", "neither partition nor reduced is recorded")
    gaps = alignment.gaps(scene.step, point, param=param, ranks=(rank,))
    if gaps:
        return Lack("gap", f"{point} was lost ({gaps[0].reason})")
    events = tuple(
        event
        for event in alignment.step_events(scene.step, point, rank, param)
        if event.record.order < before
    )
    restart = _restart(scene, rank, param, events)
    if isinstance(restart, Lack):
        return restart
    return Shards(events, restart)


def _restart(scene: Scene, rank: int, param: int, events: Sequence[Event]) -> int | Lack:
    """Return the last event whose local buffer had carried what was reduced before it."""
    alignment = scene.alignment
    status = alignment.header(rank).points["local_accum"]
    if len(events) < 2 or status not in {"recorded", "not_planned"}:
        return 0
    if status == "not_planned":
        return Lack("skip", "local_accum is not_planned: what was carried is not known")
    gaps = alignment.gaps(scene.step, "local_accum", param=param, ranks=(rank,))
    if gaps:
        return Lack("gap", f"local_accum was lost ({gaps[0].reason})")
    buffers = alignment.step_events(scene.step, "local_accum", rank, param)
    restart = 0
    for at in range(1, len(events)):
        since = [
            buffer
            for buffer in buffers
            if events[at - 1].record.order < buffer.record.order < events[at].record.order
        ]
        if since and since[0].record.facts.get("carry"):
            restart = at
    return restart


def shard(scene: Scene, event: Event, start: int, stop: int, target: Dtype) -> Estimate | None:
    """Return one shard, cast to a dtype, with what its own record may have lost.

    Where the communication dtype is finer than the buffer that was recorded, the run added the finer
    values up: the record is a rounding of them.
    """
    values = scene.alignment.cut(event, start, stop)
    if values is None:
        return None
    estimate = cast(exact(values), event.dtype, target)
    if event.record.point != "reduced":
        return estimate
    bucket = largest_before(
        scene.alignment.step_events(scene.step, "bucket", event.record.rank, event.param),
        event.record.order,
    )
    name = None if bucket is None else bucket.record.facts.get("comm_dtype")
    if name is None:
        name = scene.fact(event.record.rank, "communication_dtype")
    comm = DTYPES.get(str(name))
    if comm is None or embeds(comm, event.dtype) or embeds(target, event.dtype):
        return estimate
    lost = gamma(1, event.dtype.unit_roundoff) * np.abs(values) + event.dtype.smallest_normal
    return replace(estimate, error=estimate.error + lost)


def check_param(scene: Scene, param: int) -> None:
    """Check every accumulation record of one parameter, on every rank."""
    for rank in scene.ranks:
        lack = scene.lack("accumulated", None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        events = scene.alignment.step_events(scene.step, "accumulated", rank, param)
        shards = shards_of(scene, rank, param, 2**62)
        if isinstance(shards, Lack):
            if events:
                scene.ledger.lack(LAW, shards)
            continue
        # Every family that has such a buffer adds to it in the micro-step of the reduction.
        there = {event.record.micro_step for event in events}
        for micro_step in dict.fromkeys(one.record.micro_step for one in shards.events):
            if micro_step not in there and scene.alignment.own_spans(rank, param):
                reason = "accumulated has no record, and no gap says why"
                scene.ledger.lack(LAW, Lack("gap", reason))
        before: Event | None = None
        for event in events:
            _check_event(scene, event, before)
            before = event


def _check_event(scene: Scene, event: Event, before: Event | None) -> None:
    rank, order = event.record.rank, event.record.order
    shards = shards_of(scene, rank, event.param, order)
    if isinstance(shards, Lack):
        scene.ledger.lack(LAW, shards)
        return
    carried = before
    restarted = shards.events[shards.restart :][:1] if shards.restart else ()
    if before is not None and restarted and restarted[0].record.order > before.record.order:
        carried = None  # the shard contains all that came before
    if before is None and scene.partial:
        scene.ledger.lack(LAW, Lack("skip", "the step was wrapped in the middle"))
        return
    since = shards.between(-1 if before is None else before.record.order, order)
    for span in event.spans:
        start, stop = span.param_offset, span.param_offset + span.numel
        _check_span(scene, event, carried, since, shards, start, stop)


def _check_span(
    scene: Scene,
    event: Event,
    carried: Event | None,
    since: tuple[Event, ...],
    shards: Shards,
    start: int,
    stop: int,
) -> None:
    alignment, record = scene.alignment, event.record
    found = alignment.cut(event, start, stop)
    assert found is not None
    terms: list[tuple[str, Estimate]] = []
    dtypes = [event.dtype]
    if carried is not None:
        values = alignment.cut(carried, start, stop)
        if values is None:
            scene.ledger.lack(LAW, Lack("gap", "the buffer held other elements before"))
            return
        terms.append(
            ("what was accumulated before", cast(exact(values), carried.dtype, event.dtype))
        )
        dtypes.append(carried.dtype)
    for one in since:
        part = shard(scene, one, start, stop, event.dtype)
        if part is None:
            scene.ledger.lack(LAW, Lack("gap", "the shards hold other elements than the buffer"))
            return
        terms.append((f"micro-step {one.record.micro_step}", part))
    estimate = add_up([term for _, term in terms], event.dtype) if terms else zeros(stop - start)
    place = Place(
        LAW, scene.step, record.micro_step, record.rank, event.param, "accumulated", start
    )
    context = scene.context(place, coarsest(*dtypes), event.dtype, lost=max(map(underflow, dtypes)))
    design = Design("micro_step", tuple((label, term.value) for label, term in terms))

    def hypotheses() -> Iterator[Hypothesis]:
        parts = [
            (int(one.record.micro_step or 0), part)
            for one in shards.events[shards.restart :]
            if one.record.order < record.order
            and (part := shard(scene, one, start, stop, event.dtype)) is not None
        ]
        carry = terms[0][1] if carried is not None and len(since) == 1 else None
        yield from micro_step_hypotheses(
            context, parts, carry=carry, before=last_of_step_before(scene, event, start, stop)
        )
        for left in _left_behind(scene, event, start, stop):
            for other in micro_step_hypotheses(context, parts, carry=carry, before=left):
                if other.cause in {"carried_over", "stale"}:
                    yield other
        if carry is not None and parts:
            yield from weighed(found, carry, parts[-1], context.point, event.dtype)
        yield from _own(scene, event, context.point, start, stop)
        yield from _swapped(scene, event, stop - start)

    told = len(scene.ledger.found)
    check(
        scene,
        place,
        found,
        estimate,
        context=context,
        designs=[design] if len(terms) > 1 else [],
        hypotheses=hypotheses,
    )
    if carried is not None and since and len(scene.ledger.found) == told:
        _check_precision(scene, place, event.dtype)


def _check_precision(scene: Scene, place: Place, held: Dtype) -> None:
    """Check that the buffer is not coarser than the accumulation dtype that was asked for.

    Each addition is right in the buffer's own dtype, so no bound would tell.
    """
    assert place.rank is not None
    asked = scene.settings_dtypes(place.rank, "grad_accum_dtype")
    if not asked or embeds(asked[0], held) or not embeds(held, asked[0]):
        return
    detail = (
        f"The accumulation buffer holds {held.name}, where grad_accum_dtype asks for {asked[0].name}: "
        "every addition is rounded to it."
    )
    simple_finding(scene, place, "low_precision", detail)


def _own(scene: Scene, event: Event, point: str, start: int, stop: int) -> Iterator[Hypothesis]:
    """Propose what the rank accumulated itself, and no collective took."""
    rank = event.record.rank
    if len(scene.alignment.header(rank).dp_ranks) < 2:
        return
    buffers = scene.alignment.step_events(scene.step, "local_accum", rank, event.param)
    held = largest_before(buffers, event.record.order)
    values = None if held is None else scene.alignment.cut(held, start, stop)
    if held is not None and values is not None:
        words = f"{point} holds rank {rank}'s own gradients: they were not reduced."
        yield Hypothesis("not_reduced", words, cast(exact(values), held.dtype, event.dtype))


def last_of_step_before(scene: Scene, event: Event, start: int, stop: int) -> Estimate | None:
    """Return what the same buffer held last in the step before, where that was recorded."""
    earlier = last_of_previous(scene, event)
    values = None if earlier is None else scene.alignment.cut(earlier, start, stop)
    return None if values is None else exact(values)


def _left_behind(scene: Scene, event: Event, start: int, stop: int) -> Iterator[Estimate]:
    """Yield what the buffer held earlier in the step before, the latest first.

    With the optimizer on the CPU there are two buffers, and the last record is not the one that is
    added to.
    """
    previous = scene.alignment.previous_step(scene.step)
    if previous is None:
        return
    record = event.record
    events = scene.alignment.step_events(previous, record.point, record.rank, event.param)
    for one in events[-2 : -2 - MOST_LEFT : -1]:
        values = scene.alignment.cut(one, start, stop)
        if values is not None:
            yield exact(values)


def _swapped(scene: Scene, event: Event, numel: int) -> Iterator[Hypothesis]:
    """Propose that another parameter's shard was added here."""
    alignment, record = scene.alignment, event.record
    for parameter in alignment.captured():
        own = [s for s in alignment.own_spans(record.rank, parameter.index) if s.numel == numel]
        if parameter.index == event.param or not own:
            continue
        start = own[0].param_offset
        shards = shards_of(scene, record.rank, parameter.index, record.order)
        if isinstance(shards, Lack):
            continue
        parts = [
            shard(scene, one, start, start + numel, event.dtype)
            for one in shards.events[shards.restart :]
        ]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(parts):
            words = f"The sum of {parameter.name} stands here."
            total = weighted([(1.0, part) for part in known], event.dtype)
            yield Hypothesis("swapped", words, total)
