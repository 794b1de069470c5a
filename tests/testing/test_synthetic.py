"""The simulator is itself right: stages agree, and every fault leaves its mark."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradtrace.testing.mutators import HOPS, KINDS, SPECIAL_KINDS
from gradtrace.testing.runs import buckets_of, shards_of
from gradtrace.testing.synthetic import PARAMETERS, Fault, Run, write_run
from gradtrace.trace.reader import open_trace
from gradtrace.trace.spans import PADDING, coverage_fault, layout_numel

BASE = Run(world_size=2, micro_steps=3, steps=2, loss_scale=2.0, clip=0.5)


def everything(path: Path, run: Run) -> bytes:
    """Return every byte of a trace that says something about gradients."""
    trace = write_run(path, run)
    return b"".join(file.read_bytes() for file in sorted(trace.rglob("*[0-9].*")))


def given_to_the_optimizer(path: Path, run: Run) -> dict[tuple[int, int], np.ndarray]:
    trace = open_trace(write_run(path, run))
    found: dict[tuple[int, int], np.ndarray] = {}
    for rank in trace.ranks.values():
        for record in rank.records:
            if record.point == "clipped_grad":
                values = trace.values(record)
                for span in trace.layout(record):
                    if span.param != PADDING:
                        numel = trace.manifest.parameters[span.param].numel
                        whole = found.setdefault((record.step, span.param), np.full(numel, np.nan))
                        whole[span.param_offset :][: span.numel] = values[span.flat_offset :][
                            : span.numel
                        ]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("gas_mode", ["engine", "manual"])
def test_stages_give_the_optimizer_the_same(tmp_path: Path, world_size: int, gas_mode: str) -> None:
    run = replace(BASE, world_size=world_size, gas_mode=gas_mode, groups=2, drift=0.5)
    one, two, three = (
        given_to_the_optimizer(tmp_path / str(stage), replace(run, stage=stage))
        for stage in (1, 2, 3)
    )
    for key, values in one.items():
        assert not np.isnan(values).any()
        assert np.allclose(values, two[key], rtol=1e-5, atol=1e-7)
        assert np.allclose(values, three[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", [1, 2])
def test_shards_tile_every_parameter(stage: int, world_size: int, groups: int) -> None:
    run = Run(stage=stage, world_size=world_size, groups=groups)
    shards = shards_of(run)
    for name, _ in PARAMETERS:
        pieces = [own[name] for own in shards.owned if name in own]
        assert coverage_fault(pieces, run.numel(name)) is None
    for unit in shards.units[0]:
        sizes = {layout_numel(units[unit]) for units in shards.units}
        assert len(sizes) == 1  # every rank's shard is as long as any other


def test_default_shapes_hold_the_hard_cases() -> None:
    flat = shards_of(Run(stage=2, world_size=3))
    assert any(span.param == PADDING for span in flat.units[2]["group0"])
    assert any(own[name][1] < 36 for own in flat.owned for name in own if name == "embed.weight")
    each = shards_of(Run(stage=3, world_size=3))
    assert "head.scale" not in each.owned[1]  # an empty shard


def test_buckets_hold_what_fits() -> None:
    run = Run(bucket_numel=40)
    names = [name for name, _ in reversed(PARAMETERS)]
    buckets = buckets_of(run, names)
    assert [name for bucket in buckets for name in bucket] == names
    assert all(sum(map(run.numel, bucket)) <= 40 for bucket in buckets)
    assert len(buckets) == 3


KIND_AT = [(kind, law) for law in HOPS[1:-1] for kind in KINDS] + [
    ("wrong_seed", "seed"),
    ("order_mismatch", "replicate"),
    ("boundary_mismatch", "replicate"),
    ("padding", "master"),
    ("not_unscaled", "unscale_clip"),
    ("wrong_clip", "unscale_clip"),
]
# What is no fault there: nothing is carried, nothing to reduce, or nothing of equal length.
NOTHING = {
    *itertools.product(
        ("dropped_micro_steps", "carried_over", "not_reduced", "rank_missing"),
        ("pack", "partition", "master", "unscale_clip", "publish"),
    ),
    *itertools.product(("dropped_micro_steps", "carried_over"), ("reduce",)),
    *itertools.product(("rank_missing",), ("accumulate_local", "accumulate", "update")),
    ("carried_over", "update"),
}


@pytest.mark.parametrize(("kind", "law"), KIND_AT)
def test_every_fault_leaves_its_mark(tmp_path: Path, kind: str, law: str) -> None:
    amount = {"low_precision": 4.0, "rank_missing": 1.0}.get(kind, 2.0)
    stage = 1 if law == "accumulate_local" else 3
    run = replace(BASE, stage=stage, bucket_numel=200)
    faulty = replace(run, faults=(Fault(kind, law, amount=amount),))
    if law == "accumulate_local" or (kind, law) not in NOTHING:
        changed = everything(tmp_path / "1", run) != everything(tmp_path / "2", faulty)
        assert changed == ((kind, law) not in NOTHING)


def test_a_fault_strikes_only_where_it_is_planted(tmp_path: Path) -> None:
    fault = Fault("zeroed", "accumulate", step=1, micro_step=1, rank=0, param="embed.weight")
    one = open_trace(write_run(tmp_path / "1", replace(BASE, stage=3)))
    two = open_trace(write_run(tmp_path / "2", replace(BASE, stage=3, faults=(fault,))))
    differing = set()
    for rank in (0, 1):
        for mine, theirs in zip(one.ranks[rank].records, two.ranks[rank].records, strict=True):
            if mine.key is not None and not np.array_equal(one.values(mine), two.values(theirs)):
                differing.add((mine.step, mine.micro_step, mine.point, rank))
    assert min(differing, key=lambda place: (place[0], place[1] is None, place[1] or 0)) == (
        1, 1, "accumulated", 0,
    )  # fmt: skip
    assert {step for step, *_ in differing} == {1}
    assert {point for *_, point, rank in differing if rank == 1} <= {"clipped_grad"}  # the norm


def test_faults_are_checked() -> None:
    with pytest.raises(ValueError, match="no fault of kind"):
        Fault("nonsense", "pack")
    with pytest.raises(ValueError, match="no hop"):
        Fault("zeroed", "nowhere")
    assert not set(KINDS) & set(SPECIAL_KINDS)


def test_mean_over_the_global_batch_does_not_depend_on_how_it_is_cut(tmp_path: Path) -> None:
    one = given_to_the_optimizer(tmp_path / "1", replace(BASE, clip=0.0, micro_steps=6))
    two = given_to_the_optimizer(
        tmp_path / "2", replace(BASE, clip=0.0, micro_steps=2, world_size=4, stage=3)
    )
    for key, values in one.items():
        if key[0] == 0:
            assert np.allclose(values, two[key], rtol=1e-4, atol=1e-6)
