"""Law `replicate`: what must be the same on every rank is.

Backward passes in the step, boundary claims of each micro-step, the overflow flag, and the
collectives: their order, the parameters in them, their dtype and their members. Equal sizes make a
mismatch silent in the run: the ranks add up different parameters. Where every rank holds everything
(stage 0), also what the optimizers are given, bit by bit: no other step would bring the weights together.
`replicate_values` compares weights, learning rates, loss scale and clip value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import exact
from gradtrace.analysis.laws.common import Place, Scene, simple_finding
from gradtrace.analysis.laws.common import check as judge
from gradtrace.analysis.results import Finding
from gradtrace.trace.dtypes import Float64
from gradtrace.trace.records import Record
from gradtrace.trace.spans import PADDING, Layout, Span

LAW = "replicate"
_Collective = tuple[str, str, str, Layout]


def check(scene: Scene) -> None:
    """Compare all ranks of a step."""
    if len(scene.ranks) < 2:
        return
    _counts(scene)
    _flags(scene)
    if len(_counted(scene)) > 1:
        return  # collectives of one micro_step need not be the same one then
    for micro_step in scene.micro_steps:
        _collectives(scene, micro_step)


def check_param(scene: Scene, param: int) -> None:
    """Compare what the ranks' optimizers are given for one parameter, where all should be the same."""
    for point in ("master_grad", "clipped_grad"):
        groups = {
            scene.alignment.header(rank).dp_ranks for rank in scene.ranks if scene.replicated(rank)
        }
        alike = [_compare(scene, group, point, param) for group in sorted(groups)]
        if not all(alike):
            return  # what differs before unscaling differs after it


def _compare(scene: Scene, group: tuple[int, ...], point: str, param: int) -> bool:
    copies: dict[int, tuple[Event, Float64]] = {}
    for rank in group:
        if rank not in scene.ranks:
            continue
        lack = scene.lack(point, None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        events = scene.alignment.events(scene.step, None, point, rank, param)
        if events:
            copies[rank] = events[-1], scene.alignment.assemble(events[-1:], param).values
    if len(copies) < 2:
        return True
    like = {rank: values.tobytes() for rank, (_, values) in copies.items()}
    usual = Counter(like.values()).most_common(1)[0][0]
    model = next(rank for rank in copies if like[rank] == usual)
    odd = odd_one(like)
    before = len(scene.ledger.found)
    for rank, (event, values) in copies.items():
        if rank == model:
            continue
        expected = copies[model][1]
        if np.array_equal(values, expected, equal_nan=True):
            scene.ledger.passed(LAW)
            continue
        place = Place(LAW, scene.step, None, odd, param, point)
        context = scene.context(place, event.dtype, event.dtype)
        judge(scene, place, values, exact(expected), context=context, hypotheses=lambda: iter(()))
    return len(scene.ledger.found) == before


def _counted(scene: Scene) -> set[int]:
    """Return the numbers of backward passes that the ranks ran."""
    return {scene.alignment.step_end(scene.step, rank).micro_steps for rank in scene.ranks}


def mismatched(scene: Scene) -> set[tuple[int, int]]:
    """Return the (micro_step, param) pairs whose buckets do not correspond across ranks."""
    bad: set[tuple[int, int]] = set()
    if len(_counted(scene)) > 1:
        return bad
    for micro_step in scene.micro_steps:
        for ranks in _groups(scene, micro_step):
            lists = {rank: _sequence(scene, micro_step, rank, ranks) for rank in ranks}
            if len(set(map(tuple, lists.values()))) > 1:
                bad.update((micro_step, param) for param in _affected(list(lists.values())))
    return bad


def _affected(lists: Sequence[Sequence[_Collective]]) -> set[int]:
    """Return the parameters of every collective that is not the same everywhere."""
    longest = max(map(len, lists))
    affected: set[int] = set()
    for at in range(longest):
        here = [entries[at] if at < len(entries) else None for entries in lists]
        if len(set(here)) > 1:
            affected.update(
                span.param for entry in here if entry for span in entry[3] if span.param != PADDING
            )
    return affected


def odd_one(values: Mapping[int, Hashable]) -> int | None:
    """Return the only rank that differs from all others, which must be more than one."""
    tally = Counter(values.values())
    if len(tally) != 2:
        return None
    (_, many), (rare, few) = tally.most_common()
    if few != 1 or many < 2:
        return None
    return next(rank for rank, value in values.items() if value == rare)


def is_overflow(finding: Finding) -> bool:
    """Say whether a finding is that the ranks do not agree on leaving the step out."""
    return finding.law == LAW and finding.param is None and finding.point == "master_grad"


def told(values: Mapping[int, object]) -> str:
    """Write a value for each rank."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in sorted(values.items())[:8])


def _counts(scene: Scene) -> None:
    ends = {rank: scene.alignment.step_end(scene.step, rank) for rank in scene.ranks}
    counted = {rank: end.micro_steps for rank, end in ends.items()}
    place = Place(LAW, scene.step, None, odd_one(counted), None, "loss")
    if len(set(counted.values())) > 1:
        detail = f"The ranks ran different numbers of backward passes: {told(counted)}."
        simple_finding(scene, place, "boundary_mismatch", detail)
    else:
        scene.ledger.passed(LAW)
    skipped = {rank: end.facts.get("overflow") for rank, end in ends.items()}
    place = Place(LAW, scene.step, None, odd_one(skipped), None, "master_grad")
    if len({str(value) for value in skipped.values()}) > 1:
        detail = f"The ranks do not agree that the step overflowed: {told(skipped)}."
        simple_finding(scene, place, "unknown", detail)
    else:
        scene.ledger.passed(LAW)


def _flags(scene: Scene) -> None:
    for micro_step in scene.micro_steps:
        records: dict[int, Record] = {}
        for rank in scene.ranks:
            lack = scene.lack("loss", micro_step, rank)
            if lack is not None:
                scene.ledger.lack(LAW, lack)
                break
            found = scene.alignment.records(scene.step, "loss", rank, micro_step)
            if found:
                records[rank] = found[-1]
        if len(records) < 2:
            continue
        for name, what in (
            ("boundary", "the engine claims a boundary"),
            ("optimizer_boundary", "the optimizer claims a boundary"),
        ):
            claims = {rank: record.facts.get(name) for rank, record in records.items()}
            if None in claims.values():
                continue
            if len({str(claim) for claim in claims.values()}) > 1:
                place = Place(LAW, scene.step, micro_step, odd_one(claims), None, "loss")
                detail = f"The ranks do not agree whether {what} here: {told(claims)}."
                simple_finding(scene, place, "boundary_mismatch", detail)
            else:
                scene.ledger.passed(LAW)


def _groups(scene: Scene, micro_step: int) -> list[tuple[int, ...]]:
    """Return the groups over which something was reduced, those of which two ranks are traced."""
    groups: dict[tuple[int, ...], None] = {}
    for rank in scene.ranks:
        for record in scene.alignment.records(scene.step, "bucket", rank, micro_step):
            ranks = tuple(record.facts.get("ranks") or ())
            groups[tuple(member for member in ranks if member in scene.ranks)] = None
    return [group for group in groups if len(group) > 1]


def _sequence(
    scene: Scene, micro_step: int, rank: int, ranks: tuple[int, ...]
) -> list[_Collective]:
    sequence: list[_Collective] = []
    for record in scene.alignment.records(scene.step, "bucket", rank, micro_step):
        members = tuple(record.facts.get("ranks") or ())
        if tuple(member for member in members if member in scene.ranks) == ranks:
            facts = record.facts
            layout = scene.alignment.trace.layout(record) if record.layout is not None else ()
            sequence.append(
                (record.unit, str(facts.get("comm_dtype")), str(facts.get("op")), layout)
            )
    return sequence


def _collectives(scene: Scene, micro_step: int) -> None:
    for ranks in _groups(scene, micro_step):
        for rank in ranks:
            lack = scene.lack("bucket", micro_step, rank)
            if lack is not None:
                scene.ledger.lack(LAW, lack)
                return
        lists = {rank: tuple(_sequence(scene, micro_step, rank, ranks)) for rank in ranks}
        if len(set(lists.values())) == 1:
            scene.ledger.passed(LAW)
            continue
        for param, detail in _mixed(scene, lists).items() or [_difference(scene, lists)]:
            place = Place(LAW, scene.step, micro_step, odd_one(lists), param, "bucket")
            simple_finding(scene, place, "order_mismatch", detail)


def _mixed(scene: Scene, lists: Mapping[int, tuple[_Collective, ...]]) -> dict[int, str]:
    """Return the parameters that another one is added to, each with the words for it."""
    lowest = min(lists)
    mixed: dict[int, str] = {}
    for rank in sorted(lists):
        for at, (left, right) in enumerate(zip(lists[lowest], lists[rank], strict=False)):
            for one, two in _overlaps(left[3], right[3]):
                if one.param == two.param or PADDING in {one.param, two.param}:
                    continue
                words = (
                    f"Collective {at} adds up {scene.name(one.param)} of rank {lowest} with "
                    f"{scene.name(two.param)} of rank {rank} at the same place of the buffer."
                )
                mixed.setdefault(one.param, words)
                mixed.setdefault(two.param, words)
    return mixed


def _overlaps(left: Layout, right: Layout) -> Iterator[tuple[Span, Span]]:
    """Yield the spans of two layouts of one buffer that share elements of it."""
    if left == right:
        return
    mine, theirs = (
        iter(sorted(spans, key=lambda span: span.flat_offset)) for spans in (left, right)
    )
    one, two = next(mine, None), next(theirs, None)
    while one is not None and two is not None:
        ends = one.flat_offset + one.numel, two.flat_offset + two.numel
        if max(one.flat_offset, two.flat_offset) < min(ends):
            yield one, two
        if ends[0] <= ends[1]:
            one = next(mine, None)
        if ends[1] <= ends[0]:
            two = next(theirs, None)


def _difference(
    scene: Scene, lists: Mapping[int, tuple[_Collective, ...]]
) -> tuple[int | None, str]:
    """Find the first collective that is not the same everywhere, where no parameters are mixed."""
    lowest = min(lists)
    other = next(rank for rank in sorted(lists) if lists[rank] != lists[lowest])
    mine, theirs = lists[lowest], lists[other]
    for at, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        if left == right:
            continue
        only = [span.param for span in (*left[3], *right[3]) if span.param != PADDING]
        return (only[0] if only else None), (
            f"Collective {at} differs: rank {lowest} has {_words(left)}, "
            f"rank {other} has {_words(right)}."
        )
    extra = (mine + theirs)[min(len(mine), len(theirs))] if mine and theirs else (mine + theirs)[0]
    params = [span.param for span in extra[3] if span.param != PADDING]
    return (params[0] if params else None), (
        f"Rank {lowest} took part in {len(mine)} collectives here, rank {other} in {len(theirs)}."
    )


def _words(entry: _Collective) -> str:
    unit, comm, op, layout = entry
    return f"{op} of {len(layout)} parameters in {comm} ({unit})"
