"""``scale_wrt_gas=False`` is ignored: the gradients are 1/n of what the caller asked for.

https://github.com/deepspeedai/DeepSpeed/pull/7724: 0.18.3 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size, stage: int = 1) -> dict[str, Any]:
    return problem.config(size, zero_optimization={"stage": stage})


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank), scale_wrt_gas=False)
            engine.step()
        yield
