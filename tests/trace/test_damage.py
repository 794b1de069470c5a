"""Every damaged, mixed, foreign or unfinished trace is told from a whole one, by name."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefiles import (
    SMALL,
    read_everything,
    reseal,
    segment_bodies,
    small_trace,
    write_segment,
)

from gradtrace.errors import (
    DamagedTraceError,
    GradtraceError,
    MissingRankError,
    MixedRunsError,
    NotATraceError,
    TraceExistsError,
    UnsupportedVersionError,
)
from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace import schema
from gradtrace.trace.reader import open_trace

RANK = "rank-00000"
FIRST = "index-000000.jsonl"
TINY = Run(world_size=1, micro_steps=1, parameters=(("a", (2,)),), points=("loss", "local_grad"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return small_trace(tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("tiny") / "trace", TINY)


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_one_altered_byte_anywhere_is_found(tiny: Path, flip: int) -> None:
    files = [file for file in sorted(tiny.rglob("*")) if file.is_file()]
    kinds = {file.suffix for file in files}
    assert kinds == {".json", ".jsonl", ".safetensors"}
    for file in files:
        whole = bytearray(file.read_bytes())
        for at in range(len(whole)):
            whole[at] ^= flip
            file.write_bytes(whole)
            try:
                read_everything(tiny)
            except GradtraceError:
                pass
            else:
                pytest.fail(f"byte {at} of {file.name} was altered unseen")
            finally:
                whole[at] ^= flip
        file.write_bytes(whole)
    read_everything(tiny)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cut_grown_and_overwritten_files_are_found(tiny: Path, data: st.DataObject) -> None:
    files = [file for file in sorted(tiny.rglob("*")) if file.is_file()]
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    how = data.draw(st.sampled_from(["cut", "grow", "overwrite"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if how == "cut":
        spoiled = whole[:at]
    elif how == "grow":
        spoiled = whole[:at] + data.draw(st.binary(min_size=1, max_size=9)) + whole[at:]
    else:
        chunk = data.draw(st.binary(min_size=1, max_size=9))
        spoiled = whole[:at] + chunk + whole[at + len(chunk) :]
    if spoiled == whole:
        return
    file.write_bytes(spoiled)
    try:
        with pytest.raises(GradtraceError):
            read_everything(tiny)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("make", [False, True])
def test_no_trace(tmp_path: Path, make: bool) -> None:
    path = tmp_path / "nothing"
    if make:
        path.mkdir()
    with pytest.raises(NotATraceError, match="manifest.json" if make else "no such directory"):
        open_trace(path)


def test_a_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotATraceError):
        open_trace(tmp_path / "file")


def test_manifest_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / schema.MANIFEST).mkdir()
    with pytest.raises(DamagedTraceError):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"not json", b"\xff\xfe\x00", b"{}", b'{"format": "safetensors"}']
)
def test_a_manifest_of_something_else(tmp_path: Path, text: bytes) -> None:
    (tmp_path / schema.MANIFEST).write_bytes(text)
    with pytest.raises((NotATraceError, DamagedTraceError)):
        open_trace(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None, 10**15, 1.5, True, [1]])
@pytest.mark.parametrize("name", [schema.MANIFEST, f"{RANK}/{schema.HEADER}"])
def test_another_version(trace: Path, name: str, version: object) -> None:
    reseal(trace / name, lambda body: body.update(version=version))
    with pytest.raises(UnsupportedVersionError, match="version"):
        open_trace(trace)


@pytest.mark.parametrize("name", [schema.MANIFEST, f"{RANK}/{schema.HEADER}"])
def test_another_version_whose_seal_is_made_otherwise(trace: Path, name: str) -> None:
    (trace / name).write_text(
        (trace / name).read_text().replace('"version": 1', '"version": 2').replace("xxh3", "sha2")
    )
    with pytest.raises(UnsupportedVersionError):
        open_trace(trace)


@pytest.mark.parametrize("name", [schema.MANIFEST, f"{RANK}/{schema.HEADER}"])
def test_another_format(trace: Path, name: str) -> None:
    reseal(trace / name, lambda body: body.update(format="gradtrace.bench"))
    with pytest.raises(NotATraceError, match=r"gradtrace\.bench"):
        open_trace(trace)


def test_missing_rank(trace: Path) -> None:
    shutil.rmtree(trace / "rank-00001")
    with pytest.raises(MissingRankError, match="rank 1"):
        open_trace(trace)


def test_missing_header(trace: Path) -> None:
    (trace / RANK / schema.HEADER).unlink()
    with pytest.raises(MissingRankError, match="rank 0"):
        open_trace(trace)


@pytest.mark.parametrize("keep", [0, 1, -1])
def test_truncated_shard_is_found_by_opening(trace: Path, keep: int) -> None:
    shard = next((trace / RANK).glob("*.safetensors"))
    os.truncate(shard, keep % shard.stat().st_size)
    with pytest.raises(DamagedTraceError, match="bytes"):
        open_trace(trace)


def test_missing_shard(trace: Path) -> None:
    (trace / RANK / "000000.safetensors").unlink()
    with pytest.raises(DamagedTraceError, match="missing shard"):
        open_trace(trace)


def test_shard_truncated_after_opening(trace: Path) -> None:
    opened = open_trace(trace)
    record = next(r for r in opened.ranks[0].records if r.key is not None)
    assert record.shard is not None
    os.truncate(trace / RANK / record.shard, 10)
    with pytest.raises(DamagedTraceError):
        opened.values(record)


def test_exchanged_shards_of_equal_size(tmp_path: Path) -> None:
    trace = write_run(tmp_path / "t", replace(SMALL, points=("loss", "local_grad")))
    one, two = (trace / f"rank-0000{rank}" / "000000.safetensors" for rank in (0, 1))
    assert one.stat().st_size == two.stat().st_size
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(DamagedTraceError, match="checksum"):
        read_everything(trace)


def test_missing_segment_in_between(trace: Path) -> None:
    (trace / RANK / "index-000001.jsonl").unlink()
    with pytest.raises(DamagedTraceError, match="does not know"):
        open_trace(trace)


def test_extra_segment(trace: Path) -> None:
    last = max((trace / RANK).glob("index-*"))
    number = int(last.stem.split("-")[1]) + 1
    shutil.copy(last, trace / RANK / schema.segment_name(number))
    with pytest.raises(DamagedTraceError, match="does not know"):
        open_trace(trace)


@pytest.mark.parametrize("name", ["999999.safetensors", "notes.txt", "000000.bin", ".hidden"])
def test_extra_file_in_a_closed_rank(trace: Path, name: str) -> None:
    (trace / RANK / name).write_bytes(b"")
    with pytest.raises(DamagedTraceError, match="does not know"):
        open_trace(trace)


def test_segments_in_another_order(trace: Path) -> None:
    one, two = trace / RANK / FIRST, trace / RANK / "index-000001.jsonl"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(DamagedTraceError):
        open_trace(trace)


@pytest.mark.parametrize("name", [schema.HEADER, FIRST])
def test_files_of_another_run(tmp_path: Path, name: str) -> None:
    trace = small_trace(tmp_path)
    other = write_run(
        tmp_path / "other",
        Run(stage=3, world_size=2, parameters=SMALL.parameters, micro_steps=1, shard_bytes=64),
    )
    shutil.copy(other / RANK / name, trace / RANK / name)
    with pytest.raises(MixedRunsError, match="run id"):
        open_trace(trace)


def test_a_shard_of_another_run_under_a_right_index(tmp_path: Path) -> None:
    """A hostile index can give the checksum of any file; the shard itself says whose it is."""
    trace = small_trace(tmp_path)
    shard = trace / RANK / "000000.safetensors"
    data = shard.read_bytes().replace(b"synthetic-0-z2-w2", b"synthetic-1-z2-w2")
    shard.write_bytes(data)
    index = trace / RANK / FIRST
    bodies = segment_bodies(index)
    digest = schema.xxhash.xxh3_64_hexdigest(data)
    write_segment(index, [b | {"xxh3": digest} if b["kind"] == "shard" else b for b in bodies])
    with pytest.raises(MixedRunsError, match="shard of synthetic-1"):
        read_everything(trace)


def test_ranks_that_were_exchanged(trace: Path) -> None:
    os.rename(trace / RANK, trace / "tmp")
    os.rename(trace / "rank-00001", trace / RANK)
    os.rename(trace / "tmp", trace / "rank-00001")
    with pytest.raises(MixedRunsError, match="rank 1"):
        open_trace(trace)


def test_a_segment_of_another_rank(trace: Path) -> None:
    shutil.copy(trace / "rank-00001" / FIRST, trace / RANK / FIRST)
    with pytest.raises(MixedRunsError, match="rank 1"):
        open_trace(trace)


@pytest.mark.parametrize(
    "name",
    [schema.MANIFEST, f"{RANK}/{schema.HEADER}", f"{RANK}/{FIRST}", f"{RANK}/000000.safetensors"],
)
def test_links_are_not_followed(trace: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "elsewhere"
    os.rename(trace / name, target)
    (trace / name).symlink_to(target)
    with pytest.raises(GradtraceError):
        read_everything(trace)


def test_a_rank_directory_that_is_a_link_is_refused(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    os.rename(trace / RANK, target)
    (trace / RANK).symlink_to(target, target_is_directory=True)
    with pytest.raises(DamagedTraceError, match="link"):
        open_trace(trace)


def test_an_existing_trace_is_never_overwritten(trace: Path) -> None:
    before = {file: file.read_bytes() for file in trace.rglob("*") if file.is_file()}
    with pytest.raises(TraceExistsError):
        write_run(trace, SMALL)
    assert before == {file: file.read_bytes() for file in trace.rglob("*") if file.is_file()}


@pytest.mark.parametrize("leftover", ["manifest.json.tmp", "rank-00003", "manifest.json"])
def test_a_part_of_a_trace_is_never_written_into(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).mkdir()
    with pytest.raises(TraceExistsError, match=leftover):
        write_run(tmp_path, SMALL)


def test_other_files_may_stand_beside_a_trace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    read_everything(write_run(tmp_path, SMALL))


def test_errors_name_the_file_and_the_remedy(trace: Path) -> None:
    with open(trace / RANK / FIRST, "r+b") as file:
        file.seek(20)
        file.write(b"?")
    with pytest.raises(DamagedTraceError) as caught:
        open_trace(trace)
    assert f"{RANK}/{FIRST}, line 1" in str(caught.value)
    assert "[damaged_trace]" in str(caught.value)
    assert caught.value.remedy.startswith("Copy the trace again")
    assert caught.value.exit_status == 2
