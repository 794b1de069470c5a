"""The last window of an epoch is shorter than the accumulation.

https://github.com/deepspeedai/DeepSpeed/issues/7439, every release; no bug, but a trap. An epoch has
one micro-batch fewer than two windows take. Where the caller forces a boundary at its end, the
gradients there were divided by n though fewer were added; where he does not, a window mixes two epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.replay import problem
from tests.replay.problem import Size, loss

EPOCHS = 2


def config(size: Size, stage: int = 2) -> dict[str, Any]:
    return problem.config(size, zero_optimization={"stage": stage})


def windows(size: Size, forced: bool = True) -> list[list[tuple[int, int]]]:
    """Return the (epoch, number) of the micro-batches of every step."""
    length = 2 * size.micro_steps - 1
    batches = [(epoch, number) for epoch in range(EPOCHS) for number in range(length)]
    found: list[list[tuple[int, int]]] = [[]]
    for epoch, number in batches:
        found[-1].append((epoch, number))
        if len(found[-1]) == size.micro_steps or (forced and number == length - 1):
            found.append([])
    return found


def train(engine: Any, size: Size, rank: int, forced: bool = True) -> Iterator[None]:
    *whole, rest = windows(size, forced)
    for window in whole:
        for epoch, number in window:
            if forced:
                engine.set_gradient_accumulation_boundary((epoch, number) == window[-1])
            engine.backward(loss(engine, size, epoch, number, rank))
            engine.step()
        yield
    for epoch, number in rest:  # no step follows
        engine.backward(loss(engine, size, epoch, number, rank))
        engine.step()
