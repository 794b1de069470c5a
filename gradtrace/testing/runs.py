"""Describe synthetic runs: what ZeRO cuts, packs and records, as data for the simulator.

`Run` is what `gradtrace.testing.synthetic.write_run` simulates. Nothing here computes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from gradtrace.testing.arithmetic import Arithmetic
from gradtrace.testing.mutators import Fault
from gradtrace.trace import points
from gradtrace.trace.dtypes import DTYPES, Float64, from_float64, raw_bits, to_float64
from gradtrace.trace.records import Header
from gradtrace.trace.spans import PADDING, Layout, pack_spans
from gradtrace.trace.writer import RankWriter

# Two equal shapes (for swaps), sizes that 2, 3 and 4 ranks must pad, and one single element.
PARAMETERS: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("embed.weight", (6, 6)),
    ("layers.0.weight", (5, 5)),
    ("layers.0.bias", (5,)),
    ("layers.1.weight", (5, 5)),
    ("layers.1.bias", (5,)),
    ("head.scale", (1,)),
)


@dataclass(frozen=True, slots=True)
class Omission:
    """Select records that capture failed to write, each a gap; ``None`` matches everything."""

    point: str | None = None
    step: int | None = None
    micro_step: int | None = None
    rank: int | None = None
    unit: str | None = None

    def strikes(self, rank: int, step: int, micro_step: int | None, point: str, unit: str) -> bool:
        """Say whether this record is lost."""
        return (
            self.point in (None, point)
            and self.step in (None, step)
            and self.micro_step in (None, micro_step)
            and self.rank in (None, rank)
            and self.unit in (None, unit)
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Describe a run to simulate.

    Attributes:
        stage: ZeRO stage, 1, 2 or 3.
        world_size, steps, micro_steps: ranks, optimizer steps, backward passes in each.
        parameters: ``(name, shape)`` in model order; backward order is the reverse.
        groups: optimizer groups; parameter i is in group i modulo this (sub-groups at stage 3).
        model_dtype: of weights and local gradients.
        accum_dtype: of the accumulation buffer; ``None`` for the model's.
        comm_dtype: of the collective; ``None`` for the bucket's.
        gas_mode: ``engine``: the config names the accumulation count, the seed is 1/micro_steps and
            the last micro-step is the boundary. ``manual``: the config says 1, the caller runs
            several backward passes: seed 1, and every micro-step is a boundary.
        loss_scale, clip: as DeepSpeed has them; clip 0 is none.
        reduce_scatter: whether ``reduced`` holds the rank's own spans only (stages 1 and 2).
        write_back: stage 1, manual: leave what was reduced in ``param.grad`` for the next
            micro-step to add to, as plain DDP does, instead of clearing it.
        bucket_numel: a bucket is reduced before it would exceed this.
        seed: of weights, batches and gradients.
        weight_seed: of the weights alone; ``None`` for ``seed``.
        perturb_sample: the weights begin one unit in the last place away, as `run --perturb-ulp` makes
            them, and the manifest says so; ``None`` for none.
        samples: size of the global batch; a multiple of world_size x micro_steps to compare runs.
        drift: how much gradients depend on the weights; 0 keeps local gradients equal for ever.
        noise: relative noise on local gradients, as another kernel would give.
        noise_seed: of that noise.
        local_factors: factor on each micro_step's local gradients and loss that no seed explains
            (a loss that is normalised otherwise); empty for none.
        gradient_scale: factor on every gradient, to come near underflow or overflow.
        unused: ``(name, micro_step)``: that parameter gets no gradient in it.
        momentum: of SGD, which steps the weights.
        whole_weights: keep the values of weights, not digests.
        loaded: steps before which a checkpoint with other weights was loaded.
        optimizer_facts: members added over what `optimizer_state` usually says.
        twice: parameters whose gradient arrives in two parts (reentrant checkpointing).
        points: the points that the capture plan selects.
        partial: whether the first step was wrapped midway.
        faults: what goes wrong, in the order of application.
        omissions: what capture failed to record.
        arithmetic: how collectives and accumulation buffers add.
        shard_bytes: when the writer seals a shard; small values give many.
        effective, ds_config, packages: members added over the usual ones.
    """

    stage: Literal[1, 2, 3] = 2
    world_size: int = 2
    steps: int = 1
    micro_steps: int = 2
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = PARAMETERS
    groups: int = 1
    model_dtype: str = "float32"
    accum_dtype: str | None = None
    comm_dtype: str | None = None
    gas_mode: Literal["engine", "manual"] = "engine"
    loss_scale: float = 1.0
    clip: float = 0.0
    reduce_scatter: bool = True
    write_back: bool = False
    bucket_numel: int = 40
    seed: int = 0
    weight_seed: int | None = None
    perturb_sample: int | None = None
    samples: int = 24
    drift: float = 0.0
    noise: float = 0.0
    noise_seed: int = 0
    local_factors: tuple[float, ...] = ()
    gradient_scale: float = 1.0
    unused: tuple[tuple[str, int], ...] = ()
    twice: tuple[str, ...] = ()
    momentum: float = 0.0
    whole_weights: bool = False
    loaded: tuple[int, ...] = ()
    optimizer_facts: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[str, ...] = points.POINT_NAMES
    partial: bool = False
    faults: tuple[Fault, ...] = ()
    omissions: tuple[Omission, ...] = ()
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    shard_bytes: int = 64 * 1024 * 1024
    effective: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[Mapping[str, Any], ...] | None = ()

    @property
    def buffer_dtype(self) -> str:
        """Return the dtype of the accumulation buffer."""
        return self.accum_dtype or self.model_dtype

    @property
    def bucket_dtype(self) -> str:
        """Return the dtype of the bucket: stage 1 reduces its own accumulation buffer."""
        return self.buffer_dtype if self.stage == 1 else self.model_dtype

    @property
    def asked_seed(self) -> float:
        """Return the gradient that should arrive at the loss."""
        return self.loss_scale / (self.micro_steps if self.gas_mode == "engine" else 1)

    def boundary(self, micro_step: int) -> bool:
        """Return what the engine claims of this micro-step."""
        return self.gas_mode == "manual" or micro_step == self.micro_steps - 1

    def numel(self, name: str) -> int:
        """Return the number of elements of a parameter."""
        return math.prod(dict(self.parameters)[name])


def rounded(values: Float64, dtype: str) -> Float64:
    """Round float64 values to a dtype and widen them again."""
    kind = DTYPES[dtype]
    return to_float64(raw_bits(from_float64(values, kind), kind), kind)


@dataclass(frozen=True, slots=True)
class Shards:
    """Say which elements each rank owns.

    Attributes:
        owned: for each rank, parameter name -> ``(first element, how many)``; absent when none.
        units: for each rank, unit -> layout of its shard, padding included.
    """

    owned: tuple[Mapping[str, tuple[int, int]], ...]
    units: tuple[Mapping[str, Layout], ...]


def shards_of(run: Run) -> Shards:
    """Cut the parameters as the run's stage does.

    Stages 1 and 2 lay a group's parameters one after another, pad to a multiple of 2 x world size
    and cut that in equal parts; stage 3 pads and cuts each parameter by itself.

    Source: DeepSpeed ``stage_1_and_2.py`` (``flatten_dense_tensors_aligned``,
    ``get_data_parallel_partitions``), ``partition_parameters.py`` (``_partition_param``).
    """
    members = [
        [index for index in range(len(run.parameters)) if index % run.groups == group]
        for group in range(run.groups)
    ]
    kind = "sub_group" if run.stage == 3 else "group"
    owned: list[dict[str, tuple[int, int]]] = []
    units: list[dict[str, Layout]] = []
    for rank in range(run.world_size):
        cut = _cut_each if run.stage == 3 else _cut_flat
        pieces = [cut(run, group, rank) for group in members]
        units.append({f"{kind}{n}": pack_spans(group) for n, group in enumerate(pieces)})
        owned.append(
            {
                run.parameters[param][0]: (offset, numel)
                for group in pieces
                for param, offset, numel in group
                if param != PADDING
            }
        )
    return Shards(tuple(owned), tuple(units))


def _cut_flat(run: Run, group: list[int], rank: int) -> list[tuple[int, int, int]]:
    sizes = [math.prod(run.parameters[param][1]) for param in group]
    unit = 2 * run.world_size
    share = -(-sum(sizes) // unit) * unit // run.world_size
    low, high = rank * share, (rank + 1) * share
    pieces: list[tuple[int, int, int]] = []
    at = 0
    for param, size in zip(group, sizes, strict=True):
        first, last = max(low, at), min(high, at + size)
        if first < last:
            pieces.append((param, first - at, last - first))
        at += size
    filled = sum(numel for _, _, numel in pieces)
    return [*pieces, (PADDING, 0, share - filled)] if filled < share else pieces


def _cut_each(run: Run, group: list[int], rank: int) -> list[tuple[int, int, int]]:
    pieces: list[tuple[int, int, int]] = []
    for param in group:
        size = math.prod(run.parameters[param][1])
        share = -(-size // run.world_size)
        first, last = min(rank * share, size), min((rank + 1) * share, size)
        if first < last:
            pieces.append((param, first, last - first))
        if last - first < share:
            pieces.append((PADDING, 0, share - (last - first)))
    return pieces


def buckets_of(run: Run, present: list[str]) -> list[list[str]]:
    """Group parameters, given in backward order, into buckets of at most ``bucket_numel``."""
    buckets: list[list[str]] = []
    room = -1
    for name in present:
        size = run.numel(name)
        if size > room:
            buckets.append([])
            room = run.bucket_numel
        buckets[-1].append(name)
        room -= size
    return buckets


class Recorder:
    """Write one rank's records, without those outside the plan, and omissions as gaps."""

    def __init__(self, path: Path, run: Run, rank: int, shards: Shards) -> None:
        layouts = tuple(dict.fromkeys(shards.units[rank].values()))
        ids = {layout: number for number, layout in enumerate(layouts)}
        self.run = run
        self.rank = rank
        self.index = {name: number for number, (name, _) in enumerate(run.parameters)}
        self._records = 0
        self._gaps = 0
        self._seen: dict[tuple[int | None, str, str], int] = {}
        self._writer = RankWriter(
            path,
            run_id_of(run),
            Header(
                rank=rank,
                dp_rank=rank,
                dp_ranks=tuple(range(run.world_size)),
                points=_statuses(run),
                partitions={unit: ids[layout] for unit, layout in shards.units[rank].items()},
                effective={**_effective(run), **run.effective},
                host=f"node{rank}.synthetic",
                buffers=run.buffers,
            ),
            dict(enumerate(layouts)),
            shard_bytes=run.shard_bytes,
            seal_every_s=math.inf,  # equal runs must give equal bytes
        )

    def add(
        self,
        step: int,
        micro_step: int | None,
        point: str,
        unit: str,
        *,
        values: Float64 | None = None,
        dtype: str = "float32",
        layout: Layout = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a tensor (already rounded to its dtype), a digest of a layout, or facts."""
        if _statuses(self.run)[point] != "recorded":
            return
        place = (micro_step, point, unit)
        occurrence = self._seen.get(place, 0)
        self._seen[place] = occurrence + 1
        lost = any(o.strikes(self.rank, step, micro_step, point, unit) for o in self.run.omissions)
        if lost:
            self._gaps += 1
            self._writer.add_gap(step, micro_step, point, unit, "write_failed", "planned omission")
            return
        self._records += 1
        data = None if values is None else from_float64(values, DTYPES[dtype])
        self._writer.add_record(
            step, micro_step, point, unit, occurrence, dtype=dtype, data=data, facts=facts,
            layout=None if data is None and not layout else layout,
        )  # fmt: skip

    def whole(self, name: str) -> Layout:
        """Return the layout of one whole parameter."""
        return pack_spans([(self.index[name], 0, self.run.numel(name))])

    def end_step(self, step: int, facts: Mapping[str, Any]) -> None:
        """Close the step."""
        self._writer.end_step(
            step,
            micro_steps=self.run.micro_steps,
            records=self._records,
            gaps=self._gaps,
            partial=self.run.partial and step == 0,
            facts=facts,
        )
        self._records = self._gaps = 0
        self._seen = {}

    def close(self) -> None:
        """Seal everything."""
        self._writer.seal("closed")


def run_id_of(run: Run) -> str:
    """Return the run id of a synthetic run: the same for the same seed and stage."""
    return f"synthetic-{run.seed}-z{run.stage}-w{run.world_size}"


def _statuses(run: Run) -> dict[str, str]:
    absent: dict[str, str] = {}
    if run.stage != 1:
        absent["local_accum"] = f"absent: stage {run.stage} reduces every micro-step"
    if run.stage == 3:
        absent["reduced"] = "absent: reduced and partitioned in one call"
    if run.stage == 1 and run.buffer_dtype != run.model_dtype:
        absent["partition"] = "absent: gradients accumulate in a buffer of their own"
    return {
        name: absent.get(name, "recorded" if name in run.points else "not_planned")
        for name in points.POINT_NAMES
    }


def _effective(run: Run) -> dict[str, Any]:
    zero3 = run.stage == 3
    return {
        "adapter": "zero3" if zero3 else "zero12",
        "optimizer": "DeepSpeedZeroOptimizer_Stage3" if zero3 else "DeepSpeedZeroOptimizer",
        "base_optimizer": "SGD",
        "zero_stage": run.stage,
        "model_dtype": run.model_dtype,
        "grad_accum_dtype": run.buffer_dtype,
        "communication_dtype": run.comm_dtype or run.bucket_dtype,
        "gradient_accumulation_steps": run.micro_steps if run.gas_mode == "engine" else 1,
        "managed_gradient_accumulation": True,
        "gradient_average": True,
        "gradient_predivide_factor": run.arithmetic.predivide,
        "postscale_gradients": True,
        "reduce_scatter": run.reduce_scatter,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "round_robin_gradients": False,
        "reduce_bucket_size": run.bucket_numel,
        "gradient_clipping": run.clip,
        "dp_world_size": run.world_size,
        "sequence_parallel_size": 1,
        "offload_optimizer": False,
    }
