"""Parse and check the capture options (DESIGN section 7): the same words everywhere."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from gradtrace.errors import BadOptionError
from gradtrace.trace.points import DIGESTED, ON_REQUEST, POINT_NAMES

OnError = Literal["disarm", "raise"]
_STEP: Final = re.compile(r"\s*(\d*)\s*(?:(:)\s*(\d*)\s*(?::\s*(\d*)\s*)?)?")


@dataclass(frozen=True, slots=True)
class StepRange:
    """Hold steps ``start, start + stride, ...`` below ``stop`` (``None``: no end)."""

    start: int
    stop: int | None
    stride: int

    def __contains__(self, step: int) -> bool:
        return (
            step >= self.start
            and (self.stop is None or step < self.stop)
            and (step - self.start) % self.stride == 0
        )


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Say what to record.

    Attributes:
        steps: ranges of steps, any of which selects a step; ``None`` selects all.
        params: shell-style globs over parameter names, any of which selects a parameter.
        points: names of points to record.
        digested: those of them of which only digests are kept.
        ranks: global ranks to record; ``None`` selects all.
        mode: ``full``: tensors are kept whole.
        max_bytes: tensor bytes a rank may record; past them, records become gaps.
        on_error: ``disarm`` (record a gap, warn once, go on untraced) or ``raise``.
        texts: the options as they were given, for the manifest.
    """

    steps: tuple[StepRange, ...] | None
    params: tuple[str, ...]
    points: frozenset[str]
    digested: frozenset[str]
    ranks: frozenset[int] | None
    mode: Literal["full"]
    max_bytes: int | None
    on_error: OnError
    steps_text: str | None

    def selects_step(self, step: int) -> bool:
        """Say whether records of this step are wanted."""
        return self.steps is None or any(step in chosen for chosen in self.steps)

    def selects_param(self, name: str) -> bool:
        """Say whether records of this parameter are wanted."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.params)

    def plan(self) -> dict[str, Any]:
        """Return the manifest's ``plan``."""
        return {
            "steps": self.steps_text,
            "params": list(self.params),
            "points": [name for name in POINT_NAMES if name in self.points],
            "digested": [name for name in POINT_NAMES if name in self.digested],
            "ranks": None if self.ranks is None else sorted(self.ranks),
            "mode": self.mode,
            "max_bytes": self.max_bytes,
            "on_error": self.on_error,
        }


def parse_options(
    *,
    steps: str | int | Iterable[int] | None = None,
    params: str | Sequence[str] | None = None,
    points: str | Sequence[str] | None = None,
    ranks: str | Iterable[int] | None = None,
    mode: str = "full",
    max_bytes: int | None = None,
    on_error: str = "disarm",
) -> CaptureOptions:
    """Check capture options and bring them into one form.

    Args:
        steps: ``"0:20"``, ``"::10"``, ``"3"``, several joined by commas, or step numbers.
        params: globs, as a sequence or joined by commas; all parameters when ``None``.
        points: names of points, as a sequence or joined by commas; all but ``optimizer_state`` when
            ``None``, of weights (``weight``, ``master_weight``) digests then: tensors are kept whole
            of what is named.
        ranks: global ranks, as numbers or joined by commas; all when ``None``.
        mode: ``full``.
        max_bytes: tensor bytes a rank may record, or ``None``.
        on_error: ``disarm`` or ``raise``.

    Raises:
        BadOptionError: an option means nothing, or this release cannot do it.
    """
    if mode != "full":
        _bad(f"mode {mode!r}", "mode", "'full'; digests are not in this release", "Use full.")
    if on_error not in ("disarm", "raise"):
        _bad(f"on_error {on_error!r}", "on_error", "'disarm' or 'raise'", "Use one of the two.")
    if max_bytes is not None and (isinstance(max_bytes, bool) or max_bytes < 0):
        _bad(
            f"max_bytes {max_bytes!r}",
            "max_bytes",
            "a number of bytes",
            "Correct it, or leave it out.",
        )
    steps_text = _steps_text(steps)
    usual = [name for name in POINT_NAMES if name not in ON_REQUEST]
    names = _words(points) if points is not None else usual
    unknown = [name for name in names if name not in POINT_NAMES]
    if unknown or not names:
        _bad(
            f"points {', '.join(unknown) or 'none'}",
            "points",
            f"some of {', '.join(POINT_NAMES)}",
            "Correct the names.",
        )
    globs = _words(params) if params is not None else ["*"]
    if not globs:
        _bad("no parameter glob", "params", "at least one glob", "Leave params out to record all.")
    return CaptureOptions(
        steps=None if steps_text is None else _parse_steps(steps_text),
        params=tuple(globs),
        points=frozenset(names),
        digested=DIGESTED if points is None else frozenset(),
        ranks=_parse_ranks(ranks),
        mode="full",
        max_bytes=max_bytes,
        on_error="raise" if on_error == "raise" else "disarm",
        steps_text=steps_text,
    )


def _words(value: str | Sequence[str]) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]


def _steps_text(steps: str | int | Iterable[int] | None) -> str | None:
    if steps is None or isinstance(steps, str):
        return steps
    if isinstance(steps, int):
        return str(steps)
    return ",".join(str(step) for step in steps)


def _parse_steps(text: str) -> tuple[StepRange, ...]:
    ranges: list[StepRange] = []
    for part in text.split(","):
        match = _STEP.fullmatch(part)
        if match is None or not part.strip():
            _bad(f"steps {text!r}", "steps", "such as '0:20', '::10', '3,7'", "Correct the range.")
        start, colon, stop, stride = match.groups()
        first = int(start) if start else 0
        last = (int(stop) if stop else None) if colon else first + 1
        every = int(stride) if stride else 1
        if every == 0 or (last is not None and last <= first):
            _bad(
                f"steps {text!r} select nothing", "steps", "a range of steps", "Correct the range."
            )
        ranges.append(StepRange(first, last, every))
    return tuple(ranges)


def _parse_ranks(ranks: str | Iterable[int] | None) -> frozenset[int] | None:
    if ranks is None:
        return None
    try:
        chosen = frozenset(
            int(rank) for rank in (_words(ranks) if isinstance(ranks, str) else ranks)
        )
    except (TypeError, ValueError):
        chosen = frozenset()
    if not chosen or min(chosen) < 0:
        _bad(f"ranks {ranks!r}", "ranks", "rank numbers such as '0,3'", "Correct the numbers.")
    return chosen


def _bad(found: str, where: str, expected: str, remedy: str) -> NoReturn:
    raise BadOptionError(found, where=f"capture option {where}", expected=expected, remedy=remedy)
