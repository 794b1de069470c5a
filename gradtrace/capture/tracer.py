"""Wrap an engine: install the probes, keep the clock, seal and restore at the end."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gradtrace.capture import agreement, describe
from gradtrace.capture.adapters import select
from gradtrace.capture.adapters.declare import Call, Model
from gradtrace.capture.adapters.optimizer_state import states
from gradtrace.capture.backward import BackwardWatch
from gradtrace.capture.batch import describe_batch
from gradtrace.capture.clock import StepClock
from gradtrace.capture.describe import Subject
from gradtrace.capture.options import SECTION, CaptureOptions, choose_options
from gradtrace.capture.patching import Patches, add_hook
from gradtrace.capture.queue import WriterQueue
from gradtrace.capture.recorder import Recorder
from gradtrace.capture.snapshot import Sighting, whole
from gradtrace.errors import AlreadyWrappedError
from gradtrace.trace.schema import MANIFEST, rank_dir

_open: list[Tracer] = []


def wrap(
    engine: Any,
    out_dir: str | Path,
    *,
    steps: str | int | Iterable[int] | None = None,
    params: str | Sequence[str] | None = None,
    points: str | Sequence[str] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    mode: str | None = None,
    max_bytes: int | None = None,
    on_error: str | None = None,
) -> Tracer:
    """Trace a DeepSpeed engine from now until the tracer is closed.

    Call it on every rank, after ``deepspeed.initialize``. Everything is resolved before anything is
    replaced; closing the tracer (or leaving its ``with`` block, or the interpreter) seals the trace
    and restores every attribute.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        out_dir: directory of the new trace; it must not hold one.
        steps, params, points, ranks, mode, max_bytes, on_error: see `parse_options`. ``None`` leaves an
            option to its ``GRADTRACE_*`` variable, then to the ``"gradtrace"`` section of the ds_config.

    Raises:
        NotAnEngineError, UnsupportedEngineError, ProbeError, BadOptionError, TraceExistsError,
        AlreadyWrappedError: nothing was replaced, nothing was overwritten.
    """
    given = {
        "steps": steps,
        "params": params,
        "points": points,
        "ranks": ranks,
        "mode": mode,
        "max_bytes": max_bytes,
        "on_error": on_error,
    }

    def prepare() -> tuple[CaptureOptions, Subject]:
        if tracer_of(engine) is not None:
            raise AlreadyWrappedError(
                "an engine that is being traced already",
                where="wrap(engine, ...)",
                expected="one tracer an engine",
                remedy="Close the first tracer before wrapping again; under 'gradtrace run', which wraps "
                "every engine, take the script's own wrap() out.",
            )
        select.check_engine(engine)
        options = choose_options(given, select.ds_config(engine).get(SECTION))
        subject = describe.examine(engine)
        describe.check_plan(subject, options)
        return options, subject

    return agreement.guarded(prepare, lambda ready: Tracer(out_dir, *ready))


def tracer_of(engine: Any) -> Tracer | None:
    """Return the open tracer of an engine, or ``None``."""
    return next((tracer for tracer in _open if tracer.traces(engine)), None)


class Tracer:
    """Record one engine's gradients; made by `wrap`.

    Attributes:
        path: the trace directory.
        rank: this process's global rank.
    """

    def __init__(self, out_dir: str | Path, options: CaptureOptions, subject: Subject) -> None:
        self.path = Path(out_dir)
        self.rank = torch.distributed.get_rank()
        self._options = options
        self._planned = options.ranks or frozenset(range(torch.distributed.get_world_size()))
        self._subject = subject
        self._model = subject.model
        self._pid = os.getpid()
        self._clock = StepClock()
        self._patches = Patches()
        self._closed = False
        self._partial = subject.adapter.window_open(subject.model)
        self._loaded = False  # a checkpoint, since the step before
        self._bypassed_in: int | None = None
        self._carried: dict[int, bool] = {}
        self._reported: tuple[Any, ...] = ()
        self._weighed: int | None = None  # the step whose weights are recorded
        self._accumulates = "local_accum" in options.points and "local_accum" not in subject.absent
        run_id = agreement.agree_on_run(
            self.path, options, lambda run: describe.manifest(run, subject, options)
        )
        _open.append(self)
        self._queue: WriterQueue | None = None
        if options.ranks is not None and self.rank not in options.ranks:
            return
        header, layouts = describe.header(self.rank, subject, options)
        self._queue = WriterQueue(agreement.claim_rank(self.path, run_id, header, layouts))
        names = subject.model.names
        captured = frozenset(i for i, name in enumerate(names) if options.selects_param(name))
        self._recorder = Recorder(self.rank, options, self._clock, captured, self._queue)
        self._install(captured)
        atexit.register(self.close)

    def __enter__(self) -> Tracer:
        """Return the tracer; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the tracer, noting an exception that ended the block."""
        self.close("closed" if kind is None else f"left by {kind.__name__}")

    def close(self, reason: str = "closed") -> None:
        """Seal the trace and restore every attribute; calling it again does nothing."""
        if self._closed or os.getpid() != self._pid:
            return  # a forked child inherits the tracer, but not the writer thread
        self._closed = True
        if self in _open:
            _open.remove(self)
        if self._queue is None:
            return
        self._recorder.stop()
        atexit.unregister(self.close)
        foreign = self._patches.restore()
        if foreign:
            self._recorder.warn(f"{', '.join(foreign)}: replaced by others meanwhile, left so")
        self._queue.close(reason)
        if self._queue.failure is not None:
            self._recorder.warn(f"the trace is incomplete: {self._queue.failure}")

    def traces(self, engine: Any) -> bool:
        """Say whether this is the tracer of an engine."""
        return self._model.engine is engine

    def report(
        self,
        source: str,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        steps: int = 1,
        framework_step: int | None = None,
    ) -> None:
        """Record what a framework tells its user of the step that ended last, to be compared.

        Reports of steps that are not recorded are left out.

        Args:
            source: who reports, such as ``transformers.Trainer``.
            loss: averaged over ranks and ``steps``, summed over micro-steps as they are weighted.
            grad_norm: global norm of the gradient before clipping.
            lr: learning rate of the first group.
            steps: over how many steps the loss is averaged.
            framework_step: the step as the framework counts.
        """
        told = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
        values = {name: float(value) for name, value in told.items() if value is not None}
        report = (self.step, source, values, steps)
        if report == self._reported:  # a second callback in one Trainer
            return
        self._reported = report
        if values and not self._closed and self._queue is not None:
            self._recorder.report(values, steps=steps, source=source, framework_step=framework_step)

    def whole(self) -> bool:
        """Say whether the directories of all planned ranks are here, as on a shared file system."""
        return (self.path / MANIFEST).is_file() and all(
            (self.path / rank_dir(rank)).is_dir() for rank in self._planned
        )

    @property
    def step(self) -> int:
        """Return the step that is open, counted from 0 by the tracer."""
        return self._clock.step

    # --- probes --------------------------------------------------------------------------------

    def _install(self, captured: frozenset[int]) -> None:
        model = self._model
        by_method: dict[tuple[int, str], list[select.Resolved]] = {}
        for resolved in self._subject.probes:
            if resolved.probe.point in self._options.points:
                place = (id(resolved.owner), resolved.probe.method)
                by_method.setdefault(place, []).append(resolved)
        for (_, method), probes in by_method.items():
            self._patches.wrap(probes[0].owner, method, self._around(probes))
        for index in sorted(captured):
            if model.parameters[index].requires_grad:
                hook = self._local_hook(index)
                self._patches.keep_handle(add_hook(model.parameters[index], hook))
        watch = BackwardWatch(
            model,
            self._clock,
            on_forward=self._begin_forward,
            on_begin=self._begin_backward,
            on_end=self._end_backward,
            on_failure=self._fail_backward,
            on_bypass=self._bypass_engine,
            recording=lambda: self._recorder.recording,
            guard=self._recorder.guard,
        )
        watch.install(self._patches)
        self._patches.wrap(model.optimizer, "step", self._around_step)
        if callable(getattr(model.engine, "load_checkpoint", None)):
            self._patches.wrap(model.engine, "load_checkpoint", self._around_load)

    def _around(self, probes: list[select.Resolved]) -> Callable[..., Any]:
        before = [r for r in probes if r.probe.when == "before"]
        after = [r for r in probes if r.probe.when == "after"]
        recorder = self._recorder

        def around(
            original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if not recorder.recording:
                return original(*args, **kwargs)
            for resolved in before:
                self._see(resolved, args, kwargs, None)
            result = original(*args, **kwargs)
            for resolved in after:
                self._see(resolved, args, kwargs, result)
            return result

        return around

    def _see(
        self, resolved: select.Resolved, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        probe = resolved.probe
        if not self._recorder.recording:
            return
        with self._recorder.guard(probe.point):
            call = Call(resolved.signature.bind(*args, **kwargs).arguments, result)
            stream = None if probe.stream is None else probe.stream(self._model)
            with contextlib.nullcontext() if stream is None else _on_stream(stream):
                for sighting in probe.sight(self._model, call):
                    if probe.point == "local_accum":
                        self._recorder.record(probe.point, self._with_carry(sighting))
                    else:
                        self._recorder.record(probe.point, sighting)

    def _with_carry(self, sighting: Sighting) -> Sighting:
        """Add whether the buffer held anything before this micro-step's first gradient."""
        index = sighting.parts[0][1][0].param
        return dataclasses.replace(sighting, facts={"carry": self._carried.get(index, True)})

    def _local_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        unit = self._model.names[index]
        parameter = self._model.parameters[index]
        recorder, adapter = self._recorder, self._subject.adapter
        wanted = "local_grad" in self._options.points

        def hook(gradient: torch.Tensor) -> None:
            # torch.autograd.grad() on parameters fires this hook too, and is no backward pass.
            if not recorder.recording or not self._clock.in_backward:
                return
            with recorder.guard("local_grad", unit):
                if self._accumulates and index not in self._carried:
                    self._carried[index] = adapter.carries(self._model, parameter)
                if wanted:
                    pieces = whole(index, gradient)
                    recorder.record("local_grad", Sighting(unit, ((gradient, pieces),)))

        return hook

    # --- the clock's events --------------------------------------------------------------------

    def _begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See what a forward pass that may be trained on begins with; return its batch's facts."""
        self._see_weights()
        if "input" in self._options.points:
            with self._recorder.guard("input"):
                return describe_batch(args, kwargs)
        return None

    def _begin_backward(self) -> None:
        self._carried.clear()
        self._see_weights()  # of a model that is not called through the engine

    def _see_weights(self) -> None:
        recorder, step = self._recorder, self._clock.step
        if not recorder.recording or self._weighed == step:
            return
        self._weighed = step
        self._see_all("weight", self._subject.adapter.weights)

    def _see_masters(self) -> None:
        if self._recorder.recording and self._subject.adapter.masters is not None:
            self._see_all("master_weight", self._subject.adapter.masters)

    def _see_states(self) -> None:
        stepped = self._subject.adapter.stepped
        if self._recorder.recording and stepped is not None:
            self._see_all("optimizer_state", lambda model: tuple(states(stepped(model))))

    def _see_all(self, point: str, sights: Callable[[Model], Sequence[Sighting] | None]) -> None:
        if point not in self._options.points or point in self._subject.absent:
            return
        with self._recorder.guard(point):
            seen = sights(self._model)
            if seen is None:
                raise RuntimeError(f"{point} is not in this process's memory any more")
            for sighting in seen:
                self._recorder.record(point, sighting)

    def _end_backward(self, facts: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> None:
        with self._recorder.guard("input"):
            for batch in batches:
                self._recorder.record("input", Sighting("batch", (), batch))
        if "loss" in self._options.points:
            with self._recorder.guard("loss"):
                self._recorder.record("loss", Sighting("loss", (), facts))

    def _fail_backward(self, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"
        self._recorder.gap(None, None, "backward_failed", detail)
        self._recorder.seal_soon()  # such an exception often ends the job, and then with a signal

    def _bypass_engine(self) -> None:
        # Every buffer of the step may hold a gradient that was not recorded.
        if self._bypassed_in != self._clock.step:
            self._bypassed_in = self._clock.step
            detail = "a backward pass past engine.backward, which this release of DeepSpeed needs"
            self._recorder.gap(None, None, "engine_bypassed", detail, whole_step=True)

    def _around_load(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._loaded = True
        return original(*args, **kwargs)

    def _around_step(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorder = self._recorder
        scale = 1.0
        if recorder.step_open:
            with recorder.guard(None):
                scale = select.loss_scale(self._model)
            self._see_weights()
            self._see_masters()
            self._see_states()
        result = original(*args, **kwargs)
        if recorder.step_open:
            self._see_masters()
            with recorder.guard(None):
                facts = select.step_facts(self._model, scale)
                if self._loaded:
                    facts["checkpoint_loaded"] = True
                recorder.end_step(facts, partial=self._partial)
        self._clock.end_step()
        self._partial = self._loaded = False
        recorder.next_step()
        return result


def _on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return torch.get_device_module(stream.device).stream(stream)  # type: ignore[no-any-return]
