"""Run an unedited training script with every engine of ``deepspeed.initialize`` traced.

The script runs in this process as it would have run without gradtrace: as ``__main__``, with its own
``sys.argv`` and ``sys.path[0]``. How it ends is not imitated but left to the interpreter: its exception
goes on to the top, with the frames of gradtrace cut off before it is shown.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import io
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from gradtrace.capture.options import OUT_VARIABLE, choose_options
from gradtrace.errors import BadOptionError, GradtraceError


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold a script that is ready to run, traced.

    Attributes:
        script: path of the script, or name of the module.
        module: whether it is a module's name, as after ``python -m``.
        args: its arguments.
        out_dir: directory of the trace of its first engine; the n-th has ``out_dir-engineN``.
        options: keyword arguments of `gradtrace.wrap`.
        perturb_sample: which sample of noise every model begins with, see `gradtrace.perturb_ulp`;
            ``None`` for none.
    """

    script: str
    module: bool
    args: tuple[str, ...]
    out_dir: Path
    options: Mapping[str, Any]
    perturb_sample: int | None = None

    def __call__(self) -> int:
        """Run the script until it ends, however it ends.

        deepspeed is patched when the script imports it, not before: a script may set its environment
        first. What the Trainer of transformers reports goes into the trace as well.

        Raises:
            GradtraceError: an engine cannot be traced, or a model not be perturbed.
            BaseException: what the script ended with.
        """
        pid = os.getpid()
        tracers: list[Any] = []

        def on_engine(engine: Any) -> None:
            from gradtrace.capture.adapters.select import trains
            from gradtrace.capture.tracer import wrap

            if not trains(engine):
                return  # a reference model, or one that is evaluated only: it has no gradients
            number = len(tracers)
            place = self.out_dir
            place = place if number == 0 else place.with_name(f"{place.name}-engine{number}")
            tracers.append(wrap(engine, place, **self.options))

        def on_model(model: Any) -> None:
            from gradtrace.capture.perturb import perturb_ulp

            assert self.perturb_sample is not None
            perturb_ulp(model, self.perturb_sample)

        perturb = None if self.perturb_sample is None else on_model
        restore = [
            _when_imported("deepspeed", lambda: _patch_initialize(on_engine, perturb)),
            _when_imported("transformers.trainer", _report_from_trainers),
        ]
        reason = "closed"
        try:
            _execute(self)
        except GradtraceError:
            reason = "left by an error of gradtrace"
            raise
        except SystemExit as leaving:
            reason = f"SystemExit({leaving.code})"
            raise
        except BaseException as error:
            reason = f"left by {type(error).__name__}"
            _hide_own_frames()
            raise
        finally:
            if os.getpid() == pid:  # no process that the script forked
                for tracer in tracers:
                    tracer.close(reason[:200])
                for put_back in restore:
                    put_back()
                _say(self, tracers, reason)
        return 0


def prepare(
    script: str,
    args: Sequence[str],
    out_dir: str | Path | None,
    options: Mapping[str, Any],
    *,
    module: bool = False,
    perturb_sample: int | None = None,
) -> Launch:
    """Check what can be checked before the script runs.

    Args:
        script: path of the script, or with ``module`` the name of a module.
        args: its arguments.
        out_dir: directory of the trace; ``GRADTRACE_OUT`` by default.
        options: keyword arguments of `gradtrace.wrap`.
        perturb_sample: which sample of noise every model begins with, see `gradtrace.perturb_ulp`;
            ``None`` for none.

    Raises:
        BadOptionError: an option is wrong, there is no such script, or no directory was named.
    """
    choose_options(options)
    place = out_dir if out_dir is not None else os.environ.get(OUT_VARIABLE)
    if not place:
        raise BadOptionError(
            "no directory for the trace",
            where="the command line of 'gradtrace run'",
            expected=f"-o DIR, or {OUT_VARIABLE}",
            remedy="Give one of the two.",
        )
    if not module and not Path(script).is_file():
        raise BadOptionError(
            "no such file",
            where=script,
            expected="a Python script",
            remedy="Give the path of the script, after gradtrace's own options; or -m and a module.",
        )
    return Launch(script, module, tuple(args), Path(place), dict(options), perturb_sample)


def _execute(launch: Launch) -> None:
    """Become the interpreter of ``python SCRIPT`` or ``python -m MODULE``.

    Nothing of it is undone: threads, pickles and exit handlers of the script outlive its last line.
    """
    main = ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=sys.modules["builtins"])
    _before.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    if launch.module:
        _set_path(os.getcwd())
        sys.argv = ["-m", *launch.args]
        # What the interpreter itself calls for -m; runpy.run_module leaves another __main__ behind.
        run_as_main: Callable[[str], object] = vars(runpy)["_run_module_as_main"]
        run_as_main(launch.script)
        return
    path = os.path.join(os.getcwd(), launch.script)  # as the interpreter: not normalised
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    _set_path(os.path.dirname(os.path.realpath(path)))
    sys.argv = [launch.script, *launch.args]
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


_before: list[ModuleType] = []  # gradtrace's own __main__, which is still running


def _set_path(first: str) -> None:
    """Put the script's place, or the current one, where modules are looked for first."""
    if not sys.flags.safe_path:  # python -P puts nothing there
        sys.path[0] = first


def _hide_own_frames() -> None:
    """Let whoever shows the exception, the script's own hook too, see the script's frames only."""
    show = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        frame = traceback
        while frame is not None and frame.tb_frame.f_code is not _execute.__code__:
            frame = frame.tb_next
        own = traceback if frame is None else frame.tb_next
        error.__traceback__ = own
        show(kind, error, own)

    sys.excepthook = hook


def _say(launch: Launch, tracers: Sequence[Any], reason: str) -> None:
    """Tell, once a job and once a host of its own directory, what became of the trace."""
    if not tracers and reason == "closed" and os.environ.get("RANK", "0") == "0":
        _print(f"{launch.script} trained no DeepSpeed engine; {launch.out_dir} was not written")
    for tracer in tracers:
        first = tracer.rank == 0
        if first and tracer.whole():
            _print(
                f"{tracer.path} holds the trace, up to step {tracer.step}; "
                f"try: gradtrace audit {tracer.path}"
            )
        elif first or (os.environ.get("LOCAL_RANK") == "0" and not tracer.whole()):
            _print(
                f"{tracer.path} on {socket.gethostname()} holds this host's part of the trace; "
                "gradtrace merge brings the hosts' directories together"
            )


def _print(message: str) -> None:
    print(f"gradtrace: {message}", file=sys.stderr, flush=True)


def _patch_initialize(
    on_engine: Callable[[Any], None], on_model: Callable[[Any], None] | None
) -> Callable[[], None]:
    from gradtrace.capture.adapters.select import patch_initialize

    return patch_initialize(on_engine, on_model)


def _report_from_trainers() -> Callable[[], None]:
    from gradtrace.integrations.transformers import report_from_trainers

    return report_from_trainers()


def _when_imported(name: str, patch: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Patch a module now if it is imported, else right after its import.

    Args:
        name: the module's.
        patch: patches it, and returns what undoes that.
    """
    undo: list[Callable[[], None]] = []
    finder = _Watch(name, lambda: undo.append(patch()))
    if name in sys.modules:
        undo.append(patch())
    else:
        sys.meta_path.insert(0, finder)

    def restore() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for put_back in undo:
            put_back()

    return restore


class _Watch(importlib.abc.MetaPathFinder):
    """Call back once, right after one module was imported for the first time."""

    def __init__(self, name: str, then: Any) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the watched module as the others would, with a loader that calls back.

        Many look for deepspeed without importing it (transformers does): the watch goes on until a
        loader ran.
        """
        if fullname != self._name:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = exec_module
        return spec
