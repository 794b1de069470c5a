"""Weights moved by one unit in the last place: exactly one, balanced, the same however they are cut."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import gradtrace
from gradtrace.capture.perturb import perturb_ulp, perturbation_of
from gradtrace.errors import BadOptionError, PerturbationError
from gradtrace.trace.digest import mix64

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RAW = {8: np.uint64, 4: np.uint32, 2: np.uint16}


class Holder(torch.nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def bits(tensor: torch.Tensor) -> Any:
    size = tensor.element_size()
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[size]
    return tensor.detach().contiguous().view(-1).view(kind).numpy().view(RAW[size])


def by_the_book(before: Any, name: str, sample: int, infinity: int) -> Any:
    """docs/format.md, element by element: what the raw bits become."""
    key = xxhash.xxh3_64_intdigest(f"{sample}:{name}".encode())
    mixed = mix64(np.arange(len(before), dtype=np.uint64), np.uint64(key))
    out = before.copy()
    top = np.array(1 << (8 * before.itemsize - 1), dtype=before.dtype)
    for at, (raw, mix) in enumerate(zip(before, mixed, strict=True)):
        size = int(raw) & (int(top) - 1)
        if 0 < size < infinity:
            up = bool(int(mix) >> 63) and size != infinity - 1
            out[at] = int(raw) + (1 if up else -1)
    return out


INFINITY = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
}


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), sample=st.integers(0, 2**31 - 1))
@settings(max_examples=50, deadline=None)
def test_every_bit_pattern_moves_as_the_format_says(
    dtype: torch.dtype, data: st.DataObject, sample: int
) -> None:
    """Subnormals, zeros of both signs, infinities, NaN and the largest number among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = data.draw(arrays.arrays(RAW[size], st.integers(1, 40)))
    edges = [0, 1, INFINITY[dtype] - 1, INFINITY[dtype], INFINITY[dtype] + 1]
    edges += [edge + (1 << (8 * size - 1)) for edge in edges]
    raw = np.concatenate([raw, np.array(edges, dtype=raw.dtype)])
    signed = {8: np.int64, 4: np.int32, 2: np.int16}[size]
    weight = torch.from_numpy(raw.view(signed).copy()).view(dtype)
    model = Holder(weight=weight.clone())
    moved = perturb_ulp(model, sample)
    after = bits(model.weight)
    expected = by_the_book(raw, "weight", sample, INFINITY[dtype])
    assert np.array_equal(after, expected)
    assert moved == np.count_nonzero(expected != raw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unit_up_or_down_and_balanced(dtype: torch.dtype) -> None:
    before = torch.randn(200_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    before[before == 0] = 1.0
    model = Holder(weight=before.clone())
    assert perturb_ulp(model, 7) == before.numel()
    steps = bits(model.weight).astype(np.int64) - bits(before).astype(np.int64)
    assert set(np.unique(steps)) == {-1, 1}
    # 200 003 fair coins: five standard deviations are 0.0056.
    assert abs(float(steps.mean())) < 0.0112
    # Neighbours and elements of the same row are independent of each other.
    for lag in (1, 2, 64, 8192):
        assert abs(float((steps[lag:] * steps[:-lag]).mean())) < 0.0112


@pytest.mark.parametrize("at", [0, 1])
def test_the_vectors_of_the_format(at: int) -> None:
    text = (Path(gradtrace.__file__).parents[1] / "docs" / "format.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+), `(\S+)` \| `[0-9a-f]{16}` \| ((?:yes|no)[^|]*) \|$", text, re.M)
    sample, name, signs = rows[at]
    model = torch.nn.Module()
    inner = model
    for part in name.split(".")[:-1]:
        inner.add_module(part, torch.nn.Module())
        inner = inner.get_submodule(part)
    inner.register_parameter(name.split(".")[-1], torch.nn.Parameter(torch.ones(8)))
    perturb_ulp(model, int(sample))
    moved = model.get_parameter(name)
    assert ["yes" if value > 1 else "no" for value in moved.tolist()] == signs.split(", ")


def test_samples_and_names_have_signs_of_their_own() -> None:
    ones = torch.ones(10_000)
    runs = []
    for sample in (0, 1):
        model = Holder(a=ones.clone(), b=ones.clone())
        perturb_ulp(model, sample)
        runs += [(model.a > 1).float() - 0.5, (model.b > 1).float() - 0.5]
    for one in range(4):
        for other in range(one):
            assert abs(float((runs[one] * runs[other]).mean())) < 0.25 * 0.05


@given(
    numel=st.integers(1, 60),
    ranks=st.integers(1, 5),
    gathered=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_partitions_move_as_the_whole_does(
    numel: int, ranks: int, gathered: bool, dtype: torch.dtype
) -> None:
    """As ZeRO-3 cuts: equal parts, the last one padded; padding stays."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole = Holder(w=values.clone())
    perturb_ulp(whole, 3)
    share = -(-numel // ranks)
    padded = torch.full((share * ranks,), 0.5, dtype=dtype)
    padded[:numel] = values
    pieces = []
    for rank in range(ranks):
        model = Holder(w=values.clone() if gathered else torch.empty(0, dtype=dtype))
        part = padded[rank * share : (rank + 1) * share].clone()
        part.ds_numel = share  # type: ignore[attr-defined]
        part.status = SimpleNamespace(name="AVAILABLE")  # type: ignore[attr-defined]
        facts = {
            "ds_id": 0,
            "ds_tensor": part,
            "ds_numel": numel,
            "ds_process_group": rank,
            "ds_status": SimpleNamespace(name="AVAILABLE" if gathered else "NOT_AVAILABLE"),
        }
        vars(model.w).update(facts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_rank", lambda group: group)
            perturb_ulp(model, 3)
        pieces.append(part)
        if gathered:
            assert torch.equal(model.w, whole.w)
    together = torch.cat(pieces)
    assert torch.equal(together[:numel], whole.w)
    assert (together[numel:] == 0.5).all()


def test_tied_frozen_transposed_and_integer_parameters_and_buffers() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4)
            self.two = torch.nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.two.bias.requires_grad_(False)
            self.turned = torch.nn.Parameter(torch.arange(1.0, 13.0).view(3, 4).t())
            self.codes = torch.nn.Parameter(torch.arange(3), requires_grad=False)
            self.register_buffer("table", torch.ones(3))

    torch.manual_seed(0)
    model = Model()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    perturb_ulp(model, 0)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        steps = np.abs(bits(tensor).astype(np.int64) - bits(before[name]).astype(np.int64))
        expected = 0 if name in ("codes", "table") else 1
        assert (steps == expected).all(), name
    # Not contiguous in memory, but counted in C order as everything is.
    plain = Holder(turned=torch.arange(1.0, 13.0).view(3, 4).t().contiguous())
    perturb_ulp(plain, 0)
    assert torch.equal(model.turned, plain.turned)


def test_weights_that_will_be_cast_are_moved_in_the_dtype_of_the_cast() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    early, late = Holder(w=values.clone()), Holder(w=values.to(torch.bfloat16))
    perturb_ulp(early, 2, dtype=torch.bfloat16)
    perturb_ulp(late, 2)
    assert early.w.dtype == torch.float32
    assert torch.equal(early.bfloat16().w, late.w)
    assert perturbation_of(early) == perturbation_of(late)
    assert perturbation_of(early) == {"sample": 2, "ulp": 1, "hash": "splitmix64/xxh3-64"}


def test_a_perturbation_that_a_cast_rounded_away_is_refused() -> None:
    model = Holder(w=torch.randn(8))
    perturb_ulp(model)
    with pytest.raises(PerturbationError, match=r"cast to torch\.bfloat16"):
        perturbation_of(model.bfloat16())


def test_a_part_of_a_larger_model_is_found() -> None:
    part = torch.nn.Linear(3, 3)
    perturb_ulp(part, 4)
    assert (perturbation_of(torch.nn.Sequential(part)) or {})["sample"] == 4
    assert perturbation_of(torch.nn.Linear(3, 3)) is None
    with pytest.raises(PerturbationError, match="perturbed already"):
        perturb_ulp(torch.nn.Sequential(part))


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=torch.float8_e4m3fn),
        torch.zeros(4, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ],
    ids=["meta", "float8", "complex", "sparse"],
)
def test_what_cannot_be_moved_is_refused_by_name_and_nothing_is(weight: torch.Tensor) -> None:
    model = Holder(first=torch.ones(3), odd=weight)
    with pytest.raises(PerturbationError, match="odd"):
        perturb_ulp(model)
    assert torch.equal(model.first, torch.ones(3))
    assert perturbation_of(model) is None


@pytest.mark.parametrize(
    "facts",
    [
        {"ds_secondary_tensor": torch.ones(2)},
        {"comm": SimpleNamespace(param_shard_group=None)},
        {"ds_status": SimpleNamespace(name="INFLIGHT")},
        {"part": SimpleNamespace(name="NOT_AVAILABLE")},
    ],
    ids=["hpz", "mics", "gathering", "nvme"],
)
def test_partitions_that_are_not_understood_are_refused(facts: dict[str, Any]) -> None:
    part = torch.ones(2)
    part.ds_numel = 2  # type: ignore[attr-defined]
    part.status = facts.pop("part", SimpleNamespace(name="AVAILABLE"))  # type: ignore[attr-defined]
    model = Holder(w=torch.empty(0))
    usual = {
        "ds_id": 0,
        "ds_tensor": part,
        "ds_numel": 2,
        "ds_status": SimpleNamespace(name="NOT_AVAILABLE"),
        "ds_process_group": None,
    }
    vars(model.w).update({**usual, **facts})
    with pytest.raises(PerturbationError, match="w: "):
        perturb_ulp(model)
    assert (part == 1).all()


@pytest.mark.parametrize("sample", [-1, 1.0, True, "0", None, 2**31])
def test_what_is_no_sample(sample: Any) -> None:
    with pytest.raises(BadOptionError, match="sample"):
        gradtrace.perturb_ulp(Holder(w=torch.ones(1)), sample)
