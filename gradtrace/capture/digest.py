"""Digest live tensors where they are: nothing of their size is copied, nothing waits for the device.

The bits are those of `gradtrace.trace.digest`, the reference, in wrapping int64 arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gradtrace.capture.snapshot import Pending, Piece, Sighting, dtype_name, pending
from gradtrace.trace.digest import FIRST, GOLDEN, MEMBERS, SECOND, hash_text
from gradtrace.trace.schema import encode_float
from gradtrace.trace.spans import PADDING, Layout, pack_spans

# Elements hashed at a time: temporaries of 8 bytes each that fit a CPU's cache, or stay small on a GPU.
_CHUNK_CPU: Final = 2**16
_CHUNK_DEVICE: Final = 2**20
_RAW: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Digest:
    """Hold what is kept of a sighting instead of its values.

    Attributes:
        dtype: the tensors' dtype, torch's name.
        layout: what was digested, without padding.
        values: the members of ``facts["digest"]``, still on their device.
    """

    dtype: str
    layout: Layout
    values: Pending


def hashable(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's bits can be read without asking anybody: no collective, no real data lost.

    Subclasses (DTensor, fake tensors) may communicate when they are computed with.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and (tensor.is_complex() or tensor.element_size() in _RAW)
    )


def value_hash(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the hash of a tensor's raw bits, in C order; a complex number is two elements.

    Args:
        tensor: any shape, dtype and device for which `hashable` holds; not modified.
        first: place of its first element in the full parameter.

    Returns:
        0-d int64 on the tensor's device: the bits of `gradtrace.trace.digest.value_hash`.
    """
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        flat = plain.reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        places = _places(flat)
        for start in range(0, flat.numel(), chunk_size(flat)):
            total += _hash(flat[start : start + chunk_size(flat)], places, first + start)
    return total


def summarize(sighting: Sighting, captured: Container[int]) -> Digest | None:
    """Digest the captured parameters' stretches of a sighting, on the current stream.

    Args:
        sighting: live tensors; not modified, and no reference to them is kept.
        captured: indices of the parameters in the plan.

    Returns:
        The digest, or ``None`` when nothing of it is in the plan.
    """
    places: list[tuple[int, int, int]] = []
    counts: list[torch.Tensor] = []
    sizes: list[torch.Tensor] = []
    dtype = ""
    with torch.no_grad():
        for tensor, pieces in sighting.parts:
            flat = tensor.detach().reshape(-1)
            dtype = dtype_name(tensor.dtype)
            for piece in pieces:
                if piece.param == PADDING or piece.param not in captured or not piece.numel:
                    continue
                places.append((piece.param, piece.param_offset, piece.numel))
                count, size = _stretch(flat, piece)
                counts.append(count)
                sizes.append(size)
        if not places:
            return None
        held = (torch.stack(counts), torch.stack(sizes))
    write = functools.partial(_members, [numel for _, _, numel in places])
    return Digest(dtype, pack_spans(places), pending(held, write))


def _stretch(flat: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [not zero, nans, infs, hash] and float64 [sum of squares, max |x|] of one stretch."""
    stretch = flat[piece.tensor_offset : piece.tensor_offset + piece.numel]
    places = _places(stretch)
    on_cpu = flat.device.type == "cpu"
    counts: list[torch.Tensor] = []
    sizes: list[torch.Tensor] = []
    for start in range(0, piece.numel, chunk_size(flat)):
        part = stretch[start : start + chunk_size(flat)]
        size = (part if part.dtype in _WIDE else part.to(torch.float64)).abs()
        filled = torch.count_nonzero(size)
        nans, infs = torch.zeros_like(filled), torch.zeros_like(filled)
        largest = size.amax()  # NaN if there is one
        if not on_cpu or not math.isfinite(float(largest)):  # only a CPU is asked: it does not wait
            nans = torch.count_nonzero(size != size)  # noqa: PLR0124  NaN is unlike itself
            infs = torch.count_nonzero(size == math.inf)
            largest = size.nan_to_num_(0.0, 0.0, 0.0).amax()
        norm = torch.linalg.vector_norm(size, dtype=torch.float64)
        counts += (filled, nans, infs, _hash(part, places, piece.param_offset + start))
        sizes += (norm * norm, largest.to(torch.float64))
    count = torch.stack(counts).view(-1, 4).sum(dim=0)
    found = torch.stack(sizes).view(-1, 2)
    return count, torch.stack((found[:, 0].sum(), found[:, 1].amax()))


def chunk_size(flat: torch.Tensor) -> int:
    """Return how many elements of a tensor are hashed at a time."""
    return _CHUNK_CPU if flat.device.type == "cpu" else _CHUNK_DEVICE


def _places(flat: torch.Tensor) -> torch.Tensor:
    """Return ``(j + 1) * GOLDEN`` for the elements of one chunk."""
    size = min(flat.numel(), chunk_size(flat))
    return torch.arange(1, size + 1, device=flat.device).mul_(signed(GOLDEN))


def _hash(part: torch.Tensor, places: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sum of mix64 over one contiguous chunk; see `gradtrace.trace.digest`."""
    size = part.element_size()
    z = part.view(_RAW[size]).to(torch.int64, copy=True)
    if size in (2, 4):
        z &= (1 << 8 * size) - 1
    z += places[: z.numel()]
    z += signed(first * GOLDEN)
    return mix_(z).sum()


def mix_(z: torch.Tensor) -> torch.Tensor:
    """Mix int64 in place as SplitMix64 does, from ``seed + (i + 1) * GOLDEN`` to its output i + 1."""
    z ^= _shifted(z, 30)
    z *= signed(FIRST)
    z ^= _shifted(z, 27)
    z *= signed(SECOND)
    z ^= _shifted(z, 31)
    return z


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right as unsigned integers are shifted."""
    return (z >> by).bitwise_and_((1 << 64 - by) - 1)


def signed(value: int) -> int:
    """Return the int64 with the lowest 64 bits of an integer."""
    return ((value + 2**63) % 2**64) - 2**63


def _members(numels: Sequence[int], tensors: Sequence[torch.Tensor]) -> dict[str, list[Any]]:
    """Write the members of a digest from what `summarize` stacked, on the host."""
    counts, sizes = (tensor.tolist() for tensor in tensors)
    rows = [
        (
            encode_float(math.sqrt(squares)),
            encode_float(largest),
            numel - filled,
            nans,
            infs,
            hash_text(mixed),
        )
        for numel, (filled, nans, infs, mixed), (squares, largest) in zip(
            numels, counts, sizes, strict=True
        )
    ]
    return {name: [row[at] for row in rows] for at, name in enumerate(MEMBERS)}
