"""Law `publish`: the model's weight at the next step is the master weight, cast.

DeepSpeed copies the updated master shard into the model's flat weights and gathers them; a gather
moves bits. So each element is the master's own, or its one rounding to the model's dtype
(docs/laws/publish.md). Where both are of one dtype, their hashes alone tell it: those of shards add up
to that of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, cast, exact
from gradtrace.analysis.hypotheses import Hypothesis
from gradtrace.analysis.laws.common import Lack, Place, Scene, check, coarsest, simple_finding
from gradtrace.analysis.origins import stretch_hash
from gradtrace.trace.digest import add_hashes
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64
from gradtrace.trace.spans import Span, coverage_fault

LAW: Final = "publish"
_PARTLY: Final = "master_weight is not planned for all ranks that hold the parameter"
_UNLESS: Final = "Nothing but the optimizer's step may write the weights between two steps."


@dataclass(frozen=True, slots=True)
class _Masters:
    """Hold the master weights of one parameter that the step before left.

    Attributes:
        events: of every rank that a weight may have come from.
    """

    events: tuple[Event, ...]

    @property
    def held(self) -> str:
        """Return their dtype's name."""
        return str(self.events[0].record.dtype)

    @property
    def whole(self) -> bool:
        """Say whether their values were kept."""
        return all(event.record.key is not None for event in self.events)


def expect(master: Float64, held: Dtype, model: Dtype) -> Estimate:
    """Return what the model's weight should be.

    Args:
        master: 1-D master weights after the step.
        held: their dtype.
        model: dtype of the model's weights.
    """
    return cast(exact(master), held, model)


def check_param(scene: Scene, param: int) -> None:
    """Check the weights that this step begins with against the masters of the step before."""
    previous = scene.alignment.previous_step(scene.step)
    if previous is None:
        scene.ledger.lack(LAW, Lack("skip", "the trace does not hold the step before"))
        return
    if scene.alignment.parameters[param].group is None:
        scene.ledger.lack(LAW, Lack("skip", "no optimizer holds the parameter"))
        return
    for rank in scene.ranks:
        lack = scene.lack("weight", None, rank)
        if scene.alignment.step_end(scene.step, rank).facts.get("checkpoint_loaded"):
            lack = Lack("skip", "a checkpoint was loaded between two steps")
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        masters = _masters(scene, previous, rank, param)
        for event in scene.alignment.events(scene.step, None, "weight", rank, param):
            if isinstance(masters, Lack):
                scene.ledger.lack(LAW, masters)
            else:
                _check_event(scene, event, masters)


def _masters(scene: Scene, step: int, rank: int, param: int) -> _Masters | Lack:
    alignment = scene.alignment
    there = Scene(alignment, step, scene.ledger)
    sources = (rank,) if scene.replicated(rank) else alignment.header(rank).dp_ranks
    found: list[Event] = []
    for source in sources:
        if source not in scene.ranks:
            continue  # not of the plan: what it held is not known
        lack = there.lack("master_weight", None, source)
        if lack is not None:
            return lack
        events = alignment.events(step, None, "master_weight", source, param)
        found += [event for event in events if event.record.occurrence == 1]
    if not found and any(alignment.own_spans(source, param) for source in sources):
        return Lack("gap", "master_weight has no record, and no gap says why")
    if not found:
        return Lack("skip", _PARTLY)
    if len({event.record.dtype for event in found}) > 1:
        return Lack("skip", "master_weight is of several dtypes")
    return _Masters(tuple(found))


def _check_event(scene: Scene, event: Event, masters: _Masters) -> None:
    for span in event.spans:
        if event.record.key is not None and masters.whole:
            _check_values(scene, event, span, masters)
        elif event.record.dtype == masters.held:
            _check_hash(scene, event, span, masters)
        else:
            reason = (
                f"{event.record.dtype} and {masters.held} cannot be compared by hashes: name weight and "
                "master_weight in points"
            )
            scene.ledger.lack(LAW, Lack("skip", reason))


def _check_values(scene: Scene, event: Event, span: Span, masters: _Masters) -> None:
    start, stop = span.param_offset, span.param_offset + span.numel
    master = _cut(scene, masters.events, start, stop)
    if master is None:
        scene.ledger.lack(LAW, Lack("skip", _PARTLY))
        return
    held, model = DTYPES[masters.held], event.dtype
    place = _place(scene, event, start)
    dtype = coarsest(held, model)
    # No reduction passes here: half of a weight is no mean that was taken twice.
    context = replace(scene.context(place, dtype, model), factors={})
    check(
        scene,
        place,
        scene.alignment.fetch(event, span),
        expect(master, held, model),
        context=context,
        hypotheses=lambda: _hypotheses(scene, event, start, stop, held),
    )


def _hypotheses(
    scene: Scene, event: Event, start: int, stop: int, held: Dtype
) -> Iterator[Hypothesis]:
    alignment, rank, step = scene.alignment, event.record.rank, scene.step
    before = alignment.events(step - 1, None, "weight", rank, event.param)
    old = alignment.cut(before[-1], start, stop) if before and before[-1].record.key else None
    if old is not None:
        words = (
            f"The weight is still that of step {step - 1}: the update did not reach it. {_UNLESS}"
        )
        yield Hypothesis("stale", words, exact(old))
    for parameter in alignment.captured():
        masters = _masters(scene, step - 1, rank, parameter.index)
        if parameter.index == event.param or isinstance(masters, Lack) or not masters.whole:
            continue
        offsets = (start, *(span.param_offset for one in masters.events for span in one.spans))
        for offset in dict.fromkeys(offsets):
            values = _cut(scene, masters.events, offset, offset + stop - start)
            if values is not None:
                words = f"The weights of {parameter.name} stand here."
                yield Hypothesis("swapped", words, expect(values, held, event.dtype))


def _cut(scene: Scene, events: tuple[Event, ...], start: int, stop: int) -> Float64 | None:
    """Return elements of a parameter that several shards hold together, if they hold all."""
    values, missing = np.zeros(stop - start), np.ones(stop - start, dtype=np.bool_)
    for event in events:
        for span in event.spans:
            first = max(start, span.param_offset)
            last = min(stop, span.param_offset + span.numel)
            piece = scene.alignment.cut(event, first, last) if first < last else None
            if piece is not None:
                values[first - start : last - start] = piece
                missing[first - start : last - start] = False
    return None if missing.any() else values


# -- by hashes -------------------------------------------------------------------------------------


def _check_hash(scene: Scene, event: Event, span: Span, masters: _Masters) -> None:
    expected = _sum_of(scene, masters, span.param_offset, span.numel)
    mine = stretch_hash(scene.alignment.trace, event.record, span)
    if expected is None:
        scene.ledger.lack(LAW, Lack("skip", _PARTLY))
    elif expected == mine:
        scene.ledger.passed(LAW)
    else:
        cause, why = _cause_of_hash(scene, event, span, mine, expected)
        detail = (
            f"{why}The weight of {scene.name(event.param)} is not the master weight that step "
            f"{scene.step - 1} left; the hashes tell it. {_UNLESS}"
        )
        simple_finding(scene, _place(scene, event, span.param_offset), cause, detail)


def _sum_of(scene: Scene, masters: _Masters, start: int, numel: int) -> str | None:
    """Return the hash of a stretch of the masters, if their stretches tile it."""
    trace = scene.alignment.trace
    inside = [
        (held, one)
        for held in masters.events
        for one in held.spans
        if start <= one.param_offset and one.param_offset + one.numel <= start + numel
    ]
    if coverage_fault([(one.param_offset - start, one.numel) for _, one in inside], numel):
        return None
    return add_hashes(stretch_hash(trace, held.record, one) for held, one in inside)


def _cause_of_hash(
    scene: Scene, event: Event, span: Span, mine: str, expected: str
) -> tuple[str, str]:
    """Return cause and words from what a digest tells beside the hash."""
    alignment, rank, before = scene.alignment, event.record.rank, scene.step - 1
    digest = event.record.facts.get("digest")
    if digest is not None:
        at = alignment.trace.layout(event.record).index(span)
        if digest["nans"][at] or digest["infs"][at]:
            return "non_finite", "Some of it is NaN or infinite. "
        if digest["zeros"][at] == span.numel:
            return "zeroed", "All of it is zero. "
    for old in alignment.events(before, None, "weight", rank, event.param):
        alike = (old.record.dtype, old.spans) == (event.record.dtype, event.spans)
        if alike and stretch_hash(alignment.trace, old.record, span) == mine:
            return "stale", f"It is still that of step {before}: the update did not reach it. "
    for parameter in alignment.captured():
        masters = _masters(scene, before, rank, parameter.index)
        if parameter.index == event.param or isinstance(masters, Lack):
            continue
        alike = masters.held == event.record.dtype
        if alike and _sum_of(scene, masters, span.param_offset, span.numel) == mine:
            return "swapped", f"It is that of {parameter.name}. "
    for other in scene.ranks:
        for theirs in alignment.events(scene.step, None, "weight", other, event.param):
            alike = (theirs.record.dtype, theirs.spans) == (event.record.dtype, event.spans)
            if alike and stretch_hash(alignment.trace, theirs.record, span) == expected:
                return "weights_differ", f"Rank {other} holds the right one. "
    return "unknown", ""


def _place(scene: Scene, event: Event, start: int) -> Place:
    return Place(LAW, scene.step, None, event.record.rank, event.param, "weight", start)
