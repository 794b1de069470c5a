"""Report what stopped a command: a line on stderr and, under ``--json``, a document on stdout."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from dataclasses import dataclass
from typing import Any, Final

from gradtrace import __version__
from gradtrace.errors import GradtraceError
from gradtrace.report.escape import printable

ERROR_FORMAT: Final = "gradtrace.error"
ERROR_VERSION: Final = 1

OS_ERROR: Final = "os_error"
INTERNAL: Final = "internal"
OUT_OF_MEMORY: Final = "out_of_memory"
OWN_SLUGS: Final = (OS_ERROR, OUT_OF_MEMORY, INTERNAL)  # beside those of gradtrace.errors


@dataclass(frozen=True, slots=True)
class Failure:
    """Hold the facts of one failure, as `gradtrace.errors.GradtraceError` has them."""

    slug: str
    status: int
    found: str
    where: str
    expected: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "format": ERROR_FORMAT,
            "version": ERROR_VERSION,
            "slug": self.slug,
            "found": self.found,
            "where": self.where,
            "expected": self.expected,
            "remedy": self.remedy,
        }


def of_error(error: GradtraceError) -> Failure:
    """Describe an error that gradtrace raised on purpose."""
    return Failure(
        error.slug, error.exit_status, error.found, error.where, error.expected, error.remedy
    )


def of_os_error(error: OSError) -> Failure:
    """Describe a refusal of the operating system: permissions, a full disk, a lost file."""
    return Failure(
        OS_ERROR,
        2,
        (error.strerror or type(error).__name__).lower(),
        str(error.filename) if error.filename is not None else "reading or writing",
        "a file that can be read or written",
        "Check that it exists, who may use it, and that the disk is not full.",
    )


def of_memory() -> Failure:
    """Describe a trace that claims, or has, tensors too large for this machine."""
    return Failure(
        OUT_OF_MEMORY,
        2,
        "a parameter that does not fit into memory",
        "reading a trace",
        "float64 copies of one parameter at a time to fit",
        "Read it on a larger machine, or record fewer parameters with --params.",
    )


def of_bug(error: Exception) -> Failure:
    """Describe an exception that nobody expected: a bug of gradtrace."""
    return Failure(
        INTERNAL,
        3,
        f"internal error: {type(error).__name__}: {error}",
        f"gradtrace {__version__}",
        "no exception here: this is a bug in gradtrace",
        "Run it again with GRADTRACE_DEBUG=1 and report the command and the traceback.",
    )


def report(failure: Failure, as_json: bool) -> int:
    """Tell people on stderr and programs on stdout what went wrong.

    Returns:
        The exit status.
    """
    say(
        f"{failure.found} ({failure.where}). Expected {failure.expected}. "
        f"{failure.remedy} [{failure.slug}]"
    )
    if as_json:
        with contextlib.suppress(OSError):  # nobody may be reading; the status still tells
            print(json.dumps(failure.to_dict(), indent=2), flush=True)
    return failure.status


def say(message: str) -> None:
    """Print one line on stderr, whatever is in it."""
    with contextlib.suppress(OSError):  # stderr may be closed; the status still tells
        print(f"gradtrace: {printable(message)}", file=sys.stderr, flush=True)


def print_traceback(error: Exception) -> None:
    """Print the traceback of an internal error on stderr."""
    traceback.print_exception(error, file=sys.stderr)
