"""Command ``diff``: the first divergence of two traces, and whom to blame."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.cli import output


@click.command("diff")
@click.argument("baseline", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option(
    "--envelope",
    metavar="TRACE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="The baseline run again with --perturb-ulp: how sensitive it is to rounding; repeatable.",
)
@output.json_option
@output.html_option
def command(
    baseline: Path,
    candidate: Path,
    envelope: tuple[Path, ...],
    as_json: bool,
    html_file: Path | None,
) -> int:
    """Find the first tensor and micro-step where two traces disagree by more than rounding.

    BASELINE is the run you trust, CANDIDATE the one you doubt; blame does not depend on the order.
    """
    from gradtrace.analysis.diff import diff
    from gradtrace.report.page_diff import diff_page

    output.check_html(html_file)
    output.progress(f"comparing {baseline} and {candidate}")
    result = diff(baseline, candidate, envelope=envelope)
    page = diff_page(result, str(baseline), str(candidate))
    output.write_html(html_file, page)
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(page)
    return output.STATUS_OF_VERDICT[result.verdict]
