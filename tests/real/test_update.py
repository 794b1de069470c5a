"""What real optimizers do to weights and moments, and what DeepSpeed publishes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace
from gradtrace.testing import live
from gradtrace.testing.mutators import Fault
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import open_trace
from tests.real.training import Setup, initialize, one_step, train

ALL = ",".join(POINT_NAMES)
NEXT = "the moments after the step: the trace does not hold the next one"
FIRST = "the trace does not hold the step before"
CLIP = {"gradient_clipping": 0.01}
ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WARM_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    own = {"torch_adam": True} if kind.startswith("Adam") and kind != "Adamax" else {}
    return {
        "optimizer": {"type": kind, "params": {"lr": 1e-2, **own, **params}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


ADAM = _optimizer("Adam", weight_decay=0.1, adam_w_mode=False, betas=[0.8, 0.95])
ADAMW = _optimizer("AdamW", weight_decay=0.1)
SGD = _optimizer("SGD", momentum=0.9, dampening=0.1, weight_decay=0.1)
NESTEROV = _optimizer("SGD", momentum=0.9, nesterov=True, weight_decay=0.1)
SETUPS = (
    Setup(0, config=ADAM, groups=True),
    Setup(0, config=NESTEROV),
    Setup(0, config={**ADAMW, **CLIP}, model="tied"),
    Setup(0, bf16=True, config=ADAMW, groups=True),
    Setup(0, bf16=True, config=SGD),
    Setup(1, config={**ADAMW, **WARM_UP}),
    Setup(1, bf16=True, config=ADAM, groups=True),
    Setup(1, bf16=True, config={**ADAMW, **ACCUM32, **CLIP}),
    Setup(1, config=SGD, model="tied"),
    Setup(1, bf16=True, config=ADAMW, zero=OFFLOAD),
    Setup(2, config=NESTEROV, groups=True, ranks=3),
    Setup(2, bf16=True, config={**ADAMW, **ACCUM32, **CLIP}),
    Setup(2, config=ADAM, zero=OFFLOAD),
    Setup(2, bf16=True, config={**SGD, **WARM_UP}),
    Setup(2, fp16=True, config={**ADAMW, **DYNAMIC}, overflow_in=(1,), steps=4),
    Setup(3, config=ADAMW, zero={"sub_group_size": 100}, groups=True),
    Setup(3, bf16=True, config={**ADAM, **WARM_UP}, ranks=3, zero={"sub_group_size": 100}),
    Setup(3, config={**SGD, **CLIP}),
    Setup(3, bf16=True, config=ADAMW, zero=OFFLOAD),
    Setup(3, fp16=True, config=NESTEROV, overflow_in=(1,), steps=4),
)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.stage}-{setup.name[-60:]}")
def test_optimizers_follow_their_rule_and_training_is_the_same(
    setup: Setup, tmp_path: Path
) -> None:
    assert train(setup, tmp_path / "trace", points=ALL) == train(setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", (result.first, result.notes)
    update, publish = result.laws["update"], result.laws["publish"]
    assert set(update.skip_reasons) == {NEXT}
    assert set(publish.skip_reasons) == {FIRST}
    assert update.checked > 0
    assert publish.checked > 0
    assert update.worst_ratio > 0  # neither copied nor compared with itself


def _built(op: str) -> bool:
    """Say whether DeepSpeed's kernel is there: compiling it takes a minute."""
    return (Path(os.environ.get("TORCH_EXTENSIONS_DIR", "none")) / op / f"{op}.so").exists()


@pytest.mark.skipif(not _built("cpu_adam"), reason="DeepSpeed's cpu_adam is not built")
@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("bf16", (False, True))
def test_deepspeeds_cpu_adam(stage: int, bf16: bool, tmp_path: Path) -> None:
    kind = "AdamW" if bf16 else "Adam"
    params = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": bf16}
    config = {"optimizer": {"type": kind, "params": params}}
    setup = Setup(stage, bf16=bf16, config=config, zero=OFFLOAD, groups=stage == 2)
    assert train(setup, tmp_path / "trace", points=ALL) == train(setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", result.first
    assert set(result.laws["update"].skip_reasons) == {NEXT}
    (kernel,) = {
        record.facts["kernel"]
        for record in open_trace(tmp_path / "trace").ranks[0].records
        if record.point == "optimizer_state" and record.key is None
    }
    assert kernel == "DeepSpeedCPUAdam"


@pytest.mark.skipif(not _built("fused_adam"), reason="DeepSpeed's fused_adam is not built")
@pytest.mark.parametrize(
    "setup", (Setup(0), Setup(0, model="tied"), Setup(0, bf16=True), Setup(2), Setup(3, bf16=True))
)
def test_deepspeeds_fused_adam(setup: Setup, tmp_path: Path) -> None:
    params = {"lr": 1e-2, "weight_decay": 0.1}
    setup = setup.at(config={"optimizer": {"type": "AdamW", "params": params}})
    assert train(setup, tmp_path / "trace", points=ALL) == train(setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", result.first
    assert set(result.laws["update"].skip_reasons) == {NEXT}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            _optimizer("Adamax"),
            "no rule is known of the optimizer torch.optim.adamax.Adamax",
        ),
        (_optimizer("Adagrad"), "no rule is known of the optimizer torch.optim.adagrad.Adagrad"),
        (_optimizer("AdamW", amsgrad=True), "no rule is known of amsgrad"),
    ],
)
@pytest.mark.parametrize("stage", (0, 2))
def test_an_optimizer_without_a_rule_is_named_and_not_judged(
    stage: int, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    train(Setup(stage, config=config, steps=2), tmp_path / "trace", points=ALL)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", result.first
    assert result.laws["update"].checked == 0
    assert set(result.laws["update"].skip_reasons) == {reason}
    assert result.laws["publish"].checked > 0


@pytest.mark.parametrize("bf16", (False, True))
def test_without_asking_weights_are_followed_by_their_hashes(bf16: bool, tmp_path: Path) -> None:
    train(Setup(2, bf16=bf16), tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    assert trace.ranks[0].header.points["optimizer_state"] == "not_planned"
    result = gradtrace.audit(trace)
    assert result.verdict == "pass"
    assert not any("optimizer_state" in note for note in result.notes)
    assert set(result.laws["update"].skip_reasons) == {"optimizer_state is not_planned"}
    assert (result.laws["publish"].checked > 0) == (not bf16)


def test_the_plan_of_one_rank_and_some_parameters(tmp_path: Path) -> None:
    train(Setup(2), tmp_path / "trace", points=ALL, ranks="1", params="0.*,4.*")
    result = gradtrace.audit(tmp_path / "trace")
    assert all(count.broken == 0 for count in result.laws.values())
    assert result.laws["update"].checked > 0
    assert set(result.laws["publish"].skip_reasons) == {
        FIRST,
        "master_weight is not planned for all ranks that hold the parameter",
    }


# --- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setup",
    (Setup(0, config=ADAMW), Setup(1, bf16=True, config=SGD), Setup(3, config=ADAM)),
    ids=lambda setup: setup.name[:20],
)
def test_a_moment_that_is_not_what_the_step_left_is_found(setup: Setup, tmp_path: Path) -> None:
    fault = Fault("wrong_moment", "update", step=1, rank=1, amount=1.5)
    train(setup, tmp_path, before=lambda engine: live.plant(engine, fault), points=ALL)
    first, *more = gradtrace.audit(tmp_path).findings
    assert (first.law, first.cause, first.step) == ("update", "scaled", 1)
    assert (first.rank, first.point) == (1, "optimizer_state")
    assert [finding.law for finding in more] == []


def _wrong_rule(setting: str, value: Any) -> Callable[[Any], None]:
    """Let the optimizer step with another setting than it will say that it has."""

    def before(engine: Any) -> None:
        base = engine.optimizer.optimizer
        step = base.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            held = [group[setting] for group in base.param_groups]
            for group in base.param_groups:
                group[setting] = value
            result = step(*args, **kwargs)
            for group, was in zip(base.param_groups, held, strict=True):
                group[setting] = was
            return result

        base.step = stepped

    return before


@pytest.mark.parametrize(
    ("setting", "value", "cause", "words"),
    [
        ("lr", 2e-2, "scaled", "The step is 2 times what the rule gives: it fits a learning rate of "
         "0.02 where 0.01 is recorded."),
        ("weight_decay", 0.0, "scaled", "Weight decay was left out (it counts 0 times)."),
        ("maximize", True, "sign_flipped", "The optimizer stepped with the negative gradient."),
    ],
)  # fmt: skip
def test_a_step_by_another_rule_is_named(
    setting: str, value: Any, cause: str, words: str, tmp_path: Path
) -> None:
    setup = Setup(2, config=ADAMW, model="wide")
    train(setup, tmp_path, before=_wrong_rule(setting, value), points=ALL)
    result = gradtrace.audit(tmp_path)
    assert {finding.law for finding in result.findings} == {"update"}
    first = result.first
    assert first is not None
    assert (first.cause, first.step, first.point) == (cause, 0, "master_weight")
    assert words in first.detail


def _between(rank: int, setup: Setup, out_dir: Path, what: str, store: Path) -> None:
    import deepspeed

    engine = initialize(setup)
    data = torch.Generator().manual_seed(1)
    with gradtrace.wrap(engine, out_dir, points=ALL, on_error="raise"):
        one_step(engine, setup, data)
        if what == "load":
            engine.save_checkpoint(str(store), tag="here")
        one_step(engine, setup, data)
        weight = engine.module[2].weight
        if what == "load":
            engine.load_checkpoint(str(store), tag="here")
        elif setup.stage == 3:
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                weight.data.mul_(0.5)
        else:
            weight.data.mul_(0.5)
        one_step(engine, setup, data)


SOME = (Setup(0), Setup(1), Setup(2, bf16=True), Setup(3), Setup(3, bf16=True))


@pytest.mark.parametrize("setup", SOME, ids=lambda setup: setup.name[:12])
def test_weights_that_a_caller_writes_between_steps_are_told(setup: Setup, tmp_path: Path) -> None:
    run_ranks(2, _between, setup, tmp_path / "trace", "write", tmp_path / "store")
    result = gradtrace.audit(tmp_path / "trace")
    first = result.first
    assert first is not None
    assert (first.law, first.cause, first.step) == ("publish", "scaled", 2)
    assert (first.param, first.folded) == ("2.weight", ())
    assert len(result.findings) == 1


@pytest.mark.parametrize("setup", SOME, ids=lambda setup: setup.name[:12])
def test_a_checkpoint_that_is_loaded_between_steps_is_no_fault(
    setup: Setup, tmp_path: Path
) -> None:
    run_ranks(2, _between, setup, tmp_path / "trace", "load", tmp_path / "store")
    trace = open_trace(tmp_path / "trace")
    loaded = [step.facts.get("checkpoint_loaded") for step in trace.ranks[0].steps.values()]
    assert loaded == [None, None, True]
    result = gradtrace.audit(trace)
    assert result.verdict == "pass", (result.first, result.notes)
    reason = "a checkpoint was loaded between two steps"
    assert result.laws["publish"].skip_reasons[reason] > 0
    assert result.laws["update"].skip_reasons[reason] > 0
