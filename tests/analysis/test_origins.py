"""What runs begin with, by hash: named when it differs, and never called equal without proof."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtrace.analysis.align import Alignment
from gradtrace.analysis.audit import audit
from gradtrace.analysis.diff import diff
from gradtrace.analysis.origins import compare_origins, relate
from gradtrace.testing.runs import Omission
from gradtrace.testing.synthetic import Fault, Run, write_run
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import open_trace

BASE = Run(steps=2, micro_steps=2, world_size=2, samples=24, drift=0.3)


def origins(tmp_path, one, two, *, step=0, corresponding=True):
    sides = [
        Alignment(open_trace(write_run(tmp_path / name, run)))
        for name, run in (("one", one), ("two", two))
    ]
    return compare_origins(*sides, step, corresponding=corresponding)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, stage=3),
        replace(BASE, stage=1),
        replace(BASE, stage=3, world_size=3),
        replace(BASE, stage=3, groups=2, bucket_numel=8),
    ],
)
def test_weights_are_equal_over_stages_and_world_sizes(tmp_path, other):
    found = origins(tmp_path, BASE, other, corresponding=other.world_size == 2)
    assert found.weights == "equal"
    assert not list(found.notes(0, begins=True, same_start=True))


def test_weights_of_another_dtype_are_neither_equal_nor_different(tmp_path):
    found = origins(tmp_path, BASE, replace(BASE, model_dtype="bfloat16"))
    assert found.weights == "unknown"


@pytest.mark.parametrize("missing", ["weight", "input"])
def test_what_is_not_recorded_is_unknown(tmp_path, missing):
    points = tuple(name for name in POINT_NAMES if name != missing)
    found = origins(tmp_path, BASE, replace(BASE, points=points))
    assert found.weights == ("unknown" if missing == "weight" else "equal")
    assert found.batch(0, 0)[0] == ("unknown" if missing == "input" else "equal")


def test_lost_weights_are_unknown_not_equal(tmp_path):
    lost = (Omission("weight", step=0, rank=1, unit="embed.weight"),)
    run = replace(BASE, stage=3)
    assert origins(tmp_path, run, replace(run, omissions=lost)).weights == "unknown"


def test_a_lost_batch_is_unknown_not_equal(tmp_path):
    lost = (Omission("input", step=0, rank=1, micro_step=0),)
    found = origins(tmp_path, BASE, replace(BASE, omissions=lost))
    assert found.batch(0, 1)[0] == "unknown"
    assert found.batch(0, 0)[0] == "equal"
    assert found.batch(1, None)[0] == "unknown"


# --- batches -----------------------------------------------------------------------------------------


def tensor(name: str = "args[0]", **changes: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": [2, 3], "hash": "0" * 16, **changes}


def other(name: str = "use_cache", **changes: Any) -> dict[str, Any]:
    return {"name": name, "type": "bool", "hash": "0" * 16, **changes}


def batch(*tensors: dict[str, Any], others: tuple[Any, ...] = (), truncated: Any = False) -> Any:
    return {"tensors": list(tensors), "others": list(others), "truncated": truncated}


SAME = batch(tensor(), others=(other(),))


@pytest.mark.parametrize(
    "mine, theirs, relation, told",
    [
        (SAME, SAME, "equal", ""),
        (batch(tensor("x")), batch(tensor("args[0]")), "equal", ""),  # by name or by position
        (batch(tensor("x")), batch(tensor(hash="1" * 16)), "unknown", ""),
        (batch(tensor()), batch(tensor(), tensor("mask")), "unknown", ""),
        (batch(tensor()), batch(tensor(hash="1" * 16)), "differ", "other values"),
        (batch(tensor()), batch(tensor(shape=[3, 2])), "differ", "[2, 3] against [3, 2]"),
        (batch(tensor()), batch(tensor(dtype="bfloat16")), "unknown", ""),
        (batch(tensor(hash=None)), batch(tensor(hash=None)), "unknown", ""),
        (batch(others=(other(),)), batch(others=(other(hash="1" * 16),)), "differ", "use_cache"),
        (batch(others=(other(),)), batch(), "unknown", ""),
        (batch(others=(other(hash=None),)), batch(others=(other(hash=None),)), "unknown", ""),
        (
            batch(others=(other(hash=None, type="NoneType"),)),
            batch(others=(other(hash=None, type="NoneType"),)),
            "equal",
            "",
        ),
        (batch(tensor(), truncated=True), batch(tensor(), truncated=True), "unknown", ""),
        ({}, {}, "unknown", ""),
    ],
)
def test_batches_are_related_by_what_their_hashes_prove(mine, theirs, relation, told):
    found = relate([mine], [theirs])
    assert found[0] == relation
    assert told in found[1]


def test_another_number_of_forward_passes_is_not_compared():
    assert relate([SAME, SAME], [SAME])[0] == "unknown"
    assert relate([], [SAME])[0] == "unknown"


def test_the_same_batches_in_another_order_are_different_and_told_so(tmp_path):
    one = write_run(tmp_path / "one", BASE)
    trace = open_trace(one)
    swapped = open_trace(one)
    for rank in swapped.ranks.values():
        records = tuple(
            replace(r, micro_step=1 - r.micro_step) if r.point == "input" else r
            for r in rank.records
        )
        object.__setattr__(rank, "records", records)
    found = compare_origins(Alignment(trace), Alignment(swapped), 0, corresponding=True)
    assert found.batch(0, 0)[0] == "differ"
    (note,) = found.notes(0, begins=True, same_start=True)
    assert note.endswith("the same batches in another order")
    assert "rank 0, and at 3 more places" in note


# --- what diff makes of it ---------------------------------------------------------------------------


def compare(tmp_path, one, two):
    return diff(write_run(tmp_path / "one", one), write_run(tmp_path / "two", two))


def test_other_weights_and_the_same_batches(tmp_path):
    result = compare(tmp_path, BASE, replace(BASE, weight_seed=9, stage=3))
    assert (result.verdict, result.first.point) == ("diverged", "local_grad")
    assert (result.blame.side, result.blame.law, result.blame.cause) == (
        "neither", None, "weights_differ",
    )  # fmt: skip
    assert result.notes[0] != "the models differ"
    assert any(note.startswith("the runs begin step 0 with different") for note in result.notes)
    assert not any(note.startswith("input differs") for note in result.notes)


def test_other_batches_and_the_same_weights(tmp_path):
    result = compare(tmp_path, BASE, replace(BASE, seed=9, weight_seed=0, stage=3))
    assert (result.blame.side, result.blame.cause) == ("neither", "inputs_differ")
    assert "The batches differ: embed.weight (float32, shape [6, 36])" in result.blame.detail
    assert "weights" not in result.blame.detail


def test_other_weights_across_world_sizes(tmp_path):
    result = compare(tmp_path, BASE, replace(BASE, weight_seed=9, stage=3, world_size=4))
    assert (result.first.point, result.blame.cause) == ("master_grad", "weights_differ")


def test_a_broken_law_is_blamed_before_a_batch_that_differs_later(tmp_path):
    faults = (Fault("averaged_twice", "reduce", step=0, micro_step=0),)
    result = compare(tmp_path, BASE, replace(BASE, faults=faults))
    assert (result.blame.side, result.blame.law) == ("candidate", "reduce")


def test_equal_batches_and_weights_are_said_to_be_when_losses_differ(tmp_path):
    one = replace(BASE, local_factors=(1.0, 1.0))
    two = replace(BASE, noise=0.5)
    result = compare(tmp_path, one, replace(two, local_factors=(1.5, 1.0)))
    assert result.blame.side == "neither"
    assert result.blame.cause not in {"inputs_differ", "weights_differ"}
    assert "Batches, weights and buffers are the same bits" in result.blame.detail


ROPE: dict[str, Any] = {"name": "rope.cos", "dtype": "float32", "shape": [8], "hash": "0" * 16}


@pytest.mark.parametrize(
    ("theirs", "relation", "told"),
    [
        ((ROPE,), "equal", ""),
        (({**ROPE, "hash": "1" * 16},), "differ", "rope.cos (float32, shape [8]: other values)"),
        (({**ROPE, "dtype": "bfloat16"},), "differ", "rope.cos (dtype float32 against bfloat16)"),
        (({**ROPE, "shape": [9]},), "differ", "rope.cos (shape [8] against [9])"),
        (({**ROPE, "hash": None},), "unknown", ""),
        ((ROPE, {**ROPE, "name": "mask"}), "unknown", ""),
        (None, "unknown", ""),
    ],
)
def test_buffers_of_the_model(tmp_path, theirs, relation, told):
    found = origins(tmp_path, replace(BASE, buffers=(ROPE,)), replace(BASE, buffers=theirs))
    assert found.buffers == relation
    assert told in found.buffer_note
    notes = list(found.notes(0, begins=True, same_start=True))
    assert bool(notes) == (relation == "differ")
    assert not list(found.notes(1, begins=False, same_start=True))


def test_buffers_explain_losses_that_differ(tmp_path):
    one = replace(BASE, local_factors=(1.0, 1.0), buffers=(ROPE,))
    two = replace(BASE, noise=0.5, local_factors=(1.5, 1.0))
    apart = compare(tmp_path / "a", one, replace(two, buffers=({**ROPE, "dtype": "bfloat16"},)))
    assert (apart.blame.side, apart.blame.cause) == ("neither", "inputs_differ")
    assert "buffers of the model" in apart.blame.detail
    assert "rope.cos (dtype float32 against bfloat16)" in apart.blame.detail
    alike = compare(tmp_path / "b", one, replace(two, buffers=(ROPE,)))
    assert alike.blame.cause == "unknown"
    assert "Batches, weights and buffers are the same bits" in alike.blame.detail


# --- ranks of one run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "step", "law"), [(1, 0, "replicate"), (2, 0, "replicate"), (1, 1, "publish")]
)
def test_a_rank_with_other_weights_is_found(tmp_path, stage, step, law):
    """From the second step on, the masters tell which of the ranks is wrong."""
    faults = (
        Fault("weights_differ", "replicate", step=step, rank=2, param="layers.1.bias", amount=0.5),
    )
    run = Run(stage=stage, steps=2, world_size=3, samples=24, faults=faults)
    result = audit(write_run(tmp_path / "run", run))
    first = result.first
    assert (first.law, first.cause, first.step, first.rank, first.param, first.point) == (
        law, "weights_differ", step, 2, "layers.1.bias", "weight",
    )  # fmt: skip
    assert len(result.findings) == 1


def test_shards_are_of_no_two_ranks_and_not_compared(tmp_path):
    faults = (Fault("weights_differ", "replicate", rank=1),)
    result = audit(write_run(tmp_path / "run", Run(stage=3, samples=24, faults=faults)))
    assert result.verdict == "pass"
    assert result.laws["replicate"].skip_reasons["weights are partitioned"] > 0


def test_a_finding_about_weights_comes_before_those_of_the_step(tmp_path):
    faults = (
        Fault("zeroed", "reduce", step=0, micro_step=0, rank=0, param="embed.weight"),
        Fault("weights_differ", "replicate", step=0, rank=1),
    )
    findings = audit(write_run(tmp_path / "run", Run(samples=24, faults=faults))).findings
    assert [finding.law for finding in findings] == ["replicate", "reduce"]
