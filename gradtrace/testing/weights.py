"""Record the batches, weights and optimizer state of a synthetic run as capture does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import xxhash

from gradtrace.testing.mutators import Fault
from gradtrace.testing.runs import Recorder, Run, Shards, rounded
from gradtrace.trace.digest import digest_of, hash_text, mix64, value_hash
from gradtrace.trace.dtypes import DTYPES, Float64, from_float64, raw_bits, to_float64
from gradtrace.trace.spans import PADDING, Layout, pack_spans

LEARNING_RATE: Final = 0.01
Weights = Mapping[str, Float64]  # parameter name -> 1-D float64, the full parameter
Stretches = list[tuple[Float64, int]]  # values, and the first element that they are


def moved(values: Float64, dtype: str, name: str, sample: int) -> Float64:
    """Return a whole weight, rounded to a dtype and moved by one unit in the last place.

    The numpy twin of `gradtrace.capture.perturb`, after docs/format.md.
    """
    kind = DTYPES[dtype]
    raw = raw_bits(from_float64(values, kind), kind)
    key = np.array([xxhash.xxh3_64_intdigest(f"{sample}:{name}".encode())], dtype=np.uint64)
    up = mix64(np.arange(len(raw), dtype=np.uint64), key) >> np.uint64(63) > 0
    widened = to_float64(raw, kind)
    up &= np.abs(widened) != kind.largest
    stays = (widened == 0) | ~np.isfinite(widened)
    one = raw.dtype.type(1)
    return to_float64(np.where(stays, raw, np.where(up, raw + one, raw - one)), kind)


def model_weights(
    run: Run, shards: Shards, rank: int, weights: Weights, fault: Fault | None
) -> dict[str, Float64]:
    """Return a rank's model weights: whole parameters, at stage 3 its own part of each.

    Args:
        weights: the fp32 weights that they are published from.
        fault: adds its amount to them.
    """
    held: dict[str, Float64] = {}
    for name, values in weights.items():
        first, numel = _own(run, shards, rank, name)
        here = values[first : first + numel]
        if fault is not None and fault.param in (None, name):
            here = here + fault.amount
        if numel:
            held[name] = rounded(here, run.model_dtype)
    return held


def record_weights(recorder: Recorder, run: Run, shards: Shards, step: int, held: Weights) -> None:
    """Record what `model_weights` returned."""
    for name, values in held.items():
        first, numel = _own(run, shards, recorder.rank, name)
        layout = pack_spans([(recorder.index[name], first, numel)])
        _add(recorder, step, "weight", name, [(values, first)], run.model_dtype, layout)


def _own(run: Run, shards: Shards, rank: int, name: str) -> tuple[int, int]:
    if run.stage == 3:
        return shards.owned[rank].get(name, (0, 0))
    return 0, run.numel(name)


def record_masters(
    recorder: Recorder, run: Run, shards: Shards, step: int, weights: Weights
) -> None:
    """Record a rank's shards of the fp32 weights, without padding."""
    for unit, layout in _units(recorder, shards):
        stretches = _stretches(recorder, layout, weights)
        _add(recorder, step, "master_weight", unit, stretches, "float32", layout)


def record_states(
    recorder: Recorder, run: Run, shards: Shards, step: int, momenta: Weights
) -> None:
    """Record a rank's shards of SGD's momentum, where it has any yet, and the rule."""
    for number, (unit, layout) in enumerate(_units(recorder, shards)):
        facts = {
            "class": "torch.optim.sgd.SGD",
            "group": number,
            "rule": "sgd",
            "kernel": "torch",
            "lr": LEARNING_RATE,
            "momentum": run.momentum,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
            **run.optimizer_facts,
        }
        recorder.add(step, None, "optimizer_state", unit, facts=facts)
        if momenta:
            stretches = _stretches(recorder, layout, momenta)
            values = np.concatenate([values for values, _ in stretches])
            recorder.add(
                step,
                None,
                "optimizer_state",
                f"{unit}.momentum_buffer",
                values=values,
                layout=layout,
                facts={"moment": "momentum_buffer", "of": unit},
            )


def _units(recorder: Recorder, shards: Shards) -> Iterator[tuple[str, Layout]]:
    for unit, layout in shards.units[recorder.rank].items():
        pieces = [(s.param, s.param_offset, s.numel) for s in layout if s.param != PADDING]
        if pieces:
            yield unit, pack_spans(pieces)


def _stretches(recorder: Recorder, layout: Layout, weights: Weights) -> Stretches:
    names = {index: name for name, index in recorder.index.items()}
    return [
        (weights[names[s.param]][s.param_offset : s.param_offset + s.numel], s.param_offset)
        for s in layout
    ]


def record_batch(recorder: Recorder, step: int, micro_step: int, rows: Weights) -> None:
    """Record the batch of one backward pass, by hashes of its tensors in float32."""
    kind = DTYPES["float32"]
    tensors = [
        {
            "name": name,
            "dtype": kind.name,
            "shape": list(values.shape),
            "hash": hash_text(value_hash(raw_bits(from_float64(values, kind), kind))),
        }
        for name, values in rows.items()
    ]
    facts = {"tensors": tensors, "others": [], "truncated": False}
    recorder.add(step, micro_step, "input", "batch", facts=facts)


def _add(
    recorder: Recorder,
    step: int,
    point: str,
    unit: str,
    stretches: Stretches,
    dtype: str,
    layout: Layout,
) -> None:
    kind = DTYPES[dtype]
    if recorder.run.whole_weights:
        values = np.concatenate([values for values, _ in stretches])
        recorder.add(step, None, point, unit, values=values, dtype=dtype, layout=layout)
        return
    bits = [(raw_bits(from_float64(values, kind), kind), first) for values, first in stretches]
    facts = {"digest": digest_of(bits, kind)}
    recorder.add(step, None, point, unit, dtype=dtype, layout=layout, facts=facts)
