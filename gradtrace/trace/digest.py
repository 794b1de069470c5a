"""Digest values without keeping them: norm, counts, and a hash that adds over shards.

The hash of element ``i`` (C order, in the full parameter) with raw bits ``b`` is the ``i + 1``-th output
of SplitMix64 seeded with ``b``::

    z = b + (i + 1) * 0x9E3779B97F4A7C15                  (all arithmetic modulo 2**64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    mix64(i, b) = z ^ (z >> 31)

and the hash of a stretch is the sum of its elements' hashes modulo 2**64: the hashes of shards add up
to that of the parameter, however it is cut. ``mix64`` is a bijection of ``z``, so two tensors that
differ in one element never share a hash; others share one by a chance of 2**-64.

Raw bits are the little-endian unsigned integer of the element's size: -0.0 is not 0.0, and NaN is
equal to the same NaN.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the constants
are those of Vigna's splitmix64.c. This is the reference; `gradtrace.capture.digest` computes the same
bits in torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrace.trace.dtypes import Dtype, to_float64
from gradtrace.trace.schema import encode_float

GOLDEN: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB
MASK: Final = 2**64 - 1
MEMBERS: Final = ("l2", "max_abs", "zeros", "nans", "infs", "hash")  # of ``facts["digest"]``


def mix64(index: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash elements by their place and their raw bits.

    Args:
        index: place of each element in the full parameter, in C order.
        bits: their raw bits, widened with zeros; broadcasts with ``index``.
    """
    with np.errstate(over="ignore"):
        z = bits + (index + np.uint64(1)) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def value_hash(bits: NDArray[Any], first: int = 0) -> int:
    """Return the hash of a stretch, from 0 to 2**64 - 1.

    Args:
        bits: 1-D unsigned integers, as `gradtrace.trace.dtypes.raw_bits` gives them.
        first: place of the first of them in the full parameter.
    """
    index = np.arange(first, first + len(bits), dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int(np.add.reduce(mix64(index, bits.astype(np.uint64)), dtype=np.uint64))


def hash_text(value: int) -> str:
    """Write a hash as a trace holds it: 16 hex digits."""
    return f"{value & MASK:016x}"


def add_hashes(texts: Iterable[str]) -> str:
    """Return the hash of what several disjoint stretches of one parameter hold together."""
    return hash_text(sum(int(text, 16) for text in texts))


def digest_of(stretches: Iterable[tuple[NDArray[Any], int]], dtype: Dtype) -> dict[str, list[Any]]:
    """Return the member ``digest`` of a record's facts.

    Args:
        stretches: for each span its raw bits, and its ``param_offset``.
        dtype: what the bits hold.

    Returns:
        One list a member, one entry a span. ``l2`` and ``max_abs`` are over the finite elements.
    """
    members: dict[str, list[Any]] = {name: [] for name in MEMBERS}
    for bits, first in stretches:
        values = to_float64(bits, dtype)
        finite = values[np.isfinite(values)]
        members["l2"].append(encode_float(float(np.sqrt(np.square(finite).sum()))))
        members["max_abs"].append(float(np.abs(finite).max(initial=0.0)))
        members["zeros"].append(int(np.count_nonzero(values == 0)))
        members["nans"].append(int(np.count_nonzero(np.isnan(values))))
        members["infs"].append(int(np.count_nonzero(np.isinf(values))))
        members["hash"].append(hash_text(value_hash(bits, first)))
    return members
