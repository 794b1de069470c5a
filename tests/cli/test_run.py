"""`gradtrace run` beside plain python: what a script sees and how it ends are the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import gradtrace

ROOT = Path(gradtrace.__file__).resolve().parents[1]

# Each is a script's whole text; none of them makes an engine.
SCRIPTS = {
    "what it is": """
        import json, sys, __main__
        held = sorted(globals().items())
        print({k: str(v) for k, v in held if k.startswith("__") and k != "__loader__"})
        print(type(__loader__).__name__, __loader__.get_filename(), type(__builtins__).__name__)
        print(sys.argv, sys.path[0], vars(__main__) is globals(), sys.stdout.errors)
        print(sorted({"torch", "numpy", "deepspeed", "transformers"} & set(sys.modules)))
    """,
    "exit 3": "import sys; print('out'); sys.exit(3)",
    "exit with a text": "import sys; sys.exit('a text')",
    "exit with nothing": "raise SystemExit",
    "an exception": """
        def inner(): raise ValueError("own")
        try:
            1 / 0
        except ZeroDivisionError as error:
            inner()
    """,
    "an OSError": "open('/nonexistent/file')",
    "a MemoryError": "raise MemoryError",
    "a group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "a hook of its own": """
        import sys
        def hook(kind, error, trace):
            print("hook", kind.__name__, trace.tb_frame.f_code.co_name, trace.tb_next)
        sys.excepthook = hook
        raise KeyError(1)
    """,
    "no Python": "x = (",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "heeds interrupts": """
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT); time.sleep(9)
        except KeyboardInterrupt:
            print("goes on")
    """,
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "handles SIGTERM": """
        import os, signal, sys
        print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *a: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "leaves at once": "import os; os._exit(7)",
    "what no terminal can show": "print('\\u1234')",
    "pickles, threads, exit handlers": """
        import atexit, pickle, threading, time
        class Mine: pass
        def works(): return type(pickle.loads(pickle.dumps(Mine()))) is Mine
        def later():
            time.sleep(0.3)
            print("thread", works())
        atexit.register(lambda: print("exit handler", works()))
        threading.Thread(target=later).start()
        print(works())
    """,
    "forks by hand": """
        import os, sys
        if os.fork() == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """,
    "processes": """
        import multiprocessing, sys
        class Mine:
            def __init__(self, value): self.value = value
        def work(mine): return mine.value, __name__
        def fail(_): raise ValueError("in a worker")
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(work, [Mine(1), Mine(2)]))
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.map(fail, [1])
    """,
}


def _run(prefix: list[str], words: list[str], where: Path) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, *prefix, *words],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=_heed_interrupts,
    )
    ours = "trained no DeepSpeed engine"
    err = "".join(line for line in done.stderr.splitlines(True) if ours not in line)
    # Addresses differ from process to process.
    return done.returncode, *(re.sub("0x[0-9a-f]+", "0x", text) for text in (done.stdout, err))


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it


def compare(words: list[str], where: Path) -> tuple[int, str, str]:
    """Run plain and under gradtrace, compare status, stdout and stderr, and return them."""
    plain = _run([], words, where)
    traced = _run(["-m", "gradtrace", "run", "-o", "trace"], words, where)
    assert traced == plain
    assert not (where / "trace").exists()
    return traced


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_itself(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]))
    status, out, err = compare(["script.py", "--steps", "9", "-o", "x", "--", "--help"], tmp_path)
    expected = {
        "exit 3": 3,
        "exit with a text": 1,
        "an exception": 1,
        "no Python": 1,
        "interrupted": -signal.SIGINT,
        "terminated": -signal.SIGTERM,
        "handles SIGTERM": 9,
        "leaves at once": 7,
        "processes": 1,
    }
    assert status == expected.get(name, status)
    assert "gradtrace" not in err
    if name == "what it is":
        assert "['script.py', '--steps', '9', '-o', 'x', '--', '--help']" in out


@pytest.mark.parametrize("path", ["./script.py", "../script.py", "link.py"])
def test_paths_are_seen_as_given(path: str, tmp_path: Path) -> None:
    where = tmp_path / "here"
    where.mkdir()
    text = textwrap.dedent(SCRIPTS["what it is"])
    for place in (where / "script.py", tmp_path / "script.py"):
        place.write_text(text)
    (where / "link.py").symlink_to(tmp_path / "script.py")
    compare([path], where)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("package.module", "what it is"),
        ("package.module", "an exception"),
        # A package cannot spawn processes: multiprocessing does not import its __main__ again.
        ("package.module", "processes"),
        ("package", "what it is"),
        ("package.inner", "an exception"),
    ],
)
def test_a_module_is_itself(module: str, name: str, tmp_path: Path) -> None:
    text = textwrap.dedent(SCRIPTS[name])
    for place in ("module", "__main__", "inner/__main__"):
        file = tmp_path / "package" / f"{place}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    compare(["-m", module, "--steps", "9", "-m", "x"], tmp_path)


@pytest.mark.parametrize("module", ["nowhere", "json.nowhere", "package.module", "package.inner"])
def test_a_module_that_is_not_there_is_the_interpreters_error(module: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text("import not_there_at_all\n")
    status, _, err = compare(["-m", module], tmp_path)
    assert status == 1
    assert "No module named" in err


def test_a_script_that_is_not_there_is_a_named_error(tmp_path: Path) -> None:
    status, out, err = _run(["-m", "gradtrace", "run", "-o", "t"], ["nowhere.py"], tmp_path)
    assert (status, out) == (2, "")
    assert "nowhere.py" in err
    assert err.rstrip().endswith("[bad_option]")


def test_the_launchers_local_rank_is_handed_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)\n")
    prefix = ["-m", "gradtrace", "--local_rank=1", "run", "-o", "t"]
    status, out, _ = _run(prefix, ["script.py", "--lr", "1"], tmp_path)
    assert (status, out) == (0, "['script.py', '--local_rank=1', '--lr', '1']\n")


def test_a_signal_from_outside(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "gradtrace", "run", "-o", "t", "waits.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_heed_interrupts,  # noqa: PLW1509  nothing runs beside it
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == -number


def test_the_directory_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("print(1)\n")
    monkeypatch.setenv("GRADTRACE_OUT", "t")
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gradtrace", "run", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "t was not written" in done.stderr
    environment["GRADTRACE_STEPS"] = "soon"
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "GRADTRACE_STEPS" in done.stderr
