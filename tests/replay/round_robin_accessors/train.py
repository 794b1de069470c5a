"""With ``round_robin_gradients`` DeepSpeed's accessors give other parameters' gradients.

0.15.1 to 0.19.8; no report was found. Training is right, but ``safe_get_full_grad`` looks parameters up
in the order of the model, and the flat partitions are in another. Parameters of one size make that
silent (others make it fail). Each step yields what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.replay import problem
from tests.replay.problem import Size, loss


class Layers(torch.nn.Module):
    """Pass four layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[:, :5]


def model(size: Size) -> torch.nn.Module:
    torch.manual_seed(0)
    return Layers()


def config(size: Size, stage: int = 2, round_robin: bool = True) -> dict[str, Any]:
    return problem.config(
        size, zero_optimization={"stage": stage, "round_robin_gradients": round_robin}
    )


def train(engine: Any, size: Size, rank: int) -> Iterator[dict[str, Any]]:
    from deepspeed.utils import safe_get_full_grad

    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank))
            if micro_step == size.micro_steps - 1:
                told = {
                    name: safe_get_full_grad(parameter)
                    for name, parameter in engine.module.named_parameters()
                    if parameter.requires_grad
                }
            engine.step()
        yield told
