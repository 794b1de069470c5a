"""Hand-made results that show every part of a report."""

from __future__ import annotations

from dataclasses import replace

from gradtrace.analysis.results import (
    LAWS,
    AuditResult,
    Blame,
    DiffResult,
    Divergence,
    Finding,
    Hop,
    LawCount,
)
from gradtrace.analysis.series import Envelope, EnvelopeStep, Growth

# What a stranger's trace may call a parameter: control characters, markup, a script, right-to-left.
NASTY = "a\x1b[31m\x9b2J\r\n[red]x[/red] <script>alert(1)</script>&'\"\u202e\u2028\ud800"


def laws(**broken: int) -> dict[str, LawCount]:
    return {
        name: LawCount(96, broken[name], 0, 1.7e9, {})
        if name in broken
        else LawCount(0, 0, 12, 0.0, {"local_accum is absent": 12})
        if name == "accumulate_local"
        else LawCount(96, 0, 0, 0.4, {})
        for name in LAWS
    }


def finding(law: str = "accumulate", param: str | None = "layers.0.weight") -> Finding:
    return Finding(
        law=law,
        cause="dropped_micro_steps",
        step=0,
        micro_step=1,
        rank=0,
        param=param,
        point="accumulated",
        index=7,
        expected=0.0123,
        found=float("nan"),
        max_abs=0.0311,
        rel_l2=0.71,
        bound=3.3e-9,
        detail="The coefficient of accumulated[0] is 0 where 1 is nominal.",
        folded=("layers.0.bias",),
    )


def failed(param: str = "layers.0.weight") -> AuditResult:
    first = finding(param=param)
    rest = finding("end_to_end", param)
    counts = laws(accumulate=36, end_to_end=12)
    path = (
        Hop("accumulate_local", 0, 0, 4, "local_accum is absent"),
        Hop("reduce", 4, 0, 0, None),
        Hop("accumulate", 4, 3, 0, None),
        Hop("end_to_end", 1, 1, 0, None),
    )
    notes = ("rank 1: a note",)
    return AuditResult("fail", first, (first, rest), counts, notes, path=path)


def passed() -> AuditResult:
    return AuditResult("pass", None, (), laws(), ())


def diverged(param: str = "layers.0.weight") -> DiffResult:
    return DiffResult(
        verdict="diverged",
        first=Divergence(
            0, 1, True, "accumulated", param, None, 7, 0.00456, 0.0123, 0.0311, 0.71, 3.3e-9
        ),
        blame=Blame(
            "baseline", "accumulate", "dropped_micro_steps", 0, 1, None, param, f"It lost {param}."
        ),
        counts={"compared": 120, "equal": 40, "rounding": 20, "diverged": 60, "left_out": 12},
        notes=(f"left out: {param}",),
        growth=(
            Growth(0, 0.7, 0.02, 0.0, 2.5, 2.5, "equal", 0.0),
            Growth(1, float("inf"), float("inf"), 1e-6, 2.0, 2.25, "differ", judged=False),
            Growth(2, None, None, 1e-3, judged=False),
        ),
        baseline_audit=failed(param),
        candidate_audit=passed(),
    )


def with_envelope(outside: bool) -> DiffResult:
    steps = tuple(EnvelopeStep(step, 2e-7, 1e-7, 2.0, inside=True) for step in range(40))
    if outside:
        late = tuple(EnvelopeStep(step, 0.7, 1e-7, 7e6, inside=False) for step in range(21, 40))
        steps = (*steps[:21], *late)
    return replace(
        verdict_only("rounding"),
        envelope=Envelope(
            (0, 3), 4.0, 1 / 3, 1 / 3, 21 if outside else None, steps, "What follows from it."
        ),
    )


def verdict_only(verdict: str, *notes: str) -> DiffResult:
    return DiffResult(verdict, None, None, {"compared": 3}, notes)  # type: ignore[arg-type]
