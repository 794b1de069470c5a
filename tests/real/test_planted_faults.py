"""Faults planted into live DeepSpeed are found where they are, and called what they are.

The whole table is `benchmarks/planted_faults.py`; this is one fault of each sort.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.testing import live
from gradtrace.testing.mutators import Fault
from tests.real import planting
from tests.real.training import Setup, train

SAMPLE = (
    ("z0-fp32", "reduce", "partly_overwritten"),
    ("z0-fp32", "unscale_clip", "wrong_clip"),
    ("z0-bf16", "master", "non_finite"),
    ("z0-bf16", "reduce", "non_finite"),
    ("z0-bf16-fused", "accumulate_local", "dropped_micro_steps"),
    ("z1-fp32", "accumulate_local", "lost_micro_step"),
    ("z1-fp32", "partition", "shifted"),
    ("z1-bf16", "reduce", "not_averaged"),
    ("z1-bf16", "pack", "swapped"),
    ("z1-bf16-accum32", "accumulate_local", "dropped_micro_steps"),
    ("z2-fp32", "reduce", "rank_missing"),
    ("z2-fp32", "accumulate", "double_counted"),
    ("z2-fp32", "unscale_clip", "not_unscaled"),
    ("z2-bf16", "accumulate", "carried_over"),
    ("z2-bf16", "replicate", "boundary_mismatch"),
    ("z2-bf16", "partition", "stale"),
    ("z3-fp32", "accumulate", "low_precision"),
    ("z3-fp32", "seed", "wrong_seed"),
    ("z3-bf16", "reduce", "not_reduced"),
    ("z3-bf16", "replicate", "order_mismatch"),
    ("z3-bf16-accum32", "master", "partly_overwritten"),
    ("z0-fp32", "update", "stale"),
    ("z0-bf16", "publish", "stale"),
    ("z1-bf16-accum32", "publish", "swapped"),
    ("z2-bf16", "update", "scaled"),
    ("z3-bf16", "update", "partly_overwritten"),
    ("z3-fp32", "publish", "shifted"),
)


@pytest.mark.parametrize(("name", "hop", "kind"), SAMPLE)
def test_a_planted_fault_is_found_in_its_place_with_its_cause(
    name: str, hop: str, kind: str, tmp_path: Path
) -> None:
    kinds = [k for k in planting.possible(name) if (k.hop, k.kind) == (hop, kind)]
    draw = planting.draw(np.random.default_rng(3), 0, name, kinds[0])
    score = planting.run(draw, tmp_path)
    assert planting.visible(score), draw.title
    assert score.wrong == (), draw.title
    assert score.findings[0].cause == draw.kind.cause, (draw.title, score.findings[0].detail)


def _two(setup: Setup, path: Path, *faults: Fault) -> list[tuple[Any, ...]]:
    train(setup, path, before=lambda engine: live.plant(engine, *faults))
    findings = gradtrace.audit(path).findings
    return [(f.law, f.cause, f.step, f.micro_step, f.param, f.folded) for f in findings]


def test_faults_of_two_hops_are_two_findings(tmp_path: Path) -> None:
    setup = Setup(2, model="wide", steps=2, config={"gradient_clipping": 0.01})
    found = _two(
        setup,
        tmp_path,
        Fault("sign_flipped", "reduce", step=0, micro_step=2, rank=0, param="2.weight"),
        Fault("wrong_clip", "unscale_clip", step=1, rank=1, param="6.weight", amount=3.0),
    )
    assert found == [
        ("reduce", "sign_flipped", 0, 2, "2.weight", ()),
        ("unscale_clip", "wrong_clip", 1, None, "6.weight", ()),
    ]


@pytest.mark.parametrize("kind", ["sign_flipped", "scaled"])
@pytest.mark.parametrize("clipping", [0.0, 0.01])
@pytest.mark.parametrize("bf16", [False, True])
def test_ranks_that_share_no_weights_part_once(
    bf16: bool, clipping: float, kind: str, tmp_path: Path
) -> None:
    """At stage 0 a wrong gradient on one rank parts the weights for good: that is no second fault.

    One of another length also moves the norm of that rank, and clips what was right there.
    """
    found = _two(
        Setup(0, bf16=bf16, model="wide", steps=3, config={"gradient_clipping": clipping}),
        tmp_path,
        Fault(kind, "reduce", step=0, micro_step=3, rank=1, param="2.weight", amount=1.5),
    )
    assert found == [("reduce", kind, 0, 3, "2.weight", ())]


def test_a_fault_that_all_ranks_share_does_not_hide_weights_that_part_later(tmp_path: Path) -> None:
    def before(engine: Any) -> None:
        live.plant(engine, Fault("wrong_seed", "seed", step=0, micro_step=1, amount=1.5))
        original, steps = engine.step, []

        def step(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            steps.append(1)
            if len(steps) == 8 and torch.distributed.get_rank() == 1:  # after optimizer step 1
                with torch.no_grad():
                    engine.module[2].weight[0, 0] += 1

        engine.step = step

    points = "weight,loss,local_grad,local_accum,bucket,reduced,master_grad,clipped_grad"
    train(Setup(0, model="wide", steps=4), tmp_path, before=before, points=points)
    findings = gradtrace.audit(tmp_path).findings
    assert {(f.law, f.cause, f.step, f.param) for f in findings} == {
        ("seed", "scaled", 0, None),
        ("replicate", "weights_differ", 2, "2.weight"),
    }


def test_weights_that_one_rank_alone_was_given_are_still_a_finding(tmp_path: Path) -> None:
    def before(engine: Any) -> None:
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                engine.module[2].weight[0, 0] += 1

    train(Setup(0, model="wide", steps=3), tmp_path, before=before)
    findings = gradtrace.audit(tmp_path).findings
    assert [(f.law, f.cause, f.step, f.param) for f in findings] == [
        ("replicate", "weights_differ", 0, "2.weight")
    ]


@pytest.mark.parametrize(
    ("one", "two", "causes"),
    [
        (("scaled", 1.5, "2.weight"), ("scaled", 0.3, "0.weight"), {"scaled"}),
        (("zeroed", 0.0, "2.weight"), ("sign_flipped", 0.0, "0.bias"), {"zeroed", "sign_flipped"}),
    ],
)
def test_two_faults_of_one_hop_are_two_findings(
    one: tuple[str, float, str], two: tuple[str, float, str], causes: set[str], tmp_path: Path
) -> None:
    faults = (
        Fault(kind, "reduce", step=1, micro_step=1, rank=0, param=param, amount=amount)
        for kind, amount, param in (one, two)
    )
    found = _two(Setup(2, model="wide", steps=2), tmp_path, *faults)
    assert {(law, step, micro) for law, _, step, micro, _, _ in found} == {("reduce", 1, 1)}
    assert sorted((param, folded) for *_, param, folded in found) == [(two[2], ()), (one[2], ())]
    assert {cause for _, cause, *_ in found} == causes


def test_five_elements_that_refute_the_cause_of_the_others_are_a_fault_of_their_own(
    tmp_path: Path,
) -> None:
    found = _two(
        Setup(3, model="wide", steps=1),
        tmp_path,
        Fault("scaled", "reduce", 0, 1, 0, None, 1.5),
        Fault("scaled", "reduce", 0, 1, 0, "10.bias", 5.0),
    )
    assert {(law, cause) for law, cause, *_ in found} == {
        ("reduce", "scaled"),
        ("reduce", "unknown"),  # three elements are too few to measure a factor on
    }
    assert [entry[1] for entry in found] == ["scaled", "unknown"]
    own = [entry for entry in found if entry[4] == "10.bias"]
    assert len(own) == 1
    assert own[0][1:2] == ("unknown",)
    assert own[0][5] == ()
    assert "10.bias" not in found[0][5]


def test_a_step_left_out_without_cause_is_a_finding(tmp_path: Path) -> None:
    """NaN that comes up after the accumulation and before the norm makes DeepSpeed skip the step."""

    def before(engine: Any) -> None:
        optimizer = engine.optimizer
        original = optimizer.scaled_global_norm

        def norm(*args: Any, **kwargs: Any) -> Any:
            if engine.global_steps == 1:
                optimizer.averaged_gradients[0][0].view(-1)[0] = float("nan")
            return original(*args, **kwargs)

        optimizer.scaled_global_norm = norm

    train(Setup(2), tmp_path, before=before)
    result = gradtrace.audit(tmp_path)
    assert [(f.law, f.cause, f.step) for f in result.findings] == [("master", "non_finite", 1)]


LATE = (
    (Setup(2, micro_steps=2), Fault("rank_missing", "reduce", 0, 1, None, "0.weight", 1)),
    (
        Setup(3, micro_steps=2, bf16=True),
        Fault("dropped_micro_steps", "accumulate", 0, 1, 0, "2.weight"),
    ),
)


@pytest.mark.parametrize(("setup", "fault"), LATE, ids=("rank_missing", "dropped_micro_steps"))
def test_step_200_is_judged_as_sharply_as_step_0(
    setup: Setup, fault: Fault, tmp_path: Path
) -> None:
    seen = {}
    for step in (0, 200):
        planted = Fault(**{name: getattr(fault, name) for name in Fault.__slots__} | {"step": step})
        path = tmp_path / str(step)
        train(
            setup.at(steps=step + 1),
            path,
            before=lambda engine, planted=planted: live.plant(engine, planted),
            steps=f"0,{step}",
        )
        (finding,) = gradtrace.audit(path).findings
        assert finding.step == step
        assert finding.bound is not None
        assert finding.expected is not None
        seen[step] = finding
    assert seen[0].bound is not None
    early, late = (
        (f.law, f.cause, f.micro_step, f.rank, f.guilty, f.param, f.folded, f.test)
        for f in (seen[0], seen[200])
    )
    assert early == late
    sharpness = [f.bound / abs(f.expected) for f in seen.values()]  # type: ignore[operator,arg-type]
    assert sharpness[1] < 4 * sharpness[0]


def test_a_plant_tells_what_it_changed(tmp_path: Path) -> None:
    fault = Fault("zeroed", "master", step=0, rank=1, param="6.weight")
    train(
        Setup(1, model="wide", steps=1),
        tmp_path / "trace",
        before=lambda engine: live.plant(engine, fault, report=tmp_path / "strikes"),
    )
    (path,) = (tmp_path / "strikes").glob("*.json")
    (strike,) = json.loads(path.read_text())
    assert (strike["rank"], strike["param"], strike["law"]) == (1, "6.weight", "master")
    assert strike["moved"] > planting.CERTAIN
