"""Plant faults into live DeepSpeed runs and score what `gradtrace audit` says of each.

    python benchmarks/planted_faults.py [--seed N] [--faults N] [--only WORDS] [--jobs N] [--out FILE]

Draws from every kind of fault x hop x stage x dtype that `tests/real/planting.py` lists, trains 2 or
3 CPU ranks with the fault in DeepSpeed's own methods, audits the trace, and compares: law, step,
micro-step, parameters and guilty rank as planted, nothing else found, and the cause.

A plant that is provably invisible is drawn again, with other random numbers, at most `REDRAWS` times,
and counted: no element of it moved by more than four roundings of its dtype, as where a zero
gradient is zeroed, or the twin that a swap needs is not in the same call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gradtrace.testing.ranks import import_once
from tests.real import planting
from tests.real.planting import Draw, Kind, Score

REDRAWS: Final = 5


def chosen(seed: int, faults: int, only: str) -> list[tuple[str, Kind]]:
    """Choose kinds of faults in an order that depends on the seed alone; all of them for 0."""
    every = [
        (name, kind)
        for name in planting.SETUPS
        for kind in planting.possible(name)
        if only in f"{name} {kind.hop} {kind.kind}"
    ]
    order = np.random.default_rng(seed).permutation(len(every))
    picked = sorted(order[: faults or len(every)])
    return [every[at] for at in picked]


def score_one(seed: int, number: int, name: str, kind: Kind) -> tuple[Score, int]:
    """Plant one fault, drawing again while it is invisible; return the score and the redraws."""
    label = zlib.crc32(f"{name} {kind}".encode())
    for again in range(REDRAWS + 1):
        rng = np.random.default_rng([seed, label, again])
        draw = planting.draw(rng, number, name, kind)
        with tempfile.TemporaryDirectory(prefix="gradtrace-planted-") as directory:
            score = planting.run(draw, Path(directory))
        if planting.visible(score) or score.failed:
            break
    return score, again


def row(score: Score) -> str:
    """Return one line of the full table."""
    fault, first = score.draw.fault, score.findings[0] if score.findings else None
    planted = (fault.law, fault.step, fault.micro_step, planting.guilty(score.draw, score.struck))
    found = ("-",) * 4
    if first is not None:
        rank = first.rank if first.guilty is None else first.guilty
        found = (first.law, first.step, first.micro_step, rank)
    names = sorted({param for (_, param), moved in score.struck.items() if moved > 0 and param})
    params = fault.param or (f"all {len(names)}" if names else "-")
    cells = [
        str(score.draw.number),
        _where(score.draw),
        f"{fault.kind} {fault.amount:g}" if fault.amount else fault.kind,
        " ".join(map(str, planted)).replace("None", "-"),
        params,
        score.draw.kind.cause,
        " ".join(map(str, found)).replace("None", "-"),
        "yes" if not score.wrong else "; ".join(score.wrong),
        first.cause if first else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def _where(draw: Draw) -> str:
    return f"{draw.config}, {draw.setup.ranks} ranks"


HEAD: Final = (
    "| # | run | planted | law, step, micro-step, rank | parameters | cause | found: law, step, "
    "micro-step, rank | as planted, nothing else | cause found |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def summary(scores: list[Score]) -> str:
    """Return the scores by law."""
    by_law: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        by_law[score.draw.fault.law].append(score)
    lines = ["| law | planted | detected | place right | cause right |", "|---|---|---|---|---|"]
    for law, group in [*by_law.items(), ("all", scores)]:
        counts = (
            len(group),
            sum(score.detected for score in group),
            sum(not score.wrong for score in group),
            sum(score.cause for score in group),
        )
        lines.append(f"| {law} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _quiet() -> None:
    """Keep what DeepSpeed prints out of the table."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> int:
    """Run the table; the exit status is 1 where a score misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--faults", type=int, default=0, help="how many; 0 is one of every kind")
    parser.add_argument("--only", default="", help="such as 'z2-fp32 reduce scaled'")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--out", type=Path, help="write the full table there")
    options = parser.parse_args()
    start = time.monotonic()
    scores: list[Score] = []
    redrawn = 0
    print(HEAD)
    work = enumerate(chosen(options.seed, options.faults, options.only))
    tasks = [(options.seed, number, name, kind) for number, (name, kind) in work]
    import_once()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, context, _quiet) as pool:
        for score, again in pool.map(score_one, *zip(*tasks, strict=True)):
            redrawn += again
            scores.append(score)
            print(row(score), flush=True)
            if score.wrong or not score.cause:
                details = [finding.detail for finding in score.findings]
                print(f"<!-- {score.draw.title}: {details} -->", flush=True)
    table = summary(scores)
    tail = f"{redrawn} plants were invisible and drawn again; {time.monotonic() - start:.0f} s."
    print(f"\n{table}\n\n{tail}")
    if options.out:
        rows = "\n".join([HEAD, *map(row, scores)])
        options.out.write_text(f"{table}\n\n{tail}\n\n{rows}\n", encoding="utf-8")
    exactly = all(score.detected and not score.wrong for score in scores)
    return 0 if exactly and sum(s.cause for s in scores) >= 0.95 * len(scores) else 1


if __name__ == "__main__":
    sys.exit(main())
