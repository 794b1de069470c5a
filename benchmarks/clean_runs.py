"""Audit clean runs and compare pairs of them: every finding here is a false one.

    python benchmarks/clean_runs.py [--every N] [--pairs N] [--jobs N]

Trains the configurations of `tests/real/catalog` that meet no known defect of DeepSpeed, traced, on
2 to 4 CPU ranks. Audits each, and compares pairs that owe each other equal gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gradtrace
from gradtrace.analysis.results import AuditResult
from gradtrace.testing.ranks import import_once
from tests.real import pairs
from tests.real.catalog import ENTRIES
from tests.real.catalog.entry import Entry
from tests.real.measure import Measured
from tests.real.training import train


def audit_one(entry: Entry, path: Path) -> AuditResult:
    """Train a configuration, traced, and audit it."""
    train(entry.setup, path)
    return gradtrace.audit(path)


def _quiet() -> None:
    """Keep what DeepSpeed prints out of the table."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> int:
    """Print the table; the exit status is 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="try every Nth configuration")
    parser.add_argument("--pairs", type=int, default=300, help="how many pairs to compare")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    options = parser.parse_args()
    start = time.monotonic()
    clean = [e for e in ENTRIES if e.refused is None and e.finding is None][:: options.every]
    chosen = pairs.pairs(clean, most=options.pairs)
    ran: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    false: list[str] = []
    import_once()
    with tempfile.TemporaryDirectory(prefix="gradtrace-clean-") as directory:
        paths = [Path(directory) / str(number) for number in range(len(clean))]
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(options.jobs, context, _quiet) as pool:
            results = pool.map(audit_one, clean, paths)
            for entry, result in zip(clean, results, strict=True):
                dtype = str(entry.setup.dtype).removeprefix("torch.")
                where = f"ZeRO-{entry.setup.stage}, {dtype}"
                ran[where] += 1
                passed[where] += result.verdict == "pass"
                if result.verdict != "pass":
                    false.append(f"{entry.name}: {result.verdict}: {result.first} {result.notes}")
        kept = {
            repr(entry.setup): Measured(entry, path)
            for entry, path in zip(clean, paths, strict=True)
        }
        compared = pairs.compare(lambda entry: kept[repr(entry.setup)], chosen)
    print("| clean runs | audited | pass |\n|---|---|---|")
    for where in sorted(ran):
        print(f"| {where} | {ran[where]} | {passed[where]} |")
    print(f"| all | {ran.total()} | {passed.total()} |\n")
    verdicts = Counter(result.verdict for result in compared)
    print("| pairs compared | " + " | ".join(verdicts) + " |")
    print("|---" * (len(verdicts) + 1) + "|")
    print(f"| {len(compared)} | " + " | ".join(str(count) for count in verdicts.values()) + " |")
    for (one, other), result in zip(chosen, compared, strict=True):
        if not result.good:
            false.append(f"{one.name} against {other.name}: {result}")
    print(f"\n{len(false)} false verdicts; {time.monotonic() - start:.0f} s.")
    print("\n".join(false))
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
