"""Law `unscale_clip`: what the optimizer steps with is its gradient, unscaled and clipped.

clipped_grad = master_grad / (loss scale x max(1, (norm + 1e-6) / clip)), the norm being the one that
DeepSpeed clipped with, unscaled; without a clip value it is master_grad / loss scale. The loss scale
is the one that was in effect when the step began. And the norm that DeepSpeed reports is the norm over
all shards, unscaled.

Source: deepspeed 0.19.8, unscale_and_clip_grads (stage_1_and_2.py:3193, stage3.py:2979) and
clip_tensors_by_global_norm (runtime/utils.py) for BF16_Optimizer, clip_grad_norm_ there for stage 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from gradtrace.analysis.align import Event
from gradtrace.analysis.bounds import Estimate, exact, gamma, is_power_of_two, underflow
from gradtrace.analysis.hypotheses import FEWEST_FREE, Hypothesis, weighted
from gradtrace.analysis.laws.common import Lack, Norm, Place, Scene, check, simple_finding
from gradtrace.analysis.laws.norm import LARGEST_NORM, averaged_norm, gradient_norm
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64
from gradtrace.trace.records import Json
from gradtrace.trace.schema import decode_float

LAW = "unscale_clip"
EPSILON: Final = 1e-6  # DeepSpeed adds it to the norm
ROUNDINGS: Final = 7  # norm / scale, + 1e-6, / clip, x scale, 1 / that, the product, and a cast
_NEAR: Final = 1e-2
_U32: Final = DTYPES["float32"].unit_roundoff


@dataclass(frozen=True, slots=True)
class Factor:
    """Hold what master_grad is multiplied with.

    Attributes:
        value: 1 / (loss scale x clip factor).
        scale: the loss scale.
        clips: whether clipping takes a part in it.
        sure: whether ``clips`` is beyond rounding.
        loose: how far the clip factor may lie from the run's own, relative, beside rounding.
        after: the loss scale that the step left behind, or ``None``.
    """

    value: float
    scale: float
    clips: bool
    sure: bool
    loose: float
    after: float | None


def check_param(scene: Scene, param: int) -> None:
    """Check what the optimizer steps with for one parameter, on every rank."""
    alignment = scene.alignment
    for rank in scene.ranks:
        lack = scene.lack("clipped_grad", None, rank) or scene.lack("master_grad", None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            continue
        given = alignment.events(scene.step, None, "master_grad", rank, param)
        events = alignment.events(scene.step, None, "clipped_grad", rank, param)
        if not events and alignment.own_spans(rank, param):
            if alignment.step_end(scene.step, rank).facts.get("overflow"):
                scene.ledger.lack(LAW, Lack("skip", "the step overflowed"))
            else:
                reason = "clipped_grad has no record, and no gap says why"
                scene.ledger.lack(LAW, Lack("gap", reason))
        factor = _factor(scene, rank, given[-1] if given else None)
        for event in events:
            if isinstance(factor, Lack):
                scene.ledger.lack(LAW, factor)
            elif not given:
                scene.ledger.lack(LAW, Lack("gap", "master_grad has no record"))
            else:
                for span in event.spans:
                    start, stop = span.param_offset, span.param_offset + span.numel
                    _check_span(scene, event, given[-1], factor, start, stop)


def check_norm(scene: Scene) -> None:
    """Check the norm that DeepSpeed reports of the step, on every rank."""
    broken: list[tuple[int, float, float]] = []
    for rank in scene.ranks:
        facts = scene.alignment.step_end(scene.step, rank).facts
        scale, found = _number(facts.get("loss_scale")), decode_float(facts.get("grad_norm"))
        if facts.get("overflow") or scale is None or scale <= 0 or found is None:
            continue
        norm = gradient_norm(scene, rank)
        if isinstance(norm, Lack):
            scene.ledger.lack(LAW, norm)
            continue
        expected = norm.value / scale
        if not norm.value < LARGEST_NORM:
            continue  # the gradients' own laws judge what is not finite; float32 squares may overflow
        bound = norm.relative * expected + norm.absolute / scale
        if abs(found - expected) <= bound:
            scene.ledger.passed(LAW, abs(found - expected) / bound if bound else 0.0)
        else:
            broken.append((rank, expected, found))
    for rank, expected, found in broken[:1]:
        single = rank if len(broken) == 1 < len(scene.ranks) else None
        place = Place(LAW, scene.step, None, single, None, "master_grad")
        cause, words = "non_finite", ""
        if math.isfinite(found):
            cause, words = _norm_cause(scene, rank, found / expected if expected else math.inf)
        detail = (
            f"DeepSpeed reports a gradient norm of {found:.6g}; over all shards, the loss scale "
            f"divided out, it is {expected:.6g}{words}."
        )
        simple_finding(scene, place, cause, detail, expected=expected, found=found)
        scene.ledger.checked[LAW] += len(broken) - 1
        scene.ledger.broken[LAW] += len(broken) - 1


def _norm_cause(scene: Scene, rank: int, ratio: float) -> tuple[str, str]:
    facts = scene.alignment.step_end(scene.step, rank).facts
    scale, after = _number(facts.get("loss_scale")), _number(facts.get("loss_scale_after"))
    if scale and scale != 1 and abs(ratio / scale - 1) < _NEAR:
        return "not_unscaled", f": the loss scale ({scale:g}) was not divided out"
    if scale and after and after != scale and abs(ratio * after / scale - 1) < _NEAR:
        return "scaled", f": it was divided by the next step's loss scale ({after:g})"
    return "scaled", ""


def _number(value: Json) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _factor(scene: Scene, rank: int, given: Event | None) -> Factor | Lack:
    facts = scene.alignment.step_end(scene.step, rank).facts
    scale, clip = _number(facts.get("loss_scale")), _number(facts.get("clip"))
    after = _number(facts.get("loss_scale_after"))
    if scale is None or clip is None or scale <= 0:
        return Lack("skip", "the loss scale or the clip value is not known")
    norm: Norm | Lack = Norm(0.0, 0.0, 0.0)
    if clip > 0:
        norm = _clip_norm(scene, rank, given, scale)
    if isinstance(norm, Lack):
        return norm
    return factor_of(scale, clip, norm, after)


def factor_of(scale: float, clip: float, norm: Norm, after: float | None = None) -> Factor:
    """Return what unscaling and clipping multiply with.

    Args:
        scale: the loss scale that was divided out.
        clip: the clip value; 0 for none.
        norm: of the unscaled gradient; unused without a clip value.
        after: the loss scale that the step left behind.
    """
    if clip <= 0:
        return Factor(1 / scale, scale, False, True, 0.0, after)
    ratio = (norm.value + EPSILON) / clip
    loose = norm.relative + norm.absolute / (norm.value + EPSILON)
    if after is not None:
        # DeepSpeed adds the 1e-6 to what the scale that it left behind makes of the norm.
        loose += EPSILON * abs(after / scale - 1) / (norm.value + EPSILON)
    sure = abs(ratio - 1) > gamma(ROUNDINGS, _U32) + loose
    return Factor(1 / (scale * max(1.0, ratio)), scale, ratio > 1, sure, loose, after)


def _clip_norm(scene: Scene, rank: int, given: Event | None, scale: float) -> Norm | Lack:
    """Return the unscaled norm that was clipped with: as it was used, as reported, or recomputed."""
    used = None if given is None else _number(given.record.facts.get("total_norm"))
    reported = _number(scene.alignment.step_end(scene.step, rank).facts.get("grad_norm"))
    value = used / scale if used is not None else reported
    if value is None:
        norm = averaged_norm(scene, rank)
        if isinstance(norm, Lack):
            return norm
        norm = Norm(norm.value / scale, norm.relative, norm.absolute / scale)
    else:
        norm = Norm(value, 0.0, 0.0)
    if not math.isfinite(norm.value) or norm.value < 0:
        return Lack("skip", "the gradient norm was not recorded, or is not finite")
    return norm


def _check_span(
    scene: Scene, event: Event, given: Event, factor: Factor, start: int, stop: int
) -> None:
    alignment, record = scene.alignment, event.record
    found, master = alignment.cut(event, start, stop), alignment.cut(given, start, stop)
    assert found is not None
    if master is None:
        scene.ledger.lack(LAW, Lack("gap", "master_grad holds other elements"))
        return
    estimate = estimate_of(master, factor, event.dtype)
    place = Place(LAW, scene.step, None, record.rank, event.param, "clipped_grad", start)
    context = scene.context(place, event.dtype, event.dtype)

    def hypotheses() -> Iterator[Hypothesis]:
        if factor.scale != 1:
            words = f"The loss scale ({factor.scale:g}) was not divided out."
            yield Hypothesis(
                "not_unscaled",
                words,
                weighted([(factor.scale, estimate)], event.dtype),
                factor=factor.scale,
            )
        if factor.after and factor.after != factor.scale:
            words = (
                f"The gradient was divided by the next step's loss scale ({factor.after:g}), while the "
                f"loss had been multiplied by {factor.scale:g}."
            )
            ratio = factor.scale / factor.after
            yield Hypothesis("scaled", words, weighted([(ratio, estimate)], event.dtype))
        seen = _measured(found, master)
        # One free number explains a few elements whatever happened.
        if seen is not None and np.count_nonzero(master) >= FEWEST_FREE:
            words = (
                f"master_grad was multiplied by {seen:.9g}; the recorded norm, clip value and loss "
                f"scale give {factor.value:.9g}."
            )
            yield Hypothesis(
                "wrong_clip" if factor.clips else "scaled",
                words,
                weighted([(seen, exact(master))], event.dtype),
                factor=seen / factor.value,
            )

    check(scene, place, found, estimate, context=context, hypotheses=hypotheses)


def estimate_of(master: Float64, factor: Factor, dtype: Dtype) -> Estimate:
    """Return what is stepped with, with the bound of docs/laws/unscale_clip.md."""
    with np.errstate(invalid="ignore", over="ignore"):
        value = master * factor.value
        error = np.zeros(len(master))
        if factor.clips or not factor.sure or not is_power_of_two(factor.scale):
            growth = gamma(ROUNDINGS, max(_U32, dtype.unit_roundoff))
            growth += factor.loose * (1 + growth)
            error = growth * np.abs(value) + underflow(dtype)
        elif factor.scale != 1:
            error += underflow(dtype)
        else:  # a product with 1, where only flushing loses something
            error[(master != 0) & (np.abs(master) < dtype.smallest_normal)] = underflow(dtype)
        overflow = np.abs(value) >= dtype.largest
    return Estimate(value, error, overflow)


def _measured(found: Float64, master: Float64) -> float | None:
    """Return the factor that fits best between what was given and what is found."""
    usable = np.isfinite(found) & np.isfinite(master)
    power = float(master[usable] @ master[usable])
    return float(found[usable] @ master[usable]) / power if power > 0 else None
