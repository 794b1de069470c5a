"""Render pages as HTML that needs nothing but itself: no script, no font, no network."""

from __future__ import annotations

from importlib import resources
from typing import Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gradtrace import __version__
from gradtrace.report.escape import printable
from gradtrace.report.page import Page

# Stands near the top of every report, so that one may be replaced and nothing else is.
MARK: Final = '<meta name="generator" content="gradtrace">'


def render(page: Page) -> str:
    """Return a page as one HTML document."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["safe_text"] = printable
    template = environment.from_string(
        resources.files("gradtrace.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(page=page, mark=Markup(MARK), version=__version__, kind=kind)


def kind(block: object) -> str:
    """Return the name by which the template knows a block."""
    return type(block).__name__.lower()
