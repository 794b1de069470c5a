"""Snapshots: copies in the right order, of nothing but what is planned."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gradtrace.capture.snapshot import Piece, Sighting, resolve, take, whole  # noqa: E402
from gradtrace.trace.spans import PADDING, Span  # noqa: E402


def test_a_whole_tensor_is_copied_in_c_order_and_not_shared() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    snapshot = take(Sighting("w", ((tensor, whole(4, tensor)),)), {4})
    assert snapshot is not None
    tensor.zero_()
    assert snapshot.data.tolist() == [0, 3, 1, 4, 2, 5]
    assert snapshot.layout == (Span(4, 0, 0, 6),)
    assert np.frombuffer(snapshot.raw(), "<f4").tolist() == [0, 3, 1, 4, 2, 5]


def test_pieces_of_several_tensors_are_laid_end_to_end_and_the_unplanned_left_out() -> None:
    one, two = torch.arange(10.0), torch.arange(100.0, 110.0)
    sighting = Sighting(
        "group0",
        (
            (one, (Piece(0, 5, 2, 3), Piece(1, 0, 5, 2))),
            (two, (Piece(2, 0, 0, 4), Piece(PADDING, 0, 8, 2))),
        ),
    )
    snapshot = take(sighting, {0, 2})
    assert snapshot is not None
    assert snapshot.data.tolist() == [2, 3, 4, 100, 101, 102, 103, 108, 109]
    assert snapshot.layout == (
        Span(0, 5, 0, 3),
        Span(2, 0, 3, 4),
        Span(PADDING, 0, 7, 2),
    )
    assert take(sighting, {7}) is None


def test_bfloat16_bits_survive() -> None:
    tensor = torch.tensor([1.0, -2.5, math.inf, math.nan]).bfloat16()
    snapshot = take(Sighting("w", ((tensor, whole(0, tensor)),)), {0})
    assert snapshot is not None
    assert snapshot.dtype == "bfloat16"
    assert np.frombuffer(snapshot.raw(), "<u2").tolist() == [
        int(bits) & 0xFFFF for bits in tensor.view(torch.int16).tolist()
    ]


def test_facts_become_json() -> None:
    facts = {
        "a": torch.tensor(1.5),
        "b": math.inf,
        "c": torch.tensor(math.nan),
        "d": [torch.bfloat16, (1, True, None)],
        "e": {"f": object},
    }
    assert resolve(facts) == {
        "a": 1.5,
        "b": "Infinity",
        "c": "NaN",
        "d": ["bfloat16", [1, True, None]],
        "e": {"f": "<class 'object'>"},
    }
