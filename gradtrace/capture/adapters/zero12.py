"""Declare ZeRO stages 1 and 2 (``DeepSpeedZeroOptimizer``).

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py; what differs in earlier releases is told by
attributes: ``ipg_buckets`` (a bucket for each communication dtype) came with 0.17.6, and
``all_grad_tensors`` with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters.declare import Adapter, Call, Model, Probe, Refusal, fill_padding
from gradtrace.capture.snapshot import Piece, Sighting, whole
from gradtrace.trace.spans import PADDING


def _rank(model: Model, group: int) -> int:
    return torch.distributed.get_rank(group=model.optimizer.real_dp_process_group[group])


def _own(model: Model, group: int, param: Any) -> tuple[int, int, int] | None:
    """Return (offset in the parameter, offset in the shard, numel) of this rank's range.

    Read from the partition's own tables: under ``round_robin_gradients`` DeepSpeed's
    ``_hp_mapping`` and safe_get_full_* name other parameters' data.
    """
    optimizer = model.optimizer
    rank, number = _rank(model, group), optimizer.get_param_id(param)
    start = optimizer.grad_start_offset[group][rank].get(number)
    if start is None:
        return None
    into = optimizer.grad_partition_insertion_offset[group][rank][number]
    numel = min(param.numel() - start, int(optimizer.partition_size[group]) - into)
    return int(start), int(into), int(numel)


def _averages(model: Model) -> bool:
    """Say whether a reduction divides by the world size; the setting came with 0.19.3."""
    return bool(getattr(model.optimizer, "gradient_average", True))


def _reduction_stream(model: Model) -> Any:
    """Return the stream that reductions run on; it exists, unused, without ``overlap_comm`` too."""
    return model.optimizer.reduction_stream if model.optimizer.overlap_comm else None


def _places(model: Model) -> Mapping[int, tuple[int, int]]:
    return {
        model.of(param): (group, position)
        for group, params in enumerate(model.optimizer.bit16_groups)
        for position, param in enumerate(params)
    }


def _shard(model: Model, group: int) -> tuple[Piece, ...]:
    pieces = []
    for param in model.optimizer.bit16_groups[group]:
        own = _own(model, group, param)
        if own is not None:
            start, into, numel = own
            pieces.append(Piece(model.of(param), start, into, numel))
    return fill_padding(pieces, int(model.optimizer.partition_size[group]), PADDING)


def _shards(model: Model) -> Mapping[str, tuple[Piece, ...]]:
    return {
        f"group{group}": _shard(model, group) for group in range(len(model.optimizer.bit16_groups))
    }


def _bucket_members(model: Model, dtype: torch.dtype) -> Iterator[tuple[int, Any, int]]:
    """Yield (group, parameter, offset in the bucket) in the bucket's own order."""
    optimizer = model.optimizer
    if hasattr(optimizer, "ipg_buckets"):
        entries = optimizer.ipg_buckets[dtype].params
    else:
        entries = optimizer.params_in_ipg_bucket
    offset = 0
    for entry in entries:
        group, param = entry[0], optimizer.param_dict[entry[2]]
        yield group, param, offset
        offset += param.numel()


def _bucket_dtype(model: Model, call: Call) -> torch.dtype:
    dtype: torch.dtype = call.arguments.get(
        "communication_data_type", model.optimizer.communication_data_type
    )
    return dtype


def _bucket(model: Model, call: Call) -> Iterable[Sighting]:
    dtype = _bucket_dtype(model, call)
    pieces = tuple(
        Piece(model.of(param), 0, offset, param.numel())
        for _, param, offset in _bucket_members(model, dtype)
    )
    group = model.optimizer.dp_process_group
    facts = {
        "comm_dtype": dtype,
        "ranks": torch.distributed.get_process_group_ranks(group),
        "op": "mean" if _averages(model) else "sum",
    }
    yield Sighting(_unit(dtype), ((call.arguments["tensor"], pieces),), facts)


def _reduced(model: Model, call: Call) -> Iterable[Sighting]:
    # With reduce_scatter only the own ranges are defined: foreign slices hold this rank's gradient
    # divided by the world size, or the mean, depending on how the bucket was split (measured).
    dtype = _bucket_dtype(model, call)
    pieces = []
    for group, param, offset in _bucket_members(model, dtype):
        if not model.optimizer.reduce_scatter:
            pieces.append(Piece(model.of(param), 0, offset, param.numel()))
            continue
        own = _own(model, group, param)
        if own is not None:
            start, _, numel = own
            pieces.append(Piece(model.of(param), start, offset + start, numel))
    if pieces:
        yield Sighting(_unit(dtype), ((call.arguments["tensor"], tuple(pieces)),))


def _unit(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _partition(model: Model, call: Call) -> Iterable[Sighting]:
    param = call.arguments["param"]
    group, _ = model.place(param)
    own = _own(model, group, param)
    gradient = model.optimizer.get_gradient_for_reduction(param)
    if own is not None and gradient is not None and not _compact(model, group):
        start, _, numel = own
        index = model.of(param)
        yield Sighting(model.names[index], ((gradient, (Piece(index, start, start, numel),)),))


def _compact(model: Model, group: int) -> bool:
    """Say whether reduced shards are added straight into one flat fp32 buffer (since 0.19)."""
    test = getattr(model.optimizer, "_use_compact_grad_partition_buffer", None)
    return bool(test is not None and test(group))


def _accumulated(model: Model, _: Call) -> Iterable[Sighting]:
    optimizer = model.optimizer
    for group in range(len(optimizer.bit16_groups)):
        averaged = optimizer.averaged_gradients.get(group)
        waiting = getattr(optimizer, "all_grad_tensors", {}).get(group)
        if averaged is not None:
            yield Sighting(f"group{group}", _from_shard(model, group, averaged))
        elif waiting is not None:
            yield Sighting(f"group{group}", _from_full(model, group, waiting))


def _from_shard(model: Model, group: int, averaged: Any) -> Any:
    """Return the parts of a list of tensors that together are this rank's flat shard."""
    flat = getattr(averaged, "flat_partition", None)
    shard = model.shards[f"group{group}"]
    if flat is not None:
        return ((flat, shard),)
    parts = []
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
    return tuple(parts)


def _from_full(model: Model, group: int, gradients: list[torch.Tensor]) -> Any:
    """Return the parts of full-size gradients, of which only this rank's ranges are reduced."""
    parts = []
    for param, gradient in zip(model.optimizer.params_in_partition[group], gradients, strict=True):
        own = _own(model, group, param)
        if own is not None:
            start, _, numel = own
            parts.append((gradient, (Piece(model.of(param), start, start, numel),)))
    return tuple(parts)


def _given(model: Model, call: Call) -> Iterable[Sighting]:
    gradients = call.arguments["grad_groups_flat"]
    for group, master in enumerate(model.optimizer.single_partition_of_fp32_groups):
        if master.grad is not None and master.grad.data_ptr() == gradients[0].data_ptr():
            unit = f"group{group}"
            facts = {"total_norm": call.arguments["total_norm"]}
            yield Sighting(unit, ((gradients[0], model.shards[unit]),), facts)


def _local_accum(model: Model, _: Call) -> Iterable[Sighting]:
    if model.optimizer.partition_gradients:
        return  # stage 2 hands each micro-step's own gradient to the reduction
    for params in model.optimizer.bit16_groups:
        for param in params:
            buffer = model.optimizer.get_gradient_for_reduction(param)
            if buffer is not None:
                index = model.of(param)
                yield Sighting(model.names[index], ((buffer, whole(index, buffer)),))


def _carries(model: Model, param: torch.nn.Parameter) -> bool:
    if model.optimizer.use_grad_accum_attribute:
        return getattr(param, "grad_accum", None) is not None
    return param.grad is not None


def _window_open(model: Model) -> bool:
    return int(model.optimizer.micro_step_id) >= 0


def _absent(model: Model) -> Mapping[str, str]:
    absent = {}
    if model.optimizer.partition_gradients:
        absent["local_accum"] = "stage 2 reduces every micro-step"
    if all(_compact(model, group) for group in range(len(model.optimizer.bit16_groups))):
        absent["partition"] = "reduced shards are added straight into an fp32 buffer"
    return absent


def _effective(model: Model) -> Mapping[str, Any]:
    optimizer = model.optimizer
    return {
        "zero_stage": 2 if optimizer.partition_gradients else 1,
        "model_dtype": optimizer.dtype,
        "grad_accum_dtype": optimizer.gradient_accumulation_dtype,
        "communication_dtype": optimizer.communication_data_type,
        "gradient_average": _averages(model),
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
            source="0.19.8 engine.py:3153; stage 1 reduces inside it or later",
        ),
        Probe(
            "bucket",
            "average_tensor",
            "before",
            _bucket,
            arguments=("tensor",),
            attributes=("param_dict", "dp_process_group"),
            source="0.19.8 stage_1_and_2.py:1590",
        ),
        Probe(
            "reduced",
            "average_tensor",
            "after",
            _reduced,
            arguments=("tensor",),
            stream=_reduction_stream,
            source="0.19.8 stage_1_and_2.py:1590; the reduction runs on reduction_stream (1607)",
        ),
        Probe(
            "partition",
            "copy_grads_in_partition",
            "after",
            _partition,
            arguments=("param",),
            stream=_reduction_stream,
            source="0.19.8 stage_1_and_2.py:2142; called under reduction_stream (2244)",
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
            "contiguous_gradients: false",
            lambda m: not m.optimizer.contiguous_gradients,
            "its reduction goes through buffers that this release has no probe for",
        ),
        Refusal(
            "offload_optimizer",
            lambda m: bool(m.optimizer.cpu_offload),
            "gradients accumulate in host buffers that this release has no probe for",
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
    places=_places,
    shards=_shards,
    carries=_carries,
    window_open=_window_open,
    dp_group=lambda m: m.optimizer.dp_process_group,
    effective=_effective,
)
