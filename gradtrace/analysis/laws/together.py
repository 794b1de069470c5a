"""Law `reduce`, once more: the coefficients of a whole collective, its small stretches as one tensor.

A rank that is missing from a collective is missing from all its parameters, on every rank that holds
a part. A stretch of few elements shows nothing alone; together they do. It is the very test that one
tensor gets: every element is weighted by its own bound, and the ranks' nominal coefficients are the
same, 1, in all of them. So it raises no alarm where that one would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, judge
from gradtrace.analysis.fit import FEWEST_ROWS, MOST_ROWS, fit
from gradtrace.analysis.hypotheses import Design, Hypothesis
from gradtrace.analysis.laws.common import Lack, Place, Scene, check
from gradtrace.analysis.laws.reduce import LAW, Reduction, averages, expect, missing, target_point
from gradtrace.trace.dtypes import Float64

SMALL = 4096  # elements; more show a wrong coefficient by themselves

# What left a collective, which reduction of its parameter it was, and the stretch.
_Piece = tuple[Event, int, int, int]


def check_collectives(scene: Scene) -> None:
    """Fit the small stretches of every collective together, where nothing was found before."""
    told = {
        entry.finding.micro_step
        for entry in scene.ledger.found
        if entry.finding.step == scene.step
        and (entry.finding.law == LAW or entry.finding.cause == "order_mismatch")
    }
    for micro_step in scene.micro_steps:
        if micro_step not in told:
            for pieces in _collectives(scene, micro_step):
                _check(scene, micro_step, pieces)


def _collectives(scene: Scene, micro_step: int) -> Iterator[list[_Piece]]:
    """Yield the small stretches that left each collective on any of its ranks, each only once."""
    alignment = scene.alignment
    groups: dict[tuple[int, int], dict[tuple[int, int, int, int], _Piece]] = {}
    for rank in scene.ranks:
        point = target_point(scene, rank)
        for parameter in alignment.captured() if point is not None else ():
            place = (scene.step, micro_step)
            assert point is not None
            targets = alignment.events(*place, point, rank, parameter.index)
            buckets = alignment.events(*place, "bucket", rank, parameter.index)
            members = buckets[0].record.facts.get("ranks") if buckets else None
            if len(targets) != len(buckets) or not isinstance(members, list) or not members:
                continue
            first = alignment.events(*place, "bucket", members[0], parameter.index)
            if len(first) != len(buckets):
                continue
            for at, target in enumerate(targets):
                group = groups.setdefault((members[0], first[at].record.order), {})
                for span in target.spans:
                    start, stop = span.param_offset, span.param_offset + span.numel
                    if span.numel <= SMALL:
                        group.setdefault(
                            (parameter.index, at, start, stop), (target, at, start, stop)
                        )
    yield from (list(group.values()) for group in groups.values() if len(group) > 1)


def _check(scene: Scene, micro_step: int, pieces: Sequence[_Piece]) -> None:
    parts: list[tuple[Event, Float64, Reduction]] = []
    rows = 0
    for target, at, start, stop in pieces:
        rank = target.record.rank
        found = scene.alignment.cut(target, start, stop)
        part = expect(scene, rank, micro_step, target.param, at, target.dtype, start, stop)
        if found is None or isinstance(part, Lack) or len(part.terms) < 2:
            return  # the law itself has told
        if not judge(found, part.estimate).broken:
            parts.append((target, found, part))
            rows += len(found)
        if rows >= MOST_ROWS:
            break
    ways = {
        (part.dtype.name, part.factor, tuple(rank for rank, _ in part.terms))
        for _, _, part in parts
    }
    if rows < FEWEST_ROWS or len(ways) != 1:
        return
    whole = _joined([part for _, _, part in parts])
    found = np.concatenate([values for _, values, _ in parts])
    terms = tuple((f"rank {rank}", term.value) for rank, term in whole.terms)
    if not fit(found, terms, whole.estimate, whole.dtype, lost=whole.lost).off:
        return
    largest = max(parts, key=lambda entry: len(entry[1]))[0]
    ranks = {target.record.rank for target, _, _ in parts}
    holder = largest.record.rank if len(ranks) == 1 else None
    place = Place(LAW, scene.step, micro_step, holder, largest.param, largest.record.point)
    context = scene.context(place, whole.dtype, largest.dtype, lost=whole.lost)
    count = len({target.param for target, _, _ in parts})

    def hypotheses() -> Iterator[Hypothesis]:
        for one in (*averages(whole, context), *missing(found, whole)):
            words = f"{one.detail} {count} parameters of the collective show it together."
            yield replace(one, detail=words)

    check(
        scene,
        place,
        found,
        whole.estimate,
        context=context,
        designs=[Design("rank", terms)],
        hypotheses=hypotheses,
    )


def _joined(parts: Sequence[Reduction]) -> Reduction:
    first = parts[0]
    terms = [
        (rank, _concatenated([part.terms[at][1] for part in parts]))
        for at, (rank, _) in enumerate(first.terms)
    ]
    return replace(
        first,
        estimate=_concatenated([part.estimate for part in parts]),
        terms=tuple(terms),
        own=_concatenated([part.own for part in parts]),
        lost=max(part.lost for part in parts),
    )


def _concatenated(estimates: Sequence[Estimate]) -> Estimate:
    return Estimate(
        np.concatenate([entry.value for entry in estimates]),
        np.concatenate([entry.error for entry in estimates]),
        np.concatenate([entry.overflow for entry in estimates]),
    )
