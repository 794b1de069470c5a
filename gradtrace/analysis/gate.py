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

# Effective setting -> the key of the configuration that asks for it.
_ASKED_BY: Final = {
    "autocast_dtype": "torch_autocast.dtype",
    "communication_dtype": "communication_data_type",
    "consecutive_hysteresis": "fp16.consecutive_hysteresis",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "loss_scale_hysteresis": "fp16.hysteresis",
    "loss_scale_window": "fp16.loss_scale_window",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "min_loss_scale": "fp16.min_loss_scale",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "train_batch_size": "train_batch_size",
    "zero_stage": "zero_optimization.stage",
    **{
        name: f"zero_optimization.{name}"
        for name in (
            "allgather_bucket_size",
            "contiguous_gradients",
            "ignore_unused_parameters",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
        )
    },
}
# Sections of the configuration, and packages, that no gradient passes through.
_BESIDE: Final = (
    "comet.",
    "csv_monitor.",
    "gradtrace",
    "steps_per_print",
    "tensorboard.",
    "wandb.",
)


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
    notes = (*_perturbation_notes(baseline, candidate), *_all_notes(baseline, candidate).values())
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


def differences(baseline: Alignment, candidate: Alignment) -> tuple[str, ...]:
    """Name what differs of all that a gradient may depend on, weights and batches left out."""
    return tuple(
        note
        for (_, key), note in _all_notes(baseline, candidate).items()
        if not key.startswith(_BESIDE)
    )


def _all_notes(baseline: Alignment, candidate: Alignment) -> dict[tuple[str, str], str]:
    """Return (kind, key) -> a sentence, for every setting in which the runs differ."""
    effective = _effective(baseline), _effective(candidate)
    config = _config(baseline), _config(candidate)
    notes = {
        ("effective", key): note
        + (_asked(key, *config) if key in effective[0] and key in effective[1] else "")
        for key, note in _setting_notes("effective", *effective).items()
    }
    for number, note in enumerate(_dtype_notes(baseline.parameters, candidate.parameters)):
        notes["dtype", str(number)] = note
    for key, note in _setting_notes("ds_config", *config).items():
        notes["ds_config", key] = note + _in_effect(key, *effective)
    for key, note in _setting_notes("package", _packages(baseline), _packages(candidate)).items():
        notes["package", key] = note
    return notes


def _asked(key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Say what both configurations ask for alike, though what is in effect differs."""
    asked = _ASKED_BY.get(key)
    if asked is None or shown(mine, asked) != shown(theirs, asked):
        return ""
    if asked not in mine:
        return f"; ds_config {asked} is not set in either"
    return f"; ds_config {asked} is {shown(mine, asked)} in both"


def _in_effect(key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Say what is in effect in both runs, though their configurations differ."""
    for name, asked in _ASKED_BY.items():
        if asked == key and name in mine and shown(mine, name) == shown(theirs, name):
            return f"; in effect, {name} is {shown(mine, name)} in both"
    return ""


def _perturbation_notes(baseline: Alignment, candidate: Alignment) -> tuple[str, ...]:
    found = []
    for name, side in (("baseline", baseline), ("candidate", candidate)):
        moved = side.trace.manifest.perturbation
        if moved is not None:
            found.append(
                f"the {name}'s weights were moved on purpose before it began, by one unit in the last "
                f"place (run --perturb-ulp, sample {moved['sample']}): what follows from it is growth"
            )
    return tuple(found)


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


def _setting_notes(kind: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{kind} {key} differs: {shown(mine, key)} against {shown(theirs, key)}"
        for key in sorted({*mine, *theirs})
        if shown(mine, key) != shown(theirs, key)
    }


def shown(settings: Mapping[str, Any], key: str) -> str:
    """Return one setting as a note shows it."""
    if key not in settings:
        return "(not set)"
    text = json.dumps(settings[key], sort_keys=True)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
