"""Hold what all optimizers of stage 0 share: every rank keeps every parameter, gradients are averaged.

``param.grad`` accumulates on the rank itself; at the boundary the engine flattens the gradients of
each dtype, reduces them over the data-parallel group and copies the result back into ``param.grad``.

Source: deepspeed 0.19.8, runtime/engine.py, buffered_allreduce_fallback (3921) to allreduce_bucket
(3795); the methods are the same since 0.12.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from gradtrace.capture.adapters.declare import Call, Model, Probe, Refusal, Sight
from gradtrace.capture.snapshot import Piece, Sighting, dtype_name, whole

Groups = Iterable[Iterable[torch.nn.Parameter]]


def places(model: Model, groups: Groups) -> Mapping[int, tuple[int, int]]:
    """Return table index -> (group, position) of the parameters that an optimizer steps."""
    return {
        model.of(param): (group, position)
        for group, params in enumerate(groups)
        for position, param in enumerate(params)
    }


def one_after_another(model: Model, params: Iterable[torch.nn.Parameter]) -> tuple[Piece, ...]:
    """Return the pieces of a flat tensor that holds whole parameters without padding."""
    pieces = []
    offset = 0
    for param in params:
        pieces.append(Piece(model.of(param), 0, offset, param.numel()))
        offset += param.numel()
    return tuple(pieces)


def _trained(model: Model) -> Iterator[tuple[int, torch.nn.Parameter]]:
    for index, param in enumerate(model.parameters):
        if param.requires_grad and param.grad is not None:
            yield index, param


def _local_accum(model: Model, _: Call) -> Iterable[Sighting]:
    for index, param in _trained(model):
        gradient = param.grad
        assert gradient is not None
        yield Sighting(model.names[index], ((gradient, whole(index, gradient)),))


def reduction_facts(model: Model, call: Call) -> dict[str, Any]:
    """Return the facts of a reduction that ``engine.allreduce_bucket`` makes."""
    return {
        "comm_dtype": model.engine.communication_data_type,
        "ranks": torch.distributed.get_process_group_ranks(call.arguments["dp_group"]),
        "op": "mean" if model.engine.gradient_average else "sum",
    }


def collective(bucket: Sight, reduced: Sight) -> tuple[Probe, ...]:
    """Declare the engine's own all-reduce: what goes into it, and what comes out."""
    method, source = "allreduce_and_copy", "0.19.8 engine.py:3823"
    arguments = ("small_bucket", "dp_group")
    return (
        Probe("bucket", method, "before", bucket, source, owner="engine", arguments=arguments),
        Probe("reduced", method, "after", reduced, source, owner="engine", arguments=arguments),
    )


def _members(model: Model, call: Call) -> tuple[str, Any]:
    """Return the dtype and the parts of a bucket; its tensors are the ``param.grad`` themselves."""
    holders = {param.grad.data_ptr(): index for index, param in _trained(model)}  # type: ignore[union-attr]
    tensors = call.arguments["small_bucket"]
    parts = tuple((tensor, whole(holders[tensor.data_ptr()], tensor)) for tensor in tensors)
    return dtype_name(tensors[0].dtype), parts


def _bucket(model: Model, call: Call) -> Iterable[Sighting]:
    unit, parts = _members(model, call)
    yield Sighting(unit, parts, reduction_facts(model, call))


def _reduced(model: Model, call: Call) -> Iterable[Sighting]:
    unit, parts = _members(model, call)
    yield Sighting(unit, parts)


def carries(model: Model, param: torch.nn.Parameter) -> bool:
    """Say whether the parameter's own buffer holds anything."""
    return param.grad is not None


def window_open(model: Model) -> bool:
    """Say whether some gradient waits for the step."""
    return any(True for _ in _trained(model))


def effective(model: Model) -> dict[str, Any]:
    """Return the settings that the engine holds; the dtype is that of the gradients."""
    engine = model.engine
    dtypes = {param.dtype for param in model.parameters if param.requires_grad}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return {
        "zero_stage": 0,
        "replicated": True,
        "model_dtype": dtype,
        "grad_accum_dtype": dtype,
        "communication_dtype": engine.communication_data_type,
        "gradient_average": bool(engine.gradient_average),
        "gradient_predivide_factor": float(engine.gradient_predivide_factor()),
        "postscale_gradients": bool(engine.postscale_gradients()),
        "reduce_scatter": False,
        "overlap_comm": False,
        "round_robin_gradients": False,
        "reduce_bucket_size": 500_000_000,  # MEMORY_OPT_ALLREDUCE_SIZE, 0.19.8 engine.py
        "gradient_clipping": float(engine.gradient_clipping()),
        "offload_optimizer": False,
    }


def _sparse(model: Model) -> bool:
    # The setting went with 0.19; a module that asks torch for sparse gradients still gets them.
    return bool(getattr(model.engine, "sparse_tensor_module_names", None)) or any(
        getattr(module, "sparse", False) is True
        for module in model.engine.module.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    )


PROBES: Final = (
    Probe(
        "local_accum",
        "_backward_epilogue",
        "before",
        _local_accum,
        owner="engine",
        one_of="local_accum",
        source="0.19.8 engine.py:3153; the reduction runs inside it, or in step()",
    ),
    Probe(
        "local_accum",
        "allreduce_gradients",
        "before",
        _local_accum,
        owner="engine",
        one_of="local_accum",
        source="0.15.4 engine.py:2046; engine.backward calls it after every backward pass (to 0.17)",
    ),
    *collective(_bucket, _reduced),
)

REFUSALS: Final = (
    Refusal(
        "sparse_gradients",
        _sparse,
        "their reduction gathers indices and values, which no law of this release covers",
    ),
    Refusal(
        "mixture-of-experts layers",
        lambda m: bool(m.engine.has_moe_layers),
        "expert gradients are reduced over other groups",
    ),
    Refusal(
        "an optimizer that communicates by itself",
        lambda m: not m.engine.enable_backward_allreduce,
        "its reduction is compressed and runs inside its step",
    ),
    Refusal(
        "sequence parallelism",
        lambda m: int(getattr(m.engine, "sequence_parallel_size", 1) or 1) > 1,
        "its reductions go over other groups",
    ),
)

ABSENT: Final[Mapping[str, str]] = {
    "partition": "every rank keeps the whole reduced gradient",
    "accumulated": "param.grad accumulates before the reduction",
}
