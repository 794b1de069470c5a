"""ZeRO-2 with gradient accumulation applies the last micro-step's gradient only.

https://github.com/deepspeedai/DeepSpeed/issues/7718: 0.17.6 to 0.18.2. Nothing is special: the engine
accumulates over ``gradient_accumulation_steps`` micro-steps, gradients in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size) -> dict[str, Any]:
    return problem.config(size, zero_optimization={"stage": 2})


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield  # the optimizer has stepped
