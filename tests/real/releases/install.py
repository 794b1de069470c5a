"""Install releases of DeepSpeed side by side, each into a directory of its own, and run python on one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PIP = (sys.executable, "-m", "pip", "install")
FLAGS = ("--no-deps", "--no-build-isolation", "--no-compile", "--quiet")


def installed() -> str:
    """Return the release that this environment has."""
    return importlib.metadata.version("deepspeed")


def ensure(release: str, directory: Path) -> Path:
    """Install a release with pip, unless it is there; its operators are built at use, if ever."""
    target = directory / release
    if not any(target.glob("deepspeed-*.dist-info")):
        subprocess.run(
            [*PIP, *FLAGS, "--target", str(target), f"deepspeed=={release}"],
            env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
            check=True,
        )
    return target


def location(release: str, directory: Path) -> Path:
    """Return the directory that holds a release's ``deepspeed/``."""
    if release != installed():
        return ensure(release, directory)
    return Path(str(importlib.metadata.distribution("deepspeed").locate_file("")))


def environment(release: str, directory: Path) -> dict[str, str]:
    """Return the environment that makes python import a release, and this checkout.

    The extension cache is keyed by operator alone, so each release has its own (deepspeed-map.md, C).
    """
    paths = [str(ROOT)]
    if release != installed():
        paths.insert(0, str(location(release, directory)))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_EXTENSIONS_DIR": str(directory / f"torch-extensions-{release}"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "2",  # 0.14 to 0.15.4 ask for it when stage 3 begins
    }


def pip_flags() -> str:
    """Return how a release is installed, for the documentation."""
    return f"DS_BUILD_OPS=0 pip install {' '.join(FLAGS[:-1])} --target DIR deepspeed==X"
