"""The hash of values: to the bit, and additive however a parameter is cut."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracefiles import change_line, header_of, reseal, start

from gradtrace.errors import DamagedTraceError
from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace.digest import add_hashes, digest_of, hash_text, mix64, value_hash
from gradtrace.trace.dtypes import DTYPES, from_float64, raw_bits
from gradtrace.trace.points import LATER
from gradtrace.trace.reader import open_trace

# Outputs 1, 2, 3 of SplitMix64 by seed. Seeds 0 and 1234567: as published with the generator.
PUBLISHED = {
    0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F),
    1234567: (6457827717110365317, 3203168211198807973, 9817491932198370423),
}


@pytest.mark.parametrize("bits", PUBLISHED)
def test_mix64_is_splitmix64_seeded_with_the_bits(bits: int) -> None:
    index = np.arange(3, dtype=np.uint64)
    assert tuple(map(int, mix64(index, np.uint64(bits)))) == PUBLISHED[bits]


def by_the_book(bits: list[int], first: int) -> int:
    """Hash with Python's own integers, as the documentation says it."""
    total = 0
    for at, value in enumerate(bits):
        z = (value + (first + at + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        total = (total + (z ^ (z >> 31))) % 2**64
    return total


raw = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(bits=raw, first=st.integers(0, 2**40))
def test_the_hash_is_what_the_documentation_says(bits: list[int], first: int) -> None:
    assert value_hash(np.array(bits, dtype="<u4"), first) == by_the_book(bits, first)


@given(bits=raw, cuts=st.lists(st.integers(0, 60), max_size=6), first=st.integers(0, 1000))
def test_cut_anywhere_the_parts_add_up(bits: list[int], cuts: list[int], first: int) -> None:
    array = np.array(bits, dtype="<u4")
    edges = sorted({0, len(bits), *(cut for cut in cuts if cut < len(bits))})
    parts = [
        hash_text(value_hash(array[low:high], first + low))
        for low, high in itertools.pairwise(edges)
    ]
    assert add_hashes(parts) == hash_text(value_hash(array, first))


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=40), data=st.data())
def test_what_differs_or_stands_elsewhere_has_another_hash(bits: list[int], data: Any) -> None:
    array = np.array(bits, dtype="<u2")
    at = data.draw(st.integers(0, len(bits) - 1))
    changed = array.copy()
    changed[at] ^= data.draw(st.integers(1, 2**16 - 1))
    assert value_hash(changed) != value_hash(array)
    assert value_hash(array, 1) != value_hash(array)
    if len(set(bits)) > 1:
        assert (
            value_hash(np.roll(array, 1)) != value_hash(array) or (np.roll(array, 1) == array).all()
        )


def test_a_digest_counts_what_is_not_finite_and_leaves_it_out_of_the_norm() -> None:
    values = np.array([3.0, -4.0, 0.0, -0.0, np.nan, np.inf, -np.inf])
    kind = DTYPES["bfloat16"]
    found = digest_of([(raw_bits(from_float64(values, kind), kind), 0)], kind)
    assert {name: found[name] for name in found if name != "hash"} == {
        "l2": [5.0],
        "max_abs": [4.0],
        "zeros": [2],
        "nans": [1],
        "infs": [2],
    }


# --- the format --------------------------------------------------------------------------------------

RUN = Run(world_size=1, micro_steps=1, parameters=(("a", (3,)), ("b", (2,))))
INDEX = Path("rank-00000/index-000000.jsonl")


def spoil(tmp_path: Path, point: str, change: Callable[[dict[str, Any]], object]) -> Path:
    path = write_run(tmp_path / "trace", RUN)
    change_line(path / INDEX, lambda body: body.get("point") == point, change)
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        {"hash": ["0" * 15]},
        {"hash": ["0" * 16, "0" * 16]},
        {"hash": ["0" * 15 + "G"]},
        {"hash": [0]},
        {"hash": None},
        {"zeros": [-1]},
        {"zeros": [4]},  # of three elements
        {"nans": [None]},
        {"infs": [1.5]},
        {"l2": ["large"]},
        {"l2": 1.0},
        {"max_abs": []},
    ],
)
def test_a_hostile_digest_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = spoil(tmp_path, "weight", lambda body: body["facts"]["digest"].update(wrong))
    with pytest.raises(DamagedTraceError, match="digest"):
        open_trace(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["facts"].pop("digest"),
        lambda body: body.update(facts={}),
        lambda body: body.pop("layout"),
        lambda body: body.update(layout=99),
        lambda body: body.update(layout="0"),
        lambda body: body.update(dtype=None),
        lambda body: body["facts"].update(digest=[]),
    ],
)
def test_a_digest_goes_with_a_layout(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(DamagedTraceError):
        open_trace(spoil(tmp_path, "weight", change))


TENSOR = {"name": "args[0]", "dtype": "float32", "shape": [2], "hash": "0" * 16}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensors": {}},
        {"tensors": [7]},
        {"tensors": [{**TENSOR, "hash": "x"}]},
        {"tensors": [{**TENSOR, "shape": [-1]}]},
        {"tensors": [{**TENSOR, "shape": [None]}]},
        {"tensors": [{**TENSOR, "shape": [1] * 65}]},
        {"tensors": [{**TENSOR, "dtype": None}]},
        {"tensors": [{**TENSOR, "name": "x" * 201}]},
        {"tensors": [{k: v for k, v in TENSOR.items() if k != "hash"}]},
        {"others": [{"name": "a", "type": "int"}]},
        {"others": [{"name": "a", "type": "int", "hash": 7}]},
        {"truncated": None},
    ],
)
def test_a_hostile_batch_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(DamagedTraceError):
        open_trace(spoil(tmp_path, "input", lambda body: body["facts"].update(wrong)))


def test_a_digest_of_a_dtype_without_values_can_be_read(tmp_path: Path) -> None:
    path = spoil(tmp_path, "weight", lambda body: body.update(dtype="uint8"))
    records = open_trace(path).ranks[0].records
    assert next(record.dtype for record in records if record.point == "weight") == "uint8"


def test_frozen_parameters_may_have_weights_and_nothing_else(tmp_path: Path) -> None:
    path = write_run(tmp_path / "trace", RUN)
    reseal(
        path / "manifest.json",
        lambda body: [parameter.update(trainable=False) for parameter in body["parameters"]],
    )
    with pytest.raises(DamagedTraceError, match="a record of"):
        open_trace(path)
    weights = write_run(tmp_path / "weights", Run(**{**RUN_FIELDS, "points": ("weight",)}))
    reseal(
        weights / "manifest.json",
        lambda body: [parameter.update(trainable=False) for parameter in body["parameters"]],
    )
    assert {record.point for record in open_trace(weights).ranks[0].records} == {"weight"}


RUN_FIELDS: dict[str, Any] = {
    "world_size": 1,
    "micro_steps": 1,
    "parameters": (("a", (3,)), ("b", (2,))),
}


def test_a_trace_from_before_these_points_is_read_and_does_not_have_them(tmp_path: Path) -> None:
    older = tuple(name for name in header_of().points if name not in LATER)
    path = write_run(tmp_path / "trace", Run(**RUN_FIELDS, points=older))
    reseal(
        path / "rank-00000/header.json",
        lambda body: [body["points"].pop(name) for name in LATER],
    )
    header = open_trace(path).ranks[0].header
    assert {header.points[name] for name in LATER} == {"absent: not in this trace"}
    reseal(path / "rank-00000/header.json", lambda body: body["points"].pop("loss"))
    with pytest.raises(DamagedTraceError, match="another set of points"):
        open_trace(path)


def test_a_digest_keeps_no_bytes(tmp_path: Path) -> None:
    writer = start(tmp_path / "trace", ())
    facts = {"digest": {name: [] for name in ("l2", "max_abs", "zeros", "nans", "infs", "hash")}}
    writer.add_record(0, None, "weight", "w", 0, dtype="float32", layout=(), facts=facts)
    writer.end_step(0, micro_steps=0, records=1, gaps=0, partial=False, facts={})
    writer.seal("closed")
    record = open_trace(tmp_path / "trace").ranks[0].records[0]
    assert (record.key, record.shard, record.dtype) == (None, None, "float32")
    assert not list((tmp_path / "trace").rglob("*.safetensors"))


def test_the_documented_vectors_are_right() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `([0-9a-f]{16})` \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for index, bits, mixed in rows:
        found = mix64(np.array([int(index)], dtype=np.uint64), np.uint64(int(bits)))
        assert hash_text(int(found[0])) == mixed


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_scale_after": "large"},
        {"boundary": 1},
        {"engine_skipped_steps": -1},
        {"engine_global_samples": 0.5},
    ],
)
def test_hostile_scalars_of_a_step_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = write_run(tmp_path / "trace", RUN)
    change_line(
        path / INDEX,
        lambda body: body["kind"] == "step_end",
        lambda body: body["facts"].update(wrong),
    )
    with pytest.raises(DamagedTraceError, match=next(iter(wrong))):
        open_trace(path)


@pytest.mark.parametrize(
    "wrong",
    ["rope", [{}], [{"name": "rope", "dtype": "float32", "shape": [-1], "hash": None}]],
)
def test_hostile_buffers_are_refused(tmp_path: Path, wrong: Any) -> None:
    path = write_run(tmp_path / "trace", RUN)
    reseal(path / "rank-00000/header.json", lambda body: body.update(buffers=wrong))
    with pytest.raises(DamagedTraceError, match="buffers"):
        open_trace(path)


def test_an_older_header_knows_no_buffers(tmp_path: Path) -> None:
    path = write_run(tmp_path / "trace", RUN)
    reseal(path / "rank-00000/header.json", lambda body: body.pop("buffers"))
    assert open_trace(path).ranks[0].header.buffers is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_count": 2},
        {"partition_count": [-1]},
        {"sub_group_size": "many"},
        {"autocast_dtype": 7},
        {"dynamic_loss_scale": 1},
        {"train_batch_size": -1},
        {"offload_param_device": "x" * 201},
        {"loss_scale_window": []},
    ],
)
def test_hostile_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = write_run(tmp_path / "trace", RUN)
    reseal(path / "rank-00000/header.json", lambda body: body["effective"].update(wrong))
    with pytest.raises(DamagedTraceError, match=next(iter(wrong))):
        open_trace(path)
