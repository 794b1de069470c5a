"""Say what can be traced here: one ds_config, or each stage with defaults.

Engines run in forked CPU ranks (`gradtrace.testing.ranks`); nothing here touches a GPU. torch and
deepspeed are imported only after it is known that they are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtrace.errors import BadOptionError, EngineBuildError, MissingDependencyError
from gradtrace.integrations.doctor.results import STAND_IN, Check, Checkup, Reason
from gradtrace.testing.ranks import cpu_environment, import_once, require_deepspeed


def examine(
    config: Path | None,
    *,
    ranks: int = 2,
    model: str | None = None,
    parameters: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Checkup:
    """Examine one ds_config, or each stage with defaults.

    Args:
        config: a ds_config; None for stages 0 to 3 with defaults.
        ranks: CPU ranks to build engines on.
        model: ``MODULE:CALLABLE`` that returns the user's model; None for the stand-in.
        parameters: scale the cost to a model of that many trainable parameters.
        options: capture options, as `gradtrace.wrap` takes them.
        progress: told of each stage in one line.

    Raises:
        MissingDependencyError: torch or deepspeed is not there, or cannot be imported.
        BadOptionError: the file, the model or a capture option cannot be used.
        EngineBuildError: DeepSpeed makes no engine of the ds_config that was given.
    """
    chosen = _configurations(config)
    _import_deepspeed()
    from gradtrace.capture.adapters.select import packages
    from gradtrace.capture.options import parse_options
    from gradtrace.integrations.doctor.check import check
    from gradtrace.integrations.doctor.rank import Order

    capture = dict(options or {})
    params = parse_options(**capture).params
    if capture.pop("params", None) is not None and model is None:
        raise BadOptionError(
            "--params without --model",
            where="capture option params",
            expected="a model whose parameters have names: the stand-in's mean nothing",
            remedy="Give --model MODULE:CALLABLE too, or leave --params out.",
        )
    checks = []
    for name, given in chosen.items():
        unbuilt = _refused_unbuilt(given)
        if unbuilt is not None:
            checks.append(Check(name, "refused", model or STAND_IN, reason=unbuilt))
            continue
        progress(f"building {name} on {ranks} CPU ranks")
        order = Order(given, ranks, model, None, capture, params, Path())
        try:
            found = check(name, order, parameters, progress)
            checks.append(dataclasses.replace(found, notes=(*found.notes, *_not_examined(given))))
        except EngineBuildError as error:
            if config is not None:
                raise
            reason = Reason(error.slug, error.found, error.expected, error.remedy)
            checks.append(Check(name, "unknown", model or STAND_IN, reason=reason))
    return Checkup(packages(), ranks, tuple(checks))


def _refused_unbuilt(given: Mapping[str, Any]) -> Reason | None:
    """Return why `wrap` refuses what cannot be built here: NVMe needs kernels and a disk of its own."""
    zero = given.get("zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) if isinstance(zero, Mapping) else None
        if isinstance(section, Mapping) and section.get("device") == "nvme":
            return Reason(
                "unsupported_engine",
                f"{name} to NVMe",
                "a configuration that can be traced whole; gradients or weights are not in memory there",
                "Trace a run without it; docs/coverage.md lists what is traced.",
            )
    return None


def _not_examined(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the stand-in cannot show of a configuration."""
    notes = []
    if "pipeline" in given:
        notes.append("pipeline: not examined; the engine of a PipelineModule is refused")
    for name in ("bf16", "fp16"):
        section = given.get(name)
        if isinstance(section, Mapping) and section.get("enabled") == "auto":
            notes.append(
                f"{name}.enabled is auto: examined as false; write true to examine that dtype"
            )
    return tuple(notes)


def _configurations(path: Path | None) -> dict[str, Mapping[str, Any]]:
    if path is None:
        return {
            f"stage {stage}": {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": stage},
            }
            for stage in (0, 1, 2, 3)
        }
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = (error.strerror or type(error).__name__).lower()
    except (ValueError, RecursionError) as error:
        found = f"no JSON ({error})"
    else:
        if isinstance(given, dict):
            return {str(path): given}
        found = f"JSON, but a {type(given).__name__}"
    raise BadOptionError(
        found,
        where=f"--config {path}",
        expected="a ds_config: a JSON object",
        remedy="Give the file that the training gives DeepSpeed.",
    )


def _import_deepspeed() -> None:
    require_deepspeed("gradtrace doctor")
    os.environ.update(cpu_environment())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked, and must not share a GPU's context
    fresh = "deepspeed" not in sys.modules
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            warnings.catch_warnings(action="ignore"),
        ):
            import_once()
        if fresh:  # its logger keeps the standard output that it found at import
            logging.getLogger("DeepSpeed").handlers.clear()
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise MissingDependencyError(
            f"a deepspeed that cannot be imported: {said}",
            where="gradtrace doctor",
            expected="import deepspeed to work",
            remedy="Run python -c 'import deepspeed' to see all that it says.",
        ) from None
