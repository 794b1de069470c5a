"""Every law is silent on clean runs of every shape, and broken by what breaks it, with its cause."""

from __future__ import annotations

import itertools

import pytest

from gradtrace.analysis.audit import audit
from gradtrace.analysis.results import LAWS
from gradtrace.testing.synthetic import Fault, Run, write_run

DTYPES = (
    ("float32", None, None),
    ("bfloat16", None, None),
    ("bfloat16", "float32", None),
    ("bfloat16", "float32", "float32"),
    ("float16", None, None),
    ("float16", "float32", "float32"),
    ("float32", None, "bfloat16"),
)
WIDE = (
    ("embed.weight", (40, 30)),
    ("layers.0.weight", (25, 50)),
    ("layers.0.bias", (50,)),
    ("layers.1.weight", (25, 50)),
    ("layers.1.bias", (50,)),
    ("head.scale", (1,)),
)
EXTRAS = (
    {},
    {"parameters": WIDE, "bucket_numel": 1500},
    {"reduce_scatter": False},
    {"unused": (("layers.0.bias", 0), ("layers.1.bias", 1)), "twice": ("layers.1.weight",)},
    {"groups": 2, "gradient_scale": 1e-7},
    {"gradient_scale": 1e3, "loss_scale": 4.0},
)
MATRIX = [
    (stage, world, micro_steps, dtypes, mode, extra)
    for at, (stage, world, micro_steps, dtypes, mode, extra) in enumerate(
        itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3), DTYPES, ("engine", "manual"), EXTRAS)
    )
    if at % 23 == 0  # a spread of all of them; the numbers share no factor
]


@pytest.mark.parametrize("stage, world, micro_steps, dtypes, mode, extra", MATRIX)
def test_clean_runs_pass(tmp_path, stage, world, micro_steps, dtypes, mode, extra):
    model, accum, comm = dtypes
    run = Run(
        stage=stage,
        world_size=world,
        micro_steps=micro_steps,
        steps=2,
        samples=72,
        model_dtype=model,
        accum_dtype=accum,
        comm_dtype=comm,
        gas_mode=mode,
        whole_weights=True,
        momentum=0.9,
        **extra,
    )
    result = audit(write_run(tmp_path / "run", run))
    assert result.verdict == "pass", (result.first, result.notes)
    assert all(count.broken == 0 for count in result.laws.values())
    assert all(count.worst_ratio <= 1 for count in result.laws.values())
    missing = {1: set(), 2: {"accumulate_local"}, 3: {"accumulate_local"}}[stage]
    if world == 1:
        missing = missing | {"replicate"}
    assert {name for name in LAWS if result.laws[name].checked == 0} == missing


def _fault_run(stage, kind, law, **more):
    late = dict.fromkeys(("master", "update", "publish"))
    micro_step = late.get(law, 2 if stage == 1 and law != "accumulate_local" else 1)
    amount = {"scaled": 4.0, "shifted": 3, "rank_missing": 1, "low_precision": 8}.get(kind, 2.0)
    return Run(
        **{
            "stage": stage,
            "world_size": 3,
            "micro_steps": 3,
            "steps": 2,
            "samples": 72,
            "parameters": (
                ("embed.weight", (9, 8)),
                ("layers.0.weight", (15, 25)),
                ("layers.0.bias", (45,)),
                ("layers.1.weight", (15, 25)),
                ("layers.1.bias", (45,)),
                ("head.scale", (1,)),
            ),
            "bucket_numel": 1000,
            "whole_weights": True,
            "momentum": 0.9,
            "faults": (Fault(kind, law, step=1, micro_step=micro_step, amount=amount),),
            **more,
        }
    )


ANY = (
    ("zeroed", "zeroed"),
    ("sign_flipped", "sign_flipped"),
    ("shifted", "shifted"),
    ("non_finite", "non_finite"),
    ("low_precision", "low_precision"),
)
SUMS = (
    *ANY,
    ("dropped_micro_steps", "dropped_micro_steps"),
    ("skipped_micro_step", "dropped_micro_steps"),
    ("double_counted", "double_counted"),
    ("carried_over", "carried_over"),
    ("scaled", "scaled"),
    ("partly_overwritten", "partly_overwritten"),
)
REDUCTIONS = (
    *ANY,
    ("not_averaged", "not_averaged"),
    ("averaged_twice", "averaged_twice"),
    ("not_reduced", "not_reduced"),
    ("rank_missing", "rank_missing"),
    ("stale", "stale"),
    ("partly_overwritten", "partly_overwritten"),
)
# An optimizer adds a change to the weights: what scales is that alone.
UPDATES = (*ANY, ("scaled", "scaled"), ("stale", "stale"), ("swapped", "swapped"))
COPIES = (*ANY, ("stale", "stale"), ("not_averaged", "not_averaged"))
CASES = [
    *((1, "accumulate_local", kind, cause) for kind, cause in SUMS),
    *((2, "pack", kind, cause) for kind, cause in COPIES),
    *((1, "pack", kind, cause) for kind, cause in COPIES),
    (2, "pack", "swapped", "swapped"),
    *((2, "reduce", kind, cause) for kind, cause in REDUCTIONS),
    *((3, "reduce", kind, cause) for kind, cause in REDUCTIONS),
    *((1, "reduce", kind, cause) for kind, cause in REDUCTIONS),
    *((2, "partition", kind, cause) for kind, cause in COPIES),
    *((2, "accumulate", kind, cause) for kind, cause in SUMS),
    *((3, "accumulate", kind, cause) for kind, cause in SUMS),
    *((2, "master", kind, cause) for kind, cause in COPIES),
    *((3, "master", kind, cause) for kind, cause in (*COPIES, ("swapped", "swapped"))),
    (1, "accumulate_local", "swapped", "swapped"),
    *((2, "update", kind, cause) for kind, cause in UPDATES if kind != "swapped"),
    *((3, "update", kind, cause) for kind, cause in UPDATES),
    *((2, "publish", kind, cause) for kind, cause in UPDATES),
    *((3, "publish", kind, cause) for kind, cause in UPDATES),
]


@pytest.mark.parametrize("stage, law, kind, cause", CASES)
def test_each_fault_breaks_its_law_and_is_named(tmp_path, stage, law, kind, cause):
    result = audit(write_run(tmp_path / "run", _fault_run(stage, kind, law)))
    assert result.verdict == "fail"
    first = result.first
    assert (first.law, first.cause, first.step) == (law, cause, 1), first
    assert (first.micro_step is None) == (law in {"master", "update", "publish"})
    assert {name for name in LAWS if result.laws[name].broken} <= {law, "end_to_end"}
    assert [finding.law for finding in result.findings] == [law], result.findings
    assert first.detail and first.found is not None
    assert first.index is not None and first.max_abs is not None


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["not_reduced", "rank_missing", "averaged_twice", "zeroed"])
def test_reductions_in_bfloat16(tmp_path, stage, kind):
    run = _fault_run(stage, kind, "reduce", model_dtype="bfloat16", accum_dtype="float32")
    result = audit(write_run(tmp_path / "run", run))
    assert (result.first.law, result.first.cause) == ("reduce", kind)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_fault_of_one_rank_names_the_rank(tmp_path, stage):
    micro_step = 1
    fault = Fault("sign_flipped", "reduce", step=0, micro_step=micro_step, rank=1)
    run = Run(stage=stage, world_size=3, micro_steps=2, samples=24, faults=(fault,))
    first = audit(write_run(tmp_path / "run", run)).first
    assert (first.law, first.cause, first.rank, first.micro_step) == (
        "reduce",
        "sign_flipped",
        1,
        micro_step,
    )


def test_a_fault_of_one_parameter_names_it_alone(tmp_path):
    fault = Fault("zeroed", "accumulate", step=0, micro_step=1, param="layers.1.weight")
    run = Run(stage=2, world_size=3, micro_steps=3, samples=36, faults=(fault,))
    result = audit(write_run(tmp_path / "run", run))
    assert [finding.param for finding in result.findings] == ["layers.1.weight"]
    assert result.first.folded == ()
    assert result.first.micro_step == 1


@pytest.mark.parametrize(
    "factor, cause",
    [(0.25, "averaged_twice"), (4.0, "not_averaged"), (3.0, "scaled"), (0.0, "zeroed")],
)
def test_seed(tmp_path, factor, cause):
    fault = Fault("wrong_seed", "seed", amount=factor)
    run = Run(micro_steps=4, samples=24, loss_scale=128.0, faults=(fault,))
    result = audit(write_run(tmp_path / "run", run))
    first = result.first
    assert (first.law, first.cause, first.micro_step, first.rank) == ("seed", cause, 0, None)
    assert first.expected == 32.0
    assert first.found == 32.0 * factor
    assert result.laws["end_to_end"].broken == 0  # a wrong seed is no wrong reduction


def test_seed_of_one_rank(tmp_path):
    fault = Fault("wrong_seed", "seed", rank=1, amount=0.5)
    first = audit(write_run(tmp_path / "run", Run(world_size=3, samples=24, faults=(fault,)))).first
    assert (first.law, first.rank, first.param, first.point) == ("seed", 1, None, "loss")


def test_boundary_and_order(tmp_path):
    fault = Fault("boundary_mismatch", "replicate", step=0, micro_step=1, rank=2)
    run = Run(world_size=3, samples=24, faults=(fault,))
    first = audit(write_run(tmp_path / "boundary", run)).first
    assert (first.law, first.cause, first.micro_step, first.rank) == (
        "replicate",
        "boundary_mismatch",
        1,
        2,
    )
    fault = Fault("order_mismatch", "replicate", step=0, micro_step=1, rank=1)
    run = Run(world_size=2, bucket_numel=60, samples=24, faults=(fault,))
    result = audit(write_run(tmp_path / "order", run))
    assert (result.first.law, result.first.cause, result.first.micro_step) == (
        "replicate",
        "order_mismatch",
        1,
    )
    assert result.first.rank is None  # of two ranks neither is the odd one
    assert len(result.findings) == 1  # the wrong sums follow from it
    assert result.first.folded  # every parameter that another one is added to is named
    assert result.first.param in result.first.detail
    assert any(name in result.first.detail for name in result.first.folded)
    assert any("follow from a finding above" in note for note in result.notes)


def test_padding_is_zero(tmp_path):
    fault = Fault("padding", "master", step=0, rank=4, amount=1.5)
    run = Run(world_size=5, samples=40, faults=(fault,))
    first = audit(write_run(tmp_path / "run", run)).first
    assert (first.law, first.point, first.rank, first.param) == ("master", "master_grad", 4, None)
    assert (first.expected, first.found) == (0.0, 1.5)


def test_low_precision_accumulation_is_rounding_not_a_finding(tmp_path):
    run = Run(stage=2, micro_steps=12, samples=96, model_dtype="bfloat16", parameters=WIDE)
    result = audit(write_run(tmp_path / "run", run))
    assert result.verdict == "pass"
    assert 0 < result.laws["accumulate"].worst_ratio <= 1


def test_write_back_of_the_whole_mean(tmp_path):
    run = Run(
        stage=1,
        micro_steps=3,
        samples=24,
        gas_mode="manual",
        write_back=True,
        reduce_scatter=False,
    )
    result = audit(write_run(tmp_path / "run", run))
    assert result.verdict == "pass", result.first
    assert result.laws["accumulate_local"].checked
