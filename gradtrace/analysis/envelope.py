"""Hold a candidate against the baseline's own sensitivity to rounding.

Runs of the baseline whose weights were moved by one unit in the last place before they began
(`gradtrace.capture.perturb`) say how far the least noise carries the training. A candidate that stays
within a factor of the farthest of them is not to be told from noise; one that does not is not convicted
by that: its own rounding may be coarser than a weight's last place. Laws convict, and only they.

What n of them allow to state: if the candidate differed from the baseline by noise of the same kind, the
n + 1 runs would be exchangeable, and the chance that the candidate is the farthest at a step that was
chosen beforehand 1 / (n + 1). Over all steps the same holds of each run's worst step, measured against
the others: ``p_value`` is the rank of the candidate's among them (a permutation test of n + 1 orders).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from gradtrace.analysis.align import Alignment
from gradtrace.analysis.gate import Gate, Pair, compare_runs, differences
from gradtrace.analysis.growth import distance
from gradtrace.analysis.origins import compare_origins
from gradtrace.analysis.series import Envelope, EnvelopeStep, Growth
from gradtrace.analysis.sides import Side
from gradtrace.errors import NotAnEnvelopeError
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import PERTURBATION_HASH

# How much farther than the farthest sample is still noise. Measured (docs/diff.md): clean candidates came
# to 1.1 at most, held-out samples to 1.8, a lost micro-step in bfloat16 to 53 and more.
FACTOR: Final = 4.0


@dataclass(frozen=True)
class Sample:
    """Hold one perturbed run, and what of it corresponds to the baseline.

    Attributes:
        number: which sample of the noise it is.
        side: its trace.
        pairs: parameters of the baseline and of this run.
        unhashed: steps whose batches nothing says to be the baseline's.
    """

    number: int
    side: Side
    pairs: tuple[Pair, ...]
    unhashed: tuple[int, ...]


def open_samples(
    baseline: Alignment, gate: Gate, traces: Sequence[str | Path | Trace]
) -> tuple[Sample, ...]:
    """Open the perturbed runs, and refuse what is none of the baseline.

    Args:
        baseline: the run that they should differ from by their first weights only.
        gate: of the comparison that they serve.

    Raises:
        NotAnEnvelopeError: a trace is no perturbed run of the baseline.
        GradtraceError: a trace cannot be read; see `gradtrace.trace.reader.open_trace`.
    """
    samples: list[Sample] = []
    if traces and baseline.trace.manifest.perturbation is not None:
        _refuse(baseline.trace, "a baseline that is perturbed itself", "an unperturbed one")
    for given in traces:
        trace = given if isinstance(given, Trace) else open_trace(given)
        sample = _sample(baseline, gate, trace)
        if any(sample.number == other.number for other in samples):
            _refuse(trace, f"sample {sample.number} a second time", "each sample once")
        samples.append(sample)
    return tuple(samples)


def _sample(baseline: Alignment, gate: Gate, trace: Trace) -> Sample:
    perturbation = trace.manifest.perturbation
    if perturbation is None:
        _refuse(trace, "a run whose weights were not perturbed", "one of run --perturb-ulp")
    if (perturbation["ulp"], perturbation["hash"]) != (1, PERTURBATION_HASH):
        found = f"weights moved by {perturbation['ulp']} ulp after {perturbation['hash'][:60]}"
        _refuse(trace, found, f"1 ulp after {PERTURBATION_HASH}")
    align = Alignment(trace)
    own = compare_runs(baseline, align)
    differ = [own.problem] if own.problem else differences(baseline, align)
    if differ:
        _refuse(trace, differ[0], "the baseline's model, configuration and packages")
    places = {pair.name: pair for pair in own.pairs}
    absent = [pair.name for pair in gate.pairs if pair.name not in places]
    if absent:
        _refuse(trace, f"no records of {absent[0]}", "the parameters that are compared")
    if not align.recorded("master_grad"):
        _refuse(trace, "no master_grad", "the gradient that the optimizer is given")
    common = sorted(set(baseline.steps) & set(align.steps))
    if not common:
        _refuse(trace, "no step that the baseline holds", "the same steps")
    unhashed = []
    for step in common:
        if len(align.micro_steps(step)) != len(baseline.micro_steps(step)):
            _refuse(trace, f"another number of micro-steps in step {step}", "the baseline's")
        origins = compare_origins(baseline, align, step, corresponding=True)
        if any(how == "differ" for how, _ in origins.batches.values()):
            told = next(iter(origins.notes(step, begins=False, same_start=False)))
            _refuse(trace, told, "the baseline's batches")
        if step == common[0] and origins.weights == "equal":
            _refuse(
                trace,
                f"the baseline's own weights in step {step}: something put them back, such as a "
                "checkpoint that was loaded after deepspeed.initialize",
                "weights that differ",
            )
        if not origins.batches or any(how != "equal" for how, _ in origins.batches.values()):
            unhashed.append(step)
    pairs = tuple(places[pair.name] for pair in gate.pairs)
    return Sample(int(perturbation["sample"]), Side("sample", align), pairs, tuple(unhashed))


def measure(baseline: Side, samples: Sequence[Sample], growth: Sequence[Growth]) -> Envelope:
    """Compare the candidate's distance from the baseline with that of the perturbed runs.

    Args:
        baseline: the run that all are measured against.
        samples: at least one.
        growth: how far the candidate is at each step.
    """
    candidate: dict[int, float] = {}
    others: list[dict[int, float]] = [{} for _ in samples]
    for entry in growth:
        if entry.gradient is None:
            continue
        found = [_distance(baseline, sample, entry.step) for sample in samples]
        if None in found:
            continue
        candidate[entry.step] = entry.gradient
        for held, value in zip(others, found, strict=True):
            held[entry.step] = value if value is not None else math.inf
    steps = tuple(
        _judge(step, value, max(held[step] for held in others)) for step, value in candidate.items()
    )
    first = next((entry for entry in steps if not entry.inside), None)
    count = len(samples)
    own = _worst(candidate, others)
    above = sum(
        _worst(held, [candidate, *others[:at], *others[at + 1 :]]) >= own
        for at, held in enumerate(others)
    )
    return Envelope(
        samples=tuple(sample.number for sample in samples),
        factor=FACTOR,
        chance=1 / (count + 1),
        p_value=(1 + above) / (count + 1),
        first_outside=None if first is None else first.step,
        steps=steps,
        reading=_reading(steps, first, count),
    )


def _distance(baseline: Side, sample: Sample, step: int) -> float | None:
    if step not in sample.side.align.steps:
        return None
    return distance((baseline, sample.side), sample.pairs, step).rel_l2


def _ratio(one: float, other: float) -> float:
    if one == 0:
        return 0.0
    return one / other if other > 0 and math.isfinite(one) else math.inf


def _judge(step: int, candidate: float, largest: float) -> EnvelopeStep:
    ratio = _ratio(candidate, largest)
    # An infinite distance on both sides is no measure of anything.
    return EnvelopeStep(step, candidate, largest, ratio, inside=ratio <= FACTOR)


def _worst(one: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> float:
    """Return how far out a run is at its worst step, measured by the farthest of the others."""
    return max(
        (_ratio(value, max(held[step] for held in others)) for step, value in one.items()),
        default=0.0,
    )


def _reading(steps: Sequence[EnvelopeStep], first: EnvelopeStep | None, count: int) -> str:
    runs = "the perturbed run" if count == 1 else f"the farthest of {count} perturbed runs"
    if not steps:
        return (
            "No step could be held against the envelope: the averaged gradient is not known of all "
            "runs in any."
        )
    worst = max(steps, key=lambda entry: entry.ratio)
    if first is None:
        return (
            f"Inside: in none of {len(steps)} steps is the candidate more than {FACTOR:g} times as far "
            f"from the baseline as {runs} (at most {worst.ratio:.2g} times, in step {worst.step}). "
            "Its difference is not to be told from that of weights that are off by one unit in the "
            "last place. That acquits no broken law."
        )
    return (
        f"Outside from step {first.step} on: there the candidate is {first.ratio:.3g} times as far from "
        f"the baseline as {runs}; up to {FACTOR:g} times would pass for noise. This alone convicts "
        "nobody: a candidate that rounds more coarsely in each step (another accumulation or "
        "communication dtype) leaves the envelope too. See whether a law is broken, and which settings "
        "differ."
    )


def notes(samples: Sequence[Sample], growth: Sequence[Growth]) -> list[str]:
    """Say what the envelope could not be sure of."""
    told = []
    for sample in samples:
        steps = [entry.step for entry in growth if entry.step in sample.unhashed]
        if steps:
            told.append(
                f"envelope sample {sample.number}: batches were not hashed in step {steps[0]}"
                + (f" and {len(steps) - 1} more" if steps[1:] else "")
                + ": nothing says that they are the baseline's"
            )
        short = [e.step for e in growth if e.step not in sample.side.align.steps]
        if short:
            told.append(
                f"envelope sample {sample.number} does not hold {len(short)} of the steps compared "
                f"(the first is step {short[0]}): they are not held against the envelope"
            )
    return told


def _refuse(trace: Trace, found: str, expected: str) -> NoReturn:
    raise NotAnEnvelopeError(
        found,
        where=f"--envelope {trace.path}",
        expected=expected,
        remedy="Record the baseline's script again with gradtrace run --perturb-ulp SAMPLE, changing "
        "nothing else.",
    )
