"""A micro-step that is added after the collective stays on its rank; on one rank it is where it must be.

DeepSpeed 0.18.5 to 0.18.9 do so in BF16_Optimizer (https://github.com/deepspeedai/DeepSpeed/pull/7985,
tests/replay/bf16_z1_boundary_leak); here it is planted into the installed one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradtrace
from tests.real.training import Setup, train

SETUP = Setup(1, bf16=True, config={"data_types": {"grad_accum_dtype": "fp32"}})


def _add_late(engine: Any, *, last: bool = True) -> None:
    """Reduce first and add then, as 0.18.5 does; the boundary's own micro-step, or not even that."""

    def epilogue() -> None:
        boundary = engine.is_gradient_accumulation_boundary()
        engine.allreduce_gradients()
        if last or not boundary:
            engine.optimizer.backward_epilogue()
        engine.optimizer.exit_backward()

    engine._backward_epilogue = epilogue


@pytest.mark.parametrize("model", ("mlp", "tied", "one"))
@pytest.mark.parametrize("ranks", (2, 3))
def test_it_is_one_finding(ranks: int, model: str, tmp_path: Path) -> None:
    train(SETUP.at(ranks=ranks, model=model, steps=1), tmp_path / "trace", before=_add_late)
    (finding,) = gradtrace.audit(tmp_path / "trace").findings
    assert (finding.law, finding.cause) == ("pack", "dropped_micro_steps")
    assert (finding.step, finding.micro_step, finding.rank) == (0, 3, None)
    assert "holds micro-steps 0, 1, 2 only; micro-step 3 is lost" in finding.detail
    assert "it was added after the collective, and stays on the rank" in finding.detail


def test_the_only_micro_step_is_not_reduced_at_all(tmp_path: Path) -> None:
    train(SETUP.at(micro_steps=1, steps=1), tmp_path / "trace", before=_add_late)
    (finding,) = gradtrace.audit(tmp_path / "trace").findings
    assert (finding.law, finding.cause, finding.micro_step) == ("pack", "zeroed", 0)
    assert "own gradients: they were not reduced" in finding.detail


@pytest.mark.parametrize("micro_steps", (1, 2, 4))
def test_on_one_rank_nothing_is_wrong(micro_steps: int, tmp_path: Path) -> None:
    setup = SETUP.at(ranks=1, micro_steps=micro_steps, model="tied")
    train(setup, tmp_path / "trace", before=_add_late)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", result.first


def test_on_one_rank_what_is_never_added_is_lost(tmp_path: Path) -> None:
    setup = SETUP.at(ranks=1, micro_steps=2, steps=1)
    train(setup, tmp_path / "trace", before=partial(_add_late, last=False))
    result = gradtrace.audit(tmp_path / "trace")
    assert result.first is not None
    assert [(f.law, f.cause) for f in result.findings] == [("pack", "dropped_micro_steps")]
    assert "holds micro-step 0 only; micro-step 1 is lost" in result.first.detail
