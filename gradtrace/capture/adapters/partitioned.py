"""Find what this process holds of a parameter that ZeRO-3 partitioned when the model was built.

Rank r of n holds elements ``[r*k, (r+1)*k)`` of the flattened parameter in ``ds_tensor``, with
``k = ds_tensor.ds_numel``; the last rank has padding at the end.

Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

from typing import Any

import torch


def own_part(parameter: Any) -> list[tuple[torch.Tensor, int, int]] | str | None:
    """Return the tensors that hold a partitioned parameter's elements here.

    Returns:
        ``(tensor, place of its first element in the full parameter, numel)`` of each; ``None`` for a
        parameter that is not partitioned; in words why it cannot be told.
    """
    if not hasattr(parameter, "ds_id"):
        return None
    tensor = getattr(parameter, "ds_tensor", None)
    if tensor is None:
        return None  # known to ZeRO, and still whole
    if hasattr(getattr(parameter, "comm", None), "param_shard_group"):
        return "partitioned by MiCS"
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        return "partitioned a second time (zero_hpz_partition_size)"
    if getattr(tensor.status, "name", "") != "AVAILABLE":
        return f"its partition is not in memory ({getattr(tensor.status, 'name', 'unknown')})"
    status = getattr(parameter.ds_status, "name", "")
    if status == "INFLIGHT":
        return "being gathered"
    share, whole = int(tensor.ds_numel), int(parameter.ds_numel)
    rank = torch.distributed.get_rank(group=parameter.ds_process_group)
    first = min(rank * share, whole)
    held = [(tensor, first, min(share, whole - first))]
    if status == "AVAILABLE":  # gathered: both copies hold what is trained
        held.append((parameter, 0, whole))
    return held
