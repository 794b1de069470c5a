"""Plant one fault at one hop of a synthetic run: the bugs that gradtrace exists to find, as data.

A `Fault` says what goes wrong (``kind``), at which hop (the ``law`` that it breaks) and where. The
simulator of `gradtrace.testing.synthetic` computes every hop correctly and then lets `apply` spoil
it, so what follows from a fault follows in the trace too, as it would in a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gradtrace.trace.dtypes import Float64


@dataclass(frozen=True, slots=True)
class Fault:
    """Describe one planted fault; a selector that is ``None`` matches everything.

    Attributes:
        kind: one of `KINDS`, or of `SPECIAL_KINDS` (those act on more than one tensor's values).
        law: the hop: ``seed``, ``accumulate_local``, ``pack``, ``reduce``, ``partition``,
            ``accumulate``, ``master``, ``unscale_clip``, ``update``, ``publish`` or ``replicate``.
        step, micro_step, rank, param: where it strikes.
        amount: what the kind takes: a factor (``scaled``), elements (``shifted``), a rank
            (``rank_missing``), which of the micro-steps so far (``lost_micro_step``), significand
            bits (``low_precision``), a value (``padding``).
    """

    kind: str
    law: str
    step: int | None = None
    micro_step: int | None = None
    rank: int | None = None
    param: str | None = None
    amount: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS and self.kind not in SPECIAL_KINDS:
            raise ValueError(f"no fault of kind {self.kind!r}")
        if self.law not in HOPS:
            raise ValueError(f"no hop {self.law!r}")

    def strikes(self, law: str, step: int, micro_step: int | None, rank: int | None) -> bool:
        """Say whether the fault is planted there, whatever the parameter."""
        return (
            self.law == law
            and self.step in (None, step)
            and self.micro_step in (None, micro_step)
            and self.rank in (None, rank)
        )


@dataclass(frozen=True, slots=True)
class Hop:
    """Hold what a fault may need to know of the hop that it spoils, for one parameter on one rank.

    Attributes:
        values: the correct output, 1-D float64.
        now: what this event alone contributes, unrounded; ``values`` where nothing is carried.
        carry: the buffer before this event, or zeros.
        before: the same hop's output one event earlier (the step before at the first), or zeros.
        last_step: what the buffer held when the step before ended, or zeros.
        own: the rank's own contribution to a reduction, unscaled.
        ranks: every rank's contribution to a reduction, already divided by their number.
        world_size: how many ranks there are.
        peers: other parameters' outputs of the same hop and length, in order of the name.
    """

    values: Float64
    now: Float64
    carry: Float64
    before: Float64
    last_step: Float64
    own: Float64
    ranks: Sequence[Float64]
    world_size: int
    peers: Mapping[str, Float64] = field(default_factory=dict)


def plain_hop(values: Float64, **more: object) -> Hop:
    """Return a `Hop` whose unnamed members are the values themselves, or zeros."""
    zeros = np.zeros_like(values)
    members: dict[str, object] = {
        "values": values,
        "now": values,
        "carry": zeros,
        "before": zeros,
        "last_step": zeros,
        "own": values,
        "ranks": (values,),
        "world_size": 1,
        **more,
    }
    return Hop(**members)  # type: ignore[arg-type]


def apply(fault: Fault, hop: Hop) -> Float64:
    """Return what the hop gives when the fault strikes it; the caller rounds it to the dtype."""
    return KINDS[fault.kind](hop, fault.amount)


def _rank_missing(hop: Hop, amount: float) -> Float64:
    return sum(
        (part for rank, part in enumerate(hop.ranks) if rank != int(amount)),
        start=np.zeros_like(hop.values),
    )


def _non_finite(hop: Hop, amount: float) -> Float64:
    spoiled = hop.values.copy()
    if spoiled.size:
        spoiled[int(amount) % spoiled.size] = np.nan
    return spoiled


def _low_precision(hop: Hop, amount: float) -> Float64:
    mantissa, exponent = np.frexp(hop.values)
    scale = 2.0 ** int(amount)
    return np.ldexp(np.round(mantissa * scale) / scale, exponent)


def _partly_overwritten(hop: Hop, _: float) -> Float64:
    spoiled = hop.values.copy()
    half = spoiled.size // 2
    spoiled[half:] = hop.own[: spoiled.size - half]
    return spoiled


def _swapped(hop: Hop, _: float) -> Float64:
    return next(iter(hop.peers.values()), hop.values)


KINDS: Final[Mapping[str, Callable[[Hop, float], Float64]]] = {
    # accumulation
    "dropped_micro_steps": lambda hop, _: hop.now,
    "skipped_micro_step": lambda hop, _: hop.carry,
    "double_counted": lambda hop, _: hop.values + hop.now,
    "carried_over": lambda hop, _: hop.values + hop.last_step,
    "scaled": lambda hop, amount: hop.carry + amount * hop.now,
    # reduction
    "not_averaged": lambda hop, _: hop.values * hop.world_size,
    "averaged_twice": lambda hop, _: hop.values / hop.world_size,
    "not_reduced": lambda hop, _: hop.own,
    "rank_missing": _rank_missing,
    # any tensor
    "zeroed": lambda hop, _: np.zeros_like(hop.values),
    "sign_flipped": lambda hop, _: -hop.values,
    "shifted": lambda hop, amount: np.roll(hop.values, int(amount)),
    "stale": lambda hop, _: hop.before,
    "swapped": _swapped,
    "non_finite": _non_finite,
    "low_precision": _low_precision,
    "partly_overwritten": _partly_overwritten,
}

SPECIAL_KINDS: Final[tuple[str, ...]] = (
    "order_mismatch",  # replicate: the rank lists equal-sized bucket parameters in another order
    "boundary_mismatch",  # replicate: the rank's boundary flag is the opposite
    "weights_differ",  # replicate: the rank's model weights are ``amount`` more
    "padding",  # master: elements of no parameter hold ``amount``
    "wrong_seed",  # seed: the gradient at the loss, and all that follows, is ``amount`` times it
    "not_unscaled",  # unscale_clip: clipped_grad still holds the loss scale
    "wrong_clip",  # unscale_clip: clipped_grad is ``amount`` times too large
    "wrong_moment",  # update: the first moment that the step leaves is ``amount`` times too large
    "lost_micro_step",  # live accumulations only: micro-step number ``amount`` of the step is lost
)

HOPS: Final[tuple[str, ...]] = (
    "seed",
    "accumulate_local",
    "pack",
    "reduce",
    "partition",
    "accumulate",
    "master",
    "unscale_clip",
    "update",
    "publish",
    "replicate",
)
