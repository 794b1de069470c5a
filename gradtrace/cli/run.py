"""Command ``run``: a training script with every DeepSpeed engine traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from gradtrace.trace.points import POINT_NAMES


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--out",
    "out_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to write the trace; must not hold one. GRADTRACE_OUT by default.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.option("--steps", metavar="RANGES", help="Steps to record: 0:20, ::10, 3, joined by commas.")
@click.option("--params", metavar="GLOB", multiple=True, help="Parameters to record; repeatable.")
@click.option("--points", metavar="NAMES", help=f"Some of {', '.join(POINT_NAMES)}.")
@click.option("--ranks", metavar="NUMBERS", help="Global ranks to record, joined by commas.")
@click.option("--mode", metavar="MODE", help="What is kept: full (the default).")
@click.option("--max-bytes", type=click.IntRange(min=0), help="Tensor bytes a rank may record.")
@click.option(
    "--on-error",
    metavar="ACTION",
    help="When recording fails: disarm (train on untraced, the default) or raise.",
)
@click.option(
    "--perturb-ulp",
    "perturb_sample",
    metavar="SAMPLE",
    type=click.IntRange(min=0),
    help="Move every weight by one unit in the last place first: sample 0, 1, ... of a noise envelope.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    out_dir: Path | None,
    module: bool,
    steps: str | None,
    params: tuple[str, ...],
    points: str | None,
    ranks: str | None,
    mode: str | None,
    max_bytes: int | None,
    on_error: str | None,
    perturb_sample: int | None,
    script: str,
    args: tuple[str, ...],
) -> Callable[[], int]:
    """Run SCRIPT with its ARGS, wrapping every engine that deepspeed.initialize makes.

    Works under launchers, which get it in place of the script:

    torchrun --nproc-per-node 2 -m gradtrace run -o DIR SCRIPT [ARGS]...

    An option that is left out is looked for in GRADTRACE_STEPS and the like, then in the section
    "gradtrace" of the ds_config. The script's own exit status passes through.
    """
    from gradtrace.integrations.launch import prepare

    options = {
        "steps": steps,
        "params": ",".join(params) or None,
        "points": points,
        "ranks": ranks,
        "mode": mode,
        "max_bytes": max_bytes,
        "on_error": on_error,
    }
    parent = context.parent
    local_rank = None if parent is None else parent.params.get("local_rank")
    handed = () if local_rank is None else (f"--local_rank={local_rank}",)
    return prepare(
        script,
        (*handed, *args),
        out_dir,
        options,
        module=module,
        perturb_sample=perturb_sample,
    )
