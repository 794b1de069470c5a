"""Move every weight by one unit in the last place: the smallest change that a run can begin with.

What a run makes of it is the scale of its own sensitivity to rounding (docs/diff.md, the noise envelope).
Up or down is a fixed hash of sample, parameter name and place in the full parameter
(docs/format.md): alike on all ranks, whatever the world size and stage. No random number is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
import xxhash

from gradtrace.capture.adapters.partitioned import own_part
from gradtrace.capture.digest import chunk_size, hashable, mix_, signed
from gradtrace.errors import BadOptionError, PerturbationError
from gradtrace.trace.digest import GOLDEN
from gradtrace.trace.records import PERTURBATION_HASH, Facts

_MARK: Final = "_gradtrace_perturbation"
# dtype -> the integer of its size, and the raw bits of infinity.
_FORMATS: Final = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


@dataclass(frozen=True, slots=True)
class _Mark:
    """Hold what was done to a model.

    Attributes:
        sample: which sample of the noise.
        dtypes: parameter name -> the dtype in whose last place it was moved.
    """

    sample: int
    dtypes: Mapping[str, torch.dtype]


def perturb_ulp(
    model: torch.nn.Module, sample: int = 0, *, dtype: torch.dtype | None = None
) -> int:
    """Move every weight of a model by one unit in the last place, up or down, in place.

    Call it on every rank, once, before ``deepspeed.initialize``. ``gradtrace run --perturb-ulp`` does the
    same to an unedited script. A weight becomes one of the two numbers of its dtype next to it; zeros,
    infinities and NaN stay; the largest finite number becomes the one below it. Frozen weights
    are moved too, buffers and integers are not, tied weights are moved once.

    Args:
        model: any device; may be partitioned already, by ``deepspeed.zero.Init``.
        sample: which sample of the noise, from 0.
        dtype: what DeepSpeed will cast the weights to, where the configuration enables bf16 or fp16 and
            the model is not in it yet: weights are rounded to it, and moved in its last place.
            ``None``: each weight's own dtype.

    Returns:
        How many elements this process holds of what was moved.

    Raises:
        BadOptionError, PerturbationError: the model cannot be perturbed, and nothing was changed.
    """
    sample = check_sample(sample)
    if marks(model):
        _refuse(
            "a model that is perturbed already",
            "one perturbation a run",
            "Take the script's own perturb_ulp() out, or --perturb-ulp.",
        )
    plans = []
    for name, parameter in model.named_parameters():
        plans.append((name, *_stretches(name, parameter, dtype)))
    moved = 0
    with torch.no_grad():
        for name, target, stretches in plans:
            if target is None:
                continue
            key = _key(sample, name)
            for tensor, first, numel in stretches:
                moved += _move(tensor, first, numel, key, target)
    kinds = {name: target for name, target, _ in plans if target is not None}
    object.__setattr__(model, _MARK, _Mark(sample, kinds))
    return moved


def check_sample(sample: Any) -> int:
    """Return the number of a sample.

    Raises:
        BadOptionError: it is none.
    """
    if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < 2**31:
        raise BadOptionError(
            f"sample {sample!r}",
            where="perturb_ulp",
            expected="a whole number from 0",
            remedy="Number the samples 0, 1, 2, ...",
        )
    return sample


def marks(model: torch.nn.Module) -> list[tuple[torch.nn.Module, _Mark]]:
    """Return the perturbed modules among a model and its parts."""
    return [(part, vars(part)[_MARK]) for part in model.modules() if _MARK in vars(part)]


def perturbation_of(model: torch.nn.Module) -> Facts | None:
    """Return what the manifest says of a model's perturbation, ``None`` where there was none.

    Raises:
        PerturbationError: it was rounded away, or grew, when the weights were cast afterwards.
    """
    found = marks(model)
    if not found:
        return None
    for part, mark in found:
        for name, parameter in part.named_parameters():
            held = getattr(parameter, "ds_tensor", parameter).dtype
            moved_in = mark.dtypes.get(name, held)
            if moved_in != held:
                _refuse(
                    f"{name}, moved in the last place of {moved_in} and then cast to {held}",
                    "weights that are moved in the dtype that they are trained in",
                    f"Give perturb_ulp(model, dtype={held}), or use gradtrace run --perturb-ulp.",
                )
    samples = {mark.sample for _, mark in found}
    if len(samples) > 1:
        _refuse(
            f"parts of one model that were perturbed by samples {sorted(samples)}",
            "one sample a run",
            "Perturb the whole model once.",
        )
    return {"sample": samples.pop(), "ulp": 1, "hash": PERTURBATION_HASH}


def _stretches(
    name: str, parameter: Any, dtype: torch.dtype | None
) -> tuple[torch.dtype | None, list[tuple[torch.Tensor, int, int]]]:
    """Return the dtype to move a parameter in, and what this process holds of it.

    Returns:
        The dtype, ``None`` for integers, which have no last place; and ``(tensor, place of its first
        element in the full parameter, numel)``, all on any device.
    """
    if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
        return None, []
    part = own_part(parameter)
    if isinstance(part, str):
        _refuse(
            f"{name}: {part}",
            "weights that this process holds, whole or in partitions that it knows",
            "Perturb the model before it is brought there.",
        )
    if part is None and type(parameter) not in (torch.nn.Parameter, torch.Tensor):
        _refuse(
            f"{name}, a {type(parameter).__name__}",
            "plain parameters",
            "Perturb the model before it is sharded or quantized.",
        )
    held = [(parameter, 0, parameter.numel())] if part is None else list(part)
    for tensor, _, _ in held:
        if tensor.dtype not in _FORMATS or (part is None and not hashable(tensor)):
            _refuse(
                f"{name}, {tensor.dtype} on {tensor.device}",
                f"weights in {', '.join(map(str, _FORMATS))} that are in memory",
                "Perturb the model before it is quantized, and after its weights are made.",
            )
    target = parameter.dtype if dtype is None else dtype
    if target not in _FORMATS:
        _refuse(
            f"dtype {target}",
            f"one of {', '.join(map(str, _FORMATS))}",
            "Give the dtype that the weights are trained in.",
        )
    return target, held


def _key(sample: int, name: str) -> int:
    """Return the seed of a parameter's signs; docs/format.md specifies it."""
    return xxhash.xxh3_64_intdigest(f"{sample}:{name}".encode())


def _move(tensor: torch.Tensor, first: int, numel: int, key: int, target: torch.dtype) -> int:
    """Move the first elements of a tensor, place ``first`` on, in the last place of a dtype."""
    whole = tensor.detach()
    flat = whole.contiguous().view(-1)
    moved = 0
    for start in range(0, numel, chunk_size(flat)):
        part = flat[start : min(start + chunk_size(flat), numel)]
        cast = part if part.dtype == target else part.to(target)
        changed = _step(cast, first + start, key)
        moved += int(changed)
        if cast is not part:
            part.copy_(cast)
    if flat.data_ptr() != whole.data_ptr():
        whole.copy_(flat.view(whole.shape))
    return moved


def _step(part: torch.Tensor, first: int, key: int) -> torch.Tensor:
    """Move the elements of one contiguous chunk in place; return how many moved."""
    kind, infinity = _FORMATS[part.dtype]
    raw = part.view(kind)
    size = raw & (2 ** (8 * part.element_size() - 1) - 1)
    z = torch.arange(1, part.numel() + 1, device=part.device).mul_(signed(GOLDEN))
    z += signed(first * GOLDEN + key)
    # The highest bit of the hash: away from zero where it is set.
    steps = torch.where(mix_(z) < 0, 1, -1).masked_fill_(size == infinity - 1, -1)
    steps.masked_fill_((size == 0) | (size >= infinity), 0)
    raw += steps.to(kind)
    return torch.count_nonzero(steps)


def _refuse(found: str, expected: str, remedy: str) -> NoReturn:
    raise PerturbationError(found, where="perturb_ulp", expected=expected, remedy=remedy)
