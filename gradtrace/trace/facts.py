"""Check the members of facts and effective settings that readers rely on (docs/format.md).

Members that this table does not know may be anything that JSON can hold: later releases add some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gradtrace.trace.schema import decode_float

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


_POINTS: Final[Mapping[str, Mapping[str, Fits]]] = {
    "loss": {
        "loss": _number,
        "loss_grad": _number,
        "seed": _number,
        "loss_scale": _number,
        "gas": _several,
        "scale_wrt_gas": _flag,
        "boundary": _flag,
        "optimizer_boundary": _flag,
        "path": _text,
        "output_factors": _list_of(_number),
        "output_dtypes": _list_of(_text),
    },
    "local_accum": {"carry": _flag},
    "master_grad": {"total_norm": _number},
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
}
_EFFECTIVE: Final[Mapping[str, Fits]] = {
    **dict.fromkeys(
        (
            "adapter",
            "optimizer",
            "base_optimizer",
            "model_dtype",
            "grad_accum_dtype",
            "communication_dtype",
        ),
        _text,
    ),
    **dict.fromkeys(("zero_stage", "reduce_bucket_size", "dp_world_size"), _count),
    **dict.fromkeys(("gradient_accumulation_steps", "sequence_parallel_size"), _several),
    **dict.fromkeys(("gradient_predivide_factor", "gradient_clipping"), _number),
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


def fault_of_settings(effective: Mapping[str, Any]) -> str | None:
    """Say which known effective setting is not what it must be, or ``None``."""
    return _fault(_EFFECTIVE, effective)


def _fault(table: Mapping[str, Fits], facts: Mapping[str, Any]) -> str | None:
    for name, fits in table.items():
        if name in facts and not fits(facts[name]):
            return f"{name} = {str(facts[name])[:60]!r}"
    return None
