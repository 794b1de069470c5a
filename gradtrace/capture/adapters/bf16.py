"""Declare ``BF16_Optimizer``: ZeRO stage 1 with bf16 weights and a separate accumulation buffer.

Every rank accumulates its own gradients of the whole model in ``fp32_groups_gradients_flat`` and
reduces that buffer at the boundary; the shard given to the optimizer is a view of it.

Source: deepspeed 0.19.8, runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters import replicated
from gradtrace.capture.adapters.declare import (
    Adapter,
    Call,
    Model,
    Probe,
    Refusal,
    fill_padding,
    shards_of,
)
from gradtrace.capture.adapters.optimizer_state import flat_shards
from gradtrace.capture.snapshot import Piece, Sighting, whole
from gradtrace.trace.spans import PADDING


def _places(model: Model) -> Mapping[int, tuple[int, int]]:
    return {
        model.of(param): (group, position)
        for group, params in enumerate(model.optimizer.bf16_groups)
        for position, param in enumerate(params)
    }


def _flat(model: Model, group: int) -> tuple[Piece, ...]:
    """Return the pieces of a group's whole flat buffer, alignment padding included."""
    pieces = []
    offset = 0
    for param in model.optimizer.bf16_groups[group]:
        pieces.append(Piece(model.of(param), 0, offset, param.numel()))
        offset += param.numel()
    total = model.optimizer.fp32_groups_gradients_flat[group].numel()
    return fill_padding(pieces, total, PADDING)


def _shard(model: Model, group: int) -> tuple[Piece, ...]:
    size = model.optimizer.fp32_groups_gradient_flat_partition[group].numel()
    start = size * torch.distributed.get_rank(group=model.optimizer.real_dp_process_group[group])
    pieces = []
    for piece in _flat(model, group):
        low = max(piece.tensor_offset, start)
        high = min(piece.tensor_offset + piece.numel, start + size)
        if low < high and piece.param != PADDING:
            inside = piece.param_offset + low - piece.tensor_offset
            pieces.append(Piece(piece.param, inside, low - start, high - low))
    return fill_padding(pieces, size, PADDING)


def _shards(model: Model) -> Mapping[str, tuple[Piece, ...]]:
    return {
        f"group{group}": _shard(model, group) for group in range(len(model.optimizer.bf16_groups))
    }


def _local_accum(model: Model, _: Call) -> Iterable[Sighting]:
    optimizer = model.optimizer
    for group, params in enumerate(optimizer.bf16_groups):
        for position, param in enumerate(params):
            if optimizer.fp32_groups_has_gradients[group][position]:
                index = model.of(param)
                buffer = optimizer.fp32_groups_gradients[group][position]
                yield Sighting(model.names[index], ((buffer, whole(index, buffer)),))


def _reductions(model: Model, call: Call) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (group, flat buffer) for the tensors that are accumulation buffers."""
    for tensor in call.arguments["small_bucket"]:
        for group, flat in enumerate(model.optimizer.fp32_groups_gradients_flat):
            if tensor.data_ptr() == flat.data_ptr() and tensor.numel() == flat.numel():
                yield group, tensor


def _bucket(model: Model, call: Call) -> Iterable[Sighting]:
    facts = replicated.reduction_facts(model, call)
    for group, tensor in _reductions(model, call):
        pieces = tuple(piece for piece in _flat(model, group) if piece.param != PADDING)
        yield Sighting(f"group{group}", ((tensor, pieces),), facts)


def _reduced(model: Model, call: Call) -> Iterable[Sighting]:
    for group, tensor in _reductions(model, call):
        pieces = tuple(piece for piece in _flat(model, group) if piece.param != PADDING)
        yield Sighting(f"group{group}", ((tensor, pieces),))


def _master(model: Model, _: Call) -> Iterable[Sighting]:
    for group, shard in enumerate(model.optimizer.fp32_groups_gradient_flat_partition):
        unit = f"group{group}"
        yield Sighting(unit, ((shard, model.shards[unit]),))


def _clipped(model: Model, _: Call) -> Iterable[Sighting]:
    for group, master in enumerate(model.optimizer.fp32_groups_flat_partition):
        if master.grad is not None:
            unit = f"group{group}"
            yield Sighting(unit, ((master.grad, model.shards[unit]),))


def _carries(model: Model, param: torch.nn.Parameter) -> bool:
    group, position = model.place(param)
    return bool(model.optimizer.fp32_groups_has_gradients[group][position])


def _effective(model: Model) -> Mapping[str, Any]:
    optimizer, engine = model.optimizer, model.engine
    return {
        "zero_stage": 1,
        "model_dtype": torch.bfloat16,
        "grad_accum_dtype": optimizer.grad_acc_dtype,
        "communication_dtype": engine.communication_data_type,
        "gradient_average": bool(engine.gradient_average),
        "gradient_predivide_factor": float(engine.gradient_predivide_factor()),
        "postscale_gradients": bool(engine.postscale_gradients()),
        "reduce_scatter": False,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "round_robin_gradients": False,
        "reduce_bucket_size": 500_000_000,  # MEMORY_OPT_ALLREDUCE_SIZE, 0.19.8 engine.py
        "gradient_clipping": float(optimizer.clip_grad),
        "offload_optimizer": False,
    }


BF16 = Adapter(
    name="bf16",
    optimizer_class="BF16_Optimizer",
    probes=(
        Probe(
            "local_accum",
            "backward_epilogue",
            "after",
            _local_accum,
            one_of="local_accum",
            source="0.19.8 bf16_optimizer.py:503; the engine runs it before the reduction (3161)",
        ),
        Probe(
            "local_accum",
            "backward",
            "after",
            _local_accum,
            one_of="local_accum",
            source="0.18.2 bf16_optimizer.py:319; the engine runs it, then reduces",
        ),
        *replicated.collective(_bucket, _reduced),
        Probe("master_grad", "step", "before", _master, source="0.19.8 bf16_optimizer.py:384"),
        Probe(
            "clipped_grad",
            "step",
            "before",
            _clipped,
            owner="base_optimizer",
            source="0.19.8 bf16_optimizer.py:423: the wrapped optimizer's step",
        ),
    ),
    refusals=(
        Refusal(
            "mixture-of-experts layers",
            lambda m: bool(m.optimizer.has_moe_layers),
            "expert gradients are reduced over other groups",
        ),
        Refusal(
            "the Muon optimizer",
            lambda m: bool(getattr(m.optimizer, "_uses_muon", False)),
            "it replaces gradients by updates",
        ),
    ),
    attributes=(
        "bf16_groups",
        "real_dp_process_group",
        "fp32_groups_gradients",
        "fp32_groups_gradients_flat",
        "fp32_groups_gradient_flat_partition",
        "fp32_groups_flat_partition",
        "fp32_groups_has_gradients",
        "grad_acc_dtype",
        "clip_grad",
    ),
    absent=lambda m: {
        "partition": "the shard is a view of the reduced buffer",
        "accumulated": "the whole buffer accumulates before the reduction",
    },
    places=_places,
    shards=_shards,
    carries=_carries,
    window_open=lambda m: any(any(flags) for flags in m.optimizer.fp32_groups_has_gradients),
    dp_group=lambda m: m.optimizer.dp_process_group,
    effective=_effective,
    masters=lambda m: shards_of(m, "group", m.optimizer.fp32_groups_flat_partition),
    stepped=lambda m: flat_shards(m, "group", m.optimizer.fp32_groups_flat_partition),
)
