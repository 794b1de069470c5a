"""All cases, by slug: a folder of this package with a ``train`` and an ``expected`` module."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.replay.case import Case

SLUGS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/train.py")))
CASES: dict[str, Case] = {
    slug: importlib.import_module(f"tests.replay.{slug}.expected").CASE for slug in SLUGS
}
