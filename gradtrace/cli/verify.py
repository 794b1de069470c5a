"""Command ``verify``: the integrity of every file of a trace."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.cli import output


@click.command("verify")
@output.trace_argument
@output.json_option
def command(trace: Path, as_json: bool) -> int:
    """Check structure, checksums and every tensor, and open each shard with safetensors."""
    from gradtrace.analysis.verify import verify
    from gradtrace.report.page_trace import verify_page

    output.progress(f"checking {trace}")
    result = verify(trace)
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(verify_page(result))
    return output.STATUS_OF_VERDICT[result.verdict]
