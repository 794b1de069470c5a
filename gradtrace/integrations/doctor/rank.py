"""Build an engine on one rank, look at it as `wrap` does, and trace a stand-in model with it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from gradtrace.capture import describe
from gradtrace.capture.adapters import select, standin
from gradtrace.capture.options import parse_options
from gradtrace.capture.tracer import wrap
from gradtrace.errors import BadOptionError, GradtraceError, ProbeError
from gradtrace.integrations.doctor.results import Changed, ProbeRow

HIDDEN: Final = 64
LAYERS: Final = 4
TRACED_STEPS: Final = 2  # some laws compare a step with the one before it
_WARM_UP: Final = 40  # a dynamic loss scale halves at every overflow until steps are made
_SHOWN: Final = 400  # characters of somebody else's message


@dataclass(frozen=True, slots=True)
class Order:
    """Say what a rank must build and trace.

    Attributes:
        config: the ds_config as it was given.
        model: ``MODULE:CALLABLE``, or None for the stand-in.
        trace: where to trace a step, or None to examine the engine only.
        options: capture options for the stand-in.
        params: globs that select parameters of the user's model.
        log: file that gets what DeepSpeed prints.
    """

    config: Mapping[str, Any]
    ranks: int
    model: str | None
    trace: Path | None
    options: Mapping[str, Any]
    params: tuple[str, ...]
    log: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what a rank found.

    Attributes:
        failure: what DeepSpeed said, when it made no engine.
        refusal: what `wrap` raises, or None.
        trained: None, or why the stand-in could not be trained.
    """

    failure: str | None = None
    changes: tuple[Changed, ...] = ()
    optimizer: str = ""
    adapter: str | None = None
    refusal: GradtraceError | None = None
    probes: tuple[ProbeRow, ...] = ()
    effective: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parameters: int = 0
    notes: tuple[str, ...] = ()
    trained: str | None = None


def look_on(rank: int, order: Order) -> Answer:
    """Do what is ordered on one rank; `run_ranks` calls it."""
    with output_to(order.log):
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        return _build_and_look(order)


def _build_and_look(order: Order) -> Answer:

    torch.manual_seed(0)
    module = _stand_in() if order.model is None else _users_model(order.model)
    hidden = HIDDEN if order.model is None else _hidden_size(module)
    fitted = standin.fit(order.config, order.ranks, hidden)
    made: list[Any] = []
    failure = tried(lambda: made.extend(standin.build(module, fitted)))
    if failure is not None:
        return Answer(failure=failure)
    engine, more = made
    found = _look(engine, order.params)
    changes = tuple(Changed(c.setting, c.given, c.used, c.why) for c in (*fitted.changes, *more))
    answer = dataclasses.replace(found, changes=changes)
    if order.trace is None or found.refusal is not None:
        return answer
    notes: list[str] = []
    trained = tried(lambda: notes.extend(_trace_steps(engine, fitted.config, order)))
    return dataclasses.replace(answer, trained=trained, notes=tuple(notes))


def _look(engine: Any, params: tuple[str, ...]) -> Answer:
    """Examine an engine as `wrap` does, and each probe by itself."""
    plan = parse_options(params=params)
    elements = [
        math.prod(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and plan.selects_param(name)
    ]
    answer = Answer(optimizer=type(engine.optimizer).__name__, parameters=sum(elements))
    try:
        subject = describe.examine(engine)
    except GradtraceError as error:
        names = {kind.__name__ for kind in type(engine.optimizer).__mro__}
        fitting = [a for a in select.ADAPTERS if a.optimizer_class in names]
        if not fitting:
            return dataclasses.replace(answer, refusal=error)
        known = dataclasses.replace(answer, refusal=error)
        adapter = fitting[0]
    else:
        known = dataclasses.replace(answer, effective=dict(subject.effective))
        adapter = subject.adapter
    probes = tuple(_probe_rows(engine, adapter))
    return dataclasses.replace(known, adapter=adapter.name, probes=probes)


def _probe_rows(engine: Any, adapter: Any) -> Iterator[ProbeRow]:

    model = select.build_model(engine)
    for probe in adapter.probes:
        alone = dataclasses.replace(adapter, probes=(probe,), attributes=())
        reason = None
        try:
            if not select.resolve(model, alone):
                reason = f"this deepspeed has no {probe.method}"
        except ProbeError as error:
            reason = error.found
        owner = model.owner(probe.owner)
        defined = [kind for kind in type(owner).__mro__ if probe.method in vars(kind)]
        yield ProbeRow(
            point=probe.point,
            owner=(defined or [type(owner)])[0].__name__,
            method=probe.method,
            when=probe.when,
            required=probe.required,
            bound=reason is None,
            place=_place(getattr(owner, probe.method, None)),
            reason=reason,
        )


def _place(method: Any) -> str | None:
    """Return ``package/file.py:LINE`` of a method, looking through decorators without ``wraps``."""
    function = inspect.unwrap(getattr(method, "__func__", method)) if method is not None else None
    for cell in getattr(function, "__closure__", None) or ():
        if function is not None and function.__name__ == "wrapped_fn":
            inner = cell.cell_contents
            function = inner if inspect.isfunction(inner) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    parts = Path(code.co_filename).parts
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    start = max((n for n, part in enumerate(parts) if part == package), default=0)
    return f"{Path(*parts[start:])}:{code.co_firstlineno}"


def _trace_steps(engine: Any, config: Mapping[str, Any], order: Order) -> Iterator[str]:
    """Train the stand-in until a step is made, then trace steps; yields notes."""
    assert order.trace is not None
    rows = int(engine.train_micro_batch_size_per_gpu())
    data = torch.Generator().manual_seed(torch.distributed.get_rank())

    def step() -> None:
        dtype = next(engine.module.parameters()).dtype
        for _ in range(int(engine.gradient_accumulation_steps())):
            batch = torch.randn(min(rows, 8), HIDDEN, generator=data).to(dtype)
            engine.backward(engine(batch).float().pow(2).mean())
            if config.get("managed_gradient_accumulation") is not False:
                engine.step()
        if config.get("managed_gradient_accumulation") is False:
            engine.step()

    skipped = 0
    while skipped < _WARM_UP and _half(config):
        step()
        if not getattr(engine.optimizer, "overflow", False):
            break
        skipped += 1
    if skipped:
        yield f"{skipped} steps overflowed before the first traced one: the loss scale was still falling"
    with wrap(engine, order.trace, on_error="raise", **order.options):
        for _ in range(TRACED_STEPS):
            step()


def _half(config: Mapping[str, Any]) -> bool:
    return any("fp16" in name or "autocast" in name for name in config)


def _stand_in() -> Any:
    layers: list[Any] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, HIDDEN, bias=False))


def _users_model(spec: str) -> Any:
    """Call ``MODULE:CALLABLE`` and return the model that it makes.

    Raises:
        BadOptionError: there is no such thing, it raises, or what it returns is no module.
    """
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module_name), attribute)()
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {short(str(error))}"
    else:
        if isinstance(made, torch.nn.Module):
            return made
        found = f"a {type(made).__name__}"
    raise BadOptionError(
        found,
        where=f"--model {spec}",
        expected="MODULE:CALLABLE, which returns a torch.nn.Module when called without arguments",
        remedy="Write a function that builds the model, and name it.",
    )


def _hidden_size(module: Any) -> int:
    """Return a Hugging Face model's hidden size, or the stand-in's."""
    config = getattr(module, "config", None)
    return int(getattr(config, "hidden_size", None) or HIDDEN)


def tried(action: Callable[[], Any]) -> str | None:
    """Return what went wrong, or None; a wrong option is the user's to hear of."""
    try:
        action()
    except BadOptionError:
        raise
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {short(str(error))}"
    return None


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send what this process prints, from C too, to a file: it is DeepSpeed's, not ours."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with open(log, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)


def short(text: str) -> str:
    """Return text on one line, cut where it gets long."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
