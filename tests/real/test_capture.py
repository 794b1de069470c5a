"""What wrapping does to an engine, and what it refuses: on real DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace
from gradtrace import errors
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.reader import open_trace
from tests.real.training import Setup, initialize, train, train_rank

# stage -> records of one step on rank 0 of a run with four micro-steps and five parameters
COUNTS = {
    1: {
        "loss": 4,
        "local_grad": 20,
        "local_accum": 20,
        "bucket": 1,
        "reduced": 1,
        "accumulated": 1,
    },
    2: {"loss": 4, "local_grad": 20, "bucket": 4, "reduced": 4, "accumulated": 4},
    3: {"loss": 4, "local_grad": 20, "bucket": 4, "partition": 4, "accumulated": 4},
}


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_every_probe_fires_exactly_as_often_as_it_should(stage: int, tmp_path: Path) -> None:
    train(Setup(stage, steps=2), tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    for step in (0, 1):
        found = Counter(r.point for r in trace.ranks[0].records if r.step == step)
        wanted = {**COUNTS[stage], "master_grad": 1, "clipped_grad": 1}
        wanted.update(input=4, weight=5, master_weight=2)
        if stage < 3:  # one for each owned parameter and reduction
            owned = {s.param for s in trace.ranks[0].layouts[0] if s.param >= 0}
            wanted["partition"] = len(owned) * wanted["bucket"]
        assert found == wanted
        assert trace.ranks[0].steps[step].micro_steps == 4


def test_options_choose_steps_parameters_points_and_ranks(tmp_path: Path) -> None:
    train(
        Setup(2, steps=5),
        tmp_path / "trace",
        steps="1:4:2",
        params="0.*",
        points="local_grad,master_grad",
        ranks="1",
    )
    trace = open_trace(tmp_path / "trace")
    assert list(trace.ranks) == [1]
    assert trace.steps == (1, 3)
    assert {r.point for r in trace.ranks[1].records} <= {"local_grad", "master_grad"}
    assert {r.unit for r in trace.ranks[1].records if r.point == "local_grad"} == {
        "0.weight",
        "0.bias",
    }


def test_a_window_that_had_begun_is_partial(tmp_path: Path) -> None:
    def begin(engine: Any) -> None:
        engine.backward(engine(torch.ones(2, 7)).sum())

    for stage in (0, 1, 2, 3):
        setup = Setup(stage, mode="set_boundary", steps=2)

        def before(engine: Any) -> None:
            engine.set_gradient_accumulation_boundary(False)
            begin(engine)

        train(setup, tmp_path / str(stage), before=before)
        steps = open_trace(tmp_path / str(stage)).ranks[0].steps
        assert steps[0].partial, stage
        assert not steps[1].partial, stage
        assert gradtrace.audit(tmp_path / str(stage)).verdict == "pass"


# --- refusals --------------------------------------------------------------------------------------


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.NotAnEngineError, match=r"torch\.nn\.modules\.linear\.Linear"):
        gradtrace.wrap(torch.nn.Linear(2, 2), tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "options",
    ({"params": "no.such.*"}, {"points": "reduced"}),
    ids=("params", "points"),
)
def test_a_plan_that_selects_nothing_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(errors.BadOptionError):
        train(Setup(3), tmp_path / "trace", **options)
    assert not (tmp_path / "trace").exists()


def _override(engine: Any) -> None:
    kind = type(engine.optimizer)
    changed = type("Changed", (kind,), {"average_tensor": lambda self, *a, **k: None})
    engine.optimizer.__class__ = changed


def _unknown_optimizer(engine: Any) -> None:
    class Homegrown(torch.optim.SGD):
        pass

    engine.optimizer = Homegrown(engine.module.parameters(), lr=1.0)


def _lose_method(engine: Any) -> None:
    del type(engine.optimizer).average_tensor


def _lose_argument(engine: Any) -> None:
    type(engine.optimizer).average_tensor = lambda self, bucket: None


def _lose_choice(engine: Any) -> None:
    # Both places of local_accum: the engine's method and the optimizer's that older releases have.
    def lost(self: Any) -> Any:
        raise AttributeError("gone")

    type(engine)._backward_epilogue = property(lost)
    for kind in type(engine.optimizer).__mro__:
        if "backward" in vars(kind):
            del kind.backward  # type: ignore[attr-defined]


def _lose_attribute(engine: Any) -> None:
    del engine.optimizer.averaged_gradients


def _lose_engine_method(engine: Any) -> None:
    del type(engine).is_gradient_accumulation_boundary


MOVED: dict[str, tuple[Callable[[Any], None], type[errors.GradtraceError], str]] = {
    "an optimizer class that nobody declared": (
        _unknown_optimizer,
        errors.UnsupportedEngineError,
        "Homegrown",
    ),
    "an overridden probed method": (_override, errors.UnsupportedEngineError, "average_tensor"),
    "a method that is gone": (
        _lose_method,
        errors.ProbeError,
        "DeepSpeedZeroOptimizer.average_tensor",
    ),
    "a method with other arguments": (
        _lose_argument,
        errors.ProbeError,
        "argument tensor of DeepSpeedZeroOptimizer.average_tensor(bucket)",
    ),
    "an attribute that is gone": (_lose_attribute, errors.ProbeError, "averaged_gradients"),
    "an engine method that is gone": (
        _lose_engine_method,
        errors.ProbeError,
        "engine.is_gradient_accumulation_boundary",
    ),
    "the brackets of a backward pass that are gone": (
        _lose_choice,
        errors.ProbeError,
        "engine._backward_epilogue",
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_gradtrace_does_not_know_is_named_with_version_and_remedy(
    name: str, tmp_path: Path
) -> None:
    plant, kind, named = MOVED[name]
    with pytest.raises(kind) as caught:
        train(Setup(2), tmp_path / "trace", before=plant)
    error = caught.value
    told = f"{error.found} {error.where} {error.expected}"
    assert named in told
    assert f"deepspeed {importlib.metadata.version('deepspeed')}" in told
    assert error.remedy
    assert not (tmp_path / "trace").exists()


def test_a_directory_that_holds_a_trace_is_refused_on_every_rank_and_left_alone(
    tmp_path: Path,
) -> None:
    train(Setup(2, steps=1), tmp_path / "trace")
    before = {p: p.read_bytes() for p in (tmp_path / "trace").rglob("*") if p.is_file()}
    with pytest.raises(errors.TraceExistsError):
        train(Setup(2, steps=1), tmp_path / "trace")
    assert {p: p.read_bytes() for p in (tmp_path / "trace").rglob("*") if p.is_file()} == before


def _refused_everywhere(rank: int, out_dir: Path) -> str:
    engine = initialize(Setup(2))
    try:
        gradtrace.wrap(engine, out_dir)
    except errors.GradtraceError as error:
        return error.slug
    return "wrapped"


def test_a_refusal_on_rank_0_reaches_the_others_at_once(tmp_path: Path) -> None:
    (tmp_path / "rank-00001").mkdir()
    assert run_ranks(2, _refused_everywhere, tmp_path) == ["trace_exists", "trace_exists"]


# --- trouble ---------------------------------------------------------------------------------------


def _break_probe(engine: Any) -> None:
    engine.optimizer.get_param_id_calls = 0
    original = engine.optimizer.get_param_id

    def failing(param: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("gradtrace") and engine.global_steps >= 1:
            raise RuntimeError("planted")
        return original(param)

    engine.optimizer.get_param_id = failing


def test_an_exception_inside_a_probe_becomes_a_gap_and_training_goes_on_unchanged(
    tmp_path: Path,
) -> None:
    setup = Setup(2)
    assert train(setup, tmp_path / "trace", before=_break_probe, on_error="disarm") == train(
        setup, None
    )
    trace = open_trace(tmp_path / "trace")
    assert [gap.reason for gap in trace.ranks[0].gaps] == ["probe_failed"]
    assert "planted" in trace.ranks[0].gaps[0].detail
    assert gradtrace.audit(tmp_path / "trace").verdict == "inconclusive"


def test_on_error_raise_stops_the_training(tmp_path: Path) -> None:
    with pytest.raises(errors.CaptureError, match="planted"):
        train(Setup(2), tmp_path / "trace", before=_break_probe, on_error="raise")


def test_a_byte_budget_leaves_gaps_not_silence(tmp_path: Path) -> None:
    train(Setup(2), tmp_path / "trace", max_bytes=4000)
    trace = open_trace(tmp_path / "trace")
    assert {gap.reason for gap in trace.ranks[0].gaps} == {"over_budget"}
    assert gradtrace.audit(tmp_path / "trace").verdict == "inconclusive"


def _wrong_call(rank: int, out_dir: Path | None) -> str:
    setup = Setup(2, ranks=1)
    engine = initialize(setup)
    tracer = None if out_dir is None else gradtrace.wrap(engine, out_dir)
    try:
        engine.backward(engine(torch.ones(2, 7)).sum(), no_such_argument=True)
    except TypeError as error:
        return str(error)
    finally:
        if tracer is not None:
            tracer.close()
    return "accepted"


def test_a_wrong_call_of_backward_fails_as_it_does_untraced(tmp_path: Path) -> None:
    traced = run_ranks(1, _wrong_call, tmp_path / "trace")
    assert traced == run_ranks(1, _wrong_call, None)
    assert "no_such_argument" in traced[0]


def _full_disk(rank: int, setup: Setup, out_dir: Path, allowed: int) -> Any:
    from gradtrace.trace import writer

    original = writer.write_whole
    calls = [0]

    def failing(path: Path, chunks: Any) -> int:
        calls[0] += path.suffix == ".safetensors"
        if calls[0] > allowed and path.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        return original(path, chunks)

    writer.write_whole = failing
    writer.SEAL_EVERY_S = 0.0
    writer.RankWriter.__init__.__kwdefaults__["seal_every_s"] = 0.0
    return train_rank(rank, setup, out_dir, {"on_error": "disarm"}, None)


@pytest.mark.parametrize("allowed", (0, 1, 2))
def test_a_full_disk_never_touches_the_training_and_is_no_pass(
    allowed: int, tmp_path: Path
) -> None:
    setup = Setup(2)
    assert run_ranks(2, _full_disk, setup, tmp_path / "trace", allowed) == train(setup, None)
    trace = open_trace(tmp_path / "trace")
    assert trace.steps == tuple(range(allowed + 1))  # what could not be written is all gaps
    assert any(gap.reason == "write_failed" for gap in trace.ranks[0].gaps)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "inconclusive"
    assert any("write_failed" in note for note in result.notes)


SCRIPT = """
    import os, sys, torch
    from pathlib import Path
    from gradtrace.testing.ranks import prepare_rank, import_once
    import_once()
    prepare_rank(0, 1, Path(sys.argv[1]) / "store")
    import gradtrace
    from tests.real.training import Setup, initialize, one_step
    setup = Setup(2, ranks=1)
    engine = initialize(setup)
    gradtrace.wrap(engine, Path(sys.argv[1]) / "trace")
    for _ in range(2):
        one_step(engine, setup, torch.Generator().manual_seed(0))
    if len(sys.argv) > 2:
        raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", ((), ("3",)))
def test_leaving_the_interpreter_seals_the_trace(status: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), str(tmp_path), *status],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == int(status[0] if status else 0), done.stderr
    trace = open_trace(tmp_path / "trace")
    assert trace.steps == (0, 1)
    assert trace.ranks[0].closed == "closed"
