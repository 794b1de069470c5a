"""Command ``audit``: the laws of ZeRO's gradient path, on one trace."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.cli import output


@click.command("audit")
@output.trace_argument
@output.json_option
@output.html_option
def command(trace: Path, as_json: bool, html_file: Path | None) -> int:
    """Recompute every hop of one trace from the hop before it, and name the first that is wrong."""
    from gradtrace.analysis.audit import audit
    from gradtrace.report.page_audit import audit_page

    output.check_html(html_file)
    output.progress(f"auditing {trace}")
    result = audit(trace)
    page = audit_page(result, str(trace))
    output.write_html(html_file, page)
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(page)
    return output.STATUS_OF_VERDICT[result.verdict]
