"""Define what a trace is made of once it is read: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gradtrace.trace.spans import Layout

Json = Any  # what json.loads returns: str, float, int, bool, None, list, dict
Facts = Mapping[str, Json]

PERTURBATION_HASH: Final = "splitmix64/xxh3-64"  # what decides up or down; see docs/format.md


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describe one parameter of the traced model.

    Attributes:
        index: position in the manifest's table; spans refer to it.
        name: the name in ``engine.module.named_parameters()``.
        aliases: further names of the same tensor (tied weights).
        shape: shape of the full, unpartitioned parameter.
        dtype: dtype of the model weight, such as ``bfloat16``.
        group: index of the optimizer's parameter group, or ``None`` when in none.
        trainable: whether it requires a gradient.
        captured: whether the capture plan selects it.
    """

    index: int
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    group: int | None
    trainable: bool
    captured: bool

    @property
    def numel(self) -> int:
        """Return the number of elements of the full parameter."""
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True, slots=True)
class Manifest:
    """Hold what all ranks share; written once, by rank 0.

    Attributes:
        run_id: agreed through the process group's store.
        world_size: number of ranks of the run.
        plan: the capture plan (steps, params, points, ranks, mode, max_bytes, on_error).
        parameters: the parameter table.
        ds_config: the configuration as DeepSpeed was given it.
        packages: versions of python, torch, deepspeed, numpy, gradtrace.
        created_s: seconds since the epoch on rank 0's clock; for people only.
        perturbation: ``sample``, ``ulp`` and ``hash`` where the weights were moved on purpose before the
            run began; ``None`` where they were not.
    """

    run_id: str
    world_size: int
    plan: Facts
    parameters: tuple[Parameter, ...]
    ds_config: Facts
    packages: Mapping[str, str]
    created_s: float
    perturbation: Facts | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that the capture plan says should be there."""
        chosen = self.plan.get("ranks")
        everyone = range(self.world_size)
        return tuple(everyone) if chosen is None else tuple(r for r in everyone if r in chosen)


@dataclass(frozen=True, slots=True)
class Header:
    """Hold what only one rank knows.

    Attributes:
        rank: global rank.
        dp_rank: rank inside the data-parallel group.
        dp_ranks: the global ranks of that group, in group order.
        points: for every point, ``recorded``, ``not_planned``, or ``absent: REASON``.
        partitions: unit name (``group0``) -> id of the layout of this rank's shard of that unit.
        effective: settings as the optimizer object holds them (see docs/format.md).
        host: host name, for people only.
        buffers: ``name``, ``dtype``, ``shape`` and ``hash`` (or ``None``) of every buffer of the model
            when tracing began; ``None`` in traces that are older.
    """

    rank: int
    dp_rank: int
    dp_ranks: tuple[int, ...]
    points: Mapping[str, str]
    partitions: Mapping[str, int]
    effective: Facts
    host: str
    buffers: tuple[Facts, ...] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """Describe one recorded tensor or set of facts.

    Attributes:
        rank: global rank that recorded it.
        step: optimizer step, counted by the tracer.
        micro_step: backward pass inside the step, or ``None`` at optimizer points.
        point: name of the point.
        unit: parameter name, ``group0``, a bucket's dtype, ... : what was recorded there.
        occurrence: how often this point and unit had been recorded before in this micro-step.
        order: position in the rank's causal order of recording.
        key: name of the tensor in its shard, or ``None`` for a record of facts only.
        shard: file name inside the rank's directory, or ``None``.
        dtype: ``float32``, ``bfloat16``, ... of the recorded values, or ``None``.
        layout: id of the layout that the flat tensor follows, or ``None``. A record without a key
            that has one is a digest: ``facts["digest"]`` says something of each span.
        facts: what else was observed (see docs/format.md).
    """

    rank: int
    step: int
    micro_step: int | None
    point: str
    unit: str
    occurrence: int
    order: int
    key: str | None = None
    shard: str | None = None
    dtype: str | None = None
    layout: int | None = None
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gap:
    """State that something planned was not recorded.

    Attributes:
        point: the point, or ``None`` when all points of the micro-step or step are lost.
        unit: the unit, or ``None`` when all units are.
        reason: a slug: ``write_failed``, ``probe_failed``, ``over_budget``, ``backward_failed``, ...
        detail: one line for people.
    """

    rank: int
    step: int
    micro_step: int | None
    point: str | None
    unit: str | None
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Close a step on one rank.

    Attributes:
        micro_steps: number of backward passes the tracer counted in the step.
        records: number of records the step must have on this rank.
        gaps: number of gaps the step must have on this rank.
        partial: wrapped in the middle of an accumulation window: laws that need the missing part
            are not checked.
        facts: the step's scalars (loss scale, overflow, norm, clip, learning rates, counters).
    """

    rank: int
    step: int
    micro_steps: int
    records: int
    gaps: int
    partial: bool
    facts: Facts


@dataclass(frozen=True, slots=True)
class Report:
    """Hold what a framework told its user of steps that ended.

    Attributes:
        step: the last of them, as the tracer counts.
        steps: over how many steps the loss is averaged.
        source: who said it, such as ``transformers.Trainer``.
        framework_step: the step as the framework counts, or ``None``.
        values: of ``loss``, ``grad_norm`` and ``lr`` what was reported.
    """

    rank: int
    step: int
    steps: int
    source: str
    framework_step: int | None
    values: Facts


@dataclass(frozen=True, slots=True)
class Shard:
    """Describe one sealed safetensors file.

    Attributes:
        file: name inside the rank's directory.
        size_bytes: size of the whole file.
        xxh3: XXH3-64 of the whole file, 16 hex digits.
    """

    file: str
    size_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Hold the index of one rank, in the rank's causal order."""

    header: Header
    layouts: Mapping[int, Layout]
    records: tuple[Record, ...]
    gaps: tuple[Gap, ...]
    steps: Mapping[int, StepEnd]
    shards: Mapping[str, Shard]
    reports: tuple[Report, ...]
    closed: str | None  # the reason in the final end line, or None when the rank never closed
