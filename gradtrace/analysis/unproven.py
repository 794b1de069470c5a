"""Judge what has no proven bound: local gradients and losses, and say why they differ.

Also quantities after them, where the local gradients were not recorded, and the averaged gradients of
runs that cut the same batch differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gradtrace.analysis.compare import Outcome, Step, at_micro_step
from gradtrace.analysis.gate import Pair
from gradtrace.analysis.judging import Sample, fitted, judge_samples, ratio
from gradtrace.analysis.normalisation import LossWeights, loss_weights
from gradtrace.analysis.results import Divergence
from gradtrace.analysis.sides import number
from gradtrace.analysis.walk import Walk
from gradtrace.trace.dtypes import Dtype

SEED_TOLERANCE: Final = 1e-5  # at least; a seed is rounded to the dtype of the loss
LOSS_TOLERANCE: Final = 2.0**-9  # at most; finer dtypes have finer ones
Place = tuple[str, int | None, int | None]  # point, micro_step, rank


def judge(walk: Walk, step: Step, pairs: Sequence[Pair]) -> dict[Place, tuple[str, str]]:
    """Judge the step's samples place by place; say what to tell of those that diverge."""
    places: dict[Place, list[Sample]] = {}
    for entry in step.tally.samples:
        places.setdefault((entry.point, entry.micro_step, entry.rank), []).append(entry)
    factors: dict[Place, float] = {}
    stories: dict[Place, tuple[str, str]] = {}
    for place, samples in places.items():
        opinion = judge_samples(
            samples, step.dtype, same_start=walk.same_start, drifted=walk.drifted
        )
        statuses = list(opinion.statuses)
        factor = opinion.factor
        seeds = _seed_ratio(step, place)
        if seeds is not None and not all(entry.equal for entry in samples):
            found = fitted(samples)
            if found is not None and abs(found / seeds - 1) < 0.1:
                factor = found
                statuses = ["equal" if entry.equal else "diverged" for entry in samples]
        weights = None
        if factor is None and step.mode == "boundary" and {"diverged", "unresolved"} & {*statuses}:
            weights = loss_weights(step, pairs) if walk.same_start else None
        if weights is not None:
            statuses = ["equal" if entry.equal else "diverged" for entry in samples]
        if factor is not None:
            factors[place] = factor
        for entry, status in zip(samples, statuses, strict=True):
            _count(walk, step, entry, status)
        if "diverged" in statuses:
            stories[place] = _why(step, place, samples, factor, weights)
    return {place: _with_factors(story, place, factors) for place, story in stories.items()}


def _count(walk: Walk, step: Step, entry: Sample, status: str) -> None:
    tally = step.tally
    relative = ratio(entry.apart, entry.mine)
    if status == "diverged":
        tally.counts["diverged"] += 1
        boundary = step.boundary(entry.micro_step)
        tally.outcomes.append(Outcome(entry.order, entry.divergence(step.step, boundary)))
    elif status == "equal":
        tally.counts["equal"] += 1
    elif status == "unresolved":
        tally.counts["undecided"] += 1
        if not walk.doubts:
            walk.doubt(
                f"step {step.step}{at_micro_step(entry.micro_step)}: {entry.point} of {entry.name} "
                f"differs by {relative:.2g} of its norm: more than rounding usually explains, and "
                "nothing recorded says whether the weights were equal or why they were not"
                if not walk.same_start
                else f"step {step.step}{at_micro_step(entry.micro_step)}: {entry.point} of "
                f"{entry.name} differs by {relative:.2g} of its norm: too much to call it rounding, "
                "too little to call it a divergence"
            )
    else:
        tally.counts["rounding"] += 1
        walk.by_size |= status == "rounding" and not entry.equal


def _seed_ratio(step: Step, place: Place) -> float | None:
    """Return the candidate's seed over the baseline's, loss scales taken out, if it is not 1."""
    point, micro_step, rank = place
    if point != "local_grad" or micro_step is None or rank is None:
        return None
    seeds = [
        (side.seed(step.step, micro_step, rank), side.loss_scale(step.step, micro_step, rank))
        for side in step.sides
    ]
    (one, one_scale), (two, two_scale) = seeds
    if one is None or two is None or one == 0 or not math.isfinite(one) or not math.isfinite(two):
        return None
    found = (two / two_scale) / (one / one_scale)
    tolerance = max(SEED_TOLERANCE, 4 * step.dtype.unit_roundoff)
    return found if found != 0 and abs(found - 1) > tolerance else None


def _why(
    step: Step,
    place: Place,
    samples: Sequence[Sample],
    factor: float | None,
    weights: LossWeights | None = None,
) -> tuple[str, str]:
    """Return a cause and the evidence for local gradients (or unjudged points) that differ."""
    point, micro_step, rank = place
    losses = _losses(step, micro_step, rank)
    apart = ratio(
        math.fsum(entry.apart for entry in samples), math.fsum(entry.mine for entry in samples)
    )
    size = f"{point} differs by {apart:.3g} of its norm over {len(samples)} parameters"
    apart_too = losses is not None and not _same_loss(losses, step.dtype)
    if losses is not None and apart_too:
        size += f", and so do the losses: {losses[0]:.8g} against {losses[1]:.8g}"
    known = None if factor is not None else _known(step, micro_step, rank)
    if known is not None:
        return known[0], f"{size}. {known[1]}"
    if any(entry.non_finite for entry in samples):
        return "non_finite", f"{size}; NaN or infinity stands on one side only."
    if factor is not None:
        seeds = _seed_ratio(step, place)
        if seeds is not None:
            why = f"the gradients that arrive at the loss (seeds) differ by {seeds:.6g}."
        else:
            why = f"loss normalisation, not a fault of ZeRO.{_same_factor(step, losses, factor)}"
        return "scaled", f"{point} differs by one factor for all parameters: {why}"
    if weights is not None and weights.absent:
        return "inputs_differ", f"{size}. {weights.told()}"
    if weights is not None:
        return "scaled", (
            f"{point} differs, and one weight for each micro-step explains it for all parameters: loss "
            f"normalisation, not a fault of ZeRO. {weights.told()}"
        )
    if apart_too:
        cause, why = _suspected(step, micro_step, rank)
        return cause, f"{size}. {why}"
    told = "" if losses is None else f" The losses agree: {losses[0]:.8g} against {losses[1]:.8g}."
    return "unknown", f"{size}, and nothing recorded before it differs.{told}"


def _same_factor(step: Step, losses: tuple[float, float] | None, factor: float) -> str:
    """Say what else differs by the factor of the gradients: the losses, the counts of micro-steps."""
    told = ""
    if (
        losses is not None
        and losses[0]
        and abs(losses[1] / losses[0] / factor - 1) < LOSS_TOLERANCE
    ):
        told = f" The losses differ by it too: {losses[0]:.8g} against {losses[1]:.8g}."
    counts = [len(side.align.micro_steps(step.step)) for side in step.sides]
    for name, ratio_ in (
        ("the ratio of the runs' micro-steps", counts[0] / counts[1]),
        ("one over the candidate's micro-steps", 1 / counts[1]),
        ("the number of the baseline's micro-steps", float(counts[0])),
    ):
        if ratio_ != 1 and abs(factor / ratio_ - 1) < LOSS_TOLERANCE:
            return f"{told} The factor is {name}, {counts[0]} against {counts[1]}."
    return told


def _known(step: Step, micro_step: int | None, rank: int | None) -> tuple[str, str] | None:
    """Return the cause that hashes prove: other batches or other weights than the other run's."""
    relation, told = step.origins.batch(micro_step, rank)
    other = step.origins.weights == "differ"
    weights = f"the weights differ at the start of the step: {step.origins.weight_note}"
    if relation == "differ":
        also = f" And {weights}." if other else ""
        return "inputs_differ", f"The batches differ: {told}.{also}"
    return ("weights_differ", f"{weights[0].upper()}{weights[1:]}.") if other else None


def _suspected(step: Step, micro_step: int | None, rank: int | None) -> tuple[str, str]:
    """Return what may have made losses differ, where hashes prove nothing to differ."""
    same_batch = step.origins.batch(micro_step, rank)[0] == "equal"
    same_weights = step.origins.weights == "equal"
    if same_batch and step.origins.buffers == "differ":
        also = " and weights" if same_weights else ""
        return "inputs_differ", (
            f"Batches{also} are the same bits, but buffers of the model, which its forward pass reads, "
            f"are not: {step.origins.buffer_note}."
        )
    if same_batch and same_weights:
        same = step.origins.buffers == "equal"
        held, left = (", weights and buffers", "") if same else (" and weights", "buffers, ")
        return "unknown", (
            f"Batches{held} are the same bits: the forward pass itself differs (code, {left}random "
            "numbers, or what was not passed to it)."
        )
    if same_batch:
        return "unknown", "The batches are the same bits; nothing says whether the weights are."
    if same_weights:
        return "inputs_differ", (
            "The weights are the same bits: what the forward pass was given is not the same."
        )
    return "inputs_differ", (
        "The batches, or the weights that the runs began with, are not the same."
    )


def _with_factors(
    story: tuple[str, str], place: Place, factors: dict[Place, float]
) -> tuple[str, str]:
    """Add the factor of each micro-step on the same rank."""
    cause, detail = story
    if place not in factors:
        return story
    same = {m: value for (p, m, r), value in factors.items() if (p, r) == (place[0], place[2])}
    listed = ", ".join(
        f"{value:.6g}" + ("" if m is None else f" in micro-step {m}")
        for m, value in sorted(same.items(), key=lambda item: (item[0] is None, item[0]))
    )
    where = "" if place[2] is None else f" on rank {place[2]}"
    return cause, f"{detail} Candidate over baseline{where}: {listed}."


def _losses(step: Step, micro_step: int | None, rank: int | None) -> tuple[float, float] | None:
    """Return both losses at a place, averaged over what it spans; ``None`` when unknown."""
    means: list[float] = []
    for side in step.sides:
        found: list[float] = []
        for other in side.align.ranks if rank is None else (rank,):
            micro_steps = side.align.micro_steps(step.step) if micro_step is None else (micro_step,)
            for at in micro_steps:
                loss = number(side.loss_facts(step.step, at, other).get("loss"))
                if loss is None:
                    return None
                found.append(loss)
        if not found:
            return None
        means.append(math.fsum(found) / len(found))
    return means[0], means[1]


def _same_loss(losses: tuple[float, float], dtype: Dtype) -> bool:
    one, two = losses
    if one == two or (math.isnan(one) and math.isnan(two)):
        return True
    tolerance = min(64 * dtype.unit_roundoff, LOSS_TOLERANCE)
    return abs(one - two) <= tolerance * max(abs(one), abs(two))


def judge_losses(walk: Walk, step: Step) -> dict[Place, tuple[str, str]]:
    """Judge the losses themselves, where no local gradient was recorded."""
    stories: dict[Place, tuple[str, str]] = {}
    if not step.recorded("loss"):
        return stories
    for micro_step in step.baseline.align.micro_steps(step.step):
        for rank in step.baseline.align.ranks:
            losses = _losses(step, micro_step, rank)
            if losses is None or not walk.same_start or _same_loss(losses, step.dtype):
                continue
            one, two = losses
            size = max(abs(one), abs(two))
            if abs(one - two) <= 4 * math.sqrt(step.dtype.unit_roundoff) * size:
                walk.doubt(
                    f"step {step.step}{at_micro_step(micro_step)}: the losses of rank {rank} "
                    f"differ: {one:.8g} against {two:.8g}, and no local gradient was recorded"
                )
                continue
            place = ("loss", micro_step, rank)
            told = f"The losses differ: {one:.8g} against {two:.8g}."
            cause, why = _known(step, micro_step, rank) or _suspected(step, micro_step, rank)
            stories[place] = (cause, f"{told} {why}")
            step.tally.counts["diverged"] += 1
            step.tally.outcomes.append(
                Outcome(
                    -1,
                    Divergence(
                        step=step.step,
                        micro_step=micro_step,
                        boundary=step.boundary(micro_step),
                        point="loss",
                        param=None,
                        rank=rank,
                        index=None,
                        baseline=one,
                        candidate=two,
                        max_abs=abs(one - two),
                        rel_l2=abs(one - two) / abs(one) if one else math.inf,
                        bound=None,
                    ),
                )
            )
    return stories
