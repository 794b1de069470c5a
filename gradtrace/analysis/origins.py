"""Say whether two runs begin a step with the same weights and batches, by the hashes of both.

Hashes of shards add up, so weights are compared over stages and world sizes; only those of one dtype.
Batches are compared where the same micro-step of the same rank stands on both sides. Equal hashes of
equal shapes and dtypes are equal bits, but for a chance of 2**-64; what was not hashed is unknown, and
unknown is never called equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gradtrace.analysis.align import Alignment
from gradtrace.trace.digest import add_hashes, hash_text, value_hash
from gradtrace.trace.reader import Trace
from gradtrace.trace.records import Facts, Record
from gradtrace.trace.spans import PADDING, Span, coverage_fault

Relation = Literal["equal", "differ", "unknown"]
Hashed = tuple[str, str]  # dtype, hash
_NAMED: Final = 3


def stretch_hashes(trace: Trace, record: Record) -> Iterator[tuple[Span, str]]:
    """Yield the hash of every stretch of a record, from its digest or its values.

    Raises:
        DamagedTraceError: the shard does not match its checksum.
    """
    digest = record.facts.get("digest")
    layout = trace.layout(record)
    if record.key is None or digest is not None:
        for span, mixed in zip(layout, (digest or {}).get("hash", ()), strict=True):
            yield span, mixed
        return
    bits = trace.bits(record)
    for span in layout:
        here = bits[span.flat_offset : span.flat_offset + span.numel]
        yield span, hash_text(value_hash(here, span.param_offset))


def stretch_hash(trace: Trace, record: Record, span: Span) -> str:
    """Return the hash of one stretch of a record, from its digest or its values.

    Raises:
        DamagedTraceError: the shard does not match its checksum.
    """
    if record.key is None:
        hashes: list[str] = record.facts["digest"]["hash"]
        return hashes[trace.layout(record).index(span)]
    here = trace.bits(record)[span.flat_offset : span.flat_offset + span.numel]
    return hash_text(value_hash(here, span.param_offset))


def whole_weights(alignment: Alignment, step: int, rank: int) -> dict[int, Hashed]:
    """Return the hashes of the parameters that one rank holds whole at the start of a step."""
    found: dict[int, Hashed] = {}
    for record in alignment.records(step, "weight", rank):
        if record.layout is None or record.dtype is None:
            continue
        for span, mixed in stretch_hashes(alignment.trace, record):
            if span.param != PADDING and span.numel == alignment.parameters[span.param].numel:
                found[span.param] = (record.dtype, mixed)
    return found


def weight_hashes(alignment: Alignment, step: int) -> dict[int, Hashed]:
    """Return the hash of every parameter that the ranks hold whole, alone or together."""
    found: dict[int, Hashed] = {}
    pieces: dict[int, list[tuple[Span, str, str]]] = {}
    for rank in alignment.ranks:
        for record in alignment.records(step, "weight", rank):
            if record.layout is None or record.dtype is None:
                continue
            for span, mixed in stretch_hashes(alignment.trace, record):
                if span.param == PADDING:
                    continue
                if span.numel == alignment.parameters[span.param].numel:
                    found.setdefault(span.param, (record.dtype, mixed))
                pieces.setdefault(span.param, []).append((span, record.dtype, mixed))
    for param, held in pieces.items():
        numel = alignment.parameters[param].numel
        spans = [(span.param_offset, span.numel) for span, _, _ in held]
        dtypes = {dtype for _, dtype, _ in held}
        if param not in found and len(dtypes) == 1 and coverage_fault(spans, numel) is None:
            found[param] = (dtypes.pop(), add_hashes(mixed for _, _, mixed in held))
    return found


@dataclass(frozen=True)
class Origins:
    """Hold what both runs began one step with.

    Attributes:
        weights: ``equal`` when every parameter of the model is the same bits.
        weight_note: how the weights differ, or empty.
        batches: (micro_step, rank) -> how the batches there relate, and in words how they differ.
        reordered: the batches that differ are the same ones at other places.
        buffers: how the model's buffers relate, as they were when tracing began.
        buffer_note: how they differ, or empty.
    """

    weights: Relation = "unknown"
    weight_note: str = ""
    batches: Mapping[tuple[int, int], tuple[Relation, str]] = field(default_factory=dict)
    reordered: bool = False
    buffers: Relation = "unknown"
    buffer_note: str = ""

    def batch(self, micro_step: int | None, rank: int | None) -> tuple[Relation, str]:
        """Return how the batches relate that a place depends on: of all ranks, and up to a micro-step.

        Args:
            micro_step: ``None`` for what holds all of them.
            rank: a rank's own place; ``None`` for what holds all ranks.
        """
        asked = [
            entry
            for (at, other), entry in sorted(self.batches.items())
            if (rank is None and (micro_step is None or at <= micro_step))
            or (rank == other and at == micro_step)
        ]
        differ = next((entry for entry in asked if entry[0] == "differ"), None)
        if differ is not None:
            return differ
        equal = bool(asked) and all(relation == "equal" for relation, _ in asked)
        return ("equal" if equal else "unknown"), ""

    def notes(self, step: int, *, begins: bool, same_start: bool) -> Iterator[str]:
        """Say what differs.

        Args:
            begins: the step is the first that is compared.
            same_start: nothing that was recorded of the steps before differs.
        """
        if self.weights == "differ" and begins:
            yield f"the runs begin step {step} with different weights: {self.weight_note}"
        elif self.weights == "differ" and same_start:
            yield (
                f"the weights differ at the start of step {step}, though no gradient before does: "
                f"{self.weight_note}"
            )
        if self.buffers == "differ" and begins:
            yield f"the runs begin with different buffers of the model: {self.buffer_note}"
        differ = [(p, told) for p, (how, told) in sorted(self.batches.items()) if how == "differ"]
        if differ:
            (micro_step, rank), told = differ[0]
            more = f", and at {len(differ) - 1} more places of the step" if differ[1:] else ""
            order = "; they are the same batches in another order" if self.reordered else ""
            where = f"step {step}, micro-step {micro_step}, rank {rank}{more}"
            yield f"input differs at {where}: {told}{order}"


def compare_origins(
    baseline: Alignment, candidate: Alignment, step: int, *, corresponding: bool
) -> Origins:
    """Compare what two runs begin a step with.

    Args:
        corresponding: whether a micro-step of a rank is the same one on both sides.
    """
    weights, note = compare_weights(baseline, candidate, step)
    held = compare_buffers(baseline, candidate)
    if not corresponding:
        return Origins(weights, note, buffers=held[0], buffer_note=held[1])
    sides = (_batches(baseline, step), _batches(candidate, step))
    places = sorted(set(sides[0]) | set(sides[1]))
    related = {place: relate(*(side.get(place, ()) for side in sides)) for place in places}
    return Origins(weights, note, related, _reordered(*sides), *held)


def compare_buffers(baseline: Alignment, candidate: Alignment) -> tuple[Relation, str]:
    """Compare the model's buffers on the lowest rank of each run; say in words how they differ.

    Unlike weights, of which stages keep copies in other dtypes, a buffer is used as it is: another
    dtype is another value.
    """
    tables = [
        None if held is None else {entry["name"]: entry for entry in held}
        for held in (
            side.trace.ranks[side.ranks[0]].header.buffers if side.ranks else None
            for side in (baseline, candidate)
        )
    ]
    mine, theirs = tables
    if mine is None or theirs is None:
        return "unknown", ""
    differ: list[str] = []
    unknown = set(mine) != set(theirs)
    for name in [name for name in mine if name in theirs]:
        one, two = mine[name], theirs[name]
        for member in ("shape", "dtype"):
            if one[member] != two[member]:
                differ.append(f"{name} ({member} {one[member]} against {two[member]})")
                break
        else:
            unknown |= None in (one["hash"], two["hash"])
            if one["hash"] != two["hash"] and None not in (one["hash"], two["hash"]):
                differ.append(f"{name} ({one['dtype']}, shape {one['shape']}: other values)")
    if differ:
        more = f", and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        return "differ", f"{len(differ)} of {len(mine)}: {', '.join(differ[:_NAMED])}{more}"
    return ("unknown" if unknown else "equal"), ""


def compare_weights(baseline: Alignment, candidate: Alignment, step: int) -> tuple[Relation, str]:
    """Compare the weights that both runs begin a step with; say in words how they differ."""
    mine, theirs = weight_hashes(baseline, step), weight_hashes(candidate, step)
    places = {parameter.name: parameter.index for parameter in candidate.parameters}
    differ: list[str] = []
    compared = 0
    for parameter in baseline.parameters:
        one = mine.get(parameter.index)
        two = theirs.get(places.get(parameter.name, -1))
        if one is None or two is None or one[0] != two[0]:
            continue
        compared += 1
        if one != two:
            differ.append(parameter.name)
    if differ:
        named = ", ".join(differ[:_NAMED]) + (", ..." if len(differ) > _NAMED else "")
        return "differ", f"{len(differ)} of {compared} parameters ({named})"
    whole = sum(parameter.numel > 0 for parameter in baseline.parameters)
    return ("equal" if compared and compared == whole else "unknown"), ""


def _batches(alignment: Alignment, step: int) -> dict[tuple[int, int], tuple[Facts, ...]]:
    found: dict[tuple[int, int], tuple[Facts, ...]] = {}
    for rank in alignment.ranks:
        for micro_step in alignment.micro_steps(step):
            lost = alignment.gaps(step, "input", micro_step, ranks=(rank,))
            records = alignment.records(step, "input", rank, micro_step)
            if records and not lost:
                found[micro_step, rank] = tuple(record.facts for record in records)
    return found


def relate(mine: Sequence[Facts], theirs: Sequence[Facts]) -> tuple[Relation, str]:
    """Say how the batches of one backward pass relate: those of all its forward passes, in order."""
    if not mine or not theirs:
        return "unknown", ""
    if len(mine) != len(theirs):
        return "unknown", ""  # a loss over other forward passes is another training, not a batch
    unknown = False
    for at, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        where = f" of forward pass {at}" if len(mine) > 1 else ""
        relation, told = _relate_one(one, two)
        if relation == "differ":
            return "differ", told + where
        unknown |= relation == "unknown"
    return ("unknown" if unknown else "equal"), ""


def _relate_one(one: Facts, two: Facts) -> tuple[Relation, str]:
    if one.get("truncated") is not False or two.get("truncated") is not False:
        return "unknown", ""
    tables = [{entry["name"]: entry for entry in side.get("tensors", ())} for side in (one, two)]
    extras = [{entry["name"]: entry for entry in side.get("others", ())} for side in (one, two)]
    unknown = False
    if set(tables[0]) != set(tables[1]):
        # Given under other names: model(x) against model(input_ids=x).
        same = _contents(one) == _contents(two) and None not in _contents(one)
        return ("equal" if same and not any(extras) else "unknown"), ""
    for name, entry in tables[0].items():
        other = tables[1][name]
        if entry["shape"] != other["shape"]:
            return "differ", f"{name} has shape {entry['shape']} against {other['shape']}"
        if None in (entry["hash"], other["hash"]) or entry["dtype"] != other["dtype"]:
            unknown = True
        elif entry["hash"] != other["hash"]:
            return "differ", f"{name} ({entry['dtype']}, shape {entry['shape']}) has other values"
    unknown |= set(extras[0]) != set(extras[1])
    for name in set(extras[0]) & set(extras[1]):
        mixed = [side[name]["hash"] for side in extras]
        if mixed[0] != mixed[1] and None not in mixed:
            return "differ", f"{name} ({extras[0][name]['type']}) has another value"
        unknown |= mixed[0] is None and extras[0][name]["type"] != "NoneType"
        unknown |= extras[0][name]["type"] != extras[1][name]["type"]
    return ("unknown" if unknown else "equal"), ""


def _contents(facts: Facts) -> list[Any]:
    """Return shape, dtype and hash of every tensor, in order; ``None`` for one without a hash."""
    return [
        None if entry["hash"] is None else (entry["shape"], entry["dtype"], entry["hash"])
        for entry in facts.get("tensors", ())
    ]


def _reordered(
    mine: Mapping[tuple[int, int], Sequence[Facts]],
    theirs: Mapping[tuple[int, int], Sequence[Facts]],
) -> bool:
    """Say whether both sides hold the same batches, wherever they stand in the step."""
    tallies = [
        Counter(str([_contents(facts) for facts in batch]) for batch in side.values())
        for side in (mine, theirs)
    ]
    return set(mine) == set(theirs) and tallies[0] == tallies[1]
