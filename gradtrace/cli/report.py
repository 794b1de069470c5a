"""Command ``report``: one file to attach to a bug report."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradtrace.cli import output
from gradtrace.errors import BadOptionError

if TYPE_CHECKING:
    from gradtrace.analysis.bundle import Bundle


@click.command("report")
@click.argument(
    "traces", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--out",
    "target",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="The zip file to write; .zip is added where it is missing.",
)
def command(traces: tuple[Path, ...], target: Path) -> int:
    """Write what to attach to an upstream issue: verdicts, versions, configuration, digests.

    Audits every trace, and compares the first with each of the others. Holds no weights and no data;
    paths, host names and whatever is called a token or a key are taken out.
    """
    from gradtrace.analysis.bundle import gather

    if target.suffix != ".zip":
        target = target.with_name(f"{target.name}.zip")
    _check(target)
    output.progress(f"reading {', '.join(map(str, traces))}")
    bundle = gather(traces)
    _write(bundle, target)
    click.echo(f"{target} holds the report of {len(traces)} traces; read summary.txt in it first")
    return 0


def _write(bundle: Bundle, target: Path) -> None:
    """Write the file whole, or not at all."""
    from gradtrace.analysis.bundle import digests

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("summary.txt", _summary(bundle))
            text = json.dumps(output.finite(bundle.to_dict()), indent=1, allow_nan=False)
            archive.writestr("report.json", text + "\n")
            with archive.open("records.jsonl", "w", force_zip64=True) as file:
                for member in bundle.members:
                    for line in digests(member, bundle.known):
                        row = json.dumps(output.finite(line), allow_nan=False)
                        file.write(row.encode() + b"\n")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _summary(bundle: Bundle) -> str:
    from gradtrace.analysis.scrub import scrub_text
    from gradtrace.report import text
    from gradtrace.report.page_audit import audit_page
    from gradtrace.report.page_diff import diff_page

    stream = io.StringIO()
    first = bundle.members[0].name
    pages = [diff_page(result, first, name) for name, result in bundle.diffs.items()]
    pages += [audit_page(member.audit, member.name) for member in bundle.members]
    for page in pages:
        stream.write(f"==== gradtrace {page.title}\n\n")
        text.print_page(page, stream, width=100)
        stream.write("\n")
    return scrub_text(stream.getvalue(), bundle.known)


def _check(target: Path) -> None:
    """Refuse a target before any work is done for it."""
    where = f"--out {target}"
    if target.exists():
        raise BadOptionError(
            "a file that exists", where=where, expected="a new file", remedy="Choose another name."
        )
    if not target.absolute().parent.is_dir():
        raise BadOptionError(
            "no such directory to write in",
            where=where,
            expected="an existing one",
            remedy="Create it first.",
        )
