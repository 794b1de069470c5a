"""The parts of diff by themselves: what is judged by size, the gate, and the rounding bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.analysis.align import Alignment
from gradtrace.analysis.bounds import exact
from gradtrace.analysis.clipping import clip_factor
from gradtrace.analysis.compare import contrast
from gradtrace.analysis.gate import compare_runs, flatten
from gradtrace.analysis.judging import Sample, judge_samples, sample, thresholds
from gradtrace.analysis.sides import Locals, Side, gather, reductions
from gradtrace.testing.synthetic import Run, rounded, write_run
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.reader import open_trace

FP32 = DTYPES["float32"]
RNG = np.random.default_rng(0)
LARGE = RNG.normal(size=400)


def pair(mine: np.ndarray, theirs: np.ndarray, name: str = "w") -> Sample:
    return sample(("local_grad", 0, 0), (name, 0), mine, theirs, FP32)


def statuses(samples: list[Sample], *, same_start: bool = True, drifted: bool = False) -> list[str]:
    return list(judge_samples(samples, FP32, same_start=same_start, drifted=drifted).statuses)


def noisy(values: np.ndarray, size: float) -> np.ndarray:
    return values * (1 + size * np.random.default_rng(1).normal(size=values.size))


def test_sizes_decide() -> None:
    assert statuses([pair(LARGE, LARGE)]) == ["equal"]
    assert statuses([pair(LARGE, noisy(LARGE, 1e-6))]) == ["rounding"]
    assert statuses([pair(LARGE, noisy(LARGE, 1e-4))]) == ["unresolved"]
    assert statuses([pair(LARGE, noisy(LARGE, 1e-1))]) == ["diverged"]


def test_after_drift_nothing_diverges() -> None:
    assert statuses([pair(LARGE, -LARGE)], same_start=False, drifted=True) == ["growth"]
    assert statuses([pair(LARGE, -LARGE)], same_start=False) == ["unresolved"]


def test_a_gradient_that_cancels_is_measured_against_the_others() -> None:
    noise = 1e-9 * LARGE[:10]
    assert statuses([pair(noise, -noise)]) == ["diverged"]  # alone, there is nothing else to go by
    assert statuses([pair(LARGE, LARGE, "big"), pair(noise, -noise, "bias")])[1] == "rounding"


def test_one_factor_for_all_parameters() -> None:
    samples = [pair(LARGE, 1.5 * LARGE), pair(LARGE[:50], 1.5 * LARGE[:50], "v")]
    opinion = judge_samples(samples, FP32, same_start=True, drifted=False)
    assert opinion.factor == pytest.approx(1.5)
    other = [pair(LARGE, 1.5 * LARGE), pair(LARGE[:50], 1.4 * LARGE[:50], "v")]
    assert judge_samples(other, FP32, same_start=True, drifted=False).factor is None
    small = [pair(LARGE, (1 + 1e-7) * LARGE), pair(LARGE[:50], LARGE[:50], "v")]
    assert judge_samples(small, FP32, same_start=True, drifted=False).factor is None
    few = [pair(LARGE[:1], 2 * LARGE[:1])]
    assert judge_samples(few, FP32, same_start=True, drifted=False).factor is None


def test_non_finite_values_must_stand_in_the_same_places() -> None:
    lost = LARGE.copy()
    lost[3] = np.nan
    assert statuses([pair(lost, lost)]) == ["equal"]
    assert statuses([pair(LARGE, lost)]) == ["diverged"]
    found = pair(LARGE, lost)
    assert found.index == 3 and found.max_abs == np.inf
    endless = LARGE.copy()
    endless[3] = np.inf
    assert statuses([pair(endless, noisy(endless, 1e-7))]) == ["rounding"]
    assert statuses([pair(lost, endless)]) == ["diverged"]


def test_a_known_factor_is_taken_out() -> None:
    found = sample(("local_grad", 0, 0), ("w", 0), LARGE, 8 * LARGE, FP32, factor=8.0)
    assert found.equal and found.explained
    assert statuses([found]) == ["rounding"]


def test_underflow_is_no_divergence() -> None:
    tiny = np.full(8, 6e-8)
    found = sample(("master_grad", None, None), ("w", 0), tiny, 0 * tiny, FP32, absolute=6e-8)
    assert statuses([found]) == ["rounding"]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_thresholds_are_in_order(name: str) -> None:
    limit = thresholds(DTYPES[name])
    assert DTYPES[name].unit_roundoff < limit.rounding < limit.different < 0.5


def test_contrast_carries_differences_of_inputs_along() -> None:
    one, two = LARGE, LARGE + 1.0
    assert contrast(one, two, (exact(one), exact(two)))[0] == "rounding"
    status, found, _ = contrast(one, two, (exact(one), exact(one)))
    assert status == "diverged" and found is not None
    assert found[0] == 0 and found[2] == pytest.approx(1.0)


def test_contrast_of_non_finite_values() -> None:
    lost = LARGE.copy()
    lost[5] = np.nan
    assert contrast(LARGE, lost, (exact(LARGE), exact(lost)))[0] == "rounding"  # its inputs are
    status, found, _ = contrast(LARGE, lost, (exact(LARGE), exact(LARGE)))
    assert status == "diverged" and found is not None and found[0] == 5
    # a NaN that vanished on the way is no less wrong
    assert contrast(LARGE, LARGE + 0.5, (exact(LARGE), exact(lost)))[0] == "diverged"


def test_nested_settings_become_one_level() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


def test_the_gate_pairs_by_name(tmp_path: Path) -> None:
    one = write_run(tmp_path / "1", Run(parameters=(("a", (2,)), ("b", (3,)))))
    two = write_run(tmp_path / "2", Run(parameters=(("b", (3,)), ("a", (2,)))))
    gate = compare_runs(Alignment(open_trace(one)), Alignment(open_trace(two)))
    assert [(p.name, p.baseline, p.candidate, p.order) for p in gate.pairs] == [
        ("b", 1, 0, 0),
        ("a", 0, 1, 1),
    ]
    assert gate.all_captured


def test_clip_factors() -> None:
    assert clip_factor(10.0, 0.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(10.0, 1.0) == pytest.approx(0.1)
    assert clip_factor(None, 1.0) is None
    assert clip_factor(float("nan"), 1.0) is None


# -- the bound holds, and is not idle ----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_recorded_values_lie_within_the_bound(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = Run(
        stage=data.draw(st.sampled_from([1, 2, 3])),
        world_size=data.draw(st.sampled_from([1, 2, 3, 5])),
        micro_steps=data.draw(st.sampled_from([1, 2, 7])),
        model_dtype=data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        accum_dtype=data.draw(st.sampled_from([None, "float32"])),
        comm_dtype=data.draw(st.sampled_from([None, "float32", "bfloat16"])),
        gas_mode=data.draw(st.sampled_from(["engine", "manual"])),
        gradient_scale=data.draw(st.sampled_from([1.0, 1e-6, 1e-36])),
        twice=("embed.weight",),
        seed=data.draw(st.integers(0, 99)),
    )
    side = Side("x", Alignment(open_trace(write_run(tmp_path_factory.mktemp("b") / "t", run))))
    for parameter in side.align.parameters:
        own = Locals(side, 0, parameter.index)
        estimate = own.mean(range(run.micro_steps))
        found = gather(side, 0, None, "master_grad", parameter.index)
        assert found is not None
        assert (np.abs(found - estimate.value) <= estimate.error).all()
        largest = np.abs(estimate.value).max()
        if run.gradient_scale == 1.0:
            assert estimate.error.max() <= 0.6 * max(largest, 1.0)


def test_sums_go_on_from_where_they_were(tmp_path: Path) -> None:
    run = Run(micro_steps=4)
    side = Side("x", Alignment(open_trace(write_run(tmp_path / "t", run))))
    one, two = Locals(side, 0, 0), Locals(side, 0, 0)
    for upto in (1, 3, 2, 4):
        found = one.mean(range(upto)).value
        fresh = sum(two.values[rank, at] for rank in range(2) for at in range(upto))
        assert np.allclose(found, fresh / 2, rtol=1e-14, atol=0)


def test_patterns_of_reductions(tmp_path: Path) -> None:
    def contents(run: Run) -> list[tuple[int, tuple[int, ...]]] | None:
        path = tmp_path / f"{run.stage}-{run.gas_mode}-{run.write_back}"
        side = Side("x", Alignment(open_trace(write_run(path, run))))
        found = reductions(side, 0, 0)
        return None if found is None else [(entry.micro_step, entry.content) for entry in found]

    each = [(0, (0,)), (1, (1,)), (2, (2,))]
    assert contents(Run(stage=1, micro_steps=3)) == [(2, (0, 1, 2))]
    assert contents(Run(stage=1, micro_steps=3, gas_mode="manual")) == each
    assert contents(Run(stage=2, micro_steps=3)) == each
    assert contents(Run(stage=3, micro_steps=3)) == each
    written = Run(stage=1, micro_steps=3, gas_mode="manual", write_back=True, reduce_scatter=False)
    assert contents(written) is None


def test_rounding_helper_is_idempotent() -> None:
    for name in DTYPES:
        once = rounded(LARGE, name)
        assert np.array_equal(once, rounded(once, name))
