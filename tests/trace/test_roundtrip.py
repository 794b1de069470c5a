"""What is written is what is read, bit by bit, and safetensors' own reader agrees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tracefiles import header_of, manifest_of, parameter, read_everything, small_trace, start

from gradtrace.errors import DamagedTraceError
from gradtrace.trace import points, schema
from gradtrace.trace.dtypes import DTYPES, from_float64
from gradtrace.trace.reader import open_trace
from gradtrace.trace.spans import PADDING, Span, coverage_fault, layout_numel, pack_spans
from gradtrace.trace.writer import RankWriter, claim_directory, write_manifest


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float64", "float32", "float16", "bfloat16"]), st.binary(max_size=64)
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 100),
)
def test_bits_survive(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, bytes]], shard_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("bits") / "trace"
    writer = start(path, (parameter(0, (64,)),), shard_bytes=shard_bytes)
    written = []
    for number, (dtype, data) in enumerate(tensors):
        size = DTYPES[dtype].size_bytes
        count = len(data) // size
        layout = pack_spans([(0, 0, count)])
        written.append(data[: count * size])
        writer.add_record(
            0, 0, "local_grad", "p0", number, dtype=dtype, layout=layout, data=written[-1]
        )
    writer.end_step(0, micro_steps=1, records=len(written), gaps=0, partial=False, facts={})
    writer.seal("closed")
    trace = open_trace(path)
    found = [trace.bits(record) for record in trace.ranks[0].records]
    assert [bits.tobytes() for bits in found] == written
    for record, bits in zip(trace.ranks[0].records, found, strict=True):
        assert record.dtype is not None
        assert bits.dtype == np.dtype(DTYPES[record.dtype].raw)
        assert len(trace.values(record)) == layout_numel(trace.layout(record))
    assert trace.steps == (0,) and trace.notes == ()
    assert writer.bytes_written == sum(
        file.stat().st_size for file in writer.directory.iterdir() if file.name != schema.HEADER
    )


def test_safetensors_reads_our_shards(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = start(path, (parameter(0, (3,)),))
    values = np.array([1.0, -2.5, 3e-3])
    empty = pack_spans([])
    for at, dtype in enumerate(DTYPES):
        data = from_float64(values, DTYPES[dtype])
        writer.add_record(
            0, 0, "local_grad", "p0", at, dtype=dtype, layout=pack_spans([(0, 0, 3)]), data=data
        )
    writer.add_record(0, 0, "reduced", "none", 0, dtype="bfloat16", layout=empty, data=b"")
    writer.end_step(0, micro_steps=1, records=5, gaps=0, partial=False, facts={})
    writer.seal("closed")
    shard = path / "rank-00000" / "000000.safetensors"
    entries = dict(safetensors.deserialize(shard.read_bytes()))
    trace = read_everything(path)
    for record in trace.ranks[0].records:
        assert record.key is not None and record.dtype is not None
        entry = entries[record.key]
        assert entry["dtype"] == DTYPES[record.dtype].code
        assert bytes(entry["data"]) == trace.bits(record).tobytes()
    with safetensors.safe_open(shard, framework="np") as file:
        assert file.metadata() == {"run_id": "run", "rank": "0", "shard": shard.name}
        assert list(file.get_tensor("000000001")) == list(values.astype(np.float32))
        assert sorted(file.keys()) == sorted(entries)


def test_torch_reads_our_shards(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    path = small_trace(tmp_path)
    trace = read_everything(path)
    tensors = load_torch(path / "rank-00001" / "000000.safetensors")
    checked = 0
    for record in trace.ranks[1].records:
        if record.shard == "000000.safetensors":
            assert torch.equal(tensors[record.key].double(), torch.from_numpy(trace.values(record)))
            checked += 1
    assert checked == len(tensors) > 0


def test_synthetic_trace_is_the_same_each_time(tmp_path: Path) -> None:
    one, two = small_trace(tmp_path / "1"), small_trace(tmp_path / "2")
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file())
    assert len(names) > 10  # several shards and segments a rank
    assert names == sorted(str(file.relative_to(two)) for file in two.rglob("*") if file.is_file())
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_float32_shards_load_with_numpy(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    for shard in path.rglob("*.safetensors"):
        assert load_file(shard)


def test_everything_that_is_not_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    claim_directory(path)
    write_manifest(path, manifest_of((parameter(0, ()), parameter(1, (0, 4)), parameter(2, (2,)))))
    static = pack_spans([(0, 0, 1), (PADDING, 0, 3)])
    writer = RankWriter(path, "run", header_of(partitions={"group0": 4}), {4: static})
    new = pack_spans([(2, 1, 1), (0, 0, 1)])
    assert writer.add_layout(static) == 4
    assert writer.add_layout(new) == 5
    assert writer.add_layout(new) == 5
    facts = {"loss": "NaN", "boundary": True, "list": [1, None, {"x": 2.5}], "é": "ü"}
    writer.add_record(0, 0, "loss", "loss", 0, facts=facts)
    writer.add_gap(0, None, None, None, "over_budget", "x" * 600)
    writer.add_gap(0, 0, "bucket", "float32", "write_failed", "")
    writer.end_step(0, micro_steps=1, records=1, gaps=2, partial=True, facts={"lr": [0.1]})
    writer.seal()
    writer.add_record(4, 0, "loss", "loss", 0)
    writer.end_step(4, micro_steps=1, records=1, gaps=0, partial=False, facts={})
    writer.seal("closed by close()")
    trace = open_trace(path)
    rank = trace.ranks[0]
    assert trace.steps == (0, 4)
    assert rank.closed == "closed by close()"
    assert rank.layouts == {4: static, 5: new}
    assert rank.header.partitions == {"group0": 4}
    assert rank.header.points == dict.fromkeys(points.POINT_NAMES, "recorded")
    first, second = rank.records
    assert first.facts == facts and first.key is None and first.order == 0
    assert second.facts == {} and second.order == 1
    assert rank.gaps[0].point is None and len(rank.gaps[0].detail) == 500
    assert rank.gaps[1].unit == "float32"
    assert rank.steps[0].partial and rank.steps[0].facts == {"lr": [0.1]}
    assert trace.manifest.parameters[0].numel == 1
    assert trace.manifest.parameters[1].numel == 0


def test_shards_and_segments_are_numbered_without_holes(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    trace = read_everything(path)
    for rank in trace.ranks:
        directory = path / schema.rank_dir(rank)
        shards = sorted(directory.glob("*.safetensors"))
        assert [shard.name for shard in shards] == [
            schema.shard_name(number) for number in range(len(shards))
        ]
        assert len(list(directory.glob("index-*"))) > 2
        assert [record.order for record in trace.ranks[rank].records] == list(
            range(len(trace.ranks[rank].records))
        )
        assert not list(directory.glob("*" + schema.TEMPORARY))


def test_readers_of_shards_cover_every_file(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    readers = list(open_trace(path).shard_readers())
    assert {reader.path for reader in readers} == set(path.rglob("*.safetensors"))
    for reader in readers:
        reader.check()


def test_a_chosen_subset_of_ranks(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    body = schema.unseal_file((path / schema.MANIFEST).read_bytes(), "")
    body["plan"]["ranks"] = [1]
    (path / schema.MANIFEST).write_bytes(schema.seal_file(body))
    with pytest.raises(DamagedTraceError, match="does not promise"):
        open_trace(path)  # files that nobody planned
    shutil.rmtree(path / "rank-00000")
    assert list(open_trace(path).ranks) == [1]


def test_values_that_do_not_fit_the_layout_are_refused(tmp_path: Path) -> None:
    writer = start(tmp_path / "trace", (parameter(0, (3,)),))
    with pytest.raises(ValueError, match="do not fit"):
        writer.add_record(
            0, 0, "local_grad", "p0", 0, dtype="float32", layout=(Span(0, 0, 0, 3),), data=b"1234"
        )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(max_size=20)
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=20,
    )
)  # fmt: skip
def test_sealed_text_gives_back_its_body(value: object) -> None:
    body = {"value": value}
    assert schema.unseal_file(schema.seal_file(body), "file") == body
    line, crc = schema.seal_line(body, 7)
    assert line.count(b"\n") == 1
    assert schema.unseal_line(line[:-1], 7, "line") == (body, crc)
    assert json.loads(line)["value"] == value


@pytest.mark.parametrize("value", [0.0, -1.5, float("inf"), float("-inf")])
def test_floats_pass_through_json(value: float) -> None:
    assert schema.decode_float(json.loads(json.dumps(schema.encode_float(value)))) == value


def test_odd_numbers_are_refused() -> None:
    assert schema.decode_float(None) is None
    assert np.isnan(schema.decode_float(schema.encode_float(float("nan"))) or 0.0)
    for value in ("nan", "1", True, [], {}):
        with pytest.raises(ValueError, match="not a number"):
            schema.decode_float(value)


@pytest.mark.parametrize(
    ("pieces", "numel", "words"),
    [
        ([(0, 3), (3, 2)], 5, None),
        ([(3, 2), (0, 3), (5, 0)], 5, None),
        ([], 0, None),
        ([(0, 3)], 5, "elements 3 to 4 are held by nobody"),
        ([(1, 4)], 5, "elements 0 to 0 are held by nobody"),
        ([(0, 3), (2, 3)], 5, "elements 2 to 2 are held twice"),
        ([(0, 5), (1, 2)], 5, "elements 1 to 2 are held twice"),
        ([(0, 6)], 5, "elements 5 to 5 are past the parameter's end"),
    ],
)
def test_coverage(pieces: list[tuple[int, int]], numel: int, words: str | None) -> None:
    assert coverage_fault(pieces, numel) == words
