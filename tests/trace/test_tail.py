"""A run may be killed, or fail to write: what is sealed stays whole, and nothing is half-named."""

from __future__ import annotations

import builtins
import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tracefiles import SMALL, header_of, manifest_of, parameter, read_everything, small_trace, start

from gradtrace.errors import DamagedTraceError
from gradtrace.testing.synthetic import Omission, Run, write_run
from gradtrace.trace import schema
from gradtrace.trace.dtypes import DTYPES, from_float64
from gradtrace.trace.reader import open_trace
from gradtrace.trace.spans import pack_spans
from gradtrace.trace.writer import RankWriter, claim_directory, write_manifest, write_whole

RANK = "rank-00000"
WHOLE = pack_spans([(0, 0, 4)])
DATA = from_float64(np.arange(4.0), DTYPES["float32"])


def one_step(writer: RankWriter, step: int, records: int = 1, before: int = 0) -> None:
    for at in range(records):
        writer.add_record(step, 0, "local_grad", "p0", at, dtype="float32", layout=WHOLE, data=DATA)
    writer.end_step(step, micro_steps=1, records=records + before, gaps=0, partial=False, facts={})


@pytest.fixture
def writer(tmp_path: Path) -> RankWriter:
    return start(tmp_path / "trace", (parameter(0, (4,)),), seal_every_s=math.inf)


def names(writer: RankWriter) -> list[str]:
    return sorted(path.name for path in writer.directory.iterdir())


def test_a_run_killed_before_anything_was_sealed(writer: RankWriter, tmp_path: Path) -> None:
    one_step(writer, 0)
    trace = open_trace(tmp_path / "trace")
    assert trace.steps == () and trace.ranks[0].records == ()
    assert trace.notes == ("rank 0: never closed; what was not sealed is lost",)


def test_a_run_killed_between_seals(writer: RankWriter, tmp_path: Path) -> None:
    one_step(writer, 0)
    writer.seal()
    one_step(writer, 1)
    trace = read_everything(tmp_path / "trace")
    assert trace.steps == (0,)
    assert trace.ranks[0].closed is None
    assert "never closed" in trace.notes[0]


def test_a_run_killed_inside_a_step(writer: RankWriter, tmp_path: Path) -> None:
    one_step(writer, 0)
    writer.add_record(1, 0, "loss", "loss", 0)
    writer.seal()
    trace = open_trace(tmp_path / "trace")
    assert trace.steps == (0,)
    assert any("step 1 was not finished" in note for note in trace.notes)


@pytest.mark.parametrize(
    "tail", [("index-000001.jsonl.tmp",), ("000001.safetensors.tmp",), ("000001.safetensors",),
             ("000001.safetensors", "index-000001.jsonl.tmp")]
)  # fmt: skip
def test_what_a_kill_leaves_behind_is_a_note(
    writer: RankWriter, tmp_path: Path, tail: tuple[str, ...]
) -> None:
    one_step(writer, 0)
    writer.seal()
    for name in tail:
        (writer.directory / name).write_bytes(b"half of someth")
    trace = read_everything(tmp_path / "trace")
    assert trace.steps == (0,)
    assert "rank 0: files of an unsealed tail are ignored" in trace.notes


@pytest.mark.parametrize("name", ["000002.safetensors", "index-000002.jsonl", "core.1234"])
def test_more_than_a_kill_can_leave_is_damage(
    writer: RankWriter, tmp_path: Path, name: str
) -> None:
    one_step(writer, 0)
    writer.seal()
    (writer.directory / name).write_bytes(b"")
    with pytest.raises(DamagedTraceError, match="does not know"):
        open_trace(tmp_path / "trace")


def test_the_next_shard_beside_a_closed_rank_is_damage(writer: RankWriter, tmp_path: Path) -> None:
    one_step(writer, 0)
    writer.seal("closed")
    (writer.directory / "000001.safetensors").write_bytes(b"")
    with pytest.raises(DamagedTraceError, match="does not know"):
        open_trace(tmp_path / "trace")


def test_a_temporary_beside_a_closed_rank_is_only_a_temporary(
    writer: RankWriter, tmp_path: Path
) -> None:
    one_step(writer, 0)
    writer.seal("closed")
    (writer.directory / "index-000009.jsonl.tmp").write_bytes(b"")
    assert open_trace(tmp_path / "trace").steps == (0,)


def test_every_prefix_of_segments_is_a_readable_trace(tmp_path: Path) -> None:
    """Whatever moment a run is killed at, what was sealed by then can be read."""
    whole = small_trace(tmp_path)
    segments = sorted((whole / RANK).glob("index-*"))
    shards = {path.name for path in (whole / RANK).glob("*.safetensors")}
    assert len(segments) > 2
    seen = []
    for kept in range(len(segments)):
        cut = tmp_path / f"cut{kept}"
        shutil.copytree(whole, cut)
        for segment in segments[kept:]:
            (cut / RANK / segment.name).unlink()
        referred = {
            name
            for segment in segments[:kept]
            for name in shards
            if name.encode() in segment.read_bytes()
        }
        beyond = sorted(shards - referred)
        for name in beyond[1:]:  # the next one may already stand
            (cut / RANK / name).unlink()
        trace = read_everything(cut)
        assert trace.ranks[0].closed is None
        seen.append(len(trace.ranks[0].records))
    assert seen == sorted(seen) and seen[0] == 0 < seen[-1]


def test_a_step_that_only_one_rank_finished_is_not_judged(tmp_path: Path) -> None:
    path = small_trace(tmp_path)
    whole = open_trace(path)
    assert whole.steps == (0, 1)
    segments = sorted((path / "rank-00001").glob("index-*"))
    last_shard = max(path / "rank-00001" / name for name in whole.ranks[1].shards)
    segments[-1].unlink()
    assert last_shard.exists()
    trace = open_trace(path)
    assert trace.steps == (0,)
    assert any("step 1 of rank 0 has no counterpart on ranks [1]" in note for note in trace.notes)


def test_omissions_are_gaps(tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "t", Run(omissions=(Omission(point="local_grad", rank=1, unit="head.scale"),))
    )
    trace = open_trace(path)
    assert trace.ranks[0].gaps == ()
    gaps = trace.ranks[1].gaps
    assert {(gap.point, gap.unit, gap.reason) for gap in gaps} == {
        ("local_grad", "head.scale", "write_failed")
    }
    assert trace.steps == (0,)


def test_large_tensors_seal_a_shard_at_once(tmp_path: Path) -> None:
    writer = start(tmp_path / "trace", (parameter(0, (4,)),), shard_bytes=16, seal_every_s=math.inf)
    one_step(writer, 0, records=3)
    assert [name for name in names(writer) if name.endswith("safetensors")] == [
        "000000.safetensors", "000001.safetensors", "000002.safetensors",
    ]  # fmt: skip
    writer.seal("closed")
    assert open_trace(tmp_path / "trace").steps == (0,)


def test_steps_are_sealed_when_they_have_waited(tmp_path: Path) -> None:
    writer = start(tmp_path / "trace", (parameter(0, (4,)),), seal_every_s=0.0)
    one_step(writer, 0)
    one_step(writer, 1)
    assert open_trace(tmp_path / "trace").steps == (0, 1)
    before = names(writer)
    writer.seal()  # nothing waits
    assert names(writer) == before


def full_disk(pattern: str, written: int = 0) -> Callable[..., Any]:
    """Return an ``open`` that fails while writing files whose name matches."""
    original = builtins.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        file = original(path, *args, **kwargs)
        if pattern in str(path):
            count = 0
            write = file.write

            class Full:
                def __enter__(self) -> Full:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def flush(self) -> None:
                    file.flush()

                def write(self, data: bytes) -> int:
                    nonlocal count
                    count += 1
                    if count > written:
                        write(data[: len(data) // 2])
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    return int(write(data))

            return Full()
        return file

    return opened


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("pattern", [".safetensors", "index-"])
def test_full_disk_names_nothing_half(
    writer: RankWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, written: int
) -> None:
    one_step(writer, 0)
    writer.seal()
    one_step(writer, 1, records=2)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", full_disk(pattern, written))
        with pytest.raises(OSError, match="No space left"):
            writer.seal()
        with pytest.raises(OSError, match="No space left"):
            writer.seal()  # and again: nothing is lost, and no number is skipped
    assert not [name for name in names(writer) if name.endswith(schema.TEMPORARY)]
    assert read_everything(tmp_path / "trace").steps == (0,)
    writer.seal("closed")  # the disk has room again
    trace = read_everything(tmp_path / "trace")
    assert trace.steps == (0, 1) and trace.ranks[0].gaps == ()
    assert len(trace.ranks[0].records) == 3


@pytest.mark.parametrize("pattern", [".safetensors", "index-"])
def test_what_cannot_be_written_becomes_gaps(
    writer: RankWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    one_step(writer, 0)
    writer.seal()
    writer.add_record(1, 0, "loss", "loss", 0)
    one_step(writer, 1, records=2, before=1)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", full_disk(pattern))
        with pytest.raises(OSError, match="No space left"):
            writer.seal()
    lost = writer.drop_pending("write_failed", "no space")
    # A shard that was written already is kept: only its segment failed.
    assert lost == (2 if pattern == ".safetensors" else 0)
    one_step(writer, 2)
    writer.seal("closed")
    trace = read_everything(tmp_path / "trace")
    assert len(trace.ranks[0].gaps) == lost
    assert trace.steps == (0, 1, 2)
    assert all(gap.reason == "write_failed" and gap.unit == "p0" for gap in trace.ranks[0].gaps)
    assert [record.step for record in trace.ranks[0].records if record.key] == (
        [0, 2] if lost else [0, 1, 1, 2]
    )


def test_a_full_disk_while_sealing_a_large_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start(tmp_path / "trace", (parameter(0, (4,)),), shard_bytes=16)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", full_disk(".safetensors"))
        with pytest.raises(OSError, match="No space left"):
            one_step(writer, 0)
    assert writer.drop_pending("write_failed", "x") == 1
    writer.end_step(0, micro_steps=1, records=1, gaps=0, partial=False, facts={})
    writer.seal("closed")
    trace = read_everything(tmp_path / "trace")
    assert trace.steps == (0,) and len(trace.ranks[0].gaps) == 1


def test_a_failed_rename_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="Input/output"):
        write_whole(tmp_path / "file", [b"data"])
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        claim_directory(tmp_path / "file" / "trace")


def test_a_manifest_on_a_full_disk_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "open", full_disk("manifest"))
    with pytest.raises(OSError, match="No space left"):
        write_manifest(tmp_path, manifest_of(()))
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_rank_do_not_mix(tmp_path: Path) -> None:
    path = write_run(tmp_path / "t", SMALL)
    with pytest.raises(FileExistsError):
        RankWriter(path, "run", header_of(), {})
