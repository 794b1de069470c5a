"""Command ``show``: one record, its statistics, its first values and where it came from."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.cli import output
from gradtrace.trace.points import POINT_NAMES

_COUNT = click.IntRange(min=0)


@click.command("show")
@output.trace_argument
@click.option("--step", type=_COUNT, help="Optimizer step.")
@click.option("--micro-step", type=_COUNT, help="Backward pass inside the step.")
@click.option("--point", type=click.Choice(POINT_NAMES), help="Place in the gradient path.")
@click.option("--param", help="Parameter name; its part of a flat buffer is cut out.")
@click.option("--rank", type=_COUNT, help="Global rank.")
@click.option("--unit", help="What was recorded: a parameter, a group, a bucket.")
@click.option("--occurrence", type=_COUNT, help="Which of several in one micro-step.")
@click.option("--values", type=_COUNT, default=8, show_default=True, help="Values to show.")
@output.json_option
def command(
    trace: Path,
    step: int | None,
    micro_step: int | None,
    point: str | None,
    param: str | None,
    rank: int | None,
    unit: str | None,
    occurrence: int | None,
    values: int,
    as_json: bool,
) -> int:
    """Show the record that the options single out, or list those that they leave."""
    from gradtrace.analysis.show import Query, show
    from gradtrace.report.page_trace import show_page

    query = Query(step, micro_step, point, param, rank, unit, occurrence)
    result = show(trace, query, values)
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(show_page(result))
    return 0
