"""Set the environment that real DeepSpeed needs before it is imported anywhere."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR",
    str(Path(tempfile.gettempdir()) / f"gradtrace-ops-{importlib.metadata.version('deepspeed')}"),
)
