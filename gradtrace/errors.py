"""Hold every error that gradtrace raises on purpose.

An error names what was found, where, what was expected, and the one thing to do next. The slug of
each leaf class is documented in ``docs/messages.md``. A broken law or a disagreement between runs is
never an error: those are findings, which are data.
"""

from __future__ import annotations

from typing import ClassVar


class GradtraceError(Exception):
    """State one thing that stops gradtrace, and the way out of it.

    Args:
        found: what was found, in a few words.
        where: the file, object or option that it was found in.
        expected: what should have been there.
        remedy: the one thing to do next.
    """

    slug: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 2

    def __init__(self, found: str, *, where: str, expected: str, remedy: str) -> None:
        super().__init__(found, where, expected, remedy)
        self.found = found
        self.where = where
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.found} ({self.where}). Expected {self.expected}. {self.remedy} [{self.slug}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not pickle by themselves, and test harnesses
        # and executors carry them between processes.
        return _rebuild, (type(self), self.found, self.where, self.expected, self.remedy)


def _rebuild(
    cls: type[GradtraceError], found: str, where: str, expected: str, remedy: str
) -> GradtraceError:
    return cls(found, where=where, expected=expected, remedy=remedy)


class NotATraceError(GradtraceError):
    """The path does not hold a trace."""

    slug = "not_a_trace"


class UnsupportedVersionError(GradtraceError):
    """The trace was written in a format version that this release does not read."""

    slug = "unsupported_version"


class MissingRankError(GradtraceError):
    """A rank that the manifest promises has no files."""

    slug = "missing_rank"


class DamagedTraceError(GradtraceError):
    """A file of the trace is truncated, altered, or not what its index says."""

    slug = "damaged_trace"


class MixedRunsError(GradtraceError):
    """Files of two different runs stand in one trace directory."""

    slug = "mixed_runs"


class TraceExistsError(GradtraceError):
    """The output directory already holds a trace; nothing is ever overwritten."""

    slug = "trace_exists"


class NoSuchRecordError(GradtraceError):
    """No record matches what was asked for."""

    slug = "no_such_record"


class BadOptionError(GradtraceError):
    """An option has a value that means nothing, or that this release cannot do."""

    slug = "bad_option"


class NotAnEngineError(GradtraceError):
    """The object to wrap is not a DeepSpeed engine."""

    slug = "not_an_engine"


class UnsupportedEngineError(GradtraceError):
    """The engine's configuration is one that this release refuses to trace."""

    slug = "unsupported_engine"


class EngineBuildError(GradtraceError):
    """DeepSpeed makes no engine of the ds_config, on this machine."""

    slug = "engine_not_built"


class ProbeError(GradtraceError):
    """A method or attribute that a probe needs is not there in the installed DeepSpeed."""

    slug = "probe_missing"


class AlreadyWrappedError(GradtraceError):
    """The engine is being traced already."""

    slug = "already_wrapped"


class PerturbationError(GradtraceError):
    """The model's weights cannot be moved by one unit in the last place, or were cast afterwards."""

    slug = "cannot_perturb"


class NotAnEnvelopeError(GradtraceError):
    """The trace is no run of the baseline with perturbed weights: it says nothing of its sensitivity."""

    slug = "not_an_envelope"


class CaptureError(GradtraceError):
    """Recording failed and ``on_error="raise"`` asked to be told at once."""

    slug = "capture_failed"


class MissingDependencyError(GradtraceError):
    """A package that this command needs is not installed."""

    slug = "missing_dependency"
