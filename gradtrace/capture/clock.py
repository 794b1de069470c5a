"""Count steps and micro-steps by what happens, never by the engine's own counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepClock:
    """Hold the tracer's own step and micro_step (DESIGN section 2).

    Attributes:
        step: the step that is open.
        micro_steps: backward passes begun in it.
        in_backward: whether one is running.
    """

    step: int = 0
    micro_steps: int = 0
    in_backward: bool = False

    @property
    def micro_step(self) -> int | None:
        """Return the running or last micro_step; ``None`` before the step's first backward."""
        return self.micro_steps - 1 if self.micro_steps else None

    def begin_backward(self) -> None:
        """Open the next micro-step."""
        self.micro_steps += 1
        self.in_backward = True

    def end_backward(self) -> None:
        """Note that the backward pass is over; its micro_step stays current until the next."""
        self.in_backward = False

    def end_step(self) -> None:
        """Open the next step."""
        self.step += 1
        self.micro_steps = 0
        self.in_backward = False
