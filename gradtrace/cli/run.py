"""Command ``run``: a training script with every DeepSpeed engine traced."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.trace.points import POINT_NAMES


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--out",
    "out_dir",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="Where to write the trace; must not hold one.",
)
@click.option("--steps", metavar="RANGES", help="Steps to record: 0:20, ::10, 3, joined by commas.")
@click.option("--params", metavar="GLOB", multiple=True, help="Parameters to record; repeatable.")
@click.option("--points", metavar="NAMES", help=f"Some of {', '.join(POINT_NAMES)}.")
@click.option("--ranks", metavar="NUMBERS", help="Global ranks to record, joined by commas.")
@click.option("--mode", metavar="MODE", default="full", show_default=True, help="What is kept.")
@click.option("--max-bytes", type=click.IntRange(min=0), help="Tensor bytes a rank may record.")
@click.option(
    "--on-error",
    metavar="ACTION",
    default="disarm",
    show_default=True,
    help="When recording fails: disarm (train on untraced) or raise.",
)
@click.option(
    "--perturb-ulp",
    "perturb_sample",
    metavar="SAMPLE",
    type=click.IntRange(min=0),
    help="Move every weight by one unit in the last place first: sample 0, 1, ... of a noise envelope.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    out_dir: Path,
    steps: str | None,
    params: tuple[str, ...],
    points: str | None,
    ranks: str | None,
    mode: str,
    max_bytes: int | None,
    on_error: str,
    perturb_sample: int | None,
    script: Path,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT with its ARGS, wrapping every engine that deepspeed.initialize makes.

    Works under launchers, which get it in place of the script:

    torchrun --nproc-per-node 2 -m gradtrace run -o DIR SCRIPT [ARGS]...

    The script's own exit status passes through.
    """
    from gradtrace.integrations.launch import run_script  # torch loads only here

    options = {
        "steps": steps,
        "params": ",".join(params) or None,
        "points": points,
        "ranks": ranks,
        "mode": mode,
        "max_bytes": max_bytes,
        "on_error": on_error,
    }
    run_script(script, args, out_dir, options, perturb_sample=perturb_sample)
    return 0
