"""Say where in live DeepSpeed each hop's result can be spoiled, one table an optimizer family.

A `Site` names a method and yields the live tensors that the hop has just written, so that a fault
planted there is seen by whoever records the method from outside: gradtrace, wrapped later.

Source: deepspeed 0.19.8, the methods that the adapters of `gradtrace.capture` probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

_STAGE3: Final = "_DeepSpeedZeroOptimizer_Stage3__"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Name a live stretch of one parameter's gradient.

    Attributes:
        name: the parameter.
        start: its first element here, in C order.
        values: 1-D view; what is written to it is written to the run.
    """

    name: str
    start: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Live:
    """Hold an engine, its optimizer, and the parameters' names by object identity."""

    engine: Any
    optimizer: Any
    names: Mapping[int, str]

    def name(self, param: Any) -> str:
        """Return a live parameter's name."""
        return self.names[id(param)]


Call = Mapping[str, Any]  # arguments by name; after the call also ``result``
Stretches = Callable[[Live, Call], Iterable[Stretch]]


@dataclass(frozen=True, slots=True)
class Site:
    """Say where a hop's result lies.

    Attributes:
        law: the hop.
        method: what is replaced.
        when: whether the result is there before or after the method ran.
        stretches: this rank's part of the result, live.
        entered: for a reduction: what this rank puts into it, live, before the method runs. For the
            weights: the same stretches before the step.
        owner: whose method: the optimizer's, the engine's, that of the module which defines the
            optimizer, or that of the optimizer which DeepSpeed's wraps.
    """

    law: str
    method: str
    when: Literal["before", "after"]
    stretches: Stretches
    entered: Stretches | None = None
    owner: Literal["optimizer", "engine", "module", "base"] = "optimizer"


# --- weights: every stage publishes them inside the engine's step ------------------------------------


def _weights(live: Live, _: Call) -> Iterator[Stretch]:
    """Yield the model's weights: whole ones, or this rank's own part at stage 3."""
    for param in live.engine.module.parameters():
        if not param.requires_grad:
            continue
        if not hasattr(param, "ds_tensor"):
            yield Stretch(live.name(param), 0, param.data.view(-1))
            continue
        start, numel = _own3(live, param)
        if numel > 0:
            yield Stretch(live.name(param), start, param.ds_tensor.data.view(-1)[:numel])


PUBLISH: Final = Site("publish", "_take_model_step", "after", _weights, _weights, owner="engine")


# --- stages 1 and 2: DeepSpeedZeroOptimizer -------------------------------------------------------


def _own12(live: Live, group: int, param: Any) -> tuple[int, int, int] | None:
    """Return (first element, offset in the flat shard, numel) of this rank's range, or ``None``."""
    optimizer = live.optimizer
    rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[group])
    number = optimizer.get_param_id(param)
    start = optimizer.grad_start_offset[group][rank].get(number)
    if start is None:
        return None
    into = int(optimizer.grad_partition_insertion_offset[group][rank][number])
    return (
        int(start),
        into,
        min(param.numel() - int(start), int(optimizer.partition_size[group]) - into),
    )


def _members12(live: Live, dtype: Any) -> Iterator[tuple[int, Any, int]]:
    """Yield (group, parameter, offset in the bucket)."""
    offset = 0
    for group, _, number in live.optimizer.ipg_buckets[dtype].params:
        param = live.optimizer.param_dict[number]
        yield group, param, offset
        offset += param.numel()


def _packed12(live: Live, call: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for dtype, bucket in optimizer.ipg_buckets.items():
        for _, param, offset in _members12(live, dtype):
            if dtype in optimizer.extra_large_param_to_reduce:
                flat = optimizer.get_gradient_for_reduction(param).view(-1)
            else:
                flat = bucket.buffer[bucket.index]
            yield Stretch(live.name(param), 0, flat[offset : offset + param.numel()])


def _entered12(live: Live, call: Call) -> Iterator[Stretch]:
    for _, param, offset in _members12(live, call["communication_data_type"]):
        yield Stretch(live.name(param), 0, call["tensor"][offset : offset + param.numel()])


def _reduced12(live: Live, call: Call) -> Iterator[Stretch]:
    for group, param, offset in _members12(live, call["communication_data_type"]):
        own = _own12(live, group, param)
        if not live.optimizer.reduce_scatter:
            own = (0, 0, param.numel())
        if own is not None:
            start, _, numel = own
            first = offset + start
            yield Stretch(live.name(param), start, call["tensor"][first : first + numel])


def _shard12(live: Live, call: Call) -> Iterator[Stretch]:
    param, optimizer = call["param"], live.optimizer
    gradient = optimizer.get_gradient_for_reduction(param)
    for group, params in enumerate(optimizer.bit16_groups):
        if any(one is param for one in params):
            own = _own12(live, group, param)
            if own is not None and gradient is not None:
                start, _, numel = own
                yield Stretch(live.name(param), start, gradient.view(-1)[start : start + numel])


def _accumulated12(live: Live, call: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for group, params in enumerate(optimizer.bit16_groups):
        averaged = optimizer.averaged_gradients.get(group)
        waiting = optimizer.all_grad_tensors.get(group)
        if averaged is not None:
            flat = getattr(averaged, "flat_partition", None)
            parts = [flat] if flat is not None else list(averaged)
            for param in params:
                own = _own12(live, group, param)
                if own is not None:
                    start, into, numel = own
                    yield Stretch(live.name(param), start, _inside(parts, into, numel))
        elif waiting is not None:
            for param, gradient in zip(optimizer.params_in_partition[group], waiting, strict=True):
                own = _own12(live, group, param)
                if own is not None:
                    start, _, numel = own
                    yield Stretch(live.name(param), start, gradient.view(-1)[start : start + numel])


def _inside(parts: list[Any], into: int, numel: int) -> Any:
    """Return a stretch of several tensors laid one after another; it lies in one of them."""
    at = 0
    for part in parts:
        if at <= into and into + numel <= at + part.numel():
            return part.view(-1)[into - at : into - at + numel]
        at += part.numel()
    raise LookupError("the shard is cut in the middle of a parameter")


def _clipped12(live: Live, call: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    (flat,) = call["grad_groups_flat"]
    for group, params in enumerate(optimizer.bit16_groups):
        master = optimizer.single_partition_of_fp32_groups[group]
        if master.grad is None or master.grad.data_ptr() != flat.data_ptr():
            continue
        for param in params:
            own = _own12(live, group, param)
            if own is not None:
                start, into, numel = own
                yield Stretch(live.name(param), start, flat[into : into + numel])


def _masters12(live: Live, call: Call) -> Iterator[Stretch]:
    group, optimizer = call["group_no"], live.optimizer
    flat = optimizer.single_partition_of_fp32_groups[group].data
    for param in optimizer.bit16_groups[group]:
        own = _own12(live, group, param)
        if own is not None:
            start, into, numel = own
            yield Stretch(live.name(param), start, flat[into : into + numel])


ZERO12: Final = (
    Site("pack", "reduce_ipg_grads", "before", _packed12),
    Site("reduce", "average_tensor", "after", _reduced12, _entered12),
    Site("partition", "copy_grads_in_partition", "after", _shard12),
    Site("accumulate", "independent_gradient_partition_epilogue", "after", _accumulated12),
    # After the norm, which would make a NaN an overflow, and the step one that is left out.
    Site("master", "_update_scale", "before", _accumulated12),
    Site("unscale_clip", "unscale_and_clip_grads", "after", _clipped12),
    Site("update", "_optimizer_step", "after", _masters12, _masters12),
    PUBLISH,
)


# --- stage 3 --------------------------------------------------------------------------------------


def _own3(live: Live, param: Any) -> tuple[int, int]:
    rank = torch.distributed.get_rank(group=live.optimizer.dp_process_group)
    start = min(rank * int(param.partition_numel()), int(param.ds_numel))
    return start, min(int(param.partition_numel()), int(param.ds_numel) - start)


def _packed3(live: Live, call: Call) -> Iterator[Stretch]:
    for param in live.optimizer.ipg_buckets[call["communication_data_type"]].params:
        yield Stretch(live.name(param), 0, param.grad.view(-1))


def _entered3(live: Live, call: Call) -> Iterator[Stretch]:
    for param in call["params_to_reduce"]:
        yield Stretch(live.name(param), 0, param.grad.view(-1))


def _reduced3(live: Live, call: Call) -> Iterator[Stretch]:
    for param, part in zip(call["params_to_reduce"], call["result"], strict=True):
        start, numel = _own3(live, param)
        if numel > 0:
            yield Stretch(live.name(param), start, part.view(-1)[:numel])


def _accumulated3(live: Live, call: Call) -> Iterator[Stretch]:
    buffers = getattr(live.optimizer, _STAGE3 + "param_id_to_grad_partition")
    for param in call["params_to_release"]:
        start, numel = _own3(live, param)
        if numel > 0:
            yield Stretch(live.name(param), start, buffers[param.ds_id].view(-1)[:numel])


def _given3(live: Live, call: Call) -> Iterator[Stretch]:
    flat = live.optimizer.fp32_partitioned_groups_flat[call["sub_group_id"]].grad
    return _cut3(live, call, flat)


def _masters3(live: Live, call: Call) -> Iterator[Stretch]:
    flat = live.optimizer.fp32_partitioned_groups_flat[call["sub_group_id"]].data
    return _cut3(live, call, flat)


def _cut3(live: Live, call: Call, flat: Any) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for param in optimizer.fp16_groups[call["sub_group_id"]]:
        _, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
        start, numel = _own3(live, param)
        if numel > 0:
            yield Stretch(live.name(param), start, flat[int(offset) : int(offset) + numel])


ZERO3: Final = (
    Site("pack", _STAGE3 + "reduce_and_partition_ipg_grads", "before", _packed3),
    Site("reduce", _STAGE3 + "avg_scatter_grads", "after", _reduced3, _entered3),
    Site("accumulate", "partition_grads", "after", _accumulated3),
    Site("master", "_prepare_fp32_grad_for_sub_group", "after", _given3),
    Site("unscale_clip", "unscale_and_clip_grads", "after", _given3),
    Site("update", "_optimizer_step", "after", _masters3, _masters3),
    PUBLISH,
)


# --- BF16_Optimizer -------------------------------------------------------------------------------


def _buffers16(live: Live, _: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for group, params in enumerate(optimizer.bf16_groups):
        for position, param in enumerate(params):
            buffer = optimizer.fp32_groups_gradients[group][position]
            yield Stretch(live.name(param), 0, buffer.view(-1))


def _shards16(live: Live, _: Call) -> Iterator[Stretch]:
    return _cut16(live, live.optimizer.fp32_groups_gradient_flat_partition)


def _masters16(live: Live, _: Call) -> Iterator[Stretch]:
    return _cut16(live, [flat.data for flat in live.optimizer.fp32_groups_flat_partition])


def _cut16(live: Live, shards: Sequence[Any]) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for group, params in enumerate(optimizer.bf16_groups):
        shard = shards[group]
        rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[group])
        first, at = shard.numel() * rank, 0
        for param in params:
            low, high = max(at, first), min(at + param.numel(), first + shard.numel())
            if low < high:
                yield Stretch(live.name(param), low - at, shard[low - first : high - first])
            at += param.numel()


BF16: Final = (
    Site("accumulate_local", "backward_epilogue", "after", _buffers16),
    Site("pack", "buffered_allreduce_fallback", "before", _buffers16, owner="engine"),
    Site("reduce", "allreduce_and_copy", "after", _buffers16, _buffers16, owner="engine"),
    Site("master", "_take_model_step", "before", _shards16, owner="engine"),
    Site("unscale_clip", "clip_tensors_by_global_norm", "after", _shards16, owner="module"),
    Site("update", "step", "after", _masters16, _masters16, owner="base"),
    PUBLISH,
)

# --- stage 0: the gradients are ``param.grad`` until the optimizer takes them ----------------------


def _gradients0(live: Live, _: Call) -> Iterator[Stretch]:
    for param in live.engine.module.parameters():
        if param.grad is not None:
            yield Stretch(live.name(param), 0, param.grad.view(-1))


def _each0(live: Live, _: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for masters, params in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, param in zip(masters, params, strict=True):
            yield Stretch(live.name(param), 0, master.grad.view(-1))


def _flat0(live: Live, call: Call) -> Iterator[Stretch]:
    for flat, params in zip(call["grad_groups_flat"], live.optimizer.fp16_groups, strict=True):
        at = 0
        for param in params:
            yield Stretch(live.name(param), 0, flat[at : at + param.numel()])
            at += param.numel()


def _weights0(live: Live, _: Call) -> Iterator[Stretch]:
    for group in live.optimizer.param_groups:
        for param in group["params"]:
            yield Stretch(live.name(param), 0, param.data.view(-1))


def _masters0(live: Live, _: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for masters, params in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, param in zip(masters, params, strict=True):
            yield Stretch(live.name(param), 0, master.data.view(-1))


def _flat_masters0(live: Live, _: Call) -> Iterator[Stretch]:
    optimizer = live.optimizer
    for flat, params in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        at = 0
        for param in params:
            yield Stretch(live.name(param), 0, flat.data[at : at + param.numel()])
            at += param.numel()


REPLICATED: Final = (
    Site("pack", "buffered_allreduce_fallback", "before", _gradients0, owner="engine"),
    Site("reduce", "allreduce_and_copy", "after", _gradients0, _gradients0, owner="engine"),
    Site("master", "_take_model_step", "before", _gradients0, owner="engine"),
    PUBLISH,
)
PLAIN: Final = (
    *REPLICATED,
    Site("unscale_clip", "clip_fp32_gradients", "after", _gradients0, owner="engine"),
    Site("update", "step", "after", _weights0, _weights0),
)
FP16: Final = (
    *REPLICATED,
    Site("unscale_clip", "unscale_and_clip_grads", "after", _flat0),
    Site("update", "step", "after", _flat_masters0, _flat_masters0, owner="base"),
)
UNFUSED: Final = (
    *REPLICATED,
    Site("unscale_clip", "unscale_and_clip_grads", "after", _each0),
    Site("update", "step", "after", _masters0, _masters0, owner="base"),
)

# By what the optimizer has: another family is one more entry. Every optimizer has the last.
FAMILIES: Final[tuple[tuple[str, tuple[Site, ...]], ...]] = (
    ("partition_grads", ZERO3),
    ("update_hp_grads", BF16),
    ("average_tensor", ZERO12),
    ("fused_adam_legacy", FP16),
    ("fused_lamb_legacy", UNFUSED),
    ("param_groups", PLAIN),
)


def sites_of(optimizer: Any) -> tuple[Site, ...]:
    """Return the sites of a live optimizer's family.

    Raises:
        LookupError: no table knows the family.
    """
    for method, sites in FAMILIES:
        if hasattr(optimizer, method):
            return sites
    raise LookupError(f"no sites for {type(optimizer).__name__}")


def site_of(live: Live, law: str) -> Site | None:
    """Return where a hop's results lie in a live engine, or ``None`` where there is no such hop."""
    return next((site for site in sites_of(live.optimizer) if site.law == law), None)
