"""Build what a case needs beside this checkout: other releases of DeepSpeed and of Hugging Face's.

A release of DeepSpeed lies in a directory of its own, which ``PYTHONPATH`` names before all else. Hugging
Face's packages of one time have an environment of their own; another release of one of them alone lies in
a directory as well, so that packages are swapped one at a time.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.real.releases import install

ROOT: Final = install.ROOT
# What DeepSpeed and gradtrace import, beside torch.
_NEEDED: Final = (
    *("numpy", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic"),
    *("tqdm", "einops", "setuptools", "safetensors", "xxhash", "rich", "click", "jinja2"),
)


def environment(directory: Path, name: str, pins: Mapping[str, str]) -> Path:
    """Return the python of an environment with torch as here and the packages pinned.

    Args:
        directory: where environments are kept; one that is there is used again.
        name: of this one.
        pins: package -> release.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    home = directory / name
    done = home / "complete"
    python = home / "bin" / "python"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert torch is not None
        subprocess.run([*pip, torch[0], *_NEEDED], check=True)
        subprocess.run([*pip, *(f"{package}=={at}" for package, at in pins.items())], check=True)
        done.touch()
    return python


def package(directory: Path, name: str, release: str) -> Path:
    """Return a directory that holds one release of one package, without what it depends on."""
    target = directory / f"{name}-{release}"
    if not any(target.glob("*.dist-info")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(target), f"{name}=={release}"], check=True)
    return target


def variables(deepspeed: Path | None, *before: Path, port: int) -> dict[str, str]:
    """Return the environment variables of one rank alone.

    Args:
        deepspeed: directory of a release, or ``None`` for the one that is installed.
        before: directories that ``PYTHONPATH`` names before it.
        port: a free one, of this run only.
    """
    paths = [*before, *([] if deepspeed is None else [deepspeed]), ROOT]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def printed(command: Sequence[str], variables: Mapping[str, str], directory: Path) -> str:
    """Run a training, and return what it printed.

    Raises:
        subprocess.CalledProcessError: it failed; what it said of that was passed on.
    """
    done = subprocess.run(
        command, env=variables, cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout


def gradtrace_run(python: Path | str, trace: Path, script: Path, *args: str) -> Sequence[str]:
    """Return the command ``gradtrace run`` without DeepSpeed's shared-memory operator.

    Each release would compile it first, for a minute; gloo does the same sums.
    """
    return [str(python), "-m", "cases.without_shm", "run", "-o", str(trace), str(script), *args]
