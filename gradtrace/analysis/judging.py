"""Judge differences for which no rounding bound can be proven: by their size and their shape.

Two kernels that compute the same local gradient round differently, and nothing that was recorded
says by how much. So these are judged by scale, against thresholds that practice supports and no
theorem does; results say so. What lies between the thresholds is not judged at all.

A parameter whose gradient nearly cancels (the bias of an attention key) may be rounding error from
its first bit to its last. Its difference is therefore measured against the typical size of the whole
gradient where that is larger than its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from gradtrace.analysis.results import Divergence
from gradtrace.trace.dtypes import Dtype, Float64

Status = Literal["equal", "rounding", "diverged", "growth", "unresolved"]
ROUNDOFFS: Final = 64.0  # differences of so many unit roundoffs are rounding
FEWEST_ELEMENTS: Final = 16  # on fewer any difference looks like a factor
MARGIN: Final = 8.0  # a common factor must stand out so far from what it leaves unexplained


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Hold the relative L2 differences that separate rounding, unknown and different.

    For float32 these are 4e-6 and 1e-3, for bfloat16 0.03 and 0.25.
    """

    rounding: float
    different: float


def thresholds(dtype: Dtype) -> Thresholds:
    """Return the thresholds for gradients computed in a dtype."""
    u = dtype.unit_roundoff
    return Thresholds(min(ROUNDOFFS * u, math.sqrt(u) / 2), 4 * math.sqrt(u))


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold what is kept of two tensors that should be equal, up to a known factor.

    Attributes:
        point, micro_step, rank: where; rank is ``None`` where ranks do not correspond.
        name, order, numel: the parameter, and its position in backward order.
        equal: every element is the same, up to ``factor``.
        explained: the two were not the same bits, and ``factor`` alone explains it.
        non_finite: the two have NaN or infinity in different places.
        mine, theirs, both, apart: squared norms of the (scaled) baseline and of the candidate, their
            inner product, and the squared norm of the difference; over finite elements.
        floor: squared norm of the difference that underflow alone may make.
        max_abs: largest absolute difference.
        index, baseline, candidate: the lowest element that differs by more than a few roundings.
    """

    point: str
    micro_step: int | None
    rank: int | None
    name: str
    order: int
    numel: int
    equal: bool
    explained: bool
    non_finite: bool
    mine: float
    theirs: float
    both: float
    apart: float
    floor: float
    max_abs: float
    index: int | None
    baseline: float | None
    candidate: float | None

    def divergence(self, step: int, boundary: bool | None) -> Divergence:
        """Return the sample as a divergence; no bound is proven."""
        return Divergence(
            step=step,
            micro_step=self.micro_step,
            boundary=boundary,
            point=self.point,
            param=self.name,
            rank=self.rank,
            index=self.index,
            baseline=self.baseline,
            candidate=self.candidate,
            max_abs=self.max_abs,
            rel_l2=ratio(self.apart, self.mine),
            bound=None,
        )


@dataclass(frozen=True, slots=True)
class Opinion:
    """Say how the samples of one place are judged together.

    Attributes:
        statuses: one a sample.
        factor: the single factor that all parameters share, where there is one.
        relative: L2 norm of the difference over that of the baseline, over all parameters.
    """

    statuses: tuple[Status, ...]
    factor: float | None
    relative: float


def ratio(top: float, bottom: float) -> float:
    """Return the ratio of two norms that are given squared; 0/0 is 0, and x/0 infinite."""
    if top == 0:
        return 0.0
    return math.sqrt(top / bottom) if bottom > 0 else math.inf


def sample(
    place: tuple[str, int | None, int | None],
    parameter: tuple[str, int],
    mine: Float64,
    theirs: Float64,
    dtype: Dtype,
    *,
    factor: float = 1.0,
    absolute: float = 0.0,
) -> Sample:
    """Reduce two tensors to what judging needs.

    Args:
        place: point, micro_step, rank.
        parameter: name, and position in backward order.
        mine, theirs: 1-D, of equal length.
        factor: what the candidate should be times the baseline.
        absolute: what underflow may change an element by.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = mine * factor
        finite = np.isfinite(scaled) & np.isfinite(theirs)
        same = bool(np.array_equal(scaled, theirs, equal_nan=True))
        error = np.where(finite, scaled - theirs, 0.0)
        size = np.maximum(np.abs(scaled), np.abs(theirs))
        beyond = ~(np.abs(scaled - theirs) <= ROUNDOFFS * dtype.unit_roundoff * size)
        beyond &= ~((np.isnan(scaled) & np.isnan(theirs)) | (scaled == theirs))
    index = None
    if not same:
        index = int(np.argmax(beyond)) if beyond.any() else int(np.argmax(np.abs(error)))
    odd = ~(finite | (np.isnan(scaled) & np.isnan(theirs)) | (scaled == theirs))
    one, two = np.where(finite, scaled, 0.0), np.where(finite, theirs, 0.0)
    return Sample(
        point=place[0],
        micro_step=place[1],
        rank=place[2],
        name=parameter[0],
        order=parameter[1],
        numel=len(mine),
        equal=same,
        explained=same and not np.array_equal(mine, theirs, equal_nan=True),
        non_finite=bool(odd.any()),
        mine=float(one @ one),
        theirs=float(two @ two),
        both=float(one @ two),
        apart=float(error @ error),
        floor=len(mine) * absolute * absolute,
        max_abs=math.inf if odd.any() else float(np.abs(error).max(initial=0.0)),
        index=index,
        baseline=None if index is None else float(mine[index]),
        candidate=None if index is None else float(theirs[index]),
    )


def judge_samples(
    samples: Sequence[Sample], dtype: Dtype, *, same_start: bool, drifted: bool
) -> Opinion:
    """Judge all parameters of one place together.

    Args:
        samples: at least one, of the same point, micro_step and rank.
        dtype: the coarser of the two runs' dtypes.
        same_start: whether the runs provably had equal weights when the step began.
        drifted: whether earlier differences explain that they had not.

    Returns:
        ``growth`` for what earlier differences led to; ``unresolved`` where nothing can be said.
    """
    limit = thresholds(dtype)
    apart = math.fsum(entry.apart for entry in samples)
    mine = math.fsum(entry.mine for entry in samples)
    relative = ratio(apart, mine)
    scales = _scales(samples)
    distances = [
        ratio(max(entry.apart - entry.floor, 0.0), scale)
        for entry, scale in zip(samples, scales, strict=True)
    ]
    factor = _common_factor(samples, scales, limit.rounding)
    statuses: list[Status] = []
    for entry, distance in zip(samples, distances, strict=True):
        if entry.equal:
            statuses.append("rounding" if entry.explained else "equal")
        elif drifted:
            statuses.append("growth")
        elif factor is not None or entry.non_finite or distance > limit.different:
            statuses.append("diverged" if same_start else "unresolved")
        elif distance <= limit.rounding:
            statuses.append("rounding")
        else:
            statuses.append("unresolved")
    return Opinion(tuple(statuses), factor, relative)


def _scales(samples: Sequence[Sample]) -> list[float]:
    """Return, squared, what each parameter's difference is measured against."""
    total = math.fsum(max(entry.mine, entry.theirs) for entry in samples)
    count = sum(entry.numel for entry in samples)
    typical = total / count if count else 0.0
    return [max(entry.mine, entry.theirs, typical * entry.numel) for entry in samples]


def fitted(samples: Sequence[Sample]) -> float | None:
    """Return the factor that takes the baseline nearest to the candidate."""
    mine = math.fsum(entry.mine for entry in samples)
    both = math.fsum(entry.both for entry in samples)
    return both / mine if mine > 0 and math.isfinite(mine) and math.isfinite(both) else None


def _common_factor(
    samples: Sequence[Sample], scales: Sequence[float], rounding: float
) -> float | None:
    """Return the one factor other than 1 that explains every parameter to rounding."""
    factor = fitted(samples)
    few = len(samples) < 2 or sum(entry.numel for entry in samples) < FEWEST_ELEMENTS
    few |= all(entry.apart <= entry.floor for entry in samples)
    if factor is None or few or any(entry.non_finite for entry in samples):
        return None
    worst = 0.0
    for entry, scale in zip(samples, scales, strict=True):
        left = entry.theirs - 2 * factor * entry.both + factor * factor * entry.mine
        worst = max(worst, ratio(max(left - entry.floor, 0.0), scale))
    distinct = abs(factor - 1) > max(rounding, MARGIN * worst)
    return factor if worst <= rounding and distinct else None
