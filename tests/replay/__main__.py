"""Replay real bugs, each on releases of DeepSpeed that have it and on releases that do not.

    python -m tests.replay --install DIR [SLUG ...]

Prints one table; exits with 1 if something was not found, or found where it is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.replay import judge, page, runner
from tests.replay.cases import CASES, SLUGS
from tests.replay.runner import Ran


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help=f"one of {', '.join(SLUGS)}")
    parser.add_argument("--install", type=Path, help="where releases are, or will be, installed")
    parser.add_argument(
        "--releases",
        type=lambda text: tuple(text.split(",")),
        help="comma-separated; by default every one that the cases speak of",
    )
    parser.add_argument(
        "--few",
        dest="releases",
        action="store_const",
        const=runner.FEW,
        help="releases that suffice, beside the installed one, to show every case bad and right",
    )
    parser.add_argument("--jobs", type=int, default=1, help="releases that run at a time")
    parser.add_argument("--page", type=Path, help="page to write, of all cases on all releases")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.slugs) - set(SLUGS))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(SLUGS)}")
    if options.page is not None and (options.slugs or options.releases):
        parser.error("--page needs all cases on all releases")
    return options


def replay(
    slugs: Sequence[str], releases: Sequence[str], directory: Path, out: Path, jobs: int
) -> list[Ran]:
    """Run cases on releases, some at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(
            lambda release: runner.run_release(release, directory, out / release, slugs), releases
        )
        return [ran for runs in done for ran in runs]


def rows(slugs: Sequence[str], ran: Sequence[Ran]) -> Iterator[dict[str, Any]]:
    """Judge every run and every pair: what was expected, what was found, and what is wrong."""
    by_place = {(one.slug, one.run.name, one.release): one for one in ran}
    for slug in slugs:
        case = CASES[slug]
        for run in case.runs:
            for release in sorted(run.releases, key=runner.Version):
                one = by_place.get((slug, run.name, release))
                if one is None:
                    continue
                result = judge.audit_of(one)
                first = None if result is None else result.first
                yield {
                    "slug": slug,
                    "run": run.name,
                    "release": release,
                    "expected": judge.wanted_words(run, release),
                    "found": judge.found_words(one, result),
                    "line": None if first is None else first.detail,
                    "notes": [n for n in (result.notes if result else ()) if _asked(n, run.notes)],
                    "problems": judge.problems(one, result),
                }
        for pair in case.compared:
            sides = [by_place.get((slug, *side)) for side in (pair.baseline, pair.candidate)]
            if sides[0] is None or sides[1] is None:
                continue
            compared = judge.compare(sides[0], sides[1])
            yield {
                "slug": slug,
                "run": f"{pair.baseline[0]} against {pair.candidate[0]}",
                "release": " / ".join(dict.fromkeys((pair.baseline[1], pair.candidate[1]))),
                "expected": judge.diff_words(pair.verdict, pair.point, pair.cause),
                "found": judge.diff_words(
                    compared.verdict,
                    None if compared.first is None else compared.first.point,
                    None if compared.blame is None else compared.blame.cause,
                ),
                "line": None if compared.blame is None else compared.blame.detail,
                "notes": [note for note in compared.notes if _asked(note, pair.notes)],
                "problems": judge.pair_problems(pair, compared),
            }


def _asked(note: str, wanted: Sequence[str]) -> bool:
    return any(words in note for words in wanted)


def main(arguments: Sequence[str]) -> int:
    """Replay, print, and write the page if it is asked for."""
    options = parse(arguments)
    slugs = options.slugs or SLUGS
    releases = options.releases or runner.due(slugs)
    with tempfile.TemporaryDirectory(prefix="gradtrace-replay-") as scratch:
        directory = (options.install or Path(scratch) / "releases").resolve()
        ran = replay(slugs, releases, directory, Path(scratch) / "traces", options.jobs)
        table = list(rows(slugs, ran))
    head = ("slug", "run", "release", "expected", "found")
    lines = [head, *(tuple(str(row[name]) for name in head) for row in table)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    problems = {id(row): row["problems"] for row in table}
    for line, row in zip(lines, (None, *table), strict=True):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
        for problem in () if row is None else problems[id(row)]:
            print(f"    PROBLEM {problem}")
    if options.page is not None:
        path = page.RESULTS
        path.write_text(json.dumps(page.kept(table), indent=1) + "\n", encoding="utf-8")
        options.page.write_text(page.render(page.kept(table)), encoding="utf-8")
    return 1 if any(row["problems"] for row in table) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
