"""Write what commands print: text for people, one JSON document for programs, HTML to a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gradtrace.cli import failure
from gradtrace.errors import BadOptionError
from gradtrace.trace.schema import encode_float

if TYPE_CHECKING:
    from gradtrace.report.page import Page

STATUS_OF_VERDICT: Final = {
    "agree": 0,
    "rounding": 0,
    "pass": 0,
    "sound": 0,
    "diverged": 1,
    "fail": 1,
    "not_comparable": 2,
    "inconclusive": 2,
    "damaged": 2,
}

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
html_option = click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write a self-contained page.",
)
trace_argument = click.argument("trace", metavar="DIR", type=click.Path(path_type=Path))


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(finite(document), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Write numbers that JSON cannot hold as strings: a trace may say 1e999 in its facts."""
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, Mapping):
        return {name: finite(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(member) for member in value]
    return value


def progress(message: str) -> None:
    """Say what takes a while, to people who watch."""
    if sys.stderr.isatty():
        failure.say(message)


def print_page(page: Page) -> None:
    """Print a page on stdout, in colour where it is a terminal."""
    from gradtrace.report import text  # rich loads slowly; --json does without

    text.print_page(page, sys.stdout)


def check_html(path: Path | None) -> None:
    """Refuse a target of ``--html`` before any work is done for it.

    Raises:
        BadOptionError: it is a directory, lies inside a trace, or holds something else.
    """
    if path is None:
        return
    from gradtrace.report.html import MARK

    if path.is_dir():
        _refuse(path, "a directory", "a file to write", "Give a file name, such as report.html.")
    if not path.absolute().parent.is_dir():
        _refuse(path, "no such directory to write in", "an existing one", "Create it first.")
    if any((path.absolute().parent / name).exists() for name in ("manifest.json", "header.json")):
        _refuse(path, "a file inside a trace", "a place outside it", "Choose another directory.")
    if path.exists():
        with open(path, "rb") as file:
            ours = MARK.encode() in file.read(1024)
        if not ours:
            _refuse(path, "a file that is no report", "a new file", "Choose another file name.")


def write_html(path: Path | None, page: Page) -> None:
    """Write a page as HTML, whole or not at all, replacing only an earlier report."""
    if path is None:
        return
    from gradtrace.report import html

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html.render(page), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse(path: Path, found: str, expected: str, remedy: str) -> None:
    raise BadOptionError(found, where=f"--html {path}", expected=expected, remedy=remedy)
