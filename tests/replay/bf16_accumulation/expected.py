"""No law is broken, and the runs part by rounding only; the report says how much is lost."""

from tests.replay.case import NEWEST, Case, Compared, Run
from tests.replay.problem import Size

MANY = Size(micro_steps=16)


def run(name: str, stage: int, accumulate_in: str | None) -> Run:
    settings = {"stage": stage, "accumulate_in": accumulate_in}
    return Run(name, MANY, right=("0.19.2", NEWEST) if stage == 1 else (NEWEST,), settings=settings)


def compared(stage: int, point: str, release: str) -> Compared:
    return Compared(
        (f"stage{stage}-bf16", release),
        (f"stage{stage}-fp32", release),
        "rounding",
        notes=(
            "micro-steps are added up in bfloat16 by the baseline, in float32 by the candidate",
            f"in step 0, {point} parts by 0 after micro-step 0",
            "the rounding of the coarser sum",
        ),
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/issues/2352",
    (
        run("stage2-bf16", 2, None),
        run("stage2-fp32", 2, "fp32"),
        run("stage1-bf16", 1, None),
        run("stage1-fp32", 1, "fp32"),  # BF16_Optimizer
    ),
    (
        compared(2, "accumulated", NEWEST),
        compared(1, "local_accum", NEWEST),
        compared(1, "local_accum", "0.19.2"),
    ),
)
