"""Resolve everything about an engine before anything is replaced, and describe it for the trace."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradtrace.capture.adapters import select
from gradtrace.capture.adapters.declare import Adapter, Model
from gradtrace.capture.batch import describe_tensor
from gradtrace.capture.options import SECTION, CaptureOptions
from gradtrace.capture.perturb import perturbation_of
from gradtrace.capture.snapshot import dtype_name, resolve
from gradtrace.errors import BadOptionError
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.records import Header, Manifest, Parameter
from gradtrace.trace.spans import Layout, pack_spans


@dataclass(frozen=True, slots=True)
class Subject:
    """Hold what is to be traced, wholly resolved.

    Attributes:
        model: the engine, its optimizer and its parameters.
        adapter: the declaration that fits the optimizer.
        probes: every probe that was found.
        absent: point -> why this configuration does not have it.
        dp_ranks: global ranks of the data-parallel group.
        effective: settings as engine and optimizer hold them, as JSON.
        perturbation: how the weights were moved on purpose, or ``None``.
    """

    model: Model
    adapter: Adapter
    probes: tuple[select.Resolved, ...]
    absent: Mapping[str, str]
    dp_ranks: tuple[int, ...]
    effective: Mapping[str, Any]
    perturbation: Mapping[str, Any] | None = None


def examine(engine: Any) -> Subject:
    """Resolve an engine, changing nothing.

    Raises:
        NotAnEngineError, UnsupportedEngineError, ProbeError, PerturbationError: it cannot be traced
            whole, or not as what it is.
    """
    select.check_engine(engine)
    model = select.build_model(engine)
    adapter = select.select(model)
    probes = select.resolve(model, adapter)
    try:
        dp_ranks = tuple(torch.distributed.get_process_group_ranks(adapter.dp_group(model)))
        effective = {
            "adapter": adapter.name,
            "dp_world_size": len(dp_ranks),
            **select.engine_settings(model),
            **adapter.effective(model),
        }
        placed = dataclasses.replace(
            model, places=adapter.places(model), shards=adapter.shards(model)
        )
        return Subject(
            model=placed,
            adapter=adapter,
            probes=probes,
            absent={**_weightless(adapter, placed), **adapter.absent(model)},
            dp_ranks=dp_ranks,
            effective=resolve(effective),
            perturbation=perturbation_of(engine.module),
        )
    except (AttributeError, KeyError) as error:
        select.missing(f"attribute that the adapter reads ({error})", "describing the run")


def _weightless(adapter: Adapter, model: Model) -> dict[str, str]:
    """Say which weights cannot be seen from this process."""
    absent = {}
    if adapter.weights(model) is None:
        absent["weight"] = "parameters are not in this process's memory"
    if adapter.masters is None:
        absent["master_weight"] = "no separate fp32 weights are known of this optimizer"
    elif adapter.masters(model) is None:
        absent["master_weight"] = "the fp32 weights are not in this process's memory"
    if adapter.stepped is None:
        absent["optimizer_state"] = "where this optimizer keeps its state is not known"
    return absent


def check_plan(subject: Subject, options: CaptureOptions) -> None:
    """Refuse a plan that would leave a trace of nothing.

    Raises:
        BadOptionError: no trainable parameter or no point of this stage is selected, or a rank that
            this run does not have.
    """
    world_size = torch.distributed.get_world_size()
    absent = [rank for rank in sorted(options.ranks or ()) if rank >= world_size]
    if absent:
        raise BadOptionError(
            f"ranks {', '.join(map(str, absent[:5]))}",
            where=options.named("ranks"),
            expected=f"global ranks below the world size, {world_size}",
            remedy="Correct the numbers.",
        )
    model = subject.model
    trainable = [
        name
        for name, parameter in zip(model.names, model.parameters, strict=True)
        if parameter.requires_grad
    ]
    if not any(options.selects_param(name) for name in trainable):
        raise BadOptionError(
            f"params {', '.join(options.params)[:200]!r}, which match no trainable parameter",
            where=options.named("params"),
            expected=f"globs over names such as {', '.join(trainable[:3])}",
            remedy="Correct the globs.",
        )
    missing = [f"{name} ({why})" for name, why in subject.absent.items() if name in options.points]
    if len(missing) == len(options.points):
        raise BadOptionError(
            f"points {'; '.join(missing)[:300]}",
            where=options.named("points"),
            expected="at least one point that this configuration has",
            remedy="Choose other points; docs/format.md says which stage has which.",
        )


def manifest(run_id: str, subject: Subject, options: CaptureOptions) -> Manifest:
    """Return what all ranks share."""
    model = subject.model
    return Manifest(
        run_id=run_id,
        world_size=torch.distributed.get_world_size(),
        plan=options.plan(),
        parameters=tuple(
            Parameter(
                index=index,
                name=name,
                aliases=model.aliases[index],
                shape=model.shapes[index],
                dtype=dtype_name(parameter.dtype),
                group=model.places.get(index, (None, 0))[0],
                trainable=parameter.requires_grad,
                captured=options.selects_param(name),
            )
            for index, (name, parameter) in enumerate(
                zip(model.names, model.parameters, strict=True)
            )
        ),
        # Its own section is in the plan: two runs that record different steps train alike.
        ds_config=resolve(
            {k: v for k, v in select.ds_config(model.engine).items() if k != SECTION}
        ),
        packages=select.packages(),
        created_s=time.time(),
        perturbation=subject.perturbation,
    )


def header(
    rank: int, subject: Subject, options: CaptureOptions
) -> tuple[Header, dict[int, Layout]]:
    """Return what only this rank knows, and the layouts of its shards."""
    layouts: dict[int, Layout] = {}
    partitions: dict[str, int] = {}
    for unit, pieces in subject.model.shards.items():
        partitions[unit] = len(layouts)
        layouts[len(layouts)] = pack_spans((p.param, p.param_offset, p.numel) for p in pieces)
    status = {}
    for name in POINT_NAMES:
        if name in subject.absent:
            status[name] = f"absent: {subject.absent[name]}"
        else:
            status[name] = "recorded" if name in options.points else "not_planned"
    described = Header(
        rank=rank,
        dp_rank=subject.dp_ranks.index(rank),
        dp_ranks=subject.dp_ranks,
        points=status,
        partitions=partitions,
        effective=subject.effective,
        host=socket.gethostname(),
        buffers=tuple(
            resolve(describe_tensor(name, buffer))
            for name, buffer in subject.model.engine.module.named_buffers()
        ),
    )
    return described, layouts
