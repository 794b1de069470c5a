"""Rounding and widening of raw bits: bitwise, against torch where it is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.trace.dtypes import BY_CODE, DTYPES, from_float64, raw_bits, to_float64

NAMES = tuple(DTYPES)
REPEATABLE = st.floats(width=64, allow_nan=True, allow_infinity=True)


def round_to(values: list[float], name: str) -> np.ndarray:
    dtype = DTYPES[name]
    return to_float64(raw_bits(from_float64(np.array(values), dtype), dtype), dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_pattern_survives_widening_and_rounding(name: str) -> None:
    dtype = DTYPES[name]
    bits = np.arange(2**16, dtype="<u2")
    wide = to_float64(bits, dtype)
    again = raw_bits(from_float64(wide, dtype), dtype)
    number = ~np.isnan(wide)
    assert np.array_equal(bits[number], again[number])
    assert np.isnan(to_float64(again, dtype)[~number]).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_float32_bits_survive(bits: list[int]) -> None:
    raw = np.array(bits, dtype="<u4")
    wide = to_float64(raw, DTYPES["float32"])
    again = raw_bits(from_float64(wide, DTYPES["float32"]), DTYPES["float32"])
    number = ~np.isnan(wide)
    assert np.array_equal(raw[number], again[number])
    assert np.isnan(to_float64(again, DTYPES["float32"])[~number]).all()


@given(st.lists(REPEATABLE, min_size=1, max_size=50))
@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_to_the_nearest_number(name: str, values: list[float]) -> None:
    dtype = DTYPES[name]
    for value, found in zip(values, round_to(values, name), strict=True):
        if math.isnan(value) or math.isinf(value):
            assert found == value or (math.isnan(found) and math.isnan(value))
        elif abs(value) <= dtype.largest:
            room = max(abs(value) * dtype.unit_roundoff, dtype.smallest_subnormal / 2)
            assert abs(found - value) <= room
            assert math.copysign(1, found) == math.copysign(1, value)


def test_bfloat16_does_not_round_twice() -> None:
    tie = 1.0 + 2.0**-8  # halfway between 1 and the next bfloat16
    assert round_to([tie], "bfloat16")[0] == 1.0  # ties go to even
    # float64 -> float32 would land on the tie, and the tie on the wrong side of the truth
    assert round_to([tie + 2.0**-40], "bfloat16")[0] == 1.0 + 2.0**-7
    assert round_to([1.0 + 3 * 2.0**-8 - 2.0**-40], "bfloat16")[0] == 1.0 + 2.0**-7
    assert round_to([-(tie + 2.0**-40)], "bfloat16")[0] == -(1.0 + 2.0**-7)
    half = 2.0**-134  # half the smallest subnormal
    assert round_to([half], "bfloat16")[0] == 0.0
    assert round_to([half * (1 + 2.0**-40)], "bfloat16")[0] == 2 * half
    assert round_to([3 * half], "bfloat16")[0] == 4 * half


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_overflow_begins_where_rounding_says(name: str) -> None:
    dtype = DTYPES[name]
    edge = dtype.largest + dtype.largest * dtype.unit_roundoff / (2 - 2 * dtype.unit_roundoff)
    assert round_to([math.nextafter(edge, 0.0)], name)[0] == dtype.largest
    assert round_to([math.nextafter(edge, math.inf)], name)[0] == math.inf
    assert round_to([-1e300], name)[0] == -math.inf


@pytest.mark.parametrize("name", NAMES)
def test_table_agrees_with_its_own_rounding(name: str) -> None:
    dtype = DTYPES[name]
    assert BY_CODE[dtype.code] is dtype
    tiny, normal, top, u = (
        dtype.smallest_subnormal,
        dtype.smallest_normal,
        dtype.largest,
        dtype.unit_roundoff,
    )
    assert list(round_to([tiny, normal, top], name)) == [tiny, normal, top]
    assert round_to([tiny / 2], name)[0] == 0.0
    assert round_to([1.0 + u], name)[0] == 1.0
    assert round_to([1.0 + 2 * u], name)[0] == 1.0 + 2 * u
    assert normal == tiny / (2 * u)


def test_zero_elements() -> None:
    for dtype in DTYPES.values():
        assert to_float64(raw_bits(b"", dtype), dtype).shape == (0,)
        assert from_float64(np.zeros((0,)), dtype) == b""


def test_bits_that_are_not_aligned() -> None:
    data = memoryview(b"x" + from_float64(np.array([1.5, -2.0]), DTYPES["float32"]))[1:]
    assert list(to_float64(raw_bits(data, DTYPES["float32"]), DTYPES["float32"])) == [1.5, -2.0]


def test_widening_gives_a_copy() -> None:
    raw = np.array([1.0], dtype="<f8").view("<u8")
    wide = to_float64(raw, DTYPES["float64"])
    wide[0] = 7.0
    assert raw.view("<f8")[0] == 1.0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_torch_rounds_the_same(name: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    dtype = DTYPES[name]
    scale = np.exp2(rng.integers(-160, 140, size=20000).astype(np.float64))
    values = rng.normal(size=20000) * scale
    # and values around ties, a float32 step to either side
    steps = 1 + rng.integers(0, 1 << 9, size=20000) * 2.0**-9
    near = steps * (1 + rng.integers(-1, 2, size=20000) * 2.0**-24)
    with np.errstate(over="ignore"):
        values = np.concatenate([values, near]).astype(np.float32).astype(np.float64)
    single = torch.from_numpy(values).to(torch.float32)  # exact: they are float32 values
    theirs = single.to(getattr(torch, name))
    view = theirs.view(torch.int16 if dtype.size_bytes == 2 else torch.int32).numpy()
    assert np.array_equal(view.view(dtype.raw), raw_bits(from_float64(values, dtype), dtype))
