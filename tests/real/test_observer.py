"""What wrapping leaves behind, and when it may happen: for each family of configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace
from gradtrace import errors
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.reader import open_trace
from tests.real.catalog import ENTRIES
from tests.real.catalog.entry import Entry
from tests.real.training import Setup, initialize, one_step, weights


def family(entry: Entry) -> tuple[Any, ...]:
    """Return what decides which code of DeepSpeed and which adapter an engine meets."""
    setup = entry.setup
    return (
        setup.stage,
        setup.dtype,
        setup.client == "fused",
        "data_types" in setup.config,
        "torch_autocast" in setup.config,
        "offload_optimizer" in setup.zero,
        "offload_param" in setup.zero,
    )


CLEAN = [
    entry
    for entry in ENTRIES
    if entry.refused is None
    and entry.finding is None
    and (entry.setup.mode, entry.setup.model, entry.setup.ranks) == ("managed", "mlp", 2)
    and not entry.setup.overflow_in
]
# The first entry of each family.
FAMILIES = list({family(entry): entry for entry in reversed(CLEAN)}.values())[::-1]
if os.environ.get("GRADTRACE_CATALOG") != "whole":  # continuous integration has 20 minutes
    FAMILIES = FAMILIES[::4]
SETUPS = [entry.setup for entry in FAMILIES]
# Each beside the next, so that every family meets another in one process.
NEIGHBOURS = list(zip(SETUPS, [*SETUPS[1:], SETUPS[0]], strict=True))


def test_every_family_is_there() -> None:
    adapters = {(entry.setup.stage, entry.setup.dtype) for entry in CLEAN}
    assert {setup.stage for setup in SETUPS} == {stage for stage, _ in adapters} >= {1, 2, 3}
    assert {setup.dtype for setup in SETUPS} == {dtype for _, dtype in adapters}


# --- attributes ------------------------------------------------------------------------------------


def everything(engine: Any) -> dict[str, int]:
    """Return the identity of all that wrapping could reach: attributes, class members, hooks."""
    import deepspeed

    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    held = {"engine": engine, "optimizer": optimizer, "base": base}
    held.update({f"module {name}": module for name, module in engine.module.named_modules()})
    found = {"deepspeed.initialize": id(deepspeed.initialize)}
    for label, thing in held.items():
        for kind in type(thing).__mro__:
            found |= {f"{label} {kind.__name__}.{n}": id(v) for n, v in vars(kind).items()}
        for name, value in vars(thing).items():
            found[f"{label}.{name}"] = id(value)
            if "hooks" in name and isinstance(value, dict):
                found |= {f"{label}.{name}[{key}]": id(hook) for key, hook in value.items()}
    for name, parameter in engine.module.named_parameters():
        found |= {f"parameter {name}.{n}": id(v) for n, v in vars(parameter).items()}
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            known = getattr(parameter, hooks) or {}
            found |= {f"parameter {name}.{hooks}[{key}]": id(hook) for key, hook in known.items()}
    return found


def replaced(engine: Any) -> dict[str, Any]:
    """Return what must be as before even after steps: callables, hooks, and the names of the rest."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    return {
        "callables": [
            {name: value for name, value in vars(thing).items() if callable(value)}
            for thing in (engine, optimizer, base)
        ],
        "engine": sorted(vars(engine)),
        "module hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in engine.module.modules()
        ],
        "hooks": [len(p._backward_hooks or {}) for p in engine.module.parameters()],
    }


def _lives(rank: int, setup: Setup, out_dir: Path) -> list[str]:
    """Wrap, close, train, wrap twice, close, wrap again; return what was found amiss."""
    engine = initialize(setup)
    data = torch.Generator().manual_seed(0)
    amiss: list[str] = []
    before = everything(engine)
    gradtrace.wrap(engine, out_dir / "unused").close()
    after = everything(engine)
    amiss += [name for name in {*before, *after} if before.get(name) != after.get(name)]
    one_step(engine, setup, data)  # what DeepSpeed makes at its first step is made
    names = replaced(engine)
    for number in range(2):
        with gradtrace.wrap(engine, out_dir / str(number), on_error="raise") as tracer:
            if replaced(engine) == names:
                amiss.append("wrapping replaced nothing")
            try:
                gradtrace.wrap(engine, out_dir / "twice")
            except errors.AlreadyWrappedError:
                pass
            else:
                amiss.append("wrapped twice")
            one_step(engine, setup, data)
        if replaced(engine) != names:
            amiss.append(f"closing left something: {number}")
        tracer.close()
        one_step(engine, setup, data)
    return amiss


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_closing_leaves_nothing_and_a_second_tracer_is_refused_or_as_good_as_the_first(
    setup: Setup, tmp_path: Path
) -> None:
    assert run_ranks(setup.ranks, _lives, setup, tmp_path) == [[]] * setup.ranks
    assert not (tmp_path / "twice").exists()
    for name in ("0", "1"):
        trace = open_trace(tmp_path / name)
        assert trace.steps == (0,)
        assert not trace.ranks[0].steps[0].partial
        result = gradtrace.audit(trace)
        assert result.verdict == "pass", (name, result.first, result.notes)


def test_the_comparison_of_attributes_sees_each_kind_of_leftover() -> None:
    assert run_ranks(1, _leftovers) == [5]


def _leftovers(rank: int) -> int:
    engine = initialize(Setup(2, ranks=1))
    before = everything(engine)
    parameter = next(engine.module.parameters())
    engine.step = engine.step
    engine.optimizer.step = engine.optimizer.step
    parameter.register_hook(lambda gradient: None)
    engine.module.register_forward_hook(lambda *_: None)
    type(engine.optimizer).average_tensor = lambda *_: None
    after = everything(engine)
    return sum(before.get(name) != value for name, value in after.items())


# --- time ------------------------------------------------------------------------------------------


def micro_step(engine: Any, setup: Setup, data: torch.Generator) -> float:
    """Run one micro-step and let DeepSpeed step where it counts a boundary."""
    rank = torch.distributed.get_rank()
    inputs = torch.randn(setup.ranks * setup.batch, 7, generator=data)[rank :: setup.ranks]
    targets = torch.randn(setup.ranks * setup.batch, 5, generator=data)[rank :: setup.ranks]
    output = engine(inputs.to(setup.dtype))
    loss = torch.nn.functional.mse_loss(output, targets.to(output.dtype))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _late(rank: int, setup: Setup, begin: int, out_dir: Path | None) -> Any:
    engine = initialize(setup)
    data = torch.Generator().manual_seed(7)
    losses = [micro_step(engine, setup, data) for _ in range(begin)]
    tracer = None if out_dir is None else gradtrace.wrap(engine, out_dir, on_error="raise")
    losses += [micro_step(engine, setup, data) for _ in range(3 * setup.micro_steps - begin)]
    if tracer is not None:
        tracer.close()
    return losses, float(engine.get_global_grad_norm() or 0.0), weights(engine, setup)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_wrapping_in_the_middle_of_a_later_window_is_partial_and_changes_nothing(
    setup: Setup, tmp_path: Path
) -> None:
    begin = setup.micro_steps + setup.micro_steps // 2
    untraced = run_ranks(setup.ranks, _late, setup, begin, None)
    assert run_ranks(setup.ranks, _late, setup, begin, tmp_path / "trace") == untraced
    steps = open_trace(tmp_path / "trace").ranks[0].steps
    middle = begin % setup.micro_steps != 0
    assert [steps[step].partial for step in steps] == [middle, False]
    assert steps[0].micro_steps == setup.micro_steps - begin % setup.micro_steps
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", (result.first, result.notes)


def _two(rank: int, setups: tuple[Setup, Setup], out_dir: Path | None) -> Any:
    engines = [initialize(setup) for setup in setups]
    data = [torch.Generator().manual_seed(number) for number in (1, 2)]
    tracers = [
        gradtrace.wrap(engine, out_dir / str(number), on_error="raise")
        for number, engine in enumerate(engines)
        if out_dir is not None
    ]
    losses = []
    for _ in range(2 * max(setup.micro_steps for setup in setups)):
        for engine, setup, generator in zip(engines, setups, data, strict=True):
            losses.append(micro_step(engine, setup, generator))
    for tracer in tracers:
        tracer.close()
    return losses, [weights(*pair) for pair in zip(engines, setups, strict=True)]


@pytest.mark.parametrize(
    "setups", NEIGHBOURS, ids=lambda setups: " and ".join(s.name for s in setups)
)
def test_two_engines_that_train_in_turns_in_one_process_get_a_sound_trace_each(
    setups: tuple[Setup, Setup], tmp_path: Path
) -> None:
    assert run_ranks(2, _two, setups, tmp_path) == run_ranks(2, _two, setups, None)
    runs = [open_trace(tmp_path / name) for name in ("0", "1")]
    assert runs[0].manifest.run_id != runs[1].manifest.run_id
    for run in runs:
        assert len(run.steps) >= 2
        result = gradtrace.audit(run)
        assert result.verdict == "pass", (result.first, result.notes)
