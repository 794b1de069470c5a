"""ZeRO-2 with the optimizer on the CPU applies the first and the last micro-step's gradients only.

https://github.com/deepspeedai/DeepSpeed/pull/6550 brought it in 0.15.2,
https://github.com/deepspeedai/DeepSpeed/pull/7967 mended it in 0.19.0. Two micro-steps are right by
accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size) -> dict[str, Any]:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return problem.config(size, zero_optimization=zero)


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
