"""Law `master`: the optimizer is given what was accumulated, cast to its dtype; padding is zero.

A step that is left out as overflowed has no such gradient; then something accumulated is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, add_up, cast, exact, zeros
from gradtrace.analysis.hypotheses import Design, Hypothesis, micro_step_hypotheses, weighted
from gradtrace.analysis.laws.accumulate import last_of_step_before, shard, shards_of
from gradtrace.analysis.laws.accumulate_local import gradient
from gradtrace.analysis.laws.common import (
    Lack,
    Place,
    Scene,
    check,
    coarsest,
    largest_before,
    simple_finding,
)
from gradtrace.analysis.laws.norm import LARGEST_NORM
from gradtrace.analysis.laws.pack import added_later
from gradtrace.trace.dtypes import Dtype
from gradtrace.trace.records import Parameter
from gradtrace.trace.spans import PADDING

LAW = "master"
MOST_LATE = 32  # micro-steps, counted from the last, that may have been added after the collective
_Parts = list[tuple[str, Estimate]]


def check_padding(scene: Scene) -> None:
    """Check that elements of no parameter are exactly zero."""
    for rank in scene.ranks:
        if scene.alignment.header(rank).points["master_grad"] != "recorded":
            continue
        for event in scene.alignment.events(scene.step, None, "master_grad", rank, PADDING):
            for span in event.spans:
                values = scene.alignment.fetch(event, span)
                wrong = np.nonzero(~(values == 0))[0]
                if not len(wrong):
                    scene.ledger.passed(LAW)
                    continue
                value = float(values[wrong[0]])
                finite = bool(np.isfinite(values).all())
                place = Place(LAW, scene.step, None, rank, None, "master_grad")
                detail = (
                    f"{len(wrong)} elements of padding in {event.record.unit} are not zero "
                    f"(the first, at {span.flat_offset + int(wrong[0])} of the flat buffer, is "
                    f"{value:.6g}): they enter the norm and the optimizer."
                )
                cause = "partly_overwritten" if finite else "non_finite"
                simple_finding(scene, place, cause, detail, expected=0.0, found=value)


def check_overflow(scene: Scene) -> None:
    """Check that a step which was left out had a gradient that is not finite.

    The flag is raised where a gradient, or the norm of all of them in float32, is not finite. Judged
    only if every gradient of every rank was recorded as it was last accumulated, and none as given to
    the optimizer, where it is judged by itself.
    """
    alignment = scene.alignment
    flagged = [
        rank for rank in scene.ranks if alignment.step_end(scene.step, rank).facts.get("overflow")
    ]
    trained = [p for p in alignment.parameters if p.trainable and p.group is not None]
    if not flagged or not all(p.captured for p in trained):
        return
    replicated = all(scene.replicated(rank) for rank in scene.ranks)
    # Ranks that disagree decide each by itself; the others may have been told of an overflow elsewhere.
    alone = replicated and len(flagged) < len(scene.ranks)
    if not alone and len(scene.ranks) != alignment.trace.manifest.world_size:
        return
    point = "reduced" if replicated else "accumulated"
    groups = [(rank,) for rank in flagged] if alone else [scene.ranks]
    norms = {
        ranks: norm
        for ranks in groups
        if (norm := _finite_norm(scene, ranks, trained, point)) is not None
    }
    if not norms:
        return
    (ranks, norm), *_ = norms.items()
    guilty = ranks[0] if alone and len(norms) == 1 else None
    place = Place(LAW, scene.step, None, guilty, None, "master_grad")
    detail = (
        "The step was left out as overflowed, but every gradient that was accumulated is finite "
        f"(norm {norm:.6g}): what became infinite or NaN did so after that."
    )
    simple_finding(scene, place, "non_finite", detail)


def _finite_norm(
    scene: Scene, ranks: Sequence[int], trained: Sequence[Parameter], point: str
) -> float | None:
    """Return the largest norm of what ranks had at a point that is the last before the optimizer.

    Where each holds a part, it is the norm of all parts.

    Returns:
        ``None`` where it is not finite in float32, was not recorded whole, or was recorded again as
        given to the optimizer.
    """
    alignment = scene.alignment
    squares: list[float] = []
    for rank in ranks:
        if scene.lack(point, None, rank) or scene.lack("master_grad", None, rank):
            return None
        if alignment.records(scene.step, "master_grad", rank):
            return None
        squares.append(0.0)
        for parameter in trained:
            events = alignment.step_events(scene.step, point, rank, parameter.index)
            for span in alignment.own_spans(rank, parameter.index):
                stop = span.param_offset + span.numel
                values = alignment.cut(events[-1], span.param_offset, stop) if events else None
                if values is None or not np.isfinite(values).all():
                    return None
                squares[-1] += float(values @ values)
    whole = max(squares) if point == "reduced" else math.fsum(squares)
    norm = math.sqrt(whole)
    return norm if norm < LARGEST_NORM else None


def check_param(scene: Scene, param: int) -> None:
    """Check what the optimizer is given for one parameter, on every rank."""
    for rank in scene.ranks:
        lack = scene.lack("master_grad", None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        events = scene.alignment.events(scene.step, None, "master_grad", rank, param)
        if not events and scene.alignment.own_spans(rank, param):
            if scene.alignment.step_end(scene.step, rank).facts.get("overflow"):
                scene.ledger.lack(LAW, Lack("skip", "the step overflowed"))
            else:
                reason = "master_grad has no record, and no gap says why"
                scene.ledger.lack(LAW, Lack("gap", reason))
        for event in events:
            for span in event.spans:
                start, stop = span.param_offset, span.param_offset + span.numel
                _check_span(scene, event, start, stop)


def _check_span(scene: Scene, event: Event, start: int, stop: int) -> None:
    terms = _terms(scene, event, start, stop)
    if isinstance(terms, Lack):
        scene.ledger.lack(LAW, terms)
        return
    parts, middle = terms
    record = event.record
    found = scene.alignment.cut(event, start, stop)
    assert found is not None
    estimate = zeros(stop - start)
    if len(parts) == 1:
        estimate = cast(parts[0][1], middle, event.dtype)
    elif parts:
        estimate = cast(add_up([part for _, part in parts], middle), middle, event.dtype)
    place = Place(LAW, scene.step, None, record.rank, event.param, "master_grad", start)
    context = scene.context(place, coarsest(middle, event.dtype), event.dtype)
    design = Design("micro_step", tuple((label, part.value) for label, part in parts))

    def hypotheses() -> Iterator[Hypothesis]:
        before = last_of_step_before(scene, event, start, stop)
        shards = shards_of(scene, record.rank, event.param, record.order)
        pieces: list[tuple[int, Estimate]] = []
        for one in () if isinstance(shards, Lack) else shards.events[shards.restart :]:
            piece = shard(scene, one, start, stop, event.dtype)
            if piece is not None and one.record.micro_step is not None:
                pieces.append((one.record.micro_step, piece))
        if len(pieces) > 1 or before is not None:
            yield from micro_step_hypotheses(context, pieces, before=before)
        yield from _stepped_with(scene, event, start, stop)
        yield from _not_reduced(scene, event, estimate, start, stop)
        yield from _swapped(scene, event, stop - start)

    check(
        scene,
        place,
        found,
        estimate,
        context=context,
        designs=[design] if len(parts) > 1 else [],
        hypotheses=hypotheses,
    )


def _terms(scene: Scene, event: Event, start: int, stop: int) -> tuple[_Parts, Dtype] | Lack:
    """Return what the optimizer should be given, in parts, and the dtype they are added in."""
    alignment, rank, order = scene.alignment, event.record.rank, event.record.order
    shards = shards_of(scene, rank, event.param, order)
    status = alignment.header(rank).points["accumulated"]
    last: Event | None = None
    if status == "recorded":
        gaps = alignment.gaps(scene.step, "accumulated", param=event.param, ranks=(rank,))
        if gaps:
            return Lack("gap", f"accumulated was lost ({gaps[0].reason})")
        events = alignment.step_events(scene.step, "accumulated", rank, event.param)
        last = largest_before(events, order)
    if last is None and scene.partial:
        return Lack("skip", "the step was wrapped in the middle")
    parts: _Parts = []
    middle = event.dtype
    after = -1
    if last is not None:
        values = alignment.cut(last, start, stop)
        if values is None:
            return Lack("gap", "accumulated holds other elements than master_grad")
        parts.append(("what was accumulated", exact(values)))
        middle, after = last.dtype, last.record.order
    if isinstance(shards, Lack):
        if last is not None and shards.kind == "skip":
            return parts, middle  # the buffer is the whole story
        return shards
    if last is None and not shards.events:
        return _nothing(scene, rank, event.param, middle)
    for one in shards.between(after, order):
        accumulation = scene.settings_dtypes(rank, "grad_accum_dtype")
        dtype = last.dtype if last is not None else coarsest(one.dtype, *accumulation)
        piece = shard(scene, one, start, stop, dtype)
        if piece is None:
            return Lack("gap", "the shards hold other elements than master_grad")
        middle = dtype
        parts.append((f"micro-step {one.record.micro_step}", piece))
        parts += _added_later(scene, one, start, stop, dtype)
    return parts, middle


def _added_later(scene: Scene, one: Event, start: int, stop: int, dtype: Dtype) -> _Parts:
    """Return what a bucket of one rank lacked, which its own addition after the collective brings."""
    buckets = scene.alignment.step_events(scene.step, "bucket", one.record.rank, one.param)
    bucket = largest_before(buckets, one.record.order)
    if bucket is None:
        return []
    return [
        (f"micro-step {number} (added after the collective)", cast(part, bucket.dtype, dtype))
        for number, part in added_later(scene, bucket, start, stop)
    ]


def _nothing(scene: Scene, rank: int, param: int, dtype: Dtype) -> tuple[_Parts, Dtype] | Lack:
    """Return no parts for a parameter without any gradient, if the trace bears that out."""
    for micro_step in scene.micro_steps:
        events = scene.alignment.events(scene.step, micro_step, "bucket", rank, param)
        if events:
            return Lack("gap", "what was reduced has no record, and no gap says why")
    return [], dtype


def _stepped_with(scene: Scene, event: Event, start: int, stop: int) -> Iterator[Hypothesis]:
    """Propose that the buffer, unscaled and clipped in place, still holds the step before."""
    previous = scene.alignment.previous_step(scene.step)
    if previous is None:
        return
    for used in scene.alignment.events(
        previous, None, "clipped_grad", event.record.rank, event.param
    ):
        values = scene.alignment.cut(used, start, stop)
        if values is not None:
            words = "The optimizer is given what it stepped with in the step before."
            yield Hypothesis("stale", words, exact(values))


def _not_reduced(
    scene: Scene, event: Event, estimate: Estimate, start: int, stop: int
) -> Iterator[Hypothesis]:
    """Propose the rank's own gradients: all of them, or one beside what was reduced."""
    rank = event.record.rank
    if len(scene.alignment.header(rank).dp_ranks) < 2:
        return
    own: list[tuple[int, Estimate]] = []
    for micro_step in scene.micro_steps:
        gradients = scene.gradients(micro_step, rank, event.param)
        if isinstance(gradients, Lack):
            return
        if gradients:
            part = gradient(scene, gradients, start, stop, event.dtype)
            own.append((micro_step, part))
    if not own:
        return
    words = f"The optimizer is given rank {rank}'s own gradients: they were not reduced."
    total = weighted([(1.0, part) for _, part in own], event.dtype)
    yield Hypothesis("not_reduced", words, total)
    for micro_step, part in own[-MOST_LATE:]:
        words = (
            f"Beside what was reduced, the optimizer is given rank {rank}'s own gradient of "
            f"micro-step {micro_step}: it was added after the collective, and stays on the rank."
        )
        late = weighted([(1.0, estimate), (1.0, part)], event.dtype)
        yield Hypothesis("not_reduced", words, late)


def _swapped(scene: Scene, event: Event, numel: int) -> Iterator[Hypothesis]:
    """Propose that another parameter's accumulated gradient is given here."""
    alignment, record = scene.alignment, event.record
    for parameter in alignment.captured():
        if parameter.index == event.param:
            continue
        for other in alignment.events(
            scene.step, None, "master_grad", record.rank, parameter.index
        )[-1:]:
            for span in other.spans:
                if span.numel != numel:
                    continue
                terms = _terms(scene, other, span.param_offset, span.param_offset + numel)
                if isinstance(terms, Lack) or not terms[0]:
                    continue
                words = f"The optimizer is given the gradient of {parameter.name} here."
                given = add_up([part for _, part in terms[0]], terms[1])
                yield Hypothesis("swapped", words, given)
