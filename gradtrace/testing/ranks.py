"""Run real DeepSpeed ranks on CPU: import once, fork a process a rank, gloo over a file.

A stage-1 or stage-2 configuration takes about 0.1 s so, against 3 s for a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from gradtrace.errors import GradtraceError, MissingDependencyError

TIMEOUT_S: Final = 120.0


class RankError(RuntimeError):
    """Carry the traceback of a rank that failed."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` in one forked process a rank, as a gloo process group.

    Args:
        world_size: number of ranks.
        function: picklable result; it finds ``torch.distributed`` initialised.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank raised, died or did not answer in time; the others are ended.
    """
    import_once()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gradtrace-ranks-") as directory:
        store = Path(directory) / "store"
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_child, args=(rank, world_size, store, pipes[rank][1], function, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [_answer(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(0.5 if process.exitcode is None else None)
                if process.is_alive():
                    process.kill()
                    process.join()


def require_deepspeed(command: str) -> None:
    """Refuse to go on without torch and deepspeed.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    for package in ("torch", "deepspeed"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"no {package}",
                where=command,
                expected="torch and deepspeed, to train with",
                remedy="Install them; from a checkout: pip install -c constraints.txt '.[deepspeed]'",
            )


def cpu_environment() -> dict[str, str]:
    """Return the environment in which DeepSpeed trains on CPUs, beside what is set already.

    It must be set before deepspeed is imported for the first time.
    """
    release = importlib.metadata.version("deepspeed")
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Releases load each other's operators from one cache, and fail.
        "TORCH_EXTENSIONS_DIR": os.environ.get(
            "TORCH_EXTENSIONS_DIR", str(Path(tempfile.gettempdir()) / f"gradtrace-ops-{release}")
        ),
        # DeepSpeed looks for ninja on the path, and it is installed beside the interpreter.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def import_once() -> None:
    """Import what every rank would import by itself, so that forked ranks find it done."""
    import deepspeed  # noqa: F401

    # torch optimizers and DeepSpeed's check for Muon (0.19) import these at first use: 3 s a rank.
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _answer(rank: int, receiver: Connection) -> Any:
    if not receiver.poll(TIMEOUT_S):
        raise RankError(f"rank {rank} did not answer in {TIMEOUT_S:.0f} s")
    try:
        kind, value = receiver.recv()
    except EOFError:
        raise RankError(f"rank {rank} died without an answer") from None
    if kind == "error":
        if isinstance(value[0], BaseException):
            raise value[0] from RankError(f"rank {rank}:\n{value[1]}")
        raise RankError(f"rank {rank}:\n{value[1]}")
    return value


def _child(
    rank: int,
    world_size: int,
    store: Path,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        prepare_rank(rank, world_size, store)
        answer = ("result", function(rank, *args))
    except BaseException as error:  # whatever it is, the parent must hear of it
        known = error if isinstance(error, GradtraceError) else None
        answer = ("error", (known, traceback.format_exc()))
    try:
        sender.send(answer)
        sender.close()
    finally:
        # Not a normal exit: atexit handlers of the parent's libraries must not run in a fork.
        os._exit(0)


def prepare_rank(rank: int, world_size: int, store: Path) -> None:
    """Make this process a gloo rank that DeepSpeed accepts, without building an operator."""
    import torch
    from deepspeed.ops import __compatible_ops__

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    # The shared-memory op serves inference only, and takes 50 s to compile.
    __compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
