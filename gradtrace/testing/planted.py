"""Hold what is planted into a live engine: its clock, what was struck, and how methods are replaced."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.capture.adapters.select import signature_of
from gradtrace.testing.mutators import Fault
from gradtrace.testing.sites import Call, Live, Stretch
from gradtrace.trace.dtypes import DTYPES, Float64


@dataclass(frozen=True, slots=True)
class Strike:
    """Say what a fault changed in one stretch of a parameter.

    Attributes:
        moved: how far the element that moved most went, in unit roundoffs of the larger of its two
            values in the stretch's dtype; infinite for NaN.
    """

    law: str
    step: int
    micro_step: int
    rank: int
    param: str
    start: int
    numel: int
    moved: float


@dataclass
class Clock:
    """Count steps and backward passes, as the engine's callers make them."""

    step: int = 0
    micro_step: int = -1
    inside: bool = False  # a backward pass
    armed: bool = False  # from forward to the end of backward

    @property
    def coming(self) -> int:
        """Return the number of the backward pass that runs, or that comes next."""
        return self.micro_step if self.inside else self.micro_step + 1


@dataclass
class Planted:
    """Hold what was planted into an engine.

    Attributes:
        strikes: what the faults changed so far, on this rank.
        report: a file for them, written anew after every strike, or ``None``.
    """

    live: Live
    clock: Clock
    rank: int
    strikes: list[Strike] = field(default_factory=list)
    report: Path | None = None

    def struck(self, fault: Fault, stretch: Stretch, before: Float64, after: Float64) -> None:
        """Note what a fault did to a stretch."""
        unit = DTYPES[str(stretch.values.dtype).removeprefix("torch.")].unit_roundoff
        size = unit * np.maximum(np.abs(before), np.abs(after))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(after == before, 0.0, np.abs(after - before) / size)
        moved = float(np.nan_to_num(ratio, nan=np.inf).max(initial=0.0))
        self.note(fault, self.clock.micro_step, stretch.name, stretch.start, len(before), moved)

    def note(
        self,
        fault: Fault,
        micro_step: int,
        param: str = "",
        start: int = 0,
        numel: int = 1,
        moved: float = float("inf"),
    ) -> None:
        """Note a strike, and write the report."""
        where = (fault.law, self.clock.step, micro_step, self.rank)
        self.strikes.append(Strike(*where, param, start, numel, moved))
        if self.report is not None:
            self.report.mkdir(parents=True, exist_ok=True)
            lines = json.dumps([asdict(strike) for strike in self.strikes])
            (self.report / f"strikes-{self.rank}.json").write_text(lines)


def replace_method(
    owner: Any, name: str, around: Callable[[Callable[..., Any], Any, Any], Any]
) -> Callable[[Any, Any], Call]:
    """Replace ``owner.name`` by ``around(original, args, kwargs)``; its signature stays.

    Returns:
        A function of positional and named arguments that names them all.
    """
    original = getattr(owner, name)
    signature = signature_of(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    replacement.__name__ = name
    replacement.__signature__ = signature  # type: ignore[attr-defined]
    object.__setattr__(owner, name, replacement)

    def bind(args: Any, kwargs: Any) -> Call:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    return bind


def start_clock(engine: Any) -> Clock:
    """Count an engine's steps and backward passes from now on."""
    clock = Clock()

    def forward(original: Any, args: Any, kwargs: Any) -> Any:
        clock.armed = True
        return original(*args, **kwargs)

    def backward(original: Any, args: Any, kwargs: Any) -> Any:
        clock.micro_step, clock.inside = clock.micro_step + 1, True
        try:
            return original(*args, **kwargs)
        finally:
            clock.inside = clock.armed = False

    def take_step(original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        clock.step, clock.micro_step = clock.step + 1, -1
        return result

    replace_method(engine, "forward", forward)
    replace_method(engine, "backward", backward)
    replace_method(engine, "_take_model_step", take_step)
    return clock
