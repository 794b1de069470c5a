"""Neither loop breaks a law; one scalar for each micro-batch takes one run's gradients to the other's."""

from tests.replay.case import NEWEST, Case, Compared, Run
from tests.replay.problem import Size

WHY = "loss normalisation, not a fault of ZeRO"

CASE = Case(
    "https://github.com/huggingface/transformers/pull/34191",
    (
        Run("8x1", Size(micro_steps=1), right=(NEWEST,)),
        Run("2x4", right=(NEWEST,)),
        Run("2x4-right", right=(NEWEST,), loop={"over": "step"}),
    ),
    (
        Compared(
            ("2x4", NEWEST),
            ("2x4-right", NEWEST),
            "diverged",
            point="local_grad",
            step=0,
            micro_step=0,
            cause="scaled",
            says=WHY,
        ),
        Compared(
            ("8x1", NEWEST),
            ("2x4", NEWEST),
            "diverged",
            point="master_grad",
            step=0,
            cause="scaled",
            says=WHY,
        ),
        Compared(("8x1", NEWEST), ("2x4-right", NEWEST), "rounding"),
    ),
)
