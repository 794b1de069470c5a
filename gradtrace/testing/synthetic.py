"""Write traces of runs that never happened: ZeRO's gradient path in numpy, without torch.

`write_run` simulates a run hop by hop, rounding every operation to the dtype that DeepSpeed would
use, and records it through `gradtrace.trace.writer` exactly as capture does (docs/format.md). The
same `Run` gives the same bytes on every machine. Faults are planted with
`gradtrace.testing.mutators`; two runs that differ only in ``stage`` must agree:

    good = write_run(path / "z3", Run(stage=3, micro_steps=4))
    bad = write_run(path / "z2", Run(stage=2, micro_steps=4, faults=(
        Fault("dropped_micro_steps", "accumulate"),)))

The global batch of a step is ``samples`` samples, dealt out over micro-steps and ranks, and
a local gradient is the mean over its samples times the seed. So runs with different world sizes or
accumulation counts have the same mean gradient, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.testing.arithmetic import mean
from gradtrace.testing.mutators import KINDS, Fault, Hop, apply, plain_hop
from gradtrace.testing.runs import (
    PARAMETERS,
    Omission,
    Recorder,
    Run,
    Shards,
    buckets_of,
    rounded,
    run_id_of,
    shards_of,
)
from gradtrace.testing.weights import (
    LEARNING_RATE,
    model_weights,
    moved,
    record_batch,
    record_masters,
    record_states,
    record_weights,
)
from gradtrace.trace.dtypes import DTYPES, Float64
from gradtrace.trace.records import PERTURBATION_HASH, Manifest, Parameter
from gradtrace.trace.schema import encode_float
from gradtrace.trace.spans import PADDING, Layout, pack_spans
from gradtrace.trace.writer import claim_directory, write_manifest

__all__ = ["PARAMETERS", "Fault", "Omission", "Run", "write_run"]

Tensors = dict[str, Float64]  # parameter name -> 1-D values


def write_run(path: str | Path, run: Run) -> Path:
    """Simulate a run and write its trace.

    Args:
        path: a new or empty directory.
        run: what to simulate.

    Returns:
        The trace directory.

    Raises:
        TraceExistsError: the directory holds a trace already.
    """
    root = Path(path)
    claim_directory(root)
    manifest = Manifest(
        run_id=run_id_of(run),
        world_size=run.world_size,
        plan={
            "steps": f"0:{run.steps}",
            "params": ["*"],
            "points": list(run.points),
            "mode": "full",
        },
        parameters=tuple(
            Parameter(index, name, (), shape, run.model_dtype, index % run.groups, True, True)
            for index, (name, shape) in enumerate(run.parameters)
        ),
        ds_config={
            "zero_optimization": {"stage": run.stage, "reduce_bucket_size": run.bucket_numel},
            "gradient_accumulation_steps": run.micro_steps if run.gas_mode == "engine" else 1,
            **run.ds_config,
        },
        packages={"deepspeed": "0.0.0", "numpy": np.__version__, "torch": "0.0.0", **run.packages},
        created_s=0.0,
        perturbation=(
            None
            if run.perturb_sample is None
            else {"sample": run.perturb_sample, "ulp": 1, "hash": PERTURBATION_HASH}
        ),
    )
    write_manifest(root, manifest)
    _Simulation(root, run).play()
    return root


@dataclass
class _Rank:
    """Hold what one rank keeps between hops."""

    recorder: Recorder
    local: Tensors = field(default_factory=dict)
    local_accum: Tensors = field(default_factory=dict)
    accumulated: Tensors = field(default_factory=dict)  # own elements only
    arrived: Tensors = field(default_factory=dict)  # what the last event added, own elements


class _Simulation:
    """Play a run hop by hop on all ranks at once."""

    def __init__(self, root: Path, run: Run) -> None:
        self.run = run
        self.shards: Shards = shards_of(run)
        self.ranks = [
            _Rank(Recorder(root, run, rank, self.shards)) for rank in range(run.world_size)
        ]
        self.backward = [name for name, _ in reversed(run.parameters)]
        self.step = 0
        self.memory: dict[tuple[str, int, str], Float64] = {}  # a hop's output one event earlier
        self.last_step: dict[tuple[str, int, str], Float64] = {}  # and when the last step ended
        rng = np.random.default_rng([run.seed if run.weight_seed is None else run.weight_seed, 1])
        self.weights = {
            name: rounded(rng.normal(size=run.numel(name)), "float32") for name, _ in run.parameters
        }
        if run.perturb_sample is not None:
            self.weights = {
                name: moved(values, run.model_dtype, name, run.perturb_sample)
                for name, values in self.weights.items()
            }
        self.momenta: Tensors = {}

    def play(self) -> None:
        for step in range(self.run.steps):
            self.step = step
            if step in self.run.loaded:
                self.weights = {
                    n: rounded(values / 2, "float32") for n, values in self.weights.items()
                }
                self.momenta = {name: values / 2 for name, values in self.momenta.items()}
            for number, rank in enumerate(self.ranks):
                fault = self._special("weights_differ", "replicate", None, number)
                held = model_weights(self.run, self.shards, number, self.weights, fault)
                held = self._spoil("publish", None, number, held, self.run.model_dtype)
                record_weights(rank.recorder, self.run, self.shards, step, held)
            for micro_step in range(self.run.micro_steps):
                self._backward(micro_step)
                if self.run.stage == 1:
                    self._accumulate_local(micro_step)
                if self.run.stage != 1 or self.run.boundary(micro_step):
                    self._reduce(micro_step)
            self._optimize()
        for rank in self.ranks:
            rank.recorder.close()

    # Faults.

    def _spoil(
        self,
        law: str,
        micro_step: int | None,
        rank: int,
        outputs: Tensors,
        dtype: str,
        hops: Mapping[str, Hop] | None = None,
    ) -> Tensors:
        """Let the planted faults strike one hop's outputs on a rank, and round what they leave."""
        spoiled = dict(outputs)
        for fault in self.run.faults:
            if fault.kind not in KINDS or not fault.strikes(law, self.step, micro_step, rank):
                continue
            before = dict(spoiled)
            for name in outputs:
                if fault.param in (None, name):
                    hop = (hops or {}).get(name) or plain_hop(outputs[name])
                    place = (law, rank, name)
                    zeros = np.zeros_like(outputs[name])
                    peers = {
                        other: values
                        for other, values in sorted(before.items())
                        if other != name and values.size == zeros.size
                    }
                    hop = Hop(
                        values=spoiled[name],
                        now=hop.now,
                        carry=hop.carry,
                        own=hop.own,
                        ranks=hop.ranks,
                        world_size=self.run.world_size,
                        peers=peers,
                        before=self.memory.get(place, zeros),
                        last_step=self.last_step.get(place, zeros),
                    )
                    spoiled[name] = rounded(apply(fault, hop), dtype)
        for name, values in spoiled.items():
            self.memory[law, rank, name] = values
        return spoiled

    def _special(self, kind: str, law: str, micro_step: int | None, rank: int) -> Fault | None:
        return next(
            (
                fault
                for fault in self.run.faults
                if fault.kind == kind and fault.strikes(law, self.step, micro_step, rank)
            ),
            None,
        )

    # Hops.

    def _backward(self, micro_step: int) -> None:
        run = self.run
        pieces = run.world_size * run.micro_steps
        each = max(1, run.samples // pieces)
        noise = np.random.default_rng([run.seed, 3, run.noise_seed, self.step, micro_step])
        batch = {
            name: np.random.default_rng([run.seed, 2, self.step, index]).normal(
                size=(each * pieces, run.numel(name))
            )
            for index, (name, _) in enumerate(run.parameters)
        }
        factor = run.local_factors[micro_step] if run.local_factors else 1.0
        for number, rank in enumerate(self.ranks):
            wrong = self._special("wrong_seed", "seed", micro_step, number)
            seed = run.asked_seed * (wrong.amount if wrong else 1.0)
            first = (micro_step * run.world_size + number) * each
            rank.local = {}
            grads: list[tuple[str, Float64]] = []
            for name in self.backward:
                if (name, micro_step) in run.unused:
                    continue
                mean = batch[name][first : first + each].mean(axis=0)
                if run.drift:
                    mean = mean + run.drift * rounded(self.weights[name], run.model_dtype)
                mean = mean * (1 + run.noise * noise.normal(size=mean.size))
                scale = seed * factor * run.gradient_scale
                parts = [rounded(mean * scale, run.model_dtype)]
                if name in run.twice:
                    parts = [rounded(mean * scale * share, run.model_dtype) for share in (0.3, 0.7)]
                rank.local[name] = rounded(sum(parts[1:], start=parts[0]), run.model_dtype)
                grads.extend((name, part) for part in parts)
            rows = {name: batch[name][first : first + each] for name, _ in run.parameters}
            record_batch(rank.recorder, self.step, micro_step, rows)
            loss = 2.0 + sum(float(rows[first : first + each].mean()) for rows in batch.values())
            if run.drift:
                loss += run.drift * sum(float(values.sum()) for values in self.weights.values())
            self._record_loss(number, micro_step, float(np.float32(loss * factor)), seed)
            for name, values in grads:
                rank.recorder.add(
                    self.step,
                    micro_step,
                    "local_grad",
                    name,
                    values=values,
                    dtype=run.model_dtype,
                    layout=rank.recorder.whole(name),
                )

    def _record_loss(self, number: int, micro_step: int, loss: float, seed: float) -> None:
        run = self.run
        flipped = self._special("boundary_mismatch", "replicate", micro_step, number)
        boundary = run.boundary(micro_step) != (flipped is not None)
        facts: dict[str, Any] = {
            "loss": encode_float(loss),
            "loss_grad": seed,
            "output_factors": [],
            "seed": seed,
            "path": "engine.backward",
            "loss_scale": run.loss_scale,
            "gas": run.micro_steps if run.gas_mode == "engine" else 1,
            "scale_wrt_gas": True,
            "boundary": boundary,
            "optimizer_boundary": boundary,
        }
        self.ranks[number].recorder.add(self.step, micro_step, "loss", "loss", facts=facts)

    def _accumulate_local(self, micro_step: int) -> None:
        run = self.run
        dtype = run.buffer_dtype
        for number, rank in enumerate(self.ranks):
            carried = rank.local_accum
            hops: dict[str, Hop] = {}
            for name, values in rank.local.items():
                now = rounded(values, dtype)
                carry = carried.get(name, np.zeros_like(now))
                total = run.arithmetic.add(carry, now, DTYPES[dtype])
                hops[name] = plain_hop(total, now=now, carry=carry, own=now)
            outputs = {name: hop.values for name, hop in hops.items()}
            outputs = self._spoil("accumulate_local", micro_step, number, outputs, dtype, hops)
            rank.local_accum = {**carried, **outputs}
            for name in outputs:
                rank.recorder.add(
                    self.step,
                    micro_step,
                    "local_accum",
                    name,
                    values=outputs[name],
                    dtype=dtype,
                    layout=rank.recorder.whole(name),
                    facts={"carry": name in carried},
                )

    def _reduce(self, micro_step: int) -> None:
        run = self.run
        present = [
            name for name in self.backward if any(name in self._source(rank) for rank in self.ranks)
        ]
        for names in buckets_of(run, present):
            self._reduce_bucket(micro_step, names)
            if run.stage == 3:
                self._accumulate_shards(micro_step, names)
        if run.stage != 3:
            self._accumulate_shards(micro_step, present)
        if run.stage == 1 and not run.write_back:
            for rank in self.ranks:
                rank.local_accum = {}

    def _source(self, rank: _Rank) -> Tensors:
        return rank.local_accum if self.run.stage == 1 else rank.local

    def _reduce_bucket(self, micro_step: int, names: list[str]) -> None:
        run = self.run
        orders: list[list[str]] = []
        flats: list[Float64] = []
        packed: list[Tensors] = []
        for number, rank in enumerate(self.ranks):
            source = self._source(rank)
            given = {name: source.get(name, np.zeros(run.numel(name))) for name in names}
            given = {name: rounded(values, run.bucket_dtype) for name, values in given.items()}
            given = self._spoil("pack", micro_step, number, given, run.bucket_dtype)
            mixed = self._special("order_mismatch", "replicate", micro_step, number)
            order = list(reversed(names)) if mixed else names
            flat = np.concatenate([given[name] for name in order])
            layout = pack_spans([(rank.recorder.index[n], 0, run.numel(n)) for n in order])
            comm = run.comm_dtype or run.bucket_dtype
            rank.recorder.add(
                self.step,
                micro_step,
                "bucket",
                run.bucket_dtype,
                values=flat,
                dtype=run.bucket_dtype,
                layout=layout,
                facts={"comm_dtype": comm, "ranks": list(range(run.world_size)), "op": "mean"},
            )
            orders.append(order)
            flats.append(flat)
            packed.append(given)
        total, shares = self._collective(flats)
        for number, order in enumerate(orders):
            self._take_reduced(micro_step, number, order, total, shares, packed[number])

    def _collective(self, flats: list[Float64]) -> tuple[Float64, list[Float64]]:
        """Return the mean of the ranks' buffers, and each rank's share of it; all rounded."""
        run = self.run
        comm = run.comm_dtype or run.bucket_dtype
        sent = [rounded(flat, comm) for flat in flats]
        total = mean(sent, DTYPES[comm], run.arithmetic)
        shares = [rounded(flat / run.world_size, comm) for flat in sent]
        return rounded(total, run.bucket_dtype), shares

    def _take_reduced(
        self,
        micro_step: int,
        number: int,
        order: list[str],
        total: Float64,
        shares: list[Float64],
        given: Tensors,
    ) -> None:
        """Keep a rank's view of what left the collective, and record it."""
        run, rank = self.run, self.ranks[number]
        outputs: Tensors = {}
        hops: dict[str, Hop] = {}
        pieces: dict[str, tuple[int, int]] = {}
        at = 0
        for name in order:
            size = run.numel(name)
            everything = run.stage != 3 and not run.reduce_scatter
            offset, numel = (0, size) if everything else self._owned(number, name)
            window = slice(at + offset, at + offset + numel)
            pieces[name] = (offset, numel)
            outputs[name] = total[window]
            hops[name] = plain_hop(
                total[window],
                own=given[name][offset : offset + numel],
                ranks=tuple(share[window] for share in shares),
            )
            at += size
        outputs = self._spoil("reduce", micro_step, number, outputs, run.bucket_dtype, hops)
        held = [name for name in order if pieces[name][1]]
        if run.stage != 3 and held:
            rank.recorder.add(
                self.step,
                micro_step,
                "reduced",
                run.bucket_dtype,
                values=_joined(outputs[name] for name in held),
                dtype=run.bucket_dtype,
                layout=pack_spans([(rank.recorder.index[name], *pieces[name]) for name in held]),
            )
        for name in order:
            offset, numel = self._owned(number, name)
            skip = offset - pieces[name][0]
            rank.arrived[name] = outputs[name][skip : skip + numel]
            if run.write_back:
                values = rank.local_accum.get(name, np.zeros(run.numel(name))).copy()
                values[pieces[name][0] : pieces[name][0] + pieces[name][1]] = outputs[name]
                rank.local_accum[name] = values

    def _owned(self, number: int, name: str) -> tuple[int, int]:
        return self.shards.owned[number].get(name, (0, 0))

    def _accumulate_shards(self, micro_step: int, names: list[str]) -> None:
        """Cut out the rank's shard of what was reduced and add it to the accumulation buffer."""
        run = self.run
        dtype = run.buffer_dtype
        for number, rank in enumerate(self.ranks):
            mine = {n: rank.arrived[n] for n in names if self._owned(number, n)[1]}
            mine = self._spoil("partition", micro_step, number, mine, run.bucket_dtype)
            hops: dict[str, Hop] = {}
            for name, values in mine.items():
                now = rounded(values, dtype)
                carry = rank.accumulated.get(name, np.zeros_like(now))
                if run.write_back:
                    carry = np.zeros_like(now)
                total = run.arithmetic.add(carry, now, DTYPES[dtype])
                hops[name] = plain_hop(total, now=now, carry=carry, own=now)
            outputs = {name: hop.values for name, hop in hops.items()}
            outputs = self._spoil("accumulate", micro_step, number, outputs, dtype, hops)
            rank.accumulated.update(outputs)
            self._record_partition(micro_step, number, mine)
            for unit, layout in self._event_units(number, names):
                if layout:
                    rank.recorder.add(
                        self.step,
                        micro_step,
                        "accumulated",
                        unit,
                        values=self._flat(rank.accumulated, layout),
                        dtype=dtype,
                        layout=layout,
                    )

    def _record_partition(self, micro_step: int, number: int, mine: Tensors) -> None:
        """Record a rank's shards of one event: one by one, or at stage 3 together."""
        recorder = self.ranks[number].recorder
        together = self.run.stage == 3
        for unit, names in {"shards": list(mine)}.items() if together else ((n, [n]) for n in mine):
            pieces = [(recorder.index[name], *self._owned(number, name)) for name in names]
            if pieces:
                recorder.add(
                    self.step,
                    micro_step,
                    "partition",
                    unit,
                    values=_joined(mine[name] for name in names),
                    dtype=self.run.bucket_dtype,
                    layout=pack_spans(pieces),
                )

    def _event_units(self, number: int, names: list[str]) -> list[tuple[str, Layout]]:
        """Return the units that one reduction event touches: groups, or stage 3's bucket."""
        if self.run.stage != 3:
            return list(self.shards.units[number].items())
        index = self.ranks[number].recorder.index
        pieces = [(index[name], *self._owned(number, name)) for name in names]
        return [("shards", pack_spans([p for p in pieces if p[2]]))]

    def _name(self, param: int) -> str:
        return self.run.parameters[param][0]

    def _flat(self, shards: Tensors, layout: Layout, padding: float = 0.0) -> Float64:
        return _joined(
            np.full(span.numel, padding)
            if span.param == PADDING
            else shards.get(self._name(span.param), np.zeros(span.numel))
            for span in layout
        )

    def _optimize(self) -> None:
        run = self.run
        masters: list[Tensors] = []
        for number, rank in enumerate(self.ranks):
            owned = {
                name: rank.accumulated.get(name, np.zeros(numel))
                for name, (_, numel) in self.shards.owned[number].items()
            }
            outputs = {name: rounded(values, "float32") for name, values in owned.items()}
            outputs = self._spoil("master", None, number, outputs, "float32")
            masters.append(outputs)
            padding = self._special("padding", "master", None, number)
            for unit, layout in self.shards.units[number].items():
                rank.recorder.add(
                    self.step,
                    None,
                    "master_grad",
                    unit,
                    layout=layout,
                    values=self._flat(outputs, layout, padding.amount if padding else 0.0),
                )
        squares = sum(float(np.sum(v * v)) for shard in masters for v in shard.values())
        norm = float(np.float32(np.sqrt(squares))) / run.loss_scale
        over = (norm + 1e-6) / run.clip if run.clip > 0 else 0.0
        scale = run.loss_scale * max(1.0, over)
        self._record_masters()
        for rank in self.ranks:
            record_states(rank.recorder, run, self.shards, self.step, self.momenta)
        clipped = self._clip(masters, scale)
        self._update(clipped, taken=bool(np.isfinite(squares)))
        self._record_masters()
        facts = {
            "loss_scale": run.loss_scale,
            "overflow": not np.isfinite(squares),
            "grad_norm": encode_float(norm),
            "clip": run.clip,
            "lr": [LEARNING_RATE] * run.groups,
            "engine_micro_steps": (self.step + 1) * run.micro_steps,
            "engine_global_steps": self.step + 1,
            **({"checkpoint_loaded": True} if self.step in run.loaded else {}),
        }
        for number, rank in enumerate(self.ranks):
            rank.recorder.end_step(self.step, facts)
            zeros = {n: np.zeros(count) for n, (_, count) in self.shards.owned[number].items()}
            for name, values in {**zeros, **rank.accumulated}.items():
                self.last_step["accumulate", number, name] = values
            for name, values in rank.local.items():
                held = self.memory.get(("accumulate_local", number, name), values)
                self.last_step["accumulate_local", number, name] = held
            rank.accumulated, rank.local_accum, rank.arrived = {}, {}, {}

    def _record_masters(self) -> None:
        for rank in self.ranks:
            record_masters(rank.recorder, self.run, self.shards, self.step, self.weights)

    def _clip(self, masters: list[Tensors], scale: float) -> list[Tensors]:
        clipped: list[Tensors] = []
        for number, rank in enumerate(self.ranks):
            unscaled = self._special("not_unscaled", "unscale_clip", None, number)
            wrong = self._special("wrong_clip", "unscale_clip", None, number)
            factor = (1.0 if unscaled else 1.0 / scale) * (wrong.amount if wrong else 1.0)
            factor = float(np.float32(factor))
            outputs = {n: rounded(v * factor, "float32") for n, v in masters[number].items()}
            outputs = self._spoil("unscale_clip", None, number, outputs, "float32")
            for unit, layout in self.shards.units[number].items():
                rank.recorder.add(
                    self.step,
                    None,
                    "clipped_grad",
                    unit,
                    values=self._flat(outputs, layout),
                    layout=layout,
                )
            clipped.append(outputs)
        return clipped

    def _update(self, clipped: list[Tensors], *, taken: bool) -> None:
        """Step each rank's shard by SGD, unless the step is left out."""
        momentum = self.run.momentum
        if momentum and taken and not self.momenta:
            self.momenta = {name: np.zeros_like(values) for name, values in self.weights.items()}
        for number, given in enumerate(clipped):
            hops: dict[str, Hop] = {}
            for name, values in given.items():
                offset, numel = self._owned(number, name)
                own = slice(offset, offset + numel)
                change = values
                before = self.weights[name][own].copy()
                if not taken:
                    hops[name] = plain_hop(before, carry=before, own=before)
                    continue
                if momentum:
                    held = momentum * self.momenta[name][own] + values
                    self.momenta[name][own] = change = rounded(held, "float32")
                after = rounded(before - LEARNING_RATE * change, "float32")
                hops[name] = plain_hop(after, now=after - before, carry=before, own=before)
                wrong = self._special("wrong_moment", "update", None, number)
                if momentum and wrong and wrong.param in (None, name):
                    self.momenta[name][own] = rounded(wrong.amount * change, "float32")
            outputs = {name: hop.values for name, hop in hops.items()}
            outputs = self._spoil("update", None, number, outputs, "float32", hops)
            for name, values in outputs.items():
                offset, numel = self._owned(number, name)
                self.weights[name][offset : offset + numel] = values


def _joined(pieces: Iterable[Float64]) -> Float64:
    return np.concatenate([np.zeros(0), *pieces])
