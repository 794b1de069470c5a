"""Traces come from strangers: whatever a sealed file says, nothing but a named error comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tracefiles import (
    as_text,
    parameter,
    read_everything,
    reseal,
    segment_bodies,
    small_trace,
    start,
    write_raw_segment,
    write_segment,
)

from gradtrace.errors import DamagedTraceError, GradtraceError
from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace import schema
from gradtrace.trace.points import LATER, POINT_NAMES
from gradtrace.trace.reader import open_trace

RUN = Run(
    world_size=1,
    micro_steps=1,
    parameters=(("a", (3,)), ("b", (2,))),
    points=tuple(name for name in POINT_NAMES if name not in LATER),
)
INDEX = "rank-00000/index-000000.jsonl"
HEADER = "rank-00000/header.json"
MANIFEST = schema.MANIFEST
HUGE = 2**60
Body = dict[str, Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_run(tmp_path / "trace", RUN)


def change_line(path: Path, kind: str, change: Callable[[Body], object], at: int = 0) -> None:
    """Change one line of a kind and chain the segment again."""
    bodies = segment_bodies(path / INDEX)
    change([body for body in bodies if body["kind"] == kind][at])
    write_segment(path / INDEX, bodies)


def refuses(path: Path, match: str | None = None) -> None:
    with pytest.raises(DamagedTraceError, match=match):
        read_everything(path)


NO_COUNTS = [None, -1, 1.0, 0.5, "1", True, HUGE, [], {}]


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize("field", ["step", "occurrence", "layout"])
def test_record_counts(trace: Path, field: str, value: object) -> None:
    change_line(trace, "record", lambda body: body.update({field: value}), at=1)
    refuses(trace, field)


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, HUGE, [], {}])
def test_micro_step_may_only_be_a_count_or_null(trace: Path, value: object) -> None:
    change_line(trace, "record", lambda body: body.update(micro_step=value))
    refuses(trace, "micro_step")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("point", "gradient"),
        ("point", None),
        ("point", ["loss"]),
        ("point", {}),
        ("unit", 7),
        ("unit", "x" * 5000),
        ("key", 7),
        ("key", "no such tensor"),
        ("shard", "000001.safetensors"),
        ("shard", "../../etc/passwd"),
        ("shard", None),
        ("dtype", "int64"),
        ("dtype", "BF16"),
        ("dtype", "float16"),
        ("layout", 99),
        ("facts", []),
        ("facts", None),
    ],
)
def test_record_members(trace: Path, field: str, value: object) -> None:
    change_line(trace, "record", lambda body: body.update({field: value}), at=1)
    refuses(trace)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "000001.safetensors", "0.safetensors", "", "\x00"]
)
def test_shard_names_are_the_expected_ones(trace: Path, name: str) -> None:
    change_line(trace, "shard", lambda body: body.update(file=name))
    refuses(trace, "shard")


@pytest.mark.parametrize("value", NO_COUNTS)
def test_shard_size(trace: Path, value: object) -> None:
    change_line(trace, "shard", lambda body: body.update(size_bytes=value))
    refuses(trace)


@pytest.mark.parametrize("value", [None, 7, "0" * 16, "", "x" * 5000])
def test_shard_checksum(trace: Path, value: object) -> None:
    change_line(trace, "shard", lambda body: body.update(xxh3=value))
    refuses(trace)


@pytest.mark.parametrize(
    "spans",
    [
        None,
        {},
        [[0, 0, 0]],
        [[0, 0, 0, 3, 0]],
        [None],
        [[0, 0, 0, True]],
        [[0.0, 0, 0, 3]],
        [[-2, 0, 0, 3]],
        [[2, 0, 0, 3]],
        [[HUGE, 0, 0, 3]],
        [[0, -1, 0, 3]],
        [[0, 1, 0, 3]],
        [[0, 0, 0, 4]],
        [[0, 0, 0, -3]],
        [[0, 0, 1, 3]],
        [[0, 0, 0, 2], [0, 2, 1, 1]],
        [[0, 0, 0, 2], [0, 2, 3, 1]],
        [[-1, 0, 0, HUGE]],
        [[0, 2**47, 0, 2**47]],
    ],
)
def test_spans(trace: Path, spans: object) -> None:
    change_line(trace, "layout", lambda body: body.update(spans=spans))
    refuses(trace)


def test_a_layout_larger_than_its_tensor(trace: Path) -> None:
    change_line(trace, "layout", lambda body: body["spans"].append([-1, 0, 2, 2**48]))
    with pytest.raises(DamagedTraceError):
        read_everything(trace)


def test_layouts_are_not_redefined(trace: Path) -> None:
    change_line(trace, "layout", lambda body: body.update(id=0))
    refuses(trace, "a second time")


@pytest.mark.parametrize("field", ["micro_steps", "records", "gaps"])
@pytest.mark.parametrize("value", NO_COUNTS)
def test_step_end_counts(trace: Path, field: str, value: object) -> None:
    change_line(trace, "step_end", lambda body: body.update({field: value}))
    refuses(trace)


def test_a_step_of_endless_micro_steps(trace: Path) -> None:
    change_line(trace, "step_end", lambda body: body.update(micro_steps=2**40))
    refuses(trace, "micro_steps")


@pytest.mark.parametrize("by", [-1, 1])
def test_a_record_too_few_or_too_many(trace: Path, by: int) -> None:
    change_line(trace, "step_end", lambda body: body.update(records=body["records"] + by))
    refuses(trace, "step_end counts")


@pytest.mark.parametrize(("field", "value"), [("partial", 0), ("partial", None), ("facts", [])])
def test_step_end_members(trace: Path, field: str, value: object) -> None:
    change_line(trace, "step_end", lambda body: body.update({field: value}))
    refuses(trace, field)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_end_lines(trace: Path, value: object) -> None:
    change_line(trace, "end", lambda body: body.update(lines=value))
    refuses(trace, "lines")


@pytest.mark.parametrize("value", [7, [], True])
def test_end_reason(trace: Path, value: object) -> None:
    change_line(trace, "end", lambda body: body.update(final=value))
    refuses(trace, "final")


@pytest.mark.parametrize("value", [1, None, True, False, "0", -1])
def test_segment_number(trace: Path, value: object) -> None:
    change_line(trace, "segment", lambda body: body.update(segment=value))
    refuses(trace, "segment")


@pytest.mark.parametrize("value", [1, None, False, "0", 0.0])
def test_segment_rank(trace: Path, value: object) -> None:
    change_line(trace, "segment", lambda body: body.update(rank=value))
    with pytest.raises(GradtraceError, match="rank"):
        read_everything(trace)


@pytest.mark.parametrize("kind", ["tensor", "", "end", "segment", None, 7])
def test_lines_of_no_kind(trace: Path, kind: object) -> None:
    change_line(trace, "record", lambda body: body.update(kind=kind))
    refuses(trace)


def edit_lines(trace: Path, edit: Callable[[list[Body]], object]) -> None:
    bodies = segment_bodies(trace / INDEX)
    edit(bodies)
    bodies[-1]["lines"] = len(bodies) - 2
    write_segment(trace / INDEX, bodies)


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: lines.pop(0),
        lambda lines: lines.pop(),
        lambda lines: lines.insert(1, lines[0]),
        lambda lines: lines.insert(3, lines[-1]),
        lambda lines: lines.append(lines[3]),
        lambda lines: lines.reverse(),
        lambda lines: lines.insert(-1, lines[-2]),  # a second step_end
        lambda lines: lines.insert(-1, {**lines[4], "step": 0}),  # a record after its step's end
        lambda lines: lines.insert(
            5, {**lines[4], "step": 9}
        ),  # another step before this one's end
        lambda lines: lines.append(lines.pop(1)),  # the shard after its records
        lambda lines: lines.clear(),
    ],
)
def test_lines_out_of_place(trace: Path, edit: Callable[[list[Body]], object]) -> None:
    bodies = segment_bodies(trace / INDEX)
    edit(bodies)
    if bodies and bodies[-1]["kind"] == "end":
        bodies[-1]["lines"] = len(bodies) - 2
    write_segment(trace / INDEX, bodies)
    refuses(trace)


def test_one_record_twice_is_found(trace: Path) -> None:
    def twice(lines: list[Body]) -> None:
        record = next(line for line in lines if line["kind"] == "record")
        lines.insert(lines.index(record), copy.deepcopy(record))
        next(line for line in lines if line["kind"] == "step_end")["records"] += 1

    edit_lines(trace, twice)
    refuses(trace, "twice")


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"record","kind":"gap"}',
        '{"kind":"record","step":NaN}',
        '{"kind":"record","step":Infinity}',
        '{"kind":"record","step":1' + "0" * 30 + "}",
        '{"kind":"record","step":1e999}',
        '{"kind":' + "[" * 100 + "]" * 100 + "}",
        '{"kind":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"kind":"record","facts":' + '{"a":' * 200 + "1" + "}" * 200 + "}",
        "[1]",
        "{}",
        "{",
        "",
        '{"kind":"\ud800"}'.encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_odd_json(trace: Path, text: str) -> None:
    bodies = [as_text(body) for body in segment_bodies(trace / INDEX)]
    bodies.insert(2, text if text.endswith("}") else text + "}")
    write_raw_segment(trace / INDEX, bodies)
    refuses(trace)


def test_a_million_digits_cost_nothing() -> None:
    with pytest.raises(DamagedTraceError):
        schema.parse_object(b'{"a":' + b"9" * 1_000_000 + b"}", "here")
    with pytest.raises(DamagedTraceError):
        schema.parse_object(b'{"a":1.0e' + b"9" * 1_000_000 + b"}", "here")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", None),
        ("run_id", 7),
        ("world_size", 0),
        ("world_size", -1),
        ("world_size", 10**7),
        ("world_size", "2"),
        ("plan", None),
        ("plan", {"ranks": "0"}),
        ("plan", {"ranks": [-1]}),
        ("plan", {"ranks": [None]}),
        ("parameters", {}),
        ("parameters", [None]),
        ("parameters", [{}]),
        ("ds_config", []),
        ("packages", {"torch": 2}),
        ("packages", None),
        ("created_s", "now"),
        ("created_s", True),
        ("created_s", None),
    ],
)
def test_manifest_members(trace: Path, field: str, value: object) -> None:
    reseal(trace / MANIFEST, lambda body: body.update({field: value}))
    refuses(trace)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index", 1),
        ("index", None),
        ("name", None),
        ("name", "b"),
        ("name", "x" * 5000),
        ("aliases", "b"),
        ("aliases", ["b"]),
        ("aliases", [1]),
        ("shape", [-1]),
        ("shape", [2**40, 2**40]),
        ("shape", [1] * 65),
        ("shape", "3"),
        ("shape", [1.5]),
        ("dtype", None),
        ("group", -1),
        ("trainable", 1),
        ("captured", None),
    ],
)
def test_parameter_members(trace: Path, field: str, value: object) -> None:
    reseal(trace / MANIFEST, lambda body: body["parameters"][0].update({field: value}))
    refuses(trace)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dp_rank", -1),
        ("dp_ranks", None),
        ("dp_ranks", [None]),
        ("points", {}),
        ("points", {"loss": "recorded"}),
        ("points", None),
        ("partitions", {"group0": 99}),
        ("partitions", {"group0": "0"}),
        ("partitions", []),
        ("effective", []),
        ("host", None),
        ("layouts", None),
        ("layouts", [None]),
        ("layouts", [{"id": 0, "spans": [[0, 0, 0, 9]]}]),
        ("layouts", [{"id": 0, "spans": []}, {"id": 0, "spans": []}]),
        ("layouts", [{"id": -1, "spans": []}]),
    ],
)
def test_header_members(trace: Path, field: str, value: object) -> None:
    reseal(trace / HEADER, lambda body: body.update({field: value}))
    refuses(trace)


def test_a_point_status_that_is_no_text(trace: Path) -> None:
    reseal(trace / HEADER, lambda body: body["points"].update(loss=7))
    refuses(trace, "points")


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.replace(b'"F32"', b'"I32"'),
        lambda head: head.replace(b'"F32"', b'"F16"'),
        lambda head: head.replace(b'"shape":[3]', b'"shape":[1]'),
        lambda head: head.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'),
        lambda head: head.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        lambda head: head.replace(b'"run_id"', b'"run_ix"'),
        lambda head: head.replace(b"__metadata__", b"__metadaty__"),
        lambda head: b"[" + head[1:],
        lambda head: b"\xff" * len(head),
        lambda head: head.replace(b'"000000001"', b'"000000000"'),
    ],
)
def test_shard_headers(trace: Path, change: Callable[[bytes], bytes]) -> None:
    """A shard with a right checksum and a wrong header."""
    shard = trace / "rank-00000" / "000000.safetensors"
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    spoiled = data[:8] + change(data[8 : 8 + length]) + data[8 + length :]
    assert len(spoiled) == len(data) and spoiled != data
    _replace_shard(trace, spoiled)
    refuses(trace)


@pytest.mark.parametrize("length", [0, 7, 2**63, 2**64 - 1, 10_000])
def test_shard_header_lengths(trace: Path, length: int) -> None:
    shard = trace / "rank-00000" / "000000.safetensors"
    _replace_shard(trace, length.to_bytes(8, "little") + shard.read_bytes()[8:])
    refuses(trace)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\0" * 8])
def test_shards_that_are_none(trace: Path, data: bytes) -> None:
    _replace_shard(trace, data)
    refuses(trace)


def _replace_shard(trace: Path, data: bytes) -> None:
    (trace / "rank-00000" / "000000.safetensors").write_bytes(data)
    seal = {"size_bytes": len(data), "xxh3": schema.xxhash.xxh3_64_hexdigest(data)}
    change_line(trace, "shard", lambda body: body.update(seal))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**62) | st.floats(allow_nan=False)
    | st.sampled_from(["NaN", "loss", "", "a", "float32", "../x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_member_replaced_by_junk(tmp_path: Path, data: st.DataObject) -> None:
    """Nothing but a GradtraceError ever comes out of opening and reading."""
    trace = tmp_path / "trace"
    if not trace.exists():
        write_run(trace, RUN)
    name = data.draw(st.sampled_from([MANIFEST, HEADER, INDEX]))
    whole = (trace / name).read_bytes()
    bodies = segment_bodies(trace / name) if name == INDEX else [schema.unseal_file(whole, "x")]
    target: Any = data.draw(st.sampled_from(bodies))
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(target[key], (dict, list)) and target[key] and data.draw(st.booleans()):
            target = target[key]
            continue
        break
    junk = data.draw(JUNK)
    if isinstance(junk, float) and junk in (float("inf"), float("-inf")):
        junk = None
    target[key] = junk
    try:
        if name == INDEX:
            write_segment(trace / name, bodies)
        else:
            (trace / name).write_bytes(schema.seal_file(bodies[0]))
    except ValueError:  # not JSON: infinities inside
        return
    finally:
        spoiled = (trace / name).read_bytes()
    try:
        read_everything(trace)
    except GradtraceError:
        pass
    finally:
        assert spoiled
        (trace / name).write_bytes(whole)


def test_opening_reads_no_tensor(trace: Path) -> None:
    opened = open_trace(trace)
    assert opened._shards == {}


@pytest.mark.parametrize(
    ("point", "facts"),
    [
        ("bucket", {"ranks": -1e308}),
        ("bucket", {"ranks": [0, 1]}),  # a run of one rank
        ("bucket", {"ranks": [0, 0]}),
        ("bucket", {"ranks": []}),
        ("bucket", {"op": "max"}),
        ("bucket", {"comm_dtype": ["float32"]}),
        ("loss", {"output_dtypes": 3}),
        ("loss", {"output_factors": [{}]}),
        ("loss", {"gas": 0}),
        ("loss", {"loss_scale": []}),
        ("loss", {"scale_wrt_gas": "yes"}),
        ("local_accum", {"carry": 1}),
    ],
)
def test_facts_that_judges_rely_on_have_their_types(
    tmp_path: Path, point: str, facts: dict[str, object]
) -> None:
    writer = start(tmp_path / "trace", (parameter(0, (1,)),))
    writer.add_record(0, 0, point, "u", 0, facts=facts)
    writer.end_step(0, micro_steps=1, records=1, gaps=0, partial=False, facts={})
    writer.seal("closed")
    with pytest.raises(DamagedTraceError):
        open_trace(tmp_path / "trace")


@pytest.mark.parametrize(
    "facts", [{"overflow": []}, {"loss_scale": "1"}, {"lr": 1.0}, {"grad_norm": {}}, {"clip": True}]
)
def test_step_facts_have_their_types(tmp_path: Path, facts: dict[str, object]) -> None:
    writer = start(tmp_path / "trace", (parameter(0, (1,)),))
    writer.add_record(0, 0, "loss", "loss", 0)
    writer.end_step(0, micro_steps=1, records=1, gaps=0, partial=False, facts=facts)
    writer.seal("closed")
    with pytest.raises(DamagedTraceError):
        open_trace(tmp_path / "trace")


@pytest.mark.parametrize(
    "change",
    [
        {"effective": {"model_dtype": [0]}},
        {"effective": {"gradient_accumulation_steps": 0}},
        {"dp_ranks": []},
        {"dp_ranks": [1]},
        {"dp_rank": 1},
    ],
)
def test_header_lies_are_found(tmp_path: Path, change: dict[str, object]) -> None:
    path = small_trace(tmp_path)
    reseal(path / "rank-00000" / schema.HEADER, lambda body: body.update(change))
    with pytest.raises(DamagedTraceError):
        open_trace(path)


def test_records_that_the_header_or_the_manifest_denies_are_found(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "a")
    reseal(
        path / "rank-00000" / schema.HEADER,
        lambda body: body["points"].update(reduced="absent: it says"),
    )
    with pytest.raises(DamagedTraceError, match="a record at reduced"):
        open_trace(path)
    path = small_trace(tmp_path / "b")
    reseal(path / schema.MANIFEST, lambda body: body["parameters"][0].update(captured=False))
    with pytest.raises(DamagedTraceError, match="a record of"):
        open_trace(path)
    path = small_trace(tmp_path / "c")
    reseal(path / schema.MANIFEST, lambda body: body.update(world_size=1))
    with pytest.raises(DamagedTraceError):
        open_trace(path)


@pytest.mark.parametrize("ranks", ([], [0, 0], [5]))
def test_a_plan_of_impossible_ranks_is_found(tmp_path: Path, ranks: list[int]) -> None:
    path = small_trace(tmp_path)
    reseal(path / schema.MANIFEST, lambda body: body["plan"].update(ranks=ranks))
    with pytest.raises(DamagedTraceError):
        open_trace(path)
