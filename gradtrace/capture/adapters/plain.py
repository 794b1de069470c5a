"""Declare stage 0 with a plain torch optimizer: DeepSpeed puts nothing around it.

``engine.optimizer`` is then the optimizer of the configuration, or the caller's own: the gradients are
``param.grad``, clipped by the engine just before ``optimizer.step`` where clipping is on.

Source: deepspeed 0.19.8, runtime/engine.py, _do_optimizer_sanity_check (2294) and _take_model_step
(3505).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters import replicated
from gradtrace.capture.adapters.declare import Adapter, Call, Model, Probe, Refusal, Stepped
from gradtrace.capture.snapshot import Piece, Sighting, dtype_name, whole


def _groups(model: Model) -> list[list[torch.nn.Parameter]]:
    return [
        [param for param in group["params"] if param.requires_grad and param.numel()]
        for group in model.optimizer.param_groups
    ]


def _units(model: Model) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    """Yield each group's parameters, those of one dtype at a time."""
    for unit, _, params in _numbered(model):
        yield unit, params


def _numbered(model: Model) -> Iterator[tuple[str, int, list[torch.nn.Parameter]]]:
    for number, params in enumerate(_groups(model)):
        dtypes = list(dict.fromkeys(param.dtype for param in params))
        for dtype in dtypes:
            suffix = f".{dtype_name(dtype)}" if len(dtypes) > 1 else ""
            alike = [param for param in params if param.dtype == dtype]
            yield f"group{number}{suffix}", number, alike


def _shards(model: Model) -> Mapping[str, tuple[Piece, ...]]:
    return {unit: replicated.one_after_another(model, params) for unit, params in _units(model)}


def _gradients(model: Model) -> Iterable[Sighting]:
    for unit, params in _units(model):
        parts = tuple(
            (param.grad, whole(model.of(param), param.grad))
            for param in params
            if param.grad is not None
        )
        if parts:
            yield Sighting(unit, parts)


def _clips(model: Model) -> bool:
    return float(model.engine.gradient_clipping()) > 0


def _before_clipping(model: Model, _: Call) -> Iterable[Sighting]:
    return _gradients(model)


def _unclipped(model: Model, _: Call) -> Iterable[Sighting]:
    return () if _clips(model) else _gradients(model)


def _given(model: Model, _: Call) -> Iterable[Sighting]:
    return _gradients(model)


def _masters(model: Model) -> list[Sighting]:
    return [
        Sighting(unit, tuple((param.data, whole(model.of(param), param)) for param in params))
        for unit, params in _units(model)
    ]


def _stepped(model: Model) -> list[Stepped]:
    return [
        Stepped(
            unit,
            number,
            model.optimizer,
            tuple((param, whole(model.of(param), param)) for param in params),
        )
        for unit, number, params in _numbered(model)
    ]


def _effective(model: Model) -> Mapping[str, Any]:
    return replicated.effective(model)


PLAIN = Adapter(
    name="plain",
    optimizer_class="Optimizer",
    any_subclass=True,
    probes=(
        *replicated.PROBES,
        Probe(
            "master_grad",
            "clip_fp32_gradients",
            "before",
            _before_clipping,
            owner="engine",
            source="0.19.8 engine.py:3502; called where gradient_clipping is not 0",
        ),
        Probe(
            "master_grad",
            "step",
            "before",
            _unclipped,
            source="0.19.8 engine.py:3516; without clipping it is what the optimizer is given",
        ),
        Probe("clipped_grad", "step", "before", _given, source="0.19.8 engine.py:3516"),
    ),
    refusals=(
        *replicated.REFUSALS,
        Refusal(
            "apex amp",
            lambda m: hasattr(m.engine, "amp_enabled") and bool(m.engine.amp_enabled()),
            "it scales the loss and the gradients where no probe of this release looks",
        ),
        Refusal(
            "fp16 autocast at stage 0",
            lambda m: getattr(m.engine, "torch_autocast_z0_gradscaler", None) is not None,
            "torch's GradScaler unscales inside the optimizer's step",
        ),
    ),
    attributes=("param_groups",),
    absent=lambda m: replicated.ABSENT,
    places=lambda m: replicated.places(m, _groups(m)),
    shards=_shards,
    carries=replicated.carries,
    window_open=replicated.window_open,
    dp_group=lambda m: m.engine.data_parallel_group,
    effective=_effective,
    masters=_masters,
    stepped=_stepped,
)
