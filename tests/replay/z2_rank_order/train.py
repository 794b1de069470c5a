"""Ranks whose parameters get their gradients in different orders average different parameters.

https://github.com/deepspeedai/DeepSpeed/issues/2343, every release: a bucket is filled in the order in
which gradients arrive on the rank. Here rank 1 uses two layers of the same size the other way round,
so that nothing fails: the gradient of one layer is averaged with that of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.replay import problem
from tests.replay.problem import Size


class Branches(torch.nn.Module):
    """Pass two layers of one size, in the order that the caller asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(7, 7)
        self.right = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        first, second = (self.right, self.left) if turned else (self.left, self.right)
        out: torch.Tensor = self.head(torch.tanh(second(torch.tanh(first(x)))))
        return out


def model(size: Size) -> torch.nn.Module:
    torch.manual_seed(0)
    return Branches()


def config(size: Size) -> dict[str, Any]:
    return problem.config(size, zero_optimization={"stage": 2})


def loss(
    module: torch.nn.Module, size: Size, step: int, micro_step: int, rank: int
) -> torch.Tensor:
    x, y = problem.batch(size, step, micro_step, rank)
    return torch.nn.functional.mse_loss(module(x, turned=rank == 1), y)


def train(engine: Any, size: Size, rank: int) -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            engine.step()
        yield
