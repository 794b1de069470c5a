"""Keep the documentation true: slugs, laws, links, and the commands that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gradtrace import errors
from gradtrace.analysis.results import CAUSES, LAWS
from gradtrace.cli import failure
from gradtrace.cli.main import COMMANDS, group
from gradtrace.report import words

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def leaves(cls: type[errors.GradtraceError]) -> Iterator[type[errors.GradtraceError]]:
    below = cls.__subclasses__()
    if not below:
        yield cls
    for child in below:
        yield from leaves(child)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shown_commands() -> list[str]:
    """Return every gradtrace command line in a code block, and in the tables of commands."""
    lines = []
    for page in PAGES:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            for line in re.split(r"\n|&&", block):
                found = re.match(
                    r".*?(?:^|-m |\s)(gradtrace [a-z].*)$", line.split("#")[0].rstrip()
                )
                if found and "import " not in line and not line.startswith("gradtrace:"):
                    lines.append(found.group(1))
    return sorted(set(lines))


def test_every_slug_is_explained_and_no_other() -> None:
    text = (ROOT / "docs/messages.md").read_text(encoding="utf-8")
    documented = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    slugs = [leaf.slug for leaf in leaves(errors.GradtraceError)]
    assert len(set(slugs)) == len(slugs), "two errors share a slug"
    assert sorted(documented) == sorted([*slugs, *failure.OWN_SLUGS])


@pytest.mark.parametrize("law", LAWS)
def test_every_law_has_a_page(law: str) -> None:
    assert (ROOT / f"docs/laws/{law}.md").is_file()


def test_every_law_and_cause_has_words() -> None:
    assert set(words.LAW_WORDS) == set(LAWS)
    assert set(words.LAW_POINTS) == set(LAWS) - {"replicate"}
    assert set(words.CAUSE_WORDS) == set(CAUSES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = page if not name else page.parent / name
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"no {target}"


@pytest.mark.parametrize("line", shown_commands())
def test_commands_shown_exist(line: str) -> None:
    name, *rest = shlex.split(line)[1:]
    assert name in COMMANDS, line
    command = group.get_command(click.Context(group), name)
    assert command is not None
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for word in rest:
        if word.endswith(".py"):
            break  # what follows a script is the script's
        if word.startswith("-"):
            assert word in known | {"--help"}, line


def test_there_are_commands_to_check() -> None:
    shown = {shlex.split(line)[1] for line in shown_commands()}
    assert shown >= set(COMMANDS) - {"verify"}


def test_readme_gives_the_commands_that_ci_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("demo", "test"):
        blocks = re.findall(rf"^<!-- command: {name} -->\n```sh\n(.+)\n```$", text, re.MULTILINE)
        assert len(blocks) == 1, name
