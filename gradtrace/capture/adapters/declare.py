"""Define the vocabulary that adapters are declared in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gradtrace.capture.snapshot import Piece, Sighting, whole
from gradtrace.trace.spans import PADDING

Owner = Literal["optimizer", "engine", "base_optimizer"]


@dataclass(frozen=True, slots=True)
class Model:
    """Hold the engine, its optimizer, and the parameter table by object identity.

    Attributes:
        engine, optimizer: DeepSpeed's, live.
        names: parameter names in table order.
        index: ``id(parameter)`` -> index in the table.
        parameters: the parameters themselves, in table order.
        shapes: full shapes, in table order.
        aliases: further names of each parameter.
        places: table index -> (optimizer group, position in it); empty until an adapter is chosen.
        shards: unit -> this rank's shard, padding included; empty until then.
    """

    engine: Any
    optimizer: Any
    names: tuple[str, ...]
    index: Mapping[int, int]
    parameters: tuple[torch.nn.Parameter, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[tuple[str, ...], ...]
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    shards: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)

    def owner(self, name: Owner) -> Any:
        """Return the live object that a probe's method belongs to."""
        if name == "engine":
            return self.engine
        return self.optimizer if name == "optimizer" else self.base_optimizer

    @property
    def base_optimizer(self) -> Any:
        """Return the optimizer that DeepSpeed's wraps, or the only one there is."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def place(self, parameter: Any) -> tuple[int, int]:
        """Return a live parameter's optimizer group and its position there."""
        return self.places[self.of(parameter)]

    def of(self, parameter: Any) -> int:
        """Return the table index of a live parameter.

        Raises:
            KeyError: the optimizer holds a parameter that the module does not.
        """
        return self.index[id(parameter)]


@dataclass(frozen=True, slots=True)
class Call:
    """Hold one call of a probed method: bound arguments, and the result once it returned."""

    arguments: Mapping[str, Any]
    result: Any = None


Sight = Callable[[Model, Call], Iterable[Sighting]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Declare one place where a point is seen.

    Attributes:
        point: the point it records.
        method: attribute of the owner that is replaced while tracing.
        when: whether the tensor is looked at before the original runs or after it.
        sight: finds the live tensors and their pieces.
        owner: which object has the method.
        arguments: names that the method's signature must have.
        attributes: attributes that ``sight`` reads from the optimizer.
        required: whether a method that is not there stops `wrap`.
        one_of: of the probes with this name, the first that binds is used, and one must.
        stream: gives the stream on which the tensor is valid, or ``None`` for the caller's. It must
            follow the settings: the optimizer may hold a stream that it does not use.
        source: where in DeepSpeed this was read.
    """

    point: str
    method: str
    when: Literal["before", "after"]
    sight: Sight
    source: str
    owner: Owner = "optimizer"
    arguments: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    required: bool = True
    one_of: str | None = None
    stream: Callable[[Model], Any] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Declare a configuration that is refused by name, never half-traced."""

    found: str
    applies: Callable[[Model], bool]
    reason: str


def whole_weights(model: Model) -> Sequence[Sighting]:
    """Return every parameter's weights, where each rank holds them whole."""
    return [
        Sighting(name, ((parameter.data, whole(index, parameter)),))
        for index, (name, parameter) in enumerate(zip(model.names, model.parameters, strict=True))
        if parameter.numel()
    ]


def shards_of(
    model: Model, kind: str, tensors: Sequence[torch.Tensor]
) -> Sequence[Sighting] | None:
    """Return flat fp32 shards as sightings; ``None`` when one is not in memory (NVMe).

    Args:
        kind: ``group`` or ``sub_group``: what units are called in ``model.shards``.
        tensors: one a unit, laid out as the unit's shard.
    """
    found = []
    for number, tensor in enumerate(tensors):
        unit = f"{kind}{number}"
        pieces = model.shards[unit]
        if tensor.numel() < sum(piece.numel for piece in pieces):
            return None
        if any(piece.param != PADDING for piece in pieces):
            found.append(Sighting(unit, ((tensor.data, pieces),)))
    return found


@dataclass(frozen=True, slots=True)
class Stepped:
    """Say which tensors an optimizer steps, and where parameters lie in them.

    Attributes:
        unit: as of ``master_weight``.
        group: number of the optimizer's parameter group that they are stepped by.
        optimizer: torch's or DeepSpeed's own, whose ``state`` knows the tensors.
        parts: the very tensors that its groups hold, with the pieces in each.
    """

    unit: str
    group: int
    optimizer: Any
    parts: tuple[tuple[torch.Tensor, tuple[Piece, ...]], ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Declare one family of ZeRO optimizers.

    Attributes:
        name: recorded as ``effective.adapter``.
        optimizer_class: class name, without package.
        any_subclass: whether subclasses are traced whatever they override, because nothing but the call
            of their ``step`` is looked at.
        probes: where its points are seen.
        refusals: what this release does not trace.
        attributes: optimizer attributes that anything below reads.
        absent: point -> reason, for points that this optimizer does not have as configured.
        places: for each parameter index, the optimizer's group and the position among those that the
            optimizer keeps together.
        shards: unit -> this rank's shard, padding included.
        carries: whether a parameter's accumulation buffer holds anything now.
        window_open: whether an accumulation window has begun.
        dp_group: the data-parallel process group.
        effective: settings as the optimizer holds them.
        weights: the model weights, a sighting for each parameter; ``None`` when they are not in this
            process's memory now.
        masters: the fp32 weights that the optimizer updates, one sighting for each shard, or ``None``
            likewise. An adapter without it has no ``master_weight``.
        stepped: the tensors that the wrapped optimizer steps. An adapter without it has no
            ``optimizer_state``.
    """

    name: str
    optimizer_class: str
    probes: tuple[Probe, ...]
    refusals: tuple[Refusal, ...]
    attributes: tuple[str, ...]
    absent: Callable[[Model], Mapping[str, str]]
    places: Callable[[Model], Mapping[int, tuple[int, int]]]
    shards: Callable[[Model], Mapping[str, tuple[Piece, ...]]]
    carries: Callable[[Model, torch.nn.Parameter], bool]
    window_open: Callable[[Model], bool]
    dp_group: Callable[[Model], Any]
    effective: Callable[[Model], Mapping[str, Any]]
    any_subclass: bool = False
    weights: Callable[[Model], Sequence[Sighting] | None] = whole_weights
    masters: Callable[[Model], Sequence[Sighting] | None] | None = None
    stepped: Callable[[Model], Sequence[Stepped]] | None = None


def wires(model: Model) -> tuple[torch.dtype, ...]:
    """Return the dtypes that gradients are reduced in: one bucket each (several under autocast)."""
    buckets = getattr(model.optimizer, "ipg_buckets", None)
    return tuple(buckets) if buckets else (model.optimizer.communication_data_type,)


def coarsest_wire(model: Model) -> torch.dtype:
    """Return the dtype that speaks for all of `wires` in the effective settings."""
    return max(wires(model), key=lambda wire: float(torch.finfo(wire).eps))


def settled(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host buffer whose last copy from a device is certain to be in it.

    A copy into pageable memory is complete when the call returns. One into pinned memory is still
    under way on the current stream, so the buffer is read back on that stream: no host waits.
    """
    return host.to(device, non_blocking=True) if host.is_pinned() else host


def optimizer_boundary(model: Model) -> bool | None:
    """Return the optimizer's own boundary claim.

    A bool attribute up to 0.18.9, a method in 0.19: its truth value alone would always be true.
    """
    claim = getattr(model.optimizer, "is_gradient_accumulation_boundary", None)
    claim = claim() if callable(claim) else claim
    return None if claim is None else bool(claim)


def fill_padding(pieces: Iterable[Piece], numel: int, padding: int) -> tuple[Piece, ...]:
    """Return pieces sorted by tensor offset, with padding pieces in the holes up to ``numel``."""
    filled: list[Piece] = []
    at = 0
    for piece in sorted(pieces, key=lambda piece: piece.tensor_offset):
        if piece.tensor_offset > at:
            filled.append(Piece(padding, 0, at, piece.tensor_offset - at))
        filled.append(piece)
        at = piece.tensor_offset + piece.numel
    if at < numel:
        filled.append(Piece(padding, 0, at, numel - at))
    return tuple(filled)
