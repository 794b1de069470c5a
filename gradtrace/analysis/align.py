"""Find every piece of a parameter in a trace: which record, which rank, which elements.

Offline work goes one parameter at a time, so what is in memory is one parameter x ranks x
micro-steps. Records are indexed one step at a time, the latest few steps are kept. Nothing here
judges: a missing event is an empty tuple, and `Alignment.gaps` says whether something was lost.

Words: an *event* is one record as seen by one parameter, that is, the record and the stretches of
its flat tensor that hold elements of the parameter. A parameter that is reduced twice in one
micro-step has two ``bucket`` events there, in the order in which the rank recorded them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrace.trace.dtypes import DTYPES, Dtype, Float64, to_float64
from gradtrace.trace.points import BY_NAME
from gradtrace.trace.reader import Trace
from gradtrace.trace.records import Gap, Header, Parameter, Record, StepEnd
from gradtrace.trace.spans import PADDING, Layout, Span

STEPS_KEPT: Final = 4
_EventKey = tuple[int | None, str, int, int]  # micro_step, point, rank, param


@dataclass(frozen=True, slots=True)
class Event:
    """Say where one record holds elements of one parameter.

    Attributes:
        record: the record; its ``rank``, ``micro_step``, ``order`` and ``facts`` are all there.
        param: index of the parameter, or ``PADDING``.
        spans: the stretches of the record's flat tensor that hold it, by ``param_offset``.
    """

    record: Record
    param: int
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """Return how many elements of the parameter the record holds."""
        return sum(span.numel for span in self.spans)

    @property
    def dtype(self) -> Dtype:
        """Return the dtype of the recorded values."""
        assert self.record.dtype is not None
        return DTYPES[self.record.dtype]


@dataclass(frozen=True, slots=True)
class Partial:
    """Hold the known elements of one parameter, as float64 in the record's own scale.

    Attributes:
        values: 1-D, the full parameter in C order; 0 where nothing is known.
        held: 1-D, how many stretches hold each element; 0 where nothing is known.
    """

    values: Float64
    held: NDArray[np.int32]

    @property
    def complete(self) -> bool:
        """Say whether every element is known."""
        return bool((self.held > 0).all())


class Alignment:
    """Index an open trace by (step, micro_step, point, rank, param).

    Args:
        trace: an open trace; tensors are read when they are asked for.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.parameters: tuple[Parameter, ...] = trace.manifest.parameters
        self.ranks: tuple[int, ...] = tuple(sorted(trace.ranks))
        self.steps: tuple[int, ...] = trace.steps
        self._records: dict[int, dict[int, list[Record]]] = {}
        self._gaps: dict[int, list[Gap]] = {}
        self._indices: dict[int, dict[_EventKey, tuple[Event, ...]]] = {}
        for rank in self.ranks:
            for record in trace.ranks[rank].records:
                self._records.setdefault(record.step, {}).setdefault(rank, []).append(record)
            for gap in trace.ranks[rank].gaps:
                self._gaps.setdefault(gap.step, []).append(gap)
        self._own: dict[tuple[int, int], tuple[Span, ...]] = self._own_spans()
        self._order: dict[int, int] | None = None

    # -- what the run is -------------------------------------------------------------------------

    def header(self, rank: int) -> Header:
        """Return what only this rank knows."""
        return self.trace.ranks[rank].header

    def step_end(self, step: int, rank: int) -> StepEnd:
        """Return the line that closes a step on a rank.

        Raises:
            KeyError: the rank did not finish this step.
        """
        return self.trace.ranks[rank].steps[step]

    def micro_steps(self, step: int) -> range:
        """Return the backward passes of a step: as many as the rank that counted most saw."""
        return range(max(self.step_end(step, rank).micro_steps for rank in self.ranks))

    def partial(self, step: int) -> bool:
        """Say whether some rank was wrapped in the middle of this step."""
        return any(self.step_end(step, rank).partial for rank in self.ranks)

    def previous_step(self, step: int) -> int | None:
        """Return ``step - 1`` when the trace holds it whole, else ``None``."""
        return step - 1 if step - 1 in self.steps else None

    def captured(self) -> tuple[Parameter, ...]:
        """Return the parameters that the capture plan selects, in backward order."""
        chosen = [parameter for parameter in self.parameters if parameter.captured]
        return tuple(sorted(chosen, key=lambda parameter: self.backward_order(parameter.index)))

    def status(self, point: str) -> str:
        """Return ``recorded`` if every rank records the point, else the first other status."""
        for rank in self.ranks:
            status = self.header(rank).points[point]
            if status != "recorded":
                return status
        return "recorded"

    def recorded(self, point: str) -> bool:
        """Say whether every rank records this point."""
        return self.status(point) == "recorded"

    def own_spans(self, rank: int, param: int) -> tuple[Span, ...]:
        """Return this rank's shard of a parameter, as the header's partitions state it."""
        return self._own.get((rank, param), ())

    def backward_order(self, param: int) -> int:
        """Return the position of a parameter among the first ``local_grad`` records.

        Taken from the lowest rank's earliest step; where that is silent, from its ``bucket``
        records; parameters that were never seen come last, in reverse order of the table.
        """
        if self._order is None:
            self._order = self._backward_order()
        return self._order[param]

    # -- records and events ----------------------------------------------------------------------

    def records(
        self, step: int, point: str, rank: int, micro_step: int | None = None
    ) -> tuple[Record, ...]:
        """Return the records of a point on a rank in causal order; of all micro-steps if None."""
        return tuple(
            record
            for record in self._records.get(step, {}).get(rank, ())
            if record.point == point and (micro_step is None or record.micro_step == micro_step)
        )

    def events(
        self, step: int, micro_step: int | None, point: str, rank: int, param: int
    ) -> tuple[Event, ...]:
        """Return every record of a point that holds elements of a parameter, in causal order.

        Args:
            micro_step: ``None`` for optimizer points.
            param: index into the manifest's table, or ``PADDING``.

        Returns:
            The e-th entry is the e-th appearance of the parameter at this point in this
            micro-step on this rank; empty when there is none.
        """
        return self._index(step).get((micro_step, point, rank, param), ())

    def step_events(self, step: int, point: str, rank: int, param: int) -> tuple[Event, ...]:
        """Return the events of all micro-steps of a step, in the rank's causal order."""
        found: list[Event] = []
        for micro_step in self.micro_steps(step):
            found.extend(self.events(step, micro_step, point, rank, param))
        return tuple(sorted(found, key=lambda event: event.record.order))

    def gaps(
        self,
        step: int,
        point: str,
        micro_step: int | None = None,
        *,
        param: int | None = None,
        ranks: Iterable[int] | None = None,
    ) -> tuple[Gap, ...]:
        """Return the gaps that may have swallowed records of a point.

        Args:
            micro_step: one backward pass, or ``None`` for the whole step.
            param: leave out gaps that certainly belong to another parameter.
            ranks: leave out gaps of other ranks.
        """
        chosen = None if ranks is None else set(ranks)
        return tuple(
            gap
            for gap in self._gaps.get(step, ())
            if (chosen is None or gap.rank in chosen)
            and gap.point in (None, point)
            and (micro_step is None or gap.micro_step in (None, micro_step))
            and (param is None or self._may_hold(gap, point, param))
        )

    def step_gaps(self, step: int) -> tuple[Gap, ...]:
        """Return every gap of a step."""
        return tuple(self._gaps.get(step, ()))

    # -- values ----------------------------------------------------------------------------------

    def fetch(self, event: Event, span: Span) -> Float64:
        """Return one stretch of a record, widened to float64 exactly; a fresh 1-D array.

        Raises:
            DamagedTraceError: the shard does not match its checksum.
        """
        bits = self.trace.bits(event.record)
        return to_float64(bits[span.flat_offset : span.flat_offset + span.numel], event.dtype)

    def pieces(self, event: Event) -> tuple[tuple[int, Float64], ...]:
        """Return ``(param_offset, values)`` of every stretch of an event."""
        return tuple((span.param_offset, self.fetch(event, span)) for span in event.spans)

    def cut(self, event: Event, start: int, stop: int) -> Float64 | None:
        """Return elements ``start`` to ``stop - 1`` of the parameter, if the record holds them all.

        Returns:
            1-D float64, a fresh copy, or ``None`` when an element is not there.
        """
        values = np.zeros(stop - start)
        missing = np.ones(stop - start, dtype=np.bool_)
        for span in event.spans:
            first = max(start, span.param_offset)
            last = min(stop, span.param_offset + span.numel)
            if first < last:
                at = span.flat_offset + first - span.param_offset
                inside = Span(span.param, first, at, last - first)
                values[first - start : last - start] = self.fetch(event, inside)
                missing[first - start : last - start] = False
        return None if missing.any() else values

    def assemble(self, events: Iterable[Event], param: int) -> Partial:
        """Lay the stretches of several events into one parameter; later ones overwrite.

        Args:
            events: of this parameter, such as the ``master_grad`` events of all ranks.
        """
        numel = self.parameters[param].numel
        values = np.zeros(numel, dtype=np.float64)
        held = np.zeros(numel, dtype=np.int32)
        for event in events:
            for offset, piece in self.pieces(event):
                values[offset : offset + len(piece)] = piece
                held[offset : offset + len(piece)] += 1
        return Partial(values, held)

    def total(self, events: Sequence[Event], param: int) -> Partial:
        """Add up several events of one parameter, in float64: occurrences of one record."""
        numel = self.parameters[param].numel
        values = np.zeros(numel, dtype=np.float64)
        held = np.zeros(numel, dtype=np.int32)
        for event in events:
            for offset, piece in self.pieces(event):
                values[offset : offset + len(piece)] += piece
                held[offset : offset + len(piece)] += 1
        return Partial(values, held)

    def gather(
        self, step: int, micro_step: int | None, point: str, param: int, event: int = -1
    ) -> Partial:
        """Assemble a parameter from all ranks' pieces at a spans point.

        Args:
            event: which appearance in the micro-step; the last by default.
        """
        chosen: list[Event] = []
        for rank in self.ranks:
            events = self.events(step, micro_step, point, rank, param)
            if events and -len(events) <= event < len(events):
                chosen.append(events[event])
        return self.assemble(chosen, param)

    def holders(
        self, step: int, micro_step: int | None, point: str, param: int, index: int
    ) -> tuple[int, ...]:
        """Return the ranks whose records of a point hold one element of a parameter."""
        return tuple(
            rank
            for rank in self.ranks
            if any(
                span.param_offset <= index < span.param_offset + span.numel
                for event in self.events(step, micro_step, point, rank, param)
                for span in event.spans
            )
        )

    # -- building --------------------------------------------------------------------------------

    def _index(self, step: int) -> dict[_EventKey, tuple[Event, ...]]:
        index = self._indices.get(step)
        if index is None:
            while len(self._indices) >= STEPS_KEPT:
                del self._indices[next(iter(self._indices))]
            index = self._indices[step] = self._build(step)
        return index

    def _build(self, step: int) -> dict[_EventKey, tuple[Event, ...]]:
        index: dict[_EventKey, list[Event]] = {}
        split: dict[tuple[int, int], dict[int, tuple[Span, ...]]] = {}
        for rank, records in self._records.get(step, {}).items():
            for record in records:
                if record.layout is None:
                    continue
                place = (rank, record.layout)
                if place not in split:
                    split[place] = _by_param(self.trace.ranks[rank].layouts[record.layout])
                for param, spans in split[place].items():
                    key = (record.micro_step, record.point, rank, param)
                    index.setdefault(key, []).append(Event(record, param, spans))
        return {key: tuple(events) for key, events in index.items()}

    def _own_spans(self) -> dict[tuple[int, int], tuple[Span, ...]]:
        own: dict[tuple[int, int], tuple[Span, ...]] = {}
        for rank in self.ranks:
            index = self.trace.ranks[rank]
            for number in index.header.partitions.values():
                for param, spans in _by_param(index.layouts[number]).items():
                    own[rank, param] = own.get((rank, param), ()) + spans
        return own

    def _backward_order(self) -> dict[int, int]:
        order: dict[int, int] = {}
        by_name = {name: p.index for p in self.parameters for name in (p.name, *p.aliases)}
        for point in ("local_grad", "bucket"):
            for record in self.trace.ranks[self.ranks[0]].records:
                if record.point != point or record.layout is None:
                    continue
                if record.unit in by_name:
                    order.setdefault(by_name[record.unit], len(order))
                    continue
                for span in self.trace.layout(record):
                    if span.param != PADDING:
                        order.setdefault(span.param, len(order))
        for parameter in reversed(self.parameters):
            order.setdefault(parameter.index, len(order))
        return order

    def _may_hold(self, gap: Gap, point: str, param: int) -> bool:
        if gap.unit is None or BY_NAME[point].space != "param":
            return True
        parameter = self.parameters[param]
        return gap.unit in (parameter.name, *parameter.aliases)


def _by_param(layout: Layout) -> dict[int, tuple[Span, ...]]:
    spans: dict[int, list[Span]] = {}
    for span in layout:
        if span.numel:
            spans.setdefault(span.param, []).append(span)
    return {
        param: tuple(sorted(found, key=lambda span: (span.param_offset, span.flat_offset)))
        for param, found in spans.items()
    }
