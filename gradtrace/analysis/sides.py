"""Recompute one run's gradient path from its own local gradients, with a proven rounding bound.

`diff` compares two runs quantity by quantity. Each side's quantity is a linear function of that side's
recorded ``local_grad`` values: a sum over micro-steps, or the mean over ranks of such sums. What
two runs may differ in is then known exactly: the difference of these references, give or take both
bounds. Nothing here looks at the other run.

Source: the bound is Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.2: a sum
that rounds each term at most n times has an error of at most gamma(n) * sum |x_i|, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gradtrace.analysis.align import Alignment, Event
from gradtrace.analysis.bounds import Estimate, flushed, gamma, is_power_of_two, underflow
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64
from gradtrace.trace.schema import decode_float

CHAIN: Final = ("local_grad", "local_accum", "bucket", "reduced", "partition", "accumulated")
_CASTS: Final = 4  # into the buffer, the bucket, the collective, and the shards' buffer
_U64: Final = 2.0**-53


def number(value: Any) -> float | None:
    """Return a fact as a float, or ``None`` when it is not one."""
    try:
        return decode_float(value)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Path:
    """Say how a term of the gradient may be rounded on its way to the optimizer.

    Attributes:
        dtype: the coarsest dtype on the way.
        absolute: error of one product or cast by underflow.
        flush: error of one addition by flushed subnormals.
        largest: where sums may overflow.
        casts: how many conversions may round.
        scalings: how many roundings the division by the world size is.
    """

    dtype: Dtype
    absolute: float
    flush: float
    largest: float
    casts: int
    scalings: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """Say at which micro-step a parameter was reduced, and which local gradients went in."""

    micro_step: int
    content: tuple[int, ...]


class Side:
    """Hold one run of a comparison.

    Args:
        name: ``baseline`` or ``candidate``.
        alignment: its trace.
    """

    def __init__(self, name: str, alignment: Alignment) -> None:
        self.name = name
        self.align = alignment
        self.path = _path(alignment)
        self.averages = self._averages()
        self._facts: dict[tuple[int | None, int], Mapping[str, Any]] = {}
        self._facts_step: int | None = None

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the run."""
        return self.align.trace.manifest.world_size

    def obstacle(self) -> str | None:
        """Say why means over the ranks cannot be recomputed, or ``None`` when they can."""
        everyone = tuple(range(self.world_size))
        if self.align.ranks != everyone:
            return f"the {self.name} holds only some ranks of the run"
        if any(sorted(self.align.header(rank).dp_ranks) != list(everyone) for rank in everyone):
            return f"the {self.name}'s data-parallel group is not the whole run"
        return None

    @property
    def replicated(self) -> bool:
        """Say whether every rank holds every parameter whole (stage 0)."""
        return bool(self.align.ranks) and all(
            self.align.header(rank).effective.get("replicated") is True for rank in self.align.ranks
        )

    def _averages(self) -> bool:
        for rank in self.align.ranks:
            for record in self.align.trace.ranks[rank].records:
                if record.point == "bucket" and record.facts.get("op") in ("mean", "sum"):
                    return bool(record.facts["op"] == "mean")
        effective = self.align.header(self.align.ranks[0]).effective if self.align.ranks else {}
        return effective.get("gradient_average") is not False

    # -- facts -------------------------------------------------------------------------------------

    def loss_facts(self, step: int, micro_step: int, rank: int) -> Mapping[str, Any]:
        """Return the facts of a backward pass; empty when they were not recorded."""
        if step != self._facts_step:
            self._facts = {
                (record.micro_step, other): record.facts
                for other in self.align.ranks
                for record in self.align.records(step, "loss", other)
            }
            self._facts_step = step
        return self._facts.get((micro_step, rank), {})

    def seed(self, step: int, micro_step: int, rank: int) -> float | None:
        """Return the measured gradient at the loss."""
        return number(self.loss_facts(step, micro_step, rank).get("seed"))

    def loss_scale(self, step: int, micro_step: int, rank: int) -> float:
        """Return the loss scale that was asked for; 1 when there is none."""
        found = number(self.loss_facts(step, micro_step, rank).get("loss_scale"))
        if found is None:
            found = number(self.align.step_end(step, rank).facts.get("loss_scale"))
        return found if found is not None and math.isfinite(found) and found > 0 else 1.0

    def total_seed(self, step: int) -> float | None:
        """Return the sum of the micro-steps' seeds, averaged over the ranks."""
        total = 0.0
        for rank in self.align.ranks:
            for micro_step in range(self.align.step_end(step, rank).micro_steps):
                seed = self.seed(step, micro_step, rank)
                if seed is None:
                    return None
                total += seed
        total /= len(self.align.ranks)
        return total if math.isfinite(total) and total != 0 else None

    def boundary(self, step: int, micro_step: int | None) -> bool | None:
        """Return the engine's claim that this micro-step ends the accumulation."""
        if micro_step is None:
            return None
        claim = self.loss_facts(step, micro_step, self.align.ranks[0]).get("boundary")
        return claim if isinstance(claim, bool) else None

    def lost(self, step: int, point: str, micro_step: int | None, param: int) -> bool:
        """Say whether a gap may have swallowed records that this comparison needs."""
        return bool(self.align.gaps(step, point, micro_step, param=param))


def _path(alignment: Alignment) -> Path:
    """Gather every dtype that a gradient passes through, recorded or configured."""
    names: set[str] = set()
    predivided = False
    enlarged = 1.0  # underflow, where a product follows that is larger than 1
    for rank in alignment.ranks:
        for record in alignment.trace.ranks[rank].records:
            if record.point in CHAIN:
                names.add(record.dtype or "")
                names.add(str(record.facts.get("comm_dtype")))
        effective = alignment.header(rank).effective
        names.update(
            str(effective.get(key))
            for key in ("model_dtype", "grad_accum_dtype", "communication_dtype")
        )
        divisor = number(effective.get("gradient_predivide_factor"))
        predivided |= divisor not in (None, 1.0)
        enlarged = max(enlarged, abs(divisor or 1.0) / alignment.trace.manifest.world_size)
    kinds = [DTYPES[name] for name in sorted(names) if name in DTYPES] or [DTYPES["float32"]]
    world_size = alignment.trace.manifest.world_size
    exact = is_power_of_two(float(world_size)) and not predivided
    return Path(
        dtype=max(kinds, key=lambda kind: kind.unit_roundoff),
        absolute=enlarged * max(underflow(kind) for kind in kinds),
        flush=max(flushed(kind) for kind in kinds),
        largest=min(kind.largest for kind in kinds),
        casts=0 if len(kinds) == 1 else _CASTS,
        scalings=0 if exact else (4 if predivided else 2),
    )


@dataclass(frozen=True, slots=True)
class _Total:
    """Hold a sum over micro-steps: of the values, of their sizes, and of how many there were."""

    value: Float64
    size: Float64
    terms: int
    micro_steps: int


class Locals:
    """Hold the local gradients of one parameter in one step, and what follows from them.

    Args:
        side: the run.
        step: the optimizer step.
        param: index in the run's own parameter table.
    """

    def __init__(self, side: Side, step: int, param: int) -> None:
        self.side = side
        self.step = step
        self.param = param
        self.numel = side.align.parameters[param].numel
        self.lost = side.lost(step, "local_grad", None, param)
        self.recorded = side.align.recorded("local_grad")
        self.occurrences = 1
        self.values: dict[tuple[int, int], Float64] = {}
        self._running: dict[tuple[int, ...], _Total] = {}
        for rank in side.align.ranks:
            for micro_step in side.align.micro_steps(step):
                events = side.align.events(step, micro_step, "local_grad", rank, param)
                if events:
                    self.occurrences = max(self.occurrences, len(events))
                    self.values[rank, micro_step] = side.align.total(events, param).values

    @property
    def known(self) -> bool:
        """Say whether a missing gradient means that there was none."""
        return self.recorded and not self.lost

    def local(self, rank: int, micro_steps: Iterable[int]) -> Estimate:
        """Return one rank's own sum over micro-steps."""
        return self._sum([rank], list(micro_steps), 1.0, casts=self.side.path.casts)

    def mean(self, micro_steps: Iterable[int]) -> Estimate:
        """Return the mean over the ranks of their sums over micro-steps (the sum, if so set)."""
        ranks = self.side.align.ranks
        factor = 1 / len(ranks) if self.side.averages else 1.0
        path = self.side.path
        return self._sum(list(ranks), list(micro_steps), factor, path.casts + path.scalings)

    def _sum(self, ranks: list[int], micro_steps: list[int], factor: float, casts: int) -> Estimate:
        path = self.side.path
        total = self._total(ranks, micro_steps)
        size, terms = total.size, total.terms
        with np.errstate(invalid="ignore", over="ignore"):
            value = total.value * factor
            # Occurrences may be added to what was carried one by one.
            added = max(self.occurrences * len(micro_steps) - 1, 0)
            roundings = added + len(ranks) - 1 + casts
            growth = gamma(roundings, path.dtype.unit_roundoff)
            error = (growth + gamma(2 * terms + 2, _U64)) * size * factor
            steps = max(1, len(micro_steps))
            divisions = 0 if factor == 1.0 else 2  # exact by powers of two, but for underflow
            error += steps * len(ranks) * (casts + divisions) * path.absolute
            additions = steps * (self.occurrences + 1) + len(ranks)
            if terms > 1:
                error += additions * path.flush
            # Sums are formed before the division where the reduction is a plain sum.
            overflow = size * (1 + growth) >= path.largest
        if terms <= 1 and casts == 0 and self.occurrences == 1:
            error = np.zeros(self.numel)  # copied, and at most divided by a power of two
            error += path.absolute if len(ranks) > 1 else 0.0
        return Estimate(value, error, overflow)

    def _total(self, ranks: Sequence[int], micro_steps: Sequence[int]) -> _Total:
        """Add up local gradients, going on from the last sum that began at micro-step 0."""
        key = tuple(ranks)
        prefix = list(micro_steps) == list(range(len(micro_steps)))
        done = self._running.get(key) if prefix else None
        if done is None or done.micro_steps > len(micro_steps):
            done = _Total(np.zeros(self.numel), np.zeros(self.numel), 0, 0)
        value, size, terms = done.value, done.size, done.terms
        with np.errstate(invalid="ignore", over="ignore"):
            for micro_step in micro_steps[done.micro_steps :]:
                for rank in ranks:
                    term = self.values.get((rank, micro_step))
                    if term is not None:
                        value = value + term
                        size = size + np.abs(term)
                        terms += 1
        total = _Total(value, size, terms, len(micro_steps))
        if prefix:
            self._running[key] = total
        return total


def reductions(side: Side, step: int, param: int) -> tuple[Reduction, ...] | None:
    """Return when a parameter was reduced in a step, and what each reduction held.

    Returns:
        ``None`` where the records do not tell: several reductions in one micro-step, or a buffer
        that already held what was reduced before.
    """
    align = side.align
    point = next((p for p in ("bucket", "reduced", "partition") if align.recorded(p)), None)
    if point is None:
        return None
    found: list[Reduction] = []
    first = 0
    for micro_step in align.micro_steps(step):
        counts = {len(align.events(step, micro_step, point, rank, param)) for rank in align.ranks}
        if max(counts, default=0) > 1:
            return None
        if max(counts, default=0) == 0:
            continue
        if found and not _fresh(side, step, first, micro_step, param):
            return None
        found.append(Reduction(micro_step, tuple(range(first, micro_step + 1))))
        first = micro_step + 1
    if align.status("local_accum").startswith("absent"):  # each micro-step's own gradient goes in
        return tuple(Reduction(entry.micro_step, (entry.micro_step,)) for entry in found)
    return tuple(found)


def _fresh(side: Side, step: int, first: int, last: int, param: int) -> bool:
    """Say whether the local buffer began empty after the reduction before ``first``."""
    if side.align.status("local_accum").startswith("absent"):
        return True
    if not side.align.recorded("local_accum"):
        return False
    for rank in side.align.ranks:
        for micro_step in range(first, last + 1):
            events = side.align.events(step, micro_step, "local_accum", rank, param)
            if events:
                if events[0].record.facts.get("carry") is not False:
                    return False
                break
    return True


def gather(
    side: Side,
    step: int,
    micro_step: int | None,
    point: str,
    param: int,
    expected: Float64 | None = None,
) -> Float64 | None:
    """Assemble a parameter from the ranks' own spans.

    Args:
        expected: where every rank holds all of it and their copies differ, the copy that lies farthest
            from this is taken.

    Returns:
        The full parameter in C order, or ``None`` when some element is not held by anybody.
    """
    if side.replicated:
        return _copy(side, step, micro_step, point, param, expected)
    numel = side.align.parameters[param].numel
    values, held = np.zeros(numel), np.zeros(numel, dtype=np.bool_)
    for rank in side.align.ranks:
        events = side.align.events(step, micro_step, point, rank, param)
        if events:
            for start, piece in _own_pieces(side.align, events[-1], rank, param):
                values[start : start + len(piece)] = piece
                held[start : start + len(piece)] = True
    return values if held.all() else None


def _copy(
    side: Side,
    step: int,
    micro_step: int | None,
    point: str,
    param: int,
    expected: Float64 | None,
) -> Float64 | None:
    copies = []
    for rank in side.align.ranks:
        events = side.align.events(step, micro_step, point, rank, param)
        held = side.align.assemble(events[-1:], param)
        if not events or not held.complete:
            return None
        copies.append(held.values)
    if expected is None or all(np.array_equal(one, copies[0], equal_nan=True) for one in copies):
        return copies[0]
    with np.errstate(invalid="ignore", over="ignore"):
        return max(copies, key=lambda one: np.nan_to_num(np.abs(one - expected)).max(initial=0.0))


def _own_pieces(
    align: Alignment, event: Event, rank: int, param: int
) -> Iterable[tuple[int, Float64]]:
    own = align.own_spans(rank, param)
    stated = bool(align.header(rank).partitions)
    for start, piece in align.pieces(event):
        if not stated:
            yield start, piece
            continue
        for span in own:
            low = max(start, span.param_offset)
            high = min(start + len(piece), span.param_offset + span.numel)
            if low < high:
                yield low, piece[low - start : high - start]
