"""Law `partition`: a rank's shard is its own stretch of what was reduced, copied exactly.

And over the ranks of a data-parallel group the shards tile every trainable parameter exactly once;
where every rank holds everything (stage 0), those of each rank alone do.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import cast, exact
from gradtrace.analysis.hypotheses import Hypothesis
from gradtrace.analysis.laws.common import (
    Lack,
    Place,
    Scene,
    check,
    coarsest,
    largest_before,
    last_of_previous,
    simple_finding,
)
from gradtrace.trace.spans import coverage_fault

LAW = "partition"


def check_tiling(scene: Scene) -> None:
    """Check that the shards of each group tile every parameter; once a trace is enough."""
    alignment = scene.alignment
    groups = {
        (rank,) if scene.replicated(rank) else alignment.header(rank).dp_ranks
        for rank in scene.ranks
    }
    for group in sorted(groups):
        if not set(group) <= set(scene.ranks):
            scene.ledger.lack(LAW, Lack("skip", "ranks of the group are not in the trace"))
            continue
        if not any(alignment.header(rank).partitions for rank in group):
            scene.ledger.lack(LAW, Lack("skip", "the partitions were not recorded"))
            continue
        world_size = alignment.trace.manifest.world_size
        everyone = len(group) == world_size or scene.replicated(group[0])
        for parameter in alignment.parameters:
            spans = [span for rank in group for span in alignment.own_spans(rank, parameter.index)]
            if not parameter.trainable or parameter.group is None or not (spans or everyone):
                continue
            pieces = [(span.param_offset, span.numel) for span in spans]
            fault = coverage_fault(pieces, parameter.numel)
            if fault is None:
                scene.ledger.passed(LAW)
                continue
            cause = "partly_overwritten" if "twice" in fault else "unknown"
            rank = group[0] if len(group) == 1 < world_size else None
            place = Place(LAW, scene.step, None, rank, parameter.index, "partition")
            simple_finding(scene, place, cause, f"Over the ranks' shards, {fault}.")


def check_param(scene: Scene, param: int) -> None:
    """Check every shard of one parameter against what was reduced on the same rank."""
    for rank in scene.ranks:
        lack = scene.lack("partition", None, rank) or scene.lack("reduced", None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        for micro_step in scene.micro_steps:
            _check_micro_step(scene, rank, micro_step, param)


def _check_micro_step(scene: Scene, rank: int, micro_step: int, param: int) -> None:
    alignment = scene.alignment
    shards = alignment.events(scene.step, micro_step, "partition", rank, param)
    reduced = alignment.events(scene.step, micro_step, "reduced", rank, param)
    if reduced and not shards and alignment.own_spans(rank, param):
        scene.ledger.lack(LAW, Lack("gap", "partition has no record, and no gap says why"))
    for at, shard in enumerate(shards):
        source = largest_before(reduced, shard.record.order)
        if len(shards) == len(reduced):
            source = reduced[at]
        if source is None:
            scene.ledger.lack(LAW, Lack("gap", "reduced has no record, and no gap says why"))
            continue
        for span in shard.spans:
            _check_span(scene, shard, source, span.param_offset, span.param_offset + span.numel)


def _check_span(scene: Scene, shard: Event, source: Event, start: int, stop: int) -> None:
    alignment, record = scene.alignment, shard.record
    found = alignment.cut(shard, start, stop)
    values = alignment.cut(source, start, stop)
    assert found is not None
    if values is None:
        scene.ledger.lack(LAW, Lack("gap", "reduced holds other elements than partition"))
        return
    estimate = cast(exact(values), source.dtype, shard.dtype)
    place = Place(LAW, scene.step, record.micro_step, record.rank, shard.param, "partition", start)
    context = scene.context(place, coarsest(source.dtype, shard.dtype), shard.dtype)

    def hypotheses() -> Iterator[Hypothesis]:
        earlier = largest_before(
            alignment.step_events(scene.step, "partition", record.rank, shard.param), record.order
        )
        if earlier is None:
            earlier = last_of_previous(scene, shard)
        stale = None if earlier is None else alignment.cut(earlier, start, stop)
        if earlier is not None and stale is not None:
            when = earlier.record
            words = f"The shard is that of step {when.step}, micro-step {when.micro_step}."
            yield Hypothesis("stale", words, exact(stale))
        yield from _swapped(scene, shard, stop - start)

    check(scene, place, found, estimate, context=context, hypotheses=hypotheses)


def _swapped(scene: Scene, shard: Event, numel: int) -> Iterator[Hypothesis]:
    alignment, record = scene.alignment, shard.record
    for parameter in alignment.captured():
        if parameter.index == shard.param:
            continue
        for event in alignment.events(
            scene.step, record.micro_step, "reduced", record.rank, parameter.index
        )[:1]:
            for span in alignment.own_spans(record.rank, parameter.index):
                values = alignment.cut(event, span.param_offset, span.param_offset + span.numel)
                if span.numel == numel and values is not None:
                    words = f"The shard of {parameter.name} stands here."
                    yield Hypothesis("swapped", words, exact(values))
