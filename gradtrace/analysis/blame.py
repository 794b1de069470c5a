"""Say which of two runs is to blame for a divergence: the one that broke a law of its own.

Both traces are audited up to the step at which they part. A broken law counts if it lies at or
upstream of the divergence, and if the other run does not break it in just the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradtrace.analysis.results import AuditResult, Blame, Divergence, Finding, Side
from gradtrace.trace.points import depth, moment

_NEVER: Final = 9


def blame(
    first: Divergence, baseline: AuditResult, candidate: AuditResult, *, cause: str, detail: str
) -> Blame:
    """Blame a divergence on the side whose law is broken there.

    Args:
        first: where the runs part.
        baseline, candidate: audits of both runs.
        cause, detail: what to say when both runs obey every law.
    """
    shared = {_signature(finding) for finding in baseline.findings}
    shared &= {_signature(finding) for finding in candidate.findings}
    ours = _nearest(first, baseline.findings, shared)
    theirs = _nearest(first, candidate.findings, shared)
    if ours[0] == theirs[0] == _NEVER:
        alike = _nearest(first, baseline.findings, set())
        if alike[1] is None:
            return Blame(
                "neither", None, cause, first.step, first.micro_step, None, first.param, detail
            )
        told = f"Both runs break {alike[1].law} alike. {alike[1].detail}"
        return _from(first, alike[1], "both", told)
    if ours[0] == theirs[0]:
        assert ours[1] is not None and theirs[1] is not None
        told = f"Baseline: {ours[1].detail} Candidate: {theirs[1].detail}"
        return _from(first, ours[1], "both", told)
    if ours[0] < theirs[0]:
        assert ours[1] is not None
        return _from(first, ours[1], "baseline", ours[1].detail)
    assert theirs[1] is not None
    return _from(first, theirs[1], "candidate", theirs[1].detail)


def standing(baseline: AuditResult, candidate: AuditResult) -> Blame | None:
    """Name a broken law where the runs do not part: that two runs agree proves neither right."""
    ours, theirs = baseline.first, candidate.first
    finding = ours or theirs
    if finding is None:
        return None
    if ours is not None and theirs is not None:
        side: Side = "both"
        alike = _signature(ours) == _signature(theirs)
        told = f"Both runs break {ours.law} alike. {ours.detail}"
        if not alike:
            told = f"Baseline: {ours.detail} Candidate: {theirs.detail}"
    else:
        side, told = ("candidate" if ours is None else "baseline"), finding.detail
    return Blame(
        side,
        finding.law,
        finding.cause,
        finding.step,
        finding.micro_step,
        finding.rank if finding.guilty is None else finding.guilty,
        finding.param,
        told,
    )


def _from(first: Divergence, finding: Finding, side: Side, detail: str) -> Blame:
    """Turn a finding into blame, for the parameter that diverges if the finding is about it too."""
    param, rank = finding.param, finding.rank
    if first.param in finding.folded:
        param, rank = first.param, None
    if finding.guilty is not None:
        rank = finding.guilty
        detail = f"Shown for {finding.param}: {detail}"
    return Blame(
        side, finding.law, finding.cause, finding.step, finding.micro_step, rank, param, detail
    )


def _signature(finding: Finding) -> tuple[object, ...]:
    """Return what makes two runs' findings the same fault."""
    return (finding.law, finding.cause, finding.step, finding.micro_step, finding.param)


def _nearest(
    first: Divergence, findings: Sequence[Finding], shared: set[tuple[object, ...]]
) -> tuple[int, Finding | None]:
    """Return the finding that best explains a divergence, and how well (0 is best)."""
    best: tuple[int, Finding | None] = (_NEVER, None)
    for finding in findings:
        if _signature(finding) in shared or not _upstream(finding, first):
            continue
        if finding.step < first.step:
            how = 2
        else:
            how = (
                0 if finding.param is None or first.param in (finding.param, *finding.folded) else 1
            )
        if how < best[0]:
            best = (how, finding)
    return best


def _upstream(finding: Finding, first: Divergence) -> bool:
    """Say whether a broken law lies at or before the divergence in causal order."""
    # A norm that was reported wrong is found at its gradients, and can harm what is clipped by it.
    point = "clipped_grad" if finding.law == "unscale_clip" else finding.point
    return _place(finding.step, finding.micro_step, point) <= _place(
        first.step, first.micro_step, first.point
    )


def _place(step: int, micro_step: int | None, point: str) -> tuple[int, int, int]:
    return (step, moment(point, micro_step), depth(point))
