"""Command ``demo``: two small ZeRO runs that disagree, traced and explained."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

import click

from gradtrace.cli import failure, output

_DEFAULT: Final = "gradtrace-demo"
UNCONVINCING: Final = 2


@click.command("demo")
@click.option(
    "-o",
    "--out",
    "out_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help=f"Where to leave the two traces.  [default: {_DEFAULT}, or the next free name]",
)
@output.json_option
def command(out_dir: Path | None, as_json: bool) -> int:
    """Train a small model under ZeRO-2 and ZeRO-3 on two CPU ranks, and explain why they disagree.

    Needs torch and deepspeed; no GPU and no network. Exit status 0: it showed what it promises.
    """
    from gradtrace.analysis.audit import audit
    from gradtrace.analysis.diff import diff
    from gradtrace.report.page_demo import DemoFacts, DemoResult, demo_page
    from gradtrace.testing.demo import run_demo

    traces = run_demo(out_dir or _free_directory(), failure.say)
    failure.say("comparing the two traces")
    result = DemoResult(
        baseline=str(traces.baseline),
        candidate=str(traces.candidate),
        facts=DemoFacts(traces.deepspeed, traces.planted, traces.micro_steps, traces.losses),
        diff=diff(traces.baseline, traces.candidate),
        # In full: diff audits no further than the step where the runs part.
        baseline_audit=audit(traces.baseline),
        candidate_audit=audit(traces.candidate),
    )
    if as_json:
        output.print_json(result.to_dict())
    else:
        output.print_page(demo_page(result))
    return 0 if result.convincing else UNCONVINCING


def _free_directory() -> Path:
    """Return the first name of the default's kind that nothing has yet."""
    names = itertools.chain([_DEFAULT], (f"{_DEFAULT}-{n}" for n in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())
