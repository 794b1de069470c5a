"""Whole laws on whole traces: silent on any rounding, and broken at any element of any record."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from gradtrace.analysis import bounds
from gradtrace.analysis.audit import audit
from gradtrace.analysis.fit import fit
from gradtrace.analysis.laws import common
from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace.dtypes import DTYPES
from tests.analysis.properties import arithmetics, examples, rounded, seeds

LAWS = ("accumulate_local", "pack", "reduce", "partition", "accumulate", "master", "unscale_clip")
PARAMETERS = (("big.weight", (40, 30)), ("small.weight", (9, 8)), ("head.bias", (5,)))


def _run(rng, stage=None, **more):
    """Return a random clean run: stage, sizes, dtypes, order of additions, scale, settings."""
    model = str(rng.choice(["float32", "bfloat16", "float16"]))
    stage = int(rng.choice([1, 2, 3])) if stage is None else stage
    how = arithmetics(rng)
    scatter = bool(rng.random() < 0.5)
    if stage == 3 or scatter:
        how = replace(how, postscale=False)
    if stage != 3 and (scatter or not how.postscale):
        how = replace(how, predivide=1.0)  # as DeepSpeed ignores it, or refuses
    dtype = DTYPES[model]
    world = int(rng.choice([1, 2, 3, 5, 8]))
    micro_steps = int(rng.choice([1, 2, 3]))
    return Run(
        **{
            "stage": stage,
            "world_size": world,
            "micro_steps": micro_steps,
            "steps": 1,
            "samples": world * micro_steps,
            "parameters": PARAMETERS,
            "model_dtype": model,
            "accum_dtype": rng.choice([None, "float32"]),
            "comm_dtype": rng.choice([None, None, "float32", "bfloat16", "float16"]),
            "gas_mode": str(rng.choice(["engine", "manual"])),
            "loss_scale": float(rng.choice([1.0, 1.0, 65536.0, 1000.0])),
            "clip": float(rng.choice([0.0, 1.0])),
            "reduce_scatter": scatter,
            "bucket_numel": 1500,
            "seed": int(rng.integers(2**31)),
            "gradient_scale": 2.0 ** rng.integers(np.log2(dtype.smallest_subnormal), 5),
            "arithmetic": how,
            "effective": {"postscale_gradients": how.postscale or stage == 3 or scatter},
            **more,
        }
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def _write(root, run):
    return write_run(root / str(len(list(root.iterdir()))), run)


@examples(60)
@given(seed=seeds)
def test_clean_runs_are_silent(root, seed):
    """Magnitudes down to subnormals, any order of additions, flushing, predividing, loss scales."""
    run = _run(np.random.default_rng(seed))
    result = audit(_write(root, run))
    assert not result.findings, (result.first, run)


@examples(20)
@given(seed=seeds)
def test_overflowing_runs_are_silent(root, seed):
    """Infinity and NaN appear where a sum overflows, on the wire or before, and are no finding."""
    rng = np.random.default_rng(seed)
    model = str(rng.choice(["float32", "bfloat16", "float16"]))
    scale = DTYPES[model].largest * 2.0 ** -rng.integers(0, 4)
    run = _run(rng, model_dtype=model, gradient_scale=scale, loss_scale=1.0)
    result = audit(_write(root, run))
    assert not result.findings, (result.first, run)


def _checks(monkeypatch, path):
    """Audit a trace and return what each law judged: ``(law, found, estimate, designs, dtype)``."""
    seen = []

    def spy(scene, place, found, estimate, *, context, designs=(), hypotheses):
        seen.append((place.law, found, estimate, tuple(designs), context))
        common.check(
            scene, place, found, estimate, context=context, designs=designs, hypotheses=hypotheses
        )

    with monkeypatch.context() as patch:
        for law in (*LAWS, "end_to_end"):
            patch.setattr(importlib.import_module(f"gradtrace.analysis.laws.{law}"), "check", spy)
        assert not audit(path).findings
    return seen


def test_four_times_the_bound_breaks_every_law_at_every_element(monkeypatch, root):
    broken = set()
    for seed in range(12):
        run = _run(np.random.default_rng([seed, 4]), gradient_scale=1.0, loss_scale=1.0)
        for law, found, estimate, _, context in _checks(monkeypatch, _write(root, run)):
            step = np.maximum(4 * estimate.error, 16 * np.spacing(np.abs(found)))
            for sign in (1, -1):
                assert bounds.breaks(found + sign * step, estimate).all(), law
            # And as the record's own dtype can hold it: at the next number, if the bound is zero.
            stored = rounded(found + step + 2 * _spacing(found, context.stored), context.stored)
            far = np.abs(stored - found) >= 4 * estimate.error
            assert bounds.breaks(stored, estimate)[far].all()
            assert far.any() or not len(found)
            broken.add(law)
    assert broken == {*LAWS, "end_to_end"}


def _spacing(values, dtype):
    return np.maximum(2 * dtype.unit_roundoff * np.abs(values), dtype.smallest_subnormal)


def test_a_wrong_coefficient_breaks_every_sum(monkeypatch, root):
    """5 % in bfloat16, 0.1 % in float32, of any term of any law that has a coefficient test."""
    tested = {}
    for seed in range(30):
        rng = np.random.default_rng([seed, 5])
        name, wrong = [("bfloat16", 0.05), ("float32", 0.001)][seed % 2]
        run = _run(
            rng,
            model_dtype=name,
            comm_dtype=None,
            accum_dtype=None,
            gradient_scale=1.0,
            world_size=2,
            stage=1 + seed % 3,
            samples=12,
            micro_steps=int(rng.choice([2, 3])),
            parameters=(("weight", (60, 50)),),
            bucket_numel=4000,
        )
        for law, found, estimate, designs, context in _checks(monkeypatch, _write(root, run)):
            for design in designs:
                if len(found) < 1000 or context.dtype.name != name:
                    continue
                for at, (label, values) in enumerate(design.terms):
                    spoiled = rounded(found + wrong * values, context.stored)
                    result = fit(spoiled, design.terms, estimate, context.dtype)
                    off = [entry.label for entry in result.off]
                    assert off == [label], (law, run, result)
                    tested[law, name, at] = tested.get((law, name, at), 0) + 1
    assert {law for law, _, _ in tested} == {
        "accumulate_local", "reduce", "accumulate", "end_to_end"
    }  # fmt: skip
    assert {name for _, name, _ in tested} == {"bfloat16", "float32"}
