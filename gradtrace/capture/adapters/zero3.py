"""Declare ZeRO stage 3 (``DeepSpeedZeroOptimizer_Stage3``).

Source: deepspeed 0.19.8, runtime/zero/stage3.py. Rank r of n holds elements ``[r*k, (r+1)*k)`` of
the flattened parameter, ``k = partition_numel()``, the tail of the last rank being padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters.declare import Adapter, Call, Model, Probe, Refusal, fill_padding
from gradtrace.capture.snapshot import Piece, Sighting, whole
from gradtrace.trace.spans import PADDING

_MANGLED = "_DeepSpeedZeroOptimizer_Stage3__"


def _own(model: Model, param: Any) -> tuple[int, int]:
    """Return (first element, numel) of this rank's part of the flattened parameter."""
    rank = torch.distributed.get_rank(group=_group(model))
    start = min(rank * int(param.partition_numel()), int(param.ds_numel))
    return start, min(int(param.partition_numel()), int(param.ds_numel) - start)


def _group(model: Model) -> Any:
    return model.optimizer.dp_process_group


def _places(model: Model) -> Mapping[int, tuple[int, int]]:
    optimizer = model.optimizer
    return {
        model.of(param): (int(optimizer.sub_group_to_group_id[number]), position)
        for number, params in enumerate(optimizer.fp16_groups)
        for position, param in enumerate(params)
    }


def _shard(model: Model, number: int) -> tuple[Piece, ...]:
    optimizer = model.optimizer
    pieces = []
    for param in optimizer.fp16_groups[number]:
        _, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
        start, numel = _own(model, param)
        if numel > 0:
            pieces.append(Piece(model.of(param), start, int(offset), numel))
    total = sum(int(param.partition_numel()) for param in optimizer.fp16_groups[number])
    return fill_padding(pieces, total, PADDING)


def _shards(model: Model) -> Mapping[str, tuple[Piece, ...]]:
    return {
        f"sub_group{number}": _shard(model, number)
        for number in range(len(model.optimizer.fp16_groups))
    }


def _bucket(model: Model, call: Call) -> Iterable[Sighting]:
    dtype = call.arguments.get("communication_data_type", model.optimizer.communication_data_type)
    if "params_to_reduce" in call.arguments:
        params = call.arguments["params_to_reduce"]
    elif hasattr(model.optimizer, "ipg_buckets"):
        params = model.optimizer.ipg_buckets[dtype].params
    else:
        params = model.optimizer.params_in_ipg_bucket
    facts = {
        "comm_dtype": dtype,
        "ranks": torch.distributed.get_process_group_ranks(_group(model)),
        "op": "mean",
    }
    parts = tuple((param.grad, whole(model.of(param), param.grad)) for param in params)
    yield Sighting(str(dtype).removeprefix("torch."), parts, facts)


def _partition(model: Model, call: Call) -> Iterable[Sighting]:
    parts = []
    for param, part in zip(
        call.arguments["params_to_release"], call.arguments["grad_partitions"], strict=True
    ):
        start, numel = _own(model, param)
        if numel > 0:
            parts.append((part, (Piece(model.of(param), start, 0, numel),)))
    if parts:
        yield Sighting("shards", tuple(parts))


def _accumulated(model: Model, call: Call) -> Iterable[Sighting]:
    buffers = getattr(model.optimizer, _MANGLED + "param_id_to_grad_partition")
    parts = []
    for param in call.arguments["params_to_release"]:
        start, numel = _own(model, param)
        if numel > 0:
            parts.append((buffers[param.ds_id], (Piece(model.of(param), start, 0, numel),)))
    if parts:
        yield Sighting("shards", tuple(parts))


def _given(model: Model, call: Call) -> Iterable[Sighting]:
    number = call.arguments["sub_group_id"]
    gradient = model.optimizer.fp32_partitioned_groups_flat[number].grad
    if gradient is not None:
        unit = f"sub_group{number}"
        facts = {"total_norm": call.arguments["total_norm"]}
        yield Sighting(unit, ((gradient, model.shards[unit]),), facts)


def _effective(model: Model) -> Mapping[str, Any]:
    optimizer = model.optimizer
    return {
        "zero_stage": 3,
        "model_dtype": optimizer.dtype,
        "grad_accum_dtype": optimizer.gradient_accumulation_dtype,
        "communication_dtype": optimizer.communication_data_type,
        "gradient_average": True,
        "gradient_predivide_factor": float(optimizer.gradient_predivide_factor),
        "postscale_gradients": bool(optimizer.postscale_gradients),
        "reduce_scatter": bool(optimizer.reduce_scatter),
        "overlap_comm": bool(model.engine.zero_overlap_comm()),
        "contiguous_gradients": bool(optimizer.contiguous_gradients),
        "round_robin_gradients": False,
        "reduce_bucket_size": int(optimizer.reduce_bucket_size),
        "gradient_clipping": float(optimizer.clip_grad),
        "offload_optimizer": bool(optimizer.offload_optimizer),
    }


def _several_process_groups(model: Model) -> bool:
    mine = torch.distributed.get_process_group_ranks(_group(model))
    return any(
        torch.distributed.get_process_group_ranks(param.ds_process_group) != mine
        for params in model.optimizer.fp16_groups
        for param in params
        if getattr(param, "ds_process_group", None) is not None
    )


ZERO3 = Adapter(
    name="zero3",
    optimizer_class="DeepSpeedZeroOptimizer_Stage3",
    probes=(
        Probe(
            "bucket",
            _MANGLED + "avg_scatter_grads",
            "before",
            _bucket,
            arguments=("params_to_reduce",),
            source="0.19.8 stage3.py:1912; called under reduce_and_partition_stream (1669)",
        ),
        Probe(
            "bucket",
            _MANGLED + "avg_scatter_contiguous_grads",
            "before",
            _bucket,
            arguments=("buffer_to_reduce",),
            source="0.19.8 stage3.py:1863; the path of reduce_scatter: false",
        ),
        Probe(
            "partition",
            "partition_grads",
            "before",
            _partition,
            arguments=("params_to_release", "grad_partitions"),
            source="0.19.8 stage3.py:2006; same signature since 0.12.5",
        ),
        Probe(
            "accumulated",
            "partition_grads",
            "after",
            _accumulated,
            arguments=("params_to_release",),
            attributes=(_MANGLED + "param_id_to_grad_partition",),
            source="0.19.8 stage3.py:2006",
        ),
        Probe(
            "master_grad",
            "unscale_and_clip_grads",
            "before",
            _given,
            arguments=("sub_group_id", "total_norm"),
            source="0.19.8 stage3.py:2979",
        ),
        Probe(
            "clipped_grad",
            "unscale_and_clip_grads",
            "after",
            _given,
            arguments=("sub_group_id", "total_norm"),
            source="0.19.8 stage3.py:2979",
        ),
    ),
    refusals=(
        Refusal(
            "offload_optimizer",
            lambda m: bool(m.optimizer.offload_optimizer),
            "gradients go to host buffers that this release has no probe for",
        ),
        Refusal(
            "offload_param",
            lambda m: bool(getattr(m.optimizer, "offload_param", False)),
            "this release was not tested with parameters that live on the host",
        ),
        Refusal(
            "zero_quantized_gradients",
            lambda m: getattr(m.optimizer, "all2all_process_group", None) is not None,
            "its reduction quantizes, and no law of this release allows for that",
        ),
        Refusal(
            "parameters partitioned over several groups (MiCS, hpZ, experts)",
            _several_process_groups,
            "their gradients are reduced in two steps",
        ),
        Refusal(
            "the Muon optimizer",
            lambda m: bool(getattr(m.optimizer, "use_muon", False)),
            "it replaces gradients by updates",
        ),
    ),
    attributes=(
        "dp_process_group",
        "fp16_groups",
        "sub_group_to_group_id",
        "grad_position",
        "get_param_id",
        "fp32_partitioned_groups_flat",
        "micro_step_id",
    ),
    absent=lambda m: {
        "local_accum": "stage 3 reduces every micro-step",
        "reduced": "stage 3 reduces and partitions in one call",
    },
    places=_places,
    shards=_shards,
    carries=lambda m, param: param.grad is not None,
    window_open=lambda m: (
        m.optimizer.micro_step_id > 0
        or bool(getattr(m.optimizer, "_epilogue_ran_this_backward", False))
    ),
    dp_group=_group,
    effective=_effective,
)
