"""Say of every run, and of every pair, what is not as the case says."""

from __future__ import annotations

import gradtrace
from gradtrace.analysis.results import AuditResult, DiffResult, Finding
from gradtrace.trace.reader import open_trace
from tests.replay.case import Compared, Run, Wanted
from tests.replay.runner import Ran

# Relative L2 of a right gradient: fp32 sums in another order, and weights that hold 8 bits under bf16.
RIGHT = {False: 1e-5, True: 0.1}
WRONG = {False: 1e-2, True: 0.15}


def audit_of(ran: Ran) -> AuditResult | None:
    """Audit a run's trace, if there is one."""
    return gradtrace.audit(ran.trace) if ran.trace.exists() else None


def problems(ran: Ran, result: AuditResult | None) -> list[str]:
    """Return what is not as it must be, a line each."""
    if ran.seen.error is not None or result is None:
        return [f"does not train untraced: {ran.seen.error}"]
    bad = ran.release in ran.run.bad
    found = [] if ran.seen.bitwise else ["tracing changed the training"]
    found += by_hand(ran, bad=bad)
    found += audited(ran, result, ran.run.wanted if bad else ())
    notes = " | ".join(result.notes)
    found += [f"no note says: {words}" for words in ran.run.notes if words not in notes]
    return found


def by_hand(ran: Ran, *, bad: bool) -> list[str]:
    """Check, without gradtrace, that the bug is there, or is not."""
    seen, run = ran.seen, ran.run
    half = _is_bf16(ran)
    found = []
    if not bad:
        worst = max(value for step in seen.from_right for value in step.values())
        if worst > RIGHT[half]:
            found.append(f"by hand: the applied gradient is {worst:.2g} from the right one")
    else:
        names = set(seen.from_right[0])
        off = names if run.off is None else set(run.off)
        for name in sorted(names):
            far = max(step[name] for step in seen.from_right)
            if name in off and far < WRONG[half]:
                found.append(f"by hand: {name} is trained right ({far:.2g})")
            if name not in off and far > RIGHT[half]:
                found.append(f"by hand: {name} is trained wrong ({far:.2g})")
        if run.applies is not None:
            worst = max(value for step in seen.from_bug for value in step.values())
            if worst > RIGHT[half]:
                found.append(
                    f"by hand: the applied gradient is {worst:.2g} from what the bug gives"
                )
    if run.told is not None:
        far = max(value for step in seen.told for value in step.values())
        if run.told != (far <= RIGHT[half]):
            found.append(f"what the loop was told is {far:.2g} from the right gradient")
    return found


def _is_bf16(ran: Ran) -> bool:
    return any(p.dtype == "bfloat16" for p in open_trace(ran.trace).manifest.parameters)


def audited(ran: Ran, result: AuditResult, wanted: tuple[Wanted, ...]) -> list[str]:
    """Compare all findings with those that must be there: all of them, and no other."""
    verdict = "fail" if wanted else "pass"
    if result.verdict != verdict:
        told = "; ".join(map(brief, result.findings[:3])) or "; ".join(result.notes[:3])
        return [f"audit says {result.verdict}, not {verdict}: {told}"]
    if not wanted:
        return []
    expected = {(w.law, w.cause, *at): w for w in wanted for at in w.at}
    found = {_key(finding): finding for finding in result.findings}
    lines = [f"not found: {key}" for key in expected if key not in found]
    lines += [f"found beside it: {brief(found[key])}" for key in found if key not in expected]
    if len(found) < len(result.findings):
        lines.append("one fault is listed in several findings")
    first = (wanted[0].law, wanted[0].cause, *wanted[0].at[0])
    if _key(result.findings[0]) != first:
        lines.append(f"the first finding is {brief(result.findings[0])}")
    trained = {p.name for p in open_trace(ran.trace).manifest.parameters if p.trainable}
    for one in wanted:
        heads = [found[key] for key in expected if expected[key] is one and key in found]
        if heads and one.says not in heads[0].detail:
            lines.append(f"{one.law} does not say: {one.says}; it says: {heads[0].detail}")
        names = trained if one.params is None else set(one.params)
        for finding in heads:
            told = {n for n in (finding.param, *finding.folded) if n is not None}
            if told != names:
                lines.append(f"{brief(finding)}: parameters {sorted(told)}, not {sorted(names)}")
            if finding.rank != one.rank:
                lines.append(f"{brief(finding)}: rank {finding.rank}, not {one.rank}")
    return lines


def _key(finding: Finding) -> tuple[str, str, int, int | None]:
    return finding.law, finding.cause, finding.step, finding.micro_step


def brief(finding: Finding) -> str:
    """Return a finding in a few words."""
    at = "" if finding.micro_step is None else f", micro-step {finding.micro_step}"
    return f"{finding.law} / {finding.cause} at step {finding.step}{at}"


def compare(baseline: Ran, candidate: Ran) -> DiffResult:
    """Compare two runs."""
    return gradtrace.diff(baseline.trace, candidate.trace)


def diff_words(verdict: str, point: str | None, cause: str | None) -> str:
    """Return what a diff says, in a few words."""
    return " / ".join(filter(None, (verdict, point, cause)))


def pair_problems(pair: Compared, result: DiffResult) -> list[str]:
    """Return what a diff does not say as it must, a line each."""
    lines = []
    if result.verdict != pair.verdict:
        lines.append(f"diff says {result.verdict}, not {pair.verdict}")
    first = result.first
    place = None if first is None else (first.point, first.step, first.micro_step)
    wanted = None if pair.point is None else (pair.point, pair.step, pair.micro_step)
    if place != wanted:
        lines.append(f"the runs part at {place}, not {wanted}")
    guilt = result.blame
    if pair.cause is None and guilt is not None:
        lines.append(f"{guilt.side} is blamed: {guilt.detail}")
    if pair.cause is not None:
        said = None if guilt is None else (guilt.side, guilt.law, guilt.cause)
        if said != ("neither", None, pair.cause):
            lines.append(f"blame says {said}, not {pair.cause} of neither")
        if guilt is not None and pair.says not in guilt.detail:
            lines.append(f"blame does not say: {pair.says}; it says: {guilt.detail}")
    notes = " | ".join(result.notes)
    lines += [f"no note says: {words}" for words in pair.notes if words not in notes]
    return lines


def wanted_words(run: Run, release: str) -> str:
    """Return what must be found, in a few words."""
    if release not in run.bad or not run.wanted:
        return "pass"
    one = run.wanted[0]
    step, micro_step = one.at[0]
    at = "" if micro_step is None else f", micro-step {micro_step}"
    return f"{one.law} / {one.cause} at step {step}{at}"


def found_words(ran: Ran, result: AuditResult | None) -> str:
    """Return what was found, in a few words."""
    if result is None:
        return f"does not train: {ran.seen.error}"
    return brief(result.first) if result.first is not None else result.verdict
