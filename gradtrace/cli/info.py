"""Command ``info``: what is in a trace."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.cli import output


@click.command("info")
@output.trace_argument
@output.json_option
def command(trace: Path, as_json: bool) -> int:
    """Say what was run, what was recorded at which points, and what is missing."""
    from gradtrace.analysis.inspect import inspect
    from gradtrace.report.page_trace import info_page

    result = inspect(trace)
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(info_page(result))
    return 0
