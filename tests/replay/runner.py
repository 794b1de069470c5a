"""Run the cases, a process for each release: imports cost more than the trainings."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from tests.real.releases import install
from tests.replay.case import NEWEST, Run
from tests.replay.cases import CASES
from tests.replay.seen import Seen

# Every case bad and right, on as few releases as that takes, beside the installed one.
FEW = ("0.17.5", "0.17.6", "0.18.3", "0.18.5", "0.19.2", "0.19.3")


@dataclass(frozen=True)
class Ran:
    """Hold where a run on one release is kept, and what was seen of it."""

    slug: str
    run: Run
    release: str
    trace: Path
    seen: Seen


def due(slugs: Iterable[str] = CASES) -> tuple[str, ...]:
    """Return the releases that cases run on, the oldest first."""
    found = {r for slug in slugs for run in CASES[slug].runs for r in run.releases}
    return tuple(sorted(found, key=Version))


def is_there(release: str, directory: Path | None) -> bool:
    """Say whether a release is installed, beside this environment or in it."""
    if release == NEWEST:
        return True
    return directory is not None and any((directory / release).glob("deepspeed-*.dist-info"))


def run_release(release: str, directory: Path, out: Path, slugs: Sequence[str] = ()) -> list[Ran]:
    """Run what is due on a release.

    Args:
        release: what to run on; installed if it is not there.
        directory: where releases are.
        out: a new directory for the traces.
        slugs: the cases; all by default.

    Raises:
        RuntimeError: the process ended with an error; its last words are in the message.
    """
    runs = [(slug, run) for slug in slugs or CASES for run in CASES[slug].runs]
    runs = [(slug, run) for slug, run in runs if release in run.releases]
    names = [f"{slug}/{run.name}" for slug, run in runs]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.replay.worker", str(out), *names],
        env=install.environment(release, directory),
        cwd=install.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"deepspeed {release}: {done.stderr[-2000:]}")
    found = []
    for slug, run in runs:
        place = out / slug / run.name
        seen = Seen(**json.loads((place / "seen.json").read_text(encoding="utf-8")))
        found.append(Ran(slug, run, release, place / "trace", seen))
    return found


def torch_version() -> str:
    """Return the release of torch that all ran with."""
    return importlib.metadata.version("torch")
