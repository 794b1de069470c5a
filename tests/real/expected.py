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
from gradtrace.trace.records import Record
from gradtrace.trace.spans import PADDING
from tests.real.training import Setup, build

Times = dict[str, NDArray[np.int64]]  # parameter -> how often each of its elements is recorded

# Accumulation by hand under a configuration that says 1: DeepSpeed takes each for the last.
EVERY_ONE_IS_LAST: Final = ("by_hand", "tensor_backward", "scale")


# model -> what gets no gradient in its passes number 1, 3, ... (odd) and 0, 2, ...
LEFT_OUT: Final[Mapping[str, Callable[[bool], tuple[str, ...]]]] = {
    "tied": lambda odd: () if odd else ("sometimes",),
    "early": lambda odd: ("early", "never") if odd else ("never",),
}
# model -> what autograd leaves out, and a leaf module fills with zeros before the reduction
FILLED: Final[Mapping[str, Callable[[bool], str]]] = {
    "leaf": lambda odd: "experts.choices.1" if odd else "experts.choices.0",
}
# Parameters whose gradient arrives in two parts.
IN_PARTS: Final = {"twice_recomputed": "twice"}


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
    def last(self) -> bool:
        return self.micro_step == self.setup.micro_steps - 1

    @property
    def boundary(self) -> bool:
        return self.last or self.setup.mode in EVERY_ONE_IS_LAST

    def gradients(self, call: int | None = None) -> list[str]:
        """Return the parameters that get a gradient in a forward pass, this one by default."""
        odd = (self.call if call is None else call) % 2 == 1
        left_out = LEFT_OUT.get(self.setup.model, lambda odd: ())(odd)
        return [name for name in self.sizes if not name.startswith(left_out)]

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


def _by_part(place: Place, times: Times) -> Times:
    """Count what arrives in two parts twice."""
    twice = IN_PARTS.get(place.setup.model, "nothing")
    return {name: once * (1 + name.startswith(twice)) for name, once in times.items()}


def _arriving(place: Place) -> Times:
    return _by_part(place, _local(place))


def _produced(place: Place) -> Times:
    """Return what autograd gives, where what arrives at the reduction is more."""
    filled = FILLED.get(place.setup.model, lambda odd: "nothing")(place.call % 2 == 1)
    return {name: n for name, n in _arriving(place).items() if not name.startswith(filled)}


def _own_arriving(place: Place) -> Times:
    return _by_part(place, place.own(place.gradients()))


def _held(place: Place) -> Times:
    return place.whole(place.held())


def _effective(place: Place) -> Mapping[str, Any]:
    return place.trace.ranks[place.rank].header.effective


def _reduced(bucket: Callable[[Place], list[str]]) -> Expect:
    def expect(place: Place) -> Times:
        effective = _effective(place)
        # A list of gradients, not one buffer, is all-reduced whatever reduce_scatter says.
        scattered = effective["reduce_scatter"] and effective["contiguous_gradients"]
        return place.own(bucket(place)) if scattered else place.whole(bucket(place))

    return expect


def _accumulated(place: Place) -> Times:
    """Return the shards after a reduction of stage 2, and again where a boundary has work of its own."""
    if _sums_on_host(place):
        return _host_sums(place, place.gradients(), sums=place.setup.micro_steps > 1)
    finalized = place.setup.mode == "unmanaged" and place.last
    own = place.own(place.sizes)
    return {name: times * (2 if finalized else 1) for name, times in own.items()}


def _accumulated_once(place: Place) -> Times:
    if _sums_on_host(place):
        return _host_sums(place, place.held(), sums=False)
    return place.own(place.sizes)


def _host_sums(place: Place, names: list[str], *, sums: bool) -> Times:
    """Return what offload records: the sum of each reduced gradient, at a boundary its fp32 copy too."""
    times = int(sums) + int(place.boundary)
    return {name: once * times for name, once in place.own(names).items()}


def _sums_on_host(place: Place) -> bool:
    effective = _effective(place)
    return bool(effective["offload_optimizer"]) and not _separate(effective)


def _separate(effective: Mapping[str, Any]) -> bool:
    """Say whether gradients accumulate in another dtype than the model's."""
    return bool(effective["grad_accum_dtype"] != effective["model_dtype"])


# Reduced once, at the boundary, over what every rank accumulated by itself.
_REPLICATED: Final[dict[str, Expect]] = {
    "local_grad": _arriving,
    "local_accum": _held,
    "bucket": _at_boundary(_held),
    "reduced": _at_boundary(_held),
}
_SHARDED_ONCE: Final[dict[str, Expect]] = {
    "local_grad": _arriving,
    "local_accum": _held,
    "bucket": _at_boundary(_held),
    "reduced": _at_boundary(_reduced(Place.held)),
    "partition": _at_boundary(lambda place: place.own(place.held())),
    "accumulated": _at_boundary(_accumulated_once),
}
# (adapter, zero stage) -> point -> what one micro-step records. Points of the optimizer are below.
PER_MICRO_STEP: Final[dict[tuple[str, int], dict[str, Expect]]] = {
    ("plain", 0): _REPLICATED,
    ("fp16", 0): _REPLICATED,
    ("fp16_unfused", 0): _REPLICATED,
    ("zero12", 1): _SHARDED_ONCE,
    ("zero12", 2): {
        "local_grad": _arriving,
        "local_accum": NOTHING,
        "bucket": _local,
        "reduced": _reduced(Place.gradients),
        "partition": lambda place: place.own(place.gradients()),
        "accumulated": _accumulated,
    },
    ("bf16", 1): {
        "local_grad": _arriving,
        "local_accum": _held,
        "bucket": _at_boundary(lambda place: place.whole(place.sizes)),
        "reduced": _at_boundary(lambda place: place.whole(place.sizes)),
    },
    ("zero3", 3): {
        "local_grad": _produced,
        "local_accum": NOTHING,
        # Each part goes into a bucket of its own: where both fitted into one, they would be one.
        "bucket": _arriving,
        "partition": _own_arriving,
        "accumulated": _own_arriving,
    },
}
# Under coalesce_grad_reduction() stages 2 and 3 accumulate as stage 1 does.
COALESCED: Final[dict[tuple[str, int], dict[str, Expect]]] = {
    ("zero12", 2): _SHARDED_ONCE,
    ("zero3", 3): {
        "local_grad": _arriving,
        "local_accum": _held,
        "bucket": _at_boundary(_held),
        "partition": _at_boundary(lambda place: place.own(place.held())),
        "accumulated": _at_boundary(lambda place: place.own(place.held())),
    },
}


def rules(trace: Trace, setup: Setup) -> dict[str, Expect] | None:
    effective = next(iter(trace.ranks.values())).header.effective
    family = effective["adapter"], effective["zero_stage"]
    found = PER_MICRO_STEP.get(family)
    return COALESCED.get(family, found) if setup.mode == "coalesce" else found


# Points that no hop of the gradient goes through; tests of hops leave them to this module.
BESIDE_THE_GRADIENT: Final = ("input", "weight", "master_weight")
PER_STEP: Final = ("master_grad", "clipped_grad")
# A step that overflows is left before the optimizer is given anything, but for these.
GIVEN_ALL_THE_SAME: Final = {"bf16": ("master_grad",)}


def hops(records: Iterable[Record], step: int) -> Counter[tuple[str, int | None]]:
    """Count the records of one step on the gradient's own way, by point and micro-step."""
    return Counter(
        (record.point, record.micro_step)
        for record in records
        if record.step == step and record.point not in BESIDE_THE_GRADIENT
    )


def _weights(place: Place) -> Times:
    """Return what a rank holds of every parameter, frozen ones too: a part at stage 3, else all of it."""
    found: Times = {}
    world = place.trace.manifest.world_size
    for name, param in build(place.setup.model).named_parameters():
        times = np.ones(param.numel(), np.int64)
        if place.setup.stage == 3:
            part = -(-param.numel() // world)
            times[: place.rank * part] = 0
            times[(place.rank + 1) * part :] = 0
        found[name] = times
    return found


def _masters(place: Place) -> Times:
    """Return the shards that the optimizer steps, before its step and after it."""
    return {name: 2 * times for name, times in place.own(place.sizes).items()}


AROUND_THE_STEP: Final[dict[str, Expect]] = {
    "weight": _weights,
    "master_weight": _masters,
}


def faults(trace: Trace, setup: Setup) -> list[str]:
    """Return where the trace holds other elements, or holds them more or less often, than it must."""
    found: list[str] = []
    known = rules(trace, setup)
    if known is None:
        return [f"no rules for this adapter and stage: add them to {__name__}"]
    for rank, held in trace.ranks.items():
        points = {point: expect for point, expect in known.items() if _recorded(held, point)}
        for number, step in enumerate(trace.steps):
            for micro_step in range(setup.micro_steps):
                call = number * setup.micro_steps + micro_step
                place = Place(trace, setup, rank, micro_step, call)
                found += _once(trace, rank, step, micro_step, "loss")
                if _recorded(held, "input"):
                    found += _once(trace, rank, step, micro_step, "input")
                for point, expect in points.items():
                    seen = _times(place, step, micro_step, point)
                    found += _compare(expect(place), seen, (rank, step, micro_step, point))
            skipped = bool(held.steps[step].facts["overflow"])
            for point, expect in AROUND_THE_STEP.items():
                if _recorded(held, point):
                    place = Place(trace, setup, rank, 0, 0)
                    seen = _times(place, step, None, point)
                    found += _compare(expect(place), seen, (rank, step, None, point))
            for point in PER_STEP:
                place = Place(trace, setup, rank, setup.micro_steps - 1, 0)
                given = not skipped or (
                    point in GIVEN_ALL_THE_SAME.get(_effective(place)["adapter"], ())
                )
                wanted = place.own(place.sizes) if given else {}
                seen = _times(place, step, None, point)
                found += _compare(wanted, seen, (rank, step, None, point))
    everything = {"loss", "input", *AROUND_THE_STEP, *PER_STEP, *known}
    return found + _elsewhere(trace, setup, everything)


def _recorded(held: Any, point: str) -> bool:
    return held.header.points[point] == "recorded"


def _once(trace: Trace, rank: int, step: int, micro_step: int, point: str) -> list[str]:
    number = sum(
        (r.step, r.micro_step, r.point) == (step, micro_step, point)
        for r in trace.ranks[rank].records
    )
    where = f"rank {rank} step {step} micro_step {micro_step}"
    return [] if number == 1 else [f"{where}: {number} x {point}"]


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


def _elsewhere(trace: Trace, setup: Setup, known: set[str]) -> list[str]:
    """Return records of points without a rule, and of micro-steps that nobody ran."""
    found = []
    for rank, held in trace.ranks.items():
        micro_steps = (None, *range(setup.micro_steps))
        for record in held.records:
            if record.point not in known or not _recorded(held, record.point):
                found.append(f"rank {rank}: a record of {record.point}")
            if record.micro_step not in micro_steps:
                found.append(f"rank {rank}: a record of micro_step {record.micro_step}")
    return found
