"""Stage 0 and fp16 in detail: exact record counts, planted faults, and true defects of DeepSpeed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace import errors
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.reader import open_trace
from tests.real.catalog.fp16 import GROWS
from tests.real.catalog.plain import ACCUM32, SCALE_1
from tests.real.training import Setup, initialize, train

SETUPS = {
    "plain": Setup(0),
    "plain, no clipping": Setup(0, config={"gradient_clipping": 0.0}),
    "unfused": Setup(0, bf16=True),
    "fused": Setup(0, bf16=True, client="fused"),
    "BF16_Optimizer": Setup(1, bf16=True, config=ACCUM32),
}
# records of one step on each rank of a run with four micro-steps and five parameters
ONCE = {
    "input": 4,
    "weight": 5,
    "loss": 4,
    "local_grad": 20,
    "local_accum": 20,
    "bucket": 1,
    "reduced": 1,
    "master_grad": 1,
    "clipped_grad": 1,
    "master_weight": 2,
}
OPTIMIZERS = {
    "plain": ("plain", "AdamW", "AdamW"),
    "plain, no clipping": ("plain", "AdamW", "AdamW"),
    "unfused": ("fp16_unfused", "FP16_UnfusedOptimizer", "AdamW"),
    "fused": ("fp16", "FP16_Optimizer", "BuildsNothing"),
    "BF16_Optimizer": ("bf16", "BF16_Optimizer", "AdamW"),
}


def _counts(path: Path, step: int, rank: int = 0) -> Counter[str]:
    return Counter(r.point for r in open_trace(path).ranks[rank].records if r.step == step)


@pytest.mark.parametrize("name", SETUPS)
def test_every_probe_fires_exactly_as_often_as_it_should(name: str, tmp_path: Path) -> None:
    train(SETUPS[name].at(steps=2), tmp_path / "once")
    for step in (0, 1):
        for rank in (0, 1):
            assert _counts(tmp_path / "once", step, rank) == ONCE
    train(SETUPS[name].at(steps=2, mode="by_hand"), tmp_path / "by_hand")
    assert _counts(tmp_path / "by_hand", 1) == {**ONCE, "bucket": 4, "reduced": 4}
    train(SETUPS[name].at(steps=2, mode="no_sync"), tmp_path / "no_sync")
    assert _counts(tmp_path / "no_sync", 1) == ONCE
    train(SETUPS[name].at(steps=2, groups=True), tmp_path / "groups")
    twice = {**ONCE, "master_grad": 2, "clipped_grad": 2, "master_weight": 4}
    if name == "BF16_Optimizer":  # one flat buffer a group, all in one bucket call
        twice.update(bucket=2, reduced=2)
    assert _counts(tmp_path / "groups", 1) == twice


@pytest.mark.parametrize("name", SETUPS)
def test_the_trace_says_which_optimizer_it_was(name: str, tmp_path: Path) -> None:
    train(SETUPS[name].at(steps=1), tmp_path / "trace")
    header = open_trace(tmp_path / "trace").ranks[1].header
    found = [header.effective[key] for key in ("adapter", "optimizer", "base_optimizer")]
    assert tuple(found) == OPTIMIZERS[name]
    assert header.effective.get("replicated", False) is (name != "BF16_Optimizer")


def test_a_step_that_overflows_has_no_optimizer_records_and_says_so(tmp_path: Path) -> None:
    for number, setup in enumerate(
        (
            Setup(0, fp16=True, config=SCALE_1),
            Setup(0, fp16=True, config=SCALE_1, client="fused"),
            Setup(1, fp16=True),
            Setup(3, fp16=True),
        )
    ):
        path = tmp_path / str(number)
        train(setup.at(overflow_in=(1,)), path)
        assert not {"master_grad", "clipped_grad"} & set(_counts(path, 1))
        assert {"master_grad", "clipped_grad"} <= set(_counts(path, 2))
        trace = open_trace(path)
        for rank in (0, 1):
            flags = [trace.ranks[rank].steps[step].facts["overflow"] for step in (0, 1, 2)]
            assert flags == [False, True, False]
        result = gradtrace.audit(path)
        assert result.verdict == "pass", (result.first, result.notes)
        assert result.laws["master"].skip_reasons["the step overflowed"] > 0


def test_the_loss_scale_of_a_step_is_the_one_its_loss_was_multiplied_with(tmp_path: Path) -> None:
    setup = Setup(2, fp16=True, config=GROWS, steps=5, overflow_in=(3,))
    train(setup, tmp_path / "trace")
    steps = open_trace(tmp_path / "trace").ranks[0].steps
    scales = [(steps[n].facts["loss_scale"], steps[n].facts["loss_scale_after"]) for n in range(5)]
    assert scales == [(256, 256), (256, 256), (256, 512), (512, 256), (256, 256)]


# --- planted faults --------------------------------------------------------------------------------


def _keep_own(engine: Any) -> None:
    """Take part in the all-reduce on rank 1, and go on with what it had."""
    original = engine.allreduce_bucket

    def planted(bucket: Any, *args: Any, **kwargs: Any) -> Any:
        own = [tensor.clone() for tensor in bucket]
        found = original(bucket, *args, **kwargs)
        return engine.flatten(own) if torch.distributed.get_rank() == 1 else found

    engine.allreduce_bucket = planted


def _sum_only(engine: Any) -> None:
    """Leave out the division by the world size."""
    original = engine.allreduce_bucket
    engine.allreduce_bucket = lambda *a, **k: original(*a, **k) * 2


def _last_only(engine: Any) -> None:
    """Clear the gradients before each micro-step."""
    original = engine.backward

    def planted(*args: Any, **kwargs: Any) -> Any:
        for param in engine.module.parameters():
            param.grad = None
        return original(*args, **kwargs)

    engine.backward = planted


def _never_cleared(engine: Any) -> None:
    """Keep the gradients of the step before."""
    engine.zero_grad = lambda *a, **k: None
    if hasattr(engine.optimizer, "fp16_groups"):
        engine.optimizer.zero_grad = lambda *a, **k: None


@pytest.mark.parametrize("setup", (Setup(0), Setup(0, bf16=True)), ids=lambda setup: setup.name)
@pytest.mark.parametrize(
    ("plant", "law", "cause", "where"),
    (
        (_keep_own, "reduce", "not_reduced", (0, 3)),
        (_sum_only, "reduce", "not_averaged", (0, 3)),
        (_last_only, "accumulate_local", "dropped_micro_steps", (0, 1)),
        (_never_cleared, "accumulate_local", "carried_over", (1, 0)),
    ),
)
def test_planted_faults_at_stage_0_are_found_and_named(
    plant: Callable[[Any], None],
    law: str,
    cause: str,
    where: tuple[int, int],
    setup: Setup,
    tmp_path: Path,
) -> None:
    train(setup, tmp_path / "bad", before=plant)
    result = gradtrace.audit(tmp_path / "bad")
    assert result.first is not None
    assert (result.first.law, result.first.cause) == (law, cause)
    assert (result.first.step, result.first.micro_step) == where
    if plant is _keep_own:
        assert result.first.rank == 1
    train(setup.at(stage=1), tmp_path / "good")
    compared = gradtrace.diff(tmp_path / "good", tmp_path / "bad")
    assert compared.verdict == "diverged"
    assert compared.blame is not None
    assert (compared.blame.side, compared.blame.law) == ("candidate", law)


def test_ranks_that_are_given_different_gradients_are_found_from_those_alone(
    tmp_path: Path,
) -> None:
    train(Setup(0), tmp_path / "trace", before=_keep_own, points="loss,master_grad,clipped_grad")
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "fail"
    assert result.first is not None
    assert (result.first.law, result.first.point) == ("replicate", "master_grad")


def _forget_to_unscale(engine: Any) -> None:
    optimizer = engine.optimizer
    name = "grad_groups_flat" if hasattr(optimizer, "bit16_groups") else "sub_group_id"
    planted = {
        "grad_groups_flat": lambda grad_groups_flat, total_norm: None,
        "sub_group_id": lambda sub_group_id, total_norm: None,
    }
    optimizer.unscale_and_clip_grads = planted[name]


def _clip_twice(engine: Any) -> None:
    owner, name = engine.optimizer, "unscale_and_clip_grads"
    if not hasattr(owner, name):
        owner, name = engine, "clip_fp32_gradients"
    original = getattr(owner, name)
    if name == "clip_fp32_gradients":

        def twice() -> None:
            original()
            engine.module[0].weight.grad.mul_(0.5)

        engine.clip_fp32_gradients = twice
        return

    def halved(total_norm: Any, apply_scale: bool = True) -> Any:
        found = original(total_norm, apply_scale)
        for group in owner.fp32_groups:
            for param in group:
                param.grad.mul_(0.5)
        return found

    owner.unscale_and_clip_grads = halved


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_loss_scale_that_stays_in_is_found(stage: int, tmp_path: Path) -> None:
    train(Setup(stage, fp16=True), tmp_path / "trace", before=_forget_to_unscale)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.first is not None
    assert (result.first.law, result.first.cause) == ("unscale_clip", "not_unscaled")
    assert "128" in result.first.detail


@pytest.mark.parametrize(
    "setup",
    (
        Setup(0, config={"gradient_clipping": 0.01}),
        Setup(0, fp16=True, config={"gradient_clipping": 0.01, **SCALE_1}),
    ),
    ids=lambda setup: setup.name,
)
def test_a_wrong_clip_factor_is_found_at_stage_0(setup: Setup, tmp_path: Path) -> None:
    train(setup, tmp_path / "trace", before=_clip_twice)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.first is not None
    assert (result.first.law, result.first.cause) == ("unscale_clip", "wrong_clip")
    assert result.first.step == 0


def _report_half(engine: Any) -> None:
    original = engine.optimizer.step

    def step(closure: Any = None) -> None:
        original(closure)
        engine.optimizer._global_grad_norm /= 2

    engine.optimizer.step = step


@pytest.mark.parametrize(
    "setup",
    (Setup(0, bf16=True), Setup(1, bf16=True, config=ACCUM32), Setup(2), Setup(3)),
    ids=lambda setup: setup.name,
)
def test_a_norm_that_is_reported_wrong_is_found(setup: Setup, tmp_path: Path) -> None:
    train(setup, tmp_path / "trace", before=_report_half)
    result = gradtrace.audit(tmp_path / "trace")
    assert {(f.law, f.cause, f.param) for f in result.findings} == {
        ("unscale_clip", "scaled", None)
    }
    assert result.first is not None
    assert result.first.found == pytest.approx(result.first.expected / 2, rel=1e-3)


def test_a_norm_of_parameters_that_were_not_captured_is_not_judged(tmp_path: Path) -> None:
    setup = Setup(0, config={"gradient_clipping": 0.01})
    train(setup, tmp_path / "trace", params="0.*")
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass"
    assert result.laws["unscale_clip"].checked == 0
    assert "the norm is of parameters that were not captured too" in (
        result.laws["unscale_clip"].skip_reasons
    )


# --- true defects of DeepSpeed 0.19.8 --------------------------------------------------------------


def _moved(setup: Setup, steps: int) -> np.ndarray[Any, Any]:
    """Return how far a run moved the weights in its last step."""
    before = train(setup.at(steps=steps - 1), None)[0].weights
    after = train(setup.at(steps=steps), None)[0].weights
    return np.concatenate(
        [
            np.frombuffer(b, "<f4") - np.frombuffer(a, "<f4")
            for a, b in zip(before, after, strict=True)
        ]
    )


def test_fp16_at_stage_0_divides_by_a_scale_it_never_multiplied_with() -> None:
    """Source: deepspeed PR 8393; 0.19.8, engine.py:3417. Reproduced without gradtrace."""
    setup = Setup(1, fp16=True, client="sgd", config={"gradient_clipping": 0.0})
    right = _moved(setup, 1)
    wrong = _moved(setup.at(stage=0), 1)
    assert np.linalg.norm(right) > 0.01
    assert np.linalg.norm(wrong) < np.linalg.norm(right) / 50  # 1/128, but for fp16 weights


def test_fp16_at_stage_0_is_blamed_against_stage_1(tmp_path: Path) -> None:
    train(Setup(0, fp16=True), tmp_path / "zero")
    train(Setup(1, fp16=True), tmp_path / "one")
    compared = gradtrace.diff(tmp_path / "one", tmp_path / "zero")
    assert compared.verdict == "diverged"
    assert compared.blame is not None
    assert (compared.blame.side, compared.blame.law) == ("candidate", "seed")
    result = gradtrace.audit(tmp_path / "zero")
    named = {(finding.law, finding.cause) for finding in result.findings}
    # FP16_UnfusedOptimizer reports its norm with the loss scale in it (PR 8588).
    assert named == {("seed", "scaled"), ("unscale_clip", "not_unscaled")}


def _adam_steps(rank: int, setup: Setup) -> set[float]:
    state = initialize(setup).optimizer.optimizer.state
    return {float(entry["step"]) for entry in state.values() if "step" in entry}


@pytest.mark.parametrize("client", ("adamw", "fused"))
def test_stage_0_steps_adam_before_training_begins(client: Any) -> None:
    """Source: deepspeed 0.19.8, initialize_optimizer_states of both fp16 optimizers. No gradtrace."""
    if client == "adamw":
        (steps,) = run_ranks(1, _adam_steps, Setup(0, bf16=True, ranks=1, client="adamw"))
        assert steps == {1.0}
        (steps,) = run_ranks(1, _adam_steps, Setup(1, bf16=True, ranks=1, client="adamw"))
        assert steps in ({0.0}, set())
    zero = _moved(Setup(0, bf16=True, client=client), 1)
    one = _moved(Setup(1, bf16=True, client=client), 1)
    # 0.1 g / (1 - 0.9^2) over the root of 0.001 g^2 / (1 - 0.999^2) is 0.744 of a step, not a whole one
    assert np.linalg.norm(zero) == pytest.approx(0.744 * np.linalg.norm(one), rel=0.1)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_growing_loss_scale_halves_the_step(stage: int) -> None:
    """Source: deepspeed PR 8588, comment; 0.19.8, stage_1_and_2.py:3047. Without gradtrace."""
    setup = Setup(stage, fp16=True, client="sgd", config={"gradient_clipping": 0.0, **GROWS})
    fixed = {"fp16": {"enabled": True, "loss_scale": 256.0}, "gradient_clipping": 0.0}
    assert np.array_equal(_moved(setup, 2), _moved(setup.at(config=fixed), 2))
    grown, right = _moved(setup, 3), _moved(setup.at(config=fixed), 3)
    assert np.linalg.norm(grown) < 0.9 * np.linalg.norm(right)  # momentum keeps its own part


# --- refusals --------------------------------------------------------------------------------------


def _legacy(engine: Any) -> None:
    engine.optimizer.fused_adam_legacy = True


def _half_masters(engine: Any) -> None:
    engine.optimizer.fp16_master_weights_and_gradients = True  # needs an optimizer that compiles


def _own_reduction(engine: Any) -> None:
    engine.enable_backward_allreduce = False


def _override(engine: Any) -> None:
    kind = type(engine.optimizer)
    engine.optimizer.__class__ = type("Changed", (kind,), {"step": lambda self, closure=None: None})


@pytest.mark.parametrize(
    ("setup", "plant", "found"),
    (
        (Setup(0, bf16=True, client="fused"), _legacy, "legacy_fusion"),
        (Setup(2, fp16=True), _half_masters, "fp16_master_weights_and_grads"),
        (Setup(0), _own_reduction, "communicates by itself"),
        (Setup(0, bf16=True), _override, "Changed"),
        (Setup(0, model="sparse"), None, "sparse_gradients"),
    ),
)
def test_what_cannot_be_traced_is_refused_by_name(
    setup: Setup, plant: Callable[[Any], None] | None, found: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.UnsupportedEngineError, match=found):
        train(setup, tmp_path / "trace", before=plant)
    assert not (tmp_path / "trace").exists()


def test_a_method_that_moved_is_named(tmp_path: Path) -> None:
    def lose(engine: Any) -> None:
        del type(engine).allreduce_and_copy

    with pytest.raises(errors.ProbeError, match=r"allreduce_and_copy in deepspeed \d"):
        train(Setup(0), tmp_path / "trace", before=lose)
