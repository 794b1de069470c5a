"""Compare pairs of configurations that owe each other equal gradients."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gradtrace
from tests.real.catalog.entry import Entry
from tests.real.measure import Measured
from tests.real.training import Setup

WORKERS: Final = 2
MUST: Final = ("agree", "rounding")


@dataclass(frozen=True)
class Compared:
    """Hold what `diff` said of one pair."""

    verdict: str
    compared: int
    detail: str

    @property
    def good(self) -> bool:
        return self.verdict in MUST and self.compared > 0


def pairs(entries: Sequence[Entry], most: int | None) -> list[tuple[Entry, Entry]]:
    """Return pairs of distinct clean configurations with the same problem.

    Left out are pairs that cut the batch differently where one divides its losses itself: that
    division is nowhere in a trace. At most ``most`` of the others: neighbours in their group first,
    then those two apart, and so on, so that every configuration takes part as often as the others.
    """
    clean = [entry for entry in entries if entry.refused is None and entry.finding is None]
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in clean:
        groups.setdefault(entry.problem, []).append(entry)
    found = [
        (min(j - i, len(group) - (j - i)), group[i], group[j])
        for group in groups.values()
        for i, j in itertools.combinations(range(len(group)), 2)
        if _comparable(group[i].setup, group[j].setup)
    ]
    found.sort(key=lambda pair: pair[0])
    return [(one, other) for _, one, other in found[:most]]


def _comparable(one: Setup, other: Setup) -> bool:
    cuts = {(setup.ranks, setup.micro_steps) for setup in (one, other)}
    return len(cuts) == 1 or one.mode == other.mode == "managed"


def compare(
    measured: Callable[[Entry], Measured], chosen: Sequence[tuple[Entry, Entry]]
) -> list[Compared]:
    """Compare each pair's traces, several at a time."""
    paths = [(measured(one).path, measured(other).path) for one, other in chosen]
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_compare, paths, chunksize=8))


def _compare(paths: tuple[Path, Path]) -> Compared:
    result = gradtrace.diff(*paths)
    return Compared(result.verdict, result.counts["compared"], f"{result.first} {result.notes}")
