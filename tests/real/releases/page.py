"""Write docs/deepspeed-compat.md from what was observed: every cell comes from a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from packaging.version import Version

from tests.real.catalog import ENTRIES
from tests.real.catalog.defects import DEFECTS
from tests.real.releases import judge
from tests.real.releases.install import pip_flags
from tests.real.releases.observe import TRAINED, Observation

BY_NAME = {entry.name: entry for entry in ENTRIES}


def version(release: str) -> Version:
    """Return what releases are sorted by."""
    return Version(release)


def render(known: dict[str, Any]) -> str:
    """Return the page.

    Args:
        known: ``releases``: release -> what `tests.real.releases` observed; ``drift``: what moved from
            each release to the next.
    """
    releases = known["releases"]
    newest = max(releases, key=version)
    torch = sorted({found["packages"]["torch"] for found in releases.values()})
    parts = [
        "# Releases of DeepSpeed",
        "Generated from runs; do not edit:\n\n"
        "    python -m tests.real.releases --install DIR --results tests/real/releases/results.json "
        "--page docs/deepspeed-compat.md",
        "Every cell comes from running that release on CPU ranks over gloo with torch "
        f"{', '.join(torch)}, installed with `{pip_flags()}`. "
        "Adapters look at what a class has, never at a version number.",
        "## What binds",
        _table(
            ("release", *_families(releases)),
            ([release, *_bindings(found)] for release, found in releases.items()),
        ),
        "A probe in brackets is one that the release does not have and that is not needed there. "
        "`refused` names what DeepSpeed made instead of the optimizer that was asked for.",
        "## What was run",
        "Configurations of the catalog (`tests/real/catalog/`). *Equal*: losses, norms and final weights "
        "of the traced run are bitwise those of the untraced run. A known defect is *found* when audit's "
        "first finding is the one listed below.",
        _table(
            (
                "release",
                "configurations",
                "traced and equal",
                "audit passes",
                "known defect found",
                "refused by name",
                "seen in part",
                "DeepSpeed fails untraced",
                "not as expected",
            ),
            ([release, *_counts(release, found, newest)] for release, found in releases.items()),
        ),
        "*Seen in part*: up to 0.18.2, `loss.backward()` by the caller leaves out what the engine does "
        "around a backward pass. The trace says so (a gap, `engine_bypassed`), and the audit is "
        "inconclusive.",
        "Up to 0.19.7, stage 3 on a CPU does not repeat itself bit by bit, traced or not: a step may "
        "begin before all its weights were gathered (`_allgather_params_coalesced` waits for the last of "
        "several independent handles; 0.19.8 waits for all). For these runs, traced and untraced alike, "
        "every gather is waited for.",
        *_section("Defects of DeepSpeed that were found", _defects(releases, newest)),
        *_section("What DeepSpeed itself does not train there", _failures(releases)),
        *_section("Runs that do not repeat", _unrepeated(releases)),
        *_section("Not as expected", _problems(releases, newest)),
        "## What moved",
        "Methods and attributes that the adapters declare, from each release to the next: whether they "
        "are there, with the same signature and the same body (syntax trees, without docstrings).",
        _table(("from", "to", "what moved"), map(_moved, known["drift"])),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _families(releases: dict[str, Any]) -> list[str]:
    names = (binding["family"] for found in releases.values() for binding in found["bindings"])
    return list(dict.fromkeys(names))


def _bindings(found: dict[str, Any]) -> Iterable[str]:
    for binding in found["bindings"]:
        if binding["error"]:
            yield re.sub(r"^unsupported_engine: ", "refused: ", binding["error"])
        else:
            lacking = "".join(f" ({name.split(': ')[1]})" for name in binding["missing"])
            yield f"{len(binding['bound'])} probes{lacking}"


def _observations(found: dict[str, Any]) -> list[Observation]:
    return [Observation(**raw) for raw in found["observations"]]


def _counts(release: str, found: dict[str, Any], newest: str) -> list[str]:
    counts: Counter[str] = Counter()
    seen = _observations(found)
    for one in seen:
        counts["untraced"] += one.untraced != TRAINED
        counts["refused"] += one.refused is not None
        counts["equal"] += bool(one.bitwise)
        counts["pass"] += one.verdict == "pass"
        counts["part"] += judge.bypassed(one)
        wrong = judge.problem(BY_NAME[one.entry], one, release, newest)
        counts["wrong"] += wrong is not None
        counts["defect"] += one.law is not None and wrong is None
    order = ("equal", "pass", "defect", "refused", "part", "untraced", "wrong")
    return [str(len(seen)), *(str(counts[name]) for name in order)]


def _defects(releases: dict[str, Any], newest: str) -> str:
    found: dict[str, list[str]] = {}
    right: dict[str, list[str]] = {}
    for release, observed in releases.items():
        for seen in _observations(observed):
            entry = BY_NAME[seen.entry]
            for defect in DEFECTS:
                if not defect.applies(entry.setup) or seen.verdict is None:
                    continue
                hit = judge.defect_of(entry, release) is defect
                if hit and judge.problem(entry, seen, release, newest) is None:
                    found.setdefault(defect.slug, []).append(release)
                elif seen.verdict == "pass":
                    right.setdefault(defect.slug, []).append(release)
    rows = []
    for defect in DEFECTS:
        if defect.slug in found:
            reference = defect.reference
            shown = f"[{reference.rsplit('/', 1)[1]}]({reference})" if "://" in reference else ""
            rows.append(
                (
                    f"`{defect.slug}`",
                    f"`{defect.law}`, `{defect.cause}`",
                    _span(found[defect.slug]),
                    _span(right.get(defect.slug, [])),
                    shown or reference,
                )
            )
    head = ("defect", "first finding", "found in", "a pass in", "reference")
    return _table(head, rows) if rows else ""


def _span(releases: list[str]) -> str:
    return ", ".join(sorted(set(releases), key=version)) or "none that ran"


def _failures(releases: dict[str, Any]) -> str:
    rows = []
    for release, observed in releases.items():
        counts = Counter(s.untraced for s in _observations(observed) if s.untraced != TRAINED)
        rows += [(release, str(count), f"`{what}`") for what, count in counts.items()]
    return (
        _table(("release", "configurations", "how it fails without gradtrace"), rows)
        if rows
        else ""
    )


def _unrepeated(releases: dict[str, Any]) -> str:
    rows = [
        (release, f"`{seen.entry}`", "yes" if seen.bitwise else "no")
        for release, observed in releases.items()
        for seen in _observations(observed)
        if seen.repeats is False
    ]
    head = ("release", "configuration", "what repeats untraced is equal traced")
    return _table(head, rows) if rows else ""


def _problems(releases: dict[str, Any], newest: str) -> str:
    rows = []
    for release, observed in releases.items():
        for seen in _observations(observed):
            wrong = judge.problem(BY_NAME[seen.entry], seen, release, newest)
            if wrong is not None:
                rows.append((release, f"`{seen.entry}`", wrong))
    return _table(("release", "configuration", "what"), rows) if rows else ""


def _moved(pair: dict[str, Any]) -> list[str]:
    changes = [
        f"`{change['owner']}.{_short(change['name'])}`: {_said(change['change'])}"
        for change in pair["changes"]
    ]
    return [pair["before"], pair["after"], "; ".join(changes) or "nothing"]


def _short(name: str) -> str:
    return re.sub(r"^_[A-Z]\w*?(?=__[a-z])", "", name)


def _said(change: str) -> str:
    return re.sub(r"(\(.*?\)) to (\(.*\))", r"`\1` to `\2`", change)
