"""Nothing that a law's stated path computes breaks its bound; four times the bound always does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis import bounds
from gradtrace.analysis.laws import end_to_end, reduce, unscale_clip
from gradtrace.analysis.laws.common import Norm
from gradtrace.testing.arithmetic import Arithmetic, add_up, mean
from gradtrace.trace.dtypes import DTYPES
from tests.analysis.properties import NAMES, arithmetics, examples, rounded, seeds, tensors

NUMEL = 48
names = st.sampled_from(NAMES)


def _assert_silent(found, estimate, *what):
    outside = bounds.breaks(found, estimate)
    assert not outside.any(), (
        what,
        found[outside][:3],
        estimate.value[outside][:3],
        estimate.error[outside][:3],
    )


def _assert_convicts(found, estimate, dtype):
    """Move every element by four times its bound, in float64 and as the dtype would store it."""
    usable = np.isfinite(found) & np.isfinite(estimate.value) & ~estimate.overflow
    here = np.where(usable, found, 1.0)
    step = np.maximum(4 * estimate.error, 16 * np.spacing(np.abs(here)))  # float64 rounds too
    for sign in (1, -1):
        spoiled = here + sign * step
        missed = usable & ~bounds.breaks(spoiled, estimate)
        assert not missed.any(), (found[missed], estimate.value[missed], estimate.error[missed])
        stored = rounded(spoiled, dtype)
        moved = usable & np.isfinite(stored) & (np.abs(stored - here) >= 4 * estimate.error)
        assert bounds.breaks(stored, estimate)[moved & (stored != here)].all()
    assert bounds.breaks(np.full(len(found), math.nan), estimate)[usable].all()


@examples(300)
@given(seeds, names, names, names, st.integers(1, 9))
def test_reduce(seed, source_name, comm_name, target_name, world):
    rng = np.random.default_rng(seed)
    if rng.random() < 0.1:
        world = int(rng.choice([16, 63, 64]))
    source, comm, target = DTYPES[source_name], DTYPES[comm_name], DTYPES[target_name]
    how = arithmetics(rng)
    entered = tensors(rng, source, world, NUMEL, special=0.05)
    with np.errstate(invalid="ignore", over="ignore"):
        sent = [how.round(row, comm) for row in entered]
        found = how.round(mean(sent, comm, how), target)
    way = reduce.Way(comm, 1 / world, how.predivide, late=how.postscale)
    given_ = [(rank, bounds.exact(row), source) for rank, row in enumerate(entered)]
    estimate = reduce.combine(given_, 0, way, target).estimate
    _assert_silent(found, estimate, how, source_name, comm_name, target_name, world)
    _assert_convicts(found, estimate, target)


@examples(100)
@given(seeds, names, names, st.integers(2, 9))
def test_reduce_that_divides_before_it_casts(seed, source_name, comm_name, world):
    """reduce_scatter divides the bucket itself, in its own dtype."""
    rng = np.random.default_rng(seed)
    source, comm = DTYPES[source_name], DTYPES[comm_name]
    how = arithmetics(rng, predivide=False)
    entered = tensors(rng, source, world, NUMEL, special=0.05)
    with np.errstate(invalid="ignore", over="ignore"):
        sent = [how.round(how.times(row, 1 / world, source), comm) for row in entered]
        held = DTYPES["float32"] if how.wide and comm.size_bytes < 4 else comm
        found = how.round(how.round(add_up(sent, held, how), comm), source)
    way = reduce.Way(comm, 1 / world, 1.0, late=False)
    given_ = [(rank, bounds.exact(row), source) for rank, row in enumerate(entered)]
    estimate = reduce.combine(given_, 0, way, source).estimate
    _assert_silent(found, estimate, how, source_name, comm_name, world)


@examples(150)
@given(seeds, names, names, st.integers(1, 12))
def test_accumulation(seed, source_name, buffer_name, count):
    """The buffer of ``accumulate`` and ``accumulate_local``: each addition against its own inputs."""
    rng = np.random.default_rng(seed)
    source, buffer = DTYPES[source_name], DTYPES[buffer_name]
    how = Arithmetic(flush=bool(rng.random() < 0.4))
    carried = np.zeros(NUMEL)
    for at, row in enumerate(tensors(rng, source, count, NUMEL, special=0.03)):
        with np.errstate(invalid="ignore", over="ignore"):
            now = how.round(row, buffer)
            found = how.add(carried, now, buffer)
        terms = [bounds.cast(bounds.exact(row), source, buffer)]
        if at:
            terms.append(bounds.exact(carried))
        estimate = bounds.add_up(terms, buffer)
        _assert_silent(found, estimate, source_name, buffer_name, how)
        _assert_convicts(found, estimate, buffer)
        carried = found


@examples(150)
@given(seeds, names, names, st.integers(1, 40))
def test_a_sum_in_any_order(seed, name, source_name, count):
    rng, dtype, source = np.random.default_rng(seed), DTYPES[name], DTYPES[source_name]
    how = arithmetics(rng)
    rows = tensors(rng, source, count, NUMEL, special=0.05)
    held = DTYPES["float32"] if how.wide and dtype.size_bytes < 4 else dtype
    with np.errstate(invalid="ignore", over="ignore"):
        found = how.round(add_up([how.round(row, dtype) for row in rows], held, how), dtype)
    terms = [bounds.cast(bounds.exact(row), source, dtype) for row in rows]
    estimate = bounds.add_up(terms, dtype)
    _assert_silent(found, estimate, how, name, source_name, count)
    _assert_convicts(found, estimate, dtype)


@examples(150)
@given(seeds, names, names, names, names, st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_end_to_end(seed, model_name, buffer_name, comm_name, accum_name, world, steps, local):
    """From local gradients to what the optimizer gets, reducing each micro-step or once."""
    rng = np.random.default_rng(seed)
    model, buffer, comm, accum = (
        DTYPES[name] for name in (model_name, buffer_name, comm_name, accum_name)
    )
    how = arithmetics(rng)
    single = DTYPES["float32"]
    flat = tensors(rng, model, world * steps, NUMEL, special=0.03)
    grads = {(r, m): flat[r * steps + m] for r in range(world) for m in range(steps)}
    with np.errstate(invalid="ignore", over="ignore"):
        if local:
            total = []
            for rank in range(world):
                held = np.zeros(NUMEL)
                for m in range(steps):
                    held = how.add(held, how.round(grads[rank, m], buffer), buffer)
                total.append(how.round(held, comm))
            found = how.round(how.round(mean(total, comm, how), buffer), single)
        else:
            held = np.zeros(NUMEL)
            for m in range(steps):
                sent = [how.round(grads[rank, m], comm) for rank in range(world)]
                part = how.round(mean(sent, comm, how), model)
                held = how.add(held, how.round(part, accum), accum)
            found = how.round(held, single)
    dtypes = [model, comm, single, buffer if local else accum]
    path = end_to_end.path_of(
        dtypes, factor=1 / world, predivide=how.predivide, world=world, most=steps, again=1
    )
    by_rank, size = {}, np.zeros(NUMEL)
    with np.errstate(invalid="ignore", over="ignore"):
        for (rank, _), row in grads.items():
            by_rank[rank] = by_rank.get(rank, 0.0) + row / world
            size += np.abs(row)
    estimate = end_to_end.estimate_of(by_rank, size, path, world * steps)
    _assert_silent(found, estimate, how, model_name, buffer_name, comm_name, accum_name, local)
    _assert_convicts(found, estimate, single)


@examples(150)
@given(seeds, st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.booleans())
def test_unscale_clip(seed, name, python_floats, in_place):
    """torch: ``grad.mul_(1 / (loss_scale * clip))``, the norm in float32 or as a Python float."""
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    (master,) = tensors(rng, dtype, 1, NUMEL, special=0.03)
    scale = float(rng.choice([1.0, 1.0, 2.0**16, 2.0**4, 1000.0, 3.7]))
    clip = float(rng.choice([0.0, 1.0, 0.1, 5.0]))
    norm = float(np.float32(abs(rng.standard_normal()) * 10.0 ** rng.integers(-3, 4)))
    if clip and rng.random() < 0.3:  # at the edge of clipping
        norm = float(np.float32(clip * (1 + rng.integers(-8, 9) * 2.0**-24) - 1e-6))
    how = Arithmetic(flush=bool(rng.random() < 0.4))

    def ours(value):
        return value if python_floats else float(np.float32(value))

    ratio = ours(ours(norm + 1e-6) / clip) if clip else 0.0
    combined = ours(scale * max(1.0, ratio))
    with np.errstate(invalid="ignore", over="ignore"):
        if in_place:
            found = how.times(master, ours(1.0 / combined), dtype)
        else:
            found = how.round(master / float(np.float32(combined)), dtype)
    factor = unscale_clip.factor_of(scale, clip, Norm(norm, 0.0, 0.0))
    estimate = unscale_clip.estimate_of(master, factor, dtype)
    _assert_silent(found, estimate, name, scale, clip, norm)
    _assert_convicts(found, estimate, dtype)


@examples(60)
@given(seeds, st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(2, 9))
def test_torchs_own_arithmetic(seed, name, world):
    """The additions, products and casts of torch itself, on this machine."""
    torch = pytest.importorskip("torch")
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    kind = getattr(torch, name)
    entered = tensors(rng, dtype, world, 64, special=0.05)
    flush = bool(rng.random() < 0.5) and torch.set_flush_denormal(True)
    try:
        sent = [torch.tensor(row, dtype=torch.float64).to(kind) for row in entered]
        late = bool(rng.random() < 0.5)
        if not late:
            sent = [row.div(world) if rng.random() < 0.5 else row.mul(1 / world) for row in sent]
        total = sent[0].clone()
        for at in rng.permutation(world - 1) + 1:
            total += sent[at]
        if late:
            total /= world
    finally:
        torch.set_flush_denormal(False)
    way = reduce.Way(dtype, 1 / world, 1.0, late=late)
    given_ = [(rank, bounds.exact(row), dtype) for rank, row in enumerate(entered)]
    estimate = reduce.combine(given_, 0, way, dtype).estimate
    _assert_silent(total.to(torch.float64).numpy(), estimate, name, world, flush, late)
