"""Test the coefficients of a linear hop: does every rank, every micro-step count as it should?

The proven bound of a sum grows with the number of terms: in bfloat16 it hides one lost rank of 64.
Over a tensor of thousands of elements the same loss is plain: fitted on its summands by least
squares, the output shows that rank's coefficient near 0 where 1 is right. Terms come scaled, so
that each nominal coefficient is 1.

Rounding errors are not the independent noise that a textbook fit wants, and a false alarm is worse
than silence. Therefore:

- elements are weighted by the inverse of their proven bound, so that one large one does not decide;
- elements that round alike (equal up to sign and a power of two, but for what is far below the grid
  of the sum) are one cluster. A coefficient that rests on few clusters is not tested, nor is a
  design that is nearly singular (`Fit.refused`);
- errors are estimated from the residuals themselves, by cluster (heteroskedasticity-consistent,
  HC3); a sum of m errors of random sign cannot exceed sqrt(m) such sigmas, and 8 of them have
  probability 1e-13;
- what is systematic is measured: the sum is simulated in its dtype in several orders, and what the
  fit finds there beyond noise, three times, is allowed for;
- a variation that is small against the grid of the sum may be swallowed or enlarged: its share is
  allowed for, and a term that is mostly of that kind is not tested;
- a finding must be material (`SMALLEST_EFFECT`).

Source: MacKinnon and White, J. Econometrics 29 (1985) for HC3; Cameron, Gelbach and Miller, J. Bus.
Econ. Stat. 29 (2011) for clusters; Efron, JASA 64 (1969) for self-normalised sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrace.analysis.bounds import Estimate, Mask, underflow
from gradtrace.trace.dtypes import Dtype, Float64, from_float64, raw_bits, to_float64

SIGMAS: Final = 8.0
SMALLEST_EFFECT: Final[Mapping[str, float]] = {
    "bfloat16": 2e-2,
    "float16": 3e-3,
    "float32": 2e-4,
    "float64": 1e-6,
}
MOST_ROWS: Final = 16384
MOST_CELLS: Final = 2**20  # rows x terms
FEWEST_ROWS: Final = 64
FEWEST_EFFECTIVE: Final = 32.0
FEWEST_VALUES: Final = 48
LARGEST_FLOOR: Final = 0.5
WORST_CONDITION: Final = 1e3
_SEED: Final = 20240229


@dataclass(frozen=True, slots=True)
class Coefficient:
    """State one fitted coefficient, relative to its nominal value.

    Attributes:
        label: what the term is, such as ``rank 3``; several joined when their data are equal.
        estimate: the fitted coefficient; 1 is right.
        sigma: its standard error.
        floor: what rounding may do to it systematically (0 until it mattered).
        resolution: how far from 1 the estimate must lie to be called off; infinite where it rests on
            too little to be tested.
        off: whether it does.
    """

    label: str
    estimate: float
    sigma: float
    floor: float
    resolution: float
    off: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """Hold the coefficients of one tensor on its summands.

    Attributes:
        coefficients: one a distinguishable term.
        rows: how many elements the fit rests on.
        refused: why nothing was tested, or ``None``.
    """

    coefficients: tuple[Coefficient, ...]
    rows: int
    refused: str | None

    @property
    def off(self) -> tuple[Coefficient, ...]:
        """Return the coefficients that are wrong."""
        return tuple(entry for entry in self.coefficients if entry.off)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Hold the elements that the fit uses: terms scaled to coefficient 1, and the weights."""

    terms: Float64  # rows x terms
    found: Float64
    bound: Float64


@dataclass(frozen=True, slots=True)
class _Solution:
    delta: Float64  # estimate - 1, one a column
    sigma: Float64
    effective: Float64  # how many rows each rests on
    operator: Float64  # columns x rows: delta = operator @ (residual / bound)
    leverage: Float64
    clusters: Any


def fit(
    found: Float64,
    terms: Sequence[tuple[str, Float64]],
    estimate: Estimate,
    dtype: Dtype,
    *,
    lost: float = 0.0,
) -> Fit:
    """Fit a recorded tensor on its summands and test every coefficient against 1.

    Args:
        found: 1-D recorded values.
        terms: ``(label, values)``, each already multiplied with its nominal coefficient.
        estimate: the law's recomputation; its ``error`` weighs the elements.
        dtype: the coarsest dtype in which the sum was rounded.
        lost: the largest error that one operation may make by underflow, where another dtype of the
            path has a narrower range than ``dtype``.

    Returns:
        The fit. Nothing is off when it was refused.
    """
    chosen = _choose(found, terms, estimate, dtype, max(lost, underflow(dtype)))
    labels = [label for label, _ in terms]
    if len(chosen.found) < FEWEST_ROWS:
        return Fit((), len(chosen.found), f"only {len(chosen.found)} elements to fit on")
    groups = _groups(chosen.terms)
    solution, groups = _solve_or_merge(chosen, groups)
    if solution is None:
        return Fit((), len(chosen.found), "the terms cannot be told apart")
    smallest = SMALLEST_EFFECT[dtype.name]
    floor = np.zeros(len(groups))
    off = _off(solution, smallest, floor)
    if off.any():  # now look closely: everything that could excuse it
        sums, grid = _simulate(chosen.terms, dtype)
        solution = _by_cluster(chosen, groups, solution, _clusters(chosen.terms, grid))
        off = _off(solution, smallest, floor)
        if off.any():
            floor = _floor(chosen, groups, solution, sums, grid)
            off = _off(solution, smallest, floor)
    resolution = _resolution(solution, smallest, floor)
    coefficients = tuple(
        Coefficient(
            label=", ".join(labels[at] for at in group),
            estimate=1 + float(solution.delta[column]),
            sigma=float(solution.sigma[column]),
            floor=float(floor[column]),
            resolution=float(resolution[column]),
            off=bool(off[column]),
        )
        for column, group in enumerate(groups)
    )
    return Fit(coefficients, len(chosen.found), None)


def round_to(values: Float64, dtype: Dtype) -> Float64:
    """Round float64 values to a dtype, to nearest, and widen them again."""
    return to_float64(raw_bits(from_float64(values, dtype), dtype), dtype).reshape(values.shape)


def _resolution(solution: _Solution, smallest: float, floor: Float64) -> Float64:
    tested = (solution.effective >= FEWEST_EFFECTIVE) & (floor < LARGEST_FLOOR)
    return np.where(tested, np.maximum(SIGMAS * solution.sigma + floor, smallest), np.inf)


def _off(solution: _Solution, smallest: float, floor: Float64) -> Mask:
    result: Mask = np.abs(solution.delta) > _resolution(solution, smallest, floor)
    return result


def _choose(
    found: Float64,
    terms: Sequence[tuple[str, Float64]],
    estimate: Estimate,
    dtype: Dtype,
    lost: float,
) -> _Rows:
    """Take the elements that say something: finite, not near underflow, not too many."""
    size = np.zeros(len(found))
    with np.errstate(invalid="ignore", over="ignore"):
        for _, values in terms:
            size += np.abs(values)
        # Where underflow may be a tenth of the rounding error, rounding is not relative any more.
        small = 20.0 * len(terms) * lost / dtype.unit_roundoff
        usable = np.isfinite(found) & np.isfinite(size) & (size > small) & (estimate.error > 0)
        usable &= ~estimate.overflow
    (rows,) = np.nonzero(usable)
    most = min(MOST_ROWS, max(FEWEST_ROWS, MOST_CELLS // max(1, len(terms))))
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(_SEED).choice(rows, most, replace=False))
    table = np.stack([values[rows] for _, values in terms], axis=1)
    return _Rows(table, found[rows], estimate.error[rows])


def _hash_rows(table: Float64) -> NDArray[Any]:
    """Hash each row of a float64 table to 64 bits, exactly equal rows alike."""
    keys = np.random.default_rng(_SEED).integers(1, 2**63, table.shape[1], dtype=np.uint64)
    bits = np.ascontiguousarray(table + 0.0).view(np.uint64)  # + 0.0 turns -0 into 0
    mixed = (bits ^ (bits >> np.uint64(29))) * (keys * np.uint64(2) + np.uint64(1))
    hashes: NDArray[Any] = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(32)), axis=1)
    return hashes


def _groups(table: Float64) -> list[list[int]]:
    """Put terms with equal data into one column, and leave out those that are zero everywhere."""
    hashes = _hash_rows(np.ascontiguousarray(table.T))
    groups: dict[int, list[int]] = {}
    for at, value in enumerate(hashes):
        if table[:, at].any():
            groups.setdefault(int(value), []).append(at)
    return list(groups.values())


def _columns(table: Float64, groups: Sequence[Sequence[int]]) -> Float64:
    return np.stack([table[:, group].sum(axis=1) for group in groups], axis=1)


def _solve_or_merge(
    chosen: _Rows, groups: list[list[int]]
) -> tuple[_Solution | None, list[list[int]]]:
    """Solve for every term; where they cannot be told apart, for their sum alone."""
    if not groups:
        return None, groups
    if len(chosen.found) >= 4 * len(groups):
        solution = _solve(chosen, groups)
        if solution is not None:
            return solution, groups
    merged = [sorted(at for group in groups for at in group)]
    return _solve(chosen, merged), merged


def _solve(chosen: _Rows, groups: Sequence[Sequence[int]]) -> _Solution | None:
    design = _columns(chosen.terms, groups) / chosen.bound[:, None]
    length = np.sqrt(np.einsum("ij,ij->j", design, design))
    if not (np.isfinite(length) & (length > 0)).all():
        return None
    unit = design / length
    values, vectors = np.linalg.eigh(unit.T @ unit)
    if not values[0] * WORST_CONDITION**2 > values[-1]:
        return None
    inverse = (vectors / values) @ vectors.T
    operator = (inverse @ unit.T) / length[:, None]
    leverage = np.minimum(np.einsum("ij,ji->i", unit @ inverse, unit.T), 1 - 1e-6)
    effective = _effective(np.square(operator))
    alone = np.arange(len(chosen.found))
    delta, sigma = _estimate(chosen, groups, operator, leverage, alone, chosen.found)
    return _Solution(delta, sigma, effective, operator, leverage, alone)


def _by_cluster(
    chosen: _Rows, groups: Sequence[Sequence[int]], solution: _Solution, clusters: Any
) -> _Solution:
    """Estimate the errors again, elements that round alike taken together."""
    energy = _sum_by(clusters, np.square(solution.operator))
    delta, sigma = _estimate(
        chosen, groups, solution.operator, solution.leverage, clusters, chosen.found
    )
    return replace(
        solution, delta=delta, sigma=sigma, effective=_effective(energy), clusters=clusters
    )


def _effective(energy: Float64) -> Float64:
    """Return how many rows (or clusters) each column rests on: the participation ratio."""
    result: Float64 = energy.sum(axis=1) ** 2 / np.square(energy).sum(axis=1)
    return result


def _sum_by(clusters: Any, table: Float64) -> Float64:
    """Add up columns x rows by the rows' cluster."""
    return np.stack([np.bincount(clusters, weights=row) for row in table])


def _estimate(
    chosen: _Rows,
    groups: Sequence[Sequence[int]],
    operator: Float64,
    leverage: Float64,
    clusters: Any,
    found: Float64,
) -> tuple[Float64, Float64]:
    """Return how far each coefficient is from 1, and its standard error (HC3, by cluster)."""
    columns = _columns(chosen.terms, groups)
    residual = (found - chosen.terms.sum(axis=1)) / chosen.bound
    delta = operator @ residual
    left = (residual - (columns @ delta) / chosen.bound) / (1 - leverage)
    sigma = np.sqrt(np.square(_sum_by(clusters, operator * left)).sum(axis=1))
    return delta, sigma


def _clusters(terms: Float64, grid: Float64) -> Any:
    """Number the elements so that those which round alike have one number."""
    exponent = np.frexp(np.abs(terms).max(axis=1))[1]
    fine = np.maximum(grid / 8, np.finfo(np.float64).tiny)[:, None]
    scaled = np.ldexp(np.rint(terms / fine) * fine, -exponent[:, None])
    lead = np.argmax(scaled != 0, axis=1)
    scaled *= np.sign(scaled[np.arange(len(scaled)), lead])[:, None]
    return np.unique(_hash_rows(scaled), return_inverse=True)[1]


def _floor(
    chosen: _Rows,
    groups: Sequence[Sequence[int]],
    solution: _Solution,
    sums: Sequence[Float64],
    grid: Float64,
) -> Float64:
    """Measure what rounding itself may do to the coefficients systematically.

    Args:
        sums: the simulated outputs.
        grid: distance of the dtype's numbers at each element's largest partial sum.
    """
    systematic = np.zeros(len(groups))
    for total in sums:
        delta, sigma = _estimate(
            chosen, groups, solution.operator, solution.leverage, solution.clusters, total
        )
        systematic = np.maximum(systematic, np.abs(delta) - SIGMAS / 2 * sigma)
    # What tells a column from the others, in its own units. Rounding to a grid g moves an element
    # by g/2 at most. Where a column has few distinct values, all its errors may point one way;
    # where it is rich, errors of x alternate over the grid and only their square counts.
    energy = np.square(solution.operator)
    own = np.abs(solution.operator) / energy.sum(axis=1, keepdims=True) * chosen.bound
    reach = grid[None, :] / 2
    columns = _columns(chosen.terms, groups)
    poor = np.array([len(np.unique(np.abs(column))) < FEWEST_VALUES for column in columns.T])
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(own > 0, np.minimum(1.0, reach / own), 0.0)
    share = np.where(poor[:, None], share, np.square(share))
    lost = (energy * share).sum(axis=1) / energy.sum(axis=1)
    result: Float64 = 3 * np.maximum(systematic, 0.0) + lost
    return result


def _simulate(terms: Float64, dtype: Dtype) -> tuple[list[Float64], Float64]:
    """Add the terms up in a dtype in several orders.

    Returns:
        The sums, and the distance of the dtype's numbers at each element's largest partial sum.
    """
    rounded = round_to(terms, dtype)
    largest = np.abs(rounded).max(axis=1)
    sums = [round_to(terms.sum(axis=1), dtype), _tree(rounded, dtype)]
    for order in _orders(terms):
        partial = np.zeros(len(terms))
        for at in order:
            partial = round_to(partial + rounded[:, at], dtype)
            np.maximum(largest, np.abs(partial), out=largest)
        sums.append(partial)
    exponent = np.frexp(largest)[1]
    return sums, np.ldexp(dtype.unit_roundoff, exponent)


def _tree(rounded: Float64, dtype: Dtype) -> Float64:
    left = rounded
    while left.shape[1] > 1:
        even = left.shape[1] // 2 * 2
        pairs = round_to(left[:, 0:even:2] + left[:, 1:even:2], dtype)
        left = np.concatenate([pairs, left[:, even:]], axis=1)
    result: Float64 = left[:, 0]
    return result


def _orders(table: Float64) -> Iterator[NDArray[Any]]:
    """Yield orders of summation that differ much: as it stands, reversed, by sign, at random."""
    count = table.shape[1]
    yield np.arange(count)
    if count > 1:
        yield np.arange(count)[::-1]
    if count > 2:
        by_sum = np.argsort(table.sum(axis=0), kind="stable")
        yield by_sum
        yield by_sum[::-1]
        by_size = np.argsort(np.abs(table).sum(axis=0), kind="stable")
        yield by_size
        yield by_size[::-1]
        generator = np.random.default_rng(_SEED)
        for _ in range(2):
            yield generator.permutation(count)
