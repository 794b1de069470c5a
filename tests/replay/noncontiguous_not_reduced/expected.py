"""What leaves the collective is what the rank put in."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size


def run(name: str, size: Size, stage: int, bad: tuple[str, ...]) -> Run:
    reduced = range(size.micro_steps) if stage == 2 else [size.micro_steps - 1]
    wanted = Wanted(
        "reduce",
        "not_reduced",
        each(size, reduced),
        says="What leaves the collective is what rank 0 put in",
    )
    return Run(
        name,
        size,
        bad,
        (NEWEST,),
        (wanted,),
        settings={"stage": stage},
        applies=lambda all_, name: list(all_[name].gradients.sum(axis=1)),
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/pull/8382",
    (
        run("stage2", Size(), 2, ("0.15.1", "0.17.5", "0.19.2", "0.19.7")),
        run("stage1", Size(), 1, ("0.15.1", "0.17.5", "0.19.2", "0.19.7")),
        run("stage1-n3-r3-tied", Size("tied", micro_steps=3, ranks=3), 1, ("0.19.2",)),
    ),
)
