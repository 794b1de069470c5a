"""What the reproductions share: a small model, data that every rank can draw, SGD with a rate of 1.

With a rate of 1 and nothing else in the optimizer, what a step takes off the weights is the gradient
that DeepSpeed applied: neither an accessor nor a tracer is needed to see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.real.training import build

ROWS = 3  # of a micro-batch


@dataclass(frozen=True)
class Size:
    """Size a training: what may vary without changing what is reproduced.

    Attributes:
        model: a name of `tests.real.training.build`.
        ranks, micro_steps, steps: how many; micro-steps in a step.
        groups: whether matrices and the rest are two groups of parameters.
    """

    model: str = "mlp"
    ranks: int = 2
    micro_steps: int = 4
    steps: int = 2
    groups: bool = False


def model(size: Size) -> torch.nn.Module:
    """Build the model, the same on every rank."""
    return build(size.model)


def sgd(module: torch.nn.Module, size: Size) -> torch.optim.Optimizer:
    """Return an optimizer whose step takes the gradient off the weights."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not size.groups:
        return torch.optim.SGD(trained, lr=1.0)
    kinds = ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1])
    return torch.optim.SGD([{"params": kind} for kind in kinds], lr=1.0)


def config(size: Size, **more: Any) -> dict[str, Any]:
    """Return what every configuration says; ``more`` adds to it."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": size.micro_steps,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # or the CPU optimizer is compiled for a minute
        "steps_per_print": 10**9,
        **more,
    }


def initialize(module: torch.nn.Module, size: Size, settings: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd(module, size), config=settings)
    return engine


def batch(size: Size, step: int, micro_step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank's inputs and targets of one micro-step, in values that bf16 holds too."""
    draw = torch.Generator().manual_seed((step * 1000 + micro_step) * 1000 + rank)
    widths = (1, 1) if size.model == "one" else (7, 5)
    x, y = (torch.randn(ROWS, width, generator=draw) for width in widths)
    return x.bfloat16().float(), 2 * y.bfloat16().float()


def loss(
    module: torch.nn.Module, size: Size, step: int, micro_step: int, rank: int
) -> torch.Tensor:
    """Return the mean squared error over one micro-batch; ``module`` may be the engine."""
    x, y = batch(size, step, micro_step, rank)
    dtype = next(module.parameters()).dtype
    return torch.nn.functional.mse_loss(module(x.to(dtype)), y.to(dtype))
