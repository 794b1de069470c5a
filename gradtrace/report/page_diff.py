"""Lay out the report of a diff."""

from __future__ import annotations

import math

from gradtrace.analysis.results import AuditResult, Blame, DiffResult, Divergence, Growth
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
    """Draw how far apart the runs are, step by step, on a logarithmic scale."""
    shown = growth if len(growth) <= _MOST_STEPS else _thinned(growth)
    blocks = []
    for name in ("local_grad", "master_grad"):
        series = [(entry.step, getattr(entry, name)) for entry in shown]
        known = [(step, value) for step, value in series if value is not None]
        if any(value > 0 or math.isnan(value) for _, value in known):
            caption = f"{name}: relative L2 distance of the runs, logarithmic"
            blocks.append(Bars(caption, tuple(_bar(step, value, known) for step, value in known)))
    return section("How it grows", *blocks)


def _thinned(growth: tuple[Growth, ...]) -> tuple[Growth, ...]:
    every = (len(growth) - 1) / (_MOST_STEPS - 1)
    return tuple(growth[round(index * every)] for index in range(_MOST_STEPS))


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
