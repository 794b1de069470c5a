"""Trace the engine of a Hugging Face ``Trainer``, or of a trainer of TRL's, by a callback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from transformers import TrainerCallback, trainer

from gradtrace.capture.adapters.select import engine_of
from gradtrace.capture.options import OUT_VARIABLE, choose_options
from gradtrace.capture.tracer import Tracer, tracer_of, wrap
from gradtrace.errors import BadOptionError, NotAnEngineError

SOURCE: Final = "transformers.Trainer"
_NAMES: Final = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}


class ReportCallback(TrainerCallback):  # type: ignore[misc]
    """Hand what a Trainer reports to the tracer of its engine, where there is one.

    The Trainer logs after the optimizer's step, on every rank and with numbers that it averaged over the
    ranks itself: nothing is communicated for it.
    """

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        self._logged = 0  # the Trainer's step that it reported last

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Find the tracer of the engine that holds the model."""
        self._tracer = tracer_of(engine_of(model))
        self._logged = state.global_step

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the Trainer's loss, gradient norm and learning rate.

        Its loss is averaged over the steps since the last one that it logged; what a script logs by
        itself, without a loss, is of the step alone.
        """
        told = {
            ours: float(logs[theirs])
            for theirs, ours in _NAMES.items()
            if logs is not None and isinstance(logs.get(theirs), (int, float))
        }
        if self._tracer is None or not told:
            return
        steps = state.global_step - self._logged
        if "loss" in told:
            self._logged = state.global_step
        self._tracer.report(SOURCE, **told, steps=max(1, steps), framework_step=state.global_step)


class GradtraceCallback(ReportCallback):
    """Trace a training from its first step to its last.

    ``Trainer(..., callbacks=[GradtraceCallback("traces/zero2", steps="0:20")])``. The engine is wrapped
    when training begins, after a checkpoint was loaded, and let go when it ends. A second ``train()``
    leaves a trace of its own, ``traces/zero2-train1``. Under ``gradtrace run``, which wraps the engine
    itself, the callback opens nothing and only passes on what the Trainer reports.

    Args:
        out_dir: directory of the new trace; ``GRADTRACE_OUT`` by default.
        steps, params, points, ranks, mode, max_bytes, on_error: as `gradtrace.wrap` takes them; steps
            count from the first one of this ``train()``, also when it resumes from a checkpoint.

    Raises:
        BadOptionError: an option means nothing.
    """

    def __init__(
        self,
        out_dir: str | Path | None = None,
        *,
        steps: str | int | Iterable[int] | None = None,
        params: str | Sequence[str] | None = None,
        points: str | Sequence[str] | None = None,
        ranks: str | int | Iterable[int] | None = None,
        mode: str | None = None,
        max_bytes: int | None = None,
        on_error: str | None = None,
    ) -> None:
        self._out_dir = out_dir
        self._options: dict[str, Any] = {
            "steps": steps,
            "params": params,
            "points": points,
            "ranks": ranks,
            "mode": mode,
            "max_bytes": max_bytes,
            "on_error": on_error,
        }
        choose_options(self._options)
        super().__init__()
        self._own = False  # whether this callback opened the tracer
        self._trainings = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Wrap the engine, unless ``gradtrace run`` did.

        Raises:
            NotAnEngineError: no DeepSpeed engine holds the model.
            BadOptionError: there is no directory to write to.
            GradtraceError: the engine cannot be traced (see `gradtrace.wrap`).
        """
        self._close("left by an exception")  # which Trainer tells no callback of
        engine = engine_of(model)
        if engine is None:
            _refuse(model)
        self._own = tracer_of(engine) is None
        if self._own:
            wrap(engine, self._next_directory(), **self._options)
        super().on_train_begin(args, state, control, model, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the trace and restore the engine."""
        self._close("closed")

    def _close(self, reason: str) -> None:
        if self._tracer is not None and self._own:
            self._tracer.close(reason)
        self._tracer = None

    def _next_directory(self) -> Path:
        place = self._out_dir if self._out_dir is not None else os.environ.get(OUT_VARIABLE)
        if not place:
            raise BadOptionError(
                "no directory for the trace",
                where="GradtraceCallback()",
                expected=f"one as its first argument, or in {OUT_VARIABLE}",
                remedy="Give one, take the callback out, or run the script with 'gradtrace run'.",
            )
        number = self._trainings
        self._trainings += 1
        path = Path(place)
        return path if number == 0 else path.with_name(f"{path.name}-train{number}")


def _refuse(model: Any) -> NoReturn:
    raise NotAnEngineError(
        f"no DeepSpeed engine that holds the Trainer's {type(model).__name__}",
        where="GradtraceCallback, as the training begins",
        expected="a Trainer that trains with DeepSpeed",
        remedy="Give it a ds_config (TrainingArguments(deepspeed=...)), or take the callback out.",
    )


def report_from_trainers() -> Callable[[], None]:
    """Give every Trainer that is made from now on a `ReportCallback`.

    Returns:
        A function that takes it back.
    """
    defaults = trainer.DEFAULT_CALLBACKS
    defaults.append(ReportCallback)

    def restore() -> None:
        if ReportCallback in defaults:
            defaults.remove(ReportCallback)

    return restore
