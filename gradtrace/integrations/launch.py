"""Run an unedited training script with every engine of ``deepspeed.initialize`` traced."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from gradtrace.capture.options import parse_options
from gradtrace.errors import BadOptionError, GradtraceError


def run_script(
    script: str | Path,
    args: Sequence[str],
    out_dir: str | Path,
    options: Mapping[str, Any],
    *,
    perturb_sample: int | None = None,
) -> None:
    """Run a script as ``__main__``, tracing its engines until it ends, however it ends.

    The first engine's trace goes to ``out_dir``, that of the n-th to ``out_dir-engineN``. deepspeed
    is patched when the script imports it, not before: a script may set its environment first.

    Args:
        script: path of the script.
        args: its arguments.
        out_dir: directory of the trace.
        options: keyword arguments of `gradtrace.wrap`.
        perturb_sample: which sample of noise every model begins with, see `gradtrace.perturb_ulp`;
            ``None`` for none.

    Raises:
        GradtraceError: an option is wrong, an engine cannot be traced or a model not be perturbed.
        SystemExit: what the script asked for, or status 1 after its traceback was printed.
    """
    parse_options(**options)
    script = Path(script)
    if not script.is_file():
        raise BadOptionError(
            "no such file",
            where=str(script),
            expected="a Python script",
            remedy="Give the path of the script, after gradtrace's own options.",
        )
    tracers: list[Any] = []
    engines = [0]

    def on_engine(engine: Any) -> None:
        from gradtrace.capture.tracer import wrap

        number = engines[0]
        engines[0] += 1
        place = Path(out_dir)
        place = place if number == 0 else place.with_name(f"{place.name}-engine{number}")
        tracers.append(wrap(engine, place, **options))

    def on_model(model: Any) -> None:
        from gradtrace.capture.perturb import perturb_ulp

        assert perturb_sample is not None
        perturb_ulp(model, perturb_sample)

    restore = _when_imported("deepspeed", on_engine, None if perturb_sample is None else on_model)
    argv, path0 = sys.argv, sys.path[0]
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)
    reason = "closed"
    try:
        runpy.run_path(str(script), run_name="__main__")
    except GradtraceError:
        reason = "left by an error of gradtrace"
        raise
    except SystemExit as leaving:
        reason = f"SystemExit({leaving.code})"
        raise
    except BaseException as error:
        reason = f"left by {type(error).__name__}"
        _print_own_frames(error)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
    finally:
        for tracer in tracers:
            tracer.close(reason)
        restore()
        sys.argv, sys.path[0] = argv, path0
        _say(script, out_dir, tracers, engines[0], reason)


def _say(
    script: Path, out_dir: str | Path, tracers: Sequence[Any], engines: int, reason: str
) -> None:
    """Tell, once a job, what became of the trace."""
    if engines == 0 and reason == "closed":
        print(
            f"gradtrace: {script} made no DeepSpeed engine; {out_dir} was not written",
            file=sys.stderr,
        )
    for tracer in tracers:
        if tracer.rank == 0:
            print(
                f"gradtrace: {tracer.path} holds the trace, up to step {tracer.step}; "
                f"try: gradtrace audit {tracer.path}",
                file=sys.stderr,
            )


def _print_own_frames(error: BaseException) -> None:
    """Print the traceback as the script alone would have, without frames of ours."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        frame = frame.tb_next
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == "runpy":
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


def _when_imported(name: str, on_engine: Any, on_model: Any) -> Any:
    """Patch ``deepspeed.initialize`` now if it is imported, else right after its import."""
    undo: list[Any] = []

    def patch() -> None:
        from gradtrace.capture.adapters.select import patch_initialize

        undo.append(patch_initialize(on_engine, on_model))

    finder = _Watch(name, patch)
    if name in sys.modules:
        patch()
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
