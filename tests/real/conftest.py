"""Set the environment that real DeepSpeed needs before it is imported anywhere."""

from __future__ import annotations

import importlib.util
import os

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("no deepspeed", allow_module_level=True)

from gradtrace.testing.ranks import cpu_environment
from tests.real.measure import Runs

os.environ.update(cpu_environment())  # before anything imports deepspeed


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train and audit each entry of the catalog once, for all the tests that ask for it."""
    return Runs(tmp_path_factory.mktemp("catalog"))
