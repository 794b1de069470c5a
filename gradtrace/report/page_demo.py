"""Lay out what the demo found, for somebody who meets gradtrace for the first time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gradtrace.analysis.results import AuditResult, DiffResult
from gradtrace.report import words
from gradtrace.report.page import (
    Cell,
    Column,
    Commands,
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
from gradtrace.report.page_audit import bound_text

DEMO_FORMAT: Final = "gradtrace.demo"
DEMO_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class DemoFacts:
    """Say what the demo ran.

    Attributes:
        deepspeed: the installed release.
        planted: whether the fault had to be planted.
        micro_steps: backward passes a step.
        losses: ``zero2``, ``zero3`` -> mean loss of each step on rank 0.
    """

    deepspeed: str
    planted: bool
    micro_steps: int
    losses: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Hold all that the demo shows; the baseline ran under ZeRO-2, the candidate under ZeRO-3."""

    baseline: str
    candidate: str
    facts: DemoFacts
    diff: DiffResult
    baseline_audit: AuditResult
    candidate_audit: AuditResult

    @property
    def convincing(self) -> bool:
        """Say whether it showed what it promises: a divergence, and one guilty side."""
        return self.diff.verdict == "diverged" and self.baseline_audit.verdict == "fail"

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``demo --json`` prints."""
        return {
            "format": DEMO_FORMAT,
            "version": DEMO_VERSION,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "facts": asdict(self.facts),
            "diff": self.diff.to_dict(),
            "audits": {
                "baseline": self.baseline_audit.to_dict(),
                "candidate": self.candidate_audit.to_dict(),
            },
        }


def demo_page(result: DemoResult) -> Page:
    """Lay out the demo's story: what was run, what was found, who did it, what to do."""
    return Page(
        title="demo",
        verdict=_verdict(result),
        tone="bad" if result.convincing else "warn",
        lead="",
        sections=sections(
            _what_was_run(result),
            _where(result),
            _who(result),
            _on_its_own(result),
            _what_it_means(result),
            _what_next(result),
        ),
    )


def _verdict(result: DemoResult) -> str:
    first = result.diff.first
    if not result.convincing or first is None:
        return f"The demo did not find what it promises: the diff says {result.diff.verdict}."
    where = words.place(first.step, first.micro_step)
    return f"DIVERGED at {where}, {words.thing(first.point, first.param)}: ZeRO-2 is wrong."


def _what_was_run(result: DemoResult) -> Section | None:
    ran = result.facts
    steps = max((len(losses) for losses in ran.losses.values()), default=0)
    rows = tuple(
        (Cell(str(step)), *(Cell(_loss(ran.losses, name, step)) for name in ("zero2", "zero3")))
        for step in range(steps)
    )
    return section(
        "What was run",
        Prose(
            f"One script trained a small model for {words.plural(steps, 'step')} on 2 CPU "
            "processes, twice, on the same data: under ZeRO-2 and under ZeRO-3 "
            f"(deepspeed {ran.deepspeed}). "
            f"Each step calls backward {ran.micro_steps} times and then the optimizer once, so the "
            f"gradients of {ran.micro_steps} micro-steps must add up. The stages only place memory "
            "differently: both runs must train alike. Their losses say that they do not:"
        ),
        Prose(
            f"deepspeed {ran.deepspeed} does not have this bug any more, so the demo planted the "
            "same fault into the ZeRO-2 run."
            if ran.planted
            else "",
            "warn",
        ),
        Table((Column("step", True), Column("loss, ZeRO-2", True), Column("ZeRO-3", True)), rows),
    )


def _loss(losses: Mapping[str, Sequence[float]], name: str, step: int) -> str:
    series = losses.get(name, ())
    return words.number(series[step]) if step < len(series) else "-"


def _where(result: DemoResult) -> Section | None:
    first = result.diff.first
    if first is None:
        return section("Where they part", Prose(f"Nowhere: {result.diff.verdict}."))
    return section(
        "Where they part (gradtrace diff)",
        facts(
            ("when", words.place(first.step, first.micro_step)),
            ("point", words.about(first.point)),
            ("parameter", first.param),
            ("element", None if first.index is None else str(first.index)),
            ("ZeRO-2", None if first.baseline is None else words.number(first.baseline)),
            ("ZeRO-3", None if first.candidate is None else words.number(first.candidate)),
            ("rounding", bound_text(first.bound)),
        ),
    )


def _who(result: DemoResult) -> Section | None:
    blame = result.diff.blame
    if blame is None:
        return None
    name = {"baseline": "ZeRO-2", "candidate": "ZeRO-3"}.get(blame.side, blame.side)
    law = "" if blame.law is None else f" It breaks the law {blame.law!r}."
    return section(
        "Who is wrong, and how",
        Prose(f"{name}: {words.cause(blame.cause)} ({blame.cause}).{law}", "bad"),
        Prose(blame.detail),
    )


def _on_its_own(result: DemoResult) -> Section | None:
    audits = (("ZeRO-2", result.baseline_audit), ("ZeRO-3", result.candidate_audit))
    rows = tuple(
        (Cell(name), _audit_verdict(audit), Cell(_broken(audit))) for name, audit in audits
    )
    columns = (Column("run"), Column("verdict"), Column("laws"))
    return section("Each run on its own (gradtrace audit)", Table(columns, rows))


def _audit_verdict(audit: AuditResult) -> Cell:
    tones: dict[str, Tone] = {"pass": "good", "fail": "bad"}
    return Cell(audit.verdict.upper(), tones.get(audit.verdict, "warn"))


def _broken(audit: AuditResult) -> str:
    broken = [name for name, count in audit.laws.items() if count.broken]
    checked = sum(count.checked for count in audit.laws.values())
    return f"{', '.join(broken) or 'none'} broken in {words.plural(checked, 'check')}"


def _what_it_means(result: DemoResult) -> Section | None:
    blame = result.diff.blame
    if blame is None or blame.cause != "dropped_micro_steps" or blame.side != "baseline":
        return None
    return section(
        "What it means",
        Prose(
            "Under ZeRO-2 the optimizer did not get the sum of the micro-steps: earlier ones were "
            "thrown away, without an error or a warning. The configuration says "
            "gradient_accumulation_steps: 1, so DeepSpeed takes each backward for the last one. "
            "Any of these avoids it:"
        ),
        Items(
            (
                Cell(
                    f"let DeepSpeed accumulate: gradient_accumulation_steps: "
                    f"{result.facts.micro_steps}, and engine.step() after each backward;"
                ),
                Cell("say where it ends: engine.set_gradient_accumulation_boundary(...);"),
                Cell('or set "managed_gradient_accumulation": false, where the release has it.'),
            )
        ),
    )


def _what_next(result: DemoResult) -> Section | None:
    baseline, candidate = shlex.quote(result.baseline), shlex.quote(result.candidate)
    first = result.diff.first
    commands = [
        (f"gradtrace diff {baseline} {candidate}", "the whole comparison"),
        (f"gradtrace audit {baseline}", "every law, on the wrong run alone"),
    ]
    if first is not None and first.param is not None:
        micro_step = "" if first.micro_step is None else f" --micro-step {first.micro_step}"
        commands.append(
            (
                f"gradtrace show {baseline} --step {first.step}{micro_step} "
                f"--point {first.point} --param {shlex.quote(first.param)}",
                "the wrong tensor",
            )
        )
    commands.append(
        (f"gradtrace diff {baseline} {candidate} --html report.html", "a page to send to somebody")
    )
    return section("Go on from here", Commands(tuple(commands)))
