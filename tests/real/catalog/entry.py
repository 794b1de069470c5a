"""Say what one configuration of the catalog must give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.real.training import Setup


@dataclass(frozen=True)
class Entry:
    """Describe a configuration and what gradtrace must make of it.

    Attributes:
        setup: the training.
        refused: for a configuration that `wrap` must refuse: a part of what the error says was found.
        finding: for one that meets a true upstream defect: the (law, cause) that audit must find first.
        reference: where that defect is reported, or the test that reproduces it without gradtrace.
    """

    setup: Setup
    refused: str | None = None
    finding: tuple[str, str] | None = None
    reference: str = ""

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def steps_at_start(self) -> bool:
        """Return whether it matters that DeepSpeed steps the optimizer before training begins.

        FP16_Optimizer and FP16_UnfusedOptimizer do, with zero gradients: Adam's bias correction is one
        step ahead of other stages', and weight decay (in groups) has moved weights and momentum once. So
        weights part after step 0 though all gradients of it are the same. Reproduced without gradtrace
        in tests/real/test_stage0.py. Source: 0.19.8, initialize_optimizer_states of both.
        """
        setup = self.setup
        stateless = "sgd" in setup.client and not setup.groups
        return setup.stage == 0 and (setup.bf16 or setup.fp16) and not stateless

    @property
    def problem(self) -> tuple[Any, ...]:
        """Return what two clean configurations must share to owe each other equal gradients."""
        setup = self.setup
        return (
            setup.model,
            setup.dtype,
            setup.groups,
            setup.ranks * setup.micro_steps * setup.batch,
            setup.config.get("gradient_clipping"),
            setup.client.removeprefix("fused_"),
            setup.overflow_in,
            str(setup.config.get("torch_autocast")),
            str(setup.config.get("fp16")),  # another loss scale skips other steps
            setup.config.get("gradient_allreduce_op"),
            self.steps_at_start,
        )
