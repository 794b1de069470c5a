"""Digests of live tensors: the reference's bits, whatever the dtype, the cut, the layout in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gradtrace.capture import digest  # noqa: E402
from gradtrace.capture.snapshot import Piece, Sighting, resolve, whole  # noqa: E402
from gradtrace.trace.digest import MASK, add_hashes, digest_of, value_hash  # noqa: E402
from gradtrace.trace.dtypes import DTYPES, raw_bits  # noqa: E402
from gradtrace.trace.spans import PADDING, Span  # noqa: E402

RAW = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
SIZES = (1, 7, digest._CHUNK_CPU, digest._CHUNK_CPU + 1, 2 * digest._CHUNK_CPU + 5)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(flat.tobytes(), RAW[tensor.element_size()])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn],
    ids=str,
)  # fmt: skip
def test_the_hash_has_the_references_bits(dtype: torch.dtype, size: int) -> None:
    random = torch.Generator().manual_seed(size)
    tensor = (torch.randn(size, generator=random) * 50).to(dtype)
    for first in (0, 3, 2**40):
        found = int(digest.value_hash(tensor, first)) & MASK
        assert found == value_hash(bits_of(tensor), first)


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=50),
    cut=st.integers(0, 50),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
)
def test_a_digest_of_shards_is_that_of_the_reference_and_adds_up(
    values: list[float], cut: int, dtype: str
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))
    bits = bits_of(tensor)
    cut = min(cut, len(values))
    pieces = [Piece(0, 0, 0, cut), Piece(0, cut, cut, len(values) - cut)]
    pieces = [piece for piece in pieces if piece.numel]
    found = digest.summarize(Sighting("w", ((tensor, tuple(pieces)),)), {0})
    assert found is not None
    assert (found.dtype, found.layout[0].param) == (dtype, 0)
    members = resolve(found.values)
    kind = DTYPES[dtype]
    stretches = [
        (bits[p.tensor_offset : p.tensor_offset + p.numel], p.param_offset) for p in pieces
    ]
    wanted = digest_of(stretches, kind)
    assert members["l2"] == pytest.approx(wanted.pop("l2"), rel=1e-12)
    assert {name: members[name] for name in wanted} == wanted
    assert int(add_hashes(members["hash"]), 16) == value_hash(raw_bits(bits.tobytes(), kind))


def test_padding_and_what_is_not_planned_are_left_out() -> None:
    tensor = torch.arange(10.0)
    pieces = (Piece(0, 5, 0, 3), Piece(PADDING, 0, 3, 2), Piece(1, 0, 5, 2), Piece(2, 0, 7, 3))
    found = digest.summarize(Sighting("group0", ((tensor, pieces),)), {0, 2})
    assert found is not None
    assert found.layout == (Span(0, 5, 0, 3), Span(2, 0, 3, 3))
    assert resolve(found.values)["max_abs"] == [2.0, 9.0]
    assert digest.summarize(Sighting("group0", ((tensor, pieces),)), {7}) is None


def test_tensors_are_not_touched_and_views_are_read_in_c_order() -> None:
    tensor = torch.randn(6, 5).t().requires_grad_()
    before = tensor.detach().clone()
    found = digest.summarize(Sighting("w", ((tensor, whole(0, tensor)),)), {0})
    assert found is not None
    assert torch.equal(tensor, before)
    assert resolve(found.values)["hash"] == [f"{value_hash(bits_of(before.contiguous())):016x}"]


def test_no_random_number_is_drawn() -> None:
    state = torch.get_rng_state()
    digest.value_hash(torch.ones(100))
    digest.summarize(Sighting("w", ((torch.ones(9), whole(0, torch.ones(9))),)), {0})
    assert torch.equal(torch.get_rng_state(), state)


def test_complex_numbers_are_two_elements_conjugated_or_not() -> None:
    tensor = torch.tensor([1 + 2j, math.nan - 0j])
    plain = torch.view_as_real(tensor).reshape(-1)
    assert int(digest.value_hash(tensor)) == int(digest.value_hash(plain))
    lazy = torch.tensor([1 - 2j]).conj()
    assert int(digest.value_hash(lazy)) == int(digest.value_hash(torch.tensor([1 + 2j])))


def test_what_cannot_be_read_safely_is_not_hashed() -> None:
    class Odd(torch.Tensor):
        pass

    assert digest.hashable(torch.ones(2)) and digest.hashable(torch.nn.Parameter(torch.ones(2)))
    for odd in (
        torch.ones(2).as_subclass(Odd),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    ):
        assert not digest.hashable(odd)
    assert int(digest.value_hash(torch.empty(0))) == 0
