"""Record the batches and weights of a synthetic run as capture does: digests, no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from gradtrace.testing.mutators import Fault
from gradtrace.testing.runs import Recorder, Run, Shards, rounded
from gradtrace.trace.digest import digest_of, hash_text, mix64, value_hash
from gradtrace.trace.dtypes import DTYPES, Float64, from_float64, raw_bits, to_float64
from gradtrace.trace.spans import PADDING, pack_spans

Weights = Mapping[str, Float64]  # parameter name -> 1-D float64, the full parameter


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


def record_weights(
    recorder: Recorder, run: Run, shards: Shards, step: int, weights: Weights, fault: Fault | None
) -> None:
    """Record a rank's model weights: whole parameters, at stage 3 its own part of each."""
    for name, values in weights.items():
        first, numel = 0, run.numel(name)
        if run.stage == 3:
            first, numel = shards.owned[recorder.rank].get(name, (0, 0))
        if not numel:
            continue
        if fault is not None and fault.param in (None, name):
            values = values + fault.amount  # noqa: PLW2901
        layout = pack_spans([(recorder.index[name], first, numel)])
        held = {name: rounded(values, run.model_dtype)}
        _add(recorder, step, "weight", name, held, run.model_dtype, layout)


def record_masters(
    recorder: Recorder, run: Run, shards: Shards, step: int, weights: Weights
) -> None:
    """Record a rank's shards of the fp32 weights, without padding."""
    for unit, layout in shards.units[recorder.rank].items():
        pieces = [(s.param, s.param_offset, s.numel) for s in layout if s.param != PADDING]
        if pieces:
            _add(recorder, step, "master_weight", unit, weights, "float32", pack_spans(pieces))


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
    weights: Weights,
    dtype: str,
    layout: Any,
) -> None:
    kind = DTYPES[dtype]
    names = {index: name for name, index in recorder.index.items()}
    stretches = []
    for span in layout:
        values = weights[names[span.param]][span.param_offset : span.param_offset + span.numel]
        stretches.append((raw_bits(from_float64(values, kind), kind), span.param_offset))
    facts = {"digest": digest_of(stretches, kind)}
    recorder.add(step, None, point, unit, dtype=dtype, layout=layout, facts=facts)
