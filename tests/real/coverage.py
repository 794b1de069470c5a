"""Write docs/coverage-table.md by running every configuration of the catalog.

python -m tests.real.coverage             writes the page
python -m tests.real.coverage --pairs     also compares every pair that must agree, and says how long
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gradtrace.analysis.results import LAWS
from gradtrace.testing.ranks import import_once
from tests.real import pairs
from tests.real.catalog import ENTRIES
from tests.real.catalog.entry import Entry
from tests.real.measure import Counts, Measured, Runs, each, points_of
from tests.real.training import Setup

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "coverage-table.md"
DEFAULT: Final = Setup(0)
_IN_THE_HEADING: Final = ("stage", "bf16", "fp16")
_DTYPES: Final = ("float32", "bfloat16", "float16")
_WORDS: Final = {
    ("mode", "by_hand"): "accumulation by hand under `gradient_accumulation_steps: 1`",
    ("mode", "set_boundary"): "`set_gradient_accumulation_boundary`",
    ("mode", "unmanaged"): "`managed_gradient_accumulation: false`",
    ("mode", "tensor_backward"): "`loss.backward()`, by hand",
    ("mode", "scale"): "`engine.scale(loss).backward()`, by hand",
    ("mode", "no_sync"): "`no_sync()`",
    ("mode", "coalesce"): "`coalesce_grad_reduction()`",
    ("model", "one"): "one element in all",
    ("model", "tied"): "tied, frozen and sometimes unused parameters",
    ("model", "reentrant"): "reentrant checkpointing",
    ("model", "checkpointed"): "checkpointing, not reentrant",
    ("groups", True): "two parameter groups",
    ("client", "adamw"): "client optimizer AdamW",
    ("client", "sgd"): "client optimizer SGD",
}


def page(measured: Sequence[Measured], release: str) -> str:
    """Return the page; the same runs give the same bytes."""
    traced = [m for m in measured if m.refusal is None]
    refused = [m for m in measured if m.refusal is not None]
    upstream = [m for m in traced if m.entry.finding is not None]
    parts = [
        "# What every configuration gives",
        "<!-- Written by `python -m tests.real.coverage`, which runs all of this. Do not edit. -->",
        f"DeepSpeed {release}, CPU ranks over gloo. {len(measured)} configurations: {len(traced)} "
        f"traced, of which {len(upstream)} meet a defect of DeepSpeed; {len(refused)} refused by name. "
        "Every traced one trained bitwise as it does untraced.",
        f"Where nothing else is said: {DEFAULT.micro_steps} micro-steps, {DEFAULT.ranks} ranks, "
        "DeepSpeed's own accumulation, AdamW of torch, a multilayer perceptron with sizes that the ranks "
        "do not divide.",
        "Records: how many at each point in one step of one rank; `4 / 8` where rank 0 has 4 and rank 1 "
        "has 8; `step 0: 4, step 1: 8` where the steps differ.",
    ]
    for heading in sorted({_heading(m) for m in measured}):
        rows = [m for m in measured if _heading(m) == heading]
        parts.append(f"## Stage {heading[0]}, {_DTYPES[heading[1]]}")
        parts.append("\n".join(_table(rows)))
    return "\n\n".join(parts) + "\n"


def _heading(row: Measured) -> tuple[int, int]:
    setup = row.entry.setup
    return setup.stage, _DTYPES.index(str(setup.dtype).removeprefix("torch."))


def _table(rows: Iterable[Measured]) -> Iterable[str]:
    yield "| settings | outcome | laws checked | records |"
    yield "|---|---|---|---|"
    yield from map(line, rows)


def line(row: Measured) -> str:
    """Return a configuration's line of the page."""
    cells = (settings(row.entry.setup), _outcome(row), _laws(row), records(row.counts))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def settings(setup: Setup) -> str:
    """Return what differs from the default, as a reader would write it."""
    words = []
    for field in dataclasses.fields(Setup):
        value = getattr(setup, field.name)
        if field.name in _IN_THE_HEADING or value == getattr(DEFAULT, field.name):
            continue
        if field.name == "zero":
            words += [f"`{key}: {_short(given)}`" for key, given in value.items()]
        elif field.name == "config":
            words += [f"`{key}: {_short(given)}`" for key, given in _flat(value)]
        else:
            plain = f"{field.name.replace('_', ' ')} {_short(value)}"
            words.append(
                plain if isinstance(value, tuple) else _WORDS.get((field.name, value), plain)
            )
    return ", ".join(words) or "default"


def _flat(config: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _outcome(row: Measured) -> str:
    if row.refusal is not None:
        expected = row.refusal.expected
        reason = expected.partition("; ")[2] or expected
        return f"refused: {row.refusal.found}: {reason}"
    assert row.audit is not None
    if row.audit.first is None:
        return f"traced, {row.audit.verdict}"
    first = row.audit.first
    return f"traced, `{first.law}` broken upstream (`{first.cause}`): {row.entry.reference}"


def _laws(row: Measured) -> str:
    if row.audit is None:
        return ""
    return ", ".join(law for law in LAWS if row.audit.laws[law].checked)


def records(counts: Counts) -> str:
    """Write the records of one step, point by point."""
    words = []
    for point in points_of(counts):
        by_step = {step: _ranks(point, ranks) for step, ranks in counts.items()}
        told = each(by_step.values())
        if len(told) == 1:
            words.append(f"{point} {told[0]}")
        else:
            steps = ", ".join(f"step {step}: {value}" for step, value in by_step.items())
            words.append(f"{point} ({steps})")
    return ", ".join(words)


def _ranks(point: str, ranks: Mapping[int, Counter[str]]) -> str:
    numbers = [str(found[point]) for found in ranks.values()]
    return numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers)


def main() -> None:
    """Run everything; write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", action="store_true")
    chosen = parser.parse_args()
    import_once()
    import deepspeed

    with tempfile.TemporaryDirectory(prefix="gradtrace-coverage-") as directory:
        runs = Runs(Path(directory))
        measured = []
        for number, entry in enumerate(ENTRIES, 1):
            print(f"{number}/{len(ENTRIES)} {entry.name}", file=sys.stderr)
            measured.append(runs(entry))
        for row in measured:
            assert row.traced == row.untraced, f"tracing changed {row.entry.name}"
        PAGE.write_text(page(measured, deepspeed.__version__), encoding="utf-8")
        if chosen.pairs:
            _compare_pairs(runs, ENTRIES)


def _compare_pairs(runs: Runs, entries: Sequence[Entry]) -> None:
    all_pairs = pairs.pairs(entries, most=None)
    began = time.perf_counter()
    results = pairs.compare(runs, all_pairs)
    taken = time.perf_counter() - began
    for (one, other), result in zip(all_pairs, results, strict=True):
        if not result.good:
            print(f"{one.name} against {other.name}: {result}")
    good = sum(result.good for result in results)
    print(f"{good} of {len(results)} pairs agree as they must ({taken:.0f} s)")


if __name__ == "__main__":
    main()
