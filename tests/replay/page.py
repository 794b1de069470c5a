"""Write docs/replays.md from what was found: every cell, and every quoted line, comes from a run."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.real.releases.install import ROOT, pip_flags
from tests.replay import runner
from tests.replay.cases import CASES, SLUGS

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs/replays.md"


def kept(table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page is written from."""
    return {"torch": runner.torch_version(), "rows": list(table)}


def render(known: dict[str, Any]) -> str:
    """Return the page.

    Args:
        known: ``torch``: its release; ``rows``: what `tests.replay.__main__.rows` yields.
    """
    rows: list[dict[str, Any]] = known["rows"]
    wrong = [
        f"- {row['slug']} {row['run']} {row['release']}: {p}"
        for row in rows
        for p in row["problems"]
    ]
    parts = [
        "# Real bugs, replayed",
        "Generated from runs; do not edit:\n\n"
        "    python -m tests.replay --install DIR --page docs/replays.md",
        "Each case is a small training in `tests/replay/`, run on releases of DeepSpeed that have the "
        "bug and on releases that do not: CPU ranks over gloo, torch "
        f"{known['torch']}, releases installed with `{pip_flags()}`. `python -m tests.replay --install "
        "DIR SLUG` runs one. In every run the traced weights are bitwise the untraced ones, and what a "
        "step took off the weights was compared with the gradients of plain PyTorch in fp32, averaged by "
        "hand: on a bad release they differ as the bug says, on a right one they do not. An audit "
        "counts as found only if *all* its findings are the expected ones, with their steps, "
        "micro-steps, parameters and ranks. The table gives the first.",
        _table(
            ("case", "run", "release", "expected", "found"),
            (
                (f"`{row['slug']}`", row["run"], row["release"], row["expected"], row["found"])
                for row in rows
            ),
        ),
        *(["## Not as expected", "\n".join(wrong)] if wrong else []),
        *(part for slug in SLUGS for part in _case(slug, rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _case(slug: str, rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    mine = [row for row in rows if row["slug"] == slug]
    train = importlib.import_module(f"tests.replay.{slug}.train")
    text = " ".join((train.__doc__ or "").split())
    reference = CASES[slug].reference
    yield f"## {slug}"
    yield text if reference in text else f"{text} {reference}"
    said: dict[str, str] = {}
    for row in mine:
        lines = ([row["line"]] if row["line"] else []) + row["notes"]
        if lines:
            said.setdefault(row["run"], f"{row['release']}: {'; '.join(lines)}")
    for run, words in said.items():
        yield f"> {run}, {words}"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    table = [head, ["---"] * len(head), *map(list, lines)]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in table
    )
