"""Set what a framework reported of its steps beside what was recorded of them.

A difference that averaging and rounding do not explain is a note, never a finding: a wrong report harms
nobody's gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gradtrace.analysis.bounds import coarsest, gamma
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.reader import Trace
from gradtrace.trace.records import Record, Report
from gradtrace.trace.schema import decode_float, encode_float

QUANTITIES: Final = ("loss", "grad_norm", "lr")
_WORDS: Final = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}
_DIGITS: Final = 4  # that Trainer rounds its loss to (transformers 4.57.3, trainer.py:3205)
_SAME_LR: Final = 1e-9  # relative; both are float64 of one schedule


@dataclass(frozen=True, slots=True)
class Quantity:
    """Hold one number on both sides.

    Attributes:
        reported: what the framework said; ``None`` when it said nothing.
        recorded: what the records say; ``None`` when they do not hold all that it needs.
        agrees: whether averaging and rounding explain the difference; ``None``: cannot be told.
    """

    reported: float | None
    recorded: float | None
    agrees: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return the members, as JSON holds them."""
        return {
            "reported": _json(self.reported),
            "recorded": _json(self.recorded),
            "agrees": self.agrees,
        }


@dataclass(frozen=True, slots=True)
class Reported:
    """Hold one report of a framework beside the records.

    Attributes:
        step: the last step that it is of, as the tracer counts.
        steps: over how many steps its loss is averaged.
        source: who reported.
        framework_step: the step as the framework counts, or ``None``.
        quantities: for each of `QUANTITIES`.
    """

    step: int
    steps: int
    source: str
    framework_step: int | None
    quantities: Mapping[str, Quantity]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints of a report."""
        return {
            "step": self.step,
            "steps": self.steps,
            "source": self.source,
            "framework_step": self.framework_step,
            **{name: self.quantities[name].to_dict() for name in QUANTITIES},
        }


def reported(trace: Trace) -> tuple[Reported, ...]:
    """Return every report of the lowest rank that has one, each beside the records.

    The frameworks average over the ranks before they report, so all ranks were told the same.
    """
    for rank in sorted(trace.ranks):
        reports = trace.ranks[rank].reports
        if reports:
            losses = _losses_of(trace)
            before: list[Report | None] = [None, *reports[:-1]]
            return tuple(
                _beside(trace, rank, report, earlier, losses)
                for earlier, report in zip(before, reports, strict=True)
            )
    return ()


def reported_notes(entries: Sequence[Reported]) -> Iterable[str]:
    """Say where reports disagree with the records, a sentence a quantity."""
    for name in QUANTITIES:
        wrong = [entry for entry in entries if entry.quantities[name].agrees is False]
        if not wrong:
            continue
        first, found = wrong[0], wrong[0].quantities[name]
        times = ""
        if found.recorded and found.reported is not None:
            times = f", {found.reported / found.recorded:.4g} times as much"
        more = f"; {len(wrong)} of {len(entries)} reports differ" if len(wrong) > 1 else ""
        yield (
            f"{first.source} reported a {_WORDS[name]} of {found.reported:.6g} at step {first.step}, "
            f"and {found.recorded:.6g} is recorded: {times.removeprefix(', ') or 'not the same'}{more}"
        )
    for earlier, later in itertools.pairwise(entries):
        if earlier.framework_step is None or later.framework_step is None:
            continue
        theirs, ours = later.framework_step - earlier.framework_step, later.step - earlier.step
        if theirs != ours:
            yield (
                f"between two reports {later.source} counted {theirs} steps, and the optimizer made "
                f"{ours} (up to step {later.step})"
            )
            return


def _beside(
    trace: Trace,
    rank: int,
    report: Report,
    earlier: Report | None,
    losses: Mapping[tuple[int, int], Sequence[Record]],
) -> Reported:
    values = {name: decode_float(report.values.get(name)) for name in QUANTITIES}
    in_step = _counts_agree(report, earlier)
    return Reported(
        step=report.step,
        steps=report.steps,
        source=report.source,
        framework_step=report.framework_step,
        quantities={
            "loss": _loss(trace, report, values["loss"], losses, in_step),
            "grad_norm": _norm(trace, rank, report.step, values["grad_norm"]),
            "lr": _lr(trace, rank, report.step, values["lr"]),
        },
    )


def _counts_agree(report: Report, earlier: Report | None) -> bool:
    """Say whether the steps that the loss is averaged over are those that the tracer counted."""
    return earlier is None or report.step - earlier.step == report.steps


def _losses_of(trace: Trace) -> Mapping[tuple[int, int], Sequence[Record]]:
    found: dict[tuple[int, int], list[Record]] = {}
    for rank, index in trace.ranks.items():
        for record in index.records:
            if record.point == "loss":
                found.setdefault((rank, record.step), []).append(record)
    return found


def _loss(
    trace: Trace,
    report: Report,
    told: float | None,
    losses: Mapping[tuple[int, int], Sequence[Record]],
    in_step: bool,
) -> Quantity:
    """Average over the ranks and the steps the sum over a step's micro-steps of what was asked for.

    A micro-step's loss counts as it enters the gradient by what was asked of ``engine.backward``: as it
    is under ``scale_wrt_gas=False``, else divided by the accumulation steps.
    """
    steps = range(report.step - report.steps + 1, report.step + 1)
    total = magnitude = 0.0
    terms, dtypes = 0, ["float32"]
    for step in steps:
        for rank in range(trace.manifest.world_size):
            end = None if rank not in trace.ranks else trace.ranks[rank].steps.get(step)
            found = losses.get((rank, step), ())
            if end is None or end.partial or len(found) != end.micro_steps or not found:
                return Quantity(told, None, None)
            for record in found:
                value, weight = decode_float(record.facts.get("loss")), _weight(record)
                if value is None or weight is None:
                    return Quantity(told, None, None)
                total += value * weight
                magnitude += abs(value * weight)
                terms += 1
                names = record.facts.get("output_dtypes") or ()
                dtypes += [name for name in names if name in DTYPES]
    count = report.steps * trace.manifest.world_size
    recorded = total / count
    if told is None or not in_step or not (math.isfinite(told) and math.isfinite(recorded)):
        return Quantity(told, recorded, None)
    # The framework adds in fp32 and divides twice; a loss may have been divided in its own dtype.
    explained = gamma(terms + 4, DTYPES["float32"].unit_roundoff)
    explained += 2 * coarsest(dtypes).unit_roundoff
    return Quantity(told, recorded, _near(told, recorded, explained * magnitude / count))


def _weight(record: Record) -> float | None:
    asked, gas = record.facts.get("scale_wrt_gas"), decode_float(record.facts.get("gas"))
    if asked is False:
        return 1.0
    return None if asked is None or not gas else 1 / gas


def _norm(trace: Trace, rank: int, step: int, told: float | None) -> Quantity:
    end = trace.ranks[rank].steps[step]
    recorded = decode_float(end.facts.get("grad_norm"))
    if told is None or recorded is None or end.facts.get("overflow"):
        return Quantity(told, recorded, None)
    if not (math.isfinite(told) and math.isfinite(recorded)):
        return Quantity(told, recorded, None)
    explained = 2 * DTYPES["float32"].unit_roundoff * abs(recorded)
    return Quantity(told, recorded, _near(told, recorded, explained))


def _lr(trace: Trace, rank: int, step: int, told: float | None) -> Quantity:
    """Compare with the rate of the step, and of the next: some report it after the schedule moved."""
    ends = trace.ranks[rank].steps
    rates = [_rates(ends[at].facts) for at in (step, step + 1) if at in ends]
    recorded = rates[0][0] if rates[0] else None
    if told is None or recorded is None:
        return Quantity(told, recorded, None)
    for groups in rates:
        if any(math.isclose(told, rate, rel_tol=_SAME_LR, abs_tol=0.0) for rate in groups):
            return Quantity(told, recorded, True)
    return Quantity(told, recorded, False if len(rates) == 2 else None)


def _rates(facts: Mapping[str, Any]) -> list[float]:
    values = [decode_float(value) for value in facts.get("lr") or ()]
    return [value for value in values if value is not None]


def _near(told: float, recorded: float, explained: float) -> bool:
    if told == round(told, _DIGITS):
        explained += 0.5 * 10**-_DIGITS
    return abs(told - recorded) <= explained


def _json(value: float | None) -> Any:
    return None if value is None else encode_float(value)


def paired_reports(baseline: Trace, candidate: Trace) -> tuple[tuple[Reported, Reported], ...]:
    """Return the reports that two runs have of the same step."""
    theirs = {entry.step: entry for entry in reported(candidate)}
    return tuple(
        (entry, theirs[entry.step]) for entry in reported(baseline) if entry.step in theirs
    )


def pair_notes(pairs: Sequence[tuple[Reported, Reported]]) -> Iterable[str]:
    """Say from where on two runs reported different numbers, and where most."""
    for name in QUANTITIES:
        found = [
            (one.step, mine, other)
            for one, two in pairs
            if (mine := one.quantities[name].reported) is not None
            and (other := two.quantities[name].reported) is not None
            and mine != other
        ]
        if not found:
            continue
        step, mine, other = found[0]
        note = (
            f"reported {_WORDS[name]}: first differs at step {step}, {mine:.8g} against {other:.8g}"
        )
        far = max(found, key=lambda entry: abs(entry[1] - entry[2]))
        if far[0] != step:
            note += f"; most at step {far[0]}, {far[1]:.8g} against {far[2]:.8g}"
        yield note
