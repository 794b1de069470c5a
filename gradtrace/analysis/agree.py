"""Let findings that are one fault speak with one voice, and keep those apart that are not.

A fault of one hop shows in many parameters. Large ones tell its cause; small ones fit many causes, or
none can be tested on them. What all say together names the cause of each, unless its own records
refute that: then it is another fault, and stays a finding of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from gradtrace.analysis.diagnose import SURE, TINY, Candidate, transfers
from gradtrace.analysis.laws.common import Found
from gradtrace.analysis.results import Finding

CLEARLY: Final = 1.2  # how much more support another cause must have
_ALIKE_ULPS: Final = 8  # how far two measured factors of one fault may be apart
_Support = dict[tuple[str, str | None], float]


def agreed(found: Sequence[Found]) -> list[Found]:
    """Let the findings of one hop agree on a cause, where several causes fit.

    A few elements fit many causes, some by chance; what all parameters of the hop say together tells
    which it is. A finding keeps its own cause unless one with more support fits it as well. One that
    nothing fits follows the others where they cannot be tested on it, or hold on it too.
    """
    hops: dict[tuple[object, ...], list[int]] = {}
    for at, entry in enumerate(found):
        finding = entry.finding
        hops.setdefault((finding.law, finding.step, finding.micro_step), []).append(at)
    result = list(found)
    for places in hops.values():
        here = [found[at] for at in places]
        support = _support(here)
        leaders = list(_leaders(here))
        common = _common(here)
        for at in places:
            result[at] = _agreeing(found[at], support, leaders, common)
    return result


def _common(found: Sequence[Found]) -> frozenset[str]:
    """Return the causes that explain every finding of a hop: one fault is likelier than several.

    On two ranks, what rank 0 has left when rank 1 is missing is as well a mean that never took place;
    what rank 1 has left is not, be it one element only.
    """
    large = [entry for entry in found if entry.numel >= TINY]
    shared = {(c.cause, c.rank): c for entry in large for c in entry.also}
    for entry in large:
        fits = {(c.cause, c.rank) for c in entry.also if c.score >= SURE}
        shared = {key: c for key, c in shared.items() if key in fits}
    for entry in found:
        if entry.numel < TINY:
            fits = {(c.cause, c.rank) for c in entry.also}
            left = {k: c for k, c in shared.items() if k in fits or transfers(c, entry.tested)}
            shared = left or shared
    return frozenset(cause for cause, _ in shared)


def _support(found: Sequence[Found]) -> _Support:
    """Add up how much speaks for each cause, and for each sentence; what was chosen counts twice."""
    support: _Support = {}
    for entry in found:
        best: dict[str, float] = {}
        for candidate in entry.also:
            key = (candidate.cause, candidate.detail)
            support[key] = support.get(key, 0.0) + candidate.score
            best[candidate.cause] = max(best.get(candidate.cause, 0.0), candidate.score)
        for cause, score in best.items():
            weight = 2 if cause == entry.finding.cause else 1
            support[cause, None] = support.get((cause, None), 0.0) + weight * score
    return support


def _leaders(found: Sequence[Found]) -> Iterator[Candidate]:
    """Yield what parameters that are not tiny were found to be, the surest first, each once."""
    chosen = [c for entry in found if entry.numel >= TINY and (c := _chosen(entry)) is not None]
    seen: set[tuple[str, str]] = set()
    for candidate in sorted(chosen, key=lambda c: -c.score):
        if (candidate.cause, candidate.detail) not in seen:
            seen.add((candidate.cause, candidate.detail))
            yield candidate


def _chosen(entry: Found) -> Candidate | None:
    """Return the candidate that a finding was named by."""
    fitting = [c for c in entry.also if c.cause == entry.finding.cause]
    mine = [c for c in fitting if entry.finding.detail.startswith(c.detail)]
    return next(iter(mine or fitting), None)


def _agreeing(
    entry: Found, support: _Support, leaders: Sequence[Candidate], common: frozenset[str]
) -> Found:
    finding, tiny = entry.finding, entry.numel < TINY
    fits = {candidate.cause: candidate for candidate in entry.also}
    if finding.cause == "unknown" or tiny:
        for leader in leaders:
            if leader.cause not in fits and transfers(leader, entry.tested):
                fits[leader.cause] = leader
    own = support.get((finding.cause, None), 0.0)
    better = [c for c in fits if support.get((c, None), 0.0) > max(CLEARLY * own, SURE)]
    if common and finding.cause not in common:
        better = [cause for cause in fits if cause in common]
    cause = max(better, key=lambda c: (support[c, None], c), default=finding.cause)
    fitting = [candidate for candidate in entry.also if candidate.cause == cause]
    if not fitting:
        if cause == finding.cause:
            return entry
        chosen = fits[cause]
        words = chosen.detail
        if chosen.factor is None:
            words = f"{finding.point} is too small here to tell alone."
        entry = replace(entry, also=(*entry.also, replace(chosen, score=0.0)))
    else:
        chosen = max(fitting, key=lambda c: support[c.cause, c.detail])
        words = chosen.detail
        mine = [c for c in fitting if finding.detail.startswith(c.detail)]
        if mine and support[cause, words] <= CLEARLY * support[cause, mine[0].detail]:
            return entry
    detail = f"{words} {entry.evidence}".rstrip()
    return replace(entry, finding=replace(finding, cause=cause, detail=detail, guilty=chosen.rank))


def said_too(entry: Found, words: str) -> Found:
    """Add a sentence to a finding's evidence, so that it stays whatever cause is agreed on."""
    evidence = f"{entry.evidence} {words}"
    finding = replace(entry.finding, detail=f"{entry.finding.detail} {words}")
    return replace(entry, finding=finding, evidence=evidence)


def across_ranks(found: Sequence[Found]) -> list[Found]:
    """Make one finding of those that several ranks (or stretches) show of one parameter."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for entry in found:
        finding = entry.finding
        hop = (finding.law, finding.step, finding.micro_step)
        groups.setdefault((*hop, finding.cause, entry.param, finding.point), []).append(entry)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[Found]) -> Found:
    def place(entry: Found) -> tuple[bool, int]:
        index = entry.finding.index
        return index is None, index or 0

    first = min(group, key=place)
    ranks = {entry.finding.rank for entry in group}
    largest = [e.finding.max_abs for e in group if e.finding.max_abs is not None]
    relative = [e.finding.rel_l2 for e in group if e.finding.rel_l2 is not None]
    finding = replace(
        first.finding,
        rank=first.finding.rank if len(ranks) == 1 else None,
        max_abs=max(largest, default=None),
        rel_l2=max(relative, default=None),
    )
    if len(ranks) > 1:
        known = {rank for rank in ranks if rank is not None}
        others = sorted(known - {first.finding.rank})
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        finding = replace(
            finding, detail=f"{finding.detail} On rank {first.finding.rank}; also on rank {shown}."
        )
    return replace(first, finding=finding)


def folded(found: Sequence[Found]) -> list[Finding]:
    """Fold findings that differ only in the parameter into the first of them.

    Two that name another factor, or another guilty rank, are two faults. Where a hop has findings of
    a known and of an unknown cause, the known ones come first.
    """
    groups: list[list[Found]] = []
    for entry in found:
        group = next((group for group in groups if _one_fault(group[0], entry)), None)
        if group is None:
            groups.append([entry])
        else:
            group.append(entry)
    hops = {_hop(entry.finding): at for at, entry in reversed(list(enumerate(found)))}
    groups.sort(key=lambda g: (hops[_hop(g[0].finding)], g[0].finding.cause == "unknown"))
    findings: list[Finding] = []
    for group in groups:
        # The head is the first that shows the cause by itself; the tiny ones follow.
        head = next((entry for entry in group if _shows(entry)), group[0])
        names = dict.fromkeys(entry.finding.param for entry in group)
        others = [name for name in names if name not in (None, head.finding.param)]
        findings.append(replace(head.finding, folded=tuple(others)))
    return findings


def _hop(finding: Finding) -> tuple[object, ...]:
    return (finding.law, finding.step, finding.micro_step)


def _one_fault(one: Found, two: Found) -> bool:
    if (_hop(one.finding), one.finding.cause) != (_hop(two.finding), two.finding.cause):
        return False
    ours, theirs = _chosen(one), _chosen(two)
    if ours is None or theirs is None:
        return True
    if ours.rank is not None and theirs.rank is not None and ours.rank != theirs.rank:
        return False
    if ours.factor is None or theirs.factor is None or one.tested is None:
        return True
    unit = one.tested.context.dtype.unit_roundoff
    return abs(ours.factor / theirs.factor - 1) <= _ALIKE_ULPS * unit + 1e-5


def _shows(entry: Found) -> bool:
    return any(c.cause == entry.finding.cause and c.score > 0 for c in entry.also)
