"""Say, without looking at gradtrace's adapters, which elements each point must record, and when.

For every rank, step, micro-step and point: how often each element of each parameter is recorded. A
probe that fires twice, never, or in another micro-step gives another number somewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrace.trace.reader import Trace
from gradtrace.trace.spans import PADDING
from tests.real.training import Setup, build

Times = dict[str, NDArray[np.int64]]  # parameter -> how often each of its elements is recorded

# Accumulation by hand under a configuration that says 1: DeepSpeed takes each for the last.
EVERY_ONE_IS_LAST: Final = ("by_hand", "tensor_backward", "scale")


@dataclass(frozen=True)
class Place:
    """Hold what an expectation may depend on.

    Attributes:
        call: number of this forward pass since the model was made.
    """

    trace: Trace
    setup: Setup
    rank: int
    micro_step: int
    call: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the trainable parameters, tied ones once."""
        named = build(self.setup.model).named_parameters()
        return {name: param.numel() for name, param in named if param.requires_grad}

    @property
    def boundary(self) -> bool:
        last = self.micro_step == self.setup.micro_steps - 1
        return last or self.setup.mode in EVERY_ONE_IS_LAST

    def gradients(self, call: int | None = None) -> list[str]:
        """Return the parameters that get a gradient in a forward pass, this one by default."""
        number = self.call if call is None else call
        return [
            name
            for name in self.sizes
            if self.setup.model != "tied" or not name.startswith("sometimes") or number % 2 == 1
        ]

    def held(self) -> list[str]:
        """Return the parameters that had a gradient since the last reduction at a boundary."""
        first = self.call if self.setup.mode in EVERY_ONE_IS_LAST else self.call - self.micro_step
        names = {name for call in range(first, self.call + 1) for name in self.gradients(call)}
        return [name for name in self.sizes if name in names]

    def whole(self, names: Iterable[str]) -> Times:
        return {name: np.ones(self.sizes[name], np.int64) for name in names}

    def own(self, names: Iterable[str]) -> Times:
        """Return this rank's shard of each parameter, as its header says; `partition` checks that."""
        header = self.trace.ranks[self.rank].header
        layouts = self.trace.ranks[self.rank].layouts
        table = self.trace.manifest.parameters
        found: Times = {}
        wanted = set(names)
        for number in header.partitions.values():
            for span in layouts[number]:
                if span.param != PADDING and table[span.param].name in wanted:
                    name = table[span.param].name
                    times = found.setdefault(name, np.zeros(self.sizes[name], np.int64))
                    times[span.param_offset : span.param_offset + span.numel] += 1
        return found


Expect = Callable[[Place], Times]
NOTHING: Final[Expect] = lambda place: {}  # noqa: E731


def _at_boundary(expect: Expect) -> Expect:
    return lambda place: expect(place) if place.boundary else {}


def _local(place: Place) -> Times:
    return place.whole(place.gradients())


def _held(place: Place) -> Times:
    return place.whole(place.held())


def _effective(place: Place) -> Mapping[str, Any]:
    return place.trace.ranks[place.rank].header.effective


def _reduced(bucket: Callable[[Place], list[str]]) -> Expect:
    def expect(place: Place) -> Times:
        scattered = _effective(place)["reduce_scatter"]
        return place.own(bucket(place)) if scattered else place.whole(bucket(place))

    return expect


# (adapter, zero stage) -> point -> what one micro-step records. Points of the optimizer are below.
PER_MICRO_STEP: Final[dict[tuple[str, int], dict[str, Expect]]] = {
    ("zero12", 1): {
        "local_grad": _local,
        "local_accum": _held,
        "bucket": _at_boundary(_held),
        "reduced": _at_boundary(_reduced(Place.held)),
        "partition": _at_boundary(lambda place: place.own(place.held())),
        "accumulated": _at_boundary(lambda place: place.own(place.sizes)),
    },
    ("zero12", 2): {
        "local_grad": _local,
        "bucket": _local,
        "reduced": _reduced(Place.gradients),
        "partition": lambda place: place.own(place.gradients()),
        "accumulated": lambda place: place.own(place.sizes),
    },
    ("bf16", 1): {
        "local_grad": _local,
        "local_accum": _held,
        "bucket": _at_boundary(lambda place: place.whole(place.sizes)),
        "reduced": _at_boundary(lambda place: place.whole(place.sizes)),
    },
    ("zero3", 3): {
        "local_grad": _local,
        "bucket": _local,
        "partition": lambda place: place.own(place.gradients()),
        "accumulated": lambda place: place.own(place.gradients()),
    },
}
PER_STEP: Final = ("master_grad", "clipped_grad")


def faults(trace: Trace, setup: Setup) -> list[str]:
    """Return where the trace holds other elements, or holds them more or less often, than it must."""
    found: list[str] = []
    for rank, held in trace.ranks.items():
        effective = held.header.effective
        rules = PER_MICRO_STEP.get((effective["adapter"], effective["zero_stage"]))
        if rules is None:
            return [f"no rules for adapter {effective['adapter']}: add them to {__name__}"]
        points = {point: expect for point, expect in rules.items() if _recorded(held, point)}
        for number, step in enumerate(trace.steps):
            for micro_step in range(setup.micro_steps):
                call = number * setup.micro_steps + micro_step
                place = Place(trace, setup, rank, micro_step, call)
                found += _losses(trace, rank, step, micro_step)
                for point, expect in points.items():
                    seen = _times(place, step, micro_step, point)
                    found += _compare(expect(place), seen, (rank, step, micro_step, point))
            skipped = bool(held.steps[step].facts["overflow"])
            for point in PER_STEP:
                place = Place(trace, setup, rank, setup.micro_steps - 1, 0)
                wanted = {} if skipped and point == "clipped_grad" else place.own(place.sizes)
                seen = _times(place, step, None, point)
                found += _compare(wanted, seen, (rank, step, None, point))
    return found + _elsewhere(trace, setup)


def _recorded(held: Any, point: str) -> bool:
    return held.header.points[point] == "recorded"


def _losses(trace: Trace, rank: int, step: int, micro_step: int) -> list[str]:
    number = sum(
        (r.step, r.micro_step, r.point) == (step, micro_step, "loss")
        for r in trace.ranks[rank].records
    )
    return (
        [] if number == 1 else [f"rank {rank} step {step} micro_step {micro_step}: {number} x loss"]
    )


def _times(place: Place, step: int, micro_step: int | None, point: str) -> Times:
    table = place.trace.manifest.parameters
    found: Times = {}
    for record in place.trace.ranks[place.rank].records:
        if (record.step, record.micro_step, record.point) != (step, micro_step, point):
            continue
        if record.layout is None:
            continue  # a rank whose shard is empty
        for span in place.trace.layout(record):
            if span.param != PADDING:
                name = table[span.param].name
                times = found.setdefault(name, np.zeros(table[span.param].numel, np.int64))
                times[span.param_offset : span.param_offset + span.numel] += 1
    return found


def _compare(wanted: Times, seen: Times, where: tuple[Any, ...]) -> list[str]:
    found = []
    for name in {**wanted, **seen}:
        expected = wanted.get(name, np.zeros(1, np.int64))
        recorded = seen.get(name, np.zeros(1, np.int64))
        if not np.array_equal(*np.broadcast_arrays(expected, recorded)):
            rank, step, micro_step, point = where
            found.append(
                f"rank {rank} step {step} micro_step {micro_step} {point} of {name}: elements recorded "
                f"{sorted(Counter(recorded.tolist()).items())}, expected "
                f"{sorted(Counter(expected.tolist()).items())} (times, elements)"
            )
    return found


def _elsewhere(trace: Trace, setup: Setup) -> list[str]:
    """Return records of points without a rule, and of micro-steps that nobody ran."""
    found = []
    for rank, held in trace.ranks.items():
        effective = held.header.effective
        known = {"loss", *PER_STEP, *PER_MICRO_STEP[effective["adapter"], effective["zero_stage"]]}
        micro_steps = (None, *range(setup.micro_steps))
        for record in held.records:
            if record.point not in known or not _recorded(held, record.point):
                found.append(f"rank {rank}: a record of {record.point}")
            if record.micro_step not in micro_steps:
                found.append(f"rank {rank}: a record of micro_step {record.micro_step}")
    return found
