"""Without ZeRO, in bf16, gradients are not cleared after the step: each step adds to the last.

https://github.com/deepspeedai/DeepSpeed/issues/7837: 0.17.6 to 0.18.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size) -> dict[str, Any]:
    return problem.config(size, bf16={"enabled": True}, zero_optimization={"stage": 0})


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
