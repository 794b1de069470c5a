"""Adding many bf16 gradients up in bf16 loses what fp32 would keep.

https://github.com/deepspeedai/DeepSpeed/issues/1488, https://github.com/deepspeedai/DeepSpeed/issues/2352:
every release, by default. No law is broken: every sum is right within the rounding of bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss


def config(size: Size, stage: int = 2, accumulate_in: str | None = None) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if accumulate_in is not None:
        more["data_types"] = {"grad_accum_dtype": accumulate_in}
    return problem.config(size, bf16={"enabled": True}, zero_optimization={"stage": stage}, **more)


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
