"""Say what may have happened to a gradient, as values that would then have been recorded.

`micro_step_hypotheses` is for sums over micro-steps, `gradtrace.analysis.generic` for every tensor; laws
add their own. Nothing is believed here: `gradtrace.analysis.diagnose` tests each against the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from gradtrace.analysis.bounds import Estimate, Mask, breaks, gamma
from gradtrace.trace.dtypes import Dtype, Float64

ULPS: Final = 4  # roundings that a wrong path may have beyond the right one
FEWEST_FREE: Final = 4  # elements that a measured factor must explain
WORLD: Final = "the world size"  # among `Context.factors`
_LIKELIEST: Final = 3
_MOST_RUNS: Final = 32


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Say what may have happened, and the values that it would have left.

    Attributes:
        cause: one of `results.CAUSES`.
        detail: the sentence that a reader gets if the values fit.
        estimate: what would have been recorded.
        exempt: elements of which the hypothesis says nothing, or ``None``.
        score: its own weight of evidence (see `Candidate`), where the distance does not tell.
        rank: the guilty rank, where the hypothesis names one.
        factor: what the expected values were multiplied with, where that is all it says.
        bits: to how many significant bits the expected values were rounded, where that is all.
    """

    cause: str
    detail: str
    estimate: Estimate
    exempt: Mask | None = None
    score: float | None = None
    rank: int | None = None
    factor: float | None = None
    bits: int | None = None


@dataclass(frozen=True, slots=True)
class Design:
    """Split an expected value into labelled terms of nominal coefficient 1.

    Attributes:
        kind: what a term is.
        terms: ``(label, values)``.
    """

    kind: Literal["rank", "micro_step"]
    terms: tuple[tuple[str, Float64], ...]


@dataclass(frozen=True, slots=True)
class Context:
    """Hold what an explanation may refer to.

    Attributes:
        point: where the wrong values were recorded.
        offset: first judged element in the full parameter.
        dtype: the coarsest dtype on the path.
        stored: dtype of the record.
        factors: well-known factors by name, such as ``the world size``.
        lost: the largest error of one operation on the path by underflow, in whatever dtype.
        averages: whether a factor of the world size there means a mean that was forgotten; where
            micro-steps are added up, it is another one counted twice.
    """

    point: str
    offset: int
    dtype: Dtype
    stored: Dtype
    factors: Mapping[str, float]
    lost: float = 0.0
    averages: bool = True


def weighted(parts: Sequence[tuple[float, Estimate]], dtype: Dtype) -> Estimate:
    """Combine estimates with arbitrary weights, allowing a few extra roundings."""
    value = np.zeros(len(parts[0][1].value))
    error, size = value.copy(), value.copy()
    overflow = np.zeros(len(value), dtype=np.bool_)
    roundings = len(parts) - 1 + ULPS
    with np.errstate(invalid="ignore", over="ignore"):
        for weight, part in parts:
            value += weight * part.value
            error += abs(weight) * part.error
            size += abs(weight) * (np.abs(part.value) + part.error)
            overflow |= part.overflow
        error += gamma(roundings, dtype.unit_roundoff) * size
        error += roundings * dtype.smallest_subnormal
    return Estimate(value, error, overflow)


def likeliest_missing(
    found: Float64, estimate: Estimate, terms: Sequence[tuple[int, Float64]]
) -> list[tuple[int, Float64]]:
    """Return the few terms whose absence brings the expected values closest to the recorded ones.

    Args:
        terms: ``(rank, contribution)``.
    """
    usable = np.isfinite(found) & np.isfinite(estimate.value)
    error = (found - estimate.value)[usable]

    def left(term: tuple[int, Float64]) -> float:
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.square(error + term[1][usable]).sum())

    return sorted(terms, key=left)[:_LIKELIEST]


def micro_step_hypotheses(
    context: Context,
    parts: Sequence[tuple[int, Estimate]],
    *,
    carry: Estimate | None = None,
    before: Estimate | None = None,
) -> Iterator[Hypothesis]:
    """Propose what goes wrong when micro-steps are added up.

    Args:
        parts: ``(micro_step, contribution)`` of every micro-step that the value should hold.
        carry: what was in the buffer before the last part, as recorded, if there was one.
        before: what the same buffer held when the step before ended, or ``None``.
    """
    point, dtype = context.point, context.dtype
    if not parts:
        if before is not None:
            yield Hypothesis(
                "stale", f"{point} still holds the step before; nothing belongs here.", before
            )
            words = f"{point} holds what the step before left there: the buffer was not cleared."
            yield Hypothesis("carried_over", words, before)
        return
    numbers = [number for number, _ in parts]
    total = weighted([(1.0, part) for _, part in parts], dtype)
    now = parts[-1][1]
    nominal = total if carry is None else weighted([(1.0, carry), (1.0, now)], dtype)

    def survivors(kept: Sequence[int]) -> str:
        lost = [n for at, n in enumerate(numbers) if at not in kept]
        names = _listed([numbers[at] for at in kept])
        verb = "is" if len(lost) == 1 else "are"
        return f"{point} holds {names} only; {_listed(lost)} {verb} lost."

    gone = f"{point} holds nothing; {_listed(numbers)} {'is' if len(numbers) == 1 else 'are'} lost."
    yield Hypothesis("dropped_micro_steps", gone, weighted([(0.0, now)], dtype))
    if len(parts) > 1:
        last = len(parts) - 1
        yield Hypothesis("dropped_micro_steps", survivors([last]), now)
        yield Hypothesis("dropped_micro_steps", survivors([0]), parts[0][1])
        if len(parts) > 2:
            ends = weighted([(1.0, parts[0][1]), (1.0, now)], dtype)
            yield Hypothesis(
                "dropped_micro_steps", f"{survivors([0, last])} (first and last)", ends
            )
        for kept in _runs(len(parts)):
            some = weighted([(1.0, parts[at][1]) for at in kept], dtype)
            yield Hypothesis("dropped_micro_steps", survivors(kept), some)
        if carry is not None:
            before_it = weighted([(1.0, part) for _, part in parts[:-1]], dtype)
            words = survivors(range(last))
            if breaks(carry.value, before_it).any():  # something was lost, or added, before
                words = f"{point} holds what was accumulated before only; "
                words += f"micro-step {numbers[-1]} is lost."
            yield Hypothesis("dropped_micro_steps", words, carry)
    for at, (number, part) in enumerate(parts):
        if len(parts) > 1:
            rest = [n for n in range(len(parts)) if n != at]
            without = weighted([(1.0, total), (-1.0, part)], dtype)
            yield Hypothesis("dropped_micro_steps", survivors(rest), without)
        twice = weighted([(1.0, nominal if at == len(parts) - 1 else total), (1.0, part)], dtype)
        yield Hypothesis("double_counted", f"{point} holds micro-step {number} twice.", twice)
    if carry is not None:
        double = weighted([(2.0, carry), (1.0, now)], dtype)
        yield Hypothesis(
            "double_counted", f"{point} holds what was accumulated before twice.", double
        )
    if before is not None:
        yield Hypothesis(
            "carried_over",
            f"{point} holds the right value plus what the step before left there: "
            "the buffer was not cleared.",
            weighted([(1.0, nominal), (1.0, before)], dtype),
        )
        if len(parts) > 1:
            yield Hypothesis(
                "carried_over",
                f"{point} holds micro-step {numbers[-1]} plus what the step before left there.",
                weighted([(1.0, now), (1.0, before)], dtype),
            )
        yield Hypothesis("stale", f"{point} still holds what the step before left there.", before)


def _runs(count: int) -> Iterator[range]:
    """Yield the micro-steps that survive when a buffer starts anew, or stops, in the middle."""
    for at in range(2, min(count - 1, _MOST_RUNS)):
        yield range(count - at, count)
        yield range(at)


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"micro-step {numbers[0]}"
    if len(numbers) > 6 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"micro-steps {numbers[0]} to {numbers[-1]}"
    return "micro-steps " + ", ".join(map(str, numbers))


def weighed(
    found: Float64, carry: Estimate, now: tuple[int, Estimate], point: str, dtype: Dtype
) -> Iterator[Hypothesis]:
    """Propose that the last micro-step counts with another factor than 1.

    Args:
        found: 1-D recorded values.
        carry: what was in the buffer before.
        now: ``(micro_step, contribution)``.
        dtype: what the sum is rounded to.
    """
    number, part = now
    usable = np.isfinite(found) & np.isfinite(carry.value) & np.isfinite(part.value)
    power = float(part.value[usable] @ part.value[usable])
    if power == 0 or np.count_nonzero(part.value) < FEWEST_FREE:
        return
    factor = float(part.value[usable] @ (found - carry.value)[usable]) / power
    if not np.isfinite(factor) or abs(factor - 1) < 4 * dtype.unit_roundoff:
        return
    for value in dict.fromkeys((round(factor, 2), factor)):
        words = f"In {point}, micro-step {number} counts {value:.6g} times."
        yield Hypothesis("scaled", words, weighted([(1.0, carry), (value, part)], dtype))
