"""Decide whether two traces can be compared, and name every setting in which they differ.

The names and shapes of the parameters must be the same; everything else may differ and is a note,
for a difference of settings is often the answer. *Effective* settings, as the optimizer object
holds them, come first: what the configuration says is not always what runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gradtrace.analysis.align import Alignment
from gradtrace.trace.records import Parameter

MOST_NAMED: Final = 5  # how many differences of one kind a note lists
_LONGEST: Final = 80


@dataclass(frozen=True, slots=True)
class Pair:
    """Name one parameter and its place in both tables.

    Attributes:
        name: as the baseline calls it.
        baseline, candidate: index in each parameter table.
        order: position in the baseline's backward order.
        numel: elements of the full parameter.
    """

    name: str
    baseline: int
    candidate: int
    order: int
    numel: int


@dataclass(frozen=True, slots=True)
class Gate:
    """Hold what the comparison of two runs may rest on.

    Attributes:
        problem: why the runs cannot be compared at all, or ``None``.
        pairs: the parameters that both traces captured, in the baseline's backward order.
        all_captured: whether that is every parameter that either run trains.
        notes: every setting in which the runs differ, with both values.
    """

    problem: str | None
    pairs: tuple[Pair, ...]
    all_captured: bool
    notes: tuple[str, ...]


def compare_runs(baseline: Alignment, candidate: Alignment) -> Gate:
    """Compare what two runs are, before what they computed."""
    problem = _parameter_problem(baseline.parameters, candidate.parameters)
    notes = (
        *_setting_notes("effective", _effective(baseline), _effective(candidate)),
        *_dtype_notes(baseline.parameters, candidate.parameters),
        *_setting_notes("ds_config", _config(baseline), _config(candidate)),
        *_setting_notes("package", _packages(baseline), _packages(candidate)),
    )
    if problem is not None:
        return Gate(problem, (), False, notes)
    theirs = {parameter.name: parameter for parameter in candidate.parameters}
    pairs = tuple(
        Pair(
            mine.name,
            mine.index,
            theirs[mine.name].index,
            baseline.backward_order(mine.index),
            mine.numel,
        )
        for mine in baseline.captured()
        if theirs[mine.name].captured
    )
    paired = {pair.name for pair in pairs}
    trained = {
        parameter.name
        for side in (baseline, candidate)
        for parameter in side.parameters
        if parameter.trainable
    }
    missing = sorted(trained - paired)
    if missing:
        notes += (f"not captured by both runs, so not compared: {some(missing)}",)
    return Gate(None, pairs, not missing, notes)


def _parameter_problem(mine: Iterable[Parameter], theirs: Iterable[Parameter]) -> str | None:
    ours = {parameter.name: parameter.shape for parameter in mine}
    others = {parameter.name: parameter.shape for parameter in theirs}
    parts = []
    for side, here, there in (("baseline", ours, others), ("candidate", others, ours)):
        alone = [name for name in here if name not in there]
        if alone:
            parts.append(f"only the {side} has {some(alone)}")
    reshaped = [
        f"{name} {list(shape)} against {list(others[name])}"
        for name, shape in ours.items()
        if name in others and others[name] != shape
    ]
    if reshaped:
        parts.append(f"shapes differ: {some(reshaped)}")
    return "the models differ: " + "; ".join(parts) if parts else None


def some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _dtype_notes(mine: Iterable[Parameter], theirs: Iterable[Parameter]) -> tuple[str, ...]:
    others = {parameter.name: parameter.dtype for parameter in theirs}
    found: dict[tuple[str, str], list[str]] = {}
    for parameter in mine:
        other = others.get(parameter.name, parameter.dtype)
        if other != parameter.dtype:
            found.setdefault((parameter.dtype, other), []).append(parameter.name)
    return tuple(
        f"dtype of parameters: {one} against {two} ({some(names)})"
        for (one, two), names in found.items()
    )


def _effective(side: Alignment) -> dict[str, Any]:
    """Return the effective settings of the lowest rank, and the world size beside them."""
    settings = dict(side.header(side.ranks[0]).effective) if side.ranks else {}
    return {"world_size": side.trace.manifest.world_size, **settings}


def _config(side: Alignment) -> dict[str, Any]:
    return flatten(side.trace.manifest.ds_config)


def _packages(side: Alignment) -> dict[str, Any]:
    return dict(side.trace.manifest.packages)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level, with dots in the keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _setting_notes(
    kind: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[str, ...]:
    return tuple(
        f"{kind} {key} differs: {shown(mine, key)} against {shown(theirs, key)}"
        for key in sorted({*mine, *theirs})
        if shown(mine, key) != shown(theirs, key)
    )


def shown(settings: Mapping[str, Any], key: str) -> str:
    """Return one setting as a note shows it."""
    if key not in settings:
        return "(not set)"
    text = json.dumps(settings[key], sort_keys=True)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
