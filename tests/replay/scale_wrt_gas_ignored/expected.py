"""The gradient at the loss is 1/n of what was asked for, from the first micro-step on."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size


def run(name: str, size: Size, stage: int, right: tuple[str, ...]) -> Run:
    wanted = Wanted(
        "seed",
        "scaled",
        each(size, range(size.micro_steps)),
        params=(),
        says=f"that is 1/{size.micro_steps} of what was asked for",
    )
    return Run(
        name,
        size,
        ("0.18.3",),
        right,
        (wanted,),
        settings={"stage": stage},
        weight=1.0,
        applies=lambda all_, name: [all_[name].mean() / size.micro_steps],
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/pull/7724",
    (
        run("stage1", Size(), 1, ("0.18.2", "0.18.5", "0.19.2", NEWEST)),
        run("stage2-n3", Size(micro_steps=3, ranks=3), 2, ("0.17.5", "0.19.2", NEWEST)),
    ),
)
