"""A loop that averages each micro-batch's loss over its own tokens is not the loop over one batch.

https://github.com/huggingface/transformers/pull/34191: above DeepSpeed, and no fault of it. Rows count
for more in micro-batches that hold few tokens; the mean over all tokens of the step is what one big
batch trains on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.replay import problem
from tests.replay.problem import Size

ROWS = 8  # of a step, on each rank, in as many micro-batches as the size says


def config(size: Size, stage: int = 2) -> dict[str, Any]:
    return problem.config(
        size,
        train_micro_batch_size_per_gpu=ROWS // size.micro_steps,
        zero_optimization={"stage": stage},
    )


def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, targets, and how many tokens each row holds."""
    draw = torch.Generator().manual_seed(step * 1000 + rank)
    x, y = torch.randn(ROWS, 7, generator=draw), 2 * torch.randn(ROWS, 5, generator=draw)
    return x, y, torch.randint(1, 6, (ROWS,), generator=draw).float()


def loss(
    module: torch.nn.Module,
    size: Size,
    step: int,
    micro_step: int,
    rank: int,
    over: str = "micro_batch",
) -> torch.Tensor:
    """Return the mean over the tokens of the micro-batch, or this micro-batch's share of the step's."""
    x, y, tokens = rows(step, rank)
    mine = torch.arange(ROWS).chunk(size.micro_steps)[micro_step]
    losses = (module(x[mine]) - y[mine]).square().mean(dim=1) * tokens[mine]
    if over == "micro_batch":
        return losses.sum() / tokens[mine].sum()
    return losses.sum() / tokens.sum() * size.micro_steps


def train(engine: Any, size: Size, rank: int, over: str = "micro_batch") -> Iterator[None]:
    for step in range(size.steps):
        for micro_step in range(size.micro_steps):
            engine.backward(loss(engine, size, step, micro_step, rank, over))
            engine.step()
        yield
