"""Name the cause of a broken law: the hypothesis that explains the recorded values within rounding.

A law proposes what may have happened instead (a micro-step lost, the ranks not reduced, ...) as
`Hypothesis`; `explain` adds what may happen to any tensor (zeroed, scaled, shifted, ...) and tests
all of them as hard as the law itself was tested. None that fits means ``unknown``, with the best
partial explanation: a wrong name costs more than no name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gradtrace.analysis.bounds import Estimate, Mask, breaks, gamma, relative_l2
from gradtrace.analysis.fit import fit
from gradtrace.analysis.generic import anything, factor_of, fits_in, named
from gradtrace.analysis.hypotheses import ULPS, Context, Design, Hypothesis, weighted
from gradtrace.trace.dtypes import Float64

LIKELIER: Final = 2.0  # a hypothesis this much closer to the data is preferred to an earlier one
SURE: Final = 4.0  # least score of a cause that is named
MOST_SCORE: Final = 300.0
TINY: Final = 8  # elements; fewer are explained by too much
FEW: Final = 64  # elements whose values are kept until all parameters are seen
_OWN: Final = ("swapped", "non_finite")  # causes that say something of one parameter alone
_NUMBERED: Final = ("rank_missing", "scaled", "wrong_clip")  # which rank, which factor
_WHOLE: Final = 0.9
_DENSE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """Hold a cause that fits, and how little chance explains that.

    Attributes:
        cause: one of `results.CAUSES`.
        detail: a sentence that says what happened.
        score: minus log10 of the chance that values as wrong as these fit by accident.
        rank: the guilty rank, where the cause names one.
        factor: what the expected values were multiplied with, where that is all the cause says.
        bits: to how many significant bits they were rounded, where that is all it says.
    """

    cause: str
    detail: str
    score: float
    rank: int | None = None
    factor: float | None = None
    bits: int | None = None


@dataclass(frozen=True, slots=True)
class Tested:
    """Hold what causes were tested on, so that another parameter's cause can be tested too.

    Attributes:
        context: names and dtypes.
        refuted: (cause, sentence) of the hypotheses that the records contradict.
        values: what was recorded and expected, kept where few elements were judged.
    """

    context: Context
    refuted: frozenset[tuple[str, str]]
    values: tuple[Float64, Estimate] | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Hold the cause that was chosen, and all that fit as well.

    Attributes:
        cause: one of `results.CAUSES`.
        detail: a sentence that says what happened.
        also: all that fit, the chosen one included, and those that may fit by chance.
        tested: what it rests on.
    """

    cause: str
    detail: str
    also: tuple[Candidate, ...]
    tested: Tested


def explain(
    found: Float64,
    estimate: Estimate,
    hypotheses: Iterable[Hypothesis],
    designs: Sequence[Design],
    context: Context,
) -> Explanation:
    """Find the cause whose values are the recorded ones, within rounding.

    Args:
        found: 1-D recorded values, which break the law.
        estimate: what the law expects.
        hypotheses: the law's own, the likeliest first.
        designs: the terms that the coefficient test uses.
        context: names and dtypes.
    """
    few = (found, estimate) if len(found) <= FEW else None
    lost = _non_finite(found, estimate, context)
    if lost is not None:
        only = (Candidate("non_finite", lost, MOST_SCORE),)
        return Explanation("non_finite", lost, only, Tested(context, frozenset(), few))
    fitting: list[tuple[Hypothesis, float, float]] = []
    refuted: set[tuple[str, str]] = set()
    for hypothesis in anything(found, estimate, hypotheses, designs, context):
        result = _test(found, estimate, hypothesis, context)
        if result is not None:
            fitting.append((hypothesis, *result))
        else:
            refuted.add((hypothesis.cause, hypothesis.detail))
    also = tuple(
        Candidate(h.cause, h.detail, score, h.rank, h.factor, h.bits) for h, _, score in fitting
    )
    tested = Tested(context, frozenset(refuted), few)
    sure = [entry for entry in fitting if entry[2] >= SURE]
    if sure:
        # Closer than a rounding or two is no better: a measured factor follows even the noise.
        near = 2 * context.dtype.unit_roundoff
        near += LIKELIER * min(distance for _, distance, _ in sure)
        chosen = next(h for h, distance, _ in sure if distance <= near)
        return Explanation(chosen.cause, chosen.detail, also, tested)
    part = _part(found, estimate, context)
    if part is not None:
        also = (*also, part)
        if part.score >= SURE:
            return Explanation("partly_overwritten", part.detail, also, tested)
    return Explanation("unknown", _best_guess(found, estimate, context), also, tested)


def transfers(cause: Candidate, tested: Tested | None) -> bool:
    """Say whether another parameter's cause may be that of this one too.

    It may where it holds on the records, or where too few elements were judged to test it at all.
    """
    if tested is None or tested.values is None or cause.cause in _OWN:
        return False
    found, estimate = tested.values
    if cause.factor is not None:
        scaled = weighted([(cause.factor, estimate)], tested.context.dtype)
        return not breaks(found, scaled).any()
    if cause.bits is not None:
        size = np.abs(estimate.value) + estimate.error
        coarse = replace(estimate, error=estimate.error + gamma(ULPS, 2.0**-cause.bits) * size)
        return not breaks(found, coarse).any() and fits_in(found, cause.bits)
    if len(found) >= TINY or (cause.cause, cause.detail) in tested.refuted:
        return False
    # Other sentences of the same cause may be refuted, but where they differ in a number.
    return cause.cause in _NUMBERED or all(other != cause.cause for other, _ in tested.refuted)


def _test(
    found: Float64, nominal: Estimate, hypothesis: Hypothesis, context: Context
) -> tuple[float, float] | None:
    """Test a hypothesis as hard as the law was.

    Returns:
        How far the data are from it (relative L2) and its score, or ``None`` when it is refuted.
    """
    estimate = hypothesis.estimate
    judged = np.ones(len(found), dtype=np.bool_)
    if hypothesis.exempt is not None:
        judged = ~hypothesis.exempt
    if (breaks(found, estimate) & judged).any():
        return None
    usable = judged & np.isfinite(found) & np.isfinite(estimate.value)
    if not usable.any():
        return None
    terms = [("all", np.where(usable, estimate.value, 0.0))]
    inside = Estimate(terms[0][1], estimate.error, estimate.overflow | ~usable)
    if fit(found, terms, inside, context.dtype, lost=context.lost).off:
        return None
    distance = relative_l2(found[usable] - estimate.value[usable], estimate.value[usable])
    if hypothesis.score is not None:
        return distance, min(hypothesis.score, MOST_SCORE)
    return distance, _score(found, nominal, estimate, usable & np.isfinite(nominal.value))


def _score(found: Float64, nominal: Estimate, estimate: Estimate, usable: Mask) -> float:
    """Weigh how well a hypothesis fits against how wrong the expected values are.

    An element that is off by d and fits within b does so by chance in about b of d cases. Where only
    the coefficients broke, the fall of the whole error counts instead.
    """
    off = np.abs(found - nominal.value)[usable]
    bound = np.maximum(estimate.error[usable], off * 1e-15)
    apart = off > bound
    score = float(np.sum(np.log10(off[apart] / bound[apart])))
    left = np.abs(found - estimate.value)[usable]
    if not breaks(found, nominal).any() and off.any():
        ratio = relative_l2(left, off)
        score = len(off) * -math.log10(max(ratio, 1e-15))
    return min(score, MOST_SCORE)


def _non_finite(found: Float64, estimate: Estimate, context: Context) -> str | None:
    lost = ~np.isfinite(found) & np.isfinite(estimate.value) & ~estimate.overflow
    if not lost.any() or (breaks(found, estimate) & ~lost).any():
        return None
    kind = "NaN" if np.isnan(found[lost]).any() else "infinite"
    first = context.offset + int(np.argmax(lost))
    return (
        f"{int(lost.sum())} elements of {context.point} are {kind}, the first at index {first}, "
        "though every input is finite."
    )


def _part(found: Float64, estimate: Estimate, context: Context) -> Candidate | None:
    """Say which range is wrong, when the rest is right."""
    outside = breaks(found, estimate)
    (broken,) = np.nonzero(outside)
    if not len(broken):
        return None
    first, last = int(broken[0]), int(broken[-1])
    length = last - first + 1
    if length > _WHOLE * len(found) or len(broken) < _DENSE * length:
        return None
    inside = found[first : last + 1]
    what = "are zero" if not inside.any() else "are wrong"
    where = f"elements {context.offset + first} to {context.offset + last}"
    if length == 1:
        what = what.replace("are", "is")
        where = f"element {context.offset + first}"
    right = len(found) - length
    size = np.abs(found - estimate.value)
    typical, narrow = float(np.median(size[broken])), float(np.median(estimate.error))
    weight = MOST_SCORE if narrow == 0 or not np.isfinite(typical) else math.log10(typical / narrow)
    detail = f"In {context.point}, {where} {what}; the other {right} are right."
    return Candidate("partly_overwritten", detail, min(max(right * weight, 0.0), MOST_SCORE))


def _best_guess(found: Float64, estimate: Estimate, context: Context) -> str:
    factor = factor_of(found, estimate)
    usable = np.isfinite(found) & np.isfinite(estimate.value)
    if factor is None:
        return f"{context.point} should be zero, and nothing recorded explains what it holds."
    _, words = named(factor, context)
    left = relative_l2(
        found[usable] - factor * estimate.value[usable], factor * estimate.value[usable]
    )
    return (
        f"No known cause explains {context.point}; the nearest is a factor of {words}, "
        f"which leaves {left:.2g} of it unexplained."
    )
