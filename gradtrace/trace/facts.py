"""Check the members of facts and effective settings that readers rely on (docs/format.md).

Members that this table does not know may be anything that JSON can hold: later releases add some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from gradtrace.trace.schema import decode_float
from gradtrace.trace.spans import Layout

Fits = Callable[[Any], bool]
_MOST: Final = 10**6  # ranks, outputs, groups


def _number(value: Any) -> bool:
    try:
        decode_float(value)
    except ValueError:
        return False
    return True  # null too: not known


def _positive(value: Any) -> bool:
    return value is None or (_number(value) and 0 < float(value) < float("inf"))


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 200)


def _count(value: Any) -> bool:
    return value is None or (
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**48
    )


def _several(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**31


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def _list_of(fits: Fits) -> Fits:
    def check(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= _MOST and all(map(fits, value))

    return check


def _ranks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MOST
        and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in value)
        and len(set(value)) == len(value)
        and min(value) >= 0
    )


def _table(**members: Fits) -> Fits:
    """Return a check that a value is an object that has all of these members."""

    def check(value: Any) -> bool:
        return isinstance(value, dict) and all(
            name in value and fits(value[name]) for name, fits in members.items()
        )

    return check


def _shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(map(_known_count, value))


def _known_count(value: Any) -> bool:
    return value is not None and _count(value)


def _maybe_hash(value: Any) -> bool:
    return value is None or _hash(value)


def _name(value: Any) -> bool:
    return value is not None and _text(value)


_TENSOR: Final = _table(name=_name, dtype=_name, shape=_shape, hash=_maybe_hash)
_OTHER: Final = _table(name=_name, type=_name, hash=_maybe_hash)


def _two(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value))


def _counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MOST
        and all(re.fullmatch("0|[1-9][0-9]{0,8}", name) for name in value)
        and all(map(_number, value.values()))
    )


_DIGEST: Final[Mapping[str, Fits]] = {
    "l2": _number,
    "max_abs": _number,
    "zeros": _known_count,
    "nans": _known_count,
    "infs": _known_count,
    "hash": _hash,
}
_POINTS: Final[Mapping[str, Mapping[str, Fits]]] = {
    "input": {
        "tensors": _list_of(_TENSOR),
        "others": _list_of(_OTHER),
        "truncated": lambda v: isinstance(v, bool),
    },
    "loss": {
        "loss": _number,
        "loss_grad": _number,
        "seed": _number,
        "loss_scale": _number,
        "gas": _several,
        "scale_wrt_gas": _flag,
        "boundary": _flag,
        "optimizer_boundary": _flag,
        "engine_micro_steps": _count,
        "path": _text,
        "output_factors": _list_of(_number),
        "output_dtypes": _list_of(_text),
    },
    "local_accum": {"carry": _flag},
    "master_grad": {"total_norm": _number},
    "optimizer_state": {
        "class": _text,
        "rule": lambda v: v in (None, "adam", "sgd"),
        "kernel": _text,
        "group": _count,
        "betas": _two,
        **dict.fromkeys(
            ("lr", "eps", "weight_decay", "momentum", "dampening", "step"),
            _number,
        ),
        **dict.fromkeys(
            (
                "decoupled",
                "bias_correction",
                "amsgrad",
                "maximize",
                "nesterov",
                "shared_count",
            ),
            _flag,
        ),
        "steps": _counts,
        "moment": _text,
        "of": _text,
    },
    "bucket": {
        "comm_dtype": _text,
        "ranks": _ranks,
        "op": lambda v: v in ("mean", "sum"),
        "division": lambda v: v in (None, "bucket", "wire", "sum", "none"),
        "predivide": _positive,
    },
}
_STEP: Final[Mapping[str, Fits]] = {
    "loss_scale": _number,
    "loss_scale_after": _number,
    "overflow": _flag,
    "grad_norm": _number,
    "clip": _number,
    "lr": _list_of(_number),
    "engine_micro_steps": _count,
    "engine_global_steps": _count,
    "engine_skipped_steps": _count,
    "engine_global_samples": _count,
    "boundary": _flag,
    "checkpoint_loaded": _flag,
}
_REPORT: Final[Mapping[str, Fits]] = dict.fromkeys(("loss", "grad_norm", "lr"), _number)
_EFFECTIVE: Final[Mapping[str, Fits]] = {
    **dict.fromkeys(
        (
            "adapter",
            "optimizer",
            "base_optimizer",
            "model_dtype",
            "grad_accum_dtype",
            "communication_dtype",
            "autocast_dtype",
            "master_dtype",
            "offload_optimizer_device",
            "offload_param_device",
        ),
        _text,
    ),
    **dict.fromkeys(
        (
            "zero_stage",
            "reduce_bucket_size",
            "allgather_bucket_size",
            "dp_world_size",
            "train_batch_size",
            "micro_batch_size",
        ),
        _count,
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "sequence_parallel_size"), _several),
    **dict.fromkeys(
        (
            "gradient_predivide_factor",
            "gradient_clipping",
            "sub_group_size",
            "loss_scale_factor",
            "loss_scale_window",
            "min_loss_scale",
            "loss_scale_hysteresis",
        ),
        _number,
    ),
    "partition_count": _list_of(_known_count),
    **dict.fromkeys(
        (
            "managed_gradient_accumulation",
            "gradient_average",
            "postscale_gradients",
            "reduce_scatter",
            "overlap_comm",
            "contiguous_gradients",
            "round_robin_gradients",
            "offload_optimizer",
            "replicated",
            "dynamic_loss_scale",
            "consecutive_hysteresis",
            "use_multi_rank_bucket_allreduce",
            "ignore_unused_parameters",
        ),
        _flag,
    ),
}


def fault_of_record(point: str, facts: Mapping[str, Any]) -> str | None:
    """Say which known member of a record's facts is not what it must be, or ``None``."""
    return _fault(_POINTS.get(point, {}), facts)


def fault_of_step(facts: Mapping[str, Any]) -> str | None:
    """Say which known member of a step's facts is not what it must be, or ``None``."""
    return _fault(_STEP, facts)


def fault_of_report(values: Mapping[str, Any]) -> str | None:
    """Say which known value of a report is not what it must be, or ``None``."""
    return _fault(_REPORT, values)


def fault_of_settings(effective: Mapping[str, Any]) -> str | None:
    """Say which known effective setting is not what it must be, or ``None``."""
    return _fault(_EFFECTIVE, effective)


def fault_of_buffers(buffers: Any) -> str | None:
    """Say whether a header's table of buffers is not what it must be; it may be missing."""
    return None if buffers is None or _list_of(_TENSOR)(buffers) else str(buffers)[:60]


def fault_of_digest(digest: Any, layout: Layout) -> str | None:
    """Say which member of a digest is not what it must be, or ``None``.

    Args:
        digest: one list a member, with one entry for each span of the layout.
        layout: what the digest is of.
    """
    if not isinstance(digest, dict):
        return "a layout without a tensor or a digest"
    for name, fits in _DIGEST.items():
        values = digest.get(name)
        if not isinstance(values, list) or not all(map(fits, values)):
            return f"digest.{name} = {str(values)[:60]!r}"
        if len(values) != len(layout):
            return f"digest.{name} of {len(values)} stretches for a layout of {len(layout)}"
    for at, span in enumerate(layout):
        if sum(digest[name][at] for name in ("zeros", "nans", "infs")) > span.numel:
            return f"a digest that counts more than its {span.numel} elements"
    return None


def _fault(table: Mapping[str, Fits], facts: Mapping[str, Any]) -> str | None:
    for name, fits in table.items():
        if name in facts and not fits(facts[name]):
            return f"{name} = {str(facts[name])[:60]!r}"
    return None
