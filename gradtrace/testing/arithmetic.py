"""Round and add as kernels and collectives do, in numpy: the paths that a law's bound must cover.

An `Arithmetic` says in which order a collective adds its ranks, in which precision it holds partial
sums, where it divides, and whether subnormals are flushed. Every operation rounds to nearest; 16-bit
ones are computed in float32 and rounded again, as hardware does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from gradtrace.trace.dtypes import DTYPES, Dtype, Float64, from_float64, raw_bits, to_float64

Order = Literal["chain", "shuffled", "tree", "ring", "hierarchical"]
ORDERS: Final[tuple[Order, ...]] = ("chain", "shuffled", "tree", "ring", "hierarchical")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Describe how a collective computes a mean.

    Attributes:
        order: of the additions. ``ring`` starts each of W chunks at another rank; ``hierarchical``
            adds within nodes first.
        wide: hold partial sums in float32 and round once at the end.
        flush: subnormals of float32 and bfloat16 become zero, as inputs and as results.
        predivide: what each rank divides by before the sum; the result is multiplied by it.
        postscale: divide the sum by the world size, instead of each contribution.
        seed: of ``shuffled`` and of the nodes of ``hierarchical``.
    """

    order: Order = "chain"
    wide: bool = False
    flush: bool = False
    predivide: float = 1.0
    postscale: bool = False
    seed: int = 0

    def round(self, values: Float64, dtype: Dtype) -> Float64:
        """Round float64 values to a dtype as one operation's result."""
        if dtype.name in ("bfloat16", "float16"):
            values = self._flushed(_to(values, DTYPES["float32"]), DTYPES["float32"])
        return self._flushed(_to(values, dtype), dtype)

    def add(self, one: Float64, other: Float64, dtype: Dtype) -> Float64:
        """Add two tensors of a dtype."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.round(self._flushed(one, dtype) + self._flushed(other, dtype), dtype)

    def times(self, values: Float64, factor: float, dtype: Dtype) -> Float64:
        """Multiply by a scalar that is rounded to float32 first."""
        if factor == 1:
            return values
        with np.errstate(invalid="ignore", over="ignore"):
            return self.round(self._flushed(values, dtype) * float(np.float32(factor)), dtype)

    def _flushed(self, values: Float64, dtype: Dtype) -> Float64:
        if not self.flush or dtype.name == "float16":  # float16's subnormals are never flushed
            return values
        return np.where(np.abs(values) < dtype.smallest_normal, 0.0 * values, values)


def mean(tensors: Sequence[Float64], dtype: Dtype, how: Arithmetic) -> Float64:
    """Return the mean that a collective computes from its ranks' tensors.

    Args:
        tensors: one a rank, 1-D float64 that hold values of ``dtype``.
        dtype: of the wire.
        how: the arithmetic.

    Returns:
        1-D float64 that hold values of ``dtype``.
    """
    world = len(tensors)
    sent = [how.times(values, 1 / how.predivide, dtype) for values in tensors]
    after = how.predivide / world if how.postscale else how.predivide
    if not how.postscale:
        sent = [how.times(values, 1 / world, dtype) for values in sent]
    held = DTYPES["float32"] if how.wide and dtype.size_bytes < 4 else dtype
    total = how.round(add_up(sent, held, how), dtype)
    return how.times(total, after, dtype)


def add_up(tensors: Sequence[Float64], dtype: Dtype, how: Arithmetic) -> Float64:
    """Add tensors up in the order that the arithmetic says, every sum rounded to a dtype."""
    world, rng = len(tensors), np.random.default_rng(how.seed)
    if how.order == "ring":
        ends = [len(tensors[0]) * chunk // world for chunk in range(world + 1)]
        return np.concatenate(
            [
                _chain([tensors[(c + k) % world][ends[c] : ends[c + 1]] for k in range(world)],
                       dtype, how)
                for c in range(world)
            ]
        )  # fmt: skip
    if how.order == "tree":
        level = list(tensors)
        while len(level) > 1:
            pairs = [how.add(level[at], level[at + 1], dtype) for at in range(0, len(level) - 1, 2)]
            level = pairs + level[len(pairs) * 2 :]
        return level[0]
    if how.order == "hierarchical":
        node = int(rng.integers(1, world + 1))
        inner = [_chain(tensors[at : at + node], dtype, how) for at in range(0, world, node)]
        return _chain(inner, dtype, how)
    order = rng.permutation(world) if how.order == "shuffled" else range(world)
    return _chain([tensors[at] for at in order], dtype, how)


def _chain(tensors: Sequence[Float64], dtype: Dtype, how: Arithmetic) -> Float64:
    total = tensors[0]
    for values in tensors[1:]:
        total = how.add(total, values, dtype)
    return total


def _to(values: Float64, dtype: Dtype) -> Float64:
    return to_float64(raw_bits(from_float64(values, dtype), dtype), dtype)
