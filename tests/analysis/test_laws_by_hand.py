"""Laws on tiny traces written by hand: what a simulated run never does."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrace.analysis.audit import audit
from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace import writer
from gradtrace.trace.dtypes import DTYPES, from_float64
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.records import Header, Manifest, Parameter
from gradtrace.trace.spans import pack_spans

NAMES = ("a", "b")
NUMEL = 6
LOSS = {
    "loss": 1.0,
    "loss_grad": 0.5,
    "output_factors": [],
    "seed": 0.5,
    "path": "engine.backward",
    "loss_scale": 1.0,
    "gas": 2,
    "scale_wrt_gas": True,
    "boundary": True,
    "optimizer_boundary": True,
}


class Hand:
    """Write one rank's records in order, two parameters of six elements."""

    def __init__(
        self, root, rank=0, world=1, points=(), own=None, effective=None, ranks=None, aliases=()
    ):
        self.rank, self.world, self.counts = rank, world, {}
        if rank == 0:
            parameters = tuple(
                Parameter(
                    at, name, tuple(aliases) if at == 0 else (), (2, 3), "float32", 0, True, True
                )
                for at, name in enumerate(NAMES)
            )
            plan = {"points": list(points), "ranks": ranks}
            writer.write_manifest(root, Manifest("r", world, plan, parameters, {}, {}, 0.0))
        own = [(0, 0, NUMEL), (1, 0, NUMEL)] if own is None else own
        status = {name: "recorded" if name in points else "not_planned" for name in POINT_NAMES}
        header = Header(
            rank, rank, tuple(range(world)), status, {"group0": 0}, effective or {}, "host"
        )
        self.own = pack_spans(own)
        self.writer = writer.RankWriter(root, "r", header, {0: self.own})
        self.records = 0

    def add(
        self, micro_step, point, values=None, param=0, facts=None, layout=None, dtype="float32"
    ):
        unit = "loss" if values is None else NAMES[param]
        key = (micro_step, point, unit)
        occurrence = self.counts.get(key, 0)
        self.counts[key] = occurrence + 1
        if values is None:
            self.writer.add_record(0, micro_step, point, unit, occurrence, facts=facts)
        else:
            values = np.asarray(values, dtype=float)
            layout = layout or pack_spans([(param, 0, len(values))])
            self.writer.add_record(
                0,
                micro_step,
                point,
                unit,
                occurrence,
                dtype=dtype,
                layout=layout,
                data=from_float64(values, DTYPES[dtype]),
                facts=facts,
            )
        self.records += 1
        return self

    def close(self, micro_steps=1, **facts):
        self.writer.end_step(
            0, micro_steps=micro_steps, records=self.records, gaps=0, partial=False, facts=facts
        )
        self.writer.seal("closed")


def _loss(root, step_facts=None, effective=None, **changes):
    hand = Hand(root, points=("loss",), effective=effective)
    hand.add(0, "loss", facts={**LOSS, **changes}).close(**(step_facts or {}))
    return audit(root)


G = np.array([1.0, -2.0, 3.0, 0.5, 0.25, -7.0])
HALVES = ([(0, 0, NUMEL)], [(1, 0, NUMEL)])
BUCKET = {"comm_dtype": "float32", "ranks": [0], "op": "mean"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale_wrt_gas": None},
        {"scale_wrt_gas": None, "seed": 1.0, "loss_grad": 1.0},  # hidden by somebody's wrapper
        {"scale_wrt_gas": False, "seed": 1.0, "loss_grad": 1.0},
        {"loss_scale": 1024.0, "seed": 512.0, "loss_grad": 512.0},
        {"loss_grad": 1.0, "output_factors": [0.5, "NaN"]},  # 0.18.3 to 0.19.2: the hook divides
        {"path": "tensor.backward", "output_factors": [0.5], "loss_grad": 0.25},
        {"path": "tensor.backward", "output_factors": [0.5], "loss_grad": None, "seed": None},
        {"path": "tensor.backward", "output_factors": ["NaN", 0.5], "loss_grad": 1.0},
        {"gas": 3, "seed": float(np.float32(1 / 3)), "loss_grad": float(np.float32(1 / 3))},
    ],
)
def test_seeds_that_are_right(tmp_path, changes):
    result = _loss(tmp_path, **changes)
    assert (result.laws["seed"].checked, result.laws["seed"].broken) == (1, 0), result.first


@pytest.mark.parametrize(
    "changes, cause, found",
    [
        ({"scale_wrt_gas": False}, "scaled", 0.5),  # the flag was ignored
        ({"seed": 1.0, "loss_grad": 1.0}, "not_averaged", 1.0),
        ({"scale_wrt_gas": None, "seed": 0.25, "loss_grad": 0.25}, "averaged_twice", 0.25),
        ({"seed": 0.25, "loss_grad": 0.25}, "averaged_twice", 0.25),
        ({"seed": "NaN", "loss_grad": "NaN"}, "non_finite", None),
        ({"loss_scale": 1024.0}, "scaled", 0.5),
        ({"output_factors": [1.0, 0.5]}, "averaged_twice", 0.25),
        # DeepSpeed 0.18.3: the hook divides, although scale_wrt_gas=False asked it not to
        (
            {"scale_wrt_gas": False, "loss_grad": 1.0, "output_factors": [0.5], "seed": 0.5},
            "scaled",
            0.5,
        ),
        (
            {"path": "tensor.backward", "output_factors": [1.0], "loss_grad": None, "seed": None},
            "not_averaged",
            1.0,
        ),
    ],
)
def test_seeds_that_are_wrong(tmp_path, changes, cause, found):
    first = _loss(tmp_path, **changes).first
    assert (first.law, first.cause) == ("seed", cause), first
    assert found is None or first.found == found


def test_outputs_that_were_divided_more_often_are_told(tmp_path):
    """DeepSpeed 0.18.3 hooks every output: a loss computed from the logits passes two of them."""
    facts = {"scale_wrt_gas": False, "loss_grad": 1.0, "seed": 0.5}
    first = _loss(tmp_path, **facts, output_factors=[0.5, 0.25]).first
    assert first.found == 0.5
    assert "Through other outputs of the model it is 0.25." in first.detail


def test_a_seed_that_nobody_saw_is_skipped(tmp_path):
    result = _loss(tmp_path, path="tensor.backward", loss_grad=None, seed=None)
    assert result.laws["seed"].checked == 0
    assert result.laws["seed"].skipped == 1


def test_an_output_that_passed_nothing_says_nothing_of_the_seed(tmp_path):
    result = _loss(tmp_path, loss_grad=1.0, seed="NaN", output_factors=["NaN"])
    assert result.first is None
    assert result.laws["seed"].skipped == 1


def test_what_is_divided_out_is_what_was_multiplied_in(tmp_path):
    scaled = {"loss_scale": 8.0, "seed": 4.0, "loss_grad": 4.0}
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    (tmp_path / "skipped").mkdir()
    assert _loss(tmp_path / "right", {"loss_scale": 8.0}, **scaled).first is None
    first = _loss(tmp_path / "wrong", {"loss_scale": 4.0}, **scaled).first
    assert (first.law, first.cause) == ("seed", "not_unscaled")
    overflow = {"loss_scale": 4.0, "overflow": True}
    assert _loss(tmp_path / "skipped", overflow, **scaled).first is None


def test_a_third_in_bfloat16_is_rounding(tmp_path):
    third = {"gas": 3, "seed": 0.333984375, "loss_grad": 0.333984375}
    (tmp_path / "half").mkdir()
    assert _loss(tmp_path / "half", effective={"model_dtype": "bfloat16"}, **third).first is None
    assert _loss(tmp_path, effective={"model_dtype": "float32"}, **third).first is not None


LOCAL = ("local_grad", "local_accum", "bucket", "reduced")


def _local(root, steps, own=None):
    """Write (micro_step, gradient, buffer, carry, bucket, reduced) rows for parameter a."""
    hand = Hand(root, points=LOCAL, own=own)
    for micro_step, gradient, buffer, carry, bucket, reduced in steps:
        if gradient is not None:
            hand.add(micro_step, "local_grad", gradient)
        if buffer is not None:
            hand.add(micro_step, "local_accum", buffer, facts={"carry": carry})
        if bucket is not None:
            hand.add(micro_step, "bucket", bucket, facts=BUCKET)
            hand.add(micro_step, "reduced", reduced)
    hand.close(micro_steps=1 + max(row[0] for row in steps))
    return audit(root)


def test_a_buffer_that_was_cleared_without_a_collective_is_the_bug(tmp_path):
    for name, carry in (("told", False), ("hidden", True)):
        (tmp_path / name).mkdir()
        first = _local(
            tmp_path / name,
            [(0, G, G, False, None, None), (1, 3 * G, 3 * G, carry, None, None)],
        ).first
        assert (first.law, first.cause, first.micro_step) == (
            "accumulate_local",
            "dropped_micro_steps",
            1,
        )


def test_after_a_collective_the_fact_tells_what_was_carried(tmp_path):
    rows = [(0, G, G, False, G, G)]
    for name, buffer, carry, good in (
        ("cleared", 2 * G, False, True),
        ("carried", 3 * G, True, True),
        ("lost", 2 * G, True, False),
        ("kept", 3 * G, False, False),
    ):
        (tmp_path / name).mkdir()
        result = _local(tmp_path / name, [*rows, (1, 2 * G, buffer, carry, buffer, buffer)])
        assert (result.first is None) == good, (name, result.first)
        if not good:
            assert result.first.law == "accumulate_local"


def test_no_gradient_in_the_boundary_micro_step(tmp_path):
    result = _local(tmp_path, [(0, G, G, False, None, None), (1, None, None, None, G, G)])
    assert result.first is None
    assert result.laws["pack"].checked == 1


def test_a_result_without_a_record_is_no_pass(tmp_path):
    hand = Hand(tmp_path, points=("local_grad", "bucket", "reduced"))
    hand.add(0, "local_grad", G).add(0, "bucket", G, facts=BUCKET).close()
    result = audit(tmp_path)
    assert (result.verdict, result.first) == ("inconclusive", None)
    assert any("no gap says why" in note for note in result.notes)


def test_the_tiling_of_a_parameter(tmp_path):
    for name, halves, cause in (
        ("tiled", ((0, 3), (3, 3)), None),
        ("twice", ((0, 4), (3, 3)), "partly_overwritten"),
        ("hole", ((0, 3), (4, 2)), "unknown"),
    ):
        root = tmp_path / name
        root.mkdir()
        for rank, (offset, numel) in enumerate(halves):
            whole = [(1, 0, NUMEL)] if rank == 0 else []
            own = [(0, offset, numel), *whole]
            Hand(root, rank, 2, points=("loss",), own=own).add(0, "loss", facts=LOSS).close()
        first = audit(root).first
        assert (None if first is None else (first.law, first.cause, first.param)) == (
            None if cause is None else ("partition", cause, "a")
        )


def test_ranks_that_are_not_planned_are_skipped(tmp_path):
    hand = Hand(tmp_path, 0, 2, points=("local_grad", "bucket", "reduced"), ranks=[0])
    facts = {**BUCKET, "ranks": [0, 1]}
    hand.add(0, "local_grad", G).add(0, "bucket", G, facts=facts).add(0, "reduced", 9 * G).close()
    result = audit(tmp_path)
    assert result.verdict == "pass"
    assert (result.laws["pack"].checked, result.laws["reduce"].checked) == (1, 0)
    assert "ranks of the collective are not in the trace" in result.laws["reduce"].skip_reasons


@pytest.mark.parametrize(
    "settings, good",
    [
        ({"gradient_predivide_factor": 2.0, "postscale_gradients": True}, True),
        ({"sequence_parallel_size": 2}, False),
    ],
)
def test_settings_that_scale_the_mean(tmp_path, settings, good):
    data = [G, 5 * G]
    for rank in range(2):
        points = ("bucket", "reduced")
        hand = Hand(tmp_path, rank, 2, points=points, own=HALVES[rank], effective=settings)
        hand.add(0, "bucket", data[rank], facts={**BUCKET, "ranks": [0, 1]})
        hand.add(0, "reduced", 3 * G).close()
    result = audit(tmp_path)
    assert (result.first is None) == good
    if not good:  # with sequence parallelism 2 of 2, the mean over one data-parallel rank is a sum
        assert result.first.law == "reduce"


def test_a_sum_is_not_divided(tmp_path):
    for rank in range(2):
        hand = Hand(tmp_path, rank, 2, points=("bucket", "reduced"), own=HALVES[rank])
        hand.add(0, "bucket", (1 + rank) * G, facts={**BUCKET, "ranks": [0, 1], "op": "sum"})
        hand.add(0, "reduced", 3 * G).close()
    assert audit(tmp_path).verdict == "pass"


def test_infinite_gradients_stay_infinite(tmp_path):
    bad = G.copy()
    bad[2] = np.inf
    for name, given, cause in (("same", bad, None), ("hidden", G, "unknown")):
        (tmp_path / name).mkdir()
        hand = Hand(tmp_path / name, points=("bucket", "reduced"))
        hand.add(0, "bucket", bad, facts=BUCKET).add(0, "reduced", given).close(overflow=True)
        first = audit(tmp_path / name).first
        assert (first is None) == (cause is None)
        if first is not None:
            assert (first.law, first.index) == ("reduce", 2)


@pytest.mark.parametrize(
    ("infinite", "flagged", "replicated", "rank"),
    [
        ((), (0, 1, 2), False, None),
        ((), (0, 1), False, None),  # two of three: neither alone is guilty
        ((2,), (0, 1, 2), False, "none"),
        ((), (1,), True, 1),
        ((), (0, 1), True, None),
        ((0,), (0, 1), True, 1),  # rank 0 had a reason, and did not tell it to rank 2
        ((0,), (0, 1, 2), True, "none"),  # rank 0 had a reason, and told it to all
    ],
)
def test_a_step_that_is_left_out_has_a_reason(tmp_path, infinite, flagged, replicated, rank):
    point = "reduced" if replicated else "accumulated"
    settings = {"replicated": True} if replicated else {}
    for at in range(3):
        own = None if replicated else [(0, 2 * at, 2), (1, 2 * at, 2)]
        points = (point, "master_grad", "loss")
        hand = Hand(tmp_path, at, 3, points=points, own=own, effective=settings)
        hand.add(0, "loss", facts=LOSS)
        values = G.copy() if own is None else G[2 * at : 2 * at + 2].copy()
        if at in infinite:
            values[0] = np.inf
        for param in range(2):
            start = 0 if own is None else 2 * at
            layout = pack_spans([(param, start, len(values))])
            hand.add(0, point, values, param, layout=layout)
        hand.close(overflow=at in flagged)
    found = [f for f in audit(tmp_path).findings if f.law == "master"]
    if rank == "none":
        assert found == []
    else:
        assert [(f.cause, f.rank) for f in found] == [("non_finite", rank)]


def test_numbers_of_backward_passes_differ(tmp_path):
    for rank in range(3):
        hand = Hand(tmp_path, rank, 3, points=("loss",), own=[(0, 2 * rank, 2), (1, 2 * rank, 2)])
        passes = 2 if rank == 1 else 1
        for micro_step in range(passes):
            hand.add(micro_step, "loss", facts=LOSS)
        hand.close(micro_steps=passes)
    first = audit(tmp_path).first
    assert (first.law, first.cause, first.rank) == ("replicate", "boundary_mismatch", 1)
    assert "different numbers of backward passes" in first.detail


def test_a_parameter_without_any_gradient_is_given_zero(tmp_path):
    points = ("local_grad", "bucket", "reduced", "accumulated", "master_grad")
    for name, given in (("zero", 0 * G), ("stale", G)):
        root = tmp_path / name
        root.mkdir()
        hand = Hand(root, points=points)
        hand.add(0, "local_grad", G).add(0, "bucket", G, facts=BUCKET).add(0, "reduced", G)
        both = pack_spans([(0, 0, NUMEL), (1, 0, NUMEL)])
        hand.add(0, "accumulated", np.concatenate([G, 0 * G]), layout=both)
        hand.add(None, "master_grad", np.concatenate([G, given]), layout=both).close()
        first = audit(root).first
        if name == "zero":
            assert first is None
        else:
            assert (first.law, first.param, first.expected) == ("master", "b", 0.0)


def test_finer_communication_than_the_recorded_bucket(tmp_path):
    # DeepSpeed 0.19.8 adds the float32 result of the collective; `reduced` is its bfloat16 copy.
    facts = {"comm_dtype": "float32", "ranks": [0, 1], "op": "mean"}
    for rank in range(2):
        own = [(0, 3 * rank, 3), (1, 3 * rank, 3)]
        hand = Hand(tmp_path, rank, 2, points=("bucket", "reduced", "accumulated"), own=own)
        data = np.where(np.arange(NUMEL) < 3, 1.0, 2.0**-9) * (1 if rank == 0 else 0.0078125)
        hand.add(0, "bucket", data, facts=facts, dtype="bfloat16")
        exact = np.where(np.arange(NUMEL) < 3, 1.0, 2.0**-9) * (1.0078125 / 2)
        piece = pack_spans([(0, 3 * rank, 3)])
        mine = slice(3 * rank, 3 * rank + 3)
        hand.add(0, "reduced", exact[mine], layout=piece, dtype="bfloat16")
        hand.add(0, "accumulated", exact[mine], layout=piece).close()
    assert audit(tmp_path).first is None


def test_a_gap_in_a_step_that_never_ended_is_no_pass(tmp_path):
    hand = Hand(tmp_path, points=("loss",))
    hand.add(0, "loss", facts=LOSS)
    hand.writer.end_step(0, micro_steps=1, records=1, gaps=0, partial=False, facts={})
    hand.writer.add_gap(1, 0, "bucket", None, "write_failed", "no space")
    hand.writer.seal("writing failed")
    result = audit(tmp_path)
    assert result.verdict == "inconclusive"
    assert any("step 1 of rank 0: write_failed" in note for note in result.notes)
    assert not any("write_failed" in note for note in audit(tmp_path, steps=(0,)).notes)


def test_a_pass_rests_on_a_hop_of_the_gradient(tmp_path):
    run = Run(stage=2, points=("local_grad", "accumulated"))
    result = audit(write_run(tmp_path / "run", run))
    assert result.verdict == "inconclusive"
    assert any("no hop of the gradient path" in note for note in result.notes)
    assert audit(
        write_run(tmp_path / "ends", Run(points=("local_grad", "master_grad")))
    ).verdict == ("pass")


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"lr": [0.1, 0.2]}, "learning rates"),
        ({"loss_scale": 512.0}, "loss scale"),
        ({"clip": 0.5}, "clip value"),
    ],
)
def test_ranks_that_disagree_on_a_scalar_are_found(tmp_path, changed, words):
    facts = {"lr": [0.1], "loss_scale": 1.0, "clip": 1.0}
    for rank in range(3):
        hand = Hand(tmp_path, rank=rank, world=3, points=("loss",))
        hand.add(0, "loss", facts=LOSS).close(**{**facts, **(changed if rank == 1 else {})})
    result = audit(tmp_path)
    (found,) = [finding for finding in result.findings if finding.law == "replicate"]
    assert (found.rank, found.micro_step) == (1, None)
    assert words in found.detail


def test_ranks_that_scale_one_micro_step_otherwise_are_found(tmp_path):
    for rank in range(2):
        hand = Hand(tmp_path, rank=rank, world=2, points=("loss",))
        scale = 2.0 if rank else 1.0
        seed = {"loss_scale": scale, "seed": scale / 2, "loss_grad": scale / 2}
        hand.add(0, "loss", facts={**LOSS, **seed}).close()
    result = audit(tmp_path)
    assert any("loss scale: 1.0 on rank 0, 2.0 on rank 1" in f.detail for f in result.findings)
