"""Replay DeepSpeed issue 1488: train under stages 0 to 3, compare the stages, take out what parts them.

    python -m cases.zero_stages_2021 --install DIR [--out DIR] [--page]

Trains on 8 CPU ranks with the oldest DeepSpeed that runs here and with the newest, traced; prints which
pairs of stages agree, and what `gradtrace diff` says of those that do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import gradtrace
from cases.zero_stages_2021.plan import SAMPLES, SWAPPED, Pair, Run, pairs, runs
from cases.zero_stages_2021.ranks import Job
from gradtrace.analysis.results import DiffResult, Divergence, Finding
from tests.real.releases import install

PAGE: Final = install.ROOT / "docs/cases/zero_stages_2021.md"
BEGIN: Final = "<!-- written by python -m cases.zero_stages_2021 --page -->\n"
END: Final = "<!-- end -->\n"
HEAD: Final = (
    "| stages | losses differ, step 1 on | noise | diff | envelope | ratio |\n"
    "|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Outcome:
    """Hold what one pair gave.

    Attributes:
        losses: the candidate's less the baseline's, of each step.
        noise: the largest difference that a perturbed run of the baseline makes, of each step.
        verdict: what diff says.
        envelope: whether the candidate leaves the baseline's noise, and when.
        ratio: its distance at its worst step, in units of that noise.
    """

    losses: tuple[float, ...]
    noise: tuple[float, ...]
    verdict: str
    envelope: str
    ratio: float

    @property
    def row(self) -> str:
        """Return its cells in the table."""
        cells = (
            " ".join(f"{loss:.1e}" for loss in self.losses[1:]),
            " ".join(f"{noise:.1e}" for noise in self.noise[1:]),
            *(self.verdict, self.envelope, f"{self.ratio:.2g}"),
        )
        return " | ".join(cells)


def said(result: DiffResult) -> str:
    """Return what diff says, in one line."""
    words: str = result.verdict
    if result.first is not None:
        words += f" at {_place(result.first)}, {result.first.point}"
    if result.blame is not None and result.blame.law is not None:
        words += f"; {result.blame.side} breaks {result.blame.law}: {result.blame.cause}"
    return words


def audited(trace: Path) -> str:
    """Return what audit says of a trace, in one line."""
    result = gradtrace.audit(trace)
    if result.first is None:
        return result.verdict
    return f"{result.first.law}: {result.first.cause} from {_place(result.first)}"


def _place(first: Divergence | Finding) -> str:
    micro_step = "" if first.micro_step is None else f", micro-step {first.micro_step}"
    return f"step {first.step}{micro_step}"


def train(
    release: str, directory: Path, planned: Sequence[Run], traces: Path, ranks: int = 8
) -> dict[Run, list[float]]:
    """Train every run on one release, traced; return rank 0's losses.

    Args:
        directory: where releases are installed.
        traces: gets a trace for each run, under its name.

    Raises:
        subprocess.CalledProcessError: a training failed.
    """
    jobs = [Job(run.args, str(traces / run.name), run.sample, ranks) for run in planned]
    done = subprocess.run(
        [sys.executable, "-m", "cases.zero_stages_2021.ranks"],
        input=json.dumps([asdict(job) for job in jobs]),
        env=install.environment(release, directory),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(planned, json.loads(done.stdout.splitlines()[-1]), strict=True))


def compare(
    pair: Pair, losses: dict[Run, list[float]], traces: Path, samples: int = SAMPLES
) -> Outcome:
    """Compare two runs, and hold their difference against the baseline's own noise."""
    baseline = losses[pair.baseline]
    steps = range(len(baseline))
    perturbed = pair.baseline.noise[:samples]
    noise = [losses[run] for run in perturbed]
    result = gradtrace.diff(
        traces / pair.baseline.name,
        traces / pair.candidate.name,
        envelope=[traces / run.name for run in perturbed],
    )
    assert result.envelope is not None
    outside = result.envelope.first_outside
    return Outcome(
        tuple(losses[pair.candidate][step] - baseline[step] for step in steps),
        tuple(max(abs(run[step] - baseline[step]) for run in noise) for step in steps),
        said(result),
        "inside" if outside is None else f"outside from step {outside}",
        max(step.ratio for step in result.envelope.steps),
    )


def judge(
    release: str, losses: dict[Run, list[float]], traces: Path
) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Compare and audit what was trained on one release.

    Returns:
        Pair -> what it gave; run -> what audit says.
    """
    listed = pairs(release)
    trained = [run.name for run in losses if run.sample is None]
    with ProcessPoolExecutor() as pool:
        outcomes = pool.map(partial(compare, losses=losses, traces=traces), listed)
        verdicts = pool.map(audited, [traces / name for name in trained])
        return (
            dict(zip([pair.title for pair in listed], outcomes, strict=True)),
            dict(zip(trained, verdicts, strict=True)),
        )


def tables(release: str, outcomes: dict[str, Outcome], audits: dict[str, str]) -> str:
    """Return what one release gave, as text."""
    text = f"### deepspeed {release}\n\n{HEAD}"
    text += "".join(f"| {title} | {outcome.row} |\n" for title, outcome in outcomes.items())
    text += "\n| audit says | of |\n|---|---|\n"
    for verdict in dict.fromkeys(audits.values()):
        of = ", ".join(f"`{name}`" for name, its in audits.items() if its == verdict)
        text += f"| {verdict} | {of} |\n"
    return text


def main() -> None:
    """Replay both releases, and print or write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", type=Path, required=True, help="where releases are kept")
    parser.add_argument("--out", type=Path, help="keep the traces there")
    parser.add_argument("--page", action="store_true", help=f"write the output into {PAGE.name}")
    chosen = parser.parse_args()
    directory = chosen.install.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gradtrace-case-") as scratch:
        traces = (chosen.out or Path(scratch)).resolve()
        text = ""
        for release in SWAPPED:
            losses = train(release, directory, runs(release), traces / release)
            text += "\n" + tables(release, *judge(release, losses, traces / release))
    print(text)
    if chosen.page:
        page = PAGE.read_text(encoding="utf-8")
        head, rest = page.split(BEGIN)
        PAGE.write_text(head + BEGIN + text + "\n" + END + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
