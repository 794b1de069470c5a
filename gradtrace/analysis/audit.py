"""Judge one trace by itself: every hop of the gradient path against its own recorded inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from gradtrace.analysis.agree import across_ranks, agreed, folded
from gradtrace.analysis.align import Alignment
from gradtrace.analysis.consequences import drop_consequences
from gradtrace.analysis.laws import (
    accumulate,
    accumulate_local,
    end_to_end,
    master,
    pack,
    partition,
    publish,
    reduce,
    replicate,
    replicate_values,
    seed,
    together,
    unscale_clip,
    update,
)
from gradtrace.analysis.laws.common import Found, Ledger, Scene
from gradtrace.analysis.reported import reported, reported_notes
from gradtrace.analysis.results import LAWS, AuditResult, AuditVerdict, Finding, Hop
from gradtrace.trace.points import ON_REQUEST, POINTS, moment
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Gap

# In the order of the law graph; `LAWS` gives the depth.
PARAMETER_LAWS: Final[tuple[Callable[[Scene, int], None], ...]] = (
    replicate.check_param,
    accumulate_local.check_param,
    pack.check_param,
    reduce.check_param,
    partition.check_param,
    accumulate.check_param,
    master.check_param,
    unscale_clip.check_param,
    end_to_end.check_param,
    update.check_param,
    publish.check_param,
)
# A pass must rest on some hop of the gradient, not on scalars, layouts and padding alone.
HOPS: Final = ("accumulate_local", "pack", "reduce", "accumulate", "end_to_end")
_NAMED: Final = 3
_LAST: Final = 2**62  # sorts behind every parameter and micro-step


def audit(trace: str | Path | Trace, *, steps: Iterable[int] | None = None) -> AuditResult:
    """Check every law on one trace.

    Args:
        trace: the trace directory, or an open trace.
        steps: judge only these of its complete steps; all by default.

    Returns:
        ``pass`` when every checked law holds and nothing was lost, ``fail`` when a law is broken,
        ``inconclusive`` otherwise.

    Raises:
        GradtraceError: the trace cannot be read; see `gradtrace.trace.reader.open_trace`.
    """
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    return audit_alignment(Alignment(opened), steps=steps)


def audit_alignment(alignment: Alignment, *, steps: Iterable[int] | None = None) -> AuditResult:
    """Check every law on an aligned trace; see `audit`."""
    chosen = alignment.steps
    # A gap of a step that never ended is told too: what was planned there is lost.
    stray = [
        gap
        for rank in alignment.trace.ranks.values()
        for gap in rank.gaps
        if steps is None and gap.step not in alignment.steps
    ]
    if steps is not None:
        wanted = set(steps)
        chosen = tuple(step for step in chosen if step in wanted)
    ledger = Ledger()
    hidden: Counter[str] = Counter()
    windows: list[str | None] = []
    for step in chosen:
        scene = Scene(alignment, step, ledger)
        seen = len(ledger.found)
        replicate.check(scene)
        replicate_values.check(scene)
        seed.check(scene)
        master.check_padding(scene)
        unscale_clip.check_norm(scene)
        master.check_overflow(scene)
        if step == chosen[0]:
            partition.check_tiling(scene)
        for parameter in alignment.captured():
            if not parameter.trainable:
                continue
            for law in PARAMETER_LAWS:
                law(scene, parameter.index)
        together.check_collectives(scene)
        hidden.update(drop_consequences(scene, seen))
        windows.append(seed.short_window(scene))
    reports = reported(alignment.trace) if steps is None else ()
    findings = folded(sorted(across_ranks(agreed(ledger.found)), key=_key(alignment)))
    return AuditResult(
        verdict=_verdict(alignment, chosen, ledger, findings, stray),
        first=findings[0] if findings else None,
        findings=tuple(findings),
        laws=ledger.counts(),
        notes=(
            *_notes(alignment, chosen, ledger, hidden, stray),
            *(note for note in windows if note is not None),
            *reported_notes(reports),
        ),
        reported=reports,
        lost=any(counter for counter in ledger.lost.values()),
        path=_path(alignment, findings[0]) if findings else (),
    )


def _path(alignment: Alignment, first: Finding) -> tuple[Hop, ...]:
    """Judge the hops of the first finding's parameter alone, through the step of the finding."""
    param = next((p.index for p in alignment.parameters if p.name == first.param), None)
    if param is None:
        return ()
    ledger = Ledger()
    scene = Scene(alignment, first.step, ledger)
    for law in PARAMETER_LAWS:
        law(scene, param)
    hops = []
    for name, count in ledger.counts().items():
        if count.checked or count.skipped:
            reason = None if count.checked else next(iter(count.skip_reasons))
            hops.append(Hop(name, count.checked, count.broken, count.skipped, reason))
    return tuple(hops)


def _verdict(
    alignment: Alignment,
    steps: Sequence[int],
    ledger: Ledger,
    findings: Sequence[Finding],
    stray: Sequence[Gap],
) -> AuditVerdict:
    if findings:
        return "fail"
    lost = any(counter for counter in ledger.lost.values())
    gaps = stray or any(alignment.step_gaps(step) for step in steps)
    if lost or gaps or not steps or not any(ledger.checked[law] for law in HOPS):
        return "inconclusive"
    return "pass"


def _key(alignment: Alignment) -> Callable[[Found], tuple[bool, int, int, int, int, str]]:
    def key(entry: Found) -> tuple[bool, int, int, int, int, str]:
        finding = entry.finding
        order = -1 if entry.param is None else alignment.backward_order(entry.param)
        return (
            # A wrong report of the norm matters less than wrong gradients, of later steps too.
            entry.param is None and finding.law == "unscale_clip",
            finding.step,
            moment(finding.point, finding.micro_step),
            LAWS.index(finding.law),
            order,
            finding.param or "",
        )

    return key


def _notes(
    alignment: Alignment,
    steps: Sequence[int],
    ledger: Ledger,
    hidden: Counter[str],
    stray: Sequence[Gap],
) -> Iterable[str]:
    yield from alignment.trace.notes
    if not steps:
        yield "no complete step to judge"
    elif not any(ledger.checked[law] for law in HOPS):
        yield "no hop of the gradient path was checked: the plan records too few points or parameters"
    for step in steps:
        gaps = alignment.step_gaps(step)
        if gaps:
            reasons = Counter(gap.reason for gap in gaps)
            told = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(_NAMED))
            yield f"step {step}: {len(gaps)} records were lost ({told})"
        if alignment.partial(step):
            yield f"step {step} was wrapped in the middle: laws that need its beginning are skipped"
    if stray:
        reasons = Counter(f"step {gap.step} of rank {gap.rank}: {gap.reason}" for gap in stray)
        told = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(_NAMED))
        yield f"records were lost in steps that never ended ({told})"
    for law in LAWS:
        for reason, count in ledger.lost[law].most_common(_NAMED):
            yield f"{law}: {count} checks could not be made: {reason}"
    for law, count in hidden.items():
        yield f"{law}: {count} broken checks follow from a finding above and are not listed"
    left_out = [
        point.name
        for point in POINTS
        if alignment.ranks
        and point.name not in ON_REQUEST
        and alignment.status(point.name) == "not_planned"
    ]
    if left_out:
        yield f"not planned, so not judged: {', '.join(left_out)}"
