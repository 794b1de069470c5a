"""Law `pack`: what enters the collective is the rank's own gradient, cast to the bucket's dtype.

A ``bucket`` span = ``local_accum`` where there is one for the parameter, else the ``local_grad`` of the
micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, add_up, breaks, cast, either, exact, zeros
from gradtrace.analysis.hypotheses import Hypothesis, micro_step_hypotheses
from gradtrace.analysis.laws.accumulate_local import gradient, occurrences
from gradtrace.analysis.laws.common import (
    Lack,
    Place,
    Scene,
    check,
    coarsest,
    largest_before,
    last_of_previous,
)
from gradtrace.trace.dtypes import Dtype

LAW = "pack"
MOST_PEERS = 32


@dataclass(frozen=True, slots=True)
class _Source:
    """Hold what a bucket should contain.

    Attributes:
        estimate: all of it.
        parts: by micro-step; the first may be a buffer that holds earlier ones too.
        dtype: that they were added in.
        buffered: the last micro-step that such a buffer holds, or ``None``.
    """

    estimate: Estimate
    parts: tuple[tuple[int, Estimate], ...]
    dtype: Dtype
    buffered: int | None = None

    @property
    def carry(self) -> Estimate | None:
        """Return the buffer to which the last micro-step is added, if there is one."""
        alone = self.buffered is not None and len(self.parts) == 2
        return self.parts[0][1] if alone else None


def check_param(scene: Scene, param: int) -> None:
    """Check every bucket that holds one parameter, on every rank."""
    for rank in scene.ranks:
        lack = scene.lack("bucket", None, rank, param)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        for micro_step in scene.micro_steps:
            events = scene.alignment.events(scene.step, micro_step, "bucket", rank, param)
            for event in events:
                for span in event.spans:
                    _check_span(scene, event, span.param_offset, span.param_offset + span.numel)


def _check_span(scene: Scene, event: Event, start: int, stop: int) -> None:
    source = _source(scene, event, start, stop)
    if isinstance(source, Lack):
        scene.ledger.lack(LAW, source)
        return
    if added_later(scene, event, start, stop):
        reason = "added after the collective, which is the same on one rank"
        scene.ledger.lack(LAW, Lack("skip", reason))
        return
    record = event.record
    found = scene.alignment.cut(event, start, stop)
    assert found is not None
    place = Place(LAW, scene.step, record.micro_step, record.rank, event.param, "bucket", start)
    context = scene.context(place, source.dtype, event.dtype)

    def hypotheses() -> Iterator[Hypothesis]:
        earlier = largest_before(
            scene.alignment.step_events(scene.step, "bucket", record.rank, event.param),
            record.order,
        )
        if earlier is None:
            earlier = last_of_previous(scene, event)
        stale = None if earlier is None else scene.alignment.cut(earlier, start, stop)
        before = None if stale is None else exact(stale)
        yield from micro_step_hypotheses(
            context, _split(scene, event, source, start, stop), carry=source.carry
        )
        if before is not None:
            words = f"{context.point} still holds what entered the collective before."
            yield Hypothesis("stale", words, before)
        yield from _swapped(scene, event, start, stop)

    check(scene, place, found, source.estimate, context=context, hypotheses=hypotheses)


def added_later(
    scene: Scene, event: Event, start: int, stop: int
) -> tuple[tuple[int, Estimate], ...]:
    """Return the last micro-step of a bucket of one rank, where it is added after the collective.

    The bucket holds all but that, and the optimizer is given all: on one rank it makes no difference
    when it is added. What the optimizer is not given either was lost here. Where that is not recorded,
    as in a step that is left out, the bucket is not judged.
    """
    if len(scene.alignment.header(event.record.rank).dp_ranks) != 1:
        return ()
    source = _source(scene, event, start, stop)
    found = scene.alignment.cut(event, start, stop)
    if isinstance(source, Lack) or found is None or not source.parts:
        return ()
    number, now = source.parts[-1]
    if number != event.record.micro_step or not breaks(found, source.estimate).any():
        return ()
    parts = [part for _, part in source.parts[:-1]]
    rest = add_up(parts, source.dtype) if parts else zeros(stop - start)
    if breaks(found, rest).any() or _is_lost(scene, event, start, stop):
        return ()
    return ((number, now),)


def _is_lost(scene: Scene, event: Event, start: int, stop: int) -> bool:
    """Say whether the optimizer is given what left the collective, and nothing that was added since."""
    record = event.record
    given = scene.alignment.events(scene.step, None, "master_grad", record.rank, event.param)
    left = [
        one
        for one in scene.alignment.step_events(scene.step, "reduced", record.rank, event.param)
        if one.record.order > record.order
    ]
    if not given or not left:
        return False
    values = [scene.alignment.cut(one, start, stop) for one in (given[-1], left[0])]
    if values[0] is None or values[1] is None:
        return False
    return bool(np.array_equal(values[0], values[1], equal_nan=True))


def _source(scene: Scene, event: Event, start: int, stop: int) -> _Source | Lack:
    alignment, record = scene.alignment, event.record
    rank, param, micro_step = record.rank, event.param, record.micro_step
    assert micro_step is not None
    status = alignment.header(rank).points["local_accum"]
    taken = largest_before(alignment.step_events(scene.step, "bucket", rank, param), record.order)
    since = -1 if taken is None else taken.record.order
    again = len(alignment.events(scene.step, micro_step, "bucket", rank, param)) > 1
    if status == "recorded":
        gaps = alignment.gaps(scene.step, "local_accum", param=param, ranks=(rank,))
        if gaps:
            return Lack("gap", f"local_accum was lost ({gaps[0].reason})")
        base = largest_before(
            alignment.step_events(scene.step, "local_accum", rank, param), record.order
        )
        if base is not None and base.record.order > since:
            return _from_buffer(scene, event, base, start, stop)
    if again:
        return _one_occurrence(scene, event, start, stop)
    first = micro_step
    if status == "not_planned":
        if taken is not None:
            return Lack("skip", "local_accum is not_planned: what was carried is not known")
        if scene.partial:
            return Lack("skip", "the step was wrapped in the middle")
        first = 0
    return _from_gradients(scene, event, range(first, micro_step + 1), start, stop, None)


def _from_buffer(scene: Scene, event: Event, base: Event, start: int, stop: int) -> _Source | Lack:
    values = scene.alignment.cut(base, start, stop)
    if values is None:
        return Lack("gap", "local_accum holds other elements than the bucket")
    assert base.record.micro_step is not None and event.record.micro_step is not None
    estimate = cast(exact(values), base.dtype, event.dtype)
    held = (base.record.micro_step, estimate)
    later = range(base.record.micro_step + 1, event.record.micro_step + 1)
    if not later:
        dtype = coarsest(base.dtype, event.dtype)
        return _Source(estimate, (held,), dtype, base.record.micro_step)
    found = _from_gradients(scene, event, later, start, stop, held)
    return found if isinstance(found, Lack) else replace(found, buffered=base.record.micro_step)


def _split(
    scene: Scene, event: Event, source: _Source, start: int, stop: int
) -> tuple[tuple[int, Estimate], ...]:
    """Return the parts with the buffer taken apart into its micro-steps, as far as they are known."""
    if source.buffered is None:
        return source.parts
    parts: list[tuple[int, Estimate]] = []
    for micro_step in range(source.buffered + 1):
        gradients = scene.gradients(micro_step, event.record.rank, event.param)
        if isinstance(gradients, Lack):
            return source.parts
        if gradients:
            parts.append((micro_step, gradient(scene, gradients, start, stop, source.dtype)))
    return (*parts, *source.parts[1:])


def _from_gradients(
    scene: Scene,
    event: Event,
    micro_steps: range,
    start: int,
    stop: int,
    held: tuple[int, Estimate] | None,
) -> _Source | Lack:
    parts = [] if held is None else [held]
    flat = [estimate for _, estimate in parts]  # each occurrence is added in turn
    dtypes = [event.dtype]
    for micro_step in micro_steps:
        gradients = scene.gradients(micro_step, event.record.rank, event.param)
        if isinstance(gradients, Lack):
            return gradients
        if gradients:
            parts.append((micro_step, gradient(scene, gradients, start, stop, event.dtype)))
            flat += occurrences(scene, gradients, start, stop, event.dtype)
            if len(gradients) > 1 or len(micro_steps) > 1:
                dtypes.append(gradients[0].dtype)
    dtype = coarsest(*dtypes)
    if not parts:
        return _Source(zeros(stop - start), (), dtype)
    if len(parts) == 1:
        return _Source(parts[0][1], tuple(parts), dtype)
    estimate = either(add_up(flat, dtype), add_up([part for _, part in parts], dtype))
    return _Source(estimate, tuple(parts), dtype)


def _one_occurrence(scene: Scene, event: Event, start: int, stop: int) -> _Source | Lack:
    """Match several reductions of one micro-step with as many occurrences of the gradient."""
    record = event.record
    assert record.micro_step is not None
    events = scene.alignment.events(
        scene.step, record.micro_step, "bucket", record.rank, event.param
    )
    gradients = scene.gradients(record.micro_step, record.rank, event.param)
    if isinstance(gradients, Lack):
        return gradients
    if len(gradients) != len(events):
        return Lack("skip", "reduced several times in one micro-step")
    at = events.index(event)
    estimate = gradient(scene, gradients[at : at + 1], start, stop, event.dtype)
    return _Source(estimate, ((record.micro_step, estimate),), event.dtype)


def _swapped(scene: Scene, event: Event, start: int, stop: int) -> Iterator[Hypothesis]:
    """Propose that another parameter of the same bucket stands here."""
    alignment, record = scene.alignment, event.record
    layout = alignment.trace.layout(record)
    peers = [
        span
        for span in layout
        if span.param not in (event.param, -1) and span.numel == stop - start
    ]
    for span in peers[:MOST_PEERS]:
        events = alignment.events(scene.step, record.micro_step, "bucket", record.rank, span.param)
        twin = next((other for other in events if other.record == record), None)
        if twin is None:
            continue
        source = _source(scene, twin, span.param_offset, span.param_offset + span.numel)
        if not isinstance(source, Lack):
            name = scene.name(span.param)
            yield Hypothesis("swapped", f"The bucket holds {name} here.", source.estimate)
