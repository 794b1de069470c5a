"""Run the demo's two trainings in a process of their own, and say what was run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace.analysis.audit import audit
from gradtrace.errors import BadOptionError, CaptureError, TraceExistsError
from gradtrace.testing.ranks import cpu_environment, require_deepspeed


@dataclass(frozen=True, slots=True)
class DemoTraces:
    """Hold what the demo left behind.

    Attributes:
        baseline: the trace under ZeRO-2.
        candidate: the trace under ZeRO-3: same model, same data, same script.
        deepspeed: the installed release.
        planted: whether the fault had to be planted, because this release has it no more.
        losses: stage (``zero2``, ``zero3``) -> mean loss of each step on rank 0.
        micro_steps: backward passes a step.
    """

    baseline: Path
    candidate: Path
    deepspeed: str
    planted: bool
    losses: dict[str, list[float]]
    micro_steps: int


def run_demo(out_dir: Path, progress: Callable[[str], None]) -> DemoTraces:
    """Train a small model under ZeRO-2 and ZeRO-3 on two CPU ranks, both traced.

    Args:
        out_dir: gets the directories ``zero2`` and ``zero3``.
        progress: told of each stage in one line.

    Raises:
        MissingDependencyError: torch or deepspeed is not installed.
        TraceExistsError: the directory holds the traces of an earlier demo.
        CaptureError: a training failed.
    """
    require_deepspeed("gradtrace demo")
    if out_dir.exists() and not out_dir.is_dir():
        raise BadOptionError(
            "a file",
            where=str(out_dir),
            expected="a directory, or nothing yet",
            remedy="Choose another place with -o.",
        )
    for name in ("zero2", "zero3"):
        if (out_dir / name).exists():
            raise TraceExistsError(
                f"the traces of an earlier demo ({name})",
                where=str(out_dir),
                expected="a new or empty directory",
                remedy="Choose another one with -o, or remove it.",
            )
    release = importlib.metadata.version("deepspeed")
    progress(f"training under ZeRO-2 and ZeRO-3 (deepspeed {release}, 2 CPU ranks)")
    facts = _train(out_dir, ("2", "3"), plant=False)
    planted = False
    if audit(out_dir / "zero2").verdict == "pass":
        # The installed release accumulates by hand correctly: the bug has to be put back.
        progress(f"deepspeed {release} does not have the bug: planting it, and training once more")
        (out_dir / "zero2").rename(out_dir / "zero2-as-released")
        facts["losses"].update(_train(out_dir, ("2",), plant=True)["losses"])
        planted = True
    return DemoTraces(
        baseline=out_dir / "zero2",
        candidate=out_dir / "zero3",
        deepspeed=release,
        planted=planted,
        losses=facts["losses"],
        micro_steps=facts["micro_steps"],
    )


def _train(out_dir: Path, stages: tuple[str, ...], *, plant: bool) -> Any:
    environment = {**os.environ, **cpu_environment()}
    command = [sys.executable, "-m", "gradtrace.testing.demo_train", str(out_dir), *stages]
    done = subprocess.run(
        command + ["--plant"] * plant, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CaptureError(
            f"a training that failed: {_last_line(done.stderr)}",
            where=" ".join(command),
            expected="a training on two CPU ranks",
            remedy="Run the command above by itself to see all that it prints.",
        )
    return json.loads(done.stdout.splitlines()[-1])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
