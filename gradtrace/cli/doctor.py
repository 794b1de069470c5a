"""Command ``doctor``: what can be traced on this machine, with this DeepSpeed and ds_config."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from gradtrace.cli import failure, output
from gradtrace.trace.points import POINT_NAMES

STATUS_OF_VERDICT: Final = {"traced": 0, "refused": 1, "unbound": 1, "unknown": 2}


class Count(click.ParamType):  # type: ignore[type-arg]
    """Take a positive whole number, also as ``7e9``."""

    name = "number"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number."""
        try:
            number = int(float(str(value).replace("_", "")))
        except (ValueError, OverflowError):
            number = 0
        if number < 1:
            self.fail(f"{value!r} is no positive number", param, ctx)
        return number


@click.command("doctor")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A ds_config.  [default: stages 0 to 3, each with defaults]",
)
@click.option("--model", metavar="MODULE:CALLABLE", help="What builds your model.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="CPU ranks to build the engine on.",
)
@click.option("--parameters", type=Count(), help="Scale the cost to so many, such as 7e9.")
@click.option("--params", metavar="GLOB", multiple=True, help="Parameters to record; repeatable.")
@click.option("--points", metavar="NAMES", help=f"Some of {', '.join(POINT_NAMES)}.")
@click.option("--mode", metavar="MODE", default="full", show_default=True, help="What is kept.")
@output.json_option
def command(
    config: Path | None,
    model: str | None,
    ranks: int,
    parameters: int | None,
    params: tuple[str, ...],
    points: str | None,
    mode: str,
    as_json: bool,
) -> int:
    """Build the engine on CPU ranks and say what a trace of it would hold.

    Needs torch and deepspeed; no GPU. Exit status: 0 traced whole, 1 refused or a probe does not bind,
    2 cannot say.
    """
    from gradtrace.integrations.doctor.examine import examine  # torch loads only here
    from gradtrace.report.page_doctor import doctor_page

    result = examine(
        config,
        ranks=ranks,
        model=model,
        parameters=parameters,
        options={"params": ",".join(params) or None, "points": points, "mode": mode},
        progress=failure.say,
    )
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(doctor_page(result))
    return STATUS_OF_VERDICT[result.verdict]
