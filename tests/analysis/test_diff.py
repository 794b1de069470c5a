"""What diff says of runs that agree, that part, and that cannot be compared."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradtrace
from gradtrace.analysis.blame import blame
from gradtrace.analysis.diff import diff
from gradtrace.analysis.gate import _ASKED_BY
from gradtrace.analysis.results import AuditResult, DiffResult, Finding
from gradtrace.testing.synthetic import Fault, Omission, Run, write_run
from gradtrace.trace.reader import open_trace

SHAPES = (("a", (16, 16)), ("b", (16, 16)), ("c", (33,)), ("d", (5, 7)))
BASE = Run(parameters=SHAPES, world_size=2, micro_steps=3, steps=2)
MANUAL = replace(BASE, gas_mode="manual")
LAST_ONLY = (Fault("dropped_micro_steps", "accumulate"),)
Compare = Callable[[Run, Run], DiffResult]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    numbers = itertools.count()

    def run(baseline: Run, candidate: Run) -> DiffResult:
        place = tmp_path / str(next(numbers))
        result = diff(write_run(place / "b", baseline), write_run(place / "c", candidate))
        _consistent(result)
        return result

    return run


def _consistent(result: DiffResult) -> None:
    """Check what holds of every result."""
    counts = result.counts
    judged = ("equal", "rounding", "undecided", "diverged")
    assert set(counts) == {"compared", *judged, "left_out"}
    assert counts["compared"] == sum(counts[name] for name in judged)
    assert not (counts["undecided"] and result.verdict in ("agree", "rounding"))
    assert min(counts.values()) >= 0
    assert (result.verdict == "diverged") == (result.first is not None)
    if result.first is not None:
        assert result.blame is not None
    elif result.blame is not None:  # runs that agree, and are wrong
        assert result.blame.law is not None
    assert (counts["diverged"] > 0) == (result.verdict == "diverged")
    assert len(set(result.notes)) == len(result.notes)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert json.loads(text)["format"] == "gradtrace.diff"
    if result.verdict == "agree":
        assert counts["rounding"] == 0


# -- agreement -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("gas_mode", ["engine", "manual"])
def test_stages_agree_pairwise(
    compare: Compare, dtype: str, world_size: int, micro_steps: int, gas_mode: str
) -> None:
    run = replace(
        BASE, model_dtype=dtype, world_size=world_size, micro_steps=micro_steps, clip=1.0,
        gas_mode=gas_mode, drift=0.2,
    )  # fmt: skip
    for one, two in ((1, 2), (2, 3), (3, 1)):
        result = compare(replace(run, stage=one), replace(run, stage=two))
        assert result.verdict in ("agree", "rounding"), result.first
        assert result.counts["equal"] > 0
        for audit in (result.baseline_audit, result.candidate_audit):
            assert audit is not None and audit.verdict == "pass"


def test_a_run_agrees_with_itself(compare: Compare) -> None:
    result = compare(BASE, BASE)
    assert result.verdict == "agree" and result.notes == ()
    assert [entry.local_grad for entry in result.growth] == [0.0, 0.0]
    assert [entry.gradient for entry in result.growth] == [0.0, 0.0]


def test_open_traces_are_taken_too(tmp_path: Path) -> None:
    path = write_run(tmp_path / "t", BASE)
    assert diff(open_trace(path), str(path)).verdict == "agree"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_in_another_dtype_is_rounding(compare: Compare, stage: int) -> None:
    run = replace(BASE, stage=stage, model_dtype="bfloat16", micro_steps=12)
    result = compare(run, replace(run, accum_dtype="float32"))
    assert result.verdict == "rounding"
    assert any("grad_accum_dtype differs" in note for note in result.notes)
    assert any("largest difference that rounding makes" in note for note in result.notes)


def test_loss_scales_that_differ_are_no_divergence(compare: Compare) -> None:
    run = replace(BASE, model_dtype="float16", loss_scale=8.0, clip=0.5)
    result = compare(run, replace(run, loss_scale=64.0, stage=3))
    assert result.verdict == "rounding", result.first
    assert result.growth[0].gradient is not None and result.growth[0].gradient < 0.01


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unused_and_twice_used_parameters(compare: Compare, stage: int) -> None:
    run = replace(BASE, unused=(("c", 1), ("d", 0), ("d", 1), ("d", 2)), twice=("a", "c"))
    result = compare(run, replace(run, stage=stage, groups=2, bucket_numel=1000))
    assert result.verdict in ("agree", "rounding"), result.first


def test_growth_is_followed_and_not_called_divergence(compare: Compare) -> None:
    run = replace(BASE, steps=5, drift=3.0)
    result = compare(run, replace(run, noise=1e-6, stage=3))
    assert result.verdict == "rounding"
    sizes = [entry.local_grad for entry in result.growth]
    assert len(sizes) == 5 and all(size is not None and 0 < size < 1e-4 for size in sizes)
    assert any("heuristic" in note for note in result.notes)


# -- the demo --------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_last_micro_step_only(compare: Compare, swap: bool, dtype: str) -> None:
    """ZeRO-2 accumulating by hand keeps only the last micro-step; ZeRO-3 keeps all."""
    bad = replace(MANUAL, stage=2, faults=LAST_ONLY, model_dtype=dtype)
    good = replace(MANUAL, stage=3, model_dtype=dtype)
    result = compare(good, bad) if swap else compare(bad, good)
    first, blame = result.first, result.blame
    assert result.verdict == "diverged" and first is not None and blame is not None
    assert (first.step, first.micro_step, first.point) == (0, 1, "accumulated")
    assert first.boundary is True
    assert first.param == "d"  # the first in backward order
    assert blame.side == ("candidate" if swap else "baseline")
    assert (blame.law, blame.cause) == ("accumulate", "dropped_micro_steps")
    assert (blame.step, blame.micro_step, blame.param) == (0, 1, "d")
    assert first.index is not None and first.bound is not None and first.max_abs is not None
    wrong, right = (first.candidate, first.baseline) if swap else (first.baseline, first.candidate)
    assert wrong is not None and right is not None
    assert abs(wrong - right) > first.bound
    assert first.max_abs >= abs(wrong - right)


def test_the_rank_that_holds_the_wrong_value(compare: Compare) -> None:
    fault = Fault("zeroed", "accumulate", step=1, micro_step=2, rank=1, param="b")
    result = compare(replace(BASE, stage=3), replace(BASE, stage=2, faults=(fault,)))
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.micro_step, result.first.param) == (1, 2, "b")
    assert result.first.rank == 1 == result.blame.rank
    assert result.first.candidate == 0.0
    assert result.blame.side == "candidate"


def test_first_index_is_in_the_full_parameter(compare: Compare) -> None:
    fault = Fault("non_finite", "partition", micro_step=1, rank=1, param="a", amount=3)
    result = compare(BASE, replace(BASE, stage=3, faults=(fault,)))
    assert result.first is not None
    assert (result.first.index, result.first.rank) == (128 + 3, 1)
    assert result.first.candidate is not None and math.isnan(result.first.candidate)
    assert result.to_dict()["first"]["candidate"] == "NaN"


# -- faults at every hop -----------------------------------------------------------------------------

HOP_FAULTS = [
    ("seed", "wrong_seed", (1, 2, 3), "local_grad"),
    ("pack", "zeroed", (2, 3), "bucket"),
    ("pack", "double_counted", (2, 3), "bucket"),
    ("reduce", "not_averaged", (2, 3), "partition"),
    ("reduce", "averaged_twice", (2, 3), "partition"),
    ("reduce", "rank_missing", (2, 3), "partition"),
    ("reduce", "not_reduced", (2, 3), "partition"),
    ("partition", "shifted", (2, 3), "partition"),
    ("accumulate", "double_counted", (2, 3), "accumulated"),
    ("accumulate", "sign_flipped", (2, 3), "accumulated"),
    ("accumulate", "carried_over", (2, 3), "accumulated"),
    ("accumulate_local", "dropped_micro_steps", (1,), "accumulated"),
    ("accumulate_local", "scaled", (1,), "accumulated"),
    ("master", "scaled", (1, 2, 3), "master_grad"),
    ("master", "low_precision", (1, 2, 3), "master_grad"),
    ("master", "swapped", (3,), "master_grad"),
]


@pytest.mark.parametrize(
    ("law", "kind", "stage", "point"),
    [(law, kind, stage, at) for law, kind, stages, at in HOP_FAULTS for stage in stages],
)
def test_faults_are_found_at_their_hop(
    compare: Compare, law: str, kind: str, stage: int, point: str
) -> None:
    amount = {"low_precision": 4.0, "rank_missing": 1.0}.get(kind, 2.0)
    bad = replace(BASE, stage=stage, faults=(Fault(kind, law, amount=amount),))
    result = compare(replace(BASE, stage=2 if stage == 3 else 3), bad)
    assert result.first is not None and result.blame is not None
    assert result.first.point == point
    assert result.first.step == (1 if kind == "carried_over" else 0)
    assert result.blame.side == "candidate"
    # ZeRO-3 reduces and partitions in one call, so its audit cannot tell the two apart.
    assert result.blame.law == ("reduce" if (law, stage) == ("partition", 3) else law)


@pytest.mark.parametrize("kind", ["zeroed", "shifted", "non_finite", "low_precision", "swapped"])
def test_one_parameter_spoiled_after_clipping(compare: Compare, kind: str) -> None:
    fault = Fault(kind, "unscale_clip", param="b", rank=1, amount=4.0)
    result = compare(
        replace(BASE, stage=3, clip=0.5), replace(BASE, stage=3, clip=0.5, faults=(fault,))
    )
    assert result.first is not None and result.blame is not None
    assert (result.first.point, result.first.param) == ("clipped_grad", "b")
    assert (result.first.rank, result.first.micro_step) == (1, None)
    assert (result.blame.side, result.blame.law) == ("candidate", "unscale_clip")
    assert (result.blame.rank, result.blame.param) == (1, "b")
    assert result.blame.cause in (kind, "wrong_clip") or kind == "swapped"


@pytest.mark.parametrize("kind", ["zeroed", "scaled", "sign_flipped", "not_unscaled", "wrong_clip"])
def test_everything_spoiled_after_clipping(compare: Compare, kind: str) -> None:
    run = replace(BASE, clip=0.5, loss_scale=4.0)
    result = compare(run, replace(run, faults=(Fault(kind, "unscale_clip"),)))
    assert result.first is not None and result.blame is not None
    assert (result.first.point, result.first.param) == ("clipped_grad", "d")
    assert (result.blame.side, result.blame.law) == ("candidate", "unscale_clip")
    assert result.blame.cause in (kind, "wrong_clip", "scaled")


def test_buckets_in_another_order(compare: Compare) -> None:
    fault = Fault("order_mismatch", "replicate", rank=1)
    run = replace(BASE, bucket_numel=1000)
    result = compare(replace(run, stage=3), replace(run, faults=(fault,)))
    assert result.first is not None and result.blame is not None
    assert result.first.point == "partition"
    assert (result.blame.side, result.blame.law) == ("candidate", "replicate")
    assert result.blame.cause == "order_mismatch"


def test_padding_is_no_part_of_any_parameter(compare: Compare) -> None:
    run = replace(BASE, world_size=3)
    result = compare(run, replace(run, faults=(Fault("padding", "master", amount=3.0),)))
    assert result.verdict == "agree"
    assert any("the candidate breaks a law of its own (master" in note for note in result.notes)


# -- what no law explains --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_normalised_otherwise(compare: Compare, dtype: str) -> None:
    run = replace(BASE, model_dtype=dtype)
    result = compare(run, replace(run, local_factors=(1.1, 0.9, 1.3), stage=3))
    first, blame = result.first, result.blame
    assert first is not None and blame is not None
    assert (first.step, first.micro_step, first.point, first.rank) == (0, 0, "local_grad", 0)
    assert (blame.side, blame.law, blame.cause) == ("neither", None, "scaled")
    assert "not a fault of ZeRO" in blame.detail
    if dtype == "float32":
        assert "1.1 in micro-step 0, 0.9 in micro-step 1, 1.3 in micro-step 2" in blame.detail


def test_other_inputs(compare: Compare) -> None:
    result = compare(BASE, replace(BASE, seed=5, stage=3))
    assert result.first is not None and result.blame is not None
    assert (result.first.micro_step, result.first.point) == (0, "local_grad")
    assert (result.blame.side, result.blame.cause) == ("neither", "inputs_differ")
    assert "losses" in result.blame.detail


def test_other_gradients_of_the_same_losses(compare: Compare) -> None:
    result = compare(BASE, replace(BASE, noise=0.5))
    assert result.first is not None and result.blame is not None
    assert (result.first.point, result.blame.cause) == ("local_grad", "unknown")
    assert result.blame.side == "neither"


def test_a_difference_between_rounding_and_divergence(compare: Compare) -> None:
    result = compare(BASE, replace(BASE, noise=1e-4))
    assert result.verdict == "inconclusive"
    assert any("too much to call it rounding" in note for note in result.notes)


def test_seeds_that_differ(compare: Compare) -> None:
    result = compare(BASE, MANUAL)
    assert result.blame is not None and result.first is not None
    assert (result.first.point, result.blame.side) == ("local_grad", "neither")
    assert result.blame.cause == "scaled" and "seeds" in result.blame.detail
    assert "effective gradient_accumulation_steps differs: 3 against 1" in result.notes


def test_a_wrong_seed_is_blamed_even_after_drift(compare: Compare) -> None:
    run = replace(BASE, drift=0.1, steps=3)
    fault = Fault("wrong_seed", "seed", step=2, amount=0.25)
    result = compare(run, replace(run, noise=1e-7, faults=(fault,)))
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.point) == (2, "local_grad")
    assert (result.blame.side, result.blame.law) == ("candidate", "seed")


def test_a_clip_value_that_became_the_default(compare: Compare) -> None:
    run = replace(BASE, effective={"gradient_clipping": 0.0})
    result = compare(run, replace(BASE, clip=0.5, effective={"gradient_clipping": 0.5}))
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.micro_step) == (0, None)
    assert result.first.point == "clipped_grad"
    assert (result.blame.side, result.blame.law, result.blame.cause) == ("neither", None, "scaled")
    assert "gradient_clipping differs: 0.0 against 0.5" in result.blame.detail
    assert result.notes[0] == (
        "effective gradient_clipping differs: 0.0 against 0.5; "
        "ds_config gradient_clipping is not set in either"
    )


def test_a_clip_value_that_clips_nothing(compare: Compare) -> None:
    result = compare(BASE, replace(BASE, clip=1e6))
    assert result.verdict == "agree"
    assert result.notes[0].startswith("effective gradient_clipping differs: 0.0 against 1000000.0")


def test_clipping_by_norms_that_differ_within_rounding(compare: Compare) -> None:
    run = replace(BASE, clip=0.5)
    assert compare(run, replace(run, noise=1e-6, stage=3)).verdict == "rounding"


# -- blame -------------------------------------------------------------------------------------------


def test_both_may_be_to_blame(compare: Compare) -> None:
    one = replace(BASE, faults=(Fault("zeroed", "accumulate", micro_step=1),))
    two = replace(BASE, stage=3, faults=(Fault("not_averaged", "reduce", micro_step=1),))
    result = compare(one, two)
    assert result.blame is not None and result.blame.side == "candidate"  # partition comes first
    two = replace(BASE, stage=3, faults=(Fault("sign_flipped", "accumulate", micro_step=1),))
    result = compare(one, two)
    assert result.blame is not None and result.blame.side == "both"


def test_a_norm_that_is_reported_wrong_is_not_blamed_for_gradients_that_part(
    compare: Compare,
) -> None:
    fault = Fault("not_reduced", "reduce")
    result = compare(
        BASE,
        replace(
            BASE,
            stage=1,
            points=("local_grad", "bucket", "reduced", "master_grad"),
            faults=(fault,),
        ),
    )
    assert result.first is not None and result.blame is not None
    norm = Finding(
        *("unscale_clip", "not_unscaled", 0, None, None, None, "master_grad"),
        *(None, 1.0, 2.0, None, None, None, "the loss scale was not divided out"),
    )
    master = replace(result.first, step=0, micro_step=None, point="master_grad")
    reports_wrong = AuditResult("fail", norm, (norm,), {}, ())
    assert result.candidate_audit is not None
    blamed = blame(master, reports_wrong, result.candidate_audit, cause="unknown", detail="")
    assert (blamed.side, blamed.law, blamed.cause) == ("candidate", "reduce", "not_reduced")
    clipped = replace(master, point="clipped_grad")
    assert (
        blame(
            clipped,
            reports_wrong,
            AuditResult("pass", None, (), {}, ()),
            cause="unknown",
            detail="",
        ).side
        == "baseline"
    )


def test_runs_that_are_wrong_alike_agree_and_a_note_says_so(compare: Compare) -> None:
    bad = replace(BASE, faults=LAST_ONLY)
    result = compare(bad, replace(bad, stage=3))
    assert result.verdict == "agree"
    told = [note for note in result.notes if "breaks a law of its own (accumulate" in note]
    assert len(told) == 2
    assert result.blame is not None
    assert (result.blame.side, result.blame.law) == ("both", "accumulate")
    assert result.blame.cause == "dropped_micro_steps"
    assert compare(bad, bad).blame is not None
    assert compare(BASE, BASE).blame is None


def test_the_steps_that_only_one_run_holds_are_named(tmp_path: Path) -> None:
    one = write_run(tmp_path / "b", replace(BASE, steps=4))
    two = write_run(tmp_path / "c", replace(BASE, steps=2))
    told = [note for note in diff(one, two).notes if note.startswith("only the baseline")]
    assert told == ["only the baseline holds 2 steps (2, 3): not compared"]


def test_an_inconclusive_diff_gives_its_reason_first(compare: Compare) -> None:
    result = compare(replace(BASE, points=("bucket",)), replace(BASE, points=("reduced",)))
    assert result.verdict == "inconclusive"
    assert result.counts["compared"] == 0
    assert result.notes[0] == "nothing that both traces hold could be compared"


def test_a_fault_that_both_share_is_not_blamed(compare: Compare) -> None:
    shared = Fault("double_counted", "accumulate", step=0)
    late = Fault("zeroed", "master", step=1)
    run = replace(BASE, faults=(shared,))
    result = compare(run, replace(run, faults=(shared, late)))
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.point) == (1, "master_grad")
    assert (result.blame.side, result.blame.law) == ("candidate", "master")


# -- other world sizes and accumulation counts -------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "micro_steps", "gas_mode", "loss_scale"),
    [(4, 1, "engine", 1.0), (1, 6, "engine", 8.0), (3, 4, "manual", 1.0), (2, 6, "manual", 4.0)],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_batch_cut_otherwise(
    compare: Compare,
    world_size: int,
    micro_steps: int,
    gas_mode: str,
    loss_scale: float,
    stage: int,
) -> None:
    run = replace(BASE, samples=72, clip=0.5)
    other = replace(
        run, world_size=world_size, micro_steps=micro_steps, gas_mode=gas_mode, stage=stage,
        loss_scale=loss_scale, clip=0.0 if gas_mode == "manual" else 0.5,
    )  # fmt: skip
    if gas_mode == "manual":
        run = replace(run, clip=0.0)
    result = compare(run, other)
    assert result.verdict == "rounding", (result.first, result.blame)
    assert any("only the averaged gradient" in note for note in result.notes)
    assert all(entry.local_grad is None for entry in result.growth)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_by_one_against_two_by_four(compare: Compare, dtype: str) -> None:
    """One rank, accumulation 4 that keeps the last micro-step only, against no accumulation."""
    run = replace(BASE, world_size=1, model_dtype=dtype)
    bad = replace(run, micro_steps=4, faults=LAST_ONLY)
    result = compare(bad, replace(run, micro_steps=1, stage=3))
    first, blame = result.first, result.blame
    assert first is not None and blame is not None
    assert (first.step, first.micro_step, first.point) == (0, None, "master_grad")
    assert (blame.side, blame.law) == ("baseline", "accumulate")
    assert (blame.cause, blame.micro_step) == ("dropped_micro_steps", 1)


def test_ranks_do_not_correspond_across_world_sizes(compare: Compare) -> None:
    run = replace(BASE, micro_steps=2)
    bad = replace(run, world_size=4, micro_steps=1, faults=(Fault("not_averaged", "reduce"),))
    result = compare(run, bad)
    assert result.first is not None and result.blame is not None
    assert result.first.rank is None and result.first.point == "master_grad"
    assert (result.blame.side, result.blame.cause) == ("candidate", "not_averaged")


def test_another_batch_across_world_sizes(compare: Compare) -> None:
    result = compare(BASE, replace(BASE, world_size=4, seed=3, weight_seed=BASE.seed))
    assert result.first is not None and result.blame is not None
    assert (result.first.point, result.blame.side) == ("master_grad", "neither")
    assert result.blame.cause in ("inputs_differ", "unknown")
    assert "own hops explain" in result.blame.detail


def test_unknown_seeds_leave_no_scale(compare: Compare) -> None:
    points = ("local_grad", "master_grad", "clipped_grad")
    run = replace(BASE, points=points)
    result = compare(run, replace(run, world_size=4))
    assert result.verdict == "inconclusive"
    assert any("seed of the loss is not known" in note for note in result.notes)


# -- what is not there -------------------------------------------------------------------------------


def test_other_models_are_not_comparable(compare: Compare) -> None:
    other = (("a", (16, 16)), ("b", (16, 15)), ("e", (33,)), ("d", (5, 7)))
    result = compare(BASE, replace(BASE, parameters=other))
    assert result.verdict == "not_comparable"
    assert "only the baseline has c" in result.notes[0]
    assert "only the candidate has e" in result.notes[0]
    assert "b [16, 16] against [16, 15]" in result.notes[0]
    assert result.baseline_audit is None


def test_settings_that_differ_are_named_with_both_values(compare: Compare) -> None:
    other = replace(
        BASE, model_dtype="bfloat16", packages={"deepspeed": "0.18.2"},
        ds_config={"bf16": {"enabled": True}}, effective={"overlap_comm": True},
    )  # fmt: skip
    notes = compare(BASE, other).notes
    assert 'package deepspeed differs: "0.0.0" against "0.18.2"' in notes
    assert "ds_config bf16.enabled differs: (not set) against true" in notes
    assert (
        "effective overlap_comm differs: false against true; "
        "ds_config zero_optimization.overlap_comm is not set in either"
    ) in notes
    assert 'effective model_dtype differs: "float32" against "bfloat16"' in notes
    assert any(note.startswith("dtype of parameters: float32 against bfloat16") for note in notes)


def test_what_is_asked_for_stands_beside_what_is_in_effect(compare: Compare) -> None:
    asked = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 2}}
    one = replace(BASE, ds_config=asked, effective={"grad_accum_dtype": "bfloat16"})
    two = replace(BASE, ds_config=asked, effective={"grad_accum_dtype": "float32"})
    assert compare(one, two).notes == (
        'effective grad_accum_dtype differs: "bfloat16" against "float32"; '
        'ds_config data_types.grad_accum_dtype is "fp32" in both',
    )
    other = replace(BASE, ds_config={"gradient_clipping": 0.0, "optimizer": {"params": {"lr": 1}}})
    assert compare(BASE, other).notes == (
        "ds_config gradient_clipping differs: (not set) against 0.0; "
        "in effect, gradient_clipping is 0.0 in both",
        "ds_config optimizer.params.lr differs: (not set) against 1",
    )


def test_every_setting_that_is_asked_for_is_one_that_is_recorded() -> None:
    """Words that nobody records would never be shown."""
    text = (Path(gradtrace.__file__).parents[1] / "docs" / "format.md").read_text("utf-8")
    assert not [name for name in _ASKED_BY if f"`{name}`" not in text]


@pytest.mark.parametrize(
    "omission",
    [
        Omission(point="local_grad", rank=1, unit="b", micro_step=1),
        Omission(point="bucket", rank=0, micro_step=2),
        Omission(point="accumulated", rank=1, step=1),
        Omission(point="master_grad", rank=0),
        Omission(point="loss", rank=0, step=0, micro_step=0),
        Omission(step=1),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_gaps_make_agreement_inconclusive(compare: Compare, omission: Omission, side: int) -> None:
    runs = [BASE, replace(BASE, stage=3)]
    runs[side] = replace(runs[side], omissions=(omission,))
    result = compare(runs[0], runs[1])
    assert result.verdict == "inconclusive"
    assert any("records were lost" in note for note in result.notes)


def test_a_divergence_after_a_gap_is_still_one(compare: Compare) -> None:
    lost = (Omission(point="accumulated", rank=1, micro_step=1),)
    result = compare(BASE, replace(BASE, stage=3, omissions=lost, faults=LAST_ONLY))
    assert result.first is not None and result.blame is not None
    assert (result.first.micro_step, result.first.point) == (2, "accumulated")
    assert result.blame.side == "candidate"
    assert any("may be an earlier one" in note for note in result.notes)


def test_points_that_were_not_planned(compare: Compare) -> None:
    ends = ("loss", "local_grad", "master_grad")
    result = compare(replace(BASE, points=ends), replace(BASE, stage=3))
    assert result.verdict in ("agree", "rounding")
    result = compare(
        replace(BASE, points=ends, stage=3, faults=LAST_ONLY), replace(BASE, points=ends)
    )
    assert result.first is not None and result.blame is not None
    assert (result.first.point, result.blame.law) == ("master_grad", "end_to_end")
    assert result.blame.side == "baseline"


def test_without_local_gradients_size_decides(compare: Compare) -> None:
    late = ("loss", "accumulated", "master_grad")
    run = replace(BASE, points=late)
    assert compare(run, replace(run, stage=3)).verdict in ("agree", "rounding")
    result = compare(run, replace(run, stage=3, faults=LAST_ONLY))
    assert result.first is not None and result.blame is not None
    assert (result.first.micro_step, result.first.point) == (1, "accumulated")
    assert result.blame.side == "neither"


def test_losses_alone(compare: Compare) -> None:
    run = replace(BASE, points=("loss",))
    result = compare(run, replace(run, seed=3))
    assert result.first is not None and result.blame is not None
    assert (result.first.point, result.first.param, result.first.rank) == ("loss", None, 0)
    assert result.blame.cause == "inputs_differ"
    assert compare(run, replace(run, stage=3)).verdict == "inconclusive"  # no tensor was compared


def test_a_partial_step_is_only_compared_where_it_can_be(compare: Compare) -> None:
    bad = replace(BASE, partial=True, faults=(Fault("double_counted", "accumulate", step=0),))
    result = compare(bad, replace(BASE, stage=3))
    assert result.verdict == "agree"
    assert any("wrapped in the middle" in note for note in result.notes)


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "b", replace(BASE, steps=3, shard_bytes=64))
    cut = write_run(tmp_path / "c", replace(BASE, steps=3, shard_bytes=64))
    last = max((cut / "rank-00001").glob("index-*"))
    last.unlink()
    result = diff(whole, cut)
    assert result.verdict == "agree"
    assert any("never closed" in note for note in result.notes)
    assert any("only the baseline holds 1 step (2)" in note for note in result.notes)


def test_no_step_in_common(compare: Compare) -> None:
    result = compare(replace(BASE, steps=0), BASE)
    assert result.verdict == "not_comparable"
    assert "no step is complete in both traces" in result.notes


# -- any two clean runs --------------------------------------------------------------------------------


@st.composite
def clean_pairs(draw: st.DrawFn) -> tuple[Run, Run]:
    """Draw two runs of the same batches, whatever their settings."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=2), min_size=1, max_size=4))
    names = tuple((f"p{at}", tuple(shape)) for at, shape in enumerate(shapes))
    run = Run(
        parameters=names,
        world_size=draw(st.sampled_from([1, 2, 3, 4])),
        micro_steps=draw(st.sampled_from([1, 2, 3])),
        steps=draw(st.sampled_from([1, 2])),
        model_dtype=dtype,
        gas_mode=draw(st.sampled_from(["engine", "manual"])),
        clip=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 50)),
        drift=draw(st.sampled_from([0.0, 0.3])),
        gradient_scale=draw(st.sampled_from([1.0, 1e-6, 1e-30])),
        unused=((names[0][0], 0),) if draw(st.booleans()) else (),
        twice=(names[-1][0],) if draw(st.booleans()) else (),
    )

    def side() -> Run:
        return replace(
            run,
            stage=draw(st.sampled_from([1, 2, 3])),
            groups=draw(st.sampled_from([1, 2])),
            bucket_numel=draw(st.sampled_from([8, 40, 200])),
            accum_dtype=draw(st.sampled_from([None, "float32"])),
            comm_dtype=draw(st.sampled_from([None, "float32"])),
            reduce_scatter=draw(st.booleans()),
        )

    return side(), side()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pair=clean_pairs())
def test_clean_runs_never_diverge(compare: Compare, pair: tuple[Run, Run]) -> None:
    result = compare(*pair)
    assert result.verdict in ("agree", "rounding"), (result.first, result.blame, result.notes)
