"""The verdict: what is missing never passes, what was not planned is skipped and counted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradtrace.analysis.audit import audit
from gradtrace.analysis.results import LAWS
from gradtrace.errors import NotATraceError
from gradtrace.testing.synthetic import Fault, Omission, Run, write_run
from gradtrace.trace.points import BY_NAME, POINT_NAMES
from gradtrace.trace.reader import open_trace

ABSENT = {1: (), 2: ("local_accum",), 3: ("local_accum", "reduced")}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("point", POINT_NAMES)
def test_a_gap_never_passes(tmp_path, stage, point):
    if point in ABSENT[stage]:
        return
    optimizer = not BY_NAME[point].per_micro_step
    lost = Omission(point, step=1, micro_step=None if optimizer else 1, rank=0)
    run = Run(stage=stage, steps=2, samples=24, omissions=(lost,))
    result = audit(write_run(tmp_path / "run", run))
    assert result.verdict == "inconclusive"
    assert result.first is None
    assert any("were lost" in note for note in result.notes)


def test_a_finding_beats_a_gap(tmp_path):
    run = Run(
        steps=2,
        samples=24,
        faults=(Fault("zeroed", "accumulate", step=0, micro_step=1),),
        omissions=(Omission("bucket", step=1, micro_step=0, rank=0),),
    )
    result = audit(write_run(tmp_path / "run", run))
    assert (result.verdict, result.first.cause) == ("fail", "zeroed")


def test_the_hops_around_the_first_finding_are_told_each_by_its_own_inputs(tmp_path):
    points = tuple(name for name in POINT_NAMES if name != "local_grad")
    fault = Fault("sign_flipped", "reduce", step=1, micro_step=1, rank=0)
    for planned in (POINT_NAMES, points):
        run = Run(stage=2, steps=2, micro_steps=3, samples=24, points=planned, faults=(fault,))
        result = audit(write_run(tmp_path / str(len(planned)), run))
        assert (result.first.law, result.first.step) == ("reduce", 1)
        hops = {hop.law: hop for hop in result.path}
        order = [law for law in LAWS if law in hops]
        assert list(hops) == order
        broken = {law for law, hop in hops.items() if hop.broken}
        assert broken == ({"reduce", "end_to_end"} if planned is POINT_NAMES else {"reduce"})
        for law in ("partition", "accumulate", "master"):
            assert hops[law].checked > 0
            assert hops[law].broken == 0
    assert hops["pack"].checked == 0
    assert hops["pack"].reason == "local_grad is not_planned"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("point", POINT_NAMES)
def test_what_is_not_planned_is_skipped(tmp_path, stage, point):
    points = tuple(name for name in POINT_NAMES if name != point)
    run = Run(stage=stage, steps=2, micro_steps=3, samples=24, points=points)
    result = audit(write_run(tmp_path / "run", run))
    assert result.verdict == "pass", (result.first, result.notes)
    uses = {
        "loss": {"seed"},
        "local_grad": {"end_to_end", "accumulate_local"},
        "bucket": {"pack", "reduce"},
        "reduced": set(),
        "partition": {"accumulate"} if stage == 3 else set(),
        "accumulated": {"accumulate"},
        "master_grad": {"end_to_end"},
    }.get(point, set())
    for law in uses:
        assert result.laws[law].checked == 0
        if law != "accumulate_local" or stage == 1:
            assert result.laws[law].skipped


@pytest.mark.parametrize(
    "kind, law, micro_step, cause",
    [
        ("dropped_micro_steps", "accumulate", 2, "dropped_micro_steps"),
        ("carried_over", "accumulate", 0, "carried_over"),
        ("not_averaged", "reduce", None, "not_averaged"),
        ("averaged_twice", "reduce", None, "averaged_twice"),
        ("not_reduced", "reduce", None, "not_reduced"),
        ("rank_missing", "reduce", None, "rank_missing"),
    ],
)
def test_the_two_ends_are_enough(tmp_path, kind, law, micro_step, cause):
    run = Run(
        stage=2,
        world_size=3,
        micro_steps=3,
        steps=2,
        samples=36,
        points=("local_grad", "master_grad"),
        faults=(Fault(kind, law, step=1, micro_step=micro_step, amount=1),),
    )
    first = audit(write_run(tmp_path / "run", run)).first
    assert (first.law, first.cause, first.step, first.micro_step) == ("end_to_end", cause, 1, None)


def test_first_and_last_survive(tmp_path):
    faults = (
        Fault("skipped_micro_step", "accumulate", micro_step=1),
        Fault("skipped_micro_step", "accumulate", micro_step=2),
    )
    run = Run(micro_steps=4, samples=24, points=("local_grad", "master_grad"), faults=faults)
    first = audit(write_run(tmp_path / "run", run)).first
    assert first.cause == "dropped_micro_steps"
    assert "(first and last)" in first.detail
    assert "micro-steps 1, 2 are lost" in first.detail


def test_the_last_only_from_micro_step_1_every_parameter(tmp_path):
    run = Run(
        micro_steps=3,
        steps=2,
        samples=24,
        gas_mode="manual",
        faults=(Fault("dropped_micro_steps", "accumulate"),),
    )
    result = audit(write_run(tmp_path / "run", run))
    first = result.first
    assert (first.law, first.step, first.micro_step) == ("accumulate", 0, 1)
    assert first.detail.startswith(
        "accumulated at micro-step 1 holds micro-step 1 only; micro-step 0 is lost."
    )
    assert {first.param, *first.folded} == {name for name, _ in run.parameters}
    assert result.laws["pack"].broken == result.laws["reduce"].broken == 0
    assert [(f.step, f.micro_step) for f in result.findings] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_two_bugs_are_two_findings_in_causal_order(tmp_path):
    faults = (
        Fault("averaged_twice", "reduce", step=0, micro_step=1),
        Fault("zeroed", "master", step=0, param="layers.1.weight"),
        Fault("sign_flipped", "pack", step=0, micro_step=1, rank=0, param="embed.weight"),
    )
    run = Run(world_size=2, samples=24, faults=faults)
    findings = audit(write_run(tmp_path / "run", run)).findings
    assert [(f.law, f.cause) for f in findings] == [
        ("pack", "sign_flipped"),
        ("reduce", "averaged_twice"),
        ("master", "zeroed"),
    ]


def test_a_lost_rank_of_64_in_bfloat16_is_seen(tmp_path):
    run = Run(
        world_size=64,
        micro_steps=1,
        samples=64,
        model_dtype="bfloat16",
        parameters=(("w", (256, 128)), ("b", (3,))),
        bucket_numel=10**6,
        faults=(Fault("rank_missing", "reduce", amount=5, rank=11),),
    )
    run_of_ends = Run(
        **{f: getattr(run, f) for f in ("world_size", "micro_steps", "samples", "model_dtype")},
        parameters=(("w", (16, 16)),),
    )
    assert audit(write_run(tmp_path / "clean", run_of_ends)).verdict == "pass"
    first = audit(write_run(tmp_path / "run", run)).first
    assert (first.law, first.cause, first.rank, first.param) == ("reduce", "rank_missing", 11, "w")
    assert "rank 5" in first.detail


def test_steps_can_be_chosen(tmp_path):
    path = write_run(
        tmp_path / "run", Run(steps=3, samples=24, faults=(Fault("zeroed", "reduce", step=1),))
    )
    assert audit(path).verdict == "fail"
    assert audit(path, steps=[0, 2]).verdict == "pass"
    assert audit(open_trace(path), steps=[1]).first.step == 1
    nothing = audit(path, steps=[7])
    assert (nothing.verdict, nothing.notes[-1]) == ("inconclusive", "no complete step to judge")


def test_a_partial_window_is_not_judged_by_its_missing_part(tmp_path):
    for stage in (1, 2, 3):
        run = Run(stage=stage, micro_steps=3, steps=2, samples=24, partial=True)
        result = audit(write_run(tmp_path / str(stage), run))
        assert result.verdict == "pass", result.first
        assert result.laws["end_to_end"].skipped


def test_the_result_is_what_json_prints(tmp_path):
    run = Run(samples=24, faults=(Fault("non_finite", "reduce", micro_step=1),))
    body = audit(write_run(tmp_path / "run", run)).to_dict()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert list(body["laws"]) == list(LAWS)
    assert body["first"]["found"] == "NaN"


def test_no_trace(tmp_path):
    with pytest.raises(NotATraceError):
        audit(tmp_path / "nothing")


@pytest.mark.parametrize("scale", (1e-7, 1e-6, 1e-3))
def test_the_narrowest_range_on_the_path_bounds_underflow_not_the_coarsest_dtype(tmp_path, scale):
    """fp16 gradients near its subnormals on a bf16 wire: bf16 is coarser, fp16 underflows sooner."""
    run = Run(
        stage=3,
        world_size=3,
        micro_steps=6,
        model_dtype="float16",
        comm_dtype="bfloat16",
        gradient_scale=scale,
    )
    result = audit(write_run(tmp_path / "trace", run))
    assert result.verdict == "pass", result.first


# --- what the run says of itself -------------------------------------------------------------------


def _told(trace, **facts):
    """Return a trace whose ranks say something else in each step's facts."""
    ranks = {
        rank: replace(
            held,
            steps={n: replace(end, facts={**end.facts, **facts}) for n, end in held.steps.items()},
        )
        for rank, held in trace.ranks.items()
    }
    return replace(trace, ranks=ranks)


def _asked(trace, **settings):
    """Return a trace whose ranks hold other effective settings."""
    ranks = {
        rank: replace(
            held,
            header=replace(held.header, effective={**held.header.effective, **settings}),
        )
        for rank, held in trace.ranks.items()
    }
    return replace(trace, ranks=ranks)


@pytest.mark.parametrize("clip", (0.0, 0.5))
@pytest.mark.parametrize("norm", ("NaN", "Infinity", -1.0))
def test_a_norm_that_is_no_number_is_a_finding_where_the_gradients_are(tmp_path, norm, clip):
    trace = open_trace(write_run(tmp_path / "run", Run(stage=2, steps=2, samples=24, clip=clip)))
    assert audit(trace).verdict == "pass"
    result = audit(_told(trace, grad_norm=norm))
    assert result.verdict == "fail"
    assert result.first.law == "unscale_clip"
    if isinstance(norm, str):
        assert "non_finite" in {f.cause for f in result.findings if f.param is None}


@pytest.mark.parametrize("stage", (2, 3))
def test_a_buffer_coarser_than_what_was_asked_for_is_a_finding(tmp_path, stage):
    run = Run(stage=stage, steps=2, samples=24, model_dtype="bfloat16", micro_steps=3)
    trace = open_trace(write_run(tmp_path / "run", run))
    assert audit(trace).verdict == "pass"
    for finer in ("bfloat16", "float16"):  # the same, and one that neither holds the other of
        assert audit(_asked(trace, grad_accum_dtype=finer)).laws["accumulate"].broken == 0
    result = audit(_asked(trace, grad_accum_dtype="float32"))
    assert (result.first.law, result.first.cause) == ("accumulate", "low_precision")
    assert (result.first.step, result.first.micro_step) == (0, 1)
