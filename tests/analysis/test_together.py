"""A rank that is missing from many small parameters is seen in all of them together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis.audit import audit
from gradtrace.testing.arithmetic import Arithmetic
from gradtrace.testing.synthetic import Fault, Run, write_run
from tests.analysis.properties import NAMES, dtype_of, examples, rounded, seeds, tensor
from tests.analysis.test_fit_properties import gradients, reduced

SMALL = tuple((f"layers.{at}.bias", (80,)) for at in range(12))


def _run(stage, **more):
    return Run(
        **{
            "stage": stage,
            "world_size": 64,
            "micro_steps": 1,
            "samples": 64,
            "parameters": SMALL,
            "bucket_numel": 2000,
            "model_dtype": "bfloat16",
            "arithmetic": Arithmetic(order="ring"),
            "points": ("loss", "local_grad", "bucket", "reduced", "partition"),
            **more,
        }
    )


@pytest.mark.parametrize("stage, scatter", [(2, True), (3, True)])
def test_one_rank_of_64_in_biases_alone(tmp_path, stage, scatter):
    """No rank holds 64 elements of anything; at stage 3 two of each parameter."""
    clean = audit(write_run(tmp_path / "clean", _run(stage, reduce_scatter=scatter)))
    assert clean.verdict == "pass", clean.first
    fault = Fault("rank_missing", "reduce", amount=17)
    run = _run(stage, reduce_scatter=scatter, faults=(fault,))
    result = audit(write_run(tmp_path / "bad", run))
    assert result.verdict == "fail"
    assert [finding.law for finding in result.findings] == ["reduce"]
    assert (result.first.cause, result.first.guilty) == ("rank_missing", 17), result.first
    assert result.first.test == "coefficients"
    assert "12 parameters of the collective show it together" in result.first.detail


@examples(60)
@given(seeds, st.sampled_from(NAMES), st.sampled_from([2, 4, 16, 64]))
def test_silent_on_pieces_of_any_size_and_structure(seed, name, world):
    """Pieces that share nothing but their ranks, in one design."""
    rng, dtype = np.random.default_rng(seed), dtype_of(name)
    pieces = []
    for _ in range(int(rng.integers(3, 40))):
        numel = int(rng.integers(1, 60))
        kind = str(rng.choice(["normal", "correlated", "heavy", "sparse", "odd"]))
        if kind == "odd":
            low = -10 if name == "float16" else -60
            scale = float(rng.uniform(low, 4))
            rows = np.stack([tensor(rng, dtype, numel, scale=scale) for _ in range(world)])
        else:
            rows = gradients(rng, kind, world, numel)
        pieces.append(rounded(np.asarray(rows), dtype))
    how = Arithmetic(order=str(rng.choice(["ring", "tree", "shuffled"])), seed=seed % 1000)
    with np.errstate(invalid="ignore", over="ignore"):
        _, result, _ = reduced(np.concatenate(pieces, axis=1), dtype, how)
    assert not result.off, result.off
