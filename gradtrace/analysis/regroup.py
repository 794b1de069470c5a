"""Weigh the micro-steps of one run so that they give the other run's averaged gradient.

Two runs that cut the same rows differently owe each other the same averaged gradient only if every row
counts alike. A loss that is averaged over each micro-batch's own tokens does not: the same local
gradients then enter with other weights. Which, a least-squares fit over all parameters tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from gradtrace.trace.dtypes import Float64

MOST_TERMS: Final = 256  # ranks x micro-steps
FEWEST_FREE: Final = 16  # elements beyond the number of terms
_SINGULAR: Final = 1e-10  # smallest over largest singular value of the normal equations
_ABSENT: Final = 1e-3  # a weight below this, and below the fit's own error, is none


@dataclass
class Regroup:
    """Gather the normal equations of one step, parameter by parameter.

    Attributes:
        finer: the run whose micro-steps are weighed.
        labels: (rank, micro_step) of each term; a weight of 1 is what that run itself gave it.
        gram, inner, power: sums over all elements of term x term, term x target, target x target.
        elements: how many there were.
    """

    finer: Literal["baseline", "candidate"]
    labels: tuple[tuple[int, int], ...]
    gram: NDArray[np.float64] = field(init=False)
    inner: Float64 = field(init=False)
    power: float = 0.0
    elements: int = 0

    def __post_init__(self) -> None:
        self.gram = np.zeros((len(self.labels), len(self.labels)))
        self.inner = np.zeros(len(self.labels))

    def add(self, target: Float64, terms: NDArray[np.float64]) -> None:
        """Add a parameter.

        Args:
            target: 1-D averaged gradient of the other run, seed taken out.
            terms: ``[term, element]`` whose sum is the finer run's.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            self.gram += terms @ terms.T
            self.inner += terms @ target
            self.power += float(target @ target)
        self.elements += len(target)

    def weights(self, tolerance: float) -> tuple[Float64, float] | None:
        """Return the weight of each term and the relative L2 of what they leave, or ``None``.

        Args:
            tolerance: the most that they may leave.
        """
        enough = self.elements >= len(self.labels) + FEWEST_FREE
        if not enough or not np.isfinite(self.gram).all() or not math.isfinite(self.power):
            return None
        if self.power <= 0 or not np.isfinite(self.inner).all():
            return None
        solution, _, rank, _ = np.linalg.lstsq(self.gram, self.inner, rcond=_SINGULAR)
        if rank < len(self.labels):
            return None
        found = np.asarray(solution, dtype=np.float64)
        left = self.power - 2 * float(found @ self.inner) + float(found @ self.gram @ found)
        relative = math.sqrt(max(left, 0.0) / self.power)
        return (found, relative) if relative <= tolerance else None

    def story(self, tolerance: float, shown: int = 8) -> tuple[str, str] | None:
        """Return a cause and a sentence where weights explain the difference, else ``None``."""
        solved = self.weights(tolerance)
        if solved is None:
            return None
        found, left = solved
        if (found < -_ABSENT).any():
            return None
        other = "baseline" if self.finer == "candidate" else "candidate"
        absent = [
            label for label, weight in zip(self.labels, found, strict=True) if weight < _ABSENT
        ]
        what = f"{other}'s averaged gradient to within {max(left, 1e-16):.1g} of its norm"
        if absent:
            names = ", ".join(f"{m} of rank {r}" for r, m in absent[:shown])
            names += ", ..." if len(absent) > shown else ""
            return "inputs_differ", (
                f"Without micro-step {names}, the {self.finer}'s local gradients give the {what}: the "
                f"{other} was not given these batches."
            )
        listed = ", ".join(
            f"{weight:.6g} in micro-step {m} of rank {r}"
            for (r, m), weight in list(zip(self.labels, found, strict=True))[:shown]
        )
        listed += ", ..." if len(self.labels) > shown else ""
        return "scaled", (
            f"With other weights, the {self.finer}'s local gradients give the {what}: {listed}. A loss "
            "that is normalised otherwise, not a fault of ZeRO."
        )
