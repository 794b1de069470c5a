"""The laws of weights on traces: what they skip and why, what a gap costs, and what they convict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradtrace.analysis.audit import audit
from gradtrace.analysis.diff import diff
from gradtrace.testing.synthetic import Fault, Omission, Run, write_run
from gradtrace.trace.points import POINT_NAMES

RUN = Run(stage=2, world_size=2, steps=3, whole_weights=True, momentum=0.9)
NEXT = "the moments after the step: the trace does not hold the next one"


def _audit(path, run):
    return audit(write_run(path / "run", run))


def _without(*points):
    return tuple(name for name in POINT_NAMES if name not in points)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_is_checked_but_what_the_trace_cannot_hold(tmp_path, stage):
    result = _audit(tmp_path, replace(RUN, stage=stage))
    assert result.verdict == "pass"
    shards = 12 if stage == 3 else 7
    shards -= stage == 3  # one element: the last rank's shard is empty
    assert result.laws["update"].checked == 3 * shards + 2 * shards
    assert result.laws["update"].skip_reasons == {NEXT: shards}
    assert result.laws["publish"].checked == 2 * (shards if stage == 3 else 12)
    assert result.laws["publish"].skip_reasons == {"the trace does not hold the step before": 6}


@pytest.mark.parametrize(
    ("run", "law", "reason"),
    [
        (
            replace(RUN, whole_weights=False),
            "update",
            "master_weight is kept as digests: name it in points",
        ),
        *(
            (replace(RUN, points=_without(point)), "update", f"{point} is not_planned")
            for point in ("optimizer_state", "clipped_grad", "master_weight")
        ),
        *(
            (replace(RUN, points=_without(point)), "publish", f"{point} is not_planned")
            for point in ("weight", "master_weight")
        ),
        (
            replace(RUN, optimizer_facts={"class": "torch.optim.adagrad.Adagrad", "rule": None}),
            "update",
            "no rule is known of the optimizer torch.optim.adagrad.Adagrad",
        ),
        (replace(RUN, optimizer_facts={"amsgrad": True}), "update", "no rule is known of amsgrad"),
        (
            replace(RUN, optimizer_facts={"kernel": "tpu"}),
            "update",
            "no bound is known of the kernel tpu",
        ),
        (
            replace(RUN, optimizer_facts={"lr": None}),
            "update",
            "the optimizer's settings are not known, or out of their range",
        ),
        (
            replace(RUN, whole_weights=False, model_dtype="bfloat16"),
            "publish",
            "bfloat16 and float32 cannot be compared by hashes: name weight and master_weight in points",
        ),
        (replace(RUN, loaded=(1, 2)), "publish", "a checkpoint was loaded between two steps"),
    ],
)
def test_what_cannot_be_judged_is_skipped_with_the_reason(tmp_path, run, law, reason):
    result = _audit(tmp_path, run)
    assert result.verdict == "pass", (result.first, result.notes)
    assert result.laws[law].checked == 0
    assert result.laws[law].skip_reasons[reason] >= 6
    assert not result.lost


def test_a_checkpoint_that_was_loaded_ends_what_a_step_left(tmp_path):
    """Without the fact, the same trace is convicted: somebody wrote the weights."""
    result = _audit(tmp_path, replace(RUN, loaded=(1,)))
    assert result.verdict == "pass"
    skipped = result.laws["update"].skip_reasons
    assert skipped["a checkpoint was loaded between two steps"] == 7
    assert result.laws["update"].checked == 3 * 7 + 7


@pytest.mark.parametrize(
    ("omission", "law"),
    [
        (Omission("optimizer_state", step=1, rank=1), "update"),
        (Omission("optimizer_state", step=1, rank=1, unit="group0.momentum_buffer"), "update"),
        (Omission("master_weight", step=1, rank=0), "update"),
        (Omission("clipped_grad", step=1, rank=0), "update"),
        (Omission("weight", step=1, rank=0), "publish"),
        (Omission("master_weight", step=0, rank=0), "publish"),
    ],
)
def test_a_gap_leaves_it_open(tmp_path, omission, law):
    result = _audit(tmp_path, replace(RUN, omissions=(omission,)))
    assert result.verdict == "inconclusive"
    assert result.lost
    assert any("lost" in reason for reason in result.laws[law].skip_reasons)
    assert all(count.broken == 0 for count in result.laws.values())


OVERFLOWED = Fault("non_finite", "master", step=1, rank=0, param="embed.weight", amount=0)


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_that_is_left_out_changes_nothing(tmp_path, whole):
    run = replace(RUN, whole_weights=whole, faults=(OVERFLOWED,))
    result = _audit(tmp_path / "left", run)
    assert [finding.law for finding in result.findings] == ["master"]
    assert result.laws["update"].checked >= 7
    moved = Fault("scaled", "update", step=1, rank=1, param="layers.1.weight", amount=1.001)
    result = _audit(tmp_path / "moved", replace(run, faults=(OVERFLOWED, moved)))
    (finding,) = [finding for finding in result.findings if finding.law == "update"]
    assert (finding.step, finding.rank, finding.param) == (1, 1, "layers.1.weight")
    assert "the step was left out as overflowed" in finding.detail


def test_a_moment_that_the_next_step_begins_with_is_judged(tmp_path):
    fault = Fault("wrong_moment", "update", step=1, rank=1, param="layers.1.weight", amount=1.5)
    result = _audit(tmp_path, replace(RUN, faults=(fault,)))
    (finding,) = result.findings
    assert (finding.law, finding.cause, finding.step) == ("update", "scaled", 1)
    assert (finding.rank, finding.param, finding.point) == (1, "layers.1.weight", "optimizer_state")
    assert "momentum_buffer, as step 2 begins with it," in finding.detail


@pytest.mark.parametrize("kind", ["stale", "zeroed", "swapped", "non_finite", "shifted"])
def test_digests_alone_convict_what_was_not_published(tmp_path, kind):
    run = replace(RUN, stage=2, whole_weights=False)
    fault = Fault(kind, "publish", step=2, rank=1, param="layers.1.weight", amount=1)
    result = _audit(tmp_path, replace(run, faults=(fault,)))
    (finding,) = result.findings
    cause = "weights_differ" if kind == "shifted" else kind  # rank 0 holds the right one
    assert (finding.law, finding.cause, finding.step) == ("publish", cause, 2)
    assert (finding.rank, finding.param) == (1, "layers.1.weight")
    assert "the hashes tell it" in finding.detail


def test_a_wrong_setting_is_told_from_the_weights(tmp_path):
    for facts, cause, words in (
        ({"lr": 0.025}, "scaled", "The step is 0.4 times what the rule gives"),
        ({"maximize": True}, "sign_flipped", "ascends"),
    ):
        run = replace(RUN, optimizer_facts=facts, momentum=0.0)
        result = _audit(tmp_path / cause, run)
        assert (result.first.law, result.first.cause, result.first.step) == ("update", cause, 0)
        assert words in result.first.detail


def test_a_divergence_behind_a_wrong_step_is_blamed_on_it(tmp_path):
    run = replace(RUN, drift=0.1)
    fault = Fault("scaled", "update", step=0, amount=3.0)
    paths = [
        write_run(tmp_path / n, r) for n, r in (("a", run), ("b", replace(run, faults=(fault,))))
    ]
    result = diff(*paths)
    assert result.verdict == "diverged"
    assert (result.first.step, result.first.point) == (1, "local_grad")
    assert (result.blame.side, result.blame.law, result.blame.cause) == (
        "candidate",
        "update",
        "scaled",
    )
    assert result.blame.step == 0


def test_a_divergence_behind_weights_that_were_not_published_is_blamed_on_that(tmp_path):
    run = replace(RUN, drift=0.1)
    fault = Fault("stale", "publish", step=1)
    paths = [
        write_run(tmp_path / n, r) for n, r in (("a", run), ("b", replace(run, faults=(fault,))))
    ]
    result = diff(*paths)
    # The simulated gradients follow the masters: the runs themselves do not part.
    assert (result.blame.side, result.blame.law, result.blame.cause) == (
        "candidate",
        "publish",
        "stale",
    )
