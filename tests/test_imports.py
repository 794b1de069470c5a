"""Reading traces must need neither torch nor deepspeed, and importing gradtrace must be quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradtrace
from gradtrace.testing.synthetic import Run, write_run

ROOT = Path(gradtrace.__file__).resolve().parents[1]

# Stands in for a laptop: even where torch is installed, nothing may reach for it.
PROBE = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "deepspeed"):
            raise ImportError(f"reached for {name}")
sys.meta_path.insert(0, Absent())
status = None
%s
print(json.dumps([status, sorted(m for m in sys.modules if "." not in m)]), file=sys.stderr)
"""


def probe(code: str) -> tuple[int | None, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE % code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    status, modules = json.loads(done.stderr.splitlines()[-1])
    return status, set(modules)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("imports") / "trace", Run(micro_steps=1))


def test_import_loads_nothing_heavy() -> None:
    _, modules = probe("import gradtrace, gradtrace.errors; gradtrace.__version__")
    assert not modules & {"torch", "deepspeed", "numpy", "rich", "jinja2", "click"}


def test_help_loads_nothing_heavy() -> None:
    _, modules = probe("import gradtrace.cli.main as m; status = m.run(['--help'])")
    assert not modules & {"torch", "deepspeed", "numpy", "rich", "jinja2"}


def test_public_names_need_no_torch_to_read() -> None:
    _, modules = probe("import gradtrace as g; g.open_trace, g.Trace, g.diff, g.audit")
    assert not modules & {"torch", "deepspeed"}


@pytest.mark.parametrize(
    "command", ["info {0}", "diff {0} {0}", "audit {0}", "show {0} --step 0", "verify {0}"]
)
def test_offline_commands(command: str, trace: Path) -> None:
    argv = command.format(trace).split()
    status, modules = probe(f"import gradtrace.cli.main as m; status = m.run({argv!r})")
    assert status == 0
    assert not modules & {"torch", "deepspeed"}


def test_public_api() -> None:
    assert set(gradtrace.__all__) <= set(dir(gradtrace))
    assert gradtrace.errors.GradtraceError.slug == "error"
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = gradtrace.nothing_of_this_name
