"""Declare ZeRO stage 3 (``DeepSpeedZeroOptimizer_Stage3``).

Rank r of n holds elements ``[r*k, (r+1)*k)`` of the flattened parameter, ``k = partition_numel()``, the
tail of the last rank being padding. Every backward pass reduces its own gradients, except inside
``engine.coalesce_grad_reduction`` (0.19), where they accumulate in ``param.grad`` until it is left.
With the optimizer on the CPU the shards accumulate in host memory, and are copied at the boundary
into the fp32 gradient there.

Source: deepspeed 0.19.8, runtime/zero/stage3.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters.declare import (
    Adapter,
    Call,
    Model,
    Probe,
    Refusal,
    Stepped,
    coarsest_wire,
    fill_padding,
    settled,
    shards_of,
)
from gradtrace.capture.adapters.optimizer_state import flat_shards
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
        # Both paths cast, divide by the predivide factor and by the world size, and multiply the sum.
        "division": "wire",
        "predivide": _predivide(model),
    }
    parts = tuple((param.grad, whole(model.of(param), param.grad)) for param in params)
    yield Sighting(str(dtype).removeprefix("torch."), parts, facts)


def _predivide(model: Model) -> float:
    """Return what contributions are divided by before the sum, and the sum is multiplied with.

    Source: 0.19.8 stage3.py:1875 and 1922; nothing is done under ``prescale_gradients``.
    """
    optimizer = model.optimizer
    return float(optimizer.gradient_predivide_factor) if optimizer.postscale_gradients else 1.0


def _local_accum(model: Model, _: Call) -> Iterable[Sighting]:
    if not getattr(model.optimizer, "_coalesce_grad_reduction", False):
        return  # each backward pass hands its own gradient to the reduction
    for params in model.optimizer.fp16_groups:
        for param in params:
            if param.grad is not None:
                index = model.of(param)
                yield Sighting(model.names[index], ((param.grad, whole(index, param.grad)),))


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
    for param, part in zip(
        call.arguments["params_to_release"], call.arguments["grad_partitions"], strict=True
    ):
        start, numel = _own(model, param)
        if numel > 0:
            buffer = settled(buffers[param.ds_id], part.device)
            parts.append((buffer, (Piece(model.of(param), start, 0, numel),)))
    if parts:
        yield Sighting("shards", tuple(parts))


def _given(model: Model, call: Call) -> Iterable[Sighting]:
    number = call.arguments["sub_group_id"]
    gradient = model.optimizer.fp32_partitioned_groups_flat[number].grad
    if gradient is not None:
        unit = f"sub_group{number}"
        facts = {"total_norm": call.arguments["total_norm"]}
        yield Sighting(unit, ((gradient, model.shards[unit]),), facts)


def _weights(model: Model) -> list[Sighting] | None:
    """Return each parameter's own part, gathering nothing; ``None`` when one is on NVMe."""
    found = []
    for index, (name, param) in enumerate(zip(model.names, model.parameters, strict=True)):
        part = getattr(param, "ds_tensor", None)
        if part is None:  # not partitioned: every rank holds it whole
            found.append(Sighting(name, ((param.data, whole(index, param)),)))
            continue
        start, numel = _own(model, param)
        if numel <= 0:
            continue
        status = getattr(getattr(part, "status", None), "name", "AVAILABLE")
        if status != "AVAILABLE" or part.numel() < numel:  # a stand-in of one element
            return None
        found.append(Sighting(name, ((part.data, (Piece(index, start, 0, numel),)),)))
    return found


def _stepped(model: Model) -> list[Stepped]:
    """Return the sub-groups; with partial offload, a second optimizer steps those on the device.

    Source: 0.19.8 stage3.py:1235, _optimizer_step.
    """
    optimizer = model.optimizer
    devices = getattr(optimizer, "subgroup_to_device", {})
    backup = getattr(optimizer, "backup_optimizer", None)
    found = flat_shards(
        model, "sub_group", optimizer.fp32_partitioned_groups_flat, optimizer.sub_group_to_group_id
    )
    return [
        dataclasses.replace(one, optimizer=backup)
        if backup is not None and devices.get(number, "cpu") != "cpu"
        else one
        for number, one in enumerate(found)
    ]


def _effective(model: Model) -> Mapping[str, Any]:
    optimizer = model.optimizer
    return {
        "zero_stage": 3,
        "model_dtype": optimizer.dtype,
        "grad_accum_dtype": optimizer.gradient_accumulation_dtype,
        "communication_dtype": coarsest_wire(model),
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


def _absent(model: Model) -> Mapping[str, str]:
    absent = {"reduced": "stage 3 reduces and partitions in one call"}
    if not hasattr(model.optimizer, "_coalesce_grad_reduction"):
        absent["local_accum"] = "stage 3 reduces every micro-step"
    return absent


def _window_open(model: Model) -> bool:
    optimizer = model.optimizer
    return (
        optimizer.micro_step_id > 0
        or bool(getattr(optimizer, "_epilogue_ran_this_backward", False))
        or any(param.grad is not None for params in optimizer.fp16_groups for param in params)
    )


def _of_class(name: str) -> Callable[[Model], bool]:
    return lambda model: any(c.__name__ == name for c in type(model.optimizer).__mro__)


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
            "local_accum",
            "_backward_epilogue",
            "before",
            _local_accum,
            owner="engine",
            required=False,
            source="0.19.8 engine.py:3239: coalesce_grad_reduction reduces when it is left",
        ),
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
            arguments=("params_to_release", "grad_partitions"),
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
            "offload to NVMe",
            lambda m: (
                bool(getattr(m.optimizer, "swap_optimizer", False))
                or bool(getattr(m.optimizer, "params_in_nvme_and_cpu", False))
            ),
            "gradients are written to files and read back where no probe looks",
        ),
        Refusal(
            "torch_autocast in fp16",
            lambda m: getattr(m.optimizer, "torch_autocast_gradscaler", None) is not None,
            "torch's GradScaler unscales, and may skip, inside the wrapped optimizer's step",
        ),
        Refusal(
            "offload_optimizer.super_offload (SuperOffloadOptimizer_Stage3)",
            _of_class("SuperOffloadOptimizer_Stage3"),
            "it steps on the CPU during the backward pass, before gradients are unscaled",
        ),
        Refusal(
            "MiCS (MiCS_Optimizer)",
            _of_class("MiCS_Optimizer"),
            "it reduces within a shard group first, and between the groups at the boundary",
        ),
        Refusal(
            "zero_quantized_gradients",
            lambda m: getattr(m.optimizer, "all2all_process_group", None) is not None,
            "its reduction quantizes, and no law of this release allows for that",
        ),
        Refusal(
            "parameters partitioned over a group of their own (experts)",
            _several_process_groups,
            "their gradients are averaged over other ranks than they are added up on",
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
    absent=_absent,
    places=_places,
    shards=_shards,
    carries=lambda m, param: param.grad is not None,
    window_open=_window_open,
    dp_group=_group,
    effective=_effective,
    weights=_weights,
    masters=lambda m: shards_of(m, "sub_group", m.optimizer.fp32_partitioned_groups_flat),
    stepped=_stepped,
)
