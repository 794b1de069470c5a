"""Law `seed`: the gradient at the caller's loss is what was asked for.

seed = loss scale x (1/accumulation steps, unless it was switched off), the same on all ranks, and
what the optimizer divides out later is the same loss scale.
"""

from __future__ import annotations

import math
from typing import Any

from gradtrace.analysis.bounds import gamma
from gradtrace.analysis.laws.common import Lack, Place, Scene, coarsest, simple_finding
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.records import Facts, Record
from gradtrace.trace.schema import decode_float

LAW = "seed"
ROUNDINGS = 4  # 1/n, the scale, their product, and the division in the loss's dtype


def check(scene: Scene) -> None:
    """Check every micro-step on every rank."""
    for micro_step in scene.micro_steps:
        broken: list[tuple[int, str, str, float, float]] = []
        for rank in scene.ranks:
            lack = scene.lack("loss", micro_step, rank)
            records = scene.alignment.records(scene.step, "loss", rank, micro_step)
            if lack is not None or not records:
                scene.ledger.lack(LAW, lack or Lack("gap", "loss has no record"))
                continue
            result = _judge(scene, rank, records[-1])
            if isinstance(result, Lack):
                scene.ledger.lack(LAW, result)
            elif result is None:
                scene.ledger.passed(LAW)
            else:
                broken.append((rank, *result))
        for cause in dict.fromkeys(entry[1] for entry in broken):
            alike = [entry for entry in broken if entry[1] == cause]
            rank, _, detail, expected, found = alike[0]
            everywhere = " on every rank" if len(alike) == len(scene.ranks) > 1 else ""
            single = rank if len(alike) == 1 else None
            place = Place(LAW, scene.step, micro_step, single, None, "loss")
            detail = detail.replace("@", everywhere)
            simple_finding(scene, place, cause, detail, expected=expected, found=found)
            for _ in alike[1:]:
                scene.ledger.checked[LAW] += 1
                scene.ledger.broken[LAW] += 1


def short_window(scene: Scene) -> str | None:
    """Say that a step held more or fewer micro-steps than each of its losses was divided by.

    That breaks no law: a caller may end a window where he likes. But the gradient is not the mean.
    """
    rank = scene.ranks[0]
    ran = len(scene.micro_steps)
    last: Record | None = None
    for micro_step in scene.micro_steps:
        records = scene.alignment.records(scene.step, "loss", rank, micro_step)
        facts = records[-1].facts if records else {}
        scale, gas = _number(facts.get("loss_scale")), _number(facts.get("gas"))
        if not scale or not gas or gas in {1, ran} or scene.partial:
            return None
        seeds, asked = _seeds(facts, scale / gas, gas)
        tolerance = _tolerance(scene, rank, records[-1])
        if not seeds or any(not abs(seed - asked) <= tolerance * asked for seed in seeds):
            return None
        last = records[-1]
    if last is None:
        return None
    claim = last.facts.get("boundary")
    ended = {True: "claimed", False: "not claimed"}.get(claim) if isinstance(claim, bool) else None
    said = "" if ended is None else f" (a boundary was {ended} at the last)"
    gas = last.facts.get("gas")
    return (
        f"step {scene.step} held {ran} micro-steps{said}, and the loss of each was divided by {gas}: "
        f"the gradient is {ran}/{gas} of their mean"
    )


def _number(value: Any) -> float | None:
    try:
        return decode_float(value)
    except ValueError:
        return None


def _tolerance(scene: Scene, rank: int, record: Record) -> float:
    """Return the relative error that rounding explains; the loss's own dtype is not recorded."""
    names = [name for name in record.facts.get("output_dtypes") or () if name in DTYPES]
    settings = scene.settings_dtypes(rank, "model_dtype", "communication_dtype")
    dtype = coarsest(DTYPES["float32"], *settings, *(DTYPES[name] for name in names))
    return gamma(ROUNDINGS, dtype.unit_roundoff)


def _judge(scene: Scene, rank: int, record: Record) -> tuple[str, str, float, float] | Lack | None:
    """Return ``(cause, detail, expected, found)``, ``None`` if the law holds, or why it is open."""
    facts = record.facts
    scale, gas = _number(facts.get("loss_scale")), _number(facts.get("gas"))
    if not scale or not gas:
        return Lack("skip", "the loss scale or the accumulation steps are not known")
    tolerance = _tolerance(scene, rank, record)
    divided = facts.get("scale_wrt_gas") is not False
    seeds, asked = _seeds(facts, scale / gas if divided else scale, gas)
    if not seeds:
        return Lack("skip", "the gradient at the loss was not seen")
    for seed in seeds:
        if not math.isfinite(seed):
            return "non_finite", f"The gradient at the loss is {seed}@.", asked, seed
        hidden = facts.get("path") == "engine.backward" and facts.get("scale_wrt_gas") is None
        if hidden and abs(seed - scale) <= tolerance * scale:
            continue  # somebody wrapped engine.backward: whether it was told not to divide is unknown
        if not abs(seed - asked) <= tolerance * abs(asked):
            cause, words = _cause(seed / asked, gas, scale, divided)
            detail = f"The gradient at the loss is {seed:.6g}@; {words}."
            apart = dict.fromkeys(
                f"{s:.6g}" for s in seeds if abs(s - seed) > tolerance * abs(seed)
            )
            if apart:
                detail += f" Through other outputs of the model it is {', '.join(apart)}."
            return cause, detail, asked, seed
    return _unscaling(scene, rank, scale, tolerance)


def _seeds(facts: Facts, asked: float, gas: float) -> tuple[list[float], float]:
    """Return the measured seed along every output of the model, and what it should be.

    DeepSpeed divides by the accumulation steps either before the caller's loss (0.19.8) or in the
    hook on each output (0.18.3 to 0.19.2), so it is their product that is asked for. Under
    ``tensor.backward`` the caller may have scaled the loss as he liked before the model's output was
    reached: there the factor of the hook alone is judged. A factor of 0/0 passed no gradient.
    """
    measured = [_number(value) for value in facts.get("output_factors") or ()]
    factors = [f for f in measured if f is not None and not math.isnan(f)]
    if facts.get("path") != "engine.backward":
        return factors, 1 / gas
    loss_grad = _number(facts.get("loss_grad"))
    if loss_grad is None or (measured and not factors):
        return [], asked
    return [loss_grad * factor for factor in factors or [1.0]], asked


def _unscaling(
    scene: Scene, rank: int, scale: float, tolerance: float
) -> tuple[str, str, float, float] | None:
    end = scene.alignment.step_end(scene.step, rank)
    divided_out = _number(end.facts.get("loss_scale"))
    if divided_out is None or end.facts.get("overflow"):
        return None
    if abs(divided_out - scale) <= tolerance * scale:
        return None
    return (
        "not_unscaled",
        f"The loss was multiplied by {scale:.6g}, but the step divides by {divided_out:.6g}@.",
        divided_out,
        scale,
    )


def _cause(ratio: float, gas: float, scale: float, divided: bool) -> tuple[str, str]:
    """Name the factor between what was seen and what was asked for."""

    def is_near(value: float) -> bool:
        return abs(ratio / value - 1) < 1e-2

    asked = "of what was asked for"
    if ratio == 0:
        return "zeroed", f"that is nothing {asked}"
    if is_near(-1):
        return "sign_flipped", f"that is the opposite {asked}"
    if gas != 1 and is_near(1 / gas):
        if divided:
            return "averaged_twice", f"it was divided by the accumulation steps ({gas:g}) twice"
        return "scaled", (
            f"that is 1/{gas:g} {asked}: divided by the accumulation steps, "
            "which scale_wrt_gas=False forbids"
        )
    if gas != 1 and is_near(gas):
        return "not_averaged", f"it was not divided by the accumulation steps ({gas:g})"
    if scale != 1 and is_near(1 / scale):
        return "scaled", f"that is 1/{scale:g} {asked}: the loss scale is missing"
    if scale != 1 and is_near(scale):
        return "scaled", f"that is {scale:g} times {asked[3:]}: the loss scale is there twice"
    return "scaled", f"that is {ratio:.6g} times {asked[3:]}"
