"""Command ``merge``: one trace of the directories that several hosts wrote."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace.cli import output


@click.command("merge")
@click.argument("out_dir", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("parts", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@output.json_option
def command(out_dir: Path, parts: tuple[Path, ...], as_json: bool) -> int:
    """Make one trace, OUT, of the directories that the hosts of one run wrote.

    Needed where the hosts share no file system: copy their directories to one machine first. The
    originals stay; files are linked where the file system can, and copied elsewhere.
    """
    from gradtrace.trace.merge import merge

    result = merge(out_dir, parts)
    if as_json:
        output.print_json(result.to_dict())
        return 0
    from gradtrace.report.page_trace import merge_page

    output.print_page(merge_page(result))
    return 0
