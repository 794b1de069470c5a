"""`gradtrace run`: an unedited script, under torchrun, its output and status its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gradtrace
from gradtrace.errors import MissingRankError
from gradtrace.trace.merge import merge
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
    parser.add_argument("--local_rank")
    parser.add_argument("--section", action="store_true")
    chosen = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9, **({"gradtrace": {"steps": "1:"}} if chosen.section else {})})
    class Numbers(torch.utils.data.Dataset):
        def __len__(self): return 2 * chosen.steps
        def __getitem__(self, at):
            return torch.full((7,), float(at) + torch.utils.data.get_worker_info().id)
    loader = iter(torch.utils.data.DataLoader(Numbers(), 2, num_workers=2))
    data = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(chosen.steps):
        batch = torch.randn(2, 7, generator=data) + (next(loader) if chosen.fail else 0)
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"loss {step} {loss.item()!r}", flush=True)
    if chosen.fail == "exit":
        sys.exit(3)
    if chosen.fail == "interrupt":
        import signal
        os.kill(os.getpid(), signal.SIGINT)
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


def _alone(
    prefix: list[str], tmp_path: Path, *args: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script as the only rank, without a launcher."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(), **variables}
    return subprocess.run(
        [sys.executable, *prefix, str(script), *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _own(text: str) -> list[str]:
    """Return the lines that neither gradtrace nor a clock wrote."""
    lines = (line for line in text.splitlines() if not line.startswith(("gradtrace: ", "[")))
    return [re.sub("0x[0-9a-f]+", "0x", line) for line in lines]


@pytest.mark.parametrize(
    ("fail", "status"), [("exit", 3), ("raise", 1), ("interrupt", -signal.SIGINT)]
)
def test_the_scripts_own_end_passes_through_and_the_trace_is_sealed(
    fail: str, status: int, tmp_path: Path
) -> None:
    """The script has forked data-loader workers, too."""
    words = ("--steps", "2", "--fail", fail)
    plain = _alone([], tmp_path, *words)
    run = ["-m", "gradtrace", "run", "-o", str(tmp_path / "trace")]
    traced = _alone(run, tmp_path, *words)
    assert traced.returncode == plain.returncode == status, traced.stderr
    assert _own(traced.stdout) == _own(plain.stdout)
    assert _own(traced.stderr) == _own(plain.stderr)
    assert traced.stderr.count("holds the trace, up to step 2") == 1
    trace = open_trace(tmp_path / "trace")
    assert trace.steps == (0, 1)
    assert trace.ranks[0].closed
    assert gradtrace.audit(trace).verdict == "pass"


def test_a_rank_that_is_killed_leaves_a_trace_that_can_be_read(tmp_path: Path) -> None:
    """What is not sealed is lost; what is sealed is whole, and the reader says what is missing."""
    run = ["-m", "gradtrace", "run", "-o", str(tmp_path / "trace")]
    script = SCRIPT.replace('"interrupt":', '"interrupt":\n        os._exit(9)')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SCRIPT", script)
        done = _alone(run, tmp_path, "--steps", "40", "--fail", "interrupt")
    assert done.returncode == 9
    trace = open_trace(tmp_path / "trace")
    assert trace.steps and trace.ranks[0].closed is None
    assert any("never closed" in note for note in trace.notes)


def test_command_environment_and_section_give_the_same_trace(tmp_path: Path) -> None:
    run = ["-m", "gradtrace", "run"]
    ways: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
        "command": ([*run, "-o", str(tmp_path / "command"), "--steps", "1:"], [], {}),
        "environment": (
            run,
            [],
            {"GRADTRACE_OUT": str(tmp_path / "environment"), "GRADTRACE_STEPS": "1:"},
        ),
        "section": ([*run, "-o", str(tmp_path / "section")], ["--section"], {}),
    }
    for prefix, words, variables in ways.values():
        done = _alone(prefix, tmp_path, "--steps", "3", *words, **variables)
        assert done.returncode == 0, done.stderr
    traces = [open_trace(tmp_path / name) for name in ways]
    assert traces[0].steps == (1, 2)
    for trace in traces[1:]:
        assert trace.manifest.plan == traces[0].manifest.plan
        assert trace.manifest.ds_config == traces[0].manifest.ds_config
        assert trace.ranks[0].records == traces[0].ranks[0].records
        result = gradtrace.diff(traces[0], trace)
        assert (result.verdict, result.notes) == ("agree", gradtrace.diff(*traces[:1] * 2).notes)
    assert not (tmp_path / "nowhere").exists()
    plain = _alone([], tmp_path, "--steps", "1", "--section")
    assert plain.returncode == 0  # DeepSpeed does not mind, and nothing is traced
    assert "gradtrace" not in plain.stderr


def test_two_nodes_without_a_shared_file_system(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    port = _port()
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={at}"),
                *("--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", "gradtrace", "run", "-o", str(tmp_path / f"host{at}")),
                *(str(script), "--steps", "2"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for at in range(2)
    ]
    told = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert all("holds this host's part of the trace" in text for text in told)
    with pytest.raises(MissingRankError, match="gradtrace merge"):
        open_trace(tmp_path / "host0")
    merge(tmp_path / "whole", [tmp_path / "host0", tmp_path / "host1"])
    assert gradtrace.audit(tmp_path / "whole").verdict == "pass"


def test_the_deepspeed_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--num_gpus=2"]
    command += [f"--master_port={_port()}", "--module", "gradtrace", "run"]
    command += ["-o", str(tmp_path / "trace"), str(script), "--steps", "1"]
    if not Path(command[1]).exists():
        command[1:2] = ["-m", "deepspeed.launcher.runner"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(open_trace(tmp_path / "trace").ranks) == [0, 1]


def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs pip install '.[frameworks]'")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed"]
    command += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    command += ["--dynamo_backend=no", f"--main_process_port={_port()}", "-m", "gradtrace", "run"]
    command += ["-o", str(tmp_path / "trace"), str(script), "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(open_trace(tmp_path / "trace").ranks) == [0, 1]


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
