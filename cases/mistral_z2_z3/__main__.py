"""Replay DeepSpeed issue 5188, then swap one package at a time.

    python -m cases.mistral_z2_z3 [--install DIR] [--ranks N] [--steps N] [--out DIR]

Fine-tunes a tiny Mistral (`finetune.py`, which knows nothing of gradtrace) under ZeRO-2 and under ZeRO-3,
traced, and says where the two part: with the installed packages and, with ``--install``, with those of
the time of the report.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gradtrace
from cases import environments
from gradtrace.analysis.results import DiffResult
from tests.real.releases import install

HERE: Final = Path(__file__).parent
# accelerate 0.25 runs DeepSpeed over NCCL alone; 0.34.2 knows CPUs and still suits transformers 4.36.2.
PINS: Final = {"accelerate": "0.34.2", "transformers": "4.36.2"}
REPORTED: Final = "0.14.4"  # the oldest that runs here; the report names 0.12.5
SAMPLES: Final = (0, 1)


@dataclass(frozen=True)
class Pair:
    """Name two fine-tunings that differ by the stage alone.

    Attributes:
        title: what stands in the table.
        deepspeed: its release; ``None`` for all packages as installed.
        transformers: its release, instead of the one that was reported.
        load_first: the model is loaded before the arguments are made, so without ``zero.Init``.
    """

    title: str
    deepspeed: str | None = REPORTED
    transformers: str | None = None
    load_first: bool = False


@dataclass(frozen=True)
class Outcome:
    """Hold the losses that the Trainer printed at both stages, and what gradtrace says."""

    losses: tuple[tuple[float, ...], tuple[float, ...]]
    diff: DiffResult

    @property
    def apart(self) -> float:
        """Return the largest difference between the losses of a step."""
        return max(abs(one - two) for one, two in zip(*self.losses, strict=True))

    @property
    def audits(self) -> str:
        """Return the verdicts on the two runs alone."""
        both = (self.diff.baseline_audit, self.diff.candidate_audit)
        return ", ".join("none" if audit is None else audit.verdict for audit in both)

    @property
    def verdict(self) -> str:
        """Return what diff says, in one line."""
        first, blame = self.diff.first, self.diff.blame
        if first is None or blame is None:
            return self.diff.verdict
        where = f"step {first.step}, micro-step {first.micro_step}, {first.point}"
        buffers = ": buffers of the model" if "buffers of the model" in blame.detail else ""
        return f"{self.diff.verdict} at {where}; {blame.cause}{buffers}"


TODAY: Final = Pair("as installed", deepspeed=None)
SWAPPED: Final = (
    Pair("transformers 4.36.2, deepspeed 0.14.4"),
    Pair("deepspeed 0.15.4", deepspeed="0.15.4"),  # later ones refuse what this accelerate does
    Pair("transformers 4.37.2", transformers="4.37.2"),
    Pair("transformers 4.38.0", transformers="4.38.0"),
    Pair("model loaded before TrainingArguments", load_first=True),
)


def checkpoint(directory: Path, steps: int = 200) -> Path:
    """Make the model and the text that are fine-tuned, and return their directory.

    Raises:
        subprocess.CalledProcessError: making them failed.
    """
    made = directory / "checkpoint"
    words = [sys.executable, str(HERE / "checkpoint.py"), str(made), "--steps", str(steps)]
    subprocess.run(words, check=True, capture_output=True)
    return made


def finetune(
    pair: Pair,
    stage: int,
    model: Path,
    trace: Path,
    *,
    ranks: int,
    steps: int,
    packages: Path | None = None,
    perturb: int | None = None,
) -> tuple[float, ...]:
    """Fine-tune once, traced; return the losses that the Trainer printed.

    Args:
        packages: where other packages are installed.
        perturb: number of the sample, for a run from perturbed weights.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    python: Path | str = sys.executable
    before: list[Path] = []
    release: Path | None = None
    if pair.deepspeed is not None:
        assert packages is not None
        python = environments.environment(packages, "hugging-face-2024-01", PINS)
        release = install.ensure(pair.deepspeed, packages)
        if pair.transformers is not None:
            before = [environments.package(packages, "transformers", pair.transformers)]
    port = environments.free_port()
    sample = [] if perturb is None else ["--perturb-ulp", str(perturb)]
    script = [str(HERE / "finetune.py"), "--model", str(model), "--data", str(model / "train.json")]
    told = environments.printed(
        [
            *(str(python), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--master-port", str(port), "-m", "cases.without_shm", "run", "-o", str(trace)),
            *(*sample, *script, "--stage", str(stage), "--steps", str(steps)),
            *(["--use-cpu"] if pair.deepspeed is None else []),
            *(["--load-first"] if pair.load_first else []),
        ],
        {**environments.variables(release, *before, port=port), "LOCAL_SIZE": str(ranks)},
        trace.parent,
    )
    return tuple(float(loss) for loss in re.findall(r"'loss': '?([0-9.e+-]+)", told))


def replay(
    pair: Pair,
    model: Path,
    traces: Path,
    *,
    ranks: int = 2,
    steps: int = 20,
    packages: Path | None = None,
    samples: Sequence[int] = SAMPLES,
) -> Outcome:
    """Fine-tune at stages 2 and 3 and compare; against the noise of ZeRO-2 where they only round apart.

    Args:
        samples: numbers of the perturbed runs that the noise is measured by.

    Raises:
        subprocess.CalledProcessError: a training failed.
    """
    traces.mkdir(parents=True, exist_ok=True)
    two, three = traces / "zero2", traces / "zero3"
    how = {"ranks": ranks, "steps": steps}
    losses = (
        finetune(pair, 2, model, two, **how, packages=packages),
        finetune(pair, 3, model, three, **how, packages=packages),
    )
    result = gradtrace.diff(two, three)
    if result.verdict == "rounding" and samples:
        noise = [traces / f"noise{number}" for number in samples]
        for number, trace in zip(samples, noise, strict=True):
            finetune(pair, 2, model, trace, **how, packages=packages, perturb=number)
        result = gradtrace.diff(two, three, envelope=noise)
    return Outcome(losses, result)


def row(pair: Pair, outcome: Outcome) -> str:
    """Return the pair's line of the table."""
    two, three = (f"{run[0]:.3f} ... {run[-1]:.3f}" for run in outcome.losses)
    cells = (pair.title, two, three, f"{outcome.apart:.3f}", outcome.audits, outcome.verdict)
    return f"| {' | '.join(cells)} |"


def table(
    pairs: Sequence[Pair], model: Path, traces: Path, packages: Path | None, ranks: int, steps: int
) -> list[str]:
    """Replay every pair; return the table, a line each, and what follows from the noise."""
    lines = [
        "| packages | losses of ZeRO-2 | losses of ZeRO-3 | apart at most | audits | diff |",
        "|---|---|---|---|---|---|",
    ]
    told = []
    for number, pair in enumerate(pairs):
        print(f"{number + 1}/{len(pairs)} {pair.title}", file=sys.stderr)
        place = traces / pair.title.replace(" ", "-").replace(",", "")
        outcome = replay(pair, model, place, ranks=ranks, steps=steps, packages=packages)
        lines.append(row(pair, outcome))
        if outcome.diff.envelope is not None:
            told.append(f"\n{pair.title}: {outcome.diff.envelope.reading}")
    return [*lines, *told]


def main() -> None:
    """Replay, compare, swap; print it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", type=Path, help="where other packages are kept; none without")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="keep the traces there")
    chosen = parser.parse_args()
    packages = None
    if chosen.install is not None:
        chosen.install.mkdir(parents=True, exist_ok=True)
        packages = chosen.install.resolve()
    pairs = (TODAY,) if packages is None else (TODAY, *SWAPPED)
    with tempfile.TemporaryDirectory(prefix="gradtrace-case-") as scratch:
        traces = (chosen.out or Path(scratch)).resolve()
        traces.mkdir(parents=True, exist_ok=True)
        model = checkpoint(traces)
        lines = table(pairs, model, traces, packages, chosen.ranks, chosen.steps)
        print("\n".join(lines))


if __name__ == "__main__":
    main()
