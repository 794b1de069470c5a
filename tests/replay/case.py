"""Say what a case is: trainings, the releases that they run on, and what must be found there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.real.releases.install import installed
from tests.replay.by_hand import Array, Local
from tests.replay.problem import Size

At = tuple[int, int | None]  # step, micro_step
# From all local gradients of a step and a parameter's name to what is applied to it, the accumulation's
# factor left out: for each element one of several, where it depends on the rank that owns it.
Applies = Callable[[Mapping[str, Local], str], list[Array]]


@dataclass(frozen=True)
class Wanted:
    """State what an audit must find, and nothing beside it.

    Attributes:
        law, cause: of every finding.
        at: every (step, micro_step) that is found, the first first.
        params: names; every trained parameter by default; none for what is no parameter's.
        rank: that holds the first parameter's wrong values; ``None`` where it is several.
        says: words that the first finding's detail must hold.
    """

    law: str
    cause: str
    at: tuple[At, ...]
    params: tuple[str, ...] | None = None
    rank: int | None = None
    says: str = ""


@dataclass(frozen=True)
class Run:
    """Describe one training on several releases.

    Attributes:
        name: what it is called among the case's.
        size: its size.
        bad: releases that have the bug.
        right: releases that have it not: audit passes.
        wanted: what is found on a bad one, in this order.
        settings, loop: given to the module's ``config`` and ``train``.
        applies: the gradient that a bad release applies; ``None``: any that is not the right one.
        weight: what every micro-step's gradient is asked to count; 1/micro_steps by default.
        off: names of the parameters that a bad release trains wrong; all by default.
        told: whether what the loop yields is the right gradient, where it yields something.
        notes: words that a note of the audit must hold, whatever the release.
    """

    name: str
    size: Size = field(default_factory=Size)
    bad: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    applies: Applies | None = None
    weight: float | None = None
    off: tuple[str, ...] | None = None
    told: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def releases(self) -> tuple[str, ...]:
        return (*self.right, *self.bad)

    @property
    def asked(self) -> float:
        return 1 / self.size.micro_steps if self.weight is None else self.weight


@dataclass(frozen=True)
class Compared:
    """State what a diff of two runs must say.

    Attributes:
        baseline, candidate: (name of the run, release).
        verdict: the diff's.
        point, step, micro_step: where the runs part, if they do.
        cause: that is blamed on neither side.
        says: words that the blame's detail must hold.
        notes: words that the notes must hold.
    """

    baseline: tuple[str, str]
    candidate: tuple[str, str]
    verdict: str
    point: str | None = None
    step: int | None = None
    micro_step: int | None = None
    cause: str | None = None
    says: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Hold one case.

    Attributes:
        reference: where it is reported.
        runs, compared: what is run, and what of it is compared.
    """

    reference: str
    runs: tuple[Run, ...]
    compared: tuple[Compared, ...] = ()


NEWEST = installed()


def each(
    size: Size, micro_steps: Iterable[int | None], steps: Iterable[int] | None = None
) -> tuple[At, ...]:
    """Return these micro-steps of each step."""
    chosen = list(micro_steps)
    return tuple((step, m) for step in (steps or range(size.steps)) for m in chosen)
