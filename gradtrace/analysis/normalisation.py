"""Say whether two runs that cut a batch differently only weigh its pieces differently.

A loop that averages each micro-batch's loss over its own tokens gives a short micro-batch the weight
of a long one. Cut otherwise, the same batch then has another gradient, and ZeRO has no part in it.
So the averaged gradient of one run is fitted, over all parameters at once, on the other run's local
gradients, one coefficient for each micro-step of each rank: 1 is the other run's own weight.

Source: the case is huggingface/transformers issue 34191 ("mean of means").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrace.analysis.compare import Step
from gradtrace.analysis.gate import Pair
from gradtrace.analysis.judging import MARGIN, thresholds
from gradtrace.analysis.sides import Locals, Side
from gradtrace.trace.dtypes import Float64

MOST_TERMS: Final = 64  # ranks x micro-steps that are fitted
_ABSENT: Final = 1e-3  # a weight below this is none
_ELEMENTS: Final = 16  # for each term, so that no fit comes about by chance
Term = tuple[int, int]  # rank, micro_step


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Say how much each piece of one run's batch counts in the other run's gradient.

    Attributes:
        of: the run whose pieces they are.
        other: the run in whose gradient they count so.
        weights: (rank, micro_step) -> weight; 1 where both runs weigh it alike.
    """

    of: str
    other: str
    weights: Mapping[Term, float]

    @property
    def absent(self) -> tuple[Term, ...]:
        """Return the pieces that the other run's gradient holds nothing of."""
        return tuple(term for term, weight in self.weights.items() if abs(weight) < _ABSENT)

    def told(self) -> str:
        """Return the weights in words."""
        ranks = sorted({rank for rank, _ in self.weights})
        rows = []
        for rank in ranks[:2]:
            row = [f"{value:.4g}" for (at, _), value in sorted(self.weights.items()) if at == rank]
            rows.append(f"rank {rank}: {', '.join(row[:8])}" + (", ..." if row[8:] else ""))
        more = "; ..." if ranks[2:] else ""
        if self.absent:
            names = ", ".join(f"{at} of rank {rank}" for rank, at in self.absent[:8])
            names += ", ..." if self.absent[8:] else ""
            return (
                f"Without micro-step {names}, the {self.of}'s local gradients give the {self.other}'s: "
                f"the {self.other} was not given these batches."
            )
        return (
            f"In the {self.other}'s gradient the {self.of}'s micro-steps weigh ({'; '.join(rows)}"
            f"{more}), where 1 is their weight in its own."
        )


@dataclass(frozen=True)
class _Moments:
    """Hold one parameter's inner products: of the terms, of terms and target, of the target."""

    terms: NDArray[np.float64]
    both: NDArray[np.float64]
    target: float
    numel: int


def loss_weights(step: Step, pairs: Sequence[Pair]) -> LossWeights | None:
    """Fit the averaged gradient of the run of fewer pieces on the pieces of the other.

    Returns:
        ``None`` where the fit leaves more than rounding, explains too little, is not determined, or
        turns a gradient round, which no normalisation does.
    """
    counts = [len(_terms(side, step.step)) for side in step.sides]
    fine = 0 if counts[0] > counts[1] else 1
    side, other = step.sides[fine], step.sides[1 - fine]
    terms = _terms(side, step.step)
    seeds = side.total_seed(step.step), other.total_seed(step.step)
    if not 2 <= len(terms) <= MOST_TERMS or seeds[0] is None or seeds[1] is None:
        return None
    found: list[_Moments] = []
    for pair in pairs:
        indices = (pair.baseline, pair.candidate)
        pieces = Locals(side, step.step, indices[fine])
        whole = Locals(other, step.step, indices[1 - fine])
        if not pieces.known or not whole.known:
            return None
        target = whole.mean(other.align.micro_steps(step.step)).value / seeds[1]
        zeros = np.zeros(pair.numel)
        share = (1 / len(side.align.ranks) if side.averages else 1.0) / seeds[0]
        columns = np.stack([pieces.values.get(term, zeros) for term in terms]) * share
        if not (np.isfinite(target).all() and np.isfinite(columns).all()):
            return None
        found.append(
            _Moments(columns @ columns.T, columns @ target, float(target @ target), pair.numel)
        )
    weights = _solve(found, thresholds(step.dtype).rounding)
    if weights is None:
        return None
    return LossWeights(side.name, other.name, dict(zip(terms, weights, strict=True)))


def _terms(side: Side, step: int) -> list[Term]:
    return [(rank, at) for rank in side.align.ranks for at in side.align.micro_steps(step)]


def _solve(found: Sequence[_Moments], rounding: float) -> list[float] | None:
    """Return the coefficients if they explain every parameter to rounding, and 1 does not."""
    used = [entry for entry in found if entry.numel]
    count = sum(entry.numel for entry in used)
    if len(used) < 2:
        return None
    gram = np.sum([entry.terms for entry in used], axis=0)
    both = np.sum([entry.both for entry in used], axis=0)
    total = math.fsum(entry.target for entry in used)
    if count < _ELEMENTS * len(gram) or not total > 0:
        return None
    diagonal = np.sqrt(np.diag(gram))
    live = diagonal > 0
    if live.sum() < 2:
        return None
    scaled = gram[np.ix_(live, live)] / np.outer(diagonal[live], diagonal[live])
    # Errors of the moments are some roundoffs of float64 large; this leaves nine digits.
    if np.linalg.cond(scaled) > 1e6:
        return None
    weights: Float64 = np.ones(len(gram))
    weights[live] = np.linalg.solve(scaled, both[live] / diagonal[live]) / diagonal[live]
    if (weights < -_ABSENT).any():
        return None
    left = [
        max(e.target - 2 * float(weights @ e.both) + float(weights @ e.terms @ weights), 0.0)
        for e in used
    ]
    typical = total / count
    for entry, rest in zip(used, left, strict=True):
        if rest > rounding**2 * max(entry.target, typical * entry.numel):
            return None
    spread = np.sqrt(
        math.fsum(left) / max(count - int(live.sum()), 1) * np.diag(np.linalg.inv(scaled))
    )
    apart = np.abs(weights[live] - 1)
    least = np.maximum(rounding, MARGIN * spread / diagonal[live])
    return weights.tolist() if bool((apart > least).any()) else None
