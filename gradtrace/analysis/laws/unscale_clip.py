"""Law `unscale_clip`: what the optimizer steps with is its gradient, unscaled and clipped.

clipped_grad = master_grad / (loss scale x max(1, (norm + 1e-6) / clip)), the norm being the one that
DeepSpeed recorded, unscaled; without a clip value it is master_grad / loss scale.

Source: deepspeed 0.19.8, unscale_and_clip_grads (stage_1_and_2.py:3193, stage3.py:2979) and
clip_tensors_by_global_norm (runtime/utils.py) for BF16_Optimizer.
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
from gradtrace.analysis.laws.common import Lack, Place, Scene, check
from gradtrace.trace.dtypes import DTYPES, Float64
from gradtrace.trace.records import Json

LAW = "unscale_clip"
EPSILON: Final = 1e-6  # DeepSpeed adds it to the norm
ROUNDINGS: Final = 7  # norm / scale, + 1e-6, / clip, x scale, 1 / that, the product, and a cast
_U32: Final = DTYPES["float32"].unit_roundoff


@dataclass(frozen=True, slots=True)
class _Factor:
    """Hold what master_grad is multiplied with.

    Attributes:
        value: 1 / (loss scale x clip factor).
        scale: the loss scale.
        clips: whether clipping takes a part in it.
        sure: whether ``clips`` is beyond rounding.
    """

    value: float
    scale: float
    clips: bool
    sure: bool


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
        factor = _factor(scene, rank)
        for event in events:
            if isinstance(factor, Lack):
                scene.ledger.lack(LAW, factor)
            elif not given:
                scene.ledger.lack(LAW, Lack("gap", "master_grad has no record"))
            else:
                for span in event.spans:
                    start, stop = span.param_offset, span.param_offset + span.numel
                    _check_span(scene, event, given[-1], factor, start, stop)


def _number(value: Json) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _factor(scene: Scene, rank: int) -> _Factor | Lack:
    facts = scene.alignment.step_end(scene.step, rank).facts
    scale, clip = _number(facts.get("loss_scale")), _number(facts.get("clip"))
    if scale is None or clip is None or scale <= 0:
        return Lack("skip", "the loss scale or the clip value is not known")
    if clip <= 0:
        return _Factor(1 / scale, scale, False, True)
    norm = _number(facts.get("grad_norm"))
    if norm is None or not math.isfinite(norm) or norm < 0:
        return Lack("skip", "the gradient norm was not recorded, or is not finite")
    ratio = (norm + EPSILON) / clip
    sure = abs(ratio - 1) > gamma(ROUNDINGS, _U32)
    return _Factor(1 / (scale * max(1.0, ratio)), scale, ratio > 1, sure)


def _check_span(
    scene: Scene, event: Event, given: Event, factor: _Factor, start: int, stop: int
) -> None:
    alignment, record = scene.alignment, event.record
    found, master = alignment.cut(event, start, stop), alignment.cut(given, start, stop)
    assert found is not None
    if master is None:
        scene.ledger.lack(LAW, Lack("gap", "master_grad holds other elements"))
        return
    estimate = _estimate(master, factor, event)
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


def _estimate(master: Float64, factor: _Factor, event: Event) -> Estimate:
    with np.errstate(invalid="ignore", over="ignore"):
        value = master * factor.value
        error = np.zeros(len(master))
        if factor.clips or not factor.sure or not is_power_of_two(factor.scale):
            growth = gamma(ROUNDINGS, max(_U32, event.dtype.unit_roundoff))
            error = growth * np.abs(value) + underflow(event.dtype)
        elif factor.scale != 1:
            error += underflow(event.dtype)
        overflow = np.abs(value) >= event.dtype.largest
    return Estimate(value, error, overflow)


def _measured(found: Float64, master: Float64) -> float | None:
    """Return the factor that fits best between what was given and what is found."""
    usable = np.isfinite(found) & np.isfinite(master)
    power = float(master[usable] @ master[usable])
    return float(found[usable] @ master[usable]) / power if power > 0 else None
