"""The gradients that a step should have applied: plain PyTorch in fp32, no DeepSpeed, no tracer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.replay import problem
from tests.replay.problem import Size

Array = npt.NDArray[np.float64]
Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Local:
    """Hold every rank's own gradients of one parameter in one step.

    Attributes:
        gradients: ``[rank, micro_step, element]``; zero where the parameter was not used.
        before: the same of every step before, the first first.
    """

    gradients: Array
    before: tuple[Array, ...] = ()

    def mean(self, micro_steps: Iterable[int] | None = None) -> Array:
        """Return the mean over the ranks of the sum over these micro-steps, or all."""
        chosen = self.gradients
        if micro_steps is not None:
            chosen = chosen[:, list(micro_steps)]
        return mean(chosen)


def mean(gradients: Array) -> Array:
    """Return the mean over the ranks of the sums over the micro-steps."""
    found: Array = gradients.sum(axis=1).mean(axis=0)
    return found


def locals_of(
    train: ModuleType, size: Size, weights: Sequence[Weights], loop: Mapping[str, Any]
) -> list[dict[str, Local]]:
    """Compute every rank's gradients of every step from the weights that it began with.

    Args:
        train: the case's module.
        size: the training.
        weights: of one rank: before the first step, and after each.
        loop: what the module's loop, or its own loss, is told.
    """
    per_rank = [_of_rank(train, size, weights, rank, loop) for rank in range(size.ranks)]
    found: list[dict[str, Local]] = []
    for step in range(size.steps):
        found.append(
            {
                name: Local(
                    np.array([[micro[name] for micro in steps[step]] for steps in per_rank]),
                    tuple(other[name].gradients for other in found),
                )
                for name in weights[0]
            }
        )
    return found


def _of_rank(
    train: ModuleType, size: Size, weights: Sequence[Weights], rank: int, loop: Mapping[str, Any]
) -> list[list[dict[str, Array]]]:
    module: torch.nn.Module = getattr(train, "model", problem.model)(size)
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    steps = []
    for step, window in enumerate(_windows(train, size, loop)[: size.steps]):
        for name, parameter in named.items():
            values = torch.from_numpy(weights[step][name]).float().reshape(parameter.shape)
            parameter.data.copy_(values)
        micro_steps = []
        for place in window:
            module.zero_grad()
            if hasattr(train, "loss") and train.loss is not problem.loss:
                train.loss(module, size, *place, rank, **loop).backward()
            else:
                problem.loss(module, size, *place, rank).backward()
            micro_steps.append({name: _gradient(p) for name, p in named.items()})
        steps.append(micro_steps)
    return steps


def _windows(train: ModuleType, size: Size, loop: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """Return what the micro-steps of each step are drawn from."""
    if hasattr(train, "windows"):
        found: list[list[tuple[int, int]]] = train.windows(size, **loop)
        return found
    return [[(step, m) for m in range(size.micro_steps)] for step in range(size.steps)]


def _gradient(parameter: torch.Tensor) -> Array:
    if parameter.grad is None:
        return np.zeros(parameter.numel())
    return parameter.grad.double().flatten().numpy().copy()


def distance(applied: Array, alternatives: Sequence[Array]) -> float:
    """Return the relative L2 distance to expected values, for each element to the nearest of several."""
    errors = np.min([np.abs(applied - values) for values in alternatives], axis=0)
    size = max(float(np.linalg.norm(values)) for values in alternatives)
    return float(np.linalg.norm(errors)) / size if size else float(np.linalg.norm(errors))
