"""See the host buffers of stages 1 and 2 with the optimizer on the CPU.

What ``accumulated_grads_in_cpu`` holds is added to a reduced gradient, in place. Up to the boundary the
sum is copied back there; at the boundary it is copied into the fp32 gradient that the CPU optimizer
is given (0.19 also copies it back, where nobody reads it). With fp32 accumulation of bf16 gradients
(since 0.19) a flat buffer on the device accumulates instead.

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py: copy_grads_in_partition (2142),
async_accumulate_grad_in_cpu_via_gpu (1809), async_inplace_copy_grad_to_fp32_buffer_from_gpu (1888).
"""

from __future__ import annotations

from collections.abc import Iterable

from gradtrace.capture.adapters.declare import Call, Model, optimizer_boundary, settled
from gradtrace.capture.adapters.zero12_layout import compact, own_range
from gradtrace.capture.snapshot import Piece, Sighting


def partition_before(model: Model, call: Call) -> Iterable[Sighting]:
    """See this rank's reduced shard before the host buffer is added to it, in place."""
    return _partition(model, call) if model.optimizer.cpu_offload else ()


def partition_after(model: Model, call: Call) -> Iterable[Sighting]:
    """See this rank's reduced shard after it was copied out of the bucket."""
    return () if model.optimizer.cpu_offload else _partition(model, call)


def _partition(model: Model, call: Call) -> Iterable[Sighting]:
    param = call.arguments["param"]
    group, _ = model.place(param)
    own = own_range(model, group, param)
    gradient = model.optimizer.get_gradient_for_reduction(param)
    if own is not None and gradient is not None and not compact(model, group):
        start, _, numel = own
        index = model.of(param)
        yield Sighting(model.names[index], ((gradient, (Piece(index, start, start, numel),)),))


def host_accumulated(model: Model, call: Call) -> Iterable[Sighting]:
    """See the sum of one parameter where the next addition, or the fp32 gradient, takes it from."""
    param = call.arguments["param"]
    if optimizer_boundary(model):
        buffer = model.optimizer.get_gradient_for_reduction(param)
    else:
        buffer = model.optimizer.accumulated_grads_in_cpu[model.optimizer.get_param_id(param)]
    group, _ = model.place(param)
    own = own_range(model, group, param)
    if own is not None:
        start, _, numel = own
        index = model.of(param)
        # With low-precision master gradients it is the own range alone.
        at = start if buffer.numel() == param.numel() else 0
        piece = Piece(index, start, at, numel)
        yield Sighting(model.names[index], ((settled(buffer, param.device), (piece,)),))


def host_master(model: Model, call: Call) -> Iterable[Sighting]:
    """See one parameter's stretch of the fp32 gradient that the boundary's sum was copied into."""
    param = call.arguments["param"]
    group, _ = model.place(param)
    own = own_range(model, group, param)
    if own is not None:
        start, into, numel = own
        index = model.of(param)
        gradient = model.optimizer.single_partition_of_fp32_groups[group].grad
        stretch = gradient.view(-1).narrow(0, into, numel)
        piece = Piece(index, start, 0, numel)
        yield Sighting(model.names[index], ((settled(stretch, param.device), (piece,)),))
