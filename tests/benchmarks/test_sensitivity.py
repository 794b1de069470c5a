"""The benchmark of sensitivity runs: every hop that it simulates is clean, and what it plants is seen."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from gradtrace.trace.dtypes import DTYPES

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "sensitivity.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("sensitivity", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sensitivity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SENSITIVITY = _load()


@pytest.mark.parametrize("law", SENSITIVITY.LAWS)
def test_every_law_is_measured(law: str) -> None:
    make, kinds, names, worlds = SENSITIVITY.LAWS[law]
    for name, world in itertools.product(names, worlds[:1]):
        case = make(0, 100, world, DTYPES[name])
        assert case.convicts("one element", 0.0) is None
        assert SENSITIVITY.smallest(lambda size: case.convicts(kinds[0], size)) is not None  # noqa: B023
