"""Parse and check the capture options (DESIGN section 7): the same words everywhere.

An option that the caller gives (an argument of ``wrap``, an option of ``gradtrace run``) goes before
its ``GRADTRACE_*`` variable, this before the ``"gradtrace"`` section of the ds_config, this before the
default.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from gradtrace.errors import BadOptionError
from gradtrace.trace.points import DIGESTED, ON_REQUEST, POINT_NAMES

OnError = Literal["disarm", "raise"]
OPTIONS: Final = ("steps", "params", "points", "ranks", "mode", "max_bytes", "on_error")
SECTION: Final = "gradtrace"  # of the ds_config; it holds options and never turns tracing on
PREFIX: Final = "GRADTRACE_"
OUT_VARIABLE: Final = "GRADTRACE_OUT"
OWN_VARIABLES: Final = (OUT_VARIABLE, "GRADTRACE_DEBUG")  # that are no capture options
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
        steps_text: the steps as they were given, for the manifest.
        sources: where an option came from, for messages; those that the caller gave are left out.
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
    sources: Mapping[str, str] = field(default_factory=dict)

    def named(self, option: str) -> str:
        """Name an option and where it came from, for messages."""
        return _named(option, self.sources)

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


def choose_options(
    given: Mapping[str, Any], section: Mapping[str, Any] | None = None
) -> CaptureOptions:
    """Bring together what was given, the ``GRADTRACE_*`` variables and a section of the ds_config.

    Args:
        given: options of the caller; ``None`` is not given.
        section: the ``"gradtrace"`` section of the ds_config, where there is one.

    Raises:
        BadOptionError: an option means nothing, whoever gave it; its source is named.
    """
    chosen: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for values, source in (
        (_of_section(section), f"section {SECTION!r} of the ds_config"),
        (_of_environment(), "environment variable {variable}"),
        ({name: value for name, value in given.items() if value is not None}, ""),
    ):
        for name, value in values.items():
            chosen[name] = value
            sources[name] = source.format(variable=PREFIX + name.upper())
    return parse_options(**chosen, sources={name: text for name, text in sources.items() if text})


def _of_section(section: Any) -> dict[str, Any]:
    place = f"section {SECTION!r} of the ds_config"
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        _refuse(f"a {type(section).__name__}", place, "an object of capture options", "Correct it.")
    unknown = sorted(set(map(str, section)) - set(OPTIONS))
    if unknown:
        _refuse(
            f"{', '.join(unknown)[:200]!r}",
            place,
            f"some of {', '.join(OPTIONS)}",
            "Take it out: the section holds options, and turns nothing on.",
        )
    return {name: value for name, value in section.items() if value is not None}


def _of_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable in OWN_VARIABLES or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in OPTIONS:
            found[name] = text
        elif difflib.get_close_matches(name, (*OPTIONS, "out"), n=1, cutoff=0.7):
            _refuse(
                f"environment variable {variable}",
                "the environment",
                f"{PREFIX} and one of OUT, {', '.join(OPTIONS).upper()}",
                "Correct its name, or unset it.",
            )
    if "max_bytes" in found:
        try:
            found["max_bytes"] = int(found["max_bytes"])
        except ValueError:
            text = found["max_bytes"]
            source = {"max_bytes": f"environment variable {PREFIX}MAX_BYTES"}
            _bad_bytes(text, source)
    return found


def parse_options(
    *,
    steps: str | int | Iterable[int] | None = None,
    params: str | Sequence[str] | None = None,
    points: str | Sequence[str] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    mode: str = "full",
    max_bytes: int | None = None,
    on_error: str = "disarm",
    sources: Mapping[str, str] | None = None,
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
        sources: where an option came from, if not from the caller.

    Raises:
        BadOptionError: an option means nothing, or this release cannot do it.
    """
    origin = dict(sources or {})

    def bad(found: str, option: str, expected: str, remedy: str) -> NoReturn:
        _refuse(found, _named(option, origin), expected, remedy)

    if mode != "full":
        bad(f"mode {mode!r}", "mode", "'full'; digests are not in this release", "Use full.")
    if on_error not in ("disarm", "raise"):
        bad(f"on_error {on_error!r}", "on_error", "'disarm' or 'raise'", "Use one of the two.")
    if not _is_size(max_bytes):
        _bad_bytes(max_bytes, origin)
    try:
        steps_text = _steps_text(steps)
        ranges = None if steps_text is None else _parse_steps(steps_text)
    except (TypeError, ValueError):
        what = f"steps {steps!r}"[:200]
        bad(what, "steps", "such as '0:20', '::10', '3,7', that select steps", "Correct the range.")
    for option, words in (("points", points), ("params", params)):
        if words is not None and not _is_text(words):
            bad(f"{option} {words!r}"[:200], option, "text, or a list of texts", "Correct it.")
    usual = [name for name in POINT_NAMES if name not in ON_REQUEST]
    names = _words(points) if points is not None else usual
    globs = _words(params) if params is not None else ["*"]
    unknown = [name for name in names if name not in POINT_NAMES]
    if unknown or not names:
        bad(
            f"points {', '.join(unknown) or 'none'}",
            "points",
            f"some of {', '.join(POINT_NAMES)}",
            "Correct the names.",
        )
    if not globs:
        bad("no parameter glob", "params", "at least one glob", "Leave params out to record all.")
    try:
        chosen_ranks = _parse_ranks(ranks)
    except (TypeError, ValueError):
        bad(f"ranks {ranks!r}", "ranks", "rank numbers such as '0,3'", "Correct the numbers.")
    return CaptureOptions(
        steps=ranges,
        params=tuple(globs),
        points=frozenset(names),
        digested=DIGESTED if points is None else frozenset(),
        ranks=chosen_ranks,
        mode="full",
        max_bytes=max_bytes,
        on_error="raise" if on_error == "raise" else "disarm",
        steps_text=steps_text,
        sources=origin,
    )


def _is_size(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_text(value: Any) -> bool:
    """Say whether a value is a string or an array of strings: a ds_config may hold anything."""
    return isinstance(value, str) or (
        isinstance(value, Sequence) and all(isinstance(part, str) for part in value)
    )


def _words(value: str | Sequence[str]) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]


def _steps_text(steps: str | int | Iterable[int] | None) -> str | None:
    if steps is None or isinstance(steps, str):
        return steps
    if isinstance(steps, int):
        return str(steps)
    return ",".join(str(step) for step in steps)  # TypeError: a ds_config may hold anything


def _parse_steps(text: str) -> tuple[StepRange, ...]:
    """Read ranges of steps; ``ValueError`` where one means nothing or selects nothing."""
    ranges: list[StepRange] = []
    for part in text.split(","):
        match = _STEP.fullmatch(part)
        if match is None or not part.strip():
            raise ValueError(part)
        start, colon, stop, stride = match.groups()
        first = int(start) if start else 0
        last = (int(stop) if stop else None) if colon else first + 1
        every = int(stride) if stride else 1
        if every == 0 or (last is not None and last <= first):
            raise ValueError(part)
        ranges.append(StepRange(first, last, every))
    return tuple(ranges)


def _parse_ranks(ranks: str | int | Iterable[int] | None) -> frozenset[int] | None:
    """Read rank numbers; ``ValueError`` or ``TypeError`` where there is none or one is no rank."""
    if ranks is None:
        return None
    if isinstance(ranks, int):
        ranks = str(ranks)
    chosen = frozenset(int(rank) for rank in (_words(ranks) if isinstance(ranks, str) else ranks))
    if not chosen or min(chosen) < 0:
        raise ValueError(ranks)
    return chosen


def _named(option: str, sources: Mapping[str, str]) -> str:
    source = sources.get(option)
    return f"capture option {option}" + (f", from {source}" if source else "")


def _bad_bytes(value: Any, sources: Mapping[str, str]) -> NoReturn:
    _refuse(
        f"max_bytes {value!r}",
        _named("max_bytes", sources),
        "a number of bytes",
        "Correct it, or leave it out.",
    )


def _refuse(found: str, where: str, expected: str, remedy: str) -> NoReturn:
    raise BadOptionError(found, where=where, expected=expected, remedy=remedy)
