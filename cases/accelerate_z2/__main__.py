"""Replay accelerate issue 3877, then swap one package at a time.

    python -m cases.accelerate_z2 --install DIR [--out DIR]

Fine-tunes a tiny Qwen2 with TRL (`sft.py`, which knows nothing of gradtrace) under every combination
below, traced; prints the gradient norms that TRL reports and what `gradtrace audit` says.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gradtrace
from cases import environments
from gradtrace.analysis.results import AuditResult
from tests.real.releases import install

SCRIPT: Final = Path(__file__).parent / "sft.py"
PINS: Final = {"accelerate": "1.11.0", "transformers": "4.57.3", "trl": "0.25.1"}
REPORTED: Final = "0.18.2"


@dataclass(frozen=True)
class Run:
    """Name one fine-tuning.

    Attributes:
        deepspeed: its release.
        swapped: a package and its release, instead of the one that was reported.
    """

    stage: int = 2
    batch: int = 2
    accumulation: int = 4
    deepspeed: str = REPORTED
    swapped: tuple[str, str] | None = None

    @property
    def title(self) -> str:
        """Return the run in words."""
        swapped = "" if self.swapped is None else f", {self.swapped[0]} {self.swapped[1]}"
        cut = f"{self.batch} x {self.accumulation}"
        return f"ZeRO-{self.stage}, {cut}, deepspeed {self.deepspeed}{swapped}"


@dataclass(frozen=True)
class Outcome:
    """Hold the norms that TRL printed, and the verdict."""

    norms: tuple[float, ...]
    audit: AuditResult

    @property
    def verdict(self) -> str:
        """Return what audit says, in one line."""
        first = self.audit.first
        if first is None:
            return self.audit.verdict
        where = f"step {first.step}, micro-step {first.micro_step}"
        return f"{first.law}: {first.cause} from {where}"


AS_REPORTED: Final = (
    Run(stage=1),
    Run(stage=2),
    Run(stage=3),
    Run(stage=2, batch=8, accumulation=1),
)
SWAPPED: Final = (
    Run(swapped=("accelerate", "1.10.1")),
    Run(swapped=("accelerate", "1.15.0")),
    Run(swapped=("trl", "0.24.0")),
    Run(swapped=("transformers", "4.56.2")),
    *(Run(deepspeed=release) for release in ("0.17.5", "0.17.6", "0.18.3", "0.18.4", "0.19.8")),
)


def replay(run: Run, directory: Path, trace: Path) -> Outcome:
    """Fine-tune once, traced.

    Args:
        directory: where packages are installed.
        trace: where the trace goes.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    python = environments.environment(directory, "hugging-face-2025-11", PINS)
    release = install.ensure(run.deepspeed, directory)
    before = [] if run.swapped is None else [environments.package(directory, *run.swapped)]
    words = ("--stage", run.stage, "--batch", run.batch, "--accumulation", run.accumulation)
    told = environments.printed(
        environments.gradtrace_run(python, trace, SCRIPT, *map(str, words)),
        environments.variables(release, *before, port=environments.free_port()),
        trace.parent,
    )
    norms = tuple(float(n) for n in re.findall(r"'grad_norm': '?([0-9.e+-]+)", told))
    return Outcome(norms, gradtrace.audit(trace))


def table(runs: Sequence[Run], directory: Path, traces: Path) -> list[str]:
    """Replay every run; return the table, a line each."""
    lines = ["| run | gradient norms of the first steps | audit |", "|---|---|---|"]
    for number, run in enumerate(runs):
        print(f"{number + 1}/{len(runs)} {run.title}", file=sys.stderr)
        outcome = replay(run, directory, traces / run.title.replace(" ", "-").replace(",", ""))
        norms = " ".join(f"{norm:.3f}" for norm in outcome.norms)
        lines.append(f"| {run.title} | {norms} | {outcome.verdict} |")
    return lines


def main() -> None:
    """Replay, compare, swap; print it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", type=Path, required=True, help="where packages are kept")
    parser.add_argument("--out", type=Path, help="keep the traces there")
    chosen = parser.parse_args()
    chosen.install.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gradtrace-case-") as scratch:
        traces = (chosen.out or Path(scratch)).resolve()
        traces.mkdir(parents=True, exist_ok=True)
        print("\n".join(table((*AS_REPORTED, *SWAPPED), chosen.install.resolve(), traces)))


if __name__ == "__main__":
    main()
