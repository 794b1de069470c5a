"""Define what diff finds step by step: how far the runs are apart, and against what noise.

Frozen data, as in `gradtrace.analysis.results`; nothing here opens a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradtrace.trace.schema import encode_float


def encoded(value: float | None) -> float | str | None:
    """Return a number as JSON holds it."""
    return None if value is None else encode_float(value)


@dataclass(frozen=True, slots=True)
class Growth:
    """Say how far apart the two runs are at one step.

    Attributes:
        gradient: L2 norm of the difference over that of the baseline, of the averaged gradient of the
            whole step, divided by the sum of the seeds (the baseline's where the runs cut the batch
            alike); over all compared parameters. ``None``: not known; infinite: finite on one side only.
        gradient_max_abs: the largest difference of one element of it.
        local_grad: as ``gradient``, over all ranks' own gradients, where they correspond.
        baseline_loss, candidate_loss: mean over ranks and micro-steps, as handed to ``backward``.
        weights: how the weights at the start of the step relate, by their hashes: ``equal``,
            ``differ`` or ``unknown``.
        weights_l2: as ``gradient``, of the weights; ``None`` where values were not recorded.
        judged: the step was compared; false after the one where the runs part.
    """

    step: int
    gradient: float | None
    gradient_max_abs: float | None = None
    local_grad: float | None = None
    baseline_loss: float | None = None
    candidate_loss: float | None = None
    weights: str = "unknown"
    weights_l2: float | None = None
    judged: bool = True

    @property
    def loss_difference(self) -> float | None:
        """Return the candidate's loss less the baseline's."""
        if self.baseline_loss is None or self.candidate_loss is None:
            return None
        return self.candidate_loss - self.baseline_loss

    def to_dict(self) -> dict[str, Any]:
        """Return the members of one entry of ``growth``."""
        return {
            "step": self.step,
            "gradient_rel_l2": encoded(self.gradient),
            "gradient_max_abs": encoded(self.gradient_max_abs),
            "local_grad_rel_l2": encoded(self.local_grad),
            "baseline_loss": encoded(self.baseline_loss),
            "candidate_loss": encoded(self.candidate_loss),
            "loss_difference": encoded(self.loss_difference),
            "weights": self.weights,
            "weights_rel_l2": encoded(self.weights_l2),
            "judged": self.judged,
        }


@dataclass(frozen=True, slots=True)
class EnvelopeStep:
    """Hold the candidate against the baseline's own sensitivity at one step.

    Attributes:
        candidate: as `Growth.gradient`: how far the candidate is from the baseline.
        largest: how far the farthest of the perturbed runs is.
        ratio: the first over the second.
        inside: ``ratio`` is at most the factor.
    """

    step: int
    candidate: float
    largest: float
    ratio: float
    inside: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the members of one entry of ``envelope.steps``."""
        return {
            "step": self.step,
            "candidate": encoded(self.candidate),
            "largest": encoded(self.largest),
            "ratio": encoded(self.ratio),
            "inside": self.inside,
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """Say whether the candidate strays farther than the baseline does when rounding strikes it.

    Attributes:
        samples: the numbers of the perturbed runs.
        factor: a step is inside while ``ratio`` is at most this.
        chance: 1 / (n + 1): of n + 1 runs that differ from the baseline by noise of one kind, each is as
            likely to be the farthest at a given step.
        p_value: the share of these runs whose worst step is at least as far out as the candidate's.
        first_outside: the first step that leaves the envelope, or ``None``.
        reading: what follows from it, in words.
    """

    samples: tuple[int, ...]
    factor: float
    chance: float
    p_value: float
    first_outside: int | None
    steps: tuple[EnvelopeStep, ...]
    reading: str

    def to_dict(self) -> dict[str, Any]:
        """Return the member ``envelope``."""
        return {
            "samples": list(self.samples),
            "factor": self.factor,
            "chance": self.chance,
            "p_value": self.p_value,
            "first_outside": self.first_outside,
            "steps": [step.to_dict() for step in self.steps],
            "reading": self.reading,
        }
