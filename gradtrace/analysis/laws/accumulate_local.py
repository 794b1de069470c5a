"""Law `accumulate_local`: the rank's own buffer is what it carried plus this micro-step's gradient.

``local_accum[m]`` = carry + the sum of ``local_grad[m]``. The carry is ``local_accum[m-1]`` while no
collective took the parameter; after one it is the reduced gradient that was written back, if the
buffer was not empty, and only the rank's own valid elements of it are known. Nothing is carried
over from the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, add_up, cast, either, exact, zeros
from gradtrace.analysis.hypotheses import Design, Hypothesis, micro_step_hypotheses
from gradtrace.analysis.laws.common import (
    Lack,
    Place,
    Scene,
    check,
    coarsest,
    largest_before,
)
from gradtrace.trace.dtypes import Dtype
from gradtrace.trace.points import BY_NAME

LAW = "accumulate_local"
_COLLECTIVE = ("bucket", "reduced", "partition")


def check_param(scene: Scene, param: int) -> None:
    """Check every micro-step of one parameter on every rank."""
    for rank in scene.ranks:
        lack = scene.lack("local_accum", None, rank, param)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        for event in scene.alignment.step_events(scene.step, "local_accum", rank, param):
            _check_event(scene, event)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Hold where a buffer's contents come from.

    Attributes:
        carry: the record of what was in it before, or ``None`` for nothing.
        gradients: the occurrences of this micro-step's gradient.
    """

    carry: Event | None
    gradients: tuple[Event, ...]


def _check_event(scene: Scene, event: Event) -> None:
    inputs = _inputs(scene, event)
    if isinstance(inputs, Lack):
        scene.ledger.lack(LAW, inputs)
        return
    for span in event.spans if inputs.carry is None else inputs.carry.spans:
        start, stop = span.param_offset, span.param_offset + span.numel
        _check_span(scene, event, inputs, start, stop)


def _inputs(scene: Scene, event: Event) -> _Inputs | Lack:
    record = event.record
    assert record.micro_step is not None
    gradients = scene.gradients(record.micro_step, record.rank, event.param)
    if isinstance(gradients, Lack):
        return gradients
    carry = _carry(scene, event)
    return carry if isinstance(carry, Lack) else _Inputs(carry, gradients)


def _carry(scene: Scene, event: Event) -> Event | Lack | None:
    """Return the record of what was in the buffer before, or ``None`` for nothing."""
    alignment, record = scene.alignment, event.record
    rank, param = record.rank, event.param
    earlier = largest_before(
        alignment.step_events(scene.step, "local_accum", rank, param), record.order
    )
    since = -1 if earlier is None else earlier.record.order
    shown = [point for point in _COLLECTIVE if alignment.header(rank).points[point] == "recorded"]
    taken = [
        found
        for point in shown
        for found in alignment.step_events(scene.step, point, rank, param)
        if since < found.record.order < record.order
    ]
    first = earlier is None and record.micro_step == 0
    if not shown and not first:
        return Lack("skip", "no record says whether a collective came in between")
    for point in shown:
        gaps = alignment.gaps(scene.step, point, param=param, ranks=(rank,))
        if gaps and not first:
            return Lack("gap", f"{point} was lost ({gaps[0].reason})")
    if not taken:
        if earlier is None and scene.partial:
            return Lack("skip", "the step was wrapped in the middle")
        return earlier
    if any(found.record.micro_step == record.micro_step for found in taken):
        return Lack("skip", "the buffer was recorded after the collective took it")
    carries = record.facts.get("carry")
    if carries is None:
        return Lack("skip", "whether the buffer was cleared was not recorded")
    if not carries:
        return None
    for point in ("reduced", "partition"):
        written = [found for found in taken if found.record.point == point]
        if written:
            return max(written, key=lambda found: found.record.order)
    if alignment.header(rank).points["reduced"] == "recorded":
        return Lack("skip", "this rank holds no reduced element of the parameter")
    return Lack("skip", "what was written back after the collective was not recorded")


def _terms(
    scene: Scene, event: Event, inputs: _Inputs, start: int, stop: int
) -> list[tuple[int, Estimate]] | Lack:
    """Return the terms of a buffer, each with the micro-step it belongs to."""
    terms: list[tuple[int, Estimate]] = []
    carry = inputs.carry
    if carry is not None:
        before = scene.alignment.cut(carry, start, stop)
        if before is None:
            return Lack("gap", "a buffer of other elements than before")
        held = cast(exact(before), carry.dtype, event.dtype)
        terms.append((int(carry.record.micro_step or 0), held))
    if inputs.gradients:
        now = gradient(scene, inputs.gradients, start, stop, event.dtype)
        terms.append((int(event.record.micro_step or 0), now))
    return terms


def _check_span(scene: Scene, event: Event, inputs: _Inputs, start: int, stop: int) -> None:
    record = event.record
    found = scene.alignment.cut(event, start, stop)
    terms = _terms(scene, event, inputs, start, stop)
    if found is None or isinstance(terms, Lack):
        lack = terms if isinstance(terms, Lack) else Lack("gap", "a buffer of other elements")
        scene.ledger.lack(LAW, lack)
        return
    carry = inputs.carry
    dtypes = [entry.dtype for entry in inputs.gradients] if len(inputs.gradients) > 1 else []
    dtypes += [event.dtype] if carry is None else [event.dtype, carry.dtype]
    estimate = zeros(stop - start)
    if terms:
        estimate = add_up([term for _, term in terms], event.dtype)
    if len(inputs.gradients) > 1:
        # Autograd may also add each occurrence to the buffer in turn, (carry + g0) + g1, where every
        # addition rounds what was carried once more.
        flat = [] if carry is None else [terms[0][1]]
        flat += occurrences(scene, inputs.gradients, start, stop, event.dtype)
        estimate = either(add_up(flat, event.dtype), estimate)
    place = Place(
        LAW, scene.step, record.micro_step, record.rank, event.param, "local_accum", start
    )
    context = scene.context(place, coarsest(*dtypes), event.dtype)
    labels = [f"micro-step {number}" for number, _ in terms]
    if carry is not None:
        labels[0] = "what was carried"
    design = Design(
        "micro_step",
        tuple((name, term.value) for name, (_, term) in zip(labels, terms, strict=True)),
    )

    def hypotheses() -> Iterator[Hypothesis]:
        held = None if carry is None else terms[0][1]
        left = list(_left_behind(scene, event, start, stop))
        yield from micro_step_hypotheses(
            context, terms, carry=held, before=left[0] if left else None
        )
        for before in left[1:]:
            for other in micro_step_hypotheses(context, terms, carry=held, before=before):
                if other.cause in {"carried_over", "stale"}:
                    yield other
        yield from _swapped(scene, event)

    check(
        scene,
        place,
        found,
        estimate,
        context=context,
        designs=[design] if len(terms) > 1 else [],
        hypotheses=hypotheses,
    )


def _left_behind(scene: Scene, event: Event, start: int, stop: int) -> Iterator[Estimate]:
    """Yield what the step before may have left in the buffer: its sum, or what was written back."""
    previous = scene.alignment.previous_step(scene.step)
    if previous is None:
        return
    rank, param = event.record.rank, event.param
    for point in ("local_accum", "reduced", "clipped_grad"):
        if BY_NAME[point].per_micro_step:
            events = scene.alignment.step_events(previous, point, rank, param)
        else:
            events = scene.alignment.events(previous, None, point, rank, param)
        values = scene.alignment.cut(events[-1], start, stop) if events else None
        if values is not None:
            yield exact(values)


def _swapped(scene: Scene, event: Event) -> Iterator[Hypothesis]:
    """Propose that another parameter's gradient was accumulated here."""
    alignment, record = scene.alignment, event.record
    for parameter in alignment.captured():
        if parameter.index == event.param or parameter.numel != event.numel:
            continue
        for other in alignment.events(
            scene.step, record.micro_step, "local_accum", record.rank, parameter.index
        )[:1]:
            inputs = _inputs(scene, other)
            if isinstance(inputs, Lack):
                continue
            terms = _terms(scene, other, inputs, 0, parameter.numel)
            if terms and not isinstance(terms, Lack):
                words = f"The sum of {parameter.name} stands here."
                yield Hypothesis("swapped", words, add_up([t for _, t in terms], other.dtype))


def occurrences(
    scene: Scene, events: tuple[Event, ...], start: int, stop: int, target: Dtype
) -> list[Estimate]:
    """Return the occurrences of one micro-step's gradient, each cast to a dtype."""
    parts = [scene.alignment.cut(event, start, stop) for event in events]
    return [
        cast(exact(part), event.dtype, target)
        for part, event in zip(parts, events, strict=True)
        if part is not None
    ]


def gradient(
    scene: Scene, events: tuple[Event, ...], start: int, stop: int, target: Dtype
) -> Estimate:
    """Return the sum of the occurrences of one micro-step's gradient, cast to a dtype."""
    known = occurrences(scene, events, start, stop, target)
    if not known:
        return zeros(stop - start)
    return known[0] if len(known) == 1 else add_up(known, coarsest(target, events[0].dtype))
