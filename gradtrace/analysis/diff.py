"""Find the first place where two runs disagree by more than rounding can explain, and who is to blame.

Steps are walked in order. Until the runs part, what their weights may have drifted apart is known:
nothing (every gradient so far was the same, bit by bit), or something within rounding, which then
grows. Growth is followed and never called divergence; hops are judged by their own inputs all along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gradtrace.analysis.align import Alignment
from gradtrace.analysis.audit import audit_alignment
from gradtrace.analysis.blame import blame, standing
from gradtrace.analysis.bounds import coarsest
from gradtrace.analysis.clipping import ClipReport, compare_clipped
from gradtrace.analysis.compare import (
    Mode,
    Outcome,
    Step,
    Tally,
    compare_parameter,
)
from gradtrace.analysis.envelope import measure, open_samples
from gradtrace.analysis.envelope import notes as envelope_notes
from gradtrace.analysis.gate import Gate, compare_runs, some
from gradtrace.analysis.growth import distance, grown
from gradtrace.analysis.origins import compare_origins
from gradtrace.analysis.precision import lost_precision
from gradtrace.analysis.reported import pair_notes, paired_reports
from gradtrace.analysis.results import (
    AuditResult,
    Blame,
    DiffResult,
    DiffVerdict,
    Divergence,
)
from gradtrace.analysis.sides import Side
from gradtrace.analysis.unproven import Place, judge, judge_losses
from gradtrace.analysis.walk import Walk, begin, end, growth_of
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import Trace, open_trace

COUNTS: Final = ("compared", "equal", "rounding", "undecided", "diverged", "left_out")
_NAMED: Final = 3


def diff(
    baseline: str | Path | Trace,
    candidate: str | Path | Trace,
    *,
    envelope: Sequence[str | Path | Trace] = (),
) -> DiffResult:
    """Compare two runs, and audit both.

    Args:
        baseline, candidate: trace directories, or open traces.
        envelope: traces of the baseline run again from perturbed weights, to hold the candidate against.

    Raises:
        NotAnEnvelopeError: one of ``envelope`` is no perturbed run of the baseline.
        GradtraceError: a trace cannot be read; see `gradtrace.trace.reader.open_trace`.
    """
    opened = [
        Alignment(trace if isinstance(trace, Trace) else open_trace(trace))
        for trace in (baseline, candidate)
    ]
    pairs = paired_reports(opened[0].trace, opened[1].trace)
    result = _diff(opened, envelope)
    notes = (*result.notes, *pair_notes(pairs))
    return replace(result, reported=pairs, notes=notes)


def _diff(opened: Sequence[Alignment], envelope: Sequence[str | Path | Trace]) -> DiffResult:
    gate = compare_runs(*opened)
    common = sorted(set(opened[0].steps) & set(opened[1].steps))
    problem = gate.problem
    if problem is None and not common:
        problem = "no step is complete in both traces"
    if problem is None and not gate.pairs:
        problem = "no parameter was captured by both runs"
    trace_notes = _trace_notes(opened, common)
    if problem is not None:
        counts = dict.fromkeys(COUNTS, 0)
        notes = (problem, *gate.notes, *trace_notes)
        return DiffResult("not_comparable", None, None, counts, notes)
    samples = open_samples(opened[0], gate, envelope)
    sides = (Side("baseline", opened[0]), Side("candidate", opened[1]))
    walk = Walk()
    for step in common:
        if walk.first is None:
            _compare_step(walk, gate, sides, step)
        else:
            apart = distance(sides, gate.pairs, step)
            walk.growth.append(grown(sides, gate.pairs, step, apart))
    judged = [step for step in common if walk.first is None or step <= _step_of(walk.first)]
    audits = tuple(audit_alignment(side.align, steps=judged) for side in sides)
    found = None
    if samples:
        found = measure(sides[0], samples, walk.growth)
        walk.notes.update(dict.fromkeys(envelope_notes(samples, walk.growth)))
    result = _result(walk, gate, sides, judged, (audits[0], audits[1]), trace_notes)
    return replace(result, envelope=found)


def _step_of(outcome: Outcome) -> int:
    return outcome.divergence.step


def _trace_notes(opened: Sequence[Alignment], common: Sequence[int]) -> tuple[str, ...]:
    notes: list[str] = []
    for name, side in zip(("baseline", "candidate"), opened, strict=True):
        notes += [f"{name}: {note}" for note in side.trace.notes]
        alone = [step for step in side.steps if step not in set(common)]
        if alone:
            steps = some([str(step) for step in alone])
            count = "1 step" if len(alone) == 1 else f"{len(alone)} steps"
            notes.append(f"only the {name} holds {count} ({steps}): not compared")
    return tuple(notes)


# -- one step --------------------------------------------------------------------------------------


def _mode(walk: Walk, sides: tuple[Side, Side], step: int) -> Mode | None:
    obstacle = sides[0].obstacle() or sides[1].obstacle()
    counts = [len(side.align.micro_steps(step)) for side in sides]
    if sides[0].world_size == sides[1].world_size and counts[0] == counts[1]:
        if obstacle is not None:
            walk.note(f"{obstacle}: only what belongs to one rank is compared")
            return "local"
        return "full"
    reason = (
        f"world size {sides[0].world_size} against {sides[1].world_size}"
        if sides[0].world_size != sides[1].world_size
        else f"{counts[0]} micro-steps against {counts[1]} in step {step}"
    )
    if obstacle is not None:
        walk.doubt(f"{obstacle}, and {reason}: nothing corresponds")
        return None
    walk.note(
        f"{reason}: only the averaged gradient at the boundary, divided by the sum of the measured "
        "seeds, and what follows from it are compared; points before it are left out"
    )
    return "boundary"


def _compare_step(walk: Walk, gate: Gate, sides: tuple[Side, Side], number_: int) -> None:
    begin(walk, sides, number_)
    mode = _mode(walk, sides, number_)
    if mode is None:
        return
    dtype = coarsest([side.path.dtype.name for side in sides])
    tally = Tally()
    origins = compare_origins(
        sides[0].align, sides[1].align, number_, corresponding=mode != "boundary"
    )
    for text in origins.notes(number_, begins=walk.last is None, same_start=walk.same_start):
        walk.note(text)
    step = Step(*sides, number_, mode, dtype, tally, origins)
    if step.partial:
        walk.note(f"step {number_} was wrapped in the middle: only local gradients are compared")
    for pair in gate.pairs:
        compare_parameter(step, pair)
    report = compare_clipped(step, gate.pairs, all_captured=gate.all_captured)
    stories = judge(walk, step, gate.pairs)
    if mode == "full" and not step.recorded("local_grad"):
        stories.update(judge_losses(walk, step))
    if tally.lost:
        walk.doubt(f"step {number_}: records were lost, so not compared: {some(list(tally.lost))}")
    walk.counts.update(tally.counts)
    walk.widest = max(walk.widest, (tally.widest[0], f"{tally.widest[1]}, step {number_}"))
    walk.growth.append(growth_of(step, gate.pairs))
    lost = None if walk.drifted else lost_precision(step)
    if lost is not None:
        walk.note(lost)
    if tally.outcomes:
        walk.first = min(tally.outcomes, key=lambda outcome: outcome.sort_key)
        walk.story = _story(step, walk.first.divergence, stories, report)
    end(walk, step)


def _story(
    step: Step,
    first: Divergence,
    stories: dict[Place, tuple[str, str]],
    report: ClipReport | None,
) -> tuple[str, str]:
    """Return what to say of the first divergence when both runs obey all laws."""
    place = (first.point, first.micro_step, first.rank)
    if place in stories:
        cause, detail = stories[place]
        if step.mode == "boundary":
            detail += " Both runs' own hops explain what they recorded."
        return cause, detail
    if first.point == "clipped_grad" and report is not None:
        return "scaled", report.detail
    return "unknown", (
        f"{first.point} differs by more than rounding and the differences of its inputs explain, "
        "and no law that was checked is broken at or before it."
    )


# -- the result ------------------------------------------------------------------------------------


def _result(
    walk: Walk,
    gate: Gate,
    sides: tuple[Side, Side],
    steps: Sequence[int],
    audits: tuple[AuditResult, AuditResult],
    trace_notes: Sequence[str],
) -> DiffResult:
    for side, result in zip(sides, audits, strict=True):
        if result.lost:
            walk.doubts[f"the {side.name} lacks records that it should hold: see its audit"] = None
    verdict = _verdict(walk, sides, steps)
    first: Divergence | None = None
    guilt: Blame | None = None
    if walk.first is not None:
        first = walk.first.divergence
        cause, detail = walk.story
        guilt = blame(first, *audits, cause=cause, detail=detail)
        first = _located(first, guilt, gate, sides)
        walk.notes.update(dict.fromkeys(_order_notes(first, guilt)))
    else:
        guilt = standing(*audits)
    counts = {name: walk.counts[name] for name in COUNTS}
    counts["compared"] = sum(counts[name] for name in COUNTS[1:-1])
    closing = _closing_notes(walk, sides, steps, audits)
    notes = [*gate.notes, *trace_notes, *walk.notes, *closing]
    if verdict == "inconclusive":  # the reason comes first: reports make it their headline
        if not counts["compared"]:
            walk.doubts["nothing that both traces hold could be compared"] = None
        notes = [*walk.doubts, *closing, *gate.notes, *trace_notes, *walk.notes]
    return DiffResult(
        verdict=verdict,
        first=first,
        blame=guilt,
        counts=counts,
        notes=tuple(dict.fromkeys(notes)),
        growth=tuple(walk.growth),
        baseline_audit=audits[0],
        candidate_audit=audits[1],
    )


def _order_notes(first: Divergence, guilt: Blame) -> list[str]:
    """Explain blame that lies before the first difference."""
    late = 2**62
    blamed = (guilt.step, late if guilt.micro_step is None else guilt.micro_step)
    seen = (first.step, late if first.micro_step is None else first.micro_step)
    if guilt.law is None or guilt.step is None or blamed >= seen:
        return []
    when = "" if guilt.micro_step is None else f", micro-step {guilt.micro_step}"
    return [
        f"the blamed law breaks at step {guilt.step}{when}, before the first difference: what the runs "
        "hold in between does not correspond, and was left out of the comparison"
    ]


def _verdict(walk: Walk, sides: tuple[Side, Side], steps: Sequence[int]) -> DiffVerdict:
    if walk.first is not None:
        return "diverged"
    gaps = any(side.align.step_gaps(step) for side in sides for step in steps)
    compared = walk.counts["equal"] + walk.counts["rounding"] + walk.counts["undecided"]
    if walk.doubts or gaps or not compared:
        return "inconclusive"
    return "rounding" if walk.counts["rounding"] else "agree"


def _located(first: Divergence, guilt: Blame, gate: Gate, sides: tuple[Side, Side]) -> Divergence:
    """Name the rank that holds the wrong element, and the guilty side's boundary claim."""
    guilty = [side for side in sides if side.name == guilt.side]
    claim = (guilty or [sides[0]])[0].boundary(first.step, first.micro_step)
    first = replace(first, boundary=claim)
    if first.rank is not None or first.param is None or first.index is None:
        return first
    if sides[0].world_size != sides[1].world_size:
        return first
    pair = next(pair for pair in gate.pairs if pair.name == first.param)
    owners = {
        _owner(side, pair.baseline if side is sides[0] else pair.candidate, first.index)
        for side in guilty or sides
    }
    return replace(first, rank=owners.pop() if len(owners) == 1 else None)


def _owner(side: Side, param: int, index: int) -> int | None:
    if side.replicated:
        return None
    for rank in side.align.ranks:
        for span in side.align.own_spans(rank, param):
            if span.param_offset <= index < span.param_offset + span.numel:
                return rank
    return None


def _closing_notes(
    walk: Walk,
    sides: tuple[Side, Side],
    steps: Sequence[int],
    audits: tuple[AuditResult, AuditResult],
) -> list[str]:
    notes: list[str] = []
    for side in sides:
        gaps = Counter(gap.reason for step in steps for gap in side.align.step_gaps(step))
        if gaps:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in gaps.most_common(_NAMED))
            after = "; the first divergence may be an earlier one" if walk.first else ""
            notes.append(f"{side.name}: {gaps.total()} records were lost ({reasons}){after}")
    if walk.by_size:
        notes.append(
            "what has no proven bound (local gradients, say) differs, and is taken for rounding "
            "because of the size of the difference: this is a heuristic, not a proof"
        )
    if walk.widest[0] > 0 and walk.first is None:
        notes.append(
            f"the largest difference that rounding makes is {walk.widest[0]:.2g} of the norm: "
            f"{walk.widest[1]}"
        )
    notes += [
        f"{point} was not planned by the {side.name}: not compared"
        for point in POINT_NAMES
        for side, other in (sides, sides[::-1])
        if side.align.status(point) == "not_planned" and other.align.recorded(point)
    ]
    for side, result in zip(sides, audits, strict=True):
        if result.first is not None and walk.first is None:
            notes.append(
                f"the {side.name} breaks a law of its own ({result.first.law}, "
                f"{result.first.cause}, step {result.first.step}): see its audit. That two runs "
                "agree does not prove either right"
            )
    return notes
