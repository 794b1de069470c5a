"""`gradtrace report`: what a maintainer needs, and nothing that its sender must not show."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradtrace.analysis.bundle import FEW, PRIVATE
from gradtrace.testing.synthetic import Fault, Run, write_run
from gradtrace.trace.digest import value_hash
from gradtrace.trace.reader import open_trace

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    fault = Fault("dropped_micro_steps", "accumulate", step=0, micro_step=1)
    good = write_run(tmp_path / "confidential" / "good", Run(stage=2, steps=2))
    bad = write_run(tmp_path / "confidential" / "bad", Run(stage=2, steps=2, faults=(fault,)))
    return [good, bad]


def _read(path: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == ["records.jsonl", "report.json", "summary.txt"]
        lines = archive.read("records.jsonl").decode().splitlines()
        body = json.loads(archive.read("report.json"))
        return archive.read("summary.txt").decode(), body, [json.loads(line) for line in lines]


def test_verdicts_versions_and_digests_are_there(
    cli: Cli, traces: list[Path], tmp_path: Path
) -> None:
    status, out, _ = cli("report", *traces, "-o", tmp_path / "bundle")
    assert status == 0
    assert "bundle.zip" in out
    summary, body, lines = _read(tmp_path / "bundle.zip")
    assert "DIVERGED" in summary
    assert "law accumulate is broken" in summary
    good, bad = body["traces"]
    assert (good["audit"]["verdict"], bad["audit"]["verdict"]) == ("pass", "fail")
    assert bad["audit"]["first"]["cause"] == "dropped_micro_steps"
    assert body["diffs"]["trace-2"]["blame"]["side"] == "candidate"
    assert good["info"]["packages"]
    assert good["ds_config"]
    for name, path in zip(("trace-1", "trace-2"), traces, strict=True):
        trace = open_trace(path)
        mine = [line for line in lines if line["trace"] == name]
        assert len(mine) == sum(len(held.records) for held in trace.ranks.values())
        record = next(r for r in trace.ranks[0].records if r.point == "reduced")
        line = next(
            m for m in mine if (m["rank"], m["point"], m["step"]) == (0, "reduced", record.step)
        )
        bits = trace.bits(record)
        for span, told in zip(trace.layout(record), line["digest"]["hash"], strict=True):
            part = bits[span.flat_offset : span.flat_offset + span.numel]
            assert int(told, 16) == value_hash(part, span.param_offset)


def test_no_path_host_or_weight_goes_out(cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    cli("report", *traces, "-o", tmp_path / "bundle.zip")
    summary, body, lines = _read(tmp_path / "bundle.zip")
    hosts = {held.header.host for path in traces for held in open_trace(path).ranks.values()}
    whole = summary + json.dumps([body, lines])
    for word in ("confidential", str(tmp_path), *hosts):
        assert word
        assert f'"{word}"' not in whole
        assert f" {word} " not in whole
    assert "confidential" not in whole
    weights = [line for line in lines if line.get("point") in PRIVATE]
    assert weights
    for line in (line for line in weights if "spans" in line):
        for (_, _, numel), norm in zip(line["spans"], line["digest"]["l2"], strict=True):
            assert (norm is None) == (numel < FEW)


def test_a_file_that_exists_is_left_alone(cli: Cli, traces: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "bundle.zip"
    target.write_text("mine")
    status, _, err = cli("report", traces[0], "-o", target)
    assert status == 2
    assert "a file that exists" in err
    assert target.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_what_is_no_trace_is_named_and_nothing_is_written(cli: Cli, tmp_path: Path) -> None:
    status, _, err = cli("report", tmp_path, "-o", tmp_path / "bundle.zip")
    assert status == 2
    assert "not_a_trace" in err
    assert not (tmp_path / "bundle.zip").exists()
