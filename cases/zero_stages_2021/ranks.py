"""Run `train.py` as `gradtrace run` does, once for each job, on forked ranks.

    python -m cases.zero_stages_2021.ranks < jobs.json

Prints the losses of every job as one JSON list. The DeepSpeed that ``PYTHONPATH`` names is imported once.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradtrace.integrations.launch import prepare
from gradtrace.testing.ranks import import_once, run_ranks
from tests.real.releases.observe import wait_for_every_gather

SCRIPT: Final = Path(__file__).parent / "train.py"


@dataclass(frozen=True)
class Job:
    """Name one training.

    Attributes:
        args: of ``train.py``.
        trace: where its trace goes.
        sample: which perturbed run it is, or ``None``.
        ranks: how many.
    """

    args: tuple[str, ...]
    trace: str
    sample: int | None = None
    ranks: int = 8


def train(rank: int, job: Job) -> list[float]:
    """Train on one rank; return the losses that the script printed."""
    printed = io.StringIO()
    options = {"on_error": "raise"}
    with contextlib.redirect_stdout(printed):
        prepare(str(SCRIPT), job.args, job.trace, options, perturb_sample=job.sample)()
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed.getvalue(), re.M)]


def train_all(jobs: list[Job]) -> list[list[float]]:
    """Train one job after the other; return rank 0's losses of each."""
    import_once()
    losses = []
    for number, job in enumerate(jobs):
        print(f"{number + 1}/{len(jobs)} {Path(job.trace).name}", file=sys.stderr, flush=True)
        losses.append(run_ranks(job.ranks, train, job)[0])
    return losses


if __name__ == "__main__":
    wait_for_every_gather()  # up to 0.19.7, stage 3 on the CPU begins steps with weights still to come
    print(json.dumps(train_all([Job(**job) for job in json.load(sys.stdin)])))
