"""Compare what the optimizer is given at last: the gradient after unscale and clip.

On each side ``clipped_grad`` must be ``master_grad`` times one factor, 1 / (loss scale x clip
factor). The factor is measured. It may differ between the runs as their norms do, through the
clipping of *one* setting; whatever else makes it differ (another clip value, a norm that is wrong, a
loss scale that stayed in) parts the runs here, for all parameters at once.

Source: DeepSpeed ``unscale_and_clip_grads``: combined scale = loss scale x max(1, (norm / loss scale
+ 1e-6) / clip).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gradtrace.analysis.bounds import Estimate, gamma, underflow
from gradtrace.analysis.compare import Outcome, Step, contrast, scaled
from gradtrace.analysis.gate import Pair, shown
from gradtrace.analysis.results import Divergence
from gradtrace.analysis.sides import Side, gather, number
from gradtrace.trace.dtypes import DTYPES, Float64

TOLERANCE: Final = 1e-4  # relative, on a factor: norms are sums of many squares in float32
_FP32: Final = DTYPES["float32"]
_SMALLEST: Final = 2.0**-108  # below, underflow may hide what clipped_grad was multiplied with
_ROUNDINGS: Final = 6  # 1 / scale is rounded, the product is, and norm, clip and sum before it


@dataclass(frozen=True, slots=True)
class ClipReport:
    """Say what parted the runs at ``clipped_grad``, where no law of one run needs to be broken.

    Attributes:
        detail: the measured factors, and the setting that differs.
    """

    detail: str


@dataclass(frozen=True, slots=True)
class _Clip:
    """Hold how one side went from master_grad to clipped_grad.

    Attributes:
        scale: the loss scale.
        norm: of the gradient, unscaled: recomputed when all of it is there, else as recorded.
        clip: the clip value in effect.
        common: the factor that the parameters share; ``None`` when underflow hides it.
    """

    scale: float
    norm: float | None
    clip: float | None
    common: float | None

    @property
    def measured(self) -> float | None:
        """Return the clip factor that was measured, loss scale taken out."""
        return None if self.common is None else self.common * self.scale

    @property
    def own(self) -> float | None:
        """Return the clip factor that the side's own norm and clip value give."""
        return clip_factor(self.norm, self.clip)


_Tensors = tuple[tuple[Float64, Float64], tuple[Float64, Float64]]  # master, clipped of both sides


def compare_clipped(step: Step, pairs: Sequence[Pair], *, all_captured: bool) -> ClipReport | None:
    """Compare ``clipped_grad`` of every parameter, and the factor that all share.

    Returns:
        What is to be said of a factor that differs for all parameters; ``None`` when none does.
    """
    if step.mode == "local" or step.partial:
        return None
    if not step.recorded("clipped_grad") or not step.recorded("master_grad"):
        return None
    factors: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    squares = [0.0, 0.0]
    used: list[Pair] = []
    for pair in pairs:
        if step.lost("clipped_grad", None, pair) or step.lost("master_grad", None, pair):
            step.tally.lost[f"clipped_grad of {pair.name}"] = None
            continue
        tensors = _tensors(step, pair)
        if tensors is None:
            continue
        used.append(pair)
        for at in (0, 1):
            factors[at].extend(_measure(tensors[0][at], tensors[1][at]))
            squares[at] += float(tensors[0][at] @ tensors[0][at])
    complete = all_captured and len(used) == len(pairs)
    clips = (
        _clip_of(step, step.baseline, factors[0], squares[0] if complete else None),
        _clip_of(step, step.candidate, factors[1], squares[1] if complete else None),
    )
    statuses = [_elementwise(step, pair, clips) for pair in used]
    if step.tally.counts["diverged"]:  # at this point or before it
        return None
    differing = [p for p, status in zip(used, statuses, strict=True) if status == "rounding"]
    return _compare_factors(step, differing, clips)


def _tensors(step: Step, pair: Pair) -> _Tensors | None:
    found = []
    for point in ("master_grad", "clipped_grad"):
        one = gather(step.baseline, step.step, None, point, pair.baseline)
        two = gather(step.candidate, step.step, None, point, pair.candidate)
        if one is None or two is None:
            return None
        found.append((one, two))
    return found[0], found[1]


def _measure(master: Float64, clipped: Float64) -> list[tuple[float, float]]:
    """Return a parameter's factor and its weight, or nothing where underflow hides it."""
    usable = np.isfinite(master) & np.isfinite(clipped)
    top = float(np.abs(master[usable]).max(initial=0.0))
    if top < _SMALLEST:
        return []
    unit = master[usable] / top
    weight = float(unit @ unit)
    return [(float(unit @ (clipped[usable] / top)) / weight, weight * top * top)]


def _clip_of(
    step: Step, side: Side, factors: Sequence[tuple[float, float]], square: float | None
) -> _Clip:
    rank = side.align.ranks[0]
    facts = side.align.step_end(step.step, rank).facts
    scale = _loss_scale(step, side)
    norm = _norm_used(step, side, scale) if square is None else math.sqrt(square) / scale
    clip = number(facts.get("clip"))
    if clip is None:
        clip = number(side.align.header(rank).effective.get("gradient_clipping"))
    own = clip_factor(norm, clip)
    return _Clip(scale, norm, clip, _common(factors, None if own is None else own / scale))


def _norm_used(step: Step, side: Side, scale: float) -> float | None:
    """Return the unscaled norm that a side clipped with, or reported where that is not known."""
    rank = side.align.ranks[0]
    for record in side.align.records(step.step, "master_grad", rank):
        used = number(record.facts.get("total_norm"))
        if used is not None:
            return used / scale
    return number(side.align.step_end(step.step, rank).facts.get("grad_norm"))


def clip_factor(norm: float | None, clip: float | None) -> float | None:
    """Return what clipping to a value multiplies a gradient of this norm with."""
    if clip is None or norm is None or not math.isfinite(norm):
        return None
    return 1.0 if clip <= 0 else 1.0 / max(1.0, (norm + 1e-6) / clip)


def _common(factors: Sequence[tuple[float, float]], expected: float | None) -> float | None:
    """Return the expected factor as measured, if any parameter has it, else the median by weight."""
    if not factors:
        return None
    if expected is not None:
        near = [entry for entry in factors if abs(entry[0] - expected) <= TOLERANCE * expected]
        if near:
            return max(near, key=lambda entry: entry[1])[0]
    half = sum(weight for _, weight in factors) / 2
    for value, weight in sorted(factors):
        half -= weight
        if half <= 0:
            return value
    return None


def _elementwise(step: Step, pair: Pair, clips: tuple[_Clip, _Clip]) -> str:
    """Check that each side's tensor is its master_grad times the side's factor, and count it."""
    tensors = _tensors(step, pair)
    assert tensors is not None  # they were measured
    masters, clipped = tensors
    if np.array_equal(clipped[0], clipped[1], equal_nan=True):
        step.tally.counts["equal"] += 1
        return "equal"
    expected = []
    for side, master, clip in zip(step.sides, masters, clips, strict=True):
        if clip.common is None and master.any():
            step.tally.counts["left_out"] += 1
            return "left_out"
        expected.append(_normalised(step, side, _times(master, clip.common or 0.0)))
    one, two = (
        _in_units(step, side, values) for side, values in zip(step.sides, clipped, strict=True)
    )
    status, found, _ = contrast(one, two, (expected[0], expected[1]))
    step.tally.counts[status] += 1
    if found is not None:
        step.tally.outcomes.append(_outcome(step, pair, (one, two), *found))
    return status


def _times(master: Float64, factor: float) -> Estimate:
    with np.errstate(invalid="ignore", over="ignore"):
        value = master * factor
        error = gamma(_ROUNDINGS, _FP32.unit_roundoff) * np.abs(value) + 2 * underflow(_FP32)
    return Estimate(value, error, np.zeros(len(value), dtype=np.bool_))


def _seed(step: Step, side: Side) -> float:
    """Return what the gradient of the whole step is divided by, so that two runs compare.

    ``clipped_grad`` holds no loss scale any more, so that is taken out of the seed.
    """
    if step.mode != "boundary":
        return 1.0
    return (side.total_seed(step.step) or 1.0) / _loss_scale(step, side)


def _in_units(step: Step, side: Side, values: Float64) -> Float64:
    return values / _seed(step, side)


def _normalised(step: Step, side: Side, estimate: Estimate) -> Estimate:
    seed = _seed(step, side)
    return estimate if seed == 1.0 else scaled(estimate, seed)


def _loss_scale(step: Step, side: Side) -> float:
    rank = side.align.ranks[0]
    found = number(side.align.step_end(step.step, rank).facts.get("loss_scale"))
    return found if found is not None and math.isfinite(found) and found > 0 else 1.0


def _outcome(
    step: Step,
    pair: Pair,
    values: tuple[Float64, Float64],
    index: int,
    bound: float | None,
    max_abs: float,
) -> Outcome:
    one, two = values
    usable = np.isfinite(one) & np.isfinite(two)
    error, size = _norm(one[usable] - two[usable]), _norm(one[usable])
    return Outcome(
        pair.order,
        Divergence(
            step=step.step,
            micro_step=None,
            boundary=None,
            point="clipped_grad",
            param=pair.name,
            rank=None,
            index=index,
            baseline=float(one[index]),
            candidate=float(two[index]),
            max_abs=max_abs,
            rel_l2=0.0 if error == 0 else (error / size if size > 0 else math.inf),
            bound=bound,
        ),
    )


def _norm(values: Float64) -> float:
    return float(np.linalg.norm(values))


def _compare_factors(
    step: Step, pairs: Sequence[Pair], clips: tuple[_Clip, _Clip]
) -> ClipReport | None:
    """Compare the two runs' factors, what their norms make of one setting taken out.

    Args:
        pairs: the parameters whose clipped_grad differs between the runs.
    """
    if not pairs:
        return None
    one, two = clips[0].measured, clips[1].measured
    if one is None or two is None:
        return None
    allowed = [clip_factor(clip.norm, clips[0].clip) for clip in clips]
    grown = allowed[1] / allowed[0] if allowed[0] and allowed[1] else 1.0
    ours, others = one * grown, two
    if not (math.isfinite(ours) and math.isfinite(others)):
        return None
    if abs(ours - others) <= TOLERANCE * max(abs(ours), abs(others)):
        return None
    for pair in pairs:
        _diverge(step, pair)
    return ClipReport(_describe(step, clips))


def _diverge(step: Step, pair: Pair) -> None:
    """Report a parameter whose factor differs; its elements are where the values are."""
    one, two = (
        gather(side, step.step, None, "clipped_grad", index)
        for side, index in zip(step.sides, (pair.baseline, pair.candidate), strict=True)
    )
    assert one is not None and two is not None  # they were compared
    ours, others = _in_units(step, step.baseline, one), _in_units(step, step.candidate, two)
    error = np.abs(ours - others)
    if not error.any():
        return
    at = int(np.argmax(error > TOLERANCE * np.maximum(np.abs(ours), np.abs(others))))
    finite = error[np.isfinite(error)]
    step.tally.counts["diverged"] += 1
    step.tally.counts["rounding"] -= 1
    step.tally.outcomes.append(
        _outcome(step, pair, (ours, others), at, None, float(finite.max(initial=0.0)))
    )


def _describe(step: Step, clips: tuple[_Clip, _Clip]) -> str:
    """Put the measured factors, and what each run's own settings give, into words."""
    one, two = clips
    text = (
        "Every parameter is multiplied by one factor between master_grad and clipped_grad "
        f"(loss scale taken out): {one.measured:.6g} in the baseline, {two.measured:.6g} in the "
        "candidate"
    )
    if one.norm is not None and two.norm is not None:
        text += f", where the gradient norms are {one.norm:.6g} and {two.norm:.6g}"
    parts = [text]
    headers = [side.align.header(side.align.ranks[0]).effective for side in step.sides]
    key = "gradient_clipping"
    if shown(headers[0], key) != shown(headers[1], key):
        values = f"{shown(headers[0], key)} against {shown(headers[1], key)}"
        parts.append(f"The effective {key} differs: {values}")
    if one.scale != two.scale:
        parts.append(f"The loss scale differs: {one.scale:g} against {two.scale:g}")
    for side, clip in zip(step.sides, clips, strict=True):
        own, found = clip.own, clip.measured
        if own is not None and found is not None and abs(found - own) > TOLERANCE * own:
            parts.append(f"The {side.name}'s own norm and clip value give {own:.6g}")
    return ". ".join(parts) + "."
