"""True defects of the installed DeepSpeed: the finding that is expected stands beside each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.testing.live import keep_last_micro_step_only
from gradtrace.testing.ranks import run_ranks
from tests.real.training import Client, Setup, build, initialize, one_step, train


@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("mode", ("by_hand", "tensor_backward", "scale"))
def test_accumulating_by_hand_keeps_the_last_micro_step_only(
    mode: str, stage: int, bf16: bool, tmp_path: Path
) -> None:
    """Source: open-instruct PR 1498; stage 2 since 0.17.6, stage 1 since 0.18.3, to 0.19.8."""
    setup = Setup(stage, bf16=bf16, mode=mode)  # type: ignore[arg-type]
    assert train(setup, tmp_path / "bad") == train(setup, None)
    result = gradtrace.audit(tmp_path / "bad")
    assert result.verdict == "fail"
    assert result.first is not None
    assert (result.first.law, result.first.cause) == ("accumulate", "dropped_micro_steps")
    assert (result.first.step, result.first.micro_step) == (0, 1)
    train(setup.at(stage=3), tmp_path / "good")
    assert gradtrace.audit(tmp_path / "good").verdict == "pass"
    compared = gradtrace.diff(tmp_path / "bad", tmp_path / "good")
    assert compared.verdict == "diverged"
    assert compared.first is not None
    assert compared.blame is not None
    assert (compared.first.step, compared.first.micro_step) == (0, 1)
    assert compared.first.point == "accumulated"
    assert compared.blame.side == "baseline"
    assert compared.blame.law == "accumulate"
    assert compared.blame.cause == "dropped_micro_steps"
    swapped = gradtrace.diff(tmp_path / "good", tmp_path / "bad")
    assert swapped.blame is not None
    assert swapped.blame.side == "candidate"


@pytest.mark.parametrize("bf16", (False, True))
def test_stage_3_adds_to_what_the_step_before_left(bf16: bool, tmp_path: Path) -> None:
    """A parameter without a gradient in micro-step 0 is added to its old partition in a later one.

    Source: deepspeed 0.17.5 to 0.19.8, stage3.py partition_grads: ``copy_`` only if
    ``micro_step_id == 0``, else ``add_``. No upstream report was found; the test below reproduces it
    without gradtrace.
    """
    setup = Setup(3, bf16=bf16, model="tied")
    assert train(setup, tmp_path / "trace") == train(setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.first is not None
    assert (result.first.law, result.first.cause) == ("accumulate", "carried_over")
    assert (result.first.step, result.first.micro_step) == (1, 1)
    found = {name for f in result.findings for name in (f.param, *f.folded)}
    assert found == {"sometimes.weight", "sometimes.bias"}


def test_stage_3_carries_over_without_gradtrace_too() -> None:
    """Stages 2 and 3 must train alike; they part in the parameter that misses micro-step 0."""
    names = [name for name, _ in build("tied").named_parameters()]
    apart = {}
    for steps in (1, 2):
        two = train(Setup(2, model="tied", steps=steps), None)[0].weights
        three = train(Setup(3, model="tied", steps=steps), None)[0].weights
        apart[steps] = {
            name
            for name, one, other in zip(names, two, three, strict=True)
            if np.abs(np.frombuffer(one, "<f4") - np.frombuffer(other, "<f4")).max() > 1e-4
        }
    assert apart[1] == set()
    assert {"sometimes.weight", "sometimes.bias"} <= apart[2]


def test_the_shipped_mutator_plants_the_demos_fault(tmp_path: Path) -> None:
    setup = Setup(2, mode="set_boundary")
    train(setup, tmp_path / "trace", before=keep_last_micro_step_only)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.first is not None
    assert (result.first.law, result.first.cause) == ("accumulate", "dropped_micro_steps")
    assert (result.first.step, result.first.micro_step) == (0, 1)


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradtrace", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_demo_finds_and_explains_a_live_bug(tmp_path: Path) -> None:
    out_dir = str(tmp_path / "demo")
    done = _demo("-o", out_dir, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["diff"]["verdict"] == "diverged"
    assert document["diff"]["first"]["step"] == 0
    assert document["diff"]["first"]["micro_step"] == 1
    assert document["diff"]["blame"]["side"] == "baseline"
    assert document["diff"]["blame"]["law"] == "accumulate"
    assert document["diff"]["blame"]["cause"] == "dropped_micro_steps"
    again = _demo("-o", out_dir)
    assert again.returncode == 2
    assert "trace_exists" in again.stderr


def _first_update(rank: int, setup: Setup) -> float:
    """Return how far AdamW moved the weights in its first step, on average, in learning rates."""
    engine = initialize(setup)
    before = [parameter.detach().float().clone() for parameter in engine.module.parameters()]
    one_step(engine, setup, torch.Generator().manual_seed(0))
    after = [parameter.detach().float() for parameter in engine.module.parameters()]
    moved = torch.cat([(b - a).abs().flatten() for a, b in zip(before, after, strict=True)])
    return float(moved.mean()) / 1e-2


@pytest.mark.parametrize("client", ("config", "fused"))
def test_stage_0_in_half_precision_begins_with_adams_second_step(client: Client) -> None:
    """FP16_Optimizer and FP16_UnfusedOptimizer step once, with zero gradients, when they are made.

    Adam's first step is the learning rate, whatever the gradient. After a step with none it is
    0.1/(1 - 0.9^2) / sqrt(0.001/(1 - 0.999^2)) = 0.744 of it. ZeRO no longer does this.

    Source: 0.19.8 runtime/fp16/fused_optimizer.py:130 and unfused_optimizer.py:425; no upstream
    report was found.
    """
    (stage0,) = run_ranks(1, _first_update, Setup(0, bf16=True, ranks=1, client=client))
    (stage1,) = run_ranks(1, _first_update, Setup(1, bf16=True, ranks=1))
    assert stage0 == pytest.approx(0.744, abs=0.05)
    assert stage1 == pytest.approx(1.0, abs=0.05)
