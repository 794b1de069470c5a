"""See what enters and leaves the reductions of stages 1 and 2.

With contiguous gradients a bucket is one flat buffer, reduced by ``average_tensor``; without, it is
the list of the gradients themselves, reduced by ``buffered_reduce_fallback`` or its variant for fp32
accumulation. How the mean is formed differs between them, and is a fact of the ``bucket`` record.

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gradtrace.capture.adapters.declare import Call, Model
from gradtrace.capture.adapters.zero12_layout import by_dtype, own_range
from gradtrace.capture.snapshot import Piece, Sighting, dtype_name, whole


def averages(model: Model) -> bool:
    """Say whether a reduction divides by the world size; the setting came with 0.19.3."""
    return bool(getattr(model.optimizer, "gradient_average", True))


def reduction_stream(model: Model) -> Any:
    """Return the stream that reductions run on; it exists, unused, without ``overlap_comm`` too."""
    return model.optimizer.reduction_stream if model.optimizer.overlap_comm else None


def _members(model: Model, dtype: torch.dtype) -> Iterator[tuple[int, Any]]:
    """Yield (group, parameter) in the bucket's own order."""
    optimizer = model.optimizer
    if hasattr(optimizer, "ipg_buckets"):
        entries = optimizer.ipg_buckets[dtype].params
    else:
        entries = optimizer.params_in_ipg_bucket
    for entry in entries:
        yield entry[0], optimizer.param_dict[entry[2]]


def taken(model: Model) -> frozenset[int]:
    """Return the ids of parameters that are in a bucket, or were reduced, in this backward pass."""
    optimizer = model.optimizer
    reduced = (number for number, done in enumerate(optimizer.params_already_reduced) if done)
    if hasattr(optimizer, "ipg_buckets"):
        waiting = [entry for bucket in optimizer.ipg_buckets.values() for entry in bucket.params]
    else:
        waiting = optimizer.params_in_ipg_bucket
    return frozenset((*reduced, *(entry[2] for entry in waiting)))


def _wire(model: Model, call: Call) -> torch.dtype:
    dtype: torch.dtype = call.arguments.get(
        "communication_data_type", model.optimizer.communication_data_type
    )
    return dtype


def _facts(model: Model, wire: torch.dtype) -> Mapping[str, Any]:
    """Return how the ranks' buckets are combined.

    Source: 0.19.8. ``average_tensor`` (1590) divides the buffer before it is cast to the wire
    (1680); without reduce_scatter ``gradient_reduction_w_predivide`` (1485) casts first, and divides
    around the sum or, with prescale_gradients, before it; ``allreduce_bucket`` (2352), which
    non-contiguous gradients take, casts and then divides. Only the second knows the predivide factor.
    """
    optimizer = model.optimizer
    facts: dict[str, Any] = {
        "comm_dtype": wire,
        "ranks": torch.distributed.get_process_group_ranks(optimizer.dp_process_group),
        "op": "mean" if averages(model) else "sum",
        "predivide": 1.0,
    }
    if not averages(model):
        facts["division"] = "none"
    elif not optimizer.contiguous_gradients:
        facts["division"] = "wire"
    elif optimizer.reduce_scatter:
        facts["division"] = "bucket"
    elif not optimizer.postscale_gradients:
        facts["division"] = "wire"
    else:
        facts["division"] = "sum"
        facts["predivide"] = float(optimizer.gradient_predivide_factor)
    return facts


# --- contiguous gradients: one flat buffer ----------------------------------------------------------


def bucket(model: Model, call: Call) -> Iterable[Sighting]:
    """See the flat buffer that is about to be reduced: whole parameters, one after another."""
    wire = _wire(model, call)
    pieces = []
    offset = 0
    for _, param in _members(model, wire):
        pieces.append(Piece(model.of(param), 0, offset, param.numel()))
        offset += param.numel()
    yield Sighting(
        dtype_name(wire), ((call.arguments["tensor"], tuple(pieces)),), _facts(model, wire)
    )


def reduced(model: Model, call: Call) -> Iterable[Sighting]:
    """See what of the flat buffer is reduced now.

    With reduce_scatter only the own ranges are defined: foreign slices hold this rank's gradient
    divided by the world size, or the mean, depending on how the bucket was split (measured).
    """
    wire = _wire(model, call)
    pieces = []
    offset = 0
    for group, param in _members(model, wire):
        if not model.optimizer.reduce_scatter:
            pieces.append(Piece(model.of(param), 0, offset, param.numel()))
        else:
            own = own_range(model, group, param)
            if own is not None:
                start, _, numel = own
                pieces.append(Piece(model.of(param), start, offset + start, numel))
        offset += param.numel()
    if pieces:
        yield Sighting(dtype_name(wire), ((call.arguments["tensor"], tuple(pieces)),))


# --- non-contiguous gradients: a list of them -------------------------------------------------------


def bucket_of_list(model: Model, call: Call) -> Iterable[Sighting]:
    """See the gradients that are about to be reduced as a list."""
    return _list(model, call, _facts(model, _wire(model, call)))


def reduced_list(model: Model, call: Call) -> Iterable[Sighting]:
    """See the same gradients afterwards: every rank is given all of every mean."""
    return _list(model, call, {})


def _list(model: Model, call: Call, facts: Mapping[str, Any]) -> Iterator[Sighting]:
    """Yield a record for each dtype of the gradients, for they are reduced dtype by dtype."""
    wire = _wire(model, call)
    parts = [
        (gradient, whole(model.of(param), gradient))
        for (_, param), gradient in zip(_members(model, wire), call.arguments["grads"], strict=True)
    ]
    for alike in by_dtype(parts):
        yield Sighting(dtype_name(wire), alike, facts)
