"""Define what audit and diff find: frozen data whose ``to_dict`` is what ``--json`` prints.

The members and their order are those of DESIGN section 7; nothing here opens a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gradtrace.analysis.reported import Reported
from gradtrace.analysis.series import Envelope, Growth
from gradtrace.analysis.series import encoded as _number

AUDIT_FORMAT: Final = "gradtrace.audit"
DIFF_FORMAT: Final = "gradtrace.diff"
RESULT_VERSION: Final = 1

AuditVerdict = Literal["pass", "fail", "inconclusive"]
DiffVerdict = Literal["agree", "rounding", "diverged", "not_comparable", "inconclusive"]
Side = Literal["baseline", "candidate", "both", "neither"]

LAWS: Final = (
    "replicate",
    "seed",
    "accumulate_local",
    "pack",
    "reduce",
    "partition",
    "accumulate",
    "master",
    "unscale_clip",
    "end_to_end",
    "update",
    "publish",
)

CAUSES: Final = (
    "dropped_micro_steps",
    "double_counted",
    "carried_over",
    "not_averaged",
    "averaged_twice",
    "scaled",
    "not_reduced",
    "rank_missing",
    "shifted",
    "swapped",
    "stale",
    "zeroed",
    "sign_flipped",
    "non_finite",
    "low_precision",
    "partly_overwritten",
    "not_unscaled",
    "wrong_clip",
    "inputs_differ",
    "weights_differ",
    "boundary_mismatch",
    "order_mismatch",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """State one broken law.

    Attributes:
        law: name of the law.
        cause: one of `CAUSES`; ``unknown`` when no hypothesis explains the data.
        step: optimizer step.
        micro_step: backward pass, or ``None`` at optimizer points.
        rank: the rank that holds the wrong value, or ``None`` where it is several.
        param: parameter name, or ``None`` for a law about scalars.
        point: the point whose record breaks the law.
        index: lowest flat C-order index in the full parameter that breaks it, or ``None``.
        expected: value that the law gives at ``index``, in the record's own scale.
        found: value that was recorded there.
        max_abs: largest absolute error over the parameter.
        rel_l2: L2 norm of the error over the L2 norm of the expected values.
        bound: rounding bound at ``index``, absolute; ``None`` for an exact law.
        detail: one or two sentences with the evidence.
        test: which of section 4's tests convicted: ``bound``, ``coefficients`` or ``exact``.
        folded: names of parameters whose same-law findings are folded into this one.
        guilty: the rank that did it, where that is another than the one that holds the wrong value.
    """

    law: str
    cause: str
    step: int
    micro_step: int | None
    rank: int | None
    param: str | None
    point: str
    index: int | None
    expected: float | None
    found: float | None
    max_abs: float | None
    rel_l2: float | None
    bound: float | None
    detail: str
    test: str = "bound"
    folded: tuple[str, ...] = ()
    guilty: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the members of section 7's ``first``."""
        return {
            "law": self.law,
            "cause": self.cause,
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "param": self.param,
            "point": self.point,
            "index": self.index,
            "expected": _number(self.expected),
            "found": _number(self.found),
            "max_abs": _number(self.max_abs),
            "rel_l2": _number(self.rel_l2),
            "bound": _number(self.bound),
            "detail": self.detail,
        }

    def to_full_dict(self) -> dict[str, Any]:
        """Return an entry of ``findings``."""
        return {
            **self.to_dict(),
            "test": self.test,
            "guilty": self.guilty,
            "also": list(self.folded),
        }


@dataclass(frozen=True, slots=True)
class Hop:
    """Say how one law stands on the path of one parameter through one step, over all ranks.

    Attributes:
        checked, broken, skipped: how often.
        reason: why it was skipped, where it was never checked.
    """

    law: str
    checked: int
    broken: int
    skipped: int
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return an entry of ``path``."""
        return {
            "law": self.law,
            "checked": self.checked,
            "broken": self.broken,
            "skipped": self.skipped,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class LawCount:
    """Count what a law was checked on.

    Attributes:
        checked: how many (parameter, event) pairs were checked.
        broken: how many of them broke.
        skipped: how many could not be checked because the plan or the stage left a point out.
        worst_ratio: largest error over bound that was seen (0 when all were exact).
        skip_reasons: reason -> how many.
    """

    checked: int
    broken: int
    skipped: int
    worst_ratio: float
    skip_reasons: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the members of section 7's ``laws`` entries."""
        return {
            "checked": self.checked,
            "broken": self.broken,
            "skipped": self.skipped,
            "worst_ratio": _number(self.worst_ratio),
        }


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Hold the verdict on one trace.

    Attributes:
        verdict: ``pass`` (every checked law holds, no gap), ``fail`` (a law is broken) or
            ``inconclusive`` (a gap robbed a law of its inputs, or nothing could be checked).
        first: the first broken law in causal order.
        findings: all independent findings in report order; ``first`` is the first of them.
        laws: name -> counts, for every law of `LAWS`.
        notes: what a reader should know.
        lost: something that should be there is not, so that a law could not be checked.
        reported: what frameworks reported, beside what was recorded.
        path: the hops of the first finding's parameter through its step, in causal order; what breaks
            behind the finding is judged by its own inputs, and mostly intact.
    """

    verdict: AuditVerdict
    first: Finding | None
    findings: tuple[Finding, ...]
    laws: Mapping[str, LawCount]
    notes: tuple[str, ...]
    lost: bool = False
    reported: tuple[Reported, ...] = ()
    path: tuple[Hop, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``audit --json`` prints."""
        return {
            "format": AUDIT_FORMAT,
            "version": RESULT_VERSION,
            "verdict": self.verdict,
            "first": None if self.first is None else self.first.to_dict(),
            "laws": {name: count.to_dict() for name, count in self.laws.items()},
            "reported": [entry.to_dict() for entry in self.reported],
            "notes": list(self.notes),
            "findings": [finding.to_full_dict() for finding in self.findings],
            "path": [hop.to_dict() for hop in self.path],
        }


@dataclass(frozen=True, slots=True)
class Divergence:
    """State the first record where two runs disagree by more than rounding explains.

    Attributes:
        boundary: whether this micro-step was claimed to end the accumulation.
        rank: the rank that holds the element, or ``None`` where ranks do not correspond.
        baseline: value of the baseline at ``index``.
        candidate: value of the candidate there.
        max_abs, rel_l2: of the difference, over the parameter; relative to the baseline.
        bound: what rounding explains at ``index``, absolute.
    """

    step: int
    micro_step: int | None
    boundary: bool | None
    point: str
    param: str | None
    rank: int | None
    index: int | None
    baseline: float | None
    candidate: float | None
    max_abs: float | None
    rel_l2: float | None
    bound: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the members of section 7's ``first``."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "boundary": self.boundary,
            "point": self.point,
            "param": self.param,
            "rank": self.rank,
            "index": self.index,
            "baseline": _number(self.baseline),
            "candidate": _number(self.candidate),
            "max_abs": _number(self.max_abs),
            "rel_l2": _number(self.rel_l2),
            "bound": _number(self.bound),
        }


@dataclass(frozen=True, slots=True)
class Blame:
    """Name the guilty side, and what it did.

    Attributes:
        side: which run broke a law; ``neither`` when both obey all of them.
        law: the law that it broke, or ``None``.
        cause: one of `CAUSES`.
        rank: the guilty rank, or ``None`` where it is several.
        detail: one or two sentences with the evidence.
    """

    side: Side
    law: str | None
    cause: str
    step: int | None
    micro_step: int | None
    rank: int | None
    param: str | None
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Return the members of section 7's ``blame``."""
        return {
            "side": self.side,
            "law": self.law,
            "cause": self.cause,
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "param": self.param,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class DiffResult:
    """Hold the verdict on two traces.

    Attributes:
        counts: ``compared``, ``equal`` (bitwise), ``rounding``, ``diverged``, ``left_out``: records
            of one parameter each.
        growth: one entry a step, of all steps that both runs hold, in order.
        envelope: where perturbed runs of the baseline were given.
        reported: what frameworks reported of the same step of both runs.
        baseline_audit, candidate_audit: the audits that blame rests on, when they were made.
    """

    verdict: DiffVerdict
    first: Divergence | None
    blame: Blame | None
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    growth: tuple[Growth, ...] = ()
    envelope: Envelope | None = None
    baseline_audit: AuditResult | None = None
    candidate_audit: AuditResult | None = None
    reported: tuple[tuple[Reported, Reported], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``diff --json`` prints."""
        return {
            "format": DIFF_FORMAT,
            "version": RESULT_VERSION,
            "verdict": self.verdict,
            "first": None if self.first is None else self.first.to_dict(),
            "blame": None if self.blame is None else self.blame.to_dict(),
            "counts": dict(self.counts),
            "reported": [
                {"step": one.step, "baseline": one.to_dict(), "candidate": two.to_dict()}
                for one, two in self.reported
            ],
            "growth": [entry.to_dict() for entry in self.growth],
            "envelope": None if self.envelope is None else self.envelope.to_dict(),
            "notes": list(self.notes),
        }
