"""Find where the optimizer of stages 1 and 2 keeps which elements of which parameter.

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters.declare import Model, fill_padding
from gradtrace.capture.snapshot import Piece
from gradtrace.trace.spans import PADDING


def group_rank(model: Model, group: int) -> int:
    """Return this process's rank in the process group that a parameter group is partitioned over."""
    return torch.distributed.get_rank(group=model.optimizer.real_dp_process_group[group])


def own_range(model: Model, group: int, param: Any) -> tuple[int, int, int] | None:
    """Return (offset in the parameter, offset in the shard, numel) of this rank's range.

    Read from the partition's own tables: under ``round_robin_gradients`` DeepSpeed's
    ``_hp_mapping`` and safe_get_full_* name other parameters' data.
    """
    optimizer = model.optimizer
    rank, number = group_rank(model, group), optimizer.get_param_id(param)
    start = optimizer.grad_start_offset[group][rank].get(number)
    if start is None:
        return None
    into = optimizer.grad_partition_insertion_offset[group][rank][number]
    numel = min(param.numel() - start, int(optimizer.partition_size[group]) - into)
    return int(start), int(into), int(numel)


Part = tuple[torch.Tensor, tuple[Piece, ...]]


def by_dtype(parts: Iterable[Part]) -> Iterable[tuple[Part, ...]]:
    """Return parts of one record as several of one dtype each.

    A parameter without a gradient is stood in for by zeros of the accumulation dtype, and what is
    added to them is rounded to it.
    """
    found: dict[torch.dtype, list[Part]] = {}
    for part in parts:
        found.setdefault(part[0].dtype, []).append(part)
    return map(tuple, found.values())


def places(model: Model) -> Mapping[int, tuple[int, int]]:
    """Return for each parameter index its optimizer group and position in it."""
    return {
        model.of(param): (group, position)
        for group, params in enumerate(model.optimizer.bit16_groups)
        for position, param in enumerate(params)
    }


def shards(model: Model) -> Mapping[str, tuple[Piece, ...]]:
    """Return this rank's shard of every optimizer group, padding included."""
    return {
        f"group{group}": _shard(model, group) for group in range(len(model.optimizer.bit16_groups))
    }


def _shard(model: Model, group: int) -> tuple[Piece, ...]:
    pieces = []
    for param in model.optimizer.bit16_groups[group]:
        own = own_range(model, group, param)
        if own is not None:
            start, into, numel = own
            pieces.append(Piece(model.of(param), start, into, numel))
    return fill_padding(pieces, int(model.optimizer.partition_size[group]), PADDING)


def compact(model: Model, group: int) -> bool:
    """Say whether reduced shards are added straight into one flat fp32 buffer (since 0.19)."""
    test = getattr(model.optimizer, "_use_compact_grad_partition_buffer", None)
    return bool(test is not None and test(group))


def all_compact(model: Model) -> bool:
    """Say whether every optimizer group is accumulated so."""
    return all(compact(model, group) for group in range(len(model.optimizer.bit16_groups)))
