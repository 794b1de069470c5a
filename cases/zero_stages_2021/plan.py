"""List what is trained and what is compared: nothing here runs anything."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

SAMPLES: Final = 3


@dataclass(frozen=True)
class Run:
    """Name one training of ``train.py``; by default what was reported, at stage 0.

    Attributes:
        loss_scale: fixed; 0 for a dynamic one that begins with 1024.
        step_before_training: what stage 0's fp16 optimizer does when it is made; ``False`` takes it out.
        sample: which perturbed run it is, or ``None``.
    """

    stage: int = 0
    dtype: str = "fp16"
    contiguous_gradients: bool = False
    reduce_scatter: bool = True
    loss_scale: int = 0
    step_before_training: bool = True
    sample: int | None = None

    @property
    def args(self) -> tuple[str, ...]:
        """Return the script's arguments."""
        flags = {
            "--contiguous-gradients": self.contiguous_gradients,
            "--no-reduce-scatter": not self.reduce_scatter,
            "--no-step-before-training": not self.step_before_training,
        }
        return (
            *("--stage", str(self.stage), "--dtype", self.dtype),
            *("--loss-scale", str(self.loss_scale)),
            *(flag for flag, is_set in flags.items() if is_set),
        )

    @property
    def name(self) -> str:
        """Return a name, of its trace too."""
        words = {
            "contiguous": self.contiguous_gradients,
            "no-scatter": not self.reduce_scatter,
            "scale-1": self.loss_scale == 1,
            "no-step-before": not self.step_before_training,
            f"noise{self.sample}": self.sample is not None,
        }
        chosen = [word for word, is_so in words.items() if is_so]
        return "-".join([f"zero{self.stage}", self.dtype, *chosen])

    def at(self, stage: int) -> Run:
        """Return the same at another stage."""
        return dataclasses.replace(self, stage=stage)

    @property
    def noise(self) -> tuple[Run, ...]:
        """Return it again, from perturbed weights."""
        return tuple(dataclasses.replace(self, sample=number) for number in range(SAMPLES))


@dataclass(frozen=True)
class Pair:
    """Name two runs that owe each other equal losses.

    Attributes:
        setting: what they have in common, in words.
    """

    setting: str
    baseline: Run
    candidate: Run

    @property
    def title(self) -> str:
        """Return the pair in words."""
        return f"{self.setting}: {self.baseline.stage} and {self.candidate.stage}"


def _pairs(setting: str, baseline: Run, candidate: Run, *stages: int) -> tuple[Pair, ...]:
    return tuple(Pair(setting, baseline, candidate.at(stage)) for stage in stages)


REPORTED: Final = Run()
CONTIGUOUS: Final = Run(contiguous_gradients=True)
NO_SCATTER: Final = Run(contiguous_gradients=True, reduce_scatter=False)
FP32: Final = Run(dtype="fp32")
FP32_CONTIGUOUS: Final = Run(dtype="fp32", contiguous_gradients=True)
BF16: Final = Run(dtype="bf16")
BF16_CONTIGUOUS: Final = Run(dtype="bf16", contiguous_gradients=True)
BF16_BEGINS_FRESH: Final = Run(dtype="bf16", step_before_training=False)
BEGINS_FRESH: Final = Run(step_before_training=False)
SCALE_1: Final = Run(loss_scale=1)
SCALE_1_FRESH: Final = Run(loss_scale=1, step_before_training=False)

AS_REPORTED: Final = _pairs("fp16, as reported", REPORTED, REPORTED, 1, 2, 3)
VARIED: Final = (
    *_pairs("fp16, contiguous gradients", REPORTED, CONTIGUOUS, 1, 2, 3),
    *_pairs("fp16, contiguous gradients, no reduce-scatter", REPORTED, NO_SCATTER, 1, 2, 3),
    *_pairs("fp16, contiguous gradients", CONTIGUOUS.at(1), CONTIGUOUS, 2, 3),
    *_pairs("fp32", FP32, FP32, 1, 2, 3),
    *_pairs("fp32, contiguous gradients", FP32, FP32_CONTIGUOUS, 1, 2, 3),
    *_pairs("bf16, contiguous gradients", BF16, BF16_CONTIGUOUS, 1, 2, 3),
)
# release -> what takes its causes out, one after the other.
SWAPPED: Final = {
    "0.14.4": _pairs(
        "fp16, contiguous gradients, no step before training", BEGINS_FRESH, CONTIGUOUS, 1, 2, 3
    ),
    "0.19.8": (
        *_pairs(
            "bf16, contiguous gradients, no step before training",
            BF16_BEGINS_FRESH,
            BF16_CONTIGUOUS,
            1,
            2,
            3,
        ),
        *_pairs(
            "fp16, loss scale 1",
            SCALE_1,
            dataclasses.replace(SCALE_1, contiguous_gradients=True),
            1,
        ),
        *_pairs(
            "fp16, loss scale 1, no step before training",
            SCALE_1_FRESH,
            dataclasses.replace(SCALE_1, contiguous_gradients=True),
            1,
            2,
            3,
        ),
    ),
}


def pairs(release: str) -> tuple[Pair, ...]:
    """Return what is compared on one release."""
    return (*AS_REPORTED, *VARIED, *SWAPPED[release])


def runs(release: str) -> tuple[Run, ...]:
    """Return what must be trained for it, once each, with the noise of every baseline."""
    listed: dict[Run, None] = {}
    for pair in pairs(release):
        listed |= dict.fromkeys((pair.baseline, *pair.baseline.noise, pair.candidate))
    return tuple(listed)
