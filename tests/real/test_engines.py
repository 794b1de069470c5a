"""Engines that are no plain DeepSpeedEngine are refused by name, and left as they were."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace
from gradtrace import errors
from gradtrace.testing.ranks import run_ranks
from tests.real.training import Setup, initialize


def _pipeline(rank: int, stage: int, out_dir: Path) -> tuple[str, str, str, float]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    module = PipelineModule(
        layers=[nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        },
    )
    methods = {name: value for name, value in vars(engine).items() if callable(value)}
    with pytest.raises(errors.UnsupportedEngineError) as caught:
        gradtrace.wrap(engine, out_dir)
    assert {name: value for name, value in vars(engine).items() if callable(value)} == methods
    batches = iter([(torch.ones(2, 7), torch.ones(2, 5))] * 2)
    loss = engine.train_batch(batches)
    return caught.value.found, caught.value.expected, type(engine).__name__, float(loss)


@pytest.mark.parametrize("stage", (0, 1))
def test_a_pipeline_engine_is_refused_by_name_and_trains_on(stage: int, tmp_path: Path) -> None:
    for found, expected, name, loss in run_ranks(2, _pipeline, stage, tmp_path / "trace"):
        assert name == "PipelineEngine"
        assert found == "a PipelineEngine"
        assert "pipeline parallelism" in expected
        assert 0 < loss < 10
    assert not (tmp_path / "trace").exists()


def _as_class(rank: int, module: str, name: str, out_dir: Path) -> tuple[str, str]:
    engine: Any = initialize(Setup(3, ranks=1))
    engine.__class__ = getattr(__import__(module, fromlist=[name]), name)
    with pytest.raises(errors.UnsupportedEngineError) as caught:
        gradtrace.wrap(engine, out_dir)
    return caught.value.found, caught.value.expected


def test_a_hybrid_engine_is_refused_by_name(tmp_path: Path) -> None:
    """Built by its class alone: its constructor wants kernels that a CPU does not have."""
    module = "deepspeed.runtime.hybrid_engine"
    ((found, expected),) = run_ranks(1, _as_class, module, "DeepSpeedHybridEngine", tmp_path / "t")
    assert found == "a DeepSpeedHybridEngine"
    assert "hybrid engine" in expected


def _subclass(rank: int, out_dir: Path) -> tuple[str, str]:
    engine: Any = initialize(Setup(3, ranks=1))
    engine.__class__ = type("OwnEngine", (type(engine),), {})
    with pytest.raises(errors.UnsupportedEngineError) as caught:
        gradtrace.wrap(engine, out_dir)
    return caught.value.found, caught.value.expected


def test_an_unknown_engine_class_is_refused_by_name(tmp_path: Path) -> None:
    ((found, expected),) = run_ranks(1, _subclass, tmp_path / "trace")
    assert found == "a OwnEngine"
    assert "only that is traced" in expected
