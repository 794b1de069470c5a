"""With ``contiguous_gradients: false`` on the CPU accelerator gradients are not reduced at all.

https://github.com/deepspeedai/DeepSpeed/pull/8382: up to 0.19.7. Every rank steps its part of the
weights with its own gradient, and the all-gather makes all agree on the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size, stage: int = 2) -> dict[str, Any]:
    return problem.config(size, zero_optimization={"stage": stage, "contiguous_gradients": False})


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
