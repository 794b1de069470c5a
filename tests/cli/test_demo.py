"""The demo, as a newcomer runs it: real DeepSpeed, two ranks, one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradtrace.cli import main

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run the demo once; its default directory has to step aside for one that is there."""
    place = tmp_path_factory.mktemp("demo")
    (place / "gradtrace-demo").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "gradtrace", "demo", "--json"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("gradtrace: ") for line in done.stderr.splitlines()), done.stderr
    return place, json.loads(done.stdout)


def test_demo_blames_zero2(demo: tuple[Path, dict[str, Any]]) -> None:
    _, body = demo
    first, blame = body["diff"]["first"], body["diff"]["blame"]
    assert (body["format"], body["diff"]["verdict"]) == ("gradtrace.demo", "diverged")
    assert (first["step"], first["micro_step"], first["point"]) == (0, 1, "accumulated")
    assert (blame["side"], blame["law"], blame["cause"]) == (
        "baseline",
        "accumulate",
        "dropped_micro_steps",
    )
    assert body["audits"]["baseline"]["verdict"] == "fail"
    assert body["audits"]["candidate"]["verdict"] == "pass"


def test_the_readme_shows_what_the_demo_finds(demo: tuple[Path, dict[str, Any]]) -> None:
    _, body = demo
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    for side, broken in (("baseline", "accumulate, end_to_end"), ("candidate", "none")):
        checks = sum(law["checked"] for law in body["audits"][side]["laws"].values())
        assert f"{broken} broken in {checks} checks\n" in readme
    first = body["diff"]["first"]
    assert f"  parameter  {first['param']}\n  element    {first['index']}\n" in readme


def test_demo_leaves_traces_to_explore(
    demo: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, body = demo
    assert body["baseline"] == "gradtrace-demo-2/zero2"
    monkeypatch.chdir(place)
    assert main.run(["diff", body["baseline"], body["candidate"]]) == 1
    assert main.run(["audit", body["candidate"]]) == 0
    for side in ("baseline", "candidate"):
        assert main.run(["verify", body[side]]) == 0


def test_demo_overwrites_nothing(demo: tuple[Path, dict[str, Any]]) -> None:
    place, _ = demo
    assert main.run(["demo", "-o", str(place / "gradtrace-demo-2")]) == 2
