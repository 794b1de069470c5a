"""Copy what a probe sees, at once, before ZeRO reuses the buffer; keep no reference to it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradtrace.trace.schema import encode_float
from gradtrace.trace.spans import PADDING, Layout, pack_spans


@dataclass(frozen=True, slots=True)
class Piece:
    """Say where in a tensor a stretch of a parameter stands.

    Attributes:
        param: index in the parameter table, or ``PADDING``.
        param_offset: first element in the full parameter, C order.
        tensor_offset: first element in the flattened tensor.
        numel: how many elements.
    """

    param: int
    param_offset: int
    tensor_offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """Hold what a probe sees: live tensors, and which parameters their elements belong to.

    Attributes:
        unit: what this is a record of (parameter, group, bucket).
        parts: tensors of one dtype with the pieces to take from each, recorded end to end.
        facts: what else was observed; 0-d tensors are resolved by the writer thread.
    """

    unit: str
    parts: tuple[tuple[torch.Tensor, tuple[Piece, ...]], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Hold a copy, owned by gradtrace.

    Attributes:
        data: 1-D contiguous tensor on the CPU.
        layout: which parameters its elements belong to.
    """

    data: torch.Tensor
    layout: Layout

    @property
    def dtype(self) -> str:
        """Return the dtype's torch name."""
        return dtype_name(self.data.dtype)

    @property
    def size_bytes(self) -> int:
        """Return the size of the copy."""
        return self.data.numel() * self.data.element_size()

    def raw(self) -> memoryview:
        """Return the little-endian bytes; no copy."""
        array: Any = self.data.view(torch.uint8).numpy()
        return memoryview(array)


@dataclass(frozen=True, slots=True)
class Pending:
    """Hold a few numbers that a device may not have computed yet, for the writer thread to wait for.

    Attributes:
        tensors: small, owned by gradtrace.
        event: recorded after them on the stream that computes them; ``None`` on the CPU.
        write: turns them, once on the host, into facts.
    """

    tensors: tuple[torch.Tensor, ...]
    event: Any
    write: Callable[[Sequence[torch.Tensor]], Any]

    def read(self) -> Any:
        """Wait for the values and return the facts."""
        if self.event is not None:
            self.event.synchronize()
        return self.write([tensor.cpu() for tensor in self.tensors])


def pending(
    tensors: tuple[torch.Tensor, ...], write: Callable[[Sequence[torch.Tensor]], Any]
) -> Pending:
    """Return numbers to be read later, marking the current stream if they are on a device."""
    event = None
    device = tensors[0].device
    if device.type != "cpu":
        module = torch.get_device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
    return Pending(tensors, event, write)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def whole(param: int, tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Return the one piece of a tensor that holds a whole parameter."""
    return (Piece(param, 0, 0, tensor.numel()),)


def take(sighting: Sighting, captured: Container[int]) -> Snapshot | None:
    """Copy the captured parameters' stretches, and padding, to host memory.

    The copy is made by the current stream, so it is ordered after what produced the tensor there.

    Args:
        sighting: live tensors; not modified, and no reference to them is kept.
        captured: indices of the parameters in the plan.

    Returns:
        The copy, or ``None`` when nothing of it is in the plan.
    """
    places: list[tuple[int, int, int]] = []
    stretches: list[torch.Tensor] = []
    with torch.no_grad():
        for tensor, pieces in sighting.parts:
            chosen = [p for p in pieces if p.param == PADDING or p.param in captured]
            if not chosen:
                continue
            flat = tensor.detach().reshape(-1)
            places.extend((p.param, p.param_offset, p.numel) for p in chosen)
            stretches.extend(_stretches(flat, chosen))
        if not any(param != PADDING for param, _, _ in places):
            return None
        if len(stretches) == 1:
            data = stretches[0].to("cpu", copy=True)
        else:
            data = torch.cat(stretches).to("cpu")
    return Snapshot(data.contiguous(), pack_spans(places))


def _stretches(flat: torch.Tensor, pieces: Iterable[Piece]) -> list[torch.Tensor]:
    """Return views that hold the pieces in order, adjoining pieces as one."""
    bounds: list[list[int]] = []
    for piece in pieces:
        if bounds and bounds[-1][1] == piece.tensor_offset:
            bounds[-1][1] += piece.numel
        else:
            bounds.append([piece.tensor_offset, piece.tensor_offset + piece.numel])
    return [flat[start:end] for start, end in bounds]


def resolve(value: Any) -> Any:
    """Turn facts into JSON: 0-d tensors to numbers, dtypes to names, non-finite to strings."""
    if isinstance(value, Pending):
        return resolve(value.read())
    if isinstance(value, torch.Tensor):
        return encode_float(float(value))
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, Mapping):
        return {str(key): resolve(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [resolve(entry) for entry in value]
    return str(value)
