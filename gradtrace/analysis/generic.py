"""Say what may have happened to any tensor: zeroed, scaled, shifted, rounded, its terms miscounted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gradtrace.analysis.bounds import Estimate, gamma
from gradtrace.analysis.fit import SMALLEST_EFFECT
from gradtrace.analysis.hypotheses import (
    FEWEST_FREE,
    ULPS,
    WORLD,
    Context,
    Design,
    Hypothesis,
    weighted,
)
from gradtrace.trace.dtypes import DTYPES, Float64

_LAGS: Final = 3
_SMALLEST_OVERLAP: Final = 4
_LARGEST_SHIFT: Final = 0.25  # of the length, where nothing is known of what came in at the edge
_MOST_TIMES: Final = 64


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
    stored = round(-np.log2(context.stored.unit_roundoff))
    bits = next((bits for bits in range(2, stored) if fits_in(finite, bits)), None)
    if bits is None:
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
        bits=bits,
    )


def fits_in(values: Float64, bits: int) -> bool:
    """Say whether values have no more than so many significant bits."""
    shifted = np.frexp(values)[0] * 2.0**bits
    return bool((shifted == np.rint(shifted)).all())


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
