"""Decode the dtypes of a trace from little-endian raw bytes, without torch.

numpy has no bfloat16, and safetensors' numpy side refuses it, so bf16 is widened here by hand: a
bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Dtype:
    """Describe one floating-point format.

    Attributes:
        name: torch's name, such as ``bfloat16``.
        code: the name in safetensors headers, such as ``BF16``.
        size_bytes: bytes an element.
        raw: numpy dtype of the raw bits, unsigned.
        unit_roundoff: largest relative error of rounding to nearest, 2**-p for p significand bits.
        smallest_subnormal: distance between the numbers nearest zero.
        smallest_normal: where gradual underflow begins.
        largest: largest finite number.
    """

    name: str
    code: str
    size_bytes: int
    raw: str
    unit_roundoff: float
    smallest_subnormal: float
    smallest_normal: float
    largest: float


DTYPES: Final[Mapping[str, Dtype]] = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", "F64", 8, "<u8", 2.0**-53, 5e-324, 2.0**-1022, float(np.finfo("f8").max)),
        Dtype(
            "float32", "F32", 4, "<u4", 2.0**-24, 2.0**-149, 2.0**-126, float(np.finfo("f4").max)
        ),
        Dtype("float16", "F16", 2, "<u2", 2.0**-11, 2.0**-24, 2.0**-14, 65504.0),
        Dtype(
            "bfloat16", "BF16", 2, "<u2", 2.0**-8, 2.0**-133, 2.0**-126, 2.0**127 * (2 - 2.0**-7)
        ),
    )
}
BY_CODE: Final[Mapping[str, Dtype]] = {dtype.code: dtype for dtype in DTYPES.values()}


def raw_bits(buffer: Any, dtype: Dtype) -> NDArray[Any]:
    """View raw little-endian bytes as the unsigned integers that hold their bits.

    Args:
        buffer: bytes-like, a whole number of elements.
        dtype: what the bytes hold.

    Returns:
        1-D array of ``dtype.raw``; no copy.
    """
    return np.frombuffer(buffer, dtype=dtype.raw)


def to_float64(bits: NDArray[Any], dtype: Dtype) -> Float64:
    """Widen raw bits to float64, exactly.

    Args:
        bits: 1-D unsigned integers as `raw_bits` gives them.
        dtype: what they hold.

    Returns:
        1-D float64 array, always a fresh copy.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        if dtype.name == "bfloat16":
            wide: NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
            return wide.view(np.float32).astype(np.float64)
        floats: Float64 = bits.view("<f" + str(dtype.size_bytes)).astype(np.float64)
    return floats


def from_float64(values: NDArray[Any], dtype: Dtype) -> bytes:
    """Round float64 values to a dtype, to nearest, ties to even; for hand-made traces.

    Args:
        values: array of any shape.
        dtype: what to round to.

    Returns:
        Little-endian raw bytes in C order.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if dtype.name != "bfloat16":
        with np.errstate(over="ignore"):
            return flat.astype("<f" + str(dtype.size_bytes)).tobytes()
    # Rounding float64 -> float32 -> bfloat16 could round twice; nudge with round-to-odd first.
    with np.errstate(over="ignore"):
        single = flat.astype(np.float32)
    bits = single.view(np.uint32).copy()
    inexact = (single.astype(np.float64) != flat) & np.isfinite(single)
    above = np.abs(single.astype(np.float64)) > np.abs(flat)
    bits[inexact & above] -= 1  # truncate towards zero
    bits[inexact] |= 1  # and remember that something was cut off
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = np.where(np.isnan(single), np.uint32(0x7FC0), rounded)
    return rounded.astype("<u2").tobytes()
