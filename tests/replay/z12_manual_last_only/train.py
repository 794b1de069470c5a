"""A caller that accumulates by himself gets the last backward pass only.

https://github.com/allenai/open-instruct/pull/1498: stage 2 from 0.17.6, stage 1 from 0.18.3, to 0.19.8.
The configuration says 1 micro-step; the loop runs n backward passes and then one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size, stage: int = 2, **more: Any) -> dict[str, Any]:
    more.setdefault("gradient_accumulation_steps", 1)
    return problem.config(size, zero_optimization={"stage": stage}, **more)


def train(engine: Any, size: Size, rank: int, boundaries: bool = False) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            if boundaries:  # what mends it
                engine.set_gradient_accumulation_boundary(micro_step == size.micro_steps - 1)
            engine.backward(loss(engine, size, step, micro_step, rank) / size.micro_steps)
        engine.step()
        yield
