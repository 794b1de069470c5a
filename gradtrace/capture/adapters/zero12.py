"""Declare ZeRO stages 1 and 2 (``DeepSpeedZeroOptimizer``).

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py; what differs in earlier releases is told by
attributes: ``ipg_buckets`` (a bucket for each communication dtype) came with 0.17.6, and
``all_grad_tensors`` with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters import zero12_collectives as collectives
from gradtrace.capture.adapters import zero12_layout as layout
from gradtrace.capture.adapters import zero12_offload as offload
from gradtrace.capture.adapters.declare import (
    Adapter,
    Call,
    Model,
    Probe,
    Refusal,
    coarsest_wire,
    shards_of,
)
from gradtrace.capture.adapters.optimizer_state import flat_shards
from gradtrace.capture.snapshot import Piece, Sighting, whole
from gradtrace.trace.spans import PADDING


def _accumulated(model: Model, _: Call) -> Iterable[Sighting]:
    optimizer = model.optimizer
    for group in range(len(optimizer.bit16_groups)):
        averaged = optimizer.averaged_gradients.get(group)
        waiting = getattr(optimizer, "all_grad_tensors", {}).get(group)
        parts: Iterable[layout.Part] = ()
        if averaged is not None:
            parts = _from_shard(model, group, averaged)
        elif waiting is not None:
            parts = _from_full(model, group, waiting)
        for alike in layout.by_dtype(parts):
            yield Sighting(f"group{group}", alike)


def _from_shard(model: Model, group: int, averaged: Any) -> Iterable[layout.Part]:
    """Return the parts of a list of tensors that together are this rank's flat shard."""
    flat = getattr(averaged, "flat_partition", None)
    shard = model.shards[f"group{group}"]
    if flat is not None:
        return ((flat, shard),)
    parts: list[layout.Part] = []
    at = 0
    for tensor in averaged:
        end = at + tensor.numel()
        inside = tuple(
            Piece(
                piece.param,
                piece.param_offset + max(at - piece.tensor_offset, 0) * (piece.param != PADDING),
                max(piece.tensor_offset - at, 0),
                min(piece.tensor_offset + piece.numel, end) - max(piece.tensor_offset, at),
            )
            for piece in shard
            if piece.tensor_offset < end and piece.tensor_offset + piece.numel > at
        )
        parts.append((tensor, inside))
        at = end
    return parts


def _from_full(model: Model, group: int, gradients: list[torch.Tensor]) -> Iterable[layout.Part]:
    """Return the parts of full-size gradients, of which only this rank's ranges are reduced."""
    for param, gradient in zip(model.optimizer.params_in_partition[group], gradients, strict=True):
        own = layout.own_range(model, group, param)
        if own is not None:
            start, _, numel = own
            yield gradient, (Piece(model.of(param), start, start, numel),)


def _given(model: Model, call: Call) -> Iterable[Sighting]:
    gradients = call.arguments["grad_groups_flat"]
    for group, master in enumerate(model.optimizer.single_partition_of_fp32_groups):
        if master.grad is not None and master.grad.data_ptr() == gradients[0].data_ptr():
            unit = f"group{group}"
            facts = {"total_norm": call.arguments["total_norm"]}
            yield Sighting(unit, ((gradients[0], model.shards[unit]),), facts)


def _coalesces(model: Model) -> bool:
    """Say whether the caller is inside ``engine.coalesce_grad_reduction`` (since 0.19)."""
    return bool(getattr(model.optimizer, "_coalesce_grad_reduction", False))


def _local_accum(model: Model, _: Call) -> Iterable[Sighting]:
    """See the buffers that no reduction of this backward pass has taken yet."""
    optimizer = model.optimizer
    if _coalesces(model):
        # A separate buffer is filled by the epilogue there, and by hooks everywhere else.
        return () if optimizer.use_grad_accum_attribute else _buffers(model, frozenset())
    if optimizer.partition_gradients:
        return ()  # stage 2 hands each micro-step's own gradient to the reduction
    return _buffers(model, collectives.taken(model))


def _local_accum_filled(model: Model, _: Call) -> Iterable[Sighting]:
    """See the separate buffers that the epilogue has filled, and not reduced."""
    if _coalesces(model) and model.optimizer.use_grad_accum_attribute:
        return _buffers(model, frozenset())
    return ()


def _local_accum_taken(model: Model, call: Call) -> Iterable[Sighting]:
    """See one buffer in the hook that hands it over, before a bucket takes its place.

    Only overlapped reduction begins inside the backward pass; else all are seen at its end.
    """
    optimizer = model.optimizer
    if optimizer.partition_gradients or not optimizer.overlap_comm:
        return ()
    if torch._C._current_graph_task_id() == -1:
        return ()
    return _buffer(model, call.arguments["param"])


def _buffers(model: Model, without: frozenset[int]) -> Iterable[Sighting]:
    for params in model.optimizer.bit16_groups:
        for param in params:
            if model.optimizer.get_param_id(param) not in without:
                yield from _buffer(model, param)


def _buffer(model: Model, param: torch.nn.Parameter) -> Iterable[Sighting]:
    buffer = model.optimizer.get_gradient_for_reduction(param)
    if buffer is not None:
        index = model.of(param)
        yield Sighting(model.names[index], ((buffer, whole(index, buffer)),))


def _carries(model: Model, param: torch.nn.Parameter) -> bool:
    if model.optimizer.use_grad_accum_attribute:
        return getattr(param, "grad_accum", None) is not None
    return param.grad is not None


def _window_open(model: Model) -> bool:
    count = int(model.optimizer.micro_step_id)
    first = count == 0 and int(model.engine.global_steps) == 0
    # Up to 0.15.1 the first window begins at 0, and those after a step at -1 as in later releases.
    if first and not hasattr(
        sys.modules[type(model.optimizer).__module__], "INITIAL_MICRO_STEP_ID"
    ):
        count = -1
    if count >= 0:
        return True
    # Stage 1 with non-contiguous gradients has no hooks, and counts no micro-steps.
    return any(_carries(model, param) for group in model.optimizer.bit16_groups for param in group)


def _absent(model: Model) -> Mapping[str, str]:
    absent = {}
    optimizer = model.optimizer
    # Where it can be told to, stage 2 too accumulates locally before it reduces.
    if optimizer.partition_gradients and not hasattr(optimizer, "_coalesce_grad_reduction"):
        absent["local_accum"] = "stage 2 reduces every micro-step"
    if layout.all_compact(model):
        absent["partition"] = "reduced shards are added straight into an fp32 buffer"
    elif not optimizer.contiguous_gradients:
        absent["partition"] = "reduced gradients stay where autograd left them"
    return absent


def _effective(model: Model) -> Mapping[str, Any]:
    optimizer = model.optimizer
    return {
        "zero_stage": 2 if optimizer.partition_gradients else 1,
        "model_dtype": optimizer.dtype,
        "grad_accum_dtype": optimizer.gradient_accumulation_dtype,
        "communication_dtype": coarsest_wire(model),
        "gradient_average": collectives.averages(model),
        "gradient_predivide_factor": float(optimizer.gradient_predivide_factor),
        "postscale_gradients": bool(optimizer.postscale_gradients),
        "reduce_scatter": bool(optimizer.reduce_scatter),
        "overlap_comm": bool(optimizer.overlap_comm),
        "contiguous_gradients": bool(optimizer.contiguous_gradients),
        "round_robin_gradients": bool(optimizer.round_robin_gradients),
        "reduce_bucket_size": int(optimizer.reduce_bucket_size),
        "gradient_clipping": float(optimizer.clip_grad),
        "offload_optimizer": bool(optimizer.cpu_offload),
    }


def _of_list(method: str, source: str, required: bool = True) -> tuple[Probe, Probe]:
    """Return the probes of a reduction that takes a list of gradients."""
    return (
        Probe(
            "bucket",
            method,
            "before",
            collectives.bucket_of_list,
            arguments=("grads",),
            required=required,
            source=source,
        ),
        Probe(
            "reduced",
            method,
            "after",
            collectives.reduced_list,
            arguments=("grads",),
            required=required,
            stream=collectives.reduction_stream,
            source=source,
        ),
    )


def _mixes_accumulation_dtypes(model: Model) -> bool:
    """Say whether accumulated gradients enter buckets of another 16-bit dtype.

    Source: 0.15.4 and 0.17.6; 0.19 gives the buckets the dtype of ``_gradient_reduction_buffer_dtype``.
    """
    optimizer = model.optimizer
    return (
        bool(optimizer.use_grad_accum_attribute)
        and optimizer.gradient_accumulation_dtype != torch.float32
        and not hasattr(optimizer, "_gradient_reduction_buffer_dtype")
    )


ZERO12 = Adapter(
    name="zero12",
    optimizer_class="DeepSpeedZeroOptimizer",
    probes=(
        Probe(
            "local_accum",
            "_backward_epilogue",
            "before",
            _local_accum,
            owner="engine",
            one_of="local_accum",
            source="0.19.8 engine.py:3153; stage 1 reduces inside it or later",
        ),
        Probe(
            "local_accum",
            "backward",
            "after",
            _local_accum,
            one_of="local_accum",
            source="0.16.0 stage_1_and_2.py; engine.backward runs it, then reduces (to 0.16)",
        ),
        Probe(
            "local_accum",
            "_backward_epilogue",
            "after",
            _local_accum_filled,
            owner="engine",
            required=False,
            source="0.19.8 engine.py:3169, stage_1_and_2.py:3288: while coalescing",
        ),
        Probe(
            "local_accum",
            "reduce_independent_p_g_buckets_and_remove_grads",
            "before",
            _local_accum_taken,
            arguments=("param",),
            attributes=("params_already_reduced",),
            source="0.19.8 stage_1_and_2.py:1414; called by the hook of each parameter (2284)",
        ),
        Probe(
            "bucket",
            "average_tensor",
            "before",
            collectives.bucket,
            arguments=("tensor",),
            attributes=("param_dict", "dp_process_group"),
            source="0.19.8 stage_1_and_2.py:1590",
        ),
        Probe(
            "reduced",
            "average_tensor",
            "after",
            collectives.reduced,
            arguments=("tensor",),
            stream=collectives.reduction_stream,
            source="0.19.8 stage_1_and_2.py:1590; the reduction runs on reduction_stream (1607)",
        ),
        *_of_list("buffered_reduce_fallback", "0.19.8 stage_1_and_2.py:2538"),
        *_of_list(
            "_buffered_reduce_fallback_preserving_fp32",
            "0.19.8 stage_1_and_2.py:2510; with a separate fp32 buffer, since 0.19",
            required=False,
        ),
        Probe(
            "partition",
            "copy_grads_in_partition",
            "before",
            offload.partition_before,
            arguments=("param",),
            source="0.19.8 stage_1_and_2.py:2160; the host buffer is added to it in place",
        ),
        Probe(
            "partition",
            "copy_grads_in_partition",
            "after",
            offload.partition_after,
            arguments=("param",),
            stream=collectives.reduction_stream,
            source="0.19.8 stage_1_and_2.py:2142; called under reduction_stream (2244)",
        ),
        Probe(
            "accumulated",
            "async_accumulate_grad_in_cpu_via_gpu",
            "after",
            offload.host_accumulated,
            arguments=("param",),
            source="0.19.8 stage_1_and_2.py:1809; called on the stream of the reduction",
        ),
        Probe(
            "accumulated",
            "async_inplace_copy_grad_to_fp32_buffer_from_gpu",
            "after",
            offload.host_master,
            arguments=("param",),
            source="0.19.8 stage_1_and_2.py:1888; called on the stream of the reduction",
        ),
        Probe(
            "accumulated",
            "independent_gradient_partition_epilogue",
            "after",
            _accumulated,
            source="0.19.8 stage_1_and_2.py:1016",
        ),
        Probe(
            "accumulated",
            "finalize_gradient_accumulation_boundary",
            "after",
            _accumulated,
            required=False,
            source="0.19.8 stage_1_and_2.py:1072; unmanaged accumulation only, since 0.19",
        ),
        Probe(
            "master_grad",
            "unscale_and_clip_grads",
            "before",
            _given,
            arguments=("grad_groups_flat", "total_norm"),
            source="0.19.8 stage_1_and_2.py:3193",
        ),
        Probe(
            "clipped_grad",
            "unscale_and_clip_grads",
            "after",
            _given,
            arguments=("grad_groups_flat", "total_norm"),
            source="0.19.8 stage_1_and_2.py:3193",
        ),
    ),
    refusals=(
        Refusal(
            "a 16-bit grad_accum_dtype that is not the model's",
            _mixes_accumulation_dtypes,
            "this release copies it into buckets of the model's dtype, which no law allows for",
        ),
        Refusal(
            "torch_autocast in fp16",
            lambda m: getattr(m.optimizer, "torch_autocast_gradscaler", None) is not None,
            "torch's GradScaler unscales, and may skip, inside the wrapped optimizer's step",
        ),
        Refusal(
            "mixture-of-experts layers",
            lambda m: bool(m.optimizer.has_moe_layers),
            "expert gradients are reduced over other groups",
        ),
        Refusal(
            "the Muon optimizer",
            lambda m: "muon" in type(m.optimizer.optimizer).__name__.lower(),
            "it replaces gradients by updates inside the partition",
        ),
    ),
    attributes=(
        "real_dp_process_group",
        "bit16_groups",
        "params_in_partition",
        "partition_size",
        "grad_start_offset",
        "grad_partition_insertion_offset",
        "averaged_gradients",
        "single_partition_of_fp32_groups",
        "partition_gradients",
        "use_grad_accum_attribute",
        "get_gradient_for_reduction",
        "get_param_id",
        "micro_step_id",
    ),
    absent=_absent,
    places=layout.places,
    shards=layout.shards,
    carries=_carries,
    window_open=_window_open,
    dp_group=lambda m: m.optimizer.dp_process_group,
    effective=_effective,
    masters=lambda m: shards_of(m, "group", m.optimizer.single_partition_of_fp32_groups),
    stepped=lambda m: flat_shards(m, "group", m.optimizer.single_partition_of_fp32_groups),
)
