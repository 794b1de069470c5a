"""Plant faults that are not a tensor's values: the seed, a boundary, the order in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from gradtrace.testing.mutators import Fault
from gradtrace.testing.planted import Planted, replace_method
from gradtrace.testing.sites import site_of


def _wrong_seed(planted: Planted, fault: Fault) -> None:
    """Multiply the loss that backward starts from."""
    clock = planted.clock

    def around(original: Any, args: Any, kwargs: Any) -> Any:
        if fault.strikes("seed", clock.step, clock.coming, planted.rank):
            args = (args[0] * fault.amount, *args[1:])
            planted.note(fault, clock.coming)
        return original(*args, **kwargs)

    replace_method(planted.live.engine, "backward", around)


def _boundary_mismatch(planted: Planted, fault: Fault) -> None:
    """Let one rank claim the opposite of what is true, from a forward pass to its backward's end."""
    clock = planted.clock

    def around(original: Any, args: Any, kwargs: Any) -> Any:
        claim = original(*args, **kwargs)
        if clock.armed and fault.strikes("replicate", clock.step, clock.coming, planted.rank):
            if not planted.strikes:
                planted.note(fault, clock.coming)
            return not claim
        return claim

    replace_method(planted.live.engine, "is_gradient_accumulation_boundary", around)


class _Misordered(list[Any]):
    """A bucket's parameters that come out of sorting with two of equal size exchanged."""

    def sort(self, *args: Any, **kwargs: Any) -> None:
        super().sort(*args, **kwargs)
        pair = _equal_sized([param.ds_numel for param in self])
        if pair is not None:
            one, two = pair
            self[one], self[two] = self[two], self[one]


def _equal_sized(sizes: list[int]) -> tuple[int, int] | None:
    """Return the first two positions of equal size."""
    for at, size in enumerate(sizes):
        if size in sizes[:at]:
            return sizes.index(size), at
    return None


def _order_mismatch(planted: Planted, fault: Fault) -> None:
    """Let one rank list two parameters of equal size in the other order in a bucket."""
    site = site_of(planted.live, "pack")
    assert site is not None
    optimizer, clock = planted.live.optimizer, planted.clock

    def around(original: Any, args: Any, kwargs: Any) -> Any:
        if fault.strikes("replicate", clock.step, clock.micro_step, planted.rank):
            for dtype, bucket in optimizer.ipg_buckets.items():
                if bucket.params:
                    _misorder(planted, fault, bucket, dtype)
        result = original(*args, **kwargs)
        for bucket in optimizer.ipg_buckets.values():
            bucket.params = list(bucket.params)
        return result

    replace_method(optimizer, site.method, around)


def _misorder(planted: Planted, fault: Fault, bucket: Any, dtype: Any) -> None:
    optimizer = planted.live.optimizer
    if hasattr(optimizer, "partition_grads"):
        bucket.params = _Misordered(bucket.params)
        ordered = sorted(bucket.params, key=lambda param: int(param.ds_id))
        for at in _equal_sized([param.ds_numel for param in ordered]) or ():
            planted.note(fault, planted.clock.micro_step, planted.live.name(ordered[at]))
        return
    params = [optimizer.param_dict[number] for _, _, number in bucket.params]
    pair = _equal_sized([param.numel() for param in params])
    if pair is None:
        return
    one, two = pair
    ends = np.cumsum([param.numel() for param in params])
    flat = bucket.buffer[bucket.index]
    views = [flat[ends[at] - params[at].numel() : ends[at]] for at in pair]
    kept = views[0].clone()
    views[0].copy_(views[1])
    views[1].copy_(kept)
    for at, view in zip((two, one), views, strict=True):
        gradient = optimizer.get_gradient_for_reduction(params[at])
        gradient.data = view.view_as(gradient)
    bucket.params[one], bucket.params[two] = bucket.params[two], bucket.params[one]
    for at in pair:
        planted.note(fault, planted.clock.micro_step, planted.live.name(params[at]))


def _wrong_moment(planted: Planted, fault: Fault) -> None:
    """Multiply the first moment of all that an optimizer has just stepped."""
    clock, optimizer = planted.clock, planted.live.optimizer
    base = getattr(optimizer, "optimizer", optimizer)

    def around(original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if fault.strikes("update", clock.step, None, planted.rank):
            for group in base.param_groups:
                for param in group["params"]:
                    state = base.state[param]
                    state["exp_avg" if "exp_avg" in state else "momentum_buffer"].mul_(fault.amount)
            planted.note(fault, clock.micro_step)
        return result

    replace_method(base, "step", around)


SPECIAL: Final[Mapping[tuple[str, str], Callable[[Planted, Fault], None]]] = {
    ("seed", "wrong_seed"): _wrong_seed,
    ("update", "wrong_moment"): _wrong_moment,
    ("replicate", "boundary_mismatch"): _boundary_mismatch,
    ("replicate", "order_mismatch"): _order_mismatch,
}
