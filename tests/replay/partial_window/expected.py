"""No law is broken; the audit's notes count the micro-steps, and diff names the batches left out."""

from tests.replay.case import NEWEST, Case, Compared, Run
from tests.replay.problem import Size

RELEASES = ("0.17.5", "0.18.3", "0.19.2", NEWEST)
HELD = (
    "held 3 micro-steps (a boundary was claimed at the last), and the loss of each was divided by 4"
)

CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/issues/7439",
    (
        Run("forced", Size(steps=4), right=RELEASES, notes=(f"step 1 {HELD}", f"step 3 {HELD}")),
        Run(
            "mixed",
            Size(steps=3),
            right=RELEASES,
            loop={"forced": False},
            notes=("step 3 was not finished and is not judged (micro-steps recorded of it: 2)",),
        ),
    ),
    (
        Compared(
            ("forced", NEWEST),
            ("mixed", NEWEST),
            "diverged",
            point="master_grad",
            step=1,
            cause="inputs_differ",
            says="the baseline was not given these batches",
            notes=("3 micro-steps against 4 in step 1",),
        ),
    ),
)
