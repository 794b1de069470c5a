"""BF16_Optimizer adds the boundary micro-step after the all-reduce: it stays on its rank.

https://github.com/deepspeedai/DeepSpeed/pull/7985: 0.18.5 to 0.18.9. On one rank nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size) -> dict[str, Any]:
    return problem.config(
        size,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        zero_optimization={"stage": 1},
    )


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
