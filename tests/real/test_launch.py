"""`gradtrace run`: an unedited script, under torchrun, its output and status its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gradtrace.trace.reader import open_trace

SCRIPT = """
    import argparse, importlib.util, os, sys, warnings
    warnings.simplefilter("ignore")
    assert "deepspeed" not in sys.modules, "the script's own environment must still count"
    assert importlib.util.find_spec("deepspeed"), "transformers looks for it like this, long before"
    import torch
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__["deepspeed_shm_comm"] = False
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--fail")
    chosen = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9})
    data = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(chosen.steps):
        loss = engine(torch.randn(2, 7, generator=data)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"loss {step} {loss.item()!r}", flush=True)
    if chosen.fail == "exit":
        sys.exit(3)
    if chosen.fail == "raise":
        raise ValueError("the script's own")
    # Without this a rank that leaves first can make gloo abort the other, traced or not.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def _port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _torchrun(
    tmp_path: Path, prefix: list[str], args: list[str], ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [f"--master-port={_port()}", *prefix, str(script), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def _losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


def test_under_torchrun_the_script_prints_the_same_and_is_traced(tmp_path: Path) -> None:
    plain = _torchrun(tmp_path, [], ["--steps", "3"])
    traced = _torchrun(
        tmp_path,
        ["-m", "gradtrace", "run", "-o", str(tmp_path / "trace"), "--steps", "1:"],
        ["--steps", "3"],
    )
    assert plain.returncode == traced.returncode == 0, traced.stderr
    assert len(_losses(plain)) == 3
    assert _losses(plain) == _losses(traced)
    trace = open_trace(tmp_path / "trace")
    assert sorted(trace.ranks) == [0, 1]
    assert trace.steps == (1, 2)


@pytest.mark.parametrize(("fail", "status"), [("exit", 3), ("raise", 1)])
def test_the_scripts_own_end_passes_through_and_the_trace_is_sealed(
    fail: str, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port()}
    command = [sys.executable, "-m", "gradtrace", "run", "-o", str(tmp_path / "trace")]
    command += [str(script), "--steps", "2", "--fail", fail]
    import os

    done = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    if fail == "raise":
        assert "ValueError: the script's own" in done.stderr
        own = done.stderr.split("Traceback")[-1].split("gradtrace: ")[0]
        assert "gradtrace" not in own
        assert "holds the trace, up to step 2" in done.stderr
    trace = open_trace(tmp_path / "trace")
    assert trace.steps == (0, 1)
    assert trace.ranks[0].closed


def test_a_script_that_is_not_there_is_a_named_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradtrace", "run", "-o", str(tmp_path / "t"), "nowhere.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr
