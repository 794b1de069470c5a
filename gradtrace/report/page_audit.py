"""Lay out the report of an audit."""

from __future__ import annotations

from collections import Counter

from gradtrace.analysis.results import AuditResult, Finding, LawCount
from gradtrace.report import words
from gradtrace.report.page import (
    Block,
    Cell,
    Column,
    Items,
    Page,
    Prose,
    Section,
    Table,
    Tone,
    facts,
    section,
    sections,
)
from gradtrace.report.page_reported import reported_section

_MOST_FINDINGS = 8


def audit_page(result: AuditResult, path: str) -> Page:
    """Lay out an audit.

    Args:
        result: what the audit found.
        path: the trace, as the user named it.
    """
    verdict, tone = _verdict(result)
    return Page(
        title=f"audit {path}",
        verdict=verdict,
        tone=tone,
        lead=f"Each hop of {path} recomputed from the hop before it.",
        sections=sections(
            None
            if result.first is None
            else section("First broken law", *finding_blocks(result.first)),
            _path(result),
            _others(result),
            section(
                "Laws",
                law_table(result),
                Prose("worst: largest error over its rounding bound; exact hops have 0.", "dim"),
            ),
            section("Skipped", _skipped(result)),
            reported_section(result.reported),
            notes(result.notes),
        ),
    )


def _verdict(result: AuditResult) -> tuple[str, Tone]:
    checked = sum(count.checked for count in result.laws.values())
    first = result.first
    if first is not None:
        head = "FAIL" if result.verdict == "fail" else "INCONCLUSIVE, but"
        where = words.thing(first.point, first.param)
        when = words.place(first.step, first.micro_step)
        return f"{head}: law {first.law} is broken at {when}, {where}", "bad"
    if result.verdict == "pass":
        return f"PASS: every law that could be checked holds ({checked} checks)", "good"
    return f"INCONCLUSIVE: {_why(result, checked)}", "warn"


def _why(result: AuditResult, checked: int) -> str:
    if result.notes:
        return result.notes[0]
    return "nothing could be checked" if checked == 0 else "a gap robbed a law of its inputs"


def finding_blocks(first: Finding) -> tuple[Block, ...]:
    """Lay out one finding: what it means, then the evidence."""
    return (
        Prose(f"{words.cause(first.cause)[:1].upper()}{words.cause(first.cause)[1:]}.", "bad"),
        Prose(first.detail),
        facts(
            ("law", f"{first.law}: {words.LAW_WORDS.get(first.law, '')}".rstrip(": ")),
            ("cause", first.cause),
            ("when", words.place(first.step, first.micro_step)),
            ("point", words.about(first.point)),
            ("rank", "several" if first.rank is None else str(first.rank)),
            ("parameter", first.param),
            ("element", None if first.index is None else str(first.index)),
            ("expected", None if first.expected is None else words.number(first.expected)),
            ("found", None if first.found is None else words.number(first.found)),
            ("error", error_text(first.max_abs, first.rel_l2)),
            ("rounding", bound_text(first.bound)),
            ("likewise", words.listing(first.folded, 4) or None),
        ),
    )


def error_text(max_abs: float | None, rel_l2: float | None) -> str | None:
    """Write how large an error is."""
    parts = []
    if max_abs is not None:
        parts.append(f"{words.brief(max_abs)} at most")
    if rel_l2 is not None:
        parts.append(f"{words.brief(rel_l2)} of the L2 norm")
    return ", ".join(parts) or None


def bound_text(bound: float | None) -> str | None:
    """Write what rounding can explain."""
    return None if bound is None else f"explains at most {words.brief(bound)} at that element"


def _path(result: AuditResult) -> Section | None:
    """Show the hops before and behind the broken one: what is intact, and what is not."""
    if result.first is None or not result.path:
        return None
    rows = []
    for hop in result.path:
        tone: Tone = "bad" if hop.broken else "good" if hop.checked else "dim"
        state = f"{hop.broken} of {hop.checked} broken" if hop.broken else f"holds ({hop.checked})"
        if hop.broken and hop.law == "end_to_end" != result.first.law:
            state += ": it contains the hop above"
        if not hop.checked:
            state = f"not checked: {hop.reason}"
        rows.append(
            (Cell(hop.law), Cell(words.LAW_WORDS.get(hop.law, ""), "dim"), Cell(state, tone))
        )
    columns = (Column("law"), Column("says"), Column("from its own inputs"))
    title = f"The path of {result.first.param} through step {result.first.step}"
    return section(title, Table(columns, tuple(rows)))


def _others(result: AuditResult) -> Section | None:
    """Fold the findings after the first into a line for each law and cause."""
    rest = [finding for finding in result.findings if finding is not result.first]
    if not rest:
        return None
    counts = Counter((finding.law, finding.cause) for finding in rest)
    rows = []
    for (law, cause), count in counts.items():
        alike = [f for f in rest if (f.law, f.cause) == (law, cause)]
        where = words.place(alike[0].step, alike[0].micro_step)
        rows.append(
            (Cell(law, "bad"), Cell(cause), Cell(str(count)), Cell(_thing(alike[0], where)))
        )
    columns = (Column("law"), Column("cause"), Column("findings", True), Column("first at"))
    return section("Further findings", Table(columns, tuple(rows[:_MOST_FINDINGS])))


def _thing(finding: Finding, where: str) -> str:
    rank = "" if finding.rank is None else f", rank {finding.rank}"
    return f"{where}{rank}, {words.thing(finding.point, finding.param)}"


def law_table(result: AuditResult) -> Table:
    """Lay out what was checked, law by law."""
    columns = (
        Column("law"),
        Column("says"),
        Column("checked", True),
        Column("broken", True),
        Column("skipped", True),
        Column("worst", True),
    )
    return Table(
        columns,
        tuple(
            (
                Cell(name, law_tone(count)),
                Cell(words.LAW_WORDS.get(name, ""), "dim"),
                Cell(str(count.checked)),
                Cell(str(count.broken), "bad" if count.broken else "dim"),
                Cell(str(count.skipped), "dim"),
                Cell(words.brief(count.worst_ratio) if count.checked else "-"),
            )
            for name, count in result.laws.items()
        ),
    )


def law_tone(count: LawCount) -> Tone:
    """Choose how a law strikes the eye."""
    if count.broken:
        return "bad"
    return "good" if count.checked else "dim"


def _skipped(result: AuditResult) -> Items:
    reasons: Counter[str] = Counter()
    laws: dict[str, list[str]] = {}
    for name, count in result.laws.items():
        for reason, number in count.skip_reasons.items():
            reasons[reason] += number
            laws.setdefault(reason, []).append(name)
    return Items(
        tuple(
            Cell(f"{', '.join(laws[reason])}: {reason} ({number})", "dim")
            for reason, number in reasons.most_common()
        )
    )


def notes(texts: tuple[str, ...]) -> Section | None:
    """Lay out what a reader should know."""
    return section("Notes", Items(tuple(Cell(text) for text in texts)))
