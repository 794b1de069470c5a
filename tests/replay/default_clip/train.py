"""A configuration that does not speak of clipping trains otherwise from 0.19.3 on.

https://github.com/deepspeedai/DeepSpeed/pull/8068: no bug. The default of ``gradient_clipping`` became
1.0, and was 0 (no clipping) before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size, stage: int = 2) -> dict[str, Any]:
    settings = problem.config(size, zero_optimization={"stage": stage})
    del settings["gradient_clipping"]
    return settings


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
