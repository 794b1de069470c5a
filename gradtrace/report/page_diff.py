"""Lay out the report of a diff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from gradtrace.analysis.results import AuditResult, Blame, DiffResult, Divergence
from gradtrace.analysis.series import Envelope, Growth
from gradtrace.report import words
from gradtrace.report.page import (
    Bar,
    Bars,
    Cell,
    Column,
    Page,
    Prose,
    Section,
    Table,
    Tone,
    facts,
    section,
    sections,
)
from gradtrace.report.page_audit import bound_text, error_text, notes
from gradtrace.report.page_reported import pairs_section

_MOST_STEPS = 20
_Entry = TypeVar("_Entry")


def diff_page(result: DiffResult, baseline: str, candidate: str) -> Page:
    """Lay out a diff.

    Args:
        result: what the diff found.
        baseline: the first trace, as the user named it.
        candidate: the second.
    """
    verdict, tone = _verdict(result)
    return Page(
        title=f"diff {baseline} {candidate}",
        verdict=verdict,
        tone=tone,
        lead=f"baseline {baseline}, candidate {candidate}",
        sections=sections(
            None if result.first is None else _first(result.first),
            None if result.blame is None else _blame(result.blame),
            _hops(result),
            _envelope(result.envelope),
            _growth(result.growth),
            _counts(result),
            pairs_section(result.reported),
            notes(result.notes),
        ),
    )


def _verdict(result: DiffResult) -> tuple[str, Tone]:
    first, blame = result.first, result.blame
    if result.verdict in ("agree", "rounding"):
        told = {
            "agree": "AGREE: everything compared is bitwise equal",
            "rounding": "ROUNDING: the runs differ by no more than rounding explains",
        }[result.verdict]
        if blame is None:
            return told, "good"
        who = "both runs break" if blame.side == "both" else f"the {blame.side} breaks"
        return f"{told}, but {who} the law '{blame.law}'", "warn"
    if result.verdict == "diverged" and first is not None:
        where = words.place(first.step, first.micro_step)
        wrong = ""
        if blame is not None and blame.side != "neither":
            wrong = ": both are wrong" if blame.side == "both" else f": {blame.side} is wrong"
        return f"DIVERGED at {where}, {words.thing(first.point, first.param)}{wrong}", "bad"
    reason = result.notes[0] if result.notes else "see the counts"
    head = {"not_comparable": "NOT COMPARABLE", "inconclusive": "INCONCLUSIVE"}
    return f"{head.get(result.verdict, result.verdict.upper())}: {reason}", "warn"


def _first(first: Divergence) -> Section | None:
    claims = {None: "", True: ", where the accumulation is said to end", False: ""}
    return section(
        "First difference",
        facts(
            ("when", words.place(first.step, first.micro_step) + claims[first.boundary]),
            ("point", words.about(first.point)),
            ("parameter", first.param),
            ("element", None if first.index is None else str(first.index)),
            ("rank", None if first.rank is None else str(first.rank)),
            ("baseline", None if first.baseline is None else words.number(first.baseline)),
            ("candidate", None if first.candidate is None else words.number(first.candidate)),
            ("difference", error_text(first.max_abs, first.rel_l2)),
            ("rounding", bound_text(first.bound)),
        ),
    )


def _blame(blame: Blame) -> Section | None:
    return section(
        "Blame",
        Prose(_accusation(blame), "warn" if blame.side == "neither" else "bad"),
        Prose(blame.detail),
        facts(
            ("side", blame.side),
            ("law", _law(blame.law)),
            ("cause", blame.cause),
            ("when", None if blame.step is None else words.place(blame.step, blame.micro_step)),
            ("rank", None if blame.rank is None else str(blame.rank)),
            ("parameter", blame.param),
        ),
    )


def _accusation(blame: Blame) -> str:
    cause = words.cause(blame.cause)
    if blame.side == "neither":
        return f"Neither run is to blame for this difference: {cause}."
    if blame.side == "both":
        return f"Both runs are wrong: {cause}."
    return f"The {blame.side} is wrong: {cause}."


def _law(law: str | None) -> str | None:
    return None if law is None else f"{law}: {words.LAW_WORDS.get(law, '')}".rstrip(": ")


def _hops(result: DiffResult) -> Section | None:
    """Draw the causal chain: each hop of each run, holding or broken."""
    sides = (result.baseline_audit, result.candidate_audit)
    if all(side is None for side in sides):
        return None
    rows = []
    for law, point in words.LAW_POINTS.items():
        cells = tuple(_mark(side, law) for side in sides)
        if all(cell.text == "-" for cell in cells):
            continue
        here = result.first is not None and result.first.point == point and law != "end_to_end"
        name = Cell(f"{point} <- the runs part here", "warn") if here else Cell(point)
        rows.append((Cell(law), name, *cells))
    columns = (Column("hop (law)"), Column("leads to"), Column("baseline"), Column("candidate"))
    until = "" if result.first is None else f" up to step {result.first.step}"
    heading = f"Hop by hop{until}, each checked against its own inputs"
    return section(heading, Table(columns, tuple(rows)))


def _mark(audit: AuditResult | None, law: str) -> Cell:
    count = None if audit is None else audit.laws.get(law)
    if count is None or (count.checked == 0 and count.broken == 0):
        return Cell("-", "dim")
    if count.broken:
        return Cell(f"BROKEN {count.broken} of {count.checked}", "bad")
    return Cell(f"holds ({count.checked})", "good")


def _growth(growth: tuple[Growth, ...]) -> Section | None:
    """Say and draw how far apart the runs are, step by step."""
    shown = _thinned(growth)
    bars = []
    for name, caption in (
        ("local_grad", "local_grad: relative L2 distance of the runs, logarithmic"),
        ("gradient", "averaged gradient: relative L2 distance of the runs, logarithmic"),
    ):
        series = [(entry.step, getattr(entry, name)) for entry in shown]
        known = [(step, value) for step, value in series if value is not None]
        if any(value > 0 or math.isnan(value) for _, value in known):
            bars.append(Bars(caption, tuple(_bar(step, value, known) for step, value in known)))
    if not bars and all(entry.weights != "differ" for entry in growth):
        return None
    return section("How it grows", _growth_table(shown), *bars, _left_out(growth, shown))


def _growth_table(shown: Sequence[Growth]) -> Table:
    columns = (
        Column("step", True),
        Column("gradient", True),
        Column("largest", True),
        Column("baseline loss", True),
        Column("candidate loss", True),
        Column("difference", True),
        Column("weights"),
    )
    rows = []
    for entry in shown:
        numbers = (
            words.brief(entry.gradient),
            words.brief(entry.gradient_max_abs),
            words.number(entry.baseline_loss),
            words.number(entry.candidate_loss),
            words.brief(entry.loss_difference),
        )
        weights = entry.weights if entry.weights != "unknown" else "-"
        if entry.weights_l2 is not None and entry.weights != "equal":
            weights = words.brief(entry.weights_l2)
        tone: Tone = "plain" if entry.judged else "dim"
        cells = (str(entry.step), *numbers, weights)
        rows.append(tuple(Cell(text, tone) for text in cells))
    return Table(columns, tuple(rows))


def _left_out(growth: Sequence[object], shown: Sequence[object]) -> Prose | None:
    if len(shown) == len(growth):
        return None
    return Prose(f"{len(shown)} of {len(growth)} steps are shown; --json has all.", "dim")


def _thinned(entries: Sequence[_Entry]) -> tuple[_Entry, ...]:
    if len(entries) <= _MOST_STEPS:
        return tuple(entries)
    every = (len(entries) - 1) / (_MOST_STEPS - 1)
    return tuple(entries[round(index * every)] for index in range(_MOST_STEPS))


def _envelope(envelope: Envelope | None) -> Section | None:
    """Hold the candidate against the baseline's own sensitivity, step by step."""
    if envelope is None:
        return None
    columns = (
        Column("step", True),
        Column("candidate", True),
        Column("farthest sample", True),
        Column("ratio", True),
        Column("envelope"),
    )
    shown = list(_thinned(envelope.steps))
    first = next((e for e in envelope.steps if e.step == envelope.first_outside), None)
    if first is not None and first not in shown:
        shown = sorted([*shown, first], key=lambda entry: entry.step)
    rows = tuple(
        (
            Cell(str(entry.step)),
            Cell(words.brief(entry.candidate)),
            Cell(words.brief(entry.largest)),
            Cell(words.brief(entry.ratio)),
            Cell("inside", "good") if entry.inside else Cell("outside", "warn"),
        )
        for entry in shown
    )
    count = len(envelope.samples)
    runs = "1 perturbed run" if count == 1 else f"{count} perturbed runs"
    return section(
        "Noise envelope",
        Prose(envelope.reading, "plain" if envelope.first_outside is None else "warn"),
        Prose(
            f"{runs} (sample {', '.join(map(str, envelope.samples))}). Were the candidate one of their "
            f"kind, it would be the farthest at a given step with a chance of {envelope.chance:.2g}; "
            f"by its worst step it ranks at p = {envelope.p_value:.2g}.",
            "dim",
        ),
        Table(columns, rows),
        _left_out(envelope.steps, shown),
    )


def _bar(step: int, value: float, known: list[tuple[int, float]]) -> Bar:
    label = f"step {step}"
    if not math.isfinite(value):
        return Bar(label, Cell(words.brief(value), "bad"), 1.0)
    if value <= 0.0:
        return Bar(label, Cell("equal", "dim"), 0.0)
    exponents = [math.log10(v) for _, v in known if v > 0.0 and math.isfinite(v)]
    lowest, highest = min(exponents), max(exponents)
    share = 1.0 if highest == lowest else (math.log10(value) - lowest) / (highest - lowest)
    return Bar(label, Cell(words.brief(value)), 0.05 + 0.95 * share)


def _counts(result: DiffResult) -> Section | None:
    meaning = {
        "compared": "compared",
        "equal": "bitwise equal",
        "rounding": "within rounding",
        "undecided": "too far apart for rounding, too close for a divergence",
        "diverged": "beyond rounding",
        "left_out": "left out",
    }
    rows = [(meaning.get(name, name), str(count)) for name, count in result.counts.items()]
    return section("Records of one parameter each", facts(*rows))
