"""Stages 1 and 2 in every setting: exact records, faults found on each path, upstream's defects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.trace.reader import open_trace
from gradtrace.trace.records import RankTrace
from tests.real.catalog.zero12 import (
    ACCUM32,
    AUTOCAST,
    HOST,
    LISTED,
    OVERLAP,
    SMALL,
    WHOLE,
)
from tests.real.expected import hops
from tests.real.training import Setup, build, train

ALL = (0, 1, 2, 3)  # the micro-steps of a step
LAST = (3,)
OWNED = -1  # as many as the rank owns parameters
# point -> (records, in which micro-steps); all setups have four micro-steps and five parameters
Wanted = dict[str, tuple[int, tuple[int, ...]]]
REDUCED_ONCE: Wanted = {
    "local_accum": (5, ALL),
    "bucket": (1, LAST),
    "reduced": (1, LAST),
    "accumulated": (1, LAST),
}
REDUCED_EACH: Wanted = {"bucket": (1, ALL), "reduced": (1, ALL), "accumulated": (1, ALL)}
COUNTS: dict[str, tuple[Setup, Wanted]] = {
    "stage 1, a list": (Setup(1, zero=LISTED), REDUCED_ONCE),
    "stage 1, a list, overlapped": (Setup(1, zero=LISTED | OVERLAP), REDUCED_ONCE),
    "stage 1, overlapped small buckets": (
        # Taken from the buffers while backward goes on.
        Setup(1, zero=LISTED | OVERLAP | SMALL),
        REDUCED_ONCE | {"bucket": (4, LAST), "reduced": (4, LAST)},
    ),
    "stage 2, a list": (Setup(2, zero=LISTED), REDUCED_EACH),
    "stage 2, lists of at most 60": (
        Setup(2, zero=LISTED | SMALL),
        REDUCED_EACH | {"bucket": (4, ALL), "reduced": (4, ALL)},
    ),
    "stage 2, a list into an fp32 buffer": (
        Setup(2, bf16=True, zero=LISTED | OVERLAP, config=ACCUM32),
        REDUCED_EACH,
    ),
    "stage 2, one parameter a bucket": (
        Setup(2, zero={"reduce_bucket_size": 1}),
        # Of each bucket only the own ranges are reduced: none, where another rank owns it all.
        REDUCED_EACH | {"bucket": (5, ALL), "reduced": (OWNED, ALL), "partition": (OWNED, ALL)},
    ),
    "stage 1, offload": (
        Setup(1, zero=HOST, client="adamw"),
        REDUCED_ONCE | {"partition": (OWNED, LAST), "accumulated": (OWNED, LAST)},
    ),
    "stage 2, offload": (
        Setup(2, zero=HOST, client="adamw"),
        # At the boundary the sum, and the fp32 gradient that it is copied into.
        REDUCED_EACH | {"partition": (OWNED, ALL), "accumulated": (OWNED, (*ALL, 3))},
    ),
    "stage 2, offload, unmanaged": (
        Setup(2, zero=HOST, client="adamw", mode="unmanaged"),
        REDUCED_EACH | {"partition": (OWNED, ALL), "accumulated": (OWNED, (*ALL, 3))},
    ),
    "stage 2, offload from an fp32 buffer": (
        Setup(2, bf16=True, zero=HOST, client="adamw", config=ACCUM32),
        REDUCED_EACH,
    ),
    "stage 1, offload from an fp32 buffer": (
        Setup(1, bf16=True, zero=HOST, client="adamw", config=ACCUM32),
        REDUCED_ONCE,
    ),
    "stage 2, coalesced": (
        Setup(2, mode="coalesce"),
        REDUCED_ONCE | {"partition": (OWNED, LAST)},
    ),
    "stage 1, coalesced, with a buffer of its own": (
        Setup(1, mode="coalesce", zero=HOST, client="adamw", bf16=True, config=ACCUM32),
        REDUCED_ONCE,
    ),
    "stage 1, no_sync": (
        Setup(1, mode="no_sync"),
        REDUCED_ONCE | {"partition": (OWNED, LAST)},
    ),
    "stage 2, autocast": (
        Setup(2, config=AUTOCAST),
        REDUCED_EACH | {"partition": (OWNED, ALL)},
    ),
}


def _owned(rank: RankTrace) -> int:
    shards = (rank.layouts[layout] for layout in rank.header.partitions.values())
    return len({span.param for shard in shards for span in shard if span.param >= 0})


@pytest.mark.parametrize("name", COUNTS)
def test_every_probe_fires_exactly_as_often_as_it_should(name: str, tmp_path: Path) -> None:
    setup, wanted = COUNTS[name]
    train(setup.at(steps=2), tmp_path / "trace")
    for rank in open_trace(tmp_path / "trace").ranks.values():
        expected: Counter[tuple[str, int | None]] = Counter(
            {("master_grad", None): 1, ("clipped_grad", None): 1}
        )
        for point, (count, micro_steps) in {
            "loss": (1, ALL),
            "local_grad": (5, ALL),
            **wanted,
        }.items():
            for micro_step in micro_steps:
                expected[point, micro_step] += _owned(rank) if count == OWNED else count
        for step in (0, 1):
            assert hops(rank.records, step) == expected, (name, rank.header.rank)
            assert rank.steps[step].micro_steps == 4


def test_autocast_has_a_bucket_for_each_communication_dtype(tmp_path: Path) -> None:
    train(Setup(2, config=AUTOCAST, model="tied", steps=1), tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    scale = next(p.index for p in trace.manifest.parameters if p.name == "scale")
    for rank in trace.ranks.values():
        buckets = [r for r in rank.records if r.point == "bucket"]
        assert Counter(r.unit for r in buckets) == {"bfloat16": 4, "float32": 4}
        for record in buckets:
            assert record.dtype == "float32"
            assert record.facts["comm_dtype"] == record.unit
            held = {span.param for span in trace.layout(record)}
            assert (scale in held) == (record.unit == "float32")


def test_each_way_to_form_a_mean_is_stated(tmp_path: Path) -> None:
    ways = {
        ("bucket", 1.0): Setup(2, config={"gradient_predivide_factor": 1.0}),
        ("sum", 3.0): Setup(2, zero=WHOLE, config={"gradient_predivide_factor": 3.0}),
        ("wire", 1.0): Setup(2, zero=WHOLE, config={"prescale_gradients": True}),
        ("none", 1.0): Setup(2, config={"gradient_allreduce_op": "sum"}),
    }
    for at, (way, setup) in enumerate(ways.items()):
        train(setup.at(steps=1), tmp_path / str(at))
        records = open_trace(tmp_path / str(at)).ranks[0].records
        facts = [r.facts for r in records if r.point == "bucket"]
        assert {(fact["division"], fact["predivide"]) for fact in facts} == {way}


def _open_a_window(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(torch.ones(2, 7)).sum())


def test_a_window_that_had_begun_is_partial_where_no_hook_counts_it(tmp_path: Path) -> None:
    setup = Setup(1, zero=LISTED, mode="set_boundary", steps=2)
    train(setup, tmp_path / "trace", before=_open_a_window)
    steps = open_trace(tmp_path / "trace").ranks[0].steps
    assert [steps[0].partial, steps[1].partial] == [True, False]
    assert gradtrace.audit(tmp_path / "trace").verdict == "pass"


# --- faults planted on each path ---------------------------------------------------------------------


def _micro_step(engine: Any) -> int:
    """Return the backward pass inside the step; setups here have four."""
    return int(engine.micro_steps) % 4


def _lose_middle_on_host(engine: Any) -> None:
    """Add to the gradient and never copy back: DeepSpeed 0.15.2 to 0.18.9 (pull request 7967)."""
    optimizer = engine.optimizer
    original = optimizer.async_accumulate_grad_in_cpu_via_gpu

    def changed(param: Any) -> None:
        buffers, number = optimizer.accumulated_grads_in_cpu, optimizer.get_param_id(param)
        held = buffers[number].clone() if optimizer.micro_step_id > 0 else None
        original(param)
        if held is not None:
            buffers[number].copy_(held)

    optimizer.async_accumulate_grad_in_cpu_via_gpu = changed


def _keep_fp32_gradient(engine: Any) -> None:
    optimizer = engine.optimizer
    original = optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu

    def changed(param: Any) -> None:
        if engine.global_steps == 1:
            optimizer.clear_grad_attribute(param)
        else:
            original(param)

    optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu = changed


def _reduce_nothing(engine: Any) -> None:
    """Match no bucket: DeepSpeed 0.15.1 to 0.19.7 on a CPU (pull request 8382)."""
    engine.optimizer.buffered_reduce_fallback = lambda rank, grads, *args, **kwargs: None


def _skip_one_addition(engine: Any) -> None:
    original = engine.optimizer._add_to_grad_partition_buffer

    def changed(output: Any, source: Any) -> None:
        if _micro_step(engine) != 2:
            original(output, source)

    engine.optimizer._add_to_grad_partition_buffer = changed


def _lose_rank_0_in_bf16(engine: Any) -> None:
    original = engine.optimizer.average_tensor

    def changed(tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        if engine.global_rank == 0 and communication_data_type == torch.bfloat16:
            tensor.zero_()
        original(tensor, communication_data_type)

    engine.optimizer.average_tensor = changed


def _never_divide_after(engine: Any) -> None:
    original = engine.optimizer.gradient_reduction_w_predivide

    def changed(tensor: torch.Tensor, communication_data_type: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = original(tensor, communication_data_type)
        return result.mul_(2)

    engine.optimizer.gradient_reduction_w_predivide = changed


def _clear_in_between(engine: Any) -> None:
    """Clear what was accumulated before the step's third forward pass."""
    original = engine.forward
    calls = [0]

    def changed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] % 4 == 3:
            engine.optimizer.zero_grad()
        return original(*args, **kwargs)

    engine.forward = changed


FAULTS: dict[str, tuple[Setup, Callable[[Any], None], tuple[str, str], tuple[int, int]]] = {
    "offload, the middle micro-steps": (
        Setup(2, zero=HOST, client="adamw"),
        _lose_middle_on_host,
        ("accumulate", "dropped_micro_steps"),
        (0, 1),
    ),
    "offload, in bf16": (
        Setup(2, bf16=True, zero=HOST | OVERLAP, client="adamw"),
        _lose_middle_on_host,
        ("accumulate", "dropped_micro_steps"),
        (0, 1),
    ),
    "offload, the copy to fp32": (
        Setup(2, zero=HOST, client="adamw"),
        _keep_fp32_gradient,
        ("accumulate", "stale"),
        (1, 3),
    ),
    "offload from an fp32 buffer": (
        Setup(2, bf16=True, zero=HOST, client="adamw", config=ACCUM32),
        _skip_one_addition,
        ("accumulate", "dropped_micro_steps"),
        (0, 2),
    ),
    "a list, not reduced at stage 1": (
        Setup(1, zero=LISTED),
        _reduce_nothing,
        ("reduce", "not_reduced"),
        (0, 3),
    ),
    "a list, not reduced at stage 2": (
        Setup(2, zero=LISTED | OVERLAP),
        _reduce_nothing,
        ("reduce", "not_reduced"),
        (0, 0),
    ),
    "a list into an fp32 buffer": (
        Setup(2, bf16=True, zero=LISTED, config=ACCUM32),
        _skip_one_addition,
        ("accumulate", "dropped_micro_steps"),
        (0, 2),
    ),
    "autocast, a rank": (
        Setup(2, config=AUTOCAST, ranks=3),
        _lose_rank_0_in_bf16,
        ("reduce", "rank_missing"),
        (0, 0),
    ),
    "predivide, the rest of the division": (
        Setup(2, zero=WHOLE, config={"gradient_predivide_factor": 3.0}),
        _never_divide_after,
        ("reduce", "not_averaged"),
        (0, 0),
    ),
    "coalesced, the first two micro-steps": (
        Setup(2, mode="coalesce"),
        _clear_in_between,
        ("accumulate_local", "dropped_micro_steps"),
        (0, 2),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_each_path_is_found_where_it_is(name: str, tmp_path: Path) -> None:
    setup, plant, (law, cause), (step, micro_step) = FAULTS[name]
    train(setup, tmp_path / "trace", before=plant)
    result = gradtrace.audit(tmp_path / "trace")
    first = result.first
    assert first is not None
    assert (first.law, first.cause) == (law, cause), first.detail
    assert (first.step, first.micro_step) == (step, micro_step)
    if "rank" in name:
        assert first.guilty == 0


# --- true defects of DeepSpeed 0.19.8 ----------------------------------------------------------------

SOMETIMES = {"sometimes.weight", "sometimes.bias"}


def _apart(one: Setup, other: Setup) -> set[str]:
    """Return the parameters in which two untraced trainings differ by more than rounding."""
    names = [name for name, _ in build(one.model).named_parameters()]
    left, right = train(one, None)[0].weights, train(other, None)[0].weights
    return {
        name
        for name, a, b in zip(names, left, right, strict=True)
        if np.abs(np.frombuffer(a, "<f4") - np.frombuffer(b, "<f4")).max() > 1e-3
    }


@pytest.mark.parametrize(
    ("stage", "micro_steps", "first_wrong"),
    ((2, 4, 1), (2, 3, 0), (1, 1, 2)),
    ids=("not in the first micro-step", "not in the last micro-step", "not in the whole step"),
)
def test_offload_keeps_what_it_should_not_without_gradtrace_too(
    stage: int, micro_steps: int, first_wrong: int
) -> None:
    """With the optimizer on the CPU, a parameter without a gradient now and then trains wrongly.

    ``sometimes`` has one in every other forward pass. Host buffers are cleared by nobody (0.19.8,
    stage_1_and_2.py ``reset_cpu_buffers``): the first addition of a step overwrites only in micro-step
    0 (``micro_step_id > 0`` adds), and the fp32 gradient is written only by a parameter that has a
    gradient at the boundary. No upstream report was found. Up to the step before, both train alike.
    """
    offloaded = Setup(
        stage,
        zero=HOST,
        client="sgd",
        model="tied",
        micro_steps=micro_steps,
        steps=first_wrong + 1,
        config={"gradient_clipping": 0.0},  # which would spread the error over all parameters
    )
    plain = offloaded.at(zero={})
    assert _apart(offloaded, plain) == SOMETIMES
    if first_wrong:
        before = first_wrong
        assert _apart(offloaded.at(steps=before), plain.at(steps=before)) == set()


def test_overlap_leaves_out_at_stage_1_without_gradtrace_too() -> None:
    """Overlapped, stage 1 reduces only what gets a gradient in the last micro-step.

    0.19.8, stage_1_and_2.py ``reduce_gradients``: with ``overlap_comm`` the hooks alone put gradients
    into buckets, at the boundary. What a parameter got before and not there is stepped with by its
    owner as it is, one rank's gradient. No upstream report was found.
    """
    overlapped = Setup(
        1,
        zero=OVERLAP,
        client="sgd",
        model="tied",
        micro_steps=3,
        steps=1,
        config={"gradient_clipping": 0.0},
    )
    assert _apart(overlapped, overlapped.at(zero={})) == SOMETIMES
    assert _apart(overlapped.at(micro_steps=4), overlapped.at(micro_steps=4, zero={})) == set()


def test_offload_by_hand_drops_and_carries_without_gradtrace_too() -> None:
    """The offload variety of open-instruct pull request 1498: every backward is taken for a boundary."""
    offloaded = Setup(2, zero=HOST, client="sgd", mode="by_hand", steps=1)
    assert _apart(offloaded, offloaded.at(mode="set_boundary")) == {
        name for name, _ in build("mlp").named_parameters()
    }
