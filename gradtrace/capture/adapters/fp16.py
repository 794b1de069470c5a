"""Declare stage 0 with bf16 or fp16 weights: ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``.

Both keep an fp32 copy of the weights on every rank, convert the reduced ``param.grad`` to fp32 and
divide it by the loss scale and the clip factor. The fused one (FusedAdam) has one flat fp32 buffer a
group, the other an fp32 tensor a parameter.

Source: deepspeed 0.19.8, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradtrace.capture.adapters import replicated
from gradtrace.capture.adapters.declare import (
    Adapter,
    Call,
    Model,
    Probe,
    Refusal,
    Sight,
    Stepped,
    shards_of,
)
from gradtrace.capture.adapters.optimizer_state import flat_shards
from gradtrace.capture.snapshot import Piece, Sighting, whole


def _shards(model: Model) -> Mapping[str, tuple[Piece, ...]]:
    return {
        f"group{number}": replicated.one_after_another(model, params)
        for number, params in enumerate(model.optimizer.fp16_groups)
    }


def _flat(model: Model, call: Call) -> Iterable[Sighting]:
    facts = {"total_norm": call.arguments["total_norm"]}
    for number, gradient in enumerate(call.arguments["grad_groups_flat"]):
        unit = f"group{number}"
        yield Sighting(unit, ((gradient, model.shards[unit]),), facts)


def _each(model: Model, call: Call) -> Iterable[Sighting]:
    facts = {"total_norm": call.arguments["total_norm"]}
    optimizer = model.optimizer
    for number, (masters, params) in enumerate(
        zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
    ):
        parts = tuple(
            (master.grad, whole(model.of(param), master.grad))
            for master, param in zip(masters, params, strict=True)
            if master.grad is not None
        )
        if parts:
            yield Sighting(f"group{number}", parts, facts)


def _each_stepped(model: Model) -> list[Stepped]:
    optimizer = model.optimizer
    return [
        Stepped(
            f"group{number}",
            number,
            optimizer.optimizer,
            tuple(
                (master, whole(model.of(param), master))
                for master, param in zip(masters, params, strict=True)
            ),
        )
        for number, (masters, params) in enumerate(
            zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        )
        if masters
    ]


def _each_master(model: Model) -> list[Sighting]:
    return [
        Sighting(one.unit, tuple((master.data, pieces) for master, pieces in one.parts))
        for one in _each_stepped(model)
    ]


def _effective(model: Model) -> dict[str, Any]:
    optimizer = model.optimizer
    return {
        **replicated.effective(model),
        "gradient_clipping": float(optimizer.clip_grad),
    }


def _unscaling(sight: Sight, source: str, *arguments: str) -> tuple[Probe, ...]:
    """Declare what ``unscale_and_clip_grads`` is given, and what it makes of it in place."""
    method, names = "unscale_and_clip_grads", (*arguments, "total_norm")
    return (
        Probe("master_grad", method, "before", sight, source, arguments=names),
        Probe("clipped_grad", method, "after", sight, source, arguments=names),
    )


FP16 = Adapter(
    name="fp16",
    optimizer_class="FP16_Optimizer",
    probes=(
        *replicated.PROBES,
        *_unscaling(_flat, "0.19.8 fused_optimizer.py:374", "grad_groups_flat"),
    ),
    refusals=(
        *replicated.REFUSALS,
        Refusal(
            "legacy_fusion of the optimizer",
            lambda m: bool(m.optimizer.fused_adam_legacy),
            "its kernel unscales the gradients while it steps",
        ),
    ),
    attributes=("fp16_groups", "fp32_groups_flat", "clip_grad"),
    absent=lambda m: replicated.ABSENT,
    places=lambda m: replicated.places(m, m.optimizer.fp16_groups),
    shards=_shards,
    carries=replicated.carries,
    window_open=replicated.window_open,
    dp_group=lambda m: m.engine.data_parallel_group,
    effective=_effective,
    masters=lambda m: shards_of(m, "group", m.optimizer.fp32_groups_flat),
    stepped=lambda m: flat_shards(m, "group", m.optimizer.fp32_groups_flat),
)

FP16_UNFUSED = Adapter(
    name="fp16_unfused",
    optimizer_class="FP16_UnfusedOptimizer",
    probes=(
        *replicated.PROBES,
        *_unscaling(_each, "0.19.8 unfused_optimizer.py:243"),
    ),
    refusals=(
        *replicated.REFUSALS,
        Refusal(
            "the LAMB optimizer under FP16_UnfusedOptimizer",
            lambda m: bool(m.optimizer.fused_lamb_legacy),
            "its kernel unscales the gradients while it steps",
        ),
    ),
    attributes=("fp16_groups", "fp32_groups", "clip_grad"),
    absent=lambda m: replicated.ABSENT,
    places=lambda m: replicated.places(m, m.optimizer.fp16_groups),
    shards=_shards,
    carries=replicated.carries,
    window_open=replicated.window_open,
    dp_group=lambda m: m.engine.data_parallel_group,
    effective=_effective,
    masters=_each_master,
    stepped=_each_stepped,
)
