"""Law `update`: the weights after a step are what the optimizer's rule makes of those before it.

So are the moments, which the step after begins with. A step that is left out, and a parameter that the
optimizer is not given, stay as they are to the bit (docs/laws/update.md).

Source: torch 2.13.0, optim/optimizer.py: parameters without a gradient are passed over; deepspeed
0.19.8, step() of each optimizer: an overflow returns before the wrapped optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, exact
from gradtrace.analysis.hypotheses import Hypothesis
from gradtrace.analysis.laws.common import Lack, Place, Scene, check, coarsest, simple_finding
from gradtrace.analysis.laws.optimizers import Adam, Updated
from gradtrace.analysis.laws.update_causes import Step, of_moment, of_weight
from gradtrace.analysis.laws.update_rules import MOMENTS, Rule, count_of, rule_of
from gradtrace.analysis.origins import stretch_hash
from gradtrace.trace.dtypes import Float64
from gradtrace.trace.records import Record

LAW = "update"
_DIGESTS = "master_weight is kept as digests: name it in points"


@dataclass(frozen=True, slots=True)
class _Unit:
    """Hold what is recorded of one parameter's stretch that an optimizer steps as a whole."""

    rank: int
    unit: str
    before: Event
    after: Event


def check_param(scene: Scene, param: int) -> None:
    """Check the weights and the moments that a step leaves of one parameter, on every rank."""
    for rank in scene.ranks:
        units = _units(scene, rank, param)
        if isinstance(units, Lack):
            scene.ledger.lack(LAW, units)
            continue
        for unit in units:
            _check_unit(scene, unit)


def _units(scene: Scene, rank: int, param: int) -> list[_Unit] | Lack:
    lack = scene.lack("master_weight", None, rank)
    if lack is not None:
        return lack
    events = scene.alignment.events(scene.step, None, "master_weight", rank, param)
    by_unit: dict[str, dict[int, Event]] = {}
    for event in events:
        by_unit.setdefault(event.record.unit, {})[event.record.occurrence] = event
    if any(set(pair) != {0, 1} for pair in by_unit.values()):
        return Lack("gap", "master_weight was not recorded both before and after the step")
    if not events and scene.alignment.own_spans(rank, param):
        return Lack("gap", "master_weight has no record, and no gap says why")
    return [_Unit(rank, unit, pair[0], pair[1]) for unit, pair in by_unit.items()]


def _check_unit(scene: Scene, unit: _Unit) -> None:
    alignment, rank, param = scene.alignment, unit.rank, unit.before.param
    if alignment.step_end(scene.step, rank).facts.get("overflow"):
        _check_unchanged(scene, unit, "the step was left out as overflowed")
        return
    lack = scene.lack("clipped_grad", None, rank)
    if lack is not None:
        scene.ledger.lack(LAW, lack)
        return
    given = alignment.events(scene.step, None, "clipped_grad", rank, param)
    if not given and scene.replicated(rank):
        _check_unchanged(scene, unit, "the optimizer was given no gradient of it")
        return
    if not given:
        scene.ledger.lack(LAW, Lack("gap", "clipped_grad has no record, and no gap says why"))
        return
    rule = _rule(scene, scene.step, unit)
    if isinstance(rule, Lack):
        scene.ledger.lack(LAW, rule)
        return
    for span in unit.before.spans:
        start, stop = span.param_offset, span.param_offset + span.numel
        step = _step(scene, unit, rule, given[-1], start, stop)
        if isinstance(step, Lack):
            scene.ledger.lack(LAW, step)
        else:
            _check_span(scene, unit, step, start, stop)


def _check_span(scene: Scene, unit: _Unit, step: Step, start: int, stop: int) -> None:
    found = scene.alignment.cut(unit.after, start, stop)
    if found is None:
        reason = "master_weight holds other elements after the step"
        scene.ledger.lack(LAW, Lack("gap", reason))
        return
    expected = step.take()
    place = Place(LAW, scene.step, None, unit.rank, unit.before.param, "master_weight", start)
    context = scene.context(place, step.dtype, unit.after.dtype)

    def of_others() -> Iterator[tuple[str, Float64]]:
        yield from _others(scene, unit, stop - start)

    check(
        scene,
        place,
        found,
        expected.weight,
        context=context,
        hypotheses=lambda: of_weight(step, expected.weight, found, context, of_others),
    )
    _check_moments(scene, unit, step, expected, start, stop)


def _check_moments(
    scene: Scene, unit: _Unit, step: Step, expected: Updated, start: int, stop: int
) -> None:
    """Check the moments that the next step begins with."""
    if not expected.moments:
        return
    held = _next_state(scene, unit)
    if isinstance(held, Lack):
        scene.ledger.lack(LAW, held, len(expected.moments))
        return
    for moment, estimate in expected.moments.items():
        event = held.get(moment)
        found = None if event is None else scene.alignment.cut(event, start, stop)
        if event is None or found is None:
            reason = f"{moment} has no record in the step after, and no gap says why"
            scene.ledger.lack(LAW, Lack("gap", reason))
        else:
            _check_moment(scene, unit, step, moment, event, found, estimate, start)
    _check_count(scene, unit, 1)


def _check_moment(
    scene: Scene,
    unit: _Unit,
    step: Step,
    moment: str,
    event: Event,
    found: Float64,
    estimate: Estimate,
    start: int,
) -> None:
    place = Place(LAW, scene.step, None, unit.rank, unit.before.param, "optimizer_state", start)
    context = scene.context(place, coarsest(step.dtype, event.dtype), event.dtype)
    context = replace(context, point=f"{moment}, as step {scene.step + 1} begins with it,")
    check(
        scene,
        place,
        found,
        estimate,
        context=context,
        hypotheses=lambda: of_moment(step, moment, context),
    )


def _check_unchanged(scene: Scene, unit: _Unit, why: str) -> None:
    """Check that weights and moments stay as they are to the bit."""
    alignment, param = scene.alignment, unit.before.param
    place = Place(LAW, scene.step, None, unit.rank, param, "master_weight")
    hashes = [_hashes(scene, event) for event in (unit.before, unit.after)]
    if hashes[0] == hashes[1]:
        scene.ledger.passed(LAW)
    elif unit.before.record.key is None or unit.after.record.key is None:
        detail = f"The weights of {scene.name(param)} changed, though {why}; the hashes tell it."
        simple_finding(scene, place, "unknown", detail)
    else:
        for span in unit.before.spans:
            start, stop = span.param_offset, span.param_offset + span.numel
            found, before = (
                alignment.cut(unit.after, start, stop),
                alignment.fetch(unit.before, span),
            )
            if found is None:
                reason = "master_weight holds other elements after the step"
                scene.ledger.lack(LAW, Lack("gap", reason))
                continue
            place = replace(place, offset=start)
            dtype = unit.after.dtype
            context = scene.context(place, dtype, dtype)
            context = replace(context, point=f"master_weight, which must not change ({why}),")
            check(scene, place, found, exact(before), context=context, hypotheses=_nothing)
    state, held = _state(scene, scene.step, unit), _next_state(scene, unit)
    if isinstance(state, Lack) or isinstance(held, Lack):
        return  # what is missing here, the steps that are taken say
    for moment, event in state.items():
        after = held.get(moment)
        if after is None or _hashes(scene, event) != _hashes(scene, after):
            words = f"{moment} of {scene.name(param)} changed, though {why}."
            place = replace(place, point="optimizer_state", offset=0)
            simple_finding(scene, place, "unknown", words)
        else:
            scene.ledger.passed(LAW)
    _check_count(scene, unit, 0)


def _nothing() -> Iterator[Hypothesis]:
    return iter(())


def _hashes(scene: Scene, event: Event) -> tuple[str, list[tuple[int, int, str]]]:
    """Return dtype and hashes of the stretches that hold the parameter."""
    trace, record = scene.alignment.trace, event.record
    found = [(s.param_offset, s.numel, stretch_hash(trace, record, s)) for s in event.spans]
    return str(record.dtype), found


def _check_count(scene: Scene, unit: _Unit, more: int) -> None:
    """Check that the optimizer counts this step, as its bias correction depends on it."""
    param = unit.before.param
    counts = [
        None if facts is None else count_of(facts.facts, param)
        for facts in (_facts(scene, step, unit) for step in (scene.step, scene.step + 1))
    ]
    state = _facts(scene, scene.step, unit)
    if counts[1] is None or (state is not None and state.facts.get("shared_count")):
        return
    before, after = counts[0] or 0.0, counts[1]
    if after == before + more:
        scene.ledger.passed(LAW)
        return
    place = Place(LAW, scene.step, None, unit.rank, param, "optimizer_state")
    cause = "stale" if after == before else "double_counted" if after > before + more else "unknown"
    detail = (
        f"The optimizer had counted {before:g} steps of {scene.name(param)}, and counts {after:g} after "
        f"this one instead of {before + more:g}."
    )
    simple_finding(scene, place, cause, detail, expected=before + more, found=after)


# -- what is recorded ------------------------------------------------------------------------------


def _step(
    scene: Scene, unit: _Unit, rule: Rule, given: Event, start: int, stop: int
) -> Step | Lack:
    """Return one stretch of a parameter with all that its step depends on."""
    alignment = scene.alignment
    if unit.before.record.key is None or unit.after.record.key is None:
        return Lack("skip", _DIGESTS)
    state = _state(scene, scene.step, unit)
    if isinstance(state, Lack):
        return state
    weight, grad = alignment.cut(unit.before, start, stop), alignment.cut(given, start, stop)
    if weight is None or grad is None:
        return Lack("gap", "clipped_grad holds other elements than master_weight")
    moments: dict[str, Float64] = {}
    dtypes = [unit.before.dtype, unit.after.dtype, given.dtype]
    for moment in MOMENTS[rule.name]:
        event = state.get(moment)
        if event is None:
            continue
        values = alignment.cut(event, start, stop)
        if values is None:
            return Lack("gap", f"{moment} holds other elements than master_weight")
        moments[moment] = values
        dtypes.append(event.dtype)
    if isinstance(rule.settings, Adam) and rule.settings.step > 1 and len(moments) < 2:
        return Lack("gap", "the moments have no record, and no gap says why")
    return Step(
        weight, grad, moments, rule.settings, rule.kernel, coarsest(*dtypes),
        before=_before(scene, unit, start, stop), unclipped=_unclipped(scene, unit, start, stop),
    )  # fmt: skip


def _before(scene: Scene, unit: _Unit, start: int, stop: int) -> Float64 | None:
    """Return what the optimizer was given in the step before."""
    previous = scene.alignment.previous_step(scene.step)
    if previous is None:
        return None
    events = scene.alignment.events(previous, None, "clipped_grad", unit.rank, unit.before.param)
    return scene.alignment.cut(events[-1], start, stop) if events else None


def _unclipped(scene: Scene, unit: _Unit, start: int, stop: int) -> Float64 | None:
    events = scene.alignment.events(scene.step, None, "master_grad", unit.rank, unit.before.param)
    return scene.alignment.cut(events[-1], start, stop) if events else None


def _others(scene: Scene, unit: _Unit, numel: int) -> Iterator[tuple[str, Float64]]:
    """Yield what other parameters of the rank hold after the step, where they are as long."""
    for parameter in scene.alignment.captured():
        if parameter.index == unit.before.param:
            continue
        units = _units(scene, unit.rank, parameter.index)
        for other in [] if isinstance(units, Lack) else units:
            for span in other.before.spans:
                if span.numel != numel:
                    continue
                stop = span.param_offset + numel
                given = scene.alignment.events(
                    scene.step, None, "clipped_grad", unit.rank, parameter.index
                )
                rule = _rule(scene, scene.step, other)
                if isinstance(rule, Lack) or not given:
                    continue
                step = _step(scene, other, rule, given[-1], span.param_offset, stop)
                if not isinstance(step, Lack):
                    yield parameter.name, step.take().weight.value


def _facts(scene: Scene, step: int, unit: _Unit) -> Record | None:
    """Return the record that says how a unit is stepped."""
    for record in scene.alignment.records(step, "optimizer_state", unit.rank):
        if record.unit == unit.unit and "class" in record.facts:
            return record
    return None


def _state(scene: Scene, step: int, unit: _Unit) -> dict[str, Event] | Lack:
    """Return the moments that a unit begins a step with; without those that do not exist yet."""
    alignment, rank = scene.alignment, unit.rank
    there = Scene(alignment, step, scene.ledger)
    lack = there.lack("optimizer_state", None, rank)
    if lack is not None:
        return lack
    events = alignment.events(step, None, "optimizer_state", rank, unit.before.param)
    return {
        str(event.record.facts.get("moment")): event
        for event in events
        if event.record.facts.get("of") == unit.unit and event.record.key is not None
    }


def _next_state(scene: Scene, unit: _Unit) -> dict[str, Event] | Lack:
    after = scene.step + 1
    if after not in scene.alignment.steps:
        return Lack("skip", "the moments after the step: the trace does not hold the next one")
    if scene.alignment.step_end(after, unit.rank).facts.get("checkpoint_loaded"):
        return Lack("skip", "a checkpoint was loaded between two steps")
    return _state(scene, after, unit)


def _rule(scene: Scene, step: int, unit: _Unit) -> Rule | Lack:
    """Return how a parameter is stepped, or why that is not known."""
    lack = scene.lack("optimizer_state", None, unit.rank)
    if lack is not None:
        return lack
    record = _facts(scene, step, unit)
    if record is None:
        return Lack("gap", "optimizer_state has no record, and no gap says why")
    return rule_of(record.facts, unit.before.param)
