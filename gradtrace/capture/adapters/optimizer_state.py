"""See the moments that an optimizer holds before its step, and the rule that it will follow.

Only classes whose step is known to the letter have a rule: a subclass may do anything. What one has
no rule for is recorded by name alone, so that the law `update` can say why it is not checked.

Source: torch 2.13.0, optim/adam.py, adamw.py, sgd.py; deepspeed 0.19.8, ops/adam/fused_adam.py and
cpu_adam.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from gradtrace.capture.adapters.declare import Model, Stepped
from gradtrace.capture.snapshot import Piece, Sighting, dtype_name
from gradtrace.trace.spans import PADDING

Group = Mapping[str, Any]
Part = tuple[torch.Tensor, tuple[Piece, ...]]
# rule -> the moments that it keeps; the first is there if any is
MOMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
}


def flat_shards(
    model: Model, kind: str, tensors: Sequence[torch.Tensor], groups: Sequence[int] | None = None
) -> list[Stepped]:
    """Return what a wrapped optimizer steps where each unit is one flat tensor.

    Args:
        kind: ``group`` or ``sub_group``: what units are called in ``model.shards``.
        tensors: one a unit, laid out as the unit's shard.
        groups: the optimizer's group of each; its own number by default.
    """
    found = []
    for number, tensor in enumerate(tensors):
        unit = f"{kind}{number}"
        group = number if groups is None else int(groups[number])
        found.append(Stepped(unit, group, model.base_optimizer, ((tensor, model.shards[unit]),)))
    return found


def states(stepped: Sequence[Stepped]) -> Iterator[Sighting]:
    """Yield, of each unit, a sighting of the rule's facts and one of each moment.

    The optimizer is only read: ``optimizer.state`` makes an entry for whatever it is asked for.
    """
    for one in stepped:
        if not any(piece.param != PADDING for _, pieces in one.parts for piece in pieces):
            continue
        held = [(one.optimizer.state.get(tensor) or {}, pieces) for tensor, pieces in one.parts]
        rule = KNOWN.get(_class_name(one.optimizer), (None,))[0]
        yield Sighting(one.unit, (), _facts(one, rule, held))
        for moment in MOMENTS.get(rule or "", ()):
            parts = [(state[moment], pieces) for state, pieces in held if _is_held(state, moment)]
            dtypes = list(dict.fromkeys(tensor.dtype for tensor, _ in parts))
            for dtype in dtypes:
                suffix = f".{dtype_name(dtype)}" if len(dtypes) > 1 else ""
                yield Sighting(
                    f"{one.unit}.{moment}{suffix}",
                    tuple((tensor, pieces) for tensor, pieces in parts if tensor.dtype == dtype),
                    {"moment": moment, "of": one.unit},
                )


def _class_name(optimizer: Any) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_held(state: Mapping[str, Any], moment: str) -> bool:
    return isinstance(state.get(moment), torch.Tensor)


def _facts(
    one: Stepped, rule: str | None, held: Sequence[tuple[Mapping[str, Any], Any]]
) -> dict[str, Any]:
    group = one.optimizer.param_groups[one.group]
    name = _class_name(one.optimizer)
    facts: dict[str, Any] = {
        "class": name,
        "group": one.group,
        "rule": rule,
    }
    if rule is None:
        return facts
    facts["kernel"] = KNOWN[name][1](one.optimizer, group, one.parts[0][0].device)
    facts.update({key: _number(group[key]) for key in _SETTINGS[rule] if key in group})
    if rule == "adam":
        facts["decoupled"] = _decoupled(one.optimizer, group)
        facts["bias_correction"] = bool(group.get("bias_correction", True))
        facts.update(_counts(one, group, held))
    return facts


def _counts(
    one: Stepped, group: Group, held: Sequence[tuple[Mapping[str, Any], tuple[Piece, ...]]]
) -> dict[str, Any]:
    """Return how many steps Adam has counted, of all or of each parameter."""
    if _class_name(one.optimizer) == FUSED:
        # It steps all by the count of the last one, and goes on with that count alone.
        given = [tensor for tensor in group["params"] if tensor.grad is not None]
        last = one.optimizer.state.get(given[-1]) if len(given) > 1 else held[0][0]
        count = _number((last or {}).get("step", group.get("step")))
        return {"step": count, **({"shared_count": True} if len(held) > 1 else {})}
    counts = [
        (piece.param, _number(state.get("step")))
        for state, pieces in held
        for piece in pieces
        if piece.param != PADDING
    ]
    # Where there are several tensors, each is stepped, and counted, by itself.
    return {"step": counts[0][1], **({"steps": dict(counts)} if len(held) > 1 else {})}


def _fused_kernel(_: Any, group: Group, __: torch.device) -> str | None:
    """Say that tensors of several dtypes share a count that goes on once for each of these."""
    return "FusedAdam" if len({tensor.dtype for tensor in group["params"]}) <= 1 else None


def _number(value: Any) -> Any:
    """Keep what a tensor holds now, in place of the tensor that the optimizer will change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_number(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def _decoupled(optimizer: Any, group: Group) -> bool:
    if isinstance(optimizer, torch.optim.AdamW):
        return True
    if isinstance(optimizer, torch.optim.Adam):
        return bool(group.get("decoupled_weight_decay", False))
    return bool(optimizer.adam_w_mode)


def _torch_kernel(_: Any, group: Group, device: torch.device) -> str:
    """Say whether scalars are kept in float32: as tensors, or by a fused kernel of a device."""
    scalars = (group["lr"], *group.get("betas", ()))
    narrow = bool(group.get("capturable")) or any(isinstance(s, torch.Tensor) for s in scalars)
    narrow |= bool(group.get("fused")) and device.type != "cpu"
    return "torch_capturable" if narrow else "torch"


Kernel = Callable[[Any, Group, torch.device], str | None]
FUSED: Final = "deepspeed.ops.adam.fused_adam.FusedAdam"
# By the very class: a subclass may do anything in its step.
KNOWN: Final[Mapping[str, tuple[str, Kernel]]] = {
    "torch.optim.adam.Adam": ("adam", _torch_kernel),
    "torch.optim.adamw.AdamW": ("adam", _torch_kernel),
    "torch.optim.sgd.SGD": ("sgd", _torch_kernel),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": ("adam", lambda *_: "DeepSpeedCPUAdam"),
    FUSED: ("adam", _fused_kernel),
}
