"""`gradtrace merge`: the directories of several hosts become one trace, or a named error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tracefiles import read_everything, reseal

import gradtrace
from gradtrace.cli import main
from gradtrace.errors import (
    DamagedTraceError,
    GradtraceError,
    MissingRankError,
    MixedRunsError,
    NotATraceError,
    TraceExistsError,
)
from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace.merge import merge
from gradtrace.trace.reader import open_trace

RUN = Run(stage=2, world_size=4, micro_steps=2, steps=2)


def files(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a whole trace, and the same as two hosts of two ranks would have left it."""
    whole = write_run(tmp_path / "whole", RUN)
    for host, ranks in (("a", (0, 1)), ("b", (2, 3))):
        for rank in ranks:
            name = f"rank-{rank:05d}"
            shutil.copytree(whole / name, tmp_path / host / name)
    shutil.copy(whole / "manifest.json", tmp_path / "a")
    return whole, tmp_path / "a", tmp_path / "b"


def test_two_hosts_become_one_trace(hosts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    whole, one, two = hosts
    (two / "rank-00003" / "index-000099.jsonl.tmp").write_text("cut off")
    before = files(one), {k: v for k, v in files(two).items() if not k.endswith(".tmp")}
    result = merge(tmp_path / "merged", [two, one])
    assert files(tmp_path / "merged") == files(whole)
    assert (files(one), before[1]) == (before[0], {**before[1]})
    assert result.ranks == {0: str(one), 1: str(one), 2: str(two), 3: str(two)}
    assert result.files == len(files(whole)) == result.linked
    read_everything(tmp_path / "merged")
    assert gradtrace.audit(tmp_path / "merged").to_dict() == gradtrace.audit(whole).to_dict()
    shutil.rmtree(one)
    read_everything(tmp_path / "merged")


def test_files_are_copied_where_they_cannot_be_linked(
    hosts: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "merged").mkdir()  # an empty directory may be there
    result = merge(tmp_path / "merged", hosts[1:])
    assert result.linked == 0
    assert files(tmp_path / "merged") == files(hosts[0])


def _other_run(_: Path, one: Path, two: Path) -> list[Path]:
    reseal(two / "rank-00003" / "header.json", lambda body: body.update(run_id="another"))
    return [one, two]


def _damaged(_: Path, one: Path, two: Path) -> list[Path]:
    index = two / "rank-00002" / "index-000000.jsonl"
    index.write_bytes(index.read_bytes()[:-9])
    return [one, two]


def _linked_out(whole: Path, one: Path, two: Path) -> list[Path]:
    shard = two / "rank-00002" / "000000.safetensors"
    shard.unlink()
    shard.symlink_to(whole / "rank-00002" / "000000.safetensors")
    return [one, two]


FAULTS: dict[str, tuple[type[GradtraceError], str, Callable[[Path, Path, Path], list[Path]]]] = {
    "a rank is missing": (MissingRankError, "rank 2, 3", lambda w, a, b: [a]),
    "a host twice": (MixedRunsError, "rank 0 twice", lambda w, a, b: [a, b, w]),
    "no manifest": (NotATraceError, "no manifest.json in any", lambda w, a, b: [b]),
    "no trace": (NotATraceError, "no rank's directory", lambda w, a, b: [a, b, w.parent]),
    "nothing there": (NotATraceError, "no rank's directory", lambda w, a, b: [a, b, b / "none"]),
    "another run": (MixedRunsError, "run id", _other_run),
    "a damaged index": (DamagedTraceError, "index-000000.jsonl", _damaged),
    "a link out of it": (DamagedTraceError, "missing shard", _linked_out),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_whole_run_is_a_named_error(
    name: str, hosts: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    kind, words, prepare = FAULTS[name]
    parts = prepare(*hosts)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(kind, match=words):
        merge(tmp_path / "merged", parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_nothing_is_overwritten(hosts: tuple[Path, Path, Path]) -> None:
    whole, one, two = hosts
    before = files(whole)
    with pytest.raises(TraceExistsError):
        merge(whole, [one, two])
    assert files(whole) == before


def test_the_command(
    hosts: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(path) for path in (tmp_path / "merged", *hosts[1:])]
    assert main.run(["merge", *words]) == 0
    assert "holds 4 ranks" in capsys.readouterr().out
    words[0] = str(tmp_path / "again")
    assert main.run(["merge", *words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["format"], body["version"]) == ("gradtrace.merge", 1)
    assert body["run_id"] == open_trace(hosts[0]).manifest.run_id
    assert main.run(["merge", *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["slug"] == "trace_exists"
