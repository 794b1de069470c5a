"""Batches and weights as real runs record them: by hash, whole or in shards, and what follows from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.analysis.align import Alignment
from gradtrace.analysis.origins import stretch_hashes, weight_hashes
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.digest import add_hashes, hash_text, value_hash
from gradtrace.trace.dtypes import DTYPES, raw_bits
from gradtrace.trace.reader import Trace, open_trace
from tests.real.training import Setup, initialize, one_step, train

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SETUPS = (
    Setup(1, steps=2),
    Setup(2, steps=2, bf16=True),
    Setup(3, steps=2),
    Setup(3, steps=2, bf16=True, ranks=3, zero={"sub_group_size": 100}),
    Setup(1, steps=2, bf16=True, config=ACCUM32),
    Setup(2, steps=2, model="tied", groups=True),
    Setup(3, steps=2, model="one"),
)


def _raw_weights(engine: Any, setup: Setup) -> list[bytes]:
    """Return the raw bytes of every whole parameter, in the model's order."""
    import deepspeed

    found = []
    for parameter in engine.module.parameters():
        gathered = [parameter] if setup.stage == 3 else []
        with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
            found.append(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found


def _steps(
    rank: int, setup: Setup, out_dir: Path, seeds: tuple[int, ...], points: str | None
) -> list[list[bytes]]:
    """Train a step for each seed of batches; return the weights that each began with."""
    engine = initialize(setup)
    data = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
    begun = []
    with gradtrace.wrap(engine, out_dir, points=points, on_error="raise"):
        for seed in seeds:
            begun.append(_raw_weights(engine, setup))
            one_step(engine, setup, data[seed])
    return begun


def _hashes(trace: Trace, step: int, point: str, occurrence: int) -> dict[int, str]:
    """Add up the hashes that all ranks recorded of each parameter."""
    found: dict[int, list[str]] = {}
    for rank in trace.ranks.values():
        for record in rank.records:
            if (record.step, record.point, record.occurrence) == (step, point, occurrence):
                for span, mixed in stretch_hashes(trace, record):
                    if span.param >= 0:
                        found.setdefault(span.param, []).append(mixed)
    return {param: add_hashes(mixed) for param, mixed in found.items()}


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_hashes_add_up_to_those_of_the_whole_parameters(setup: Setup, tmp_path: Path) -> None:
    begun = run_ranks(setup.ranks, _steps, setup, tmp_path / "trace", (1, 2), None)[0]
    trace = open_trace(tmp_path / "trace")
    kind = DTYPES["bfloat16" if setup.bf16 else "float32"]
    for step in (0, 1):
        wanted = [hash_text(value_hash(raw_bits(data, kind))) for data in begun[step]]
        found = weight_hashes(Alignment(trace), step)
        assert found == {at: (kind.name, mixed) for at, mixed in enumerate(wanted)}
    assert gradtrace.audit(trace).verdict == "pass" or setup.model == "tied"


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_fp32_weights_before_and_after_the_optimizer_are_those_of_the_model(
    stage: int, tmp_path: Path
) -> None:
    run_ranks(2, _steps, Setup(stage), tmp_path / "trace", (1, 2), None)
    trace = open_trace(tmp_path / "trace")
    align = Alignment(trace)
    weights = [
        {param: mixed for param, (_, mixed) in weight_hashes(align, step).items()}
        for step in (0, 1)
    ]
    assert _hashes(trace, 0, "master_weight", 0) == weights[0]
    assert _hashes(trace, 0, "master_weight", 1) == weights[1]
    assert _hashes(trace, 1, "master_weight", 0) == weights[1] != weights[0]


def test_stages_begin_with_the_same_hashes_and_nothing_is_said_of_it(tmp_path: Path) -> None:
    found = []
    for stage, ranks in ((1, 2), (2, 2), (3, 2), (3, 3)):
        setup = Setup(stage, ranks=ranks, steps=1, batch=6 // ranks)
        path = tmp_path / f"{stage}-{ranks}"
        train(setup, path)
        found.append(weight_hashes(Alignment(open_trace(path)), 0))
    assert found[0] == found[1] == found[2] == found[3]
    result = gradtrace.diff(tmp_path / "2-2", tmp_path / "3-2")
    assert result.verdict == "agree", result.notes
    assert not any("input" in note or "weights" in note for note in result.notes), result.notes


def test_weights_are_kept_whole_where_they_are_named_and_training_is_the_same(
    tmp_path: Path,
) -> None:
    for stage in (1, 3):
        setup = Setup(stage, steps=2)
        path = tmp_path / str(stage)
        points = "weight,master_weight,local_grad,master_grad"
        assert train(setup, path, points=points) == train(setup, None)
        train(setup, tmp_path / f"{stage}-digest")
        whole, digest = open_trace(path), open_trace(tmp_path / f"{stage}-digest")
        assert (whole.manifest.plan["digested"], digest.manifest.plan["digested"]) == (
            [],
            ["weight", "master_weight"],
        )
        for trace, kept in ((whole, True), (digest, False)):
            records = [r for r in trace.ranks[0].records if r.point in {"weight", "master_weight"}]
            assert {record.key is not None for record in records} == {kept}
            assert {"digest" in record.facts for record in records} == {not kept}
        for point, occurrence in (("weight", 0), ("master_weight", 0), ("master_weight", 1)):
            for step in (0, 1):
                mine = _hashes(whole, step, point, occurrence)
                assert mine == _hashes(digest, step, point, occurrence) != {}


# --- faults ----------------------------------------------------------------------------------------


def _touched(rank: int, setup: Setup, out_dir: Path) -> None:
    engine = initialize(setup)
    data = torch.Generator().manual_seed(1)
    with gradtrace.wrap(engine, out_dir, on_error="raise"):
        one_step(engine, setup, data)
        if rank == 1:
            weight = engine.module[0].weight
            held = weight.ds_tensor if setup.stage == 3 else weight
            held.data.view(-1)[5] += 0.25
        one_step(engine, setup, data)


@pytest.mark.parametrize("stage", (1, 2))
def test_one_element_that_one_rank_holds_otherwise_is_found(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _touched, Setup(stage), tmp_path / "trace")
    first = gradtrace.audit(tmp_path / "trace").first
    assert first is not None
    assert (first.law, first.cause, first.step, first.micro_step) == (
        "publish",  # which of the two ranks is wrong, the masters tell
        "weights_differ",
        1,
        None,
    )
    assert (first.rank, first.param, first.point, first.folded) == (1, "0.weight", "weight", ())


def test_the_odd_rank_of_three_is_named(tmp_path: Path) -> None:
    run_ranks(3, _touched, Setup(1, ranks=3), tmp_path / "trace")
    first = gradtrace.audit(tmp_path / "trace").first
    assert first is not None
    assert (first.cause, first.rank) == ("weights_differ", 1)


def test_other_batches_are_named_and_blamed(tmp_path: Path) -> None:
    for name, seeds in (("one", (1, 2, 3)), ("two", (1, 9, 3))):
        run_ranks(2, _steps, Setup(2), tmp_path / name, seeds, None)
    result = gradtrace.diff(tmp_path / "one", tmp_path / "two")
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.point) == (1, "local_grad")
    assert (result.blame.side, result.blame.cause) == ("neither", "inputs_differ")
    assert "args[0] (float32, shape [2, 7]) has other values" in result.blame.detail
    noted = [note for note in result.notes if note.startswith("input differs")]
    assert len(noted) == 1
    assert noted[0].startswith("input differs at step 1, micro-step 0, rank 0, and at 7 more")


def _other_weights(engine: Any) -> None:
    with torch.no_grad():
        engine.module[0].bias.add_(0.5)


def test_other_initial_weights_are_named_and_blamed(tmp_path: Path) -> None:
    train(Setup(1), tmp_path / "one")
    train(Setup(2), tmp_path / "two", before=_other_weights)
    result = gradtrace.diff(tmp_path / "one", tmp_path / "two")
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.point) == (0, "local_grad")
    assert (result.blame.side, result.blame.cause) == ("neither", "weights_differ")
    assert "1 of 5 parameters (0.bias)" in result.blame.detail
    assert any("begin step 0 with different weights" in note for note in result.notes)


# --- which forward passes count --------------------------------------------------------------------


def _evaluate_between(rank: int, setup: Setup, out_dir: Path) -> None:
    engine = initialize(setup)
    x, y = torch.ones(2, 7), torch.zeros(3, 7)
    with gradtrace.wrap(engine, out_dir, on_error="raise"):
        with torch.no_grad():
            engine(y)
        engine.eval()
        engine(y)  # autograd records it, and nobody asks for its gradient
        engine.train()
        engine.backward(engine(x).sum())
        engine.step()
        engine.backward((engine(x) + engine(input=2 * x)).sum())  # two forward passes, one backward
        engine(y)
        engine.step()


@pytest.mark.parametrize("stage", (1, 2))
def test_only_forward_passes_that_are_trained_on_are_recorded(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _evaluate_between, Setup(stage, micro_steps=2), tmp_path / "trace")
    records = [r for r in open_trace(tmp_path / "trace").ranks[0].records if r.point == "input"]
    assert [(r.step, r.micro_step, r.occurrence) for r in records] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 1, 1),
    ]
    tensors = [record.facts["tensors"] for record in records]
    assert [entry[0]["name"] for entry in tensors] == ["args[0]", "args[0]", "input"]
    bits = np.ones(14, dtype="<f4").view("<u4")
    assert tensors[0][0]["hash"] == tensors[1][0]["hash"] == hash_text(value_hash(bits))
    doubled = (2 * np.ones(14, dtype="<f4")).view("<u4")
    assert tensors[2][0]["hash"] == hash_text(value_hash(doubled))


def test_the_callers_own_backward_has_its_batch_too(tmp_path: Path) -> None:
    train(Setup(2, mode="tensor_backward", steps=1), tmp_path / "trace")
    records = open_trace(tmp_path / "trace").ranks[0].records
    found = Counter((r.micro_step, r.occurrence) for r in records if r.point == "input")
    assert found == {(m, 0): 1 for m in range(4)}


def test_steps_outside_the_plan_record_neither_batch_nor_weights(tmp_path: Path) -> None:
    train(Setup(2, steps=3), tmp_path / "trace", steps="1")
    records = open_trace(tmp_path / "trace").ranks[0].records
    assert {record.step for record in records} == {1}
    assert Counter(r.point for r in records)["weight"] == 5


def _without_weights(rank: int, out_dir: Path) -> None:
    engine = initialize(Setup(3))
    parameter = next(engine.module.parameters())
    masters = engine.optimizer.fp32_partitioned_groups_flat
    held = parameter.ds_tensor.data, masters[0].data
    parameter.ds_tensor.data = torch.empty(1)  # what DeepSpeed leaves of a shard that is on NVMe
    masters[0].data = torch.empty(0)
    with gradtrace.wrap(engine, out_dir):
        parameter.ds_tensor.data, masters[0].data = held
        one_step(engine, Setup(3), torch.Generator().manual_seed(0))


def test_weights_that_are_not_in_memory_are_absent_and_the_rest_is_traced(tmp_path: Path) -> None:
    run_ranks(2, _without_weights, tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    for point in ("weight", "master_weight"):
        assert "not in this process's memory" in trace.ranks[0].header.points[point]
        assert not any(record.point == point for record in trace.ranks[0].records)
    assert gradtrace.audit(trace).verdict == "pass"


def test_settings_in_effect_and_scalars_are_recorded(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "hysteresis": 3}
    for stage in (1, 2, 3):
        setup = Setup(stage, steps=2, zero={"sub_group_size": 100} if stage == 3 else {})
        train(setup, tmp_path / str(stage))
        rank = open_trace(tmp_path / str(stage)).ranks[1]
        effective = rank.header.effective
        assert (effective["train_batch_size"], effective["micro_batch_size"]) == (16, 2)
        assert effective["partition_count"] == [2]
        assert effective["offload_optimizer_device"] == effective["offload_param_device"] == "none"
        assert effective["dynamic_loss_scale"] is False
        assert effective.get("sub_group_size") == (100 if stage == 3 else None)
        assert effective.get("use_multi_rank_bucket_allreduce") == (None if stage == 3 else True)
        facts = [rank.steps[step].facts for step in (0, 1)]
        assert [f["engine_global_samples"] for f in facts] == [0, 16]
        assert [f["engine_skipped_steps"] for f in facts] == [0, 0]
        assert [f["boundary"] for f in facts] == [True, True]
        assert [f["loss_scale_after"] for f in facts] == [1.0, 1.0]
        losses = [r.facts["engine_micro_steps"] for r in rank.records if r.point == "loss"]
        assert losses == list(range(8))
    found = run_ranks(1, _settings, Setup(2, ranks=1, fp16=True, config={"fp16": fp16}))[0]
    assert found["dynamic_loss_scale"] is True
    assert (found["loss_scale_factor"], found["loss_scale_window"]) == (2.0, 7)
    assert (found["loss_scale_hysteresis"], found["consecutive_hysteresis"]) == (3, False)


def _settings(rank: int, setup: Setup) -> dict[str, Any]:
    from gradtrace.capture.adapters.select import build_model
    from gradtrace.capture.adapters.settings import settings

    return settings(build_model(initialize(setup)))
