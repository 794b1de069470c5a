"""How differences grow, and how a candidate is held against the baseline's own sensitivity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.analysis.diff import diff
from gradtrace.analysis.envelope import FACTOR, measure
from gradtrace.analysis.growth import Distance
from gradtrace.analysis.results import DiffResult
from gradtrace.analysis.series import Growth
from gradtrace.errors import NotAnEnvelopeError
from gradtrace.testing.synthetic import Fault, Run, write_run
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import open_trace

SHAPES = (("a", (8, 8)), ("b", (8, 8)), ("c", (33,)), ("d", (5, 7)))
# Gradients follow the weights, so that what is moved grows.
BASE = Run(parameters=SHAPES, world_size=2, micro_steps=2, steps=4, drift=3.0)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def one(name: str, run: Run) -> Path:
        return write_run(tmp_path / name, run)

    return one


def noise(write: Write, run: Run, *samples: int) -> list[Path]:
    return [write(f"noise{n}", replace(run, perturb_sample=n)) for n in samples]


# -- growth ----------------------------------------------------------------------------------------


def test_equal_runs_do_not_grow_apart(write: Write) -> None:
    path = write("run", BASE)
    result = diff(path, path)
    assert [entry.step for entry in result.growth] == [0, 1, 2, 3]
    for entry in result.growth:
        assert (entry.gradient, entry.gradient_max_abs, entry.local_grad) == (0.0, 0.0, 0.0)
        assert entry.baseline_loss == entry.candidate_loss is not None
        assert (entry.loss_difference, entry.weights, entry.weights_l2) == (0.0, "equal", 0.0)
        assert entry.judged


def test_after_the_runs_parted_they_are_still_followed(write: Write) -> None:
    fault = Fault("scaled", "accumulate", step=1, amount=2.0)
    result = diff(write("good", BASE), write("bad", replace(BASE, faults=(fault,))))
    assert result.first is not None and result.first.step == 1
    assert [entry.judged for entry in result.growth] == [True, True, False, False]
    gradients = [entry.gradient for entry in result.growth]
    assert gradients[0] == 0.0
    assert all(value is not None and value > 0 for value in gradients[1:])
    assert [entry.weights for entry in result.growth] == ["equal", "equal", "differ", "differ"]
    assert result.growth[3].local_grad is None  # not judged, not looked at
    body = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert body["growth"][2]["judged"] is False
    assert body["growth"][2]["weights"] == "differ"
    assert body["envelope"] is None


def test_growth_is_what_the_definition_says(write: Write) -> None:
    """By hand, from the records: mean gradients over seeds, over all parameters."""
    paths = write("one", BASE), write("two", replace(BASE, stage=3, noise=1e-3, loss_scale=8.0))
    result = diff(*paths)
    sums = {step: np.zeros(2) for step in range(4)}
    largest = dict.fromkeys(range(4), 0.0)
    for step in range(4):
        whole: list[dict[int, Any]] = []
        for path, scale in zip(paths, (1.0, 8.0), strict=True):
            trace = open_trace(path)
            held: dict[int, Any] = {i: np.zeros(math.prod(s)) for i, (_, s) in enumerate(SHAPES)}
            for rank in trace.ranks.values():
                for record in rank.records:
                    if record.step != step or record.point != "master_grad":
                        continue
                    values = trace.bits(record).view("<f4").astype(float) / scale
                    for span in trace.layout(record):
                        if span.param >= 0:
                            held[span.param][span.param_offset : span.param_offset + span.numel] = (
                                values[span.flat_offset : span.flat_offset + span.numel]
                            )
            whole.append(held)
        for index in whole[0]:
            apart = whole[0][index] - whole[1][index]
            sums[step] += (apart @ apart, whole[0][index] @ whole[0][index])
            largest[step] = max(largest[step], float(np.abs(apart).max()))
    for entry in result.growth:
        apart, size = sums[entry.step]
        assert entry.gradient == pytest.approx(math.sqrt(apart / size), rel=1e-12)
        assert entry.gradient_max_abs == pytest.approx(largest[entry.step], rel=1e-12)


def test_growth_over_world_sizes_and_accumulation_counts(write: Write) -> None:
    one = write("one", replace(BASE, world_size=1, micro_steps=6, samples=24))
    two = write("two", replace(BASE, world_size=3, micro_steps=2, samples=24, stage=3))
    for entry in diff(one, two).growth:
        assert entry.gradient is not None and 0 < entry.gradient < 1e-5
        assert entry.local_grad is None
        assert entry.candidate_loss == pytest.approx(entry.baseline_loss, abs=1e-5)


def test_growth_without_gradients_of_the_step(write: Write) -> None:
    run = replace(BASE, points=tuple(name for name in POINT_NAMES if name != "master_grad"))
    result = diff(write("one", run), write("two", replace(run, noise=1e-6)))
    assert all(entry.gradient is None for entry in result.growth)
    assert all(entry.local_grad for entry in result.growth)


def test_weights_of_which_only_hashes_were_kept(write: Write) -> None:
    result = diff(write("one", BASE), write("two", replace(BASE, weight_seed=9)))
    assert result.growth[0].weights == "differ"
    assert result.growth[0].weights_l2 is None


@given(
    values=st.lists(
        st.tuples(*[st.floats(width=32, allow_nan=True, allow_infinity=True)] * 2), max_size=30
    ),
    cut=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_distance_adds_over_parameters(values: list[tuple[float, float]], cut: int) -> None:
    one, two = (np.array([v[i] for v in values], dtype=np.float64) for i in (0, 1))
    whole, parts = Distance(), Distance()
    whole.add(one, two)
    parts.add(one[:cut], two[:cut])
    parts.add(one[cut:], two[cut:])
    assert (whole.max_abs, whole.finite, whole.odd) == (parts.max_abs, parts.finite, parts.odd)
    assert whole.apart == pytest.approx(parts.apart, rel=1e-12)
    usable = np.isfinite(one) & np.isfinite(two)
    if (np.isfinite(one) != np.isfinite(two)).any():
        assert whole.rel_l2 == math.inf
    elif not usable.any():
        assert whole.rel_l2 is None
    elif np.array_equal(one[usable], two[usable]):
        assert whole.rel_l2 == 0.0
    else:
        assert whole.rel_l2 is not None and whole.rel_l2 >= 0


# -- a perturbed run -------------------------------------------------------------------------------


def test_a_perturbed_run_is_growth_and_says_so(write: Write) -> None:
    (path,) = noise(write, BASE, 3)
    result = diff(write("base", BASE), path)
    assert result.verdict == "rounding"
    assert "the candidate's weights were moved on purpose" in result.notes[0]
    assert "sample 3" in result.notes[0]
    assert result.growth[0].weights == "differ"
    assert 0 < (result.growth[0].gradient or 0) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_perturbed_run_is_judged_by_its_own_inputs(write: Write, dtype: str) -> None:
    """That weights differ on purpose excuses no broken law."""
    run = replace(BASE, model_dtype=dtype)
    fault = Fault("dropped_micro_steps", "accumulate")
    result = diff(write("base", run), write("bad", replace(run, perturb_sample=0, faults=(fault,))))
    assert result.verdict == "diverged" and result.blame is not None
    assert (result.blame.side, result.blame.law) == ("candidate", "accumulate")


# -- the envelope ----------------------------------------------------------------------------------


def compare(write: Write, candidate: Run, samples: Sequence[int], base: Run = BASE) -> DiffResult:
    return diff(
        write("base", base), write("candidate", candidate), envelope=noise(write, base, *samples)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_stage_is_inside(write: Write, dtype: str) -> None:
    run = replace(BASE, model_dtype=dtype, stage=1)
    result = compare(write, replace(run, stage=3), (0, 1, 2), run)
    found = result.envelope
    assert found is not None
    assert result.verdict == "rounding"
    assert found.first_outside is None and found.samples == (0, 1, 2)
    assert [entry.step for entry in found.steps] == [0, 1, 2, 3]
    assert all(entry.inside and entry.ratio <= FACTOR for entry in found.steps)
    assert found.reading.startswith("Inside")
    assert found.chance == 0.25 and found.p_value in (0.25, 0.5, 0.75, 1.0)


def test_a_lost_micro_step_is_far_outside_and_the_law_convicts(write: Write) -> None:
    bad = replace(BASE, faults=(Fault("dropped_micro_steps", "accumulate", step=2),))
    result = compare(write, bad, (0, 1))
    found = result.envelope
    assert found is not None and result.blame is not None
    assert result.verdict == "diverged" and result.blame.law == "accumulate"
    assert found.first_outside == 2
    assert found.steps[1].inside and not found.steps[2].inside
    assert found.steps[2].ratio > 1e4
    assert found.p_value == pytest.approx(1 / 3)
    assert "convicts nobody" in found.reading


def test_the_envelope_neither_convicts_nor_acquits(write: Write) -> None:
    """Outside without a broken law stays `rounding`; inside with one stays `diverged`."""
    noisy = compare(write, replace(BASE, noise=1e-6), (0,))
    assert noisy.envelope is not None and noisy.envelope.first_outside is not None
    assert noisy.verdict == "rounding"
    same = diff(write("again", BASE), write("same", BASE), envelope=noise(write, BASE, 4))
    assert same.verdict == "agree"
    assert same.envelope is not None and same.envelope.first_outside is None


def test_a_sample_among_samples(write: Write) -> None:
    paths = noise(write, BASE, 0, 1, 2, 3)
    base = write("base", BASE)
    values = []
    for at, path in enumerate(paths):
        found = diff(base, path, envelope=[*paths[:at], *paths[at + 1 :]]).envelope
        assert found is not None and found.first_outside is None
        values.append(found.p_value)
    # A permutation test: each rank of the four is taken once, whatever the numbers are.
    assert sorted(values) == [0.25, 0.5, 0.75, 1.0]


def test_steps_that_a_sample_lacks_are_not_judged(write: Write) -> None:
    short = write("short", replace(BASE, steps=2, perturb_sample=7))
    result = diff(write("base", BASE), write("other", replace(BASE, stage=3)), envelope=[short])
    assert result.envelope is not None
    assert [entry.step for entry in result.envelope.steps] == [0, 1]
    assert any("does not hold 2 of the steps" in note for note in result.notes)


def test_batches_that_were_not_hashed_are_a_note(write: Write) -> None:
    run = replace(BASE, points=tuple(name for name in POINT_NAMES if name != "input"))
    result = compare(write, replace(run, stage=3), (0,), run)
    assert result.envelope is not None
    assert any("batches were not hashed in step 0 and 3 more" in note for note in result.notes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"perturb_sample": None}, "not perturbed"),
        ({"stage": 3}, "adapter differs"),
        ({"world_size": 1}, "world_size differs"),
        ({"seed": 1, "weight_seed": 0}, "input differs at step 0"),
        ({"ds_config": {"bf16": {"enabled": True}}}, "bf16.enabled differs"),
        ({"packages": {"deepspeed": "9.9"}}, "package deepspeed differs"),
        ({"effective": {"gradient_clipping": 1.0}}, "effective gradient_clipping differs"),
        ({"micro_steps": 4}, "differs"),
        ({"parameters": SHAPES[:3]}, "models differ"),
        ({"points": tuple(n for n in POINT_NAMES if n != "master_grad")}, "no master_grad"),
    ],
)
def test_what_is_no_perturbed_run_of_the_baseline(
    write: Write, changes: dict[str, Any], found: str
) -> None:
    sample = write("sample", replace(BASE, **{"perturb_sample": 0, **changes}))
    with pytest.raises(NotAnEnvelopeError, match=found) as caught:
        diff(write("base", BASE), write("other", BASE), envelope=[sample])
    assert str(sample) in caught.value.where
    assert "--perturb-ulp" in caught.value.remedy


def test_settings_beside_the_gradient_may_differ(write: Write) -> None:
    beside = {"tensorboard": {"output_path": "/x"}, "steps_per_print": 7}
    sample = write("sample", replace(BASE, perturb_sample=0, ds_config=beside))
    result = diff(write("base", BASE), write("other", BASE), envelope=[sample])
    assert result.envelope is not None


def test_one_sample_twice_and_a_perturbed_baseline(write: Write) -> None:
    base, other = write("base", BASE), write("other", BASE)
    (sample,) = noise(write, BASE, 2)
    with pytest.raises(NotAnEnvelopeError, match="a second time"):
        diff(base, other, envelope=[sample, sample])
    with pytest.raises(NotAnEnvelopeError, match="perturbed itself"):
        diff(sample, other, envelope=noise(write, BASE, 3))


def test_a_checkpoint_that_put_the_weights_back(write: Write, tmp_path: Path) -> None:
    """The manifest says perturbed, the hashes say that nothing is."""
    sample = write("sample", BASE)
    manifest = json.loads((sample / "manifest.json").read_text())
    del manifest["xxh3"]
    manifest["perturbation"] = {"sample": 0, "ulp": 1, "hash": "splitmix64/xxh3-64"}
    from gradtrace.trace import schema

    (sample / "manifest.json").write_bytes(schema.seal_file(manifest))
    with pytest.raises(NotAnEnvelopeError, match="put them back"):
        diff(write("base", BASE), write("other", BASE), envelope=[sample])


def test_another_kind_of_perturbation(write: Write) -> None:
    from gradtrace.trace import schema

    (sample,) = noise(write, BASE, 0)
    manifest = json.loads((sample / "manifest.json").read_text())
    del manifest["xxh3"]
    manifest["perturbation"]["hash"] = "dice"
    (sample / "manifest.json").write_bytes(schema.seal_file(manifest))
    with pytest.raises(NotAnEnvelopeError, match="dice"):
        diff(write("base", BASE), write("other", BASE), envelope=[sample])


def test_nothing_known_is_nothing_said() -> None:
    found = measure(None, [], [Growth(0, None)])  # type: ignore[arg-type]
    assert found.steps == () and found.first_outside is None
    assert found.reading.startswith("No step")
