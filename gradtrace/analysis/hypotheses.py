"""Say what may have happened to a gradient, as values that would then have been recorded.

`micro_step_hypotheses` is for sums over micro-steps, `anything` for every tensor; laws add their
own. Nothing is believed here: `gradtrace.analysis.diagnose` tests each against the records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from gradtrace.analysis.bounds import Estimate, Mask, gamma
from gradtrace.analysis.fit import SMALLEST_EFFECT
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64

ULPS: Final = 4  # roundings that a wrong path may have beyond the right one
FEWEST_FREE: Final = 4  # elements that a measured factor must explain
WORLD: Final = "the world size"  # among `Context.factors`
_LAGS: Final = 3
_SMALLEST_OVERLAP: Final = 4
_LARGEST_SHIFT: Final = 0.25  # of the length, where nothing is known of what came in at the edge
_MOST_TIMES: Final = 64
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
    """

    cause: str
    detail: str
    estimate: Estimate
    exempt: Mask | None = None
    score: float | None = None
    rank: int | None = None
    factor: float | None = None


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
        averages: whether the hop itself takes the mean over the ranks, so that it can forget to.
    """

    point: str
    offset: int
    dtype: Dtype
    stored: Dtype
    factors: Mapping[str, float]
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

    return sorted(terms, key=left)[:_LAGS]


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

    if len(parts) > 1:
        last = len(parts) - 1
        yield Hypothesis("dropped_micro_steps", survivors([last]), now)
        if carry is not None:
            yield Hypothesis("dropped_micro_steps", survivors(range(last)), carry)
        yield Hypothesis("dropped_micro_steps", survivors([0]), parts[0][1])
        if len(parts) > 2:
            ends = weighted([(1.0, parts[0][1]), (1.0, now)], dtype)
            yield Hypothesis(
                "dropped_micro_steps", f"{survivors([0, last])} (first and last)", ends
            )
        for kept in _runs(len(parts)):
            some = weighted([(1.0, parts[at][1]) for at in kept], dtype)
            yield Hypothesis("dropped_micro_steps", survivors(kept), some)
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


def anything(
    found: Float64,
    estimate: Estimate,
    hypotheses: Iterable[Hypothesis],
    designs: Sequence[Design],
    context: Context,
) -> Iterator[Hypothesis]:
    """Propose what may happen to any tensor, around the law's own hypotheses."""
    numel = len(found)
    nothing = np.zeros(numel)
    zero = Estimate(nothing, nothing, np.zeros(numel, dtype=np.bool_))
    yield Hypothesis("zeroed", f"{context.point} is zero.", zero)
    yield from hypotheses
    yield Hypothesis(
        "sign_flipped",
        f"{context.point} has the opposite sign.",
        weighted([(-1.0, estimate)], context.dtype),
    )
    for design in designs:
        yield from _snapped(found, estimate, design, context)
    yield from _scaled(found, estimate, context)
    yield from _rounded(found, estimate, context)
    yield from _shifted(found, estimate, context)


def _snapped(
    found: Float64, estimate: Estimate, design: Design, context: Context
) -> Iterator[Hypothesis]:
    """Propose whole coefficients near the fitted ones: 0 is lost, 2 is counted twice."""
    fitted = _least_squares(found, estimate, design)
    if fitted is None:
        return
    snapped = np.rint(fitted)
    if (snapped == 1).all() or (np.abs(snapped) > _MOST_TIMES).any():
        return
    exactly = [
        (float(weight), Estimate(values, np.zeros(len(values)), estimate.overflow))
        for weight, (_, values) in zip(snapped, design.terms, strict=True)
    ]
    combined = weighted(exactly, context.dtype)
    combined = replace(
        combined, error=combined.error + estimate.error * np.abs(snapped).max(initial=1)
    )
    labels = [label for label, _ in design.terms]
    absent = [label for label, weight in zip(labels, snapped, strict=True) if weight == 0]
    more = [
        f"{label} counts {weight:g} times"
        for label, weight in zip(labels, snapped, strict=True)
        if weight not in (0, 1)
    ]
    if absent and not more:
        cause = "rank_missing" if design.kind == "rank" else "dropped_micro_steps"
        what = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        one = absent[0] if cause == "rank_missing" and len(absent) == 1 else None
        yield Hypothesis(
            cause,
            f"In {context.point}, {what}; the rest is right.",
            combined,
            rank=None if one is None else int(one.removeprefix("rank ")),
        )
    elif not absent and set(snapped) == {1.0, 2.0}:
        yield Hypothesis("double_counted", f"In {context.point}, {'; '.join(more)}.", combined)
    elif more and not absent:
        yield Hypothesis("scaled", f"In {context.point}, {'; '.join(more)}.", combined)


def _least_squares(found: Float64, estimate: Estimate, design: Design) -> Float64 | None:
    usable = np.isfinite(found) & np.isfinite(estimate.value) & (estimate.error > 0)
    table = np.stack([values[usable] for _, values in design.terms], axis=1)
    if len(table) < table.shape[1] + FEWEST_FREE:
        return None
    weight = 1 / estimate.error[usable]
    solution, _, rank, _ = np.linalg.lstsq(
        table * weight[:, None], found[usable] * weight, rcond=1e-9
    )
    result = np.asarray(solution, dtype=np.float64)
    return result if rank == table.shape[1] and np.isfinite(result).all() else None


def factor_of(found: Float64, estimate: Estimate) -> float | None:
    """Return the factor that brings the expected values closest to the recorded ones."""
    usable = np.isfinite(found) & np.isfinite(estimate.value)
    top = float(np.abs(estimate.value[usable]).max(initial=0.0))
    if top == 0:
        return None
    x, y = estimate.value[usable] / top, found[usable] / top
    factor = float(x @ y) / float(x @ x)
    return factor if np.isfinite(factor) else None


def named(factor: float, context: Context) -> tuple[float | None, str]:
    """Return the well-known factor close to a measured one (or ``None``), and words for it."""
    tolerance = max(1e-5, 4 * context.dtype.unit_roundoff)
    known = [
        (exact, words)
        for name, value in context.factors.items()
        if value not in (0, 1)
        for exact, words in ((value, name), (1 / value, f"1 / {name}"))
        if abs(factor / exact - 1) <= tolerance
    ]
    if known:
        return known[0][0], f"{known[0][0]:.6g} ({' or '.join(words for _, words in known)})"
    near = round(factor)
    if near not in (0, 1) and abs(factor / near - 1) <= tolerance:
        return float(near), f"{near}"
    return None, f"{factor:.6g}"


def _scaled(found: Float64, estimate: Estimate, context: Context) -> Iterator[Hypothesis]:
    factor = factor_of(found, estimate)
    if factor is None or factor == 0:
        return
    exact, words = named(factor, context)
    # One free number explains a few elements whatever happened: then only well-known ones count.
    free = int(np.count_nonzero(estimate.value)) >= FEWEST_FREE
    least = 1 + min(16 * context.dtype.unit_roundoff, SMALLEST_EFFECT[context.dtype.name])
    values = ([] if exact is None else [exact]) + ([factor] if free else [])
    for value in dict.fromkeys(values):
        if not 1 / least < value < least and value != -1:
            cause = "scaled"
            world = context.factors.get(WORLD)
            if value == world and context.averages:
                cause = "not_averaged"
            elif world is not None and value == 1 / world:
                cause = "averaged_twice"
            yield Hypothesis(
                cause,
                f"{context.point} is {words} times what it should be.",
                weighted([(value, estimate)], context.dtype),
                factor=value,
            )


def _rounded(found: Float64, estimate: Estimate, context: Context) -> Iterator[Hypothesis]:
    """Propose that the values went through a format of fewer bits than the record's."""
    finite = found[np.isfinite(found) & (found != 0)]
    if len(finite) < _SMALLEST_OVERLAP:
        return
    mantissa = np.frexp(finite)[0]
    stored = round(-np.log2(context.stored.unit_roundoff))
    for bits in range(2, stored):
        shifted = mantissa * 2.0**bits
        if (shifted == np.rint(shifted)).all():
            break
    else:
        return
    names = [n for n, d in DTYPES.items() if d.unit_roundoff == 2.0**-bits]
    through = f", as if it had gone through {names[0]}" if names else ""
    coarse = 2.0**-bits
    size = np.abs(estimate.value) + estimate.error
    error = estimate.error + gamma(ULPS, coarse) * size
    if names:
        error = error + DTYPES[names[0]].smallest_subnormal
    yield Hypothesis(
        "low_precision",
        f"{context.point} is right to {bits} significant bits only{through}; "
        f"it is stored as {context.stored.name}.",
        replace(estimate, error=error),
        score=len(finite) * (stored - bits) * math.log10(2),
    )


def _shifted(found: Float64, estimate: Estimate, context: Context) -> Iterator[Hypothesis]:
    numel = len(found)
    if numel < 2 * _SMALLEST_OVERLAP or not np.isfinite(found).all():
        return
    if not np.isfinite(estimate.value).all() or not estimate.value.any():
        return
    left, right = np.fft.rfft(found), np.fft.rfft(estimate.value)
    likeness = np.fft.irfft(left * np.conj(right), numel)
    likeness[0] = -np.inf
    for at in np.argsort(-likeness)[:_LAGS]:
        rolled = Estimate(
            np.roll(estimate.value, at), np.roll(estimate.error, at), np.roll(estimate.overflow, at)
        )
        distance = int(at) if at <= numel // 2 else int(at) - numel
        edge = np.zeros(numel, dtype=np.bool_)
        edge[: max(distance, 0)] = True
        edge[numel + min(distance, 0) :] = True
        if len(np.unique(np.abs(estimate.value[~edge]))) < _SMALLEST_OVERLAP:
            continue
        side = "ahead of" if distance > 0 else "behind"
        words = (
            f"{context.point} holds the right values {abs(distance)} elements {side} their place"
        )
        yield Hypothesis("shifted", f"{words}, cyclically.", rolled)
        if abs(distance) <= numel * _LARGEST_SHIFT:
            yield Hypothesis("shifted", f"{words}.", rolled, exempt=edge)
