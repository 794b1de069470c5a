"""Stage 3 in every setting: exact records, and faults planted on each path found by the right law."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace
from gradtrace import errors
from gradtrace.capture.adapters.select import signature_of
from gradtrace.testing.ranks import RankError
from gradtrace.trace.reader import open_trace
from tests.real.catalog.zero3 import ACCUM32, AUTOCAST, CPU, LEAF, PARAM_CPU, WHOLE
from tests.real.expected import hops
from tests.real.training import Setup, train

ALL = (0, 1, 2, 3)  # the micro-steps of a step
LAST = (3,)
Wanted = dict[str, tuple[int, tuple[int, ...]]]  # point -> (records, in which micro-steps)
EACH: Wanted = {
    "local_grad": (5, ALL),
    "bucket": (1, ALL),
    "partition": (1, ALL),
    "accumulated": (1, ALL),
}
ONCE: Wanted = {
    "local_grad": (5, ALL),
    "local_accum": (5, ALL),
    "bucket": (1, LAST),
    "partition": (1, LAST),
    "accumulated": (1, LAST),
}
# Backward hands over 4.weight (25 elements), 2.weight (165), 2.bias (5), 0.weight (231), 0.bias (33): no
# two neighbours fit into a bucket of 60.
SMALL: Wanted = {
    "local_grad": (5, ALL),
    **dict.fromkeys(("bucket", "partition", "accumulated"), (5, ALL)),
}
# name -> (setup, records, optimizer sub-groups)
COUNTS: dict[str, tuple[Setup, Wanted, int]] = {
    "default": (Setup(3), EACH, 1),
    "without reduce-scatter": (Setup(3, zero=WHOLE), EACH, 1),
    "small buckets": (Setup(3, zero={"reduce_bucket_size": 60}), SMALL, 1),
    "small buckets, not scattered": (Setup(3, zero={**WHOLE, "reduce_bucket_size": 60}), SMALL, 1),
    "offload": (Setup(3, zero=CPU, client="adamw"), EACH, 1),
    "offload, fp32 accumulation": (
        Setup(3, zero=CPU, client="adamw", bf16=True, config=ACCUM32),
        EACH,
        1,
    ),
    "offload, sub-groups": (Setup(3, zero={**CPU, "sub_group_size": 100}, client="sgd"), EACH, 3),
    "offload, unmanaged": (Setup(3, zero=CPU, client="adamw", mode="unmanaged"), EACH, 1),
    "both on the CPU": (Setup(3, zero={**CPU, **PARAM_CPU}, client="adamw"), EACH, 1),
    "coalesced": (Setup(3, mode="coalesce"), ONCE, 1),
    "coalesced, offload": (Setup(3, mode="coalesce", zero=CPU, client="sgd"), ONCE, 1),
    "autocast": (Setup(3, config=AUTOCAST), EACH, 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_probe_fires_exactly_as_often_as_it_should(name: str, tmp_path: Path) -> None:
    setup, wanted, sub_groups = COUNTS[name]
    train(setup.at(steps=2), tmp_path / "trace")
    for rank in open_trace(tmp_path / "trace").ranks.values():
        expected: Counter[tuple[str, int | None]] = Counter(
            {("master_grad", None): sub_groups, ("clipped_grad", None): sub_groups}
        )
        for point, (count, micro_steps) in {"loss": (1, ALL), **wanted}.items():
            expected.update({(point, micro_step): count for micro_step in micro_steps})
        for step in (0, 1):
            assert hops(rank.records, step) == expected, (name, rank.header.rank)
            assert rank.steps[step].micro_steps == 4


def test_autocast_has_a_bucket_for_each_communication_dtype(tmp_path: Path) -> None:
    train(Setup(3, config=AUTOCAST, model="tied", steps=1), tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    scale = next(p.index for p in trace.manifest.parameters if p.name == "scale")
    for rank in trace.ranks.values():
        buckets = [r for r in rank.records if r.point == "bucket"]
        assert Counter(r.unit for r in buckets) == {"bfloat16": 4, "float32": 4}
        for record in buckets:
            assert record.dtype == record.facts["comm_dtype"] == record.unit
            held = {span.param for span in trace.layout(record)}
            assert (scale in held) == (record.unit == "float32")


def test_a_leaf_module_reduces_zeros_for_what_it_did_not_use(tmp_path: Path) -> None:
    train(Setup(3, model="leaf", zero=LEAF, steps=1), tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    names = [p.name for p in trace.manifest.parameters]
    unused = {names.index("experts.choices.0.weight"), names.index("experts.choices.1.weight")}
    records = trace.ranks[0].records
    local = [r for r in records if r.point == "local_grad" and names.index(r.unit) in unused]
    reduced = [
        span.param for r in records if r.point == "bucket" for span in trace.layout(r)
        if span.param in unused
    ]  # fmt: skip
    assert len(local) == 4  # one expert a micro-step
    assert len(reduced) == 8  # and both reduced
    assert gradtrace.audit(tmp_path / "trace").verdict == "pass"


def test_the_way_to_form_the_mean_is_stated(tmp_path: Path) -> None:
    for at, (config, factor) in enumerate(
        (({"gradient_predivide_factor": 3.0}, 3.0), ({"prescale_gradients": True}, 1.0))
    ):
        train(Setup(3, zero=WHOLE, config=config, steps=1), tmp_path / str(at))
        records = open_trace(tmp_path / str(at)).ranks[0].records
        facts = [r.facts for r in records if r.point == "bucket"]
        assert {(fact["division"], fact["predivide"]) for fact in facts} == {("wire", factor)}


def test_wrapping_inside_a_coalesced_window_is_partial(tmp_path: Path) -> None:
    def before(engine: Any) -> None:
        with engine.coalesce_grad_reduction():
            engine.backward(engine(torch.ones(2, 7)).sum())

    train(Setup(3, mode="coalesce", steps=2), tmp_path / "trace", before=before)
    steps = open_trace(tmp_path / "trace").ranks[0].steps
    assert [steps[step].partial for step in (0, 1)] == [True, False]


# --- planted faults --------------------------------------------------------------------------------


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def changed(*args: Any) -> Any:
        return change(original, *args)

    # Probes look at the signature.
    changed.__signature__ = signature_of(original)  # type: ignore[attr-defined]
    setattr(owner, name, changed)


def _overwrite_in_micro_step_2(engine: Any) -> None:
    """Copy the third reduced shard over the sum, as a wrong micro-step count would."""
    optimizer = engine.optimizer

    def change(original: Callable[..., Any], *args: Any) -> Any:
        kept = optimizer.micro_step_id
        if kept == 2:
            optimizer.micro_step_id = 0
        try:
            return original(*args)
        finally:
            optimizer.micro_step_id = kept

    _wrapped(optimizer, "partition_grads", change)


def _skip_the_boundary_copy_on_rank_1(engine: Any) -> None:
    def change(original: Callable[..., Any], param: Any, *args: Any) -> Any:
        engine.optimizer.norm_for_param_grads[engine.optimizer.get_param_id(param)] = 0.0
        return original(param, *args) if engine.global_rank != 1 else None

    _wrapped(engine.optimizer, "_offload_grad_partition_at_boundary", change)


def _lose_rank_0(engine: Any) -> None:
    def change(original: Callable[..., Any], params: Any, *args: Any) -> Any:
        if engine.global_rank == 0:
            for param in params:
                param.grad.zero_()
        return original(params, *args)

    _wrapped(engine.optimizer, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", change)


def _double_a_shard_in_step_1(engine: Any) -> None:
    def change(original: Callable[..., Any], params: Any, shards: Any) -> Any:
        doubled = [2 * shard if engine.global_steps == 1 else shard for shard in shards]
        return original(params, doubled)

    _wrapped(engine.optimizer, "partition_grads", change)


def _clear_after_micro_step_1(engine: Any) -> None:
    count = [0]

    def change(original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        count[0] += 1
        if count[0] == 2:
            for param in engine.module.parameters():
                param.grad.zero_()
        return result

    _wrapped(engine, "_backward_epilogue", change)


def _clip_twice_on_rank_1(engine: Any) -> None:
    def change(original: Callable[..., Any], number: int, norm: Any) -> Any:
        original(number, norm)
        if engine.global_rank == 1:
            engine.optimizer.fp32_partitioned_groups_flat[number].grad.mul_(0.5)

    _wrapped(engine.optimizer, "unscale_and_clip_grads", change)


# name -> (setup, fault, law, cause, (step, micro_step), rank)
FAULTS: dict[str, tuple[Any, ...]] = {
    "offload, a middle micro-step lost": (
        Setup(3, zero=CPU, client="adamw"), _overwrite_in_micro_step_2,
        "accumulate", "dropped_micro_steps", (0, 2), None,
    ),
    "offload, sub-groups, the boundary's copy lost": (
        Setup(3, zero={**CPU, "sub_group_size": 100}, client="sgd"),
        _skip_the_boundary_copy_on_rank_1, "master", "zeroed", (0, None), 1,
    ),
    "offload, clipped twice": (
        Setup(3, zero=CPU, client="adamw", bf16=True), _clip_twice_on_rank_1,
        "unscale_clip", "scaled", (0, None), 1,
    ),
    "autocast, a rank missing": (
        Setup(3, config=AUTOCAST, ranks=3), _lose_rank_0,
        "reduce", "rank_missing", (0, 0), None,
    ),
    "offload_param, a shard counted twice": (
        Setup(3, zero=PARAM_CPU, bf16=True), _double_a_shard_in_step_1,
        "accumulate", "double_counted", (1, 0), None,
    ),
    "coalesced, the first half lost": (
        Setup(3, mode="coalesce"), _clear_after_micro_step_1,
        "accumulate_local", "dropped_micro_steps", (0, 2), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_law(name: str, tmp_path: Path) -> None:
    setup, fault, law, cause, place, rank = FAULTS[name]
    train(setup.at(steps=2), tmp_path / "bad", before=fault)
    first = gradtrace.audit(tmp_path / "bad").first
    assert first is not None
    assert (first.law, first.cause) == (law, cause), first
    assert (first.step, first.micro_step) == place
    assert first.rank == rank


def test_the_rank_that_was_lost_is_blamed(tmp_path: Path) -> None:
    setup = Setup(3, config=AUTOCAST, ranks=3, steps=1)
    train(setup, tmp_path / "bad", before=_lose_rank_0)
    train(setup, tmp_path / "good")
    compared = gradtrace.diff(tmp_path / "good", tmp_path / "bad")
    assert compared.blame is not None
    assert (compared.blame.side, compared.blame.law) == ("candidate", "reduce")
    assert compared.blame.rank == 0


# --- refusals --------------------------------------------------------------------------------------


def _muon(engine: Any) -> None:
    engine.optimizer.use_muon = True  # making one compiles FusedAdam, 70 s


def _nvme(engine: Any) -> None:
    engine.optimizer.swap_optimizer = True  # making one compiles async_io, which wants libaio


def _nvme_params(engine: Any) -> None:
    engine.optimizer.params_in_nvme_and_cpu = True


def _super_offload(engine: Any) -> None:
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

    engine.optimizer.__class__ = SuperOffloadOptimizer_Stage3  # its constructor wants CUDA


def _mics(engine: Any) -> None:
    kind = type(engine.optimizer)  # gone in 0.19.8; up to 0.19.7 it overrides partition_grads
    changed = {"partition_grads": lambda self, *args: None}
    engine.optimizer.__class__ = type("MiCS_Optimizer", (kind,), changed)


def _unknown(engine: Any) -> None:
    kind = type(engine.optimizer)
    changed = {"partition_grads": lambda self, *args: None}
    engine.optimizer.__class__ = type("OwnStage3", (kind,), changed)


def _own_group(engine: Any) -> None:
    alone = [torch.distributed.new_group([rank]) for rank in range(2)]
    next(engine.module.parameters()).ds_process_group = alone[engine.global_rank]


REFUSED = {
    "Muon": _muon,
    "offload to NVMe": (_nvme),
    "to NVMe": _nvme_params,
    "super_offload": _super_offload,
    "MiCS": _mics,
    "OwnStage3": _unknown,
    "a group of their own": _own_group,
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_a_cpu_cannot_build_is_refused_by_what_it_is(found: str, tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedEngineError) as caught:
        train(Setup(3), tmp_path / "trace", before=REFUSED[found])
    assert found in caught.value.found
    assert not (tmp_path / "trace").exists()


def _lose_partition_grads(engine: Any) -> None:
    del type(engine.optimizer).partition_grads


def test_a_deepspeed_whose_internals_moved_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.ProbeError, match=r"partition_grads in deepspeed \d"):
        train(Setup(3), tmp_path / "trace", before=_lose_partition_grads)
    assert not (tmp_path / "trace").exists()


def test_deepspeed_itself_refuses_no_sync() -> None:
    with pytest.raises(RankError, match="no_sync context manager is incompatible"):
        train(Setup(3, mode="no_sync"), None)


# --- DeepSpeed's own CPU optimizer -----------------------------------------------------------------

NATIVE: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
LOW = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.fixture(scope="module")
def cpu_adam() -> None:
    """Compile DeepSpeed's CPU Adam once, before two ranks wait for each other's compilers."""
    if os.environ.get("GRADTRACE_CATALOG") != "whole":
        pytest.skip("compiling DeepSpeed's op takes minutes: GRADTRACE_CATALOG=whole")
    script = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=900)


@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize(
    "setup",
    (
        Setup(
            3,
            zero={"offload_optimizer": {"device": "cpu", "ratio": 0.3}, "sub_group_size": 60},
            config=NATIVE,
        ),
        Setup(3, bf16=True, zero=CPU, config={**NATIVE, "gradient_clipping": 0.01, "bf16": LOW}),
    ),
    ids=("partly offloaded", "bf16 master gradients"),
)
def test_deepspeeds_cpu_adam_is_traced_as_it_trains_untraced(setup: Setup, tmp_path: Path) -> None:
    assert train(setup, tmp_path / "trace") == train(setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", (result.first, result.notes)
    assert result.laws["unscale_clip"].checked > 0
    master = {r.dtype for r in open_trace(tmp_path / "trace").ranks[0].records
              if r.point == "master_grad"}  # fmt: skip
    assert master == {"bfloat16" if setup.bf16 else "float32"}
