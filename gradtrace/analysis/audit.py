"""Judge one trace by itself: every hop of the gradient path against its own recorded inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gradtrace.analysis.align import Alignment
from gradtrace.analysis.diagnose import SURE
from gradtrace.analysis.laws import (
    accumulate,
    accumulate_local,
    end_to_end,
    master,
    pack,
    partition,
    reduce,
    replicate,
    seed,
    unscale_clip,
)
from gradtrace.analysis.laws.common import Found, Ledger, Scene
from gradtrace.analysis.results import LAWS, AuditResult, AuditVerdict, Finding
from gradtrace.trace.points import POINTS
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
)
# A pass must rest on some hop of the gradient, not on scalars, layouts and padding alone.
HOPS: Final = ("accumulate_local", "pack", "reduce", "accumulate", "end_to_end")
_AFTER_ALL: Final = 2**62  # sorts a null micro_step behind every micro-step
_NAMED: Final = 3
CLEARLY: Final = 1.2  # how much more support another cause must have
TINY: Final = 8  # elements; fewer are explained by too much


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
    for step in chosen:
        scene = Scene(alignment, step, ledger)
        seen = len(ledger.found)
        replicate.check(scene)
        seed.check(scene)
        master.check_padding(scene)
        unscale_clip.check_norm(scene)
        if step == chosen[0]:
            partition.check_tiling(scene)
        for parameter in alignment.captured():
            if not parameter.trainable:
                continue
            for law in PARAMETER_LAWS:
                law(scene, parameter.index)
        hidden.update(_drop_consequences(scene, seen))
    findings = _folded(sorted(_across_ranks(_agreed(ledger.found)), key=_key(alignment)))
    return AuditResult(
        verdict=_verdict(alignment, chosen, ledger, findings, stray),
        first=findings[0] if findings else None,
        findings=tuple(findings),
        laws=ledger.counts(),
        notes=tuple(_notes(alignment, chosen, ledger, hidden, stray)),
        lost=any(counter for counter in ledger.lost.values()),
    )


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


def _drop_consequences(scene: Scene, seen: int) -> Counter[str]:
    """Take out of a step's findings those that an earlier broken hop explains.

    Every hop is judged by its own recorded inputs, so a fault breaks one law. Three exceptions: the
    end-to-end law contains all others, where the ranks' buckets hold different parameters, the sum of
    neither is what it should be, and what differs between ranks came from a hop that broke on one.
    """
    ledger = scene.ledger
    fresh = ledger.found[seen:]
    mixed: set[tuple[int | None, int | None]] = set()
    if any(entry.finding.cause == "order_mismatch" for entry in fresh):
        mixed.update(replicate.mismatched(scene))
    hops: set[int | None] = {
        entry.param
        for entry in fresh
        if entry.finding.law not in {"unscale_clip", "end_to_end", "seed", "replicate"}
    }
    hops.update(param for _, param in mixed)
    judged = {e.finding.param for e in fresh if e.finding.law not in {"seed", "replicate"}}
    kept: list[Found] = []
    dropped: Counter[str] = Counter()
    for entry in fresh:
        follows = entry.finding.law == "end_to_end" and entry.param in hops
        follows |= (
            entry.finding.law == "replicate" and entry.numel > 0 and entry.finding.param in judged
        )
        follows |= (
            entry.finding.law == "reduce" and (entry.finding.micro_step, entry.param) in mixed
        )
        if follows:
            dropped[entry.finding.law] += 1
        else:
            kept.append(entry)
    ledger.found[seen:] = kept
    return dropped


def _agreed(found: Sequence[Found]) -> list[Found]:
    """Let the findings of one hop agree on a cause, where several causes fit.

    A few elements fit many causes, some by chance; what all parameters of the hop say together tells
    which it is. A finding keeps its own cause unless one with more support fits it as well. One of
    less than `TINY` elements that nothing fits follows the others.
    """
    hops: dict[tuple[object, ...], list[int]] = {}
    for at, entry in enumerate(found):
        finding = entry.finding
        hops.setdefault((finding.law, finding.step, finding.micro_step), []).append(at)
    agreed = list(found)
    for places in hops.values():
        support = _support([found[at] for at in places])
        for at in places:
            agreed[at] = _agreeing(found[at], support)
    return agreed


_Support = dict[tuple[str, str | None], float]


def _support(found: Sequence[Found]) -> _Support:
    """Add up how much speaks for each cause, and for each sentence; what was chosen counts twice."""
    support: _Support = {}
    for entry in found:
        best: dict[str, float] = {}
        for candidate in entry.also:
            key = (candidate.cause, candidate.detail)
            support[key] = support.get(key, 0.0) + candidate.score
            best[candidate.cause] = max(best.get(candidate.cause, 0.0), candidate.score)
        for cause, score in best.items():
            weight = 2 if cause == entry.finding.cause else 1
            support[cause, None] = support.get((cause, None), 0.0) + weight * score
    return support


def _agreeing(entry: Found, support: _Support) -> Found:
    finding, tiny = entry.finding, entry.numel < TINY
    usable = {candidate.cause for candidate in entry.also}
    if tiny and not usable:
        usable.update(cause for cause, detail in support if detail is None)
    if tiny and ("partly_overwritten", None) in support:
        usable.add("partly_overwritten")  # it may lie in such a range as a whole
    own = support.get((finding.cause, None), 0.0)
    better = [c for c in usable if support[c, None] > max(CLEARLY * own, SURE)]
    cause = max(better, key=lambda c: (support[c, None], c), default=finding.cause)
    fitting = [candidate for candidate in entry.also if candidate.cause == cause]
    guilty = None
    if not fitting:
        if cause == finding.cause:
            return entry
        words = f"{finding.point} is too small here to tell alone."
    else:
        chosen = max(fitting, key=lambda c: support[c.cause, c.detail])
        words, guilty = chosen.detail, chosen.rank
        mine = [c for c in fitting if finding.detail.startswith(c.detail)]
        if mine and support[cause, words] <= CLEARLY * support[cause, mine[0].detail]:
            return entry
    detail = f"{words} {entry.evidence}".rstrip()
    return replace(entry, finding=replace(finding, cause=cause, detail=detail, guilty=guilty))


def _across_ranks(found: Sequence[Found]) -> list[Found]:
    """Make one finding of those that several ranks (or stretches) show of one parameter."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for entry in found:
        finding = entry.finding
        hop = (finding.law, finding.step, finding.micro_step)
        groups.setdefault((*hop, finding.cause, entry.param, finding.point), []).append(entry)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[Found]) -> Found:
    def place(entry: Found) -> tuple[bool, int]:
        index = entry.finding.index
        return index is None, index or 0

    first = min(group, key=place)
    ranks = {entry.finding.rank for entry in group}
    largest = [e.finding.max_abs for e in group if e.finding.max_abs is not None]
    relative = [e.finding.rel_l2 for e in group if e.finding.rel_l2 is not None]
    finding = replace(
        first.finding,
        rank=first.finding.rank if len(ranks) == 1 else None,
        max_abs=max(largest, default=None),
        rel_l2=max(relative, default=None),
    )
    if len(ranks) > 1:
        known = {rank for rank in ranks if rank is not None}
        others = sorted(known - {first.finding.rank})
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        finding = replace(
            finding, detail=f"{finding.detail} On rank {first.finding.rank}; also on rank {shown}."
        )
    return replace(first, finding=finding)


def _key(alignment: Alignment) -> Callable[[Found], tuple[int, int, int, int, str]]:
    def key(entry: Found) -> tuple[int, int, int, int, str]:
        finding = entry.finding
        order = -1 if entry.param is None else alignment.backward_order(entry.param)
        if entry.param is None and finding.law == "unscale_clip":
            order = _AFTER_ALL  # a wrong report of the norm matters less than wrong gradients
        return (
            finding.step,
            _AFTER_ALL if finding.micro_step is None else finding.micro_step,
            LAWS.index(finding.law),
            order,
            finding.param or "",
        )

    return key


def _folded(found: Sequence[Found]) -> list[Finding]:
    """Fold findings that differ only in the parameter into the first of them."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for entry in found:
        finding = entry.finding
        key = (finding.law, finding.step, finding.micro_step, finding.cause, finding.point)
        groups.setdefault(key, []).append(entry)
    findings: list[Finding] = []
    for group in groups.values():
        # The head is the first that shows the cause by itself; the tiny ones follow.
        head = next((entry for entry in group if _shows(entry)), group[0])
        names = [entry.finding.param for entry in group if entry is not head]
        folded = tuple(name for name in names if name is not None)
        findings.append(replace(head.finding, folded=folded))
    return findings


def _shows(entry: Found) -> bool:
    return any(candidate.cause == entry.finding.cause for candidate in entry.also)


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
        if alignment.ranks and alignment.status(point.name) == "not_planned"
    ]
    if left_out:
        yield f"not planned, so not judged: {', '.join(left_out)}"
