"""Stages x dtypes x accumulation x ranks: laws hold, stages agree, training is bitwise untouched."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import gradtrace
from tests.real.training import Setup, train

DTYPES = (False, True)
GRID = list(itertools.product(DTYPES, (1, 4), (1, 2)))


@pytest.mark.parametrize(("bf16", "micro_steps", "ranks"), GRID)
def test_stages_hold_all_laws_agree_and_train_as_if_untraced(
    bf16: bool, micro_steps: int, ranks: int, tmp_path: Path
) -> None:
    for stage in (1, 2, 3):
        setup = Setup(stage, bf16=bf16, micro_steps=micro_steps, ranks=ranks)
        untraced = train(setup, None)
        traced = train(setup, tmp_path / str(stage))
        assert traced == untraced, f"tracing changed the training of {setup.name}"
        result = gradtrace.audit(tmp_path / str(stage))
        assert result.verdict == "pass", (setup.name, result.first, result.notes)
        assert result.laws["end_to_end"].checked > 0
    for one, other in itertools.combinations((1, 2, 3), 2):
        compared = gradtrace.diff(tmp_path / str(one), tmp_path / str(other))
        assert compared.verdict in ("agree", "rounding"), (one, other, compared.first)
        assert compared.counts["compared"] > 0


@pytest.mark.parametrize("bf16", DTYPES)
@pytest.mark.parametrize("mode", ("managed", "set_boundary", "unmanaged"))
def test_accumulation_that_deepspeed_is_told_of_is_right_in_every_stage(
    mode: str, bf16: bool, tmp_path: Path
) -> None:
    for stage in (1, 2, 3):
        setup = Setup(stage, bf16=bf16, mode=mode)  # type: ignore[arg-type]
        assert train(setup, tmp_path / str(stage)) == train(setup, None)
        result = gradtrace.audit(tmp_path / str(stage))
        assert result.verdict == "pass", (setup.name, result.first, result.notes)
    for one, other in itertools.combinations((1, 2, 3), 2):
        compared = gradtrace.diff(tmp_path / str(one), tmp_path / str(other))
        assert compared.verdict in ("agree", "rounding"), (one, other, compared.first)
