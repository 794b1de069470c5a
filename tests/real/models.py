"""Small models that use their parameters in ways that the sharded paths must get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.utils.checkpoint


class Early(torch.nn.Module):
    """Use one layer in the first micro-step of each two, and so not at the boundary; one never."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(7, 9)
        self.early = torch.nn.Linear(9, 5)
        self.head = torch.nn.Linear(9, 5)
        self.never = torch.nn.Linear(9, 5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        out: torch.Tensor = self.head(hidden)
        self.calls += 1
        return out + self.early(hidden) if self.calls % 2 == 1 else out


class Twice(torch.nn.Module):
    """Use one layer twice; with ``recompute``, each time in a reentrant checkpoint of its own."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 7)
        self.twice = torch.nn.Linear(7, 7)
        self.last = torch.nn.Linear(7, 5)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(2):
            if self.recompute:
                again = torch.utils.checkpoint.checkpoint(self.twice, hidden, use_reentrant=True)
            else:
                again = self.twice(hidden)
            hidden = torch.tanh(again)
        out: torch.Tensor = self.last(hidden)
        return out


class Experts(torch.nn.Module):
    """Send every row to one of two layers, by turns: a stage-3 leaf module fills in the other's zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.choices[self.calls % 2](x)
        return out


class Leaf(torch.nn.Module):
    """Hold a module that ZeRO-3 is to fetch and reduce as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 7)
        self.experts = Experts()
        self.last = torch.nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.experts(torch.tanh(self.first(x))))
        return out


MODELS: Final[dict[str, Callable[[], torch.nn.Module]]] = {
    "early": Early,
    "twice": lambda: Twice(recompute=False),
    "twice_recomputed": lambda: Twice(recompute=True),
    "leaf": Leaf,
}
